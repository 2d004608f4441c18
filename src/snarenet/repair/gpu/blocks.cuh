// Blocks that take a few samples each, which read each number of a matrix together; `blocks.py` launches them.

#pragma once
#include "common.cuh"

template <int S>
struct Samples {
  real of[S] = {};
  __device__ Samples& operator+=(const Samples& other) {
#pragma unroll
    for (int s = 0; s < S; s++) of[s] += other.of[s];
    return *this;
  }
};

// out(s, j, sum over i of r[s][i] matrix[i][j]) for the S samples of a block and all rows j.
template <int S, typename Out>
__device__ void product(const real* matrix, int rows, const real* r, Samples<S>* partial, Out out) {
  sums_of<Samples<S>>(
      rows, rows, partial,
      [&](int j, int i) {
        Samples<S> term;
        real number = matrix[i * rows + j];
#pragma unroll
        for (int s = 0; s < S; s++) term.of[s] = r[s * rows + i] * number;
        return term;
      },
      [&](int j, const Samples<S>& sum) {
#pragma unroll
        for (int s = 0; s < S; s++) out(s, j, sum.of[s]);
      });
  __syncthreads();
}

// The largest of each sample's numbers, in `most`.
template <int S>
__device__ void maxima(const real* numbers, int rows, real* partial, real* most) {
  EACH(at, 0, S * SLICE) {
    real largest = 0;
    for (int j = at % SLICE; j < rows; j += SLICE) largest = fmax(largest, numbers[at / SLICE * rows + j]);
    partial[at] = largest;
  }
  __syncthreads();
  for (int s = 0; s < S; s++) {
    most[s] = 0;
    for (int i = 0; i < SLICE; i++) most[s] = fmax(most[s], partial[s * SLICE + i]);
  }
  __syncthreads();
}

// Shared memory: so many arrays of S x rows, then room for the sums.
template <int S, int ARRAYS>
struct Room {
  real *at, *sums;
  int rows;
  __device__ Room(real* at, int rows) : at(at), sums(at + ARRAYS * S * rows), rows(rows) {}
  __device__ real* next() {
    real* here = at;
    at += S * rows;
    return here;
  }
  __device__ Samples<S>* partial() { return (Samples<S>*)sums; }
};
