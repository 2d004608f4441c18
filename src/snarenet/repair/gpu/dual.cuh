// The system of a step by the rows in use, count by count, as `Dual` in linalg/systems.py:
//
//   (J P J' + damping D) w = r - J d_e,   d = d_e + P J'w,   P = Q diag(weights) Q',
//
// where d_e and P come from the constant rows, which are eliminated. No factor is kept for the way back: P J', which it
// needs as well, takes longer to make.

#pragma once
#include "rows.cuh"

// `weight * p * w` is the cotangent of a row's scale.
__device__ inline real weight(real damping) { return damping; }

__device__ inline int numbers(int n) { return 0; }  // of a factor that is kept

// A step from s.y, with the residual s.r of the listed rows, to s.next. What the way back needs of each row: w.
__device__ const real* step(const Rows& rows, Work& s, int count, real damping, real*) {
  int n = rows.n, m = rows.m, e = rows.e, rank = rows.rank;
  sums(rank, e, s.partial, [&](int c, int j) { return rows.left[j * rank + c] * s.r[j]; },
       [&](int c, real sum) { s.a[c] = sum * rows.values[c] / (rows.values[c] * rows.values[c] + damping); });
  EACH(c, rank, n) s.a[c] = 0;
  eliminate(rows, s, damping);
  assemble(rows, s, count, [&](int i, real d) { return d + damping * s.scale[i]; });
  sums(count, e ? n : 0, s.partial, [&](int i, int c) { return s.rotated(i, c) * s.a[c]; },
       [&](int i, real sum) { s.gram(count, i) = s.r[e + s.list[i]] - sum; });
  __syncthreads();
  solve(s, count);
  const real* found = s.M + count * (count + 1) / 2;
  EACH(i, 0, m) s.w[i] = 0;
  __syncthreads();
  EACH(i, 0, count) s.w[s.list[i]] = found[i];
  sums(n, count, s.partial, [&](int c, int i) { return s.rotated(i, c) * found[i]; },
       [&](int c, real sum) { s.t[c] = s.weights[c] * sum + s.a[c]; });
  __syncthreads();
  if (e) {
    sums(n, n, s.partial, [&](int i, int c) { return rows.Qt[c * n + i] * s.t[c]; },
         [&](int i, real d) { s.next[i] = s.y[i] - d; });
  } else {
    EACH(i, 0, n) s.next[i] = s.y[i] - s.t[i];
  }
  __syncthreads();
  return s.w;
}

// The adjoint of a step from s.y to `following`, whose cotangent is v: p and e of the formula in loop/spaces.py.
// s.w has what `step` returned and gets w; q gets p of the constant rows.
__device__ Adjoint adjoint(const Rows& rows, Work& s, int count, real damping, const real* v, const real* following,
                           real* q, const real*) {
  int n = rows.n, e = rows.e, rank = rows.rank;
  if (e) {
    sums(n, n, s.partial, [&](int c, int i) { return rows.Q[i * n + c] * v[i]; },
         [&](int c, real sum) { s.a[c] = sum; });
  } else {
    EACH(i, 0, n) s.a[i] = v[i];
  }
  eliminate(rows, s, damping);
  assemble(rows, s, count, [&](int i, real d) { return d + damping * s.scale[i]; });
  sums(count, n, s.partial, [&](int i, int c) { return s.rotated(i, c) * s.weights[c] * s.a[c]; },
       [&](int i, real sum) { s.gram(count, i) = sum; });
  __syncthreads();
  solve(s, count);
  const real* p = s.M + count * (count + 1) / 2;
  sums(n, count, s.partial, [&](int c, int i) { return s.rotated(i, c) * p[i]; },
       [&](int c, real sum) { s.a[c] -= sum; });  // v - J'p, rotated
  __syncthreads();
  EACH(c, 0, n) s.t[c] = s.weights[c] * s.a[c];
  __syncthreads();
  if (e) {
    sums(n, n, s.partial, [&](int i, int c) { return rows.Qt[c * n + i] * s.t[c]; },
         [&](int i, real sum) { s.weights[i] = sum; });
  } else {
    EACH(i, 0, n) s.weights[i] = s.t[i];
  }
  EACH(c, 0, rank) s.a[c] *= rows.values[c] / (rows.values[c] * rows.values[c] + damping);
  __syncthreads();
  sums(e, rank, s.partial, [&](int j, int c) { return rows.left_t[c * e + j] * s.a[c]; },
       [&](int j, real sum) { q[j] = sum; });
  __syncthreads();
  return {p, s.weights};
}
