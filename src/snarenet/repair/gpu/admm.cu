// The kernels of `admm.py`, which explains them.

#include "blocks.cuh"

// ADMM from the image A y to the multipliers s of the projection; codes say which rows each iteration cut off.
template <int S>
__device__ void approach_of(
    int rows, int batch, const real* images, const real* lowers, const real* uppers, const real* K, int iterations,
    double relaxation, real* multipliers, signed char* codes, int taping) {
  SHARED_MEMORY(memory);
  Room<S, APPROACH_ARRAYS> room(memory, rows);
  real *z = room.next(), *s = room.next(), *t = room.next(), *fixed = room.next(), *low = room.next(), *high = room.next();
  Samples<S>* partial = room.partial();
  long long first = (long long)blockIdx.x * S * rows;
  int here = least(S, batch - (int)blockIdx.x * S);
  auto cut = [&](int at, real v, int k) {
    signed char code = v > high[at] ? 1 : v < low[at] ? 2 : 0;
    z[at] = code == 1 ? high[at] : code == 2 ? low[at] : v;
    if (taping && at < here * rows) codes[(long long)k * batch * rows + first + at] = code;
  };
  EACH(at, 0, S * rows) {
    bool there = at < here * rows;
    t[at] = there ? images[first + at] : (real)0;
    low[at] = there ? lowers[first + at] : (real)0;
    high[at] = there ? uppers[first + at] : (real)0;
    s[at] = 0;
    cut(at, t[at], 0);
  }
  __syncthreads();
  product<S>(K, rows, t, partial, [&](int i, int j, real sum) { fixed[i * rows + j] = sum; });
  for (int k = 1; k <= iterations; k++) {
    EACH(at, 0, S * rows) t[at] = z[at] - s[at];
    __syncthreads();
    product<S>(K, rows, t, partial, [&](int i, int j, real sum) {
      int at = i * rows + j;
      real v = (real)relaxation * (fixed[at] + t[at] - sum) + (1 - (real)relaxation) * z[at] + s[at];
      cut(at, v, k);
      s[at] = v - z[at];
    });
  }
  EACH(at, 0, here * rows) multipliers[first + at] = s[at];
}

// The cotangents of image and bounds from that of the multipliers, which becomes the image's.
template <int S>
__device__ void approach_back_of(
    int rows, int batch, real* cotangent, const real* K, int iterations, double relaxation, const signed char* codes,
    real* to_lower, real* to_upper) {
  SHARED_MEMORY(memory);
  Room<S, APPROACH_BACK_ARRAYS> room(memory, rows);
  real *z = room.next(), *s = room.next(), *v = room.next(), *fixed = room.next(), *lower = room.next(), *upper = room.next();
  Samples<S>* partial = room.partial();
  long long first = (long long)blockIdx.x * S * rows;
  int here = least(S, batch - (int)blockIdx.x * S);
  auto bound = [&](int at, real share, int k) {  // the cotangent of what was cut off in iteration k goes to the bound
    signed char code = at < here * rows ? codes[(long long)k * batch * rows + first + at] : 0;
    if (code) (code == 2 ? lower : upper)[at] += share;
    return code != 0;
  };
  EACH(at, 0, S * rows) {
    s[at] = at < here * rows ? cotangent[first + at] : (real)0;
    z[at] = fixed[at] = lower[at] = upper[at] = 0;
  }
  __syncthreads();
  for (int k = iterations; k >= 1; k--) {
    EACH(at, 0, S * rows) {
      v[at] = bound(at, z[at] - s[at], k) ? s[at] : z[at];
      fixed[at] += (real)relaxation * v[at];
    }
    __syncthreads();
    product<S>(K, rows, v, partial, [&](int i, int j, real sum) {
      int at = i * rows + j;
      real t = (real)relaxation * (v[at] - sum);
      z[at] = (1 - (real)relaxation) * v[at] + t;
      s[at] = v[at] - t;
    });
  }
  product<S>(K, rows, fixed, partial, [&](int i, int j, real sum) {
    int at = i * rows + j;
    v[at] = sum + (bound(at, z[at], 0) ? (real)0 : z[at]);
  });
  EACH(at, 0, here * rows) {
    cotangent[first + at] = v[at];
    to_lower[first + at] = lower[at];
    to_upper[first + at] = upper[at];
  }
}

#define APPROACH(S)                                                                                                     \
  extern "C" __global__ void approach##S(                                                                               \
      int rows, int batch, const real* images, const real* lower, const real* upper, const real* K, int iterations,     \
      double relaxation, real* multipliers, signed char* codes, int taping) {                                        \
    approach_of<S>(rows, batch, images, lower, upper, K, iterations, relaxation, multipliers, codes, taping);        \
  }                                                                                                                     \
  extern "C" __global__ void approach_back##S(                                                                          \
      int rows, int batch, real* cotangent, const real* K, int iterations, double relaxation, const signed char* codes, \
      real* to_lower, real* to_upper) {                                                                                 \
    approach_back_of<S>(rows, batch, cotangent, K, iterations, relaxation, codes, to_lower, to_upper);                  \
  }
APPROACH(1) APPROACH(2) APPROACH(4)
