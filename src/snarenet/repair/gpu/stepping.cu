// A step of the loop on sparse rows beside a box, a block of threads a sample: `step` goes, `settle` looks where that led,
// `adjoint` leads back. The user's function is evaluated between them. What they compute is what the plain loop computes
// (`OutputSpace` in repair/loop/spaces.py, `Loop`, `settle` in stopping.py, `Annealed`); `stepping.py` starts them.

#include "sparse.cuh"

// The largest of term(i) for i < count, infinite if one is not a number.
template <typename Term>
__device__ real most_of(int count, real* partial, Term term) {
  real most = 0;
  EACH(i, 0, count) most = fmax(most, size_of(term(i)));
  partial[threadIdx.x] = most;
  __syncthreads();
  for (int width = blockDim.x; width > 1;) {
    int half = (width + 1) / 2;
    if ((int)threadIdx.x < width - half) partial[threadIdx.x] = fmax(partial[threadIdx.x], partial[threadIdx.x + half]);
    __syncthreads();
    width = half;
  }
  most = partial[0];
  __syncthreads();
  return most;
}

// The rows of a box are c_j y_j, with c = 1 unless there are `units`.
__device__ inline real unit(const real* units, int given, int j) { return given ? units[j] : (real)1; }

// The rows of a step, those of the box first: which are violated or taken in, what it is to take away of them, and which of
// them were taken in at their lower bounds. It uses these, or the `whole` of them.
struct Rows {
  bool *used, *low;
  real* residual;
  int whole;
  __device__ bool uses(int i) const { return whole || used[i]; }
};

// A step from `position`: the rows there, what it is made of, and what becomes of it.
struct Step {
  int first, all;  // rows of the box, and of everything
  const real *raw, *scale, *units;
  int given;
  real lambda;
  const real *position, *value, *lower, *upper;
  real *values, *damping, *weights;  // of its system
  real *d, *w, *left;                // how far it goes, its multipliers, and first the system's right-hand side
  __device__ real squared_length(int i) const {
    if (i >= first) return scale[i - first];
    real c = unit(units, given, i);
    return c * c;
  }
  // of the box alone
  __device__ real d_box(const Rows& rows, int j) const {
    return rows.uses(j) ? rows.residual[j] / (unit(units, given, j) * (1 + lambda)) : (real)0;
  }
};

// Both are behind the work of the block, for the same reason.
struct Course {
  Step step;
  Rows rows;
};
static_assert(sizeof(Work) + sizeof(Course) <= WORK, "`sparse.py` says how large they may be");

// The system of the rows in use: its factor, and its right-hand side in `left`. False where there is no factor.
__device__ __noinline__ bool make_system(
    const Plan& plan, const Sample& of, const Step& step, const Rows& rows, double least, double most) {
  int first = step.first;
  EACH(i, 0, plan.rows) step.damping[i] = rows.uses(first + i) ? step.scale[i] * step.lambda : (real)1;
  EACH(e, 0, plan.nonzeros) step.values[e] = rows.uses(first + plan.row[e]) ? step.raw[e] : (real)0;
  EACH(j, 0, first) {
    step.weights[j] = rows.uses(j) ? step.lambda / (1 + step.lambda) : (real)1;
    step.d[j] = step.d_box(rows, j);
  }
  __syncthreads();
  bool done = factorise(plan, of, least, most);
  auto wanted = [&](int i) { return rows.uses(first + i) ? rows.residual[first + i] : (real)0; };
  if (first) row_sums(plan, step.values, step.d, [&](int i, real sum) { step.left[i] = wanted(i) - sum; });
  else EACH(i, 0, plan.rows) step.left[i] = wanted(i);
  __syncthreads();
  return done;
}

// d = d_box + W J'w
__device__ inline void go(const Plan& plan, const Step& step, const Rows& rows) {
  column_sums(plan, step.values, step.w, [&](int j, real sum) {
    step.d[j] = step.first ? step.d_box(rows, j) + step.weights[j] * sum : sum;
  });
  __syncthreads();
}

// Would the step break rows that it does not use? Then they are used, see repair/foresight.py. The same for all threads.
__device__ __noinline__ bool foresee(const Plan& plan, const Sample& of, const Step& step, const Rows& rows, double touch, double breaks) {
  int first = step.first;
  real length = sqrt(total(plan.columns, of.partial, [&](int j) { return step.d[j] * step.d[j]; }));
  row_sums(plan, step.raw, step.d, [&](int i, real sum) { of.rest[i] = step.value[first + i] - sum; });
  __syncthreads();
  auto ahead_of = [&](int i) { return i < first ? unit(step.units, step.given, i) * (step.position[i] - step.d[i]) : of.rest[i - first]; };
  auto beyond = [&](int i) {
    real ahead = ahead_of(i);
    return fmax(ahead - step.upper[i], step.lower[i] - ahead);
  };
  auto broken = [&](int i) { return !rows.used[i] && beyond(i) > (real)touch * length * sqrt(step.squared_length(i)); };
  real fresh = most_of(step.all, of.partial, [&](int i) { return broken(i) ? beyond(i) / sqrt(step.squared_length(i)) : (real)0; });
  real away = most_of(step.all, of.partial, [&](int i) { return rows.residual[i] / sqrt(step.squared_length(i)); });
  if (!(fresh > (real)breaks * away)) return false;
  EACH(i, 0, step.all) {
    if (broken(i)) {
      real ahead = ahead_of(i);
      bool low = step.lower[i] - ahead > ahead - step.upper[i];
      rows.used[i] = true, rows.low[i] = low, rows.residual[i] = step.value[i] - (low ? step.lower[i] : step.upper[i]);
    } else if (rows.used[i] && step.lower[i] < step.upper[i]) {
      real left = i < first ? rows.residual[i] - unit(step.units, step.given, i) * step.d[i] : step.damping[i - first] * step.w[i - first];
      if (left * rows.residual[i] <= 0) rows.used[i] = false, rows.residual[i] = 0;
    }
  }
  __syncthreads();
  return true;
}

// From `position` by d to `trial`, with the box eliminated if there is one (`weighted`); `raw` (B, nonzeros) are those of J
// there. It uses violated rows, or `all`, and those that it would break if it `foresees` them: then `value` (B, all rows)
// is g. A sample that has stopped stays where it is. Writes the rows that it used, what the way back needs, and whether the
// violation cannot be reduced any more: d is nothing beside it, and so is its gradient.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) step(
    const int* places, real* values, real* damping, real* weights, int weighted, real* transfer, real* length,
    real* scratch, int room, int inside, int* info, double least, double most, int refinements, double rounding,
    const real* raw, const real* residual, const bool* pinned, int all, const real* scale, const real* units, int given,
    const real* level, int own, const long long* status, const real* position, const real* value, const real* lower,
    const real* upper, int foresees, double touch, double breaks, bool* used, real* taken, bool* low, real* d, real* w,
    real* left, real* trial, bool* stalled, double negligible) {
  SHARED_MEMORY(shared);
  const Work& work = set_up(
      shared, places, values, damping, weighted ? weights : nullptr, transfer, length, scratch, room, inside, false);
  const Plan& plan = work.plan;
  const Sample& of = work.of;
  long long sample = blockIdx.x;
  int first = weighted ? plan.columns : 0, every = first + plan.rows;
  residual += sample * every, pinned += sample * every;
  position += sample * plan.columns, trial += sample * plan.columns;
  Course& course = *(Course*)(&work + 1);
  if (threadIdx.x == 0) {
    course.rows = {used + sample * every, low + (foresees ? sample * every : 0), taken + sample * every, all};
    course.step = {
        first, every, raw + sample * plan.nonzeros, scale + sample * plan.rows, units, given,
        level[own ? sample : 0], position, value + (foresees ? sample * every : 0), lower + sample * every, upper + sample * every,
        values + sample * plan.nonzeros, damping + sample * plan.rows, weights + sample * first,
        d + sample * plan.columns, w + sample * plan.rows, left + sample * plan.rows};
  }
  __syncthreads();
  const Step& step = course.step;
  const Rows& rows = course.rows;
  EACH(i, 0, every) {
    rows.residual[i] = residual[i], rows.used[i] = residual[i] != 0 || pinned[i];
    if (foresees) rows.low[i] = false;
  }
  if (status[sample] != GOING) {
    EACH(j, 0, plan.columns) step.d[j] = 0, trial[j] = position[j];
    EACH(i, 0, plan.rows) step.w[i] = 0, step.left[i] = 0;
    if (threadIdx.x == 0) info[sample] = 0, stalled[sample] = false;
    return;
  }
  __syncthreads();
  bool done = make_system(plan, of, step, rows, least, most);
  once(plan, of, step.left, step.w);
  if (foresees) {
    go(plan, step, rows);
    if (foresee(plan, of, step, rows, touch, breaks)) {
      done = make_system(plan, of, step, rows, least, most);
      once(plan, of, step.left, step.w);
    }
  }
  refine(plan, of, step.left, step.w, refinements, rounding);
  go(plan, step, rows);
  if (threadIdx.x == 0) info[sample] = !done;
  EACH(j, 0, plan.columns) trial[j] = position[j] - step.d[j];
  EACH(i, 0, plan.rows) {
    step.left[i] = step.damping[i] * step.w[i];
    of.rest[i] = residual[first + i] / step.scale[i];
  }
  __syncthreads();
  auto size_in = [&](const real* r) {
    return sqrt(total(every, of.partial, [&](int i) { return r[i] * r[i] / step.squared_length(i); }));
  };
  real size = size_in(rows.residual);
  real length_of_d = sqrt(total(plan.columns, of.partial, [&](int j) { return step.d[j] * step.d[j]; }));
  bool flat = length_of_d * (every + step.lambda) <= negligible * size && size < (real)INFINITY;
  if (flat) {  // the same for all threads; made certain by the gradient of the violation itself
    column_sums(plan, step.raw, of.rest, [&](int j, real sum) { of.across[j] = sum; });
    __syncthreads();
    real gradient = total(plan.columns, of.partial, [&](int j) {
      real g = of.across[j] + (first ? residual[j] / unit(units, given, j) : (real)0);
      return g * g;
    });
    flat = sqrt(gradient) <= negligible * size_in(residual);
  }
  if (threadIdx.x == 0) stalled[sample] = flat;
}

// Where a step led: value (B, rows) are g of the rows beside the box at `trial`, `residual` and `used` are those of the
// step, `before` is the violation. Everything behind `floor` is written; new_value, g of all rows, if it is `kept`.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) settle(
    int rows, int first, int columns, const real* value, const real* lower, const real* upper, const real* before,
    const real* residual, const bool* used, const real* strictness, int strict, const real* scale, const real* units, int given,
    const real* sizes, int sized, const real* position, const real* trial, const real* d, const real* left,
    const real* level, const bool* stalled, const long long* status, const long long* steps, const real* worst,
    const real* best_position, const real* best, const long long* best_steps, const real* mark, const real* known,
    int kept, double tol, int look, double progress, int exact, int paced, double ratio, double quick, double safe,
    double near_by, double good, double far_off, double just, double careful, double start, double fall, double smallest, double floor,
    real* new_position, real* new_residual, real* new_worst, real* new_level,
    long long* new_status, long long* new_steps, real* new_best_position, real* new_best, long long* new_best_steps,
    real* new_value, bool* moved) {
  SHARED_MEMORY(partial);
  long long sample = blockIdx.x;
  int all = first + rows;
  value += sample * rows, scale += sample * rows, left += sample * rows;
  lower += sample * all, upper += sample * all, before += sample * all, residual += sample * all, used += sample * all;
  strictness += strict ? sample * all : 0, new_residual += sample * all;
  known += kept ? sample * all : 0, new_value += kept ? sample * all : 0;
  position += sample * columns, trial += sample * columns, d += sample * columns;
  best_position += sample * columns, new_position += sample * columns, new_best_position += sample * columns;
  auto row = [&](int i) { return i < first ? unit(units, given, i) * trial[i] : value[i - first]; };
  auto length = [&](int i) {
    if (i >= first) return scale[i - first];
    real c = unit(units, given, i);
    return c * c;
  };
  auto foreseen = [&](int i) {
    if (!used[i]) return (real)0;
    return i < first ? residual[i] - unit(units, given, i) * d[i] : left[i - first];
  };
  bool going = status[sample] == GOING;
  if (going) {
    EACH(i, 0, all) {
      real g = row(i);
      new_residual[i] = g - (g < lower[i] ? lower[i] : g > upper[i] ? upper[i] : g);
    }
    __syncthreads();
  }
  real seen = going ? most_of(all, partial, [&](int i) { return new_residual[i]; }) : (real)0, now = seen;
  if (going && strict) now = most_of(all, partial, [&](int i) { return new_residual[i] * strictness[i]; });
  bool finite = now < (real)INFINITY, go = going && finite;
  real at_most = go ? now : worst[sample];
  bool stuck = stalled[sample] || (look && best[sample] > (real)progress * mark[sample]);
  long long after = at_most <= (real)tol ? CONVERGED : stuck ? STALLED : GOING, count = steps[sample] + going;
  bool better = exact || (go && seen < best[sample]);
  if (paced && going) {
    real earlier = total(all, partial, [&](int i) { return residual[i] * residual[i] / length(i); });
    real later = total(all, partial, [&](int i) { return new_residual[i] * new_residual[i] / length(i); });
    real expected = total(all, partial, [&](int i) { return foreseen(i) * foreseen(i) / length(i); });
    real away = most_of(all, partial, [&](int i) { return residual[i] / sqrt(length(i)); });
    real size = sqrt(total(columns, partial, [&](int j) {
      real entry = position[j] * unit(sizes, sized, j);
      return entry * entry;
    }) / columns);
    real distance = size > 0 ? away / size : (real)INFINITY, gain = (earlier - later) / fabs(earlier - expected);
    bool right = (gain > (real)good && distance < (real)near_by) || (fabs(gain - 1) < (real)just && distance < (real)far_off);
    real lower_level = level[sample] * (real)ratio, quicker = fmax(level[sample] * (real)quick, (real)safe);
    real next = right ? fmin(lower_level, quicker) : lower_level;
    real within = fmin(fmax(distance, (real)smallest), (real)1), jumps = ceil(log(within) * (real)(2 / fall));
    real least = exp(jumps * (real)fall) * (real)start * (real)careful;  // of a start at this distance, and its share
    if (threadIdx.x == 0) new_level[sample] = fmax(fmax(next, least), (real)floor);
  } else if (paced && threadIdx.x == 0) {
    new_level[sample] = level[sample];
  }
  EACH(i, 0, all) {
    if (!go) new_residual[i] = before[i];
    if (kept) new_value[i] = go ? row(i) : known[i];
  }
  EACH(j, 0, columns) {
    real at = go ? trial[j] : position[j];
    new_position[j] = at, new_best_position[j] = better ? at : best_position[j];
  }
  if (threadIdx.x == 0) {
    moved[sample] = go, new_worst[sample] = at_most, new_steps[sample] = count;
    new_status[sample] = !going ? status[sample] : !finite ? NONFINITE : after;
    new_best[sample] = better && going ? seen : best[sample];
    new_best_steps[sample] = better ? count : best_steps[sample];
  }
}

// From the cotangent v (B, columns) of a step's end: p (B, rows), those of them that are violated, q, and e and the
// multipliers of the box (B, columns), all 0 where a sample did not move.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) adjoint(
    const int* places, const real* values, const real* damping, const real* weights, int weighted, real* transfer,
    real* length, real* scratch, int room, int inside, int refinements, double rounding, const bool* violated, const bool* moved,
    const real* units, int given, const real* level, int own, const real* v, real* p, real* q, real* e, real* box) {
  SHARED_MEMORY(shared);
  const Work& work = set_up(
      shared, places, values, damping, weighted ? weights : nullptr, transfer, length, scratch, room, inside, true);
  const Plan& plan = work.plan;
  const Sample& of = work.of;
  long long sample = blockIdx.x;
  int first = weighted ? plan.columns : 0;
  violated += sample * (first + plan.rows), p += sample * plan.rows, q += sample * plan.rows;
  v += sample * plan.columns, e += sample * plan.columns, box += sample * first;
  if (!moved[sample]) {
    EACH(j, 0, plan.columns) e[j] = 0;
    EACH(j, 0, first) box[j] = 0;
    EACH(i, 0, plan.rows) p[i] = 0, q[i] = 0;
    return;
  }
  real lambda = level[own ? sample : 0];
  EACH(j, 0, plan.columns) e[j] = first ? v[j] * of.weights[j] : v[j];
  __syncthreads();
  row_sums(plan, of.values, e, [&](int i, real sum) { q[i] = sum; });
  __syncthreads();
  solve_refined(plan, of, q, p, refinements, rounding);
  __syncthreads();
  column_sums(plan, of.values, p, [&](int j, real sum) {
    real u = v[j] - sum;
    e[j] = first ? u * of.weights[j] : u;
    if (first) box[j] = violated[j] ? u / (unit(units, given, j) * (1 + lambda)) : (real)0;
  });
  EACH(i, 0, plan.rows) q[i] = violated[first + i] ? p[i] : (real)0;
}
