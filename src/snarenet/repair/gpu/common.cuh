// What the kernels share. Compiled at run time with -DREAL=double or float, and with all numbers that Python knows, too:
// status codes, threads of a block, shares (`definitions` in launching.py).
//
// A block works on shared memory, and every loop is over `thread`, `thread + threads`, ..., so that any number of threads,
// even one, computes the same: tests run these files as C++ on a CPU.

#pragma once

typedef REAL real;

#ifndef SHARED_MEMORY
#define SHARED_MEMORY(name) alignas(16) extern __shared__ real name[]
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif
#ifndef NAMED_BARRIER
#define NAMED_BARRIER(name, threads) asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory")
#endif
#define EACH(i, first, count) for (int i = (first) + (int)threadIdx.x; i < (count); i += (int)blockDim.x)

__device__ inline int least(int a, int b) { return a < b ? a : b; }
__device__ inline int greatest(int a, int b) { return a > b ? a : b; }

// How far g is outside its bounds; not a number where g is not finite.
__device__ inline real outside(real g, real lower, real upper) {
  if (!(fabs(g) < (real)INFINITY)) return (real)NAN;
  real above = g - upper, below = lower - g;
  return (above > 0 ? above : (real)0) - (below > 0 ? below : (real)0);
}

// |r|, infinite where it is not a number, so that a maximum shows it
__device__ inline real size_of(real r) { return r == r ? fabs(r) : (real)INFINITY; }

// How the way back knows a row: 2 below its lower bound, 1 above its upper one or an equality, 0 inside.
__device__ inline signed char code_of(real r, real lower, real upper) {
  return r < 0 ? 2 : r > 0 || lower == upper ? 1 : 0;
}

// finish(i, sums over k < length of term(i, k)) for i < count; threads share the terms of a sum if there are enough.
// `Sum` is a number, or several with += and operator=; `partial` has room for one a thread.
template <typename Sum, typename Term, typename Finish>
__device__ void sums_of(int count, int length, Sum* partial, Term term, Finish finish) {
  if (count == 0) return;
  int threads = blockDim.x, width = least((count + 31) / 32 * 32, threads);
  int slices = threads / width, slice = threadIdx.x / width, lane = threadIdx.x % width;
  for (int first = 0; first < count; first += width) {
    int i = first + lane;
    Sum sum = Sum();
    if (i < count && slice < slices) {
#pragma unroll 8
      for (int k = slice; k < length; k += slices) sum += term(i, k);
    }
    if (slices > 1) {
      partial[threadIdx.x] = sum;
      __syncthreads();
      if (slice == 0 && i < count)
        for (int other = 1; other < slices; other++) sum += partial[other * width + lane];
    }
    if (slice == 0 && i < count) finish(i, sum);
    if (slices > 1) __syncthreads();
  }
}

template <typename Term, typename Finish>
__device__ void sums(int count, int length, real* partial, Term term, Finish finish) {
  sums_of<real>(count, length, partial, term, finish);
}
