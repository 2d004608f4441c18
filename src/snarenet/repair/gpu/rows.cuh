// One block a sample: the matrix of a system in shared memory, and what it is made of; `rows.py` describes rows for it.
// Compiled with -DPRIMAL=1 the matrix is that of the n variables (primal.cuh), else that of the rows in use (dual.cuh).

#pragma once
#include "common.cuh"

#define TALL 8     // rows of the Jacobian that a thread rotates at a time
#define PADDING 2  // columns are multiples of four rows and these apart: two are read at once, with few bank conflicts
#define PIVOTS 4   // columns that are eliminated at a time, and rows of a thread
#define CHUNK 32   // rows of the Jacobian that the primal system has at a time: it needs each of them once

// Constant rows: m rows y'diag(H_i)y + G_i y, and e others, A = diag(scale)^(1/2) U S V'. Q = [V, the rest].
struct Rows {
  int n, m, e, rank;
  const real *H, *G, *A, *Q;      // (m, n), (m, n), (e, n), (n, n)
  const real *Ht, *Gt, *At, *Qt;  // transposed
  const real *left, *left_t;      // diag(scale)^(-1/2) U: (e, rank), and transposed
  const real *values, *scale;     // (n) singular values, 0 beyond the rank; (e) scales
  // for the primal system, which has no Q: diag(scale)^(-1) A, transposed; the lower triangle of A'diag(scale)^(-1) A
  const real *weighted, *weighted_t, *normal;

  __device__ Rows(const real* at, int n, int m, int e, int rank) : n(n), m(m), e(e), rank(rank) {
    H = at; G = at += m * n; Ht = at += m * n; Gt = at += m * n;
    A = at += m * n; At = at += e * n; scale = at += e * n; at += e;
#if PRIMAL
    weighted = at; weighted_t = at += e * n; normal = at += e * n;
#else
    int square = e ? n * n : 0;
    Q = at; Qt = at += square; left = at += square; left_t = at += e * rank; values = at += e * rank;
#endif
  }
};

// Two neighbours in shared memory, read at once.
struct alignas(2 * sizeof(real)) Pair {
  real first, second;
  __device__ Pair& operator+=(const Pair& other) {
    first += other.first; second += other.second;
    return *this;
  }
};

// Reads `count` numbers, two by two, from an even place on.
template <int count>
__device__ inline void read(const real* from, real* to) {
#pragma unroll
  for (int i = 0; i < count; i += 2) {
    Pair pair = *(const Pair*)(from + i);
    to[i] = pair.first; to[i + 1] = pair.second;
  }
}

// What a block keeps in shared memory.
struct Work {
  real *y, *next, *r, *after, *w, *scale, *a, *t, *weights, *diagonal, *pivot, *partial, *chunk, *W, *M;
  int* list;       // the rows in use
  unsigned* bits;  // a bit for each row: is it in use?
  int pitch;       // distance of the lines of W: columns of the rows in use, or rows of the primal system's chunk
  int at_a_time;   // rows that the chunk has room for
  void* end;

  // For m rows of n variables, `all` with the constant ones; `room`: the most rows that may be in use at a time.
  __device__ Work(real* at, int n, int m, int all, int room, int threads) {
    int order = PRIMAL ? n : room;             // unknowns of the system
    int terms = PRIMAL ? m : n;                // of the sum that its matrix is
    int lines = PRIMAL ? least(m, CHUNK) : n;  // of W: those of one chunk, or all terms
    int width = order + PRIMAL;                // of a line: one more for a right-hand side
    pitch = (width + 1) / 4 * 4 + PADDING;     // tiles may reach into the next line: what they find is not used
    int scratch = 4 * threads + (order + 1) * (order + 2) / 2;
    // rows are rotated where sums and the Gram matrix are later: enough of them at a time that all threads have some
    if (all > m && !PRIMAL) scratch = greatest(scratch, greatest(2 * TALL * threads, n * (TALL + PADDING)));
    at_a_time = PRIMAL ? lines : least(scratch / n - PADDING, room + TALL - 1) / TALL * TALL;
    chunk = partial = at; M = at + 4 * threads; W = at += (scratch + 1) / 2 * 2;
    y = at += lines * pitch; next = at += n; a = at += n; t = at += n; weights = at += n;
    r = at += terms; after = at += all; w = at += all; scale = at += m; diagonal = at += m; pivot = at += order;
    list = (int*)(at + order); bits = (unsigned*)(list + m);
    end = bits + (m + 31) / 32;
  }
  __device__ Work(real* at, const Rows& rows, int room)
      : Work(at, rows.n, rows.m, rows.e + rows.m, room, blockDim.x) {}

  // an entry of W, which has the rows in use, rotated
  __device__ real& rotated(int i, int c) { return W[c * pitch + i]; }

  // the lower triangle, row by row
  __device__ real& gram(int i, int j) { return M[i * (i + 1) / 2 + j]; }
};

// What a step's adjoint finds: p of the listed rows, and e; loop/spaces.py has the formula.
struct Adjoint {
  const real *p, *e;
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

// Some listed rows of the Jacobian, from the `first` on: entry (i, k) is J[i * down + k * across].
__device__ void jacobian(const Rows& rows, const Work& s, int first, int some, real* J, int down, int across) {
  int n = rows.n, threads = blockDim.x, me = threadIdx.x;
  int width = least((n + 31) / 32 * 32, threads), groups = threads / width, group = me / width, lane = me % width;
  for (int k = lane; k < n && group < groups; k += width) {
    real twice = 2 * s.y[k];
#pragma unroll 8
    for (int i = group; i < some; i += groups) {
      int at = s.list[first + i] * n + k;
      J[i * down + k * across] = rows.H[at] * twice + rows.G[at];
    }
  }
}

// Rows in the chunk times Q, into W: a thread has a tile of TALL rows and some columns.
template <int COLUMNS>
__device__ void rotate(const Rows& rows, Work& s, int first, int some) {
  int n = rows.n, wide = (n + COLUMNS - 1) / COLUMNS, distance = s.at_a_time + PADDING;
  EACH(at, 0, wide * ((some + TALL - 1) / TALL)) {
    int c = at % wide, i = at / wide * TALL;
    real sum[TALL][COLUMNS] = {};
#pragma unroll 8 / COLUMNS
    for (int k = 0; k < n; k++) {
      real J[TALL], rotation[COLUMNS];
      read<TALL>(s.chunk + k * distance + i, J);
#pragma unroll
      for (int b = 0; b < COLUMNS; b++) rotation[b] = rows.Q[k * n + least(c + b * wide, n - 1)];
#pragma unroll
      for (int a = 0; a < TALL; a++)
#pragma unroll
        for (int b = 0; b < COLUMNS; b++) sum[a][b] += J[a] * rotation[b];
    }
#pragma unroll
    for (int a = 0; a < TALL; a++)
#pragma unroll
      for (int b = 0; b < COLUMNS; b++)
        if (i + a < some && c + b * wide < n) s.rotated(first + i + a, c + b * wide) = sum[a][b];
  }
}

// finish(x, z, entry) for the entries on the diagonal and below, z <= x < count, of the sum of weight * line' line over
// some lines of W. A thread, or several that share its sums, has a tile of SIDE times SIDE entries.
// The rows of a tile are pairs far from each other, so that threads in sequence read pairs in sequence.
template <int SIDE, typename Finish>
__device__ void multiply(Work& s, int lines, const real* weights, int count, Finish finish) {
  int blocks = (count + SIDE - 1) / SIDE, tiles = blocks * (blocks + 1) / 2;
  int threads = blockDim.x, me = threadIdx.x, width = least((tiles + 31) / 32 * 32, threads);
  int slices = threads / width, slice = me / width;
  for (int start = 0; start < tiles; start += width) {
    int at = start + me % width, i = 0, j = 0;
    real sum[SIDE * SIDE] = {};
    if (at < tiles && slice < slices) {
      int row = (int)((sqrt(8.0f * at + 1) - 1) / 2);
      while ((row + 1) * (row + 2) / 2 <= at) row++;
      while (row * (row + 1) / 2 > at) row--;
      i = 2 * row; j = 2 * (at - row * (row + 1) / 2);
#pragma unroll 8 / SIDE
      for (int k = slice; k < lines; k += slices) {
        real u[SIDE], v[SIDE], weight = weights[k];
        const real* line = s.W + k * s.pitch;
#pragma unroll
        for (int a = 0; a < SIDE; a += 2) {
          read<2>(line + i + a * blocks, u + a);
          read<2>(line + j + a * blocks, v + a);
        }
#pragma unroll
        for (int a = 0; a < SIDE; a++) {
          real weighted = u[a] * weight;
#pragma unroll
          for (int b = 0; b < SIDE; b++) sum[a * SIDE + b] += weighted * v[b];
        }
      }
    }
    if (slices > 1) {
#pragma unroll
      for (int some = 0; some < SIDE * SIDE; some += 4) {
        for (int part = 0; part < 4; part++) s.partial[part * threads + me] = sum[some + part];
        __syncthreads();
        if (slice == 0)
          for (int other = 1; other < slices; other++)
            for (int part = 0; part < 4; part++) sum[some + part] += s.partial[part * threads + other * width + me];
        __syncthreads();
      }
    }
    if (at < tiles && slice == 0) {
#pragma unroll
      for (int part = 0; part < SIDE * SIDE; part++) {
        int a = part / SIDE, b = part % SIDE, x = i + a % 2 + a / 2 * 2 * blocks, z = j + b % 2 + b / 2 * 2 * blocks;
        if (x >= count || z >= count || (i == j && x < z)) continue;  // a tile on the diagonal has both triangles
        finish(x > z ? x : z, x > z ? z : x, sum[part]);
      }
    }
  }
  __syncthreads();
}

// W = J Q for the listed rows, and J P J', P = Q diag(weights) Q', with shifted(i, d) in the place of its diagonal d.
template <typename Shift>
__device__ void assemble(const Rows& rows, Work& s, int count, Shift shifted) {
  if (rows.e == 0) {
    jacobian(rows, s, 0, count, s.W, 1, s.pitch);
  } else {
    for (int first = 0; first < count; first += s.at_a_time) {
      int some = least(s.at_a_time, count - first);
      jacobian(rows, s, first, some, s.chunk, 1, s.at_a_time + PADDING);
      __syncthreads();
      if (rows.n * ((some + TALL - 1) / TALL) > (int)blockDim.x) rotate<2>(rows, s, first, some);
      else rotate<1>(rows, s, first, some);
      __syncthreads();
    }
  }
  __syncthreads();
  if (count == 0) return;
  auto set = [&](int x, int z, real sum) { s.gram(x, z) = sum; };
  if (count > 32) multiply<4>(s, rows.n, s.weights, count, set);
  else multiply<2>(s, rows.n, s.weights, count, set);
  EACH(i, 0, count) s.diagonal[i] = s.gram(i, i) = shifted(s.list[i], s.gram(i, i));
  __syncthreads();
}

// The first part of `decompose`: PIVOTS columns, from j on, are eliminated from each other, on the diagonal and below.
__device__ void pivots(Work& s, int count, int j) {
  int rest = least(j + PIVOTS, count);
  real block[PIVOTS][PIVOTS], inverse[PIVOTS];
  if ((int)threadIdx.x <= count - rest) {  // as many threads as rows below: each makes the pivots for itself
#pragma unroll
    for (int p = 0; p < PIVOTS; p++)
#pragma unroll
      for (int q = 0; q <= p; q++) block[p][q] = j + p < rest ? s.gram(j + p, j + q) : (real)(p == q);
#pragma unroll
    for (int p = 0; p < PIVOTS; p++) {
      real d = block[p][p];
      if (!(d > 0)) d = 4 * EPSILON * count * s.diagonal[j + p];  // singular to working precision: a shift
      inverse[p] = 1 / d;
      if (threadIdx.x == 0 && j + p < rest) s.pivot[j + p] = inverse[p];
#pragma unroll
      for (int q = p + 1; q < PIVOTS; q++) {
        real factor = block[q][p] * inverse[p];
#pragma unroll
        for (int k = p + 1; k <= q; k++) block[q][k] -= factor * block[k][p];
      }
    }
    EACH(i, rest, count + 1) {
      real *row = &s.gram(i, j), entry[PIVOTS];
#pragma unroll
      for (int p = 0; p < PIVOTS; p++) entry[p] = j + p < rest ? row[p] : (real)0;
#pragma unroll
      for (int p = 0; p < PIVOTS; p++) {
        real factor = entry[p] * inverse[p];
#pragma unroll
        for (int q = p + 1; q < PIVOTS; q++) entry[q] -= factor * block[q][p];
        if (j + p < rest) row[p] = entry[p];
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int p = 1; p < PIVOTS; p++)
#pragma unroll
    for (int q = 0; q < p; q++)
      if (threadIdx.x == 0 && j + p < rest) s.gram(j + p, j + q) = block[p][q];
}

// The matrix M = L D L' of `assemble` becomes L D, with 1 / D_jj in `pivot`; b in the row below becomes L^-1 b.
__device__ void decompose(Work& s, int count) {
  int width = least(16, blockDim.x), lane = threadIdx.x % width, group = threadIdx.x / width;
  int groups = blockDim.x / width;
  for (int j = 0; j < count; j += PIVOTS) {
    pivots(s, count, j);
    int rest = j + PIVOTS;
    for (int i = rest + group * PIVOTS; i <= count && rest < count && group < groups; i += groups * PIVOTS) {
      real *row[PIVOTS], factor[PIVOTS][PIVOTS];
#pragma unroll
      for (int a = 0; a < PIVOTS; a++) {
        row[a] = &s.gram(least(i + a, count), 0);
#pragma unroll
        for (int p = 0; p < PIVOTS; p++) factor[a][p] = row[a][j + p] * s.pivot[j + p];
      }
      for (int k = rest + lane; k < least(i + PIVOTS, count); k += width) {
        real column[PIVOTS], entry[PIVOTS];
#pragma unroll
        for (int p = 0; p < PIVOTS; p++) {
          column[p] = s.gram(k, j + p);
          entry[p] = row[p][k];
        }
#pragma unroll
        for (int a = 0; a < PIVOTS; a++) {
#pragma unroll
          for (int p = 0; p < PIVOTS; p++) entry[a] -= factor[a][p] * column[p];
          if (k <= i + a && i + a <= count) row[a][k] = entry[a];
        }
      }
    }
    __syncthreads();
  }
}

// The row below a factor: b becomes L^-1 b, or (L D)^-T b if TRANSPOSED.
template <bool TRANSPOSED>
__device__ void substitute(Work& s, int count) {
  real* row = s.M + count * (count + 1) / 2;
  auto entry = [&](int i, int j) { return TRANSPOSED ? s.gram(j, i) : s.gram(i, j); };
  for (int done = 0; done < count; done += PIVOTS) {
    int j = TRANSPOSED ? (count - 1 - done) / PIVOTS * PIVOTS : done, rest = least(j + PIVOTS, count);
    int first = TRANSPOSED ? 0 : rest, end = TRANSPOSED ? j : count;  // the entries that are still to be found
    real found[PIVOTS];
    auto part = [&](int p) { return TRANSPOSED ? found[p] : found[p] * s.pivot[j + p]; };
    if ((int)threadIdx.x <= end - first) {  // as many threads as there are: each solves the block for itself
#pragma unroll
      for (int a = 0; a < PIVOTS; a++) {
        int p = TRANSPOSED ? PIVOTS - 1 - a : a;
        found[p] = j + p < count ? row[j + p] : (real)0;
#pragma unroll
        for (int b = 0; b < a; b++) {
          int q = TRANSPOSED ? PIVOTS - 1 - b : b;
          if (j + greatest(p, q) < count) found[p] -= entry(j + p, j + q) * part(q);
        }
        if (TRANSPOSED && j + p < count) found[p] *= s.pivot[j + p];
      }
      EACH(i, first, end) {
        real sum = row[i];
#pragma unroll
        for (int p = 0; p < PIVOTS; p++)
          if (j + p < count) sum -= entry(i, j + p) * part(p);
        row[i] = sum;
      }
    }
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PIVOTS; p++)
      if (threadIdx.x == 0 && j + p < count) row[j + p] = found[p];
  }
  __syncthreads();
}

// Solve with the matrix of `assemble` and the right-hand side in the row below; the solution replaces that row.
__device__ void solve(Work& s, int count) {
  decompose(s, count);
  substitute<true>(s, count);
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
