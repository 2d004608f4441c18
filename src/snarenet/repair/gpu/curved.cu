// The kernels of `curved.py`, which explains them: one block takes all steps of one sample.

#if PRIMAL
#include "primal.cuh"
#else
#include "dual.cuh"
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(
    const real* constants, int n, int m, int e, int rank, int active, int relative,
    real* value, const real* lowers, const real* uppers, real* scales, const bool* finite, const real* levels,
    int count_levels, int begin, int end, double tol, double finest, double still,
    long long* status, long long* steps, int* moves, real* trail_y, real* records, signed char* codes, int taping,
    real* factors, int keeping) {
  SHARED_MEMORY(memory);
  Rows rows(constants, n, m, e, rank);
  Work s(memory, rows, m);
  long long sample = blockIdx.x, batch = gridDim.x;
  int all = e + m;
  const real *lower = lowers + sample * all, *upper = uppers + sample * all;
  int state = begin ? (int)status[sample] : GOING, taken = begin ? (int)steps[sample] : 0;
  int moved = begin ? moves[sample] : 0;
  if (state != GOING) return;
  EACH(k, 0, n) s.y[k] = value[sample * n + k];
  __syncthreads();
  residual(rows, s, s.y, lower, upper, s.r);
  if (begin == 0) {
    real worst = 0, none = 0, shortest;
    EACH(j, 0, all) worst = fmax(worst, size_of(s.r[j]));
    combine(s.partial, worst, none, none);
    state = !finite[sample] || !(worst < (real)INFINITY) ? NONFINITE : worst <= tol ? CONVERGED : GOING;
    lengths(rows, s, s.y, relative, shortest);
    EACH(i, 0, m) scales[sample * m + i] = s.scale[i] = s.scale[i] < shortest ? shortest : s.scale[i];
  } else {
    EACH(i, 0, m) s.scale[i] = scales[sample * m + i];
  }
  __syncthreads();
  for (int k = begin; k < end && state == GOING; k++) {
    real damping = levels[least(k, count_levels - 1)];
    int count = gather(rows, s, [&](int i) { return !active || s.r[e + i] != 0 || lower[e + i] == upper[e + i]; });
    real* factor = keeping ? factors + ((k - begin) * batch + sample) * numbers(n) : nullptr;
    const real* record = step(rows, s, count, damping, factor);
    residual(rows, s, s.next, lower, upper, s.after);
    real worst = 0, size = 0, length = 0;
    EACH(j, 0, all) {
      real squared = j < e ? rows.scale[j] : s.scale[j - e];
      real length_of = finest > 0 ? fmin(fmax(sqrt(squared), (real)finest), (real)1) : (real)1;
      worst = fmax(worst, size_of(s.after[j]) / length_of);
      size += s.r[j] * s.r[j] / squared;
    }
    EACH(i, 0, n) length += (s.y[i] - s.next[i]) * (s.y[i] - s.next[i]);
    combine(s.partial, worst, size, length);
    bool sound = worst < (real)INFINITY;
    if (taping) {
      long long at = (k - begin) * batch + sample;
      EACH(i, 0, n) trail_y[at * n + i] = s.y[i];
      EACH(i, 0, m) records[at * m + i] = record[i];
      EACH(j, 0, all) codes[at * all + j] = code_of(s.r[j], lower[j], upper[j]);
    }
    taken++;
    if (sound) {
      moved++;
      bool stalled = sqrt(length) * (all + damping) <= (real)still * sqrt(size);
      state = worst <= tol ? CONVERGED : stalled ? STALLED : GOING;
      real *y = s.y, *r = s.r;
      s.y = s.next; s.next = y; s.r = s.after; s.after = r;
    } else {
      state = NONFINITE;
    }
    __syncthreads();
  }
  EACH(i, 0, n) value[sample * n + i] = s.y[i];
  if (threadIdx.x == 0) {
    status[sample] = state;
    steps[sample] = taken;
    moves[sample] = moved;
  }
}

// One stage of `forward` back: `cotangent` is that of the position after it, and becomes that of the one before.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) backward(
    const real* constants, int n, int m, int e, int rank, int active, int relative,
    const real* last, const real* scales, const real* levels, int count_levels, int begin, int end, const int* moves,
    const real* trail_y, const real* records, const signed char* codes,
    real* cotangent, real* to_scale, real* to_lower, real* to_upper, int bounds, const real* factors, int keeping) {
  SHARED_MEMORY(memory);
  Rows rows(constants, n, m, e, rank);
  Work s(memory, rows, m);
  long long sample = blockIdx.x, batch = gridDim.x;
  int all = e + m, stop = least(moves[sample], end);
  real *v = s.next, *q = s.after;
  real most = 0, none = 0;
  EACH(i, 0, n) {
    v[i] = cotangent[sample * n + i];
    if (v[i] != 0) most = 1;
  }
  combine(s.partial, most, none, none);
  if (most == 0 || stop <= begin) return;  // a sample without a share in the loss may have gone too far to go back
  EACH(i, 0, m) s.scale[i] = scales[sample * m + i];
  __syncthreads();
  for (int k = stop - 1; k >= begin; k--) {
    long long at = (k - begin) * batch + sample;
    real damping = levels[least(k, count_levels - 1)];
    const signed char* code = codes + at * all;
    const real* following = k + 1 < stop ? trail_y + (at + batch) * n : last + sample * n;
    EACH(i, 0, n) s.y[i] = trail_y[at * n + i];
    EACH(i, 0, m) s.w[i] = records[at * m + i];
    int count = gather(rows, s, [&](int i) { return !active || code[e + i] != 0; });
    const real* factor = keeping ? factors + at * numbers(n) : nullptr;
    Adjoint found = adjoint(rows, s, count, damping, v, following, q, factor);
    const real *p = found.p, *straight = found.e, *y = s.y;
    EACH(j, 0, e) if (!code[j]) q[j] = 0;
    EACH(i, 0, count) q[e + i] = code[e + s.list[i]] ? p[i] : (real)0;
    __syncthreads();
    sums(n, count, s.partial,
         [&](int c, int i) {
           int row = s.list[i];
           real bend = straight[c] * s.w[row] - (y[c] - following[c]) * p[i] + y[c] * q[e + i];
           return 2 * rows.H[row * n + c] * bend + rows.G[row * n + c] * q[e + i];
         },
         [&](int c, real sum) { v[c] -= sum; });
    __syncthreads();
    sums(n, e, s.partial, [&](int c, int j) { return rows.A[j * n + c] * q[j]; },
         [&](int c, real sum) { v[c] -= sum; });
    EACH(i, 0, count) to_scale[sample * m + s.list[i]] += weight(damping) * p[i] * s.w[s.list[i]];
    if (bounds) {
      EACH(j, 0, e) (code[j] == 2 ? to_lower : to_upper)[sample * all + j] += q[j];
      EACH(i, 0, count) (code[e + s.list[i]] == 2 ? to_lower : to_upper)[sample * all + e + s.list[i]] += q[e + i];
    }
    __syncthreads();
  }
  if (begin == 0 && relative) {  // the scales are functions of the first position, which s.y now is
    real shortest, shared = 0, none = 0, nothing = 0;
    lengths(rows, s, s.y, relative, shortest);
    EACH(i, 0, m) if (s.scale[i] < shortest) shared += to_scale[sample * m + i];
    combine(s.partial, nothing, shared, none);
    shared *= shortest < 1 || shortest > 1 ? (real)VANISHING / m : (real)0;
    EACH(i, 0, m) s.w[i] = (s.scale[i] < shortest ? (real)0 : to_scale[sample * m + i]) + shared;
    __syncthreads();
    sums(n, m, s.partial,
         [&](int c, int i) {
           real H = rows.H[i * n + c];
           return 4 * s.w[i] * H * (2 * H * s.y[c] + rows.G[i * n + c]);
         },
         [&](int c, real sum) { v[c] += sum; });
    __syncthreads();
  }
  EACH(i, 0, n) cotangent[sample * n + i] = v[i];
}
