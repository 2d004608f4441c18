// One block a sample: the rows in use and their Gram matrix in shared memory; `rows.py` describes rows for it.

#pragma once
#include "common.cuh"

#define CHUNK 16  // rows of the Jacobian that are rotated at a time
#define PADDED 18  // their distance in shared memory: even, so that two are read at once, and not a multiple of 16

// Constant rows: m rows y'diag(H_i)y + G_i y, and e eliminated ones, A = diag(scale)^(1/2) U S V'. Q = [V, the rest].
struct Rows {
  int n, m, e, rank;
  const real *H, *G, *A, *Q;      // (m, n), (m, n), (e, n), (n, n)
  const real *Ht, *Gt, *At, *Qt;  // transposed
  const real *left, *left_t;      // diag(scale)^(-1/2) U: (e, rank), and transposed
  const real *values, *scale;     // (n) singular values, 0 beyond the rank; (e) scales

  __device__ Rows(const real* at, int n, int m, int e, int rank) : n(n), m(m), e(e), rank(rank) {
    int square = e ? n * n : 0;
    H = at; G = at += m * n; Ht = at += m * n; Gt = at += m * n;
    A = at += m * n; At = at += e * n; Q = at += e * n; Qt = at += square;
    left = at += square; left_t = at += e * rank; values = at += e * rank; scale = at += n;
  }
};

// What a block keeps in shared memory.
struct Work {
  real *y, *next, *r, *after, *w, *scale, *a, *t, *weights, *diagonal, *pivot, *partial, *chunk, *W, *M;
  int* list;       // the rows in use
  unsigned* bits;  // a bit for each row: is it in use?
  int pitch;       // distance of the rows of W: odd, against bank conflicts
  void* end;

  // For m rows of n variables, `all` with the eliminated ones; `room`: the most rows that may be in use at a time.
  __device__ Work(real* at, int n, int m, int all, int room, int threads) {
    pitch = n | 1;
    chunk = at; y = at += all > m ? PADDED * n : 0; next = at += n; a = at += n; t = at += n; weights = at += n;
    r = at += n; after = at += all; w = at += all; scale = at += m; diagonal = at += m; pivot = at += m;
    partial = at += m; W = at += 4 * threads; M = at += room * pitch;
    list = (int*)(at + (room + 1) * (room + 2) / 2); bits = (unsigned*)(list + m);
    end = bits + (m + 31) / 32;
  }
  __device__ Work(real* at, const Rows& rows, int room)
      : Work(at, rows.n, rows.m, rows.e + rows.m, room, blockDim.x) {}

  // the lower triangle, row by row
  __device__ real& gram(int i, int j) { return M[i * (i + 1) / 2 + j]; }
};

// The residual of all rows at y.
__device__ void residual(const Rows& rows, Work& s, const real* y, const real* lower, const real* upper, real* r) {
  int m = rows.m, e = rows.e;
  sums(e + m, rows.n, s.partial,
       [&](int j, int k) {
         if (j < e) return rows.At[k * e + j] * y[k];
         return (rows.Ht[k * m + j - e] * y[k] + rows.Gt[k * m + j - e]) * y[k];
       },
       [&](int j, real g) { r[j] = outside(g, lower[j], upper[j]); });
  __syncthreads();
}

// The maximum of the first and the sums of two other numbers of all threads.
__device__ void combine(real* partial, real& most, real& first, real& second) {
  int threads = blockDim.x, me = threadIdx.x, slices = (threads + SLICE - 1) / SLICE;
  real *a = partial, *b = a + threads, *c = b + threads;
  a[me] = most; b[me] = first; c[me] = second;
  __syncthreads();
  most = first = second = 0;
  if (me < slices)
    for (int i = me; i < threads; i += slices) {
      most = fmax(most, a[i]); first += b[i]; second += c[i];
    }
  __syncthreads();
  if (me < slices) { a[me] = most; b[me] = first; c[me] = second; }
  __syncthreads();
  most = first = second = 0;
  for (int i = 0; i < slices; i++) {
    most = fmax(most, a[i]); first += b[i]; second += c[i];
  }
  __syncthreads();
}

// The rows that are in use, in order, into s.list; their number.
template <typename Use>
__device__ int gather(const Rows& rows, Work& s, Use use) {
  int words = (rows.m + 31) / 32, count = 0;
  EACH(i, 0, words) s.bits[i] = 0;
  __syncthreads();
  EACH(i, 0, rows.m) if (use(i)) atomicOr(s.bits + i / 32, 1u << i % 32);
  __syncthreads();
  EACH(i, 0, rows.m) {
    unsigned word = s.bits[i / 32];
    if (!(word >> i % 32 & 1)) continue;
    int place = __popc(word & ((1u << i % 32) - 1));
    for (int j = 0; j < i / 32; j++) place += __popc(s.bits[j]);
    s.list[place] = i;
  }
  for (int j = 0; j < words; j++) count += __popc(s.bits[j]);
  __syncthreads();
  return count;
}

// The diagonal of P = Q diag(weights) Q', which eliminated rows leave to the others.
__device__ void eliminate(const Rows& rows, Work& s, real damping) {
  EACH(k, 0, rows.n) {
    real square = rows.e ? rows.values[k] * rows.values[k] : (real)0;
    s.weights[k] = square > 0 ? damping / (square + damping) : (real)1;
  }
}

// W = J Q for the listed rows, and J P J', P = Q diag(weights) Q', with shifted(i, d) in the place of its diagonal d.
template <typename Shift>
__device__ void assemble(const Rows& rows, Work& s, int count, Shift shifted) {
  int n = rows.n, threads = blockDim.x, me = threadIdx.x;
  int width = least((n + 31) / 32 * 32, threads), groups = threads / width, group = me / width, lane = me % width;
  for (int first = 0; first < count; first += CHUNK) {
    int some = least(CHUNK, count - first);
    for (int k = lane; k < n && group < groups; k += width) {
      real twice = 2 * s.y[k];
#pragma unroll 8
      for (int i = group; i < CHUNK; i += groups) {
        real value = 0;
        if (i < some) {
          int at = s.list[first + i] * n + k;
          value = rows.H[at] * twice + rows.G[at];
        }
        if (rows.e) s.chunk[k * PADDED + i] = value;
        else if (i < some) s.W[(first + i) * s.pitch + k] = value;
      }
    }
    if (rows.e == 0) continue;
    __syncthreads();
    for (int c = lane; c < n && group < groups; c += width)
      for (int part = group * 8; part < some; part += groups * 8) {
        real sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll 8
        for (int k = 0; k < n; k++) {
          real rotation = rows.Q[k * n + c];
          const real* J = s.chunk + k * PADDED + part;
#pragma unroll
          for (int i = 0; i < 8; i++) sum[i] += J[i] * rotation;
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
          if (part + i < some) s.W[(first + part + i) * s.pitch + c] = sum[i];
      }
    __syncthreads();
  }
  __syncthreads();
  int blocks = (count + 1) / 2, tiles = blocks * (blocks + 1) / 2;  // two by two
  width = least((tiles + 31) / 32 * 32, threads);
  if (count == 0) return;
  int slices = threads / width, slice = me / width;
  for (int start = 0; start < tiles; start += width) {
    int at = start + me % width, i = 0, j = 0;
    real sum[4] = {0, 0, 0, 0};
    if (at < tiles && slice < slices) {
      int row = (int)((sqrt(8.0f * at + 1) - 1) / 2);
      while ((row + 1) * (row + 2) / 2 <= at) row++;
      while (row * (row + 1) / 2 > at) row--;
      i = 2 * row; j = 2 * (at - row * (row + 1) / 2);
      const real *u0 = s.W + i * s.pitch, *u1 = s.W + least(i + 1, count - 1) * s.pitch;
      const real *v0 = s.W + j * s.pitch, *v1 = s.W + least(j + 1, count - 1) * s.pitch;
#pragma unroll 4
      for (int k = slice; k < n; k += slices) {
        real weight = s.weights[k], x0 = u0[k] * weight, x1 = u1[k] * weight, z0 = v0[k], z1 = v1[k];
        sum[0] += x0 * z0; sum[1] += x0 * z1; sum[2] += x1 * z0; sum[3] += x1 * z1;
      }
    }
    if (slices > 1) {
      for (int part = 0; part < 4; part++) s.partial[part * threads + me] = sum[part];
      __syncthreads();
      if (slice == 0)
        for (int other = 1; other < slices; other++)
          for (int part = 0; part < 4; part++) sum[part] += s.partial[part * threads + other * width + me];
    }
    if (at < tiles && slice == 0) {
      if (i == j) {
        s.diagonal[i] = sum[0] = shifted(s.list[i], sum[0]);
        if (i + 1 < count) s.diagonal[i + 1] = sum[3] = shifted(s.list[i + 1], sum[3]);
      } else {
        s.gram(i, j + 1) = sum[1];
      }
      s.gram(i, j) = sum[0];
      if (i + 1 < count) {
        s.gram(i + 1, j) = sum[2];
        s.gram(i + 1, j + 1) = sum[3];
      }
    }
    __syncthreads();
  }
}

// Solve with the matrix of `assemble` and the right-hand side in its last row; the solution replaces that row.
__device__ void solve(Work& s, int count) {
  int width = least(16, blockDim.x), x = threadIdx.x % width, z = threadIdx.x / width, height = blockDim.x / width;
  for (int j = 0; j < count; j++) {
    real d = s.gram(j, j);
    if (!(d > 0)) d = 4 * EPSILON * count * s.diagonal[j];  // singular to working precision: a shift
    real inverse = 1 / d;
    if (threadIdx.x == 0) s.pivot[j] = inverse;
    for (int i = j + 1 + z; i <= count && z < height; i += height) {
      real factor = s.gram(i, j) * inverse;
      for (int k = j + 1 + x; k <= i && k < count; k += width) s.gram(i, k) -= factor * s.gram(k, j);
    }
    __syncthreads();
  }
  real* row = s.M + count * (count + 1) / 2;
  for (int k = count - 1; k >= 0; k--) {
    real solution = row[k] * s.pivot[k];
    EACH(i, 0, k) row[i] -= s.gram(k, i) * solution;
    __syncthreads();
  }
  EACH(k, 0, count) row[k] *= s.pivot[k];
  __syncthreads();
}

// The squared lengths of the rows of J(y) into s.scale, if they count; vanishing ones get `shortest`.
__device__ void lengths(const Rows& rows, Work& s, const real* y, int relative, real& shortest) {
  int m = rows.m;
  sums(m, relative ? rows.n : 0, s.partial,
       [&](int i, int k) {
         real J = 2 * rows.Ht[k * m + i] * y[k] + rows.Gt[k * m + i];
         return J * J;
       },
       [&](int i, real sum) { s.scale[i] = relative ? sum : (real)1; });
  __syncthreads();
  real total = 0, none = 0, most = 0;
  EACH(i, 0, m) total += s.scale[i];
  combine(s.partial, most, total, none);
  shortest = total > 0 ? (real)VANISHING * total / m : (real)1;
}

// bytes[room]: the shared memory of a block of so many threads, for each number of rows that may be in use.
extern "C" __global__ void shared_bytes(int n, int m, int all, int threads, int* bytes) {
  SHARED_MEMORY(memory);
  EACH(room, 0, m + 1) bytes[room] = (int)((char*)Work(memory, n, m, all, room, threads).end - (char*)memory);
}
