// Systems diag(damping) + J W^-1 J' on one sparse pattern, a block of threads a sample. What is solved, in which form and
// with how much refinement says linalg/sparse.py. Fronts (linalg/fronts.py) come level by level: the large ones of a level
// one after the other, a block each, then the small ones side by side, a warp each. Every sum has one order, so that
// results can be reproduced to the last bit.

#pragma once

#include "common.cuh"

// What follows from the pattern: numbers, then arrays, each where the numbers after the first eleven say (`sparse.py`).
struct Plan {
  int primal, rows, columns, nonzeros, size;     // of J, and of the matrix that is factored
  int entries, pooled, kept, levels, largest;    // of its lower half, of the pool, of the factor; of the tree; a front's
  int slots;                                     // borders of all fronts together
  const int *row, *col;                          // of each nonzero, row by row
  const int *row_start, *col_start, *col_entry;  // the nonzeros of each row, and of each column
  const int *start, *first, *second, *node;      // the products of each entry; its node if it is on the diagonal, else -1
  const int *level;                              // where its large fronts begin, its small ones, and the next level's
  const int *front, *nodes;                      // `Front`s, and their nodes, pivots before border
  const int *target, *source_start, *source;     // where a front is not zero, and what of the pool is added there
  const int *slot_start, *slot;                  // the slots of each node: in whose borders it is
};
__device__ inline Plan plan_of(const int* n) {
  const int* at = n + 11;
  return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n + at[0], n + at[1], n + at[2], n + at[3],
          n + at[4], n + at[5], n + at[6], n + at[7], n + at[8], n + at[9], n + at[10], n + at[11], n + at[12], n + at[13],
          n + at[14], n + at[15], n + at[16]};
}

// A front: `pivots` are eliminated, `border` nodes stay; where its pivots, nodes, targets, factor, what it leaves, and its
// slots begin.
struct Front {
  int pivots, border, pivot, node, target, targets, factor, left, slot;
  __device__ int all() const { return pivots + border; }
};
__device__ inline Front front_of(const Plan& plan, int k) {
  const int* f = plan.front + 9 * k;
  return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8]};
}

// Threads that work on one front: the whole block, or a warp of it.
struct Team {
  int rank, size;
  bool block;
  __device__ void sync() const { if (block) __syncthreads(); else __syncwarp(); }
};
#define TEAM_EACH(i, first, count) for (int i = (first) + team.rank; i < (count); i += team.size)

// visit(front, team, number of the team) for all fronts, level by level, upwards or downwards.
template <typename Visit>
__device__ void each_front(const Plan& plan, bool up, Visit visit) {
  Team block = {(int)threadIdx.x, (int)blockDim.x, true}, warp = {(int)threadIdx.x % WARP, WARP, false};
  int mine = threadIdx.x / WARP, warps = blockDim.x / WARP;
  for (int step = 0; step < plan.levels; step++) {
    const int* level = plan.level + 2 * (up ? step : plan.levels - 1 - step);
    for (int k = level[0]; k < level[1]; k++) visit(front_of(plan, k), block, 0);
    for (int k = level[1] + mine; k < level[2] && mine < warps; k += warps) visit(front_of(plan, k), warp, mine);
    __syncthreads();
  }
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
  real *T, *length;                        // the factor, and the length of a typical row in the metric
  real *pool, *K;                          // while it is made: entries and what fronts leave, scaled nonzeros
  real *x, *half, *slots;                  // while it is used: size, size, slots,
  real *across, *scaled;                   // columns, rows,
  real *trial, *rest, *left;               // and three times rows
  real *partial;                           // in shared memory: a number a thread,
  real* vector;                            // the vector of a front, or of one a warp; and, if there is room,
  real* fronts;                            // a front, or one a warp if they are small, each with two more columns
};

// Numbers that `vector` has room for; `sparse.py` knows, too.
__device__ inline int vectors(const Plan& plan) {
  int warps = blockDim.x / WARP * SMALL;
  return warps > plan.largest ? warps : plan.largest;
}

// The memory of a sample: `scratch` has room for the larger of both uses, shared memory for fronts if they are `inside`.
__device__ Sample sample_of(const Plan& plan, real* shared, real* scratch, int room, int inside) {
  Sample of;
  of.partial = shared, of.vector = shared + blockDim.x;
  of.pool = scratch + (long long)blockIdx.x * room, of.K = of.pool + plan.pooled;
  of.fronts = inside ? of.vector + vectors(plan) : of.K + plan.nonzeros;
  of.x = of.pool, of.half = of.x + plan.size, of.slots = of.half + plan.size, of.across = of.slots + plan.slots;
  of.scaled = of.across + plan.columns;
  of.trial = of.scaled + plan.rows, of.rest = of.trial + plan.rows, of.left = of.rest + plan.rows;
  return of;
}

// Where a team has its front, in `of.fronts`.
__device__ inline real* place_of(const Sample& of, const Team& team, int number) {
  return of.fronts + (team.block ? 0 : number * (SMALL * SMALL + 2 * SMALL));
}

// The systems of this block's sample, of batches.
__device__ void read_factor(
    const Plan& plan, Sample& of, const real* values, const real* damping, const real* weights, real* transfer,
    real* length) {
  long long sample = blockIdx.x;
  of.values = values + sample * plan.nonzeros, of.damping = damping + sample * plan.rows;
  of.weights = weights ? weights + sample * plan.columns : nullptr;
  of.T = transfer + sample * plan.kept, of.length = length + sample;
}

// ---- factor

__device__ void assemble(const Plan& plan, const Front& f, const Team& team, const real* pool, real shift, real* F) {
  int s = f.all();
  TEAM_EACH(i, 0, s * s) F[i] = 0;
  team.sync();
  TEAM_EACH(t, f.target, f.target + f.targets) {
    real sum = 0;
    for (int e = plan.source_start[t]; e < plan.source_start[t + 1]; e++) sum += pool[plan.source[e]];
    int at = plan.target[t];
    F[at] = sum + (at % (s + 1) == 0 && at / (s + 1) < f.pivots ? shift : (real)0);
  }
  team.sync();
}

// Eliminates the pivots of F, L D L' of its lower half. What is left of it: D on the diagonal of the pivots, the inverse of L
// in place of L, and the Schur complement. False if a pivot is not positive. `column` has room for two columns: the one
// that is eliminated is read from there, as its place is overwritten meanwhile.
__device__ bool eliminate(int s, int pivots, const Team& team, real* F, real* column) {
  int width = team.size < 32 ? 1 : team.size < 256 ? 8 : 16;
  int across = team.rank % width, down = team.rank / width, high = team.size / width;
  TEAM_EACH(i, 0, s) column[i] = F[i * s];
  team.sync();
  for (int k = 0; k < pivots; k++) {
    const real *__restrict__ mine = column + (k & 1) * s, *__restrict__ above = F + k * s;
    real *__restrict__ next = column + (1 - (k & 1)) * s, pivot = mine[k];
    if (!(pivot > 0 && pivot < (real)INFINITY)) return false;
    real inverse = 1 / pivot;
    for (int i = k + 1 + down; i < s && down < high; i += high) {  // threads beyond `high` rows of `width` wait
      real factor = mine[i] * inverse, *__restrict__ line = F + i * s;
#pragma unroll 4
      for (int j = across; j <= i; j += width) {
        real other = j < k ? above[j] : j == k ? (real)1 : mine[j], found = (j == k ? (real)0 : line[j]) - factor * other;
        line[j] = found;
        if (j == k + 1) next[i] = found;
      }
    }
    team.sync();
  }
  return true;
}

// Keeps T = [D^(-1/2) M; E], the inverse of L below its pivots, column by column, and what the front leaves.
__device__ void keep(const Front& f, const Team& team, const real* F, real* column, real* pool, real* T) {
  int s = f.all(), p = f.pivots;
  TEAM_EACH(i, 0, s) column[i] = i < p ? 1 / sqrt(F[i * s + i]) : (real)1;
  team.sync();
  TEAM_EACH(e, 0, s * p) {
    int k = e / s, i = e % s;
    T[f.factor + e] = i < k ? (real)0 : i == k ? column[i] : F[i * s + k] * column[i];
  }
  TEAM_EACH(e, 0, f.border * f.border) {
    int a = e / f.border, b = e % f.border;
    if (b <= a) pool[f.left + e] = F[(p + a) * s + p + b];
  }
  team.sync();
}

// Makes the factor; false, and a factor of not-a-numbers, where there is none. A matrix that is singular to working
// precision gets the smallest shift that it needs, a share of its mean diagonal from `least` on, up to `most`.
__device__ bool factorise(const Plan& plan, const Sample& of, double least, double most) {
  EACH(e, 0, plan.nonzeros) of.K[e] = of.weights ? of.values[e] * sqrt(of.weights[plan.col[e]]) : of.values[e];
  __syncthreads();
  real squares = total(plan.nonzeros, of.partial, [&](int e) { return of.K[e] * of.K[e]; });
  if (threadIdx.x == 0) *of.length = sqrt(squares / (plan.rows > 0 ? plan.rows : 1));
  if (plan.primal) {
    EACH(e, 0, plan.nonzeros) of.K[e] /= sqrt(of.damping[plan.row[e]]);
    __syncthreads();
  }
  EACH(e, 0, plan.entries) {
    real sum = plan.node[e] < 0 ? (real)0 : plan.primal ? (real)1 : of.damping[plan.node[e]];
    for (int t = plan.start[e]; t < plan.start[e + 1]; t++) sum += of.K[plan.first[t]] * of.K[plan.second[t]];
    of.pool[e] = sum;
  }
  __syncthreads();
  real shift = 0, mean = 0;
  for (double share = least;; share *= 100) {
    bool failed = false;  // of this thread's fronts
    each_front(plan, true, [&](const Front& f, const Team& team, int number) {
      real *F = place_of(of, team, number), *column = F + f.all() * f.all();
      assemble(plan, f, team, of.pool, shift, F);
      if (eliminate(f.all(), f.pivots, team, F, column)) keep(f, team, F, column, of.pool, of.T);
      else failed = true;
      team.sync();
    });
    if (total(blockDim.x, of.partial, [&](int) { return (real)failed; }) == 0) return true;
    if (shift == 0)
      mean = total(plan.entries, of.partial, [&](int e) { return plan.node[e] < 0 ? (real)0 : of.pool[e]; }) / plan.size;
    if (share >= most || !(mean < (real)INFINITY)) break;
    shift = (real)share * mean;
  }
  EACH(e, 0, plan.kept) of.T[e] = (real)NAN;
  __syncthreads();
  return false;
}

// ---- products

// out = J v, for the rows of one sample
__device__ void times(const Plan& plan, const real* values, const real* v, real* out) {
  EACH(i, 0, plan.rows) {
    real sum = 0;
    for (int e = plan.row_start[i]; e < plan.row_start[i + 1]; e++) sum += values[e] * v[plan.col[e]];
    out[i] = sum;
  }
}

// out = J'w, or |J|'|w|
template <bool ABSOLUTE>
__device__ void transposed(const Plan& plan, const real* values, const real* w, real* out) {
  EACH(j, 0, plan.columns) {
    real sum = 0;
    for (int t = plan.col_start[j]; t < plan.col_start[j + 1]; t++) {
      int e = plan.col_entry[t];
      real term = values[e] * w[plan.row[e]];
      sum += ABSOLUTE ? fabs(term) : term;
    }
    out[j] = sum;
  }
}

// ---- solve

// x = A^-1 x: T b_p = [half; change of b_u] on the way up, where changes wait in slots; x_p = T'[half; x_u] on the way down.
__device__ void substitute(const Plan& plan, const Sample& of) {
  each_front(plan, true, [&](const Front& f, const Team& team, int number) {
    const int *nodes = plan.nodes + f.node, s = f.all();
    real *b = of.vector + (team.block ? 0 : number * SMALL), *T = of.T + f.factor;
    TEAM_EACH(i, 0, f.pivots) {
      int node = nodes[i];
      real sum = of.x[node];
      for (int t = plan.slot_start[node]; t < plan.slot_start[node + 1]; t++) sum += of.slots[plan.slot[t]];
      b[i] = sum;
    }
    team.sync();
    TEAM_EACH(i, 0, s) {
      real sum = 0;
#pragma unroll 4
      for (int j = 0; j < f.pivots; j++) sum += T[j * s + i] * b[j];
      (i < f.pivots ? of.half[f.pivot + i] : of.slots[f.slot + i - f.pivots]) = sum;
    }
    team.sync();
  });
  each_front(plan, false, [&](const Front& f, const Team& team, int number) {
    const int *nodes = plan.nodes + f.node, s = f.all();
    real *b = of.vector + (team.block ? 0 : number * SMALL), *T = of.T + f.factor;
    TEAM_EACH(i, 0, s) b[i] = i < f.pivots ? of.half[f.pivot + i] : of.x[nodes[i]];
    team.sync();
    TEAM_EACH(j, 0, f.pivots) {
      real sum = 0;
#pragma unroll 4
      for (int i = 0; i < s; i++) sum += T[j * s + i] * b[i];
      of.x[nodes[j]] = sum;
    }
    team.sync();
  });
}

// out = the system's inverse times rhs, by the factor alone
__device__ void once(const Plan& plan, const Sample& of, const real* rhs, real* out) {
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
  transposed<false>(plan, of.values, of.scaled, of.x);
  __syncthreads();
  if (of.weights) {
    EACH(j, 0, plan.columns) of.x[j] *= sqrt(of.weights[j]);
    __syncthreads();
  }
  substitute(plan, of);
  if (of.weights) {
    EACH(j, 0, plan.columns) of.x[j] *= sqrt(of.weights[j]);
    __syncthreads();
  }
  times(plan, of.values, of.x, out);
  __syncthreads();
  EACH(i, 0, plan.rows) out[i] = of.scaled[i] - out[i] / of.damping[i];
  __syncthreads();
}

// out = rhs - the system's matrix times w; returns its length
__device__ real residual(const Plan& plan, const Sample& of, const real* rhs, const real* w, real* out) {
  transposed<false>(plan, of.values, w, of.across);
  __syncthreads();
  if (of.weights) {
    EACH(j, 0, plan.columns) of.across[j] *= of.weights[j];
    __syncthreads();
  }
  times(plan, of.values, of.across, out);
  __syncthreads();
  EACH(i, 0, plan.rows) out[i] = rhs[i] - (out[i] + of.damping[i] * w[i]);
  __syncthreads();
  return sqrt(total(plan.rows, of.partial, [&](int i) { return out[i] * out[i]; }));
}

// found = the system's inverse times rhs, refined until its backward error is one of rounding or no longer halves, at most
// `refinements` times.
__device__ void solve_refined(
    const Plan& plan, const Sample& of, const real* rhs, real* found, int refinements, double rounding) {
  once(plan, of, rhs, found);
  if (refinements == 0) return;
  transposed<true>(plan, of.values, found, of.across);  // the size of the numbers that cancel in a residual
  __syncthreads();
  real reach = sqrt(total(plan.columns, of.partial, [&](int j) {
    return of.across[j] * of.across[j] * (of.weights ? of.weights[j] : (real)1);
  }));
  reach = sqrt(total(plan.rows, of.partial, [&](int i) { return rhs[i] * rhs[i]; })) + *of.length * reach;
  real goal = (real)rounding * reach, size = residual(plan, of, rhs, found, of.rest);
  for (int k = 0; k < refinements && size > goal; k++) {
    once(plan, of, of.rest, of.trial);
    EACH(i, 0, plan.rows) of.trial[i] += found[i];
    __syncthreads();
    real now = residual(plan, of, rhs, of.trial, of.left);
    if (!(now < size)) break;
    EACH(i, 0, plan.rows) found[i] = of.trial[i], of.rest[i] = of.left[i];
    __syncthreads();
    bool halved = now < size / 2;
    size = now;
    if (!halved) break;
  }
}
