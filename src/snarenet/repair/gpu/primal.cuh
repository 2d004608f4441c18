// The system of a step by the variables, n by n, as `Primal` in linalg/systems.py:
//
//   (damping I + A'S^-1 A + J'D^-1 J) d = A'S^-1 r_e + J'D^-1 r,
//
// where A'S^-1 A, of the constant rows, is made once. As there, w stands for damping times w of the formulas in
// loop/spaces.py, D^-1 (r - J d), and e for their e over the damping, so that nothing is divided by a small one.
// J is never kept: a few rows at a time are added to the matrix, so that two blocks have room on a multiprocessor.

#pragma once
#include "rows.cuh"

// `weight * p * w` is the cotangent of a row's scale.
__device__ inline real weight(real damping) { return 1; }

// The weights D^-1 of the listed rows.
__device__ void weigh(Work& s, int count) { EACH(i, 0, count) s.weights[i] = 1 / s.scale[s.list[i]]; }

// The matrix, by these weights. A residual r adds J'D^-1 r to the right-hand side, the row below, as if it were one
// more column of J.
__device__ void assemble_normal(const Rows& rows, Work& s, int count, real damping, const real* r) {
  int n = rows.n, width = r ? n + 1 : n;
#pragma unroll 8
  EACH(at, 0, n * (n + 1) / 2) s.M[at] = rows.e ? rows.normal[at] : (real)0;
  auto add = [&](int x, int z, real sum) { s.gram(x, z) += sum; };
  for (int first = 0; first < count; first += s.at_a_time) {
    int some = least(s.at_a_time, count - first);
    jacobian(rows, s, first, some, s.W, s.pitch, 1);
    if (r) EACH(i, 0, some) s.W[i * s.pitch + n] = r[s.list[first + i]];
    __syncthreads();
    if (width > 32) multiply<4>(s, some, s.weights + first, width, add);
    else multiply<2>(s, some, s.weights + first, width, add);
  }
  __syncthreads();
  EACH(c, 0, n) s.diagonal[c] = s.gram(c, c) += damping;
  __syncthreads();
}

// A factor as it is kept for the way back: entries and pivots. How many they are, and there and back again.
__device__ inline int numbers(int n) { return n * (n + 3) / 2; }

__device__ void keep(const Work& s, int n, real* factor) {
  int entries = n * (n + 1) / 2;
#pragma unroll 4
  EACH(i, 0, entries) factor[i] = s.M[i];
  EACH(i, 0, n) factor[entries + i] = s.pivot[i];
}

__device__ void recall(Work& s, int n, const real* factor) {
  int entries = n * (n + 1) / 2;
#pragma unroll 2
  EACH(i, 0, entries) s.M[i] = factor[i];
  EACH(i, 0, n) s.pivot[i] = factor[entries + i];
  __syncthreads();
}

// A step from s.y, with the residual s.r of the listed rows, to s.next. What the way back needs of each row: r.
// `factor` is where the factor is kept for it, if there is room.
__device__ const real* step(const Rows& rows, Work& s, int count, real damping, real* factor) {
  int n = rows.n;
  const real* r = s.r + rows.e;
  sums(n, rows.e, s.partial, [&](int c, int j) { return rows.weighted[j * n + c] * s.r[j]; },
       [&](int c, real sum) { s.gram(n, c) = sum; });
  weigh(s, count);
  assemble_normal(rows, s, count, damping, r);
  solve(s, n);
  if (factor) keep(s, n, factor);
  EACH(c, 0, n) s.next[c] = s.y[c] - s.gram(n, c);
  __syncthreads();
  return r;
}

// The adjoint of a step from s.y to `following`, whose cotangent is v: p and e of the formula in loop/spaces.py.
// s.w has what `step` returned and gets w; q gets p of the constant rows; `factor` is that of the step, if it was kept.
__device__ Adjoint adjoint(const Rows& rows, Work& s, int count, real damping, const real* v, const real* following,
                           real* q, const real* factor) {
  int n = rows.n, m = rows.m, e = rows.e;
  EACH(c, 0, n) {
    s.gram(n, c) = v[c];
    s.t[c] = s.y[c] - following[c];
  }
  weigh(s, count);
  if (factor) {
    recall(s, n, factor);
    substitute<false>(s, n);
    substitute<true>(s, n);
  } else {
    assemble_normal(rows, s, count, damping, nullptr);
    solve(s, n);
  }
  const real *straight = &s.gram(n, 0), *d = s.t;
  real* p = s.r;
  sums_of<Pair>(count, n, (Pair*)s.partial,
                [&](int i, int k) {
                  int at = k * m + s.list[i];
                  real J = 2 * rows.Ht[at] * s.y[k] + rows.Gt[at];
                  return Pair{J * straight[k], J * d[k]};
                },
                [&](int i, Pair along) {
                  real& w = s.w[s.list[i]];
                  p[i] = along.first * s.weights[i];
                  w = (w - along.second) * s.weights[i];
                });
  sums(e, n, s.partial, [&](int j, int k) { return rows.weighted_t[k * e + j] * straight[k]; },
       [&](int j, real sum) { q[j] = sum; });
  __syncthreads();
  return {p, straight};
}
