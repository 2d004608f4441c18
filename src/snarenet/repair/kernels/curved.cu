// The kernels of `curved.py`, which explains them: one block takes all steps of one sample.

#define THREADS 256  // most that a block may have: the compiler then leaves room for two blocks a multiprocessor
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

// What a block keeps in shared memory; `_shared_bytes` in curved.py adds this up.
struct Work {
  real *y, *next, *r, *after, *w, *scale, *a, *t, *weights, *diagonal, *pivot, *partial, *chunk, *W, *M;
  int* list;       // the rows in use
  unsigned* bits;  // a bit for each row: is it in use?
  int pitch;       // distance of the rows of W: odd, against bank conflicts

  // `room`: the most rows that may be in use at a time
  __device__ Work(real* at, const Rows& rows, int room) {
    int n = rows.n, m = rows.m, all = rows.e + rows.m;
    pitch = n | 1;
    chunk = at; y = at += rows.e ? PADDED * n : 0; next = at += n; a = at += n; t = at += n; weights = at += n;
    r = at += n; after = at += all; w = at += all; scale = at += m; diagonal = at += m; pivot = at += m;
    partial = at += m; W = at += 4 * blockDim.x; M = at += room * pitch;
    list = (int*)(at + (room + 1) * (room + 2) / 2); bits = (unsigned*)(list + m);
  }

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

extern "C" __global__ void __launch_bounds__(THREADS, 2) forward(
    const real* constants, int n, int m, int e, int rank, int active, int relative,
    real* value, const real* lowers, const real* uppers, real* scales, const bool* finite, const real* levels,
    int count_levels, int begin, int end, double tol, double finest, double still,
    long long* status, long long* steps, int* moves, real* trail_y, real* trail_w, signed char* codes, int recording) {
  SHARED_MEMORY(memory);
  Rows rows(constants, n, m, e, rank);
  Work s(memory, rows, m);
  long long sample = blockIdx.x, batch = gridDim.x;
  int all = e + m;
  const real *lower = lowers + sample * all, *upper = uppers + sample * all;
  long long state = begin ? status[sample] : GOING;
  long long taken = begin ? steps[sample] : 0;
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
    sums(rank, e, s.partial, [&](int c, int j) { return rows.left[j * rank + c] * s.r[j]; },
         [&](int c, real sum) { s.a[c] = sum * rows.values[c] / (rows.values[c] * rows.values[c] + damping); });
    EACH(c, rank, n) s.a[c] = 0;
    eliminate(rows, s, damping);
    assemble(rows, s, count, [&](int i, real d) { return d + damping * s.scale[i]; });
    sums(count, e ? n : 0, s.partial, [&](int i, int c) { return s.W[i * s.pitch + c] * s.a[c]; },
         [&](int i, real sum) { s.gram(count, i) = s.r[e + s.list[i]] - sum; });
    __syncthreads();
    solve(s, count);
    const real* found = s.M + count * (count + 1) / 2;
    EACH(i, 0, m) s.w[i] = 0;
    __syncthreads();
    EACH(i, 0, count) s.w[s.list[i]] = found[i];
    sums(n, count, s.partial, [&](int c, int i) { return s.W[i * s.pitch + c] * found[i]; },
         [&](int c, real sum) { s.t[c] = s.weights[c] * sum + s.a[c]; });
    __syncthreads();
    if (e) {
      sums(n, n, s.partial, [&](int i, int c) { return rows.Qt[c * n + i] * s.t[c]; },
           [&](int i, real d) { s.next[i] = s.y[i] - d; });
    } else {
      EACH(i, 0, n) s.next[i] = s.y[i] - s.t[i];
    }
    __syncthreads();
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
    if (recording) {
      long long at = (k - begin) * batch + sample;
      EACH(i, 0, n) trail_y[at * n + i] = s.y[i];
      EACH(i, 0, m) trail_w[at * m + i] = s.w[i];
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
extern "C" __global__ void __launch_bounds__(THREADS, 2) backward(
    const real* constants, int n, int m, int e, int rank, int active, int relative,
    const real* last, const real* scales, const real* levels, int count_levels, int begin, int end, const int* moves,
    const real* trail_y, const real* trail_w, const signed char* codes,
    real* cotangent, real* to_scale, real* to_lower, real* to_upper, int bounds) {
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
    EACH(i, 0, m) s.w[i] = trail_w[at * m + i];
    int count = gather(rows, s, [&](int i) { return !active || code[e + i] != 0; });
    if (e) {
      sums(n, n, s.partial, [&](int c, int i) { return rows.Q[i * n + c] * v[i]; },
           [&](int c, real sum) { s.a[c] = sum; });
    } else {
      EACH(i, 0, n) s.a[i] = v[i];
    }
    eliminate(rows, s, damping);
    assemble(rows, s, count, [&](int i, real d) { return d + damping * s.scale[i]; });
    sums(count, n, s.partial, [&](int i, int c) { return s.W[i * s.pitch + c] * s.weights[c] * s.a[c]; },
         [&](int i, real sum) { s.gram(count, i) = sum; });
    __syncthreads();
    solve(s, count);
    const real* p = s.M + count * (count + 1) / 2;
    sums(n, count, s.partial, [&](int c, int i) { return s.W[i * s.pitch + c] * p[i]; },
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
         [&](int j, real sum) { q[j] = code[j] ? sum : (real)0; });
    EACH(i, 0, count) q[e + i] = code[e + s.list[i]] ? p[i] : (real)0;
    __syncthreads();
    const real *straight = s.weights, *y = s.y;  // e of the formula
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
    EACH(i, 0, count) to_scale[sample * m + s.list[i]] += damping * p[i] * s.w[s.list[i]];
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

enum { LOST, FOUND, CROWDED };  // as in projection.py

// The search of projection.py, which explains it: z and multipliers of the nearest point, and whether they were found.
// `again` is for those samples alone that had more rows in use than there was room for.
extern "C" __global__ void __launch_bounds__(THREADS, 2) search(
    const real* constants, int n, int m, int e, int rank,
    const real* points, const real* lowers, const real* uppers, const real* metric, const real* reaches,
    const real* shares, int iterations, double flat, double enough, int room, int again,
    real* positions, real* multipliers, int* outcome) {
  SHARED_MEMORY(memory);
  Rows rows(constants, n, m, 0, 0);
  Work s(memory, rows, room);
  long long sample = blockIdx.x;
  if (again && outcome[sample] != CROWDED) return;
  const real *y = points + sample * n, *lower = lowers + sample * m, *upper = uppers + sample * m;
  const real* reach = reaches + sample * m;
  real *mu = s.w, *slope = s.t, *value = s.r;
  bool settled = false, crowded = false;
  for (int k = 0; k < iterations && !settled; k++) {
    real share = shares[k];
    if (k == 0 || share > shares[k - 1]) {  // begin, or begin anew
      EACH(c, 0, n) s.y[c] = y[c];
      EACH(i, 0, m) mu[i] = 0;
    }
    __syncthreads();
    sums(m, n, s.partial, [&](int j, int c) { return (rows.Ht[c * m + j] * s.y[c] + rows.Gt[c * m + j]) * s.y[c]; },
         [&](int j, real g) { value[j] = g; });
    __syncthreads();
    EACH(j, 0, m) {
      bool above = lower[j] == upper[j] || mu[j] + reach[j] * (value[j] - upper[j]) > 0;
      bool below = !above && mu[j] + reach[j] * (value[j] - lower[j]) < 0;
      s.after[j] = above ? value[j] - upper[j] : below ? value[j] - lower[j] : (real)0;
      s.scale[j] = above || below;
      if (!(above || below)) mu[j] = 0;
    }
    __syncthreads();
    int count = gather(rows, s, [&](int i) { return s.scale[i] != 0; });
    crowded = count > room;
    if (crowded) break;
    sums(n, count, s.partial, [&](int c, int i) { return 2 * rows.H[s.list[i] * n + c] * mu[s.list[i]]; },
         [&](int c, real bend) { s.weights[c] = 1 / fmax(metric[c] + bend, (real)flat * metric[c]); });
    __syncthreads();
    assemble(rows, s, count, [&](int i, real d) { return d + share * d; });
    sums(n, count, s.partial, [&](int c, int i) { return s.W[i * s.pitch + c] * mu[s.list[i]]; },
         [&](int c, real sum) { slope[c] = metric[c] * (s.y[c] - y[c]) + sum; });
    __syncthreads();
    sums(count, n, s.partial, [&](int i, int c) { return s.W[i * s.pitch + c] * s.weights[c] * slope[c]; },
         [&](int i, real sum) { s.gram(count, i) = s.after[s.list[i]] - sum; });
    __syncthreads();
    solve(s, count);
    const real* change = s.M + count * (count + 1) / 2;
    sums(n, count, s.partial, [&](int c, int i) { return s.W[i * s.pitch + c] * change[i]; },
         [&](int c, real sum) { s.next[c] = s.y[c] - s.weights[c] * (slope[c] + sum); });
    __syncthreads();
    real moved = 0, size = 0, none = 0;
    EACH(c, 0, n) moved = fmax(moved, size_of(s.next[c] - s.y[c]));
    combine(s.partial, moved, none, none);
    EACH(c, 0, n) size = fmax(size, size_of(s.y[c]));
    combine(s.partial, size, none, none);
    if (!(moved < (real)INFINITY)) continue;  // all threads alike: nothing is moved
    settled = moved <= (real)enough * (1 + size);
    EACH(i, 0, count) mu[s.list[i]] += change[i];
    real* before = s.y;
    s.y = s.next; s.next = before;
    __syncthreads();
  }
  EACH(c, 0, n) positions[sample * n + c] = s.y[c];
  EACH(i, 0, m) multipliers[sample * m + i] = mu[i];
  if (threadIdx.x == 0) outcome[sample] = crowded ? CROWDED : settled ? FOUND : LOST;
}
