// The kernel of `search.py`, which explains it.

#include "rows.cuh"

// The search of start/active_set.py: z and multipliers of the nearest point, and whether they were found.
// `again` is for those samples alone that had more rows in use than there was room for.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) search(
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
    sums(n, count, s.partial, [&](int c, int i) { return s.rotated(i, c) * mu[s.list[i]]; },
         [&](int c, real sum) { slope[c] = metric[c] * (s.y[c] - y[c]) + sum; });
    __syncthreads();
    sums(count, n, s.partial, [&](int i, int c) { return s.rotated(i, c) * s.weights[c] * slope[c]; },
         [&](int i, real sum) { s.gram(count, i) = s.after[s.list[i]] - sum; });
    __syncthreads();
    solve(s, count);
    const real* change = s.M + count * (count + 1) / 2;
    sums(n, count, s.partial, [&](int c, int i) { return s.rotated(i, c) * change[i]; },
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
