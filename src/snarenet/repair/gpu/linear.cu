// The kernels of `linear.py`, which explains them: constant linear rows, and matrices for all samples.

#include "blocks.cuh"

template <int S>
__device__ void forward_of(
    int rows, int batch, real* position, const real* lowers, const real* uppers, const real* transfers, int count,
    const real* strictness, const bool* finite, int max_steps, double first_tol, double tol,
    signed char* codes, long long* status, long long* steps, int taping) {
  SHARED_MEMORY(memory);
  Room<S, FORWARD_ARRAYS> room(memory, rows);
  real *z = room.next(), *trial = room.next(), *r = room.next(), *low = room.next(), *high = room.next();
  real* score = room.next();
  Samples<S>* partial = room.partial();
  long long first = (long long)blockIdx.x * S * rows;
  int here = least(S, batch - (int)blockIdx.x * S);  // samples that there are
  real worst[S];
  long long state[S], taken[S];
  EACH(at, 0, S * rows) {
    bool there = at < here * rows;
    z[at] = there ? position[first + at] : (real)0;
    low[at] = there ? lowers[first + at] : (real)0;
    high[at] = there ? uppers[first + at] : (real)0;
    r[at] = outside(z[at], low[at], high[at]);
    score[at] = size_of(r[at]);
  }
  __syncthreads();
  maxima<S>(score, rows, (real*)partial, worst);
  bool going = false;
  for (int s = 0; s < S; s++) {
    bool sound = s < here && finite[blockIdx.x * S + s] && worst[s] < (real)INFINITY;
    state[s] = !sound ? NONFINITE : worst[s] <= first_tol ? CONVERGED : GOING;
    taken[s] = 0;
    going |= state[s] == GOING;
  }
  for (int k = 0; k < max_steps && going; k++) {
    const real* matrix = transfers + (long long)least(k, count - 1) * rows * rows;
    product<S>(matrix, rows, r, partial, [&](int s, int j, real sum) {
      int at = s * rows + j;
      trial[at] = z[at] - sum;
      score[at] = size_of(outside(trial[at], low[at], high[at])) * strictness[j];
    });
    maxima<S>(score, rows, (real*)partial, worst);
    going = false;
    for (int s = 0; s < S; s++) {
      if (state[s] != GOING) continue;
      bool moved = worst[s] < (real)INFINITY;
      state[s] = !moved ? NONFINITE : worst[s] <= tol ? CONVERGED : GOING;
      taken[s]++;
      going |= state[s] == GOING;
      EACH(j, 0, rows) {
        int at = s * rows + j;
        if (taping)
          codes[(long long)k * batch * rows + first + at] = moved ? code_of(r[at], low[at], high[at]) : 0;
        if (moved) {
          z[at] = trial[at];
          r[at] = outside(z[at], low[at], high[at]);
        }
      }
    }
    __syncthreads();
  }
  EACH(at, 0, here * rows) position[first + at] = z[at];
  if (threadIdx.x == 0)
    for (int s = 0; s < here; s++) {
      status[blockIdx.x * S + s] = state[s];
      steps[blockIdx.x * S + s] = taken[s];
    }
}

// All steps from the last to the first; `transposed` are the transposes of the forward matrices.
template <int S>
__device__ void backward_of(
    int rows, int batch, real* cotangent, const signed char* codes, const long long* steps, const real* transposed,
    int count, real* to_lower, real* to_upper, int bounds) {
  SHARED_MEMORY(memory);
  Room<S, BACKWARD_ARRAYS> room(memory, rows);
  real *b = room.next(), *q = room.next(), *lower = room.next(), *upper = room.next();
  Samples<S>* partial = room.partial();
  long long first = (long long)blockIdx.x * S * rows;
  int here = least(S, batch - (int)blockIdx.x * S), last = 0;
  EACH(at, 0, S * rows) {
    b[at] = at < here * rows ? cotangent[first + at] : (real)0;
    lower[at] = upper[at] = 0;
  }
  for (int s = 0; s < here; s++) {
    int taken = (int)steps[blockIdx.x * S + s];
    last = taken > last ? taken : last;
  }
  __syncthreads();
  for (int k = last - 1; k >= 0; k--) {
    const real* matrix = transposed + (long long)least(k, count - 1) * rows * rows;
    product<S>(matrix, rows, b, partial, [&](int s, int j, real sum) { q[s * rows + j] = sum; });
    for (int s = 0; s < here; s++) {
      if (k >= steps[blockIdx.x * S + s]) continue;
      EACH(j, 0, rows) {
        int at = s * rows + j;
        signed char code = codes[(long long)k * batch * rows + first + at];
        if (code == 0) continue;
        b[at] -= q[at];
        (code == 2 ? lower : upper)[at] += q[at];
      }
    }
    __syncthreads();
  }
  EACH(at, 0, here * rows) {
    cotangent[first + at] = b[at];
    if (bounds) {
      to_lower[first + at] = lower[at];
      to_upper[first + at] = upper[at];
    }
  }
}

// One sample after a step to `trial`, with any number of rows: its status, and, if it moves, position and residual.
extern "C" __global__ void settle(
    int rows, const real* trials, real* positions, real* residuals, const real* lowers, const real* uppers,
    const real* strictness, const bool* finite, double limit, signed char* codes, long long* status, long long* steps,
    int first, int taping) {
  SHARED_MEMORY(partial);
  long long sample = blockIdx.x, start = sample * rows;
  long long before = first ? GOING : status[sample];
  if (before != GOING) {  // the way back passes by a step with codes of zero
    if (taping && !first) EACH(j, 0, rows) codes[start + j] = 0;
    return;
  }
  real worst[1], mine = 0;
  EACH(j, 0, rows) {
    real size = size_of(outside(trials[start + j], lowers[start + j], uppers[start + j]));
    mine = fmax(mine, first ? size : size * strictness[j]);
  }
  partial[threadIdx.x] = mine;
  __syncthreads();
  maxima<1>(partial, blockDim.x, partial + blockDim.x, worst);
  bool moved = worst[0] < (real)INFINITY;
  if (threadIdx.x == 0) {
    bool sound = moved && (!first || finite[sample]);
    status[sample] = !sound ? NONFINITE : worst[0] <= limit ? CONVERGED : GOING;
    steps[sample] = first ? 0 : steps[sample] + 1;
  }
  EACH(j, 0, rows) {
    long long at = start + j;
    if (taping && !first) codes[at] = moved ? code_of(residuals[at], lowers[at], uppers[at]) : 0;
    if (moved || first) {
      positions[at] = trials[at];
      residuals[at] = outside(trials[at], lowers[at], uppers[at]);
    }
  }
}

// One step back, any number of rows: the violated rows of the product are taken from the cotangent, and given to bounds.
extern "C" __global__ void pull(
    int size, real* cotangent, const real* product, const signed char* codes, real* to_lower, real* to_upper, int bounds) {
  long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= size || codes[at] == 0) return;
  cotangent[at] -= product[at];
  if (bounds) (codes[at] == 2 ? to_lower : to_upper)[at] += product[at];
}

#define FORWARD(S)                                                                                                      \
  extern "C" __global__ void forward##S(                                                                                \
      int rows, int batch, real* position, const real* lower, const real* upper, const real* transfers, int count,      \
      const real* strictness, const bool* finite, int max_steps, double first_tol, double tol, signed char* codes,      \
      long long* status, long long* steps, int taping) {                                                             \
    forward_of<S>(rows, batch, position, lower, upper, transfers, count, strictness, finite, max_steps, first_tol, tol, \
                  codes, status, steps, taping);                                                                     \
  }
#define BACKWARD(S)                                                                                                     \
  extern "C" __global__ void backward##S(                                                                               \
      int rows, int batch, real* cotangent, const signed char* codes, const long long* steps, const real* transposed,   \
      int count, real* to_lower, real* to_upper, int bounds) {                                                          \
    backward_of<S>(rows, batch, cotangent, codes, steps, transposed, count, to_lower, to_upper, bounds);                \
  }
FORWARD(1) FORWARD(2) FORWARD(4)
BACKWARD(1) BACKWARD(2) BACKWARD(4)
