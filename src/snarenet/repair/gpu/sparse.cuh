// Systems diag(damping) + J W^-1 J' on one sparse pattern, a block of threads a sample. What is solved, in which form and
// with how much refinement says linalg/sparse.py; the fronts are those of linalg/fronts.py, one after the other and without
// padding, each in shared memory while it is worked on. Every sum has one order, so that results can be reproduced to the
// last bit.

#pragma once

#include "common.cuh"

// What follows from the pattern: numbers, then arrays, each where the numbers after the first ten say (`sparse.py`).
struct Plan {
  int primal, rows, columns, nonzeros, size;     // of J, and of the matrix that is factored
  int entries, pooled, kept, fronts, largest;    // of its lower half, of the pool, of the factor; how many fronts, the widest
  const int *row, *col;                          // of each nonzero, row by row
  const int *row_start, *col_start, *col_entry;  // the nonzeros of each row, and of each column
  const int *start, *first, *second, *node;      // the products of each entry; its node if it is on the diagonal, else -1
  const int *front, *nodes;                      // `Front`s, and their nodes, pivots before border
  const int *target, *source_start, *source;     // where a front is not zero, and what of the pool is added there
};
__device__ inline Plan plan_of(const int* n) {
  const int* at = n + 10;
  return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n + at[0], n + at[1], n + at[2], n + at[3],
          n + at[4], n + at[5], n + at[6], n + at[7], n + at[8], n + at[9], n + at[10], n + at[11], n + at[12], n + at[13]};
}

// A front: `pivots` are eliminated, `border` nodes stay; where its nodes, targets, factor and what it leaves begin.
struct Front {
  int pivots, border, pivot, node, target, targets, factor, left;
  __device__ int all() const { return pivots + border; }
};
__device__ inline Front front_of(const Plan& plan, int k) {
  const int* f = plan.front + 8 * k;
  return {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]};
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
  real *pool, *K, *F;                      // while it is made: entries and what fronts leave, scaled nonzeros, a front
  real *x, *half, *across, *scaled;        // while it is used: size, size, columns, rows,
  real *trial, *rest, *left;               // and three times rows
  real *partial, *buffer;                  // in shared memory: a number a thread, and two of a front's columns
};

// The memory of a sample: `scratch` has room for the larger of both uses, shared memory for a front if it is `inside`.
__device__ Sample sample_of(const Plan& plan, real* shared, real* scratch, int room, int inside) {
  Sample of;
  of.partial = shared, of.buffer = shared + blockDim.x;
  of.pool = scratch + (long long)blockIdx.x * room, of.K = of.pool + plan.pooled;
  of.F = inside ? of.buffer + 2 * plan.largest : of.K + plan.nonzeros;
  of.x = of.pool, of.half = of.x + plan.size, of.across = of.half + plan.size, of.scaled = of.across + plan.columns;
  of.trial = of.scaled + plan.rows, of.rest = of.trial + plan.rows, of.left = of.rest + plan.rows;
  return of;
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

__device__ void assemble(const Plan& plan, const Front& f, const real* pool, real shift, real* F) {
  int s = f.all();
  EACH(i, 0, s * s) F[i] = 0;
  __syncthreads();
  EACH(t, f.target, f.target + f.targets) {
    real sum = 0;
    for (int e = plan.source_start[t]; e < plan.source_start[t + 1]; e++) sum += pool[plan.source[e]];
    int at = plan.target[t];
    F[at] = sum + (at % (s + 1) == 0 && at / (s + 1) < f.pivots ? shift : (real)0);
  }
  __syncthreads();
}

// Eliminates the pivots of F, L D L' of its lower half. What is left of it: D on the diagonal of the pivots, the inverse of L
// in place of L, and the Schur complement. False if a pivot is not positive. `column` has room for two columns: the one
// that is eliminated is read from there, as its place is overwritten meanwhile.
__device__ bool eliminate(int s, int pivots, real* F, real* column) {
  int width = blockDim.x < 16 ? 1 : 16, across = threadIdx.x % width, down = threadIdx.x / width, high = blockDim.x / width;
  EACH(i, 0, s) column[i] = F[i * s];
  __syncthreads();
  for (int k = 0; k < pivots; k++) {  // threads beyond `high` rows of `width` wait
    const real* mine = column + (k & 1) * s;
    real *next = column + (1 - (k & 1)) * s, pivot = mine[k];
    if (!(pivot > 0 && pivot < (real)INFINITY)) return false;
    real inverse = 1 / pivot;
    for (int i = k + 1 + down; i < s && down < high; i += high) {
      real factor = mine[i] * inverse, *line = F + i * s;
      for (int j = across; j <= i; j += width) {
        if (j < k) line[j] -= factor * F[k * s + j];
        else if (j == k) line[j] = -factor;
        else {
          line[j] -= factor * mine[j];
          if (j == k + 1) next[i] = line[j];
        }
      }
    }
    __syncthreads();
  }
  return true;
}

// Keeps T = [D^(-1/2) M; E], the inverse of L below its pivots, column by column, and what the front leaves.
__device__ void keep(const Front& f, const real* F, real* pool, real* T) {
  int s = f.all(), p = f.pivots;
  EACH(e, 0, s * p) {
    int k = e / s, i = e % s;
    real root = i < p ? 1 / sqrt(F[i * s + i]) : (real)1;
    T[f.factor + e] = i < k ? (real)0 : i == k ? root : F[i * s + k] * root;
  }
  EACH(e, 0, f.border * f.border) {
    int a = e / f.border, b = e % f.border;
    if (b <= a) pool[f.left + e] = F[(p + a) * s + p + b];
  }
  __syncthreads();
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
    bool done = true;
    for (int k = 0; k < plan.fronts && done; k++) {
      Front f = front_of(plan, k);
      assemble(plan, f, of.pool, shift, of.F);
      done = eliminate(f.all(), f.pivots, of.F, of.buffer);
      if (done) keep(f, of.F, of.pool, of.T);
    }
    if (done) return true;
    __syncthreads();
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

// x = A^-1 x: T b_p = [half; change of b_u] on the way up, x_p = T'[half; x_u] on the way down.
__device__ void substitute(const Plan& plan, const Sample& of) {
  for (int k = 0; k < plan.fronts; k++) {
    Front f = front_of(plan, k);
    const int *nodes = plan.nodes + f.node, s = f.all();
    const real* T = of.T + f.factor;
    EACH(i, 0, f.pivots) of.buffer[i] = of.x[nodes[i]];
    __syncthreads();
    sums(s, f.pivots, of.partial, [&](int i, int j) { return T[j * s + i] * of.buffer[j]; }, [&](int i, real sum) {
      if (i < f.pivots) of.half[f.pivot + i] = sum;
      else of.x[nodes[i]] += sum;
    });
    __syncthreads();
  }
  for (int k = plan.fronts - 1; k >= 0; k--) {
    Front f = front_of(plan, k);
    const int *nodes = plan.nodes + f.node, s = f.all();
    const real* T = of.T + f.factor;
    EACH(i, 0, s) of.buffer[i] = i < f.pivots ? of.half[f.pivot + i] : of.x[nodes[i]];
    __syncthreads();
    sums(f.pivots, s, of.partial, [&](int j, int i) { return T[j * s + i] * of.buffer[i]; },
         [&](int j, real sum) { of.x[nodes[j]] = sum; });
    __syncthreads();
  }
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
