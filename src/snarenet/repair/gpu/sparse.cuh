// Systems diag(damping) + J W^-1 J' on one sparse pattern, a block of threads a sample. What is solved, in which form and
// with how much refinement says linalg/sparse.py. Fronts (linalg/fronts.py) come stage by stage: those of a level of about the
// same size, side by side, each taken by a team of some warps. Every sum has one order, so that results can be reproduced
// to the last bit.

#pragma once

#include "common.cuh"

// What follows from the pattern: numbers, then arrays, each where the numbers after the first eleven say (`sparse.py`).
struct Plan {
  int primal, rows, columns, nonzeros, size;   // of J, and of the matrix that is factored
  int entries, pooled, kept, stages, at_hand;  // of its lower half, of the pool, of the factor; of the tree; `vector`'s
  int slots;                                   // borders of all fronts together
  const int *row, *col, *row_start;            // of each nonzero, row by row; where the rows begin
  const int *column, *col_start;               // the columns, those of most nonzeros first; where these begin
  const int *col_entry, *col_row;              // the nonzeros of the columns in that order, and their rows
  const int *entry, *start, *first, *second;   // the entries, those of most products first; the products of each
  const int *node;                             // its node if it is on the diagonal, else -1
  const int *stage;                            // three numbers each: its first front, warps of a team, nodes of a front
  const int *front, *nodes;                    // `Front`s, and their nodes, pivots before border
  const int *slot_start, *slot;                // the slots of each node: in whose borders it is; the tables' last
  const int *round_start, *target, *source;    // of what is added to a front: its place, and that in the pool
};
__device__ inline Plan plan_of(const int* n) {
  const int* at = n + 11;
  return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n + at[0], n + at[1], n + at[2], n + at[3],
          n + at[4], n + at[5], n + at[6], n + at[7], n + at[8], n + at[9], n + at[10], n + at[11], n + at[12], n + at[13],
          n + at[14], n + at[15], n + at[16], n + at[17], n + at[18], n + at[19]};
}

// A front: `pivots` are eliminated, `border` nodes stay; where its pivots, nodes, rounds, factor, what it leaves, and its
// slots begin. In a `round` no place gets two numbers.
struct Front {
  int pivots, border, pivot, node, round, rounds, factor, left, slot;
  __device__ int all() const { return pivots + border; }
};
__device__ inline Front front_of(const Plan& plan, int k) {
  const int* f = plan.front + 9 * k;
  return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8]};
}

// Threads that work on one front: some warps of a block, its team of this number, or all of it.
struct Team {
  int rank, size, number;
  __device__ void sync() const {
    if (size == WARP) __syncwarp();
    else if (size == (int)blockDim.x) __syncthreads();
    else NAMED_BARRIER(1 + number, size);
  }
};
#define TEAM_EACH(i, first, count) for (int i = (first) + team.rank; i < (count); i += team.size)

// How a team stands before a matrix: `width` threads beside each other in each of `high` rows; the others wait.
struct Tile {
  int width, high, across, down;
};
__device__ inline Tile tile_of(const Team& team) {
  int width = team.size < 32 ? 1 : team.size < 256 ? 8 : 16;
  return {width, team.size / width, team.rank % width, team.rank / width};
}
#define TILE_ROWS(i, first, count) \
  for (int i = (first) + tile.down; i < (count) && tile.down < tile.high; i += tile.high)
#define TILE_COLUMNS(j, count) for (int j = tile.across; j < (count); j += tile.width)

// use(i, load(i)) for i = first, first + step, ... < end. A thread waits for memory once for AHEAD of them.
#define AHEAD 4
template <typename Load, typename Use>
__device__ void ahead(int first, int end, int step, Load load, Use use) {
  for (; first < end; first += AHEAD * step) {
    decltype(load(0)) found[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) found[u] = load(least(first + u * step, end - 1));
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      if (first + u * step < end) use(first + u * step, found[u]);
  }
}

// sum + term(t) for first <= t < end, in order. A thread waits for memory once for several of them.
template <int MANY, typename Sum, typename Term>
__device__ inline void add_some(Sum& sum, int& first, int end, Term term) {
  for (; first + MANY <= end; first += MANY) {
    Sum found[MANY];
#pragma unroll
    for (int u = 0; u < MANY; u++) found[u] = term(first + u);
#pragma unroll
    for (int u = 0; u < MANY; u++) sum += found[u];
  }
}
template <typename Sum, typename Term>
__device__ inline Sum sum_of(Sum sum, int first, int end, Term term) {
  add_some<8>(sum, first, end, term);
  add_some<4>(sum, first, end, term);
  add_some<2>(sum, first, end, term);
  add_some<1>(sum, first, end, term);
  return sum;
}

// visit(front, team, room) for all fronts, stage by stage, upwards or downwards: a team's room is for so many nodes.
template <typename Visit>
__device__ void each_front(const Plan& plan, bool up, Visit visit) {
  for (int step = 0; step < plan.stages; step++) {
    const int* stage = plan.stage + 3 * (up ? step : plan.stages - 1 - step);
    int size = stage[1] * WARP, teams = blockDim.x / size, end = stage[3];
    Team team = {(int)threadIdx.x % size, size, (int)threadIdx.x / size};
    for (int k = stage[0] + team.number; k < end && team.number < teams; k += teams) visit(front_of(plan, k), team, stage[2]);
    __syncthreads();
  }
}

// finish(i, the sum of term(i, k) for k < length) for i < count, by a team whose threads share the terms of a sum if there
// are enough of them. ALONG: neighbours have the next k, else the next i. `partial` has room for one number a thread.
template <bool ALONG, typename Term, typename Finish>
__device__ void team_sums(const Team& team, real* partial, int count, int length, Term term, Finish finish) {
  int slices = count > 0 ? least(SHARING, team.size / count) : 1;
  if (slices <= 1) {
    TEAM_EACH(i, 0, count) {
      real sum = 0;
#pragma unroll 4
      for (int k = 0; k < length; k++) sum += term(i, k);
      finish(i, sum);
    }
  } else {
    int i = ALONG ? team.rank / slices : team.rank % count, slice = ALONG ? team.rank % slices : team.rank / count;
    bool mine = i < count && slice < slices;
    real sum = 0;
    if (mine) {
#pragma unroll 4
      for (int k = slice; k < length; k += slices) sum += term(i, k);
    }
    partial[threadIdx.x] = sum;
    team.sync();
    if (mine && slice == 0) {
      for (int t = 1; t < slices; t++) sum += partial[threadIdx.x + (ALONG ? t : t * count)];
      finish(i, sum);
    }
  }
  team.sync();
}

// The sum of term(i) for i < count, for all threads; `partial` has room for one number a thread.
template <typename Term>
__device__ real total(int count, real* partial, Term term) {
  real sum = 0;
  EACH(i, 0, count) sum += term(i);
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int width = blockDim.x; width > 1;) {
    int half = (width + 1) / 2;
    if ((int)threadIdx.x < width - half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
    width = half;
  }
  real found = partial[0];
  __syncthreads();
  return found;
}

// One sample at work: its numbers, its factor, and memory.
struct Sample {
  const real *values, *damping, *weights;  // of J's nonzeros, of rows, of variables: the inverse ones, or null
  real *T, *kept, *length;                 // the factor at work, for later, and the length of a typical row in the metric
  real *pool, *K;                          // while it is made: entries and what fronts leave, scaled nonzeros
  real *x, *half, *slots;                  // while it is used: size, size, slots,
  real *across, *scaled;                   // columns, rows,
  real *trial, *rest, *left;               // and three times rows
  real *partial;                           // in shared memory: a number a thread,
  real* vector;                            // the vector of a front for every team; and, if there is room,
  real* fronts;                            // its front, with four more columns
};

// What all threads of a block share, at the beginning of its memory: 50 pointers would leave a thread few registers.
struct Work {
  Plan plan;
  Sample of;
};
static_assert(sizeof(Work) <= WORK, "`sparse.py` says how large it may be");

// The work of this block. `scratch` has room for the larger of both uses of memory. What is `inside` is in shared memory,
// where the fronts and a solution's vectors have one place: TABLES, which are copied there, the FACTOR, which is too if it
// is `made`, FRONTS, SOLVING (`x`, `half` and `slots`) and with it perhaps VECTORS (the others).
__device__ Work& set_up(
    real* shared, const int* places, const real* values, const real* damping, const real* weights, real* transfer,
    real* length, real* scratch, int room, int inside, bool made) {
  Work& work = *(Work*)shared;
  shared += WORK / sizeof(real);
  const Plan given = plan_of(places);
  long long sample = blockIdx.x;
  real* free = shared + blockDim.x + given.at_hand;
  int *tables = (int*)free, count = given.round_start - given.stage;
  if (inside & TABLES) {
    EACH(i, 0, count) tables[i] = given.stage[i];
    free += (count * sizeof(int) + sizeof(real) - 1) / sizeof(real);
  }
  real *kept = transfer + sample * given.kept, *T = inside & FACTOR ? free : kept;
  if (inside & FACTOR) {
    if (made) ahead(threadIdx.x, given.kept, blockDim.x, [&](int e) { return kept[e]; }, [&](int e, real v) { T[e] = v; });
    free += given.kept;
  }
  if (threadIdx.x == 0) {
    Plan& plan = work.plan;
    Sample& of = work.of;
    plan = given;
    if (inside & TABLES) {
      plan.stage = tables, plan.front = tables + (given.front - given.stage);
      plan.nodes = tables + (given.nodes - given.stage);
      plan.slot_start = tables + (given.slot_start - given.stage), plan.slot = tables + (given.slot - given.stage);
    }
    of.values = values + sample * plan.nonzeros, of.damping = damping + sample * plan.rows;
    of.weights = weights ? weights + sample * plan.columns : nullptr;
    of.T = T, of.kept = kept, of.length = length + sample;
    of.partial = shared, of.vector = shared + blockDim.x;
    of.pool = scratch + sample * room, of.K = of.pool + plan.pooled;
    of.fronts = inside & FRONTS ? free : of.K + plan.nonzeros;
    of.x = inside & SOLVING ? free : of.pool, of.half = of.x + plan.size, of.slots = of.half + plan.size;
    of.across = (inside & VECTORS ? of.x : of.pool) + 2 * plan.size + plan.slots, of.scaled = of.across + plan.columns;
    of.trial = of.scaled + plan.rows, of.rest = of.trial + plan.rows, of.left = of.rest + plan.rows;
  }
  __syncthreads();
  return work;
}

// ---- factor

__device__ void assemble(const Plan& plan, const Front& f, const Team& team, const real* pool, real shift, real* F) {
  struct Part {
    int at;
    real value;
  };
  int s = f.all();
  TEAM_EACH(i, 0, s * s) F[i] = 0;
  team.sync();
  for (int round = f.round; round < f.round + f.rounds; round++) {
    ahead(
        plan.round_start[round] + team.rank, plan.round_start[round + 1], team.size,
        [&](int t) { return Part{plan.target[t], pool[plan.source[t]]}; },
        [&](int, const Part& part) { F[part.at] += part.value; });
    team.sync();
  }
  if (shift == 0) return;
  TEAM_EACH(i, 0, f.pivots) F[i * (s + 1)] += shift;
  team.sync();
}

// Row k + 1 loses its share of row k, and gets its pivot.
__device__ inline void finish_row(const Team& team, int k, int s, real* F, real share, real diagonal) {
  real *first = F + k * s, *second = first + s;
  TEAM_EACH(j, 0, k + 2) second[j] = j < k ? second[j] - share * first[j] : j == k ? -share : diagonal;
}

// Eliminates the pivots of F, L D L' of its lower half, two at a time. What is left of it: D on the diagonal of the pivots,
// the inverse of L in place of L, and the Schur complement. False if a pivot is not positive. `columns` has room for four:
// c1 and c2, which are eliminated, are read from there, as their places are overwritten meanwhile, and so are the next two.
// Rows below lose a times row k and b times row k + 1, [a b] = [c1 c2] A^-1 with the block A of both pivots. Row k + 1
// is that of before: it loses its own share of row k a turn later, when nobody reads it any more.
__device__ bool eliminate(int s, int pivots, const Team& team, real* F, real* columns) {
  const Tile tile = tile_of(team);
  TEAM_EACH(i, 0, s) columns[i] = F[i * s], columns[s + i] = F[i * s + (pivots > 1)];
  team.sync();
  real share = 0, diagonal = 1;  // of row k + 1: of row k, and its pivot
  for (int k = 0, turn = 0; k < pivots; k += 2, turn = 1 - turn) {
    bool two = k + 1 < pivots;
    const real *__restrict__ c1 = columns + 2 * turn * s, *__restrict__ c2 = c1 + s;
    const real *__restrict__ above = F + k * s, *__restrict__ below = above + (two ? s : 0);
    real *__restrict__ next = columns + 2 * (1 - turn) * s, p = c1[k], inverse = 1 / p;
    if (k > 0) finish_row(team, k - 2, s, F, share, diagonal);
    share = two ? c1[k + 1] * inverse : (real)0, diagonal = two ? c2[k + 1] - c1[k + 1] * share : (real)1;
    if (!(p > 0 && p < (real)INFINITY && diagonal > 0 && diagonal < (real)INFINITY)) return false;
    real other = two ? 1 / diagonal : (real)0;
    for (int top = k + 1 + two + tile.down; top < s && tile.down < tile.high; top += AHEAD * tile.high) {  // so many rows at a time
      real a[AHEAD], b[AHEAD];
      int last = least(top + (AHEAD - 1) * tile.high, s - 1);
#pragma unroll
      for (int u = 0; u < AHEAD; u++) {
        int i = least(top + u * tile.high, s - 1);
        b[u] = two ? (c2[i] - share * c1[i]) * other : (real)0, a[u] = c1[i] * inverse - share * b[u];
      }
      TILE_COLUMNS(j, last + 1) {
        bool one = j == k, another = two && j == k + 1;
        real x = j < k ? above[j] : one ? (real)1 : another ? (real)0 : c1[j], found[AHEAD];
        real y = j < k ? below[j] : another ? (real)1 : one || !two ? (real)0 : c2[j];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
          int i = least(top + u * tile.high, s - 1);
          found[u] = (one || another ? (real)0 : F[i * s + j]) - a[u] * x - b[u] * y;
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
          int i = top + u * tile.high;
          if (i < s && j <= i) {
            F[i * s + j] = found[u];
            if (j == k + 2) next[i] = found[u];
            if (j == k + 3) next[s + i] = found[u];
          }
        }
      }
    }
    team.sync();
  }
  if (pivots > 1 && pivots % 2 == 0) {
    finish_row(team, pivots - 2, s, F, share, diagonal);
    team.sync();
  }
  return true;
}

// Keeps T = [D^(-1/2) M; E], the inverse of L below its pivots, column by column, and what the front leaves.
__device__ void keep(const Front& f, const Team& team, const Sample& of, const real* F, real* column) {
  const Tile tile = tile_of(team);
  int s = f.all(), p = f.pivots;
  TEAM_EACH(i, 0, s) column[i] = i < p ? 1 / sqrt(F[i * s + i]) : (real)1;
  team.sync();
  TILE_ROWS(k, 0, p) {
    TILE_COLUMNS(i, s) {
      int e = f.factor + k * s + i;
      of.kept[e] = of.T[e] = i < k ? (real)0 : i == k ? column[i] : F[i * s + k] * column[i];
    }
  }
  TILE_ROWS(a, 0, f.border) {
    TILE_COLUMNS(b, a + 1) of.pool[f.left + a * f.border + b] = F[(p + a) * s + p + b];
  }
  team.sync();
}

// Makes the factor; false, and a factor of not-a-numbers, where there is none. A matrix that is singular to working
// precision gets the smallest shift that it needs, a share of its mean diagonal from `least` on, up to `most`.
__device__ __noinline__ bool factorise(const Plan& plan, const Sample& of, double least, double most) {
  struct Scaled {
    real value, weight, damping;
  };
  real mine = 0;  // squares of this thread's nonzeros
  ahead(
      threadIdx.x, plan.nonzeros, blockDim.x,
      [&](int e) {
        real weight = of.weights ? of.weights[plan.col[e]] : (real)1;
        return Scaled{of.values[e], weight, plan.primal ? of.damping[plan.row[e]] : (real)1};
      },
      [&](int e, const Scaled& found) {
        real value = found.value * sqrt(found.weight);
        mine += value * value;
        of.K[e] = plan.primal ? value / sqrt(found.damping) : value;
      });
  real squares = total(blockDim.x, of.partial, [&](int) { return mine; });
  if (threadIdx.x == 0) *of.length = sqrt(squares / (plan.rows > 0 ? plan.rows : 1));
  EACH(e, 0, plan.entries) {
    int node = plan.node[e], at = plan.entry[e];
    real first = node < 0 ? (real)0 : plan.primal ? (real)1 : of.damping[node];
    of.pool[at] = sum_of(first, plan.start[e], plan.start[e + 1], [&](int t) { return of.K[plan.first[t]] * of.K[plan.second[t]]; });
  }
  __syncthreads();
  real shift = 0, mean = 0;
  for (double share = least;; share *= 100) {
    bool failed = false;  // of this thread's fronts
    each_front(plan, true, [&](const Front& f, const Team& team, int room) {
      real *F = of.fronts + team.number * (room * room + 4 * room), *column = F + f.all() * f.all();
      assemble(plan, f, team, of.pool, shift, F);
      if (eliminate(f.all(), f.pivots, team, F, column)) keep(f, team, of, F, column);
      else failed = true;
      team.sync();
    });
    if (total(blockDim.x, of.partial, [&](int) { return (real)failed; }) == 0) return true;
    if (shift == 0)
      mean = total(plan.entries, of.partial, [&](int e) { return plan.node[e] < 0 ? (real)0 : of.pool[plan.entry[e]]; }) / plan.size;
    if (share >= most || !(mean < (real)INFINITY)) break;
    shift = (real)share * mean;
  }
  EACH(e, 0, plan.kept) of.kept[e] = of.T[e] = (real)NAN;
  __syncthreads();
  return false;
}

// ---- products

// finish(i, (J v)_i) for the rows of one sample
template <typename Finish>
__device__ void row_sums(const Plan& plan, const real* values, const real* v, Finish finish) {
  EACH(i, 0, plan.rows)
    finish(i, sum_of((real)0, plan.row_start[i], plan.row_start[i + 1], [&](int e) { return values[e] * v[plan.col[e]]; }));
}

// finish(j, (J'w)_j) for its columns, those of most nonzeros first; `Sum` is a number, or `Sized`
template <typename Sum = real, typename Finish>
__device__ void column_sums(const Plan& plan, const real* values, const real* w, Finish finish) {
  EACH(c, 0, plan.columns)
    finish(plan.column[c], sum_of(Sum(), plan.col_start[c], plan.col_start[c + 1], [&](int t) {
      return Sum(values[plan.col_entry[t]] * w[plan.col_row[t]]);
    }));
}

// A sum, and that of the sizes of its terms.
struct Sized {
  real sum, size;
  __device__ Sized(real term = 0) : sum(term), size(fabs(term)) {}
  __device__ void operator+=(const Sized& other) { sum += other.sum, size += other.size; }
};

// ---- solve

// x = A^-1 x: T b_p = [half; change of b_u] on the way up, where changes wait in slots; x_p = T'[half; x_u] on the way down.
__device__ __noinline__ void substitute(const Plan& plan, const Sample& of) {
  each_front(plan, true, [&](const Front& f, const Team& team, int room) {
    const int *nodes = plan.nodes + f.node, s = f.all();
    real *b = of.vector + team.number * room, *T = of.T + f.factor;
    TEAM_EACH(i, 0, f.pivots) {
      int node = nodes[i];
      real sum = of.x[node];
      for (int t = plan.slot_start[node]; t < plan.slot_start[node + 1]; t++) sum += of.slots[plan.slot[t]];
      b[i] = sum;
    }
    team.sync();
    team_sums<false>(
        team, of.partial, s, f.pivots, [&](int i, int j) { return T[j * s + i] * b[j]; },
        [&](int i, real sum) { (i < f.pivots ? of.half[f.pivot + i] : of.slots[f.slot + i - f.pivots]) = sum; });
  });
  each_front(plan, false, [&](const Front& f, const Team& team, int room) {
    const int *nodes = plan.nodes + f.node, s = f.all();
    real *b = of.vector + team.number * room, *T = of.T + f.factor;
    TEAM_EACH(i, 0, s) b[i] = i < f.pivots ? of.half[f.pivot + i] : of.x[nodes[i]];
    team.sync();
    team_sums<true>(
        team, of.partial, f.pivots, s, [&](int j, int i) { return T[j * s + i] * b[i]; },
        [&](int j, real sum) { of.x[nodes[j]] = sum; });
  });
}

// out = the system's inverse times rhs, by the factor alone
__device__ __noinline__ void once(const Plan& plan, const Sample& of, const real* rhs, real* out) {
  if (!plan.primal) {
    EACH(i, 0, plan.size) of.x[i] = rhs[i];
    __syncthreads();
    substitute(plan, of);
    EACH(i, 0, plan.size) out[i] = of.x[i];
    __syncthreads();
    return;
  }
  EACH(i, 0, plan.rows) of.scaled[i] = rhs[i] / of.damping[i];
  __syncthreads();
  column_sums(plan, of.values, of.scaled, [&](int j, real sum) { of.x[j] = of.weights ? sum * sqrt(of.weights[j]) : sum; });
  __syncthreads();
  substitute(plan, of);
  if (of.weights) {
    EACH(j, 0, plan.columns) of.x[j] *= sqrt(of.weights[j]);
    __syncthreads();
  }
  row_sums(plan, of.values, of.x, [&](int i, real sum) { out[i] = of.scaled[i] - sum / of.damping[i]; });
  __syncthreads();
}

// out = rhs - the system's matrix times w; its length, and that of what is added up in J'w, in the metric
__device__ __noinline__ Sized residual(const Plan& plan, const Sample& of, const real* rhs, const real* w, real* out) {
  real mine = 0;  // squares of this thread's columns
  column_sums<Sized>(plan, of.values, w, [&](int j, const Sized& found) {
    real weight = of.weights ? of.weights[j] : (real)1;
    of.across[j] = found.sum * weight;
    mine += found.size * found.size * weight;
  });
  Sized length;
  length.size = sqrt(total(blockDim.x, of.partial, [&](int) { return mine; }));
  mine = 0;  // of its rows
  row_sums(plan, of.values, of.across, [&](int i, real sum) {
    real left = rhs[i] - (sum + of.damping[i] * w[i]);
    out[i] = left;
    mine += left * left;
  });
  length.sum = sqrt(total(blockDim.x, of.partial, [&](int) { return mine; }));
  return length;
}

// found, the system's inverse times rhs, is refined until its backward error is one of rounding or no longer halves, at most
// `refinements` times.
__device__ __noinline__ void refine(
    const Plan& plan, const Sample& of, const real* rhs, real* found, int refinements, double rounding) {
  if (refinements == 0) return;
  real given = sqrt(total(plan.rows, of.partial, [&](int i) { return rhs[i] * rhs[i]; }));
  const Sized first = residual(plan, of, rhs, found, of.rest);
  real goal = (real)rounding * (given + *of.length * first.size), size = first.sum;  // by the numbers that cancel
  for (int k = 0; k < refinements && size > goal; k++) {
    once(plan, of, of.rest, of.trial);
    EACH(i, 0, plan.rows) of.trial[i] += found[i];
    __syncthreads();
    real now = residual(plan, of, rhs, of.trial, of.left).sum;
    if (!(now < size)) break;
    EACH(i, 0, plan.rows) found[i] = of.trial[i], of.rest[i] = of.left[i];
    __syncthreads();
    bool halved = now < size / 2;
    size = now;
    if (!halved) break;
  }
}

// found = the system's inverse times rhs, refined
__device__ inline void solve_refined(
    const Plan& plan, const Sample& of, const real* rhs, real* found, int refinements, double rounding) {
  once(plan, of, rhs, found);
  refine(plan, of, rhs, found, refinements, rounding);
}
