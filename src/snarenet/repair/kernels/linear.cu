// The kernels of `fused.py` and `nearest.py`, which explain them: constant linear rows, and matrices for all samples.
//
// A block of `forward`, `backward`, `approach` and `approach_back` takes all steps of S samples, which read each number of
// a matrix together.

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

// Shared memory: some arrays of S x rows, then room for the sums.
template <int S>
struct Room {
  real* at;
  int rows;
  __device__ Room(real* at, int rows) : at(at), rows(rows) {}
  __device__ real* next() {
    real* here = at;
    at += S * rows;
    return here;
  }
  __device__ Samples<S>* partial() { return (Samples<S>*)at; }
};

template <int S>
__device__ void forward_of(
    int rows, int batch, real* position, const real* lowers, const real* uppers, const real* transfers, int count,
    const real* strictness, const bool* finite, int max_steps, double first_tol, double tol,
    signed char* codes, long long* status, long long* steps, int recording) {
  SHARED_MEMORY(memory);
  Room<S> room(memory, rows);
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
        if (recording)
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
  Room<S> room(memory, rows);
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
    int first, int recording) {
  SHARED_MEMORY(partial);
  long long sample = blockIdx.x, start = sample * rows;
  long long before = first ? GOING : status[sample];
  if (before != GOING) {  // the way back passes by a step with codes of zero
    if (recording && !first) EACH(j, 0, rows) codes[start + j] = 0;
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
    if (recording && !first) codes[at] = moved ? code_of(residuals[at], lowers[at], uppers[at]) : 0;
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

// ADMM from the image A y to the multipliers s of the projection; codes say which rows each iteration cut off.
template <int S>
__device__ void approach_of(
    int rows, int batch, const real* images, const real* lowers, const real* uppers, const real* K, int iterations,
    double relaxation, real* multipliers, signed char* codes, int recording) {
  SHARED_MEMORY(memory);
  Room<S> room(memory, rows);
  real *z = room.next(), *s = room.next(), *t = room.next(), *fixed = room.next(), *low = room.next(), *high = room.next();
  Samples<S>* partial = room.partial();
  long long first = (long long)blockIdx.x * S * rows;
  int here = least(S, batch - (int)blockIdx.x * S);
  auto cut = [&](int at, real v, int k) {
    signed char code = v > high[at] ? 1 : v < low[at] ? 2 : 0;
    z[at] = code == 1 ? high[at] : code == 2 ? low[at] : v;
    if (recording && at < here * rows) codes[(long long)k * batch * rows + first + at] = code;
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
  Room<S> room(memory, rows);
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

#define FORWARD(S)                                                                                                      \
  extern "C" __global__ void forward##S(                                                                                \
      int rows, int batch, real* position, const real* lower, const real* upper, const real* transfers, int count,      \
      const real* strictness, const bool* finite, int max_steps, double first_tol, double tol, signed char* codes,      \
      long long* status, long long* steps, int recording) {                                                             \
    forward_of<S>(rows, batch, position, lower, upper, transfers, count, strictness, finite, max_steps, first_tol, tol, \
                  codes, status, steps, recording);                                                                     \
  }
#define BACKWARD(S)                                                                                                     \
  extern "C" __global__ void backward##S(                                                                               \
      int rows, int batch, real* cotangent, const signed char* codes, const long long* steps, const real* transposed,   \
      int count, real* to_lower, real* to_upper, int bounds) {                                                          \
    backward_of<S>(rows, batch, cotangent, codes, steps, transposed, count, to_lower, to_upper, bounds);                \
  }
#define APPROACH(S)                                                                                                     \
  extern "C" __global__ void approach##S(                                                                               \
      int rows, int batch, const real* images, const real* lower, const real* upper, const real* K, int iterations,     \
      double relaxation, real* multipliers, signed char* codes, int recording) {                                        \
    approach_of<S>(rows, batch, images, lower, upper, K, iterations, relaxation, multipliers, codes, recording);        \
  }                                                                                                                     \
  extern "C" __global__ void approach_back##S(                                                                          \
      int rows, int batch, real* cotangent, const real* K, int iterations, double relaxation, const signed char* codes, \
      real* to_lower, real* to_upper) {                                                                                 \
    approach_back_of<S>(rows, batch, cotangent, K, iterations, relaxation, codes, to_lower, to_upper);                  \
  }
FORWARD(1) FORWARD(2) FORWARD(4)
BACKWARD(1) BACKWARD(2) BACKWARD(4)
APPROACH(1) APPROACH(2) APPROACH(4)
