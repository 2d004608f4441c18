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

// From `position` by d = d_box + W J'w to `trial`, with the box eliminated if there is one (`weighted`); `raw` (B, nonzeros)
// are those of J there. A sample that has stopped stays where it is. Writes what the way back needs, `left` (B, rows), the residual that the linear model foresees, and
// whether the violation cannot be reduced any more: d is nothing beside it, and so is its gradient.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) step(
    const int* places, real* values, real* damping, real* weights, int weighted, real* transfer, real* length,
    real* scratch, int room, int inside, int* info, double least, double most, int refinements, double rounding,
    const real* raw, const real* residual, const bool* violated, int all, const real* scale, const real* units, int given,
    const real* level, int own, const long long* status, const real* position, real* d, real* w, real* left, real* trial, bool* stalled, double negligible) {
  SHARED_MEMORY(shared);
  const Work& work = set_up(
      shared, places, values, damping, weighted ? weights : nullptr, transfer, length, scratch, room, inside, false);
  const Plan& plan = work.plan;
  const Sample& of = work.of;
  long long sample = blockIdx.x;
  int first = weighted ? plan.columns : 0;
  raw += sample * plan.nonzeros, values += sample * plan.nonzeros, damping += sample * plan.rows;
  residual += sample * (first + plan.rows), violated += sample * (first + plan.rows), scale += sample * plan.rows;
  weights += sample * first, w += sample * plan.rows, left += sample * plan.rows;
  position += sample * plan.columns, d += sample * plan.columns, trial += sample * plan.columns;
  if (status[sample] != GOING) {
    EACH(j, 0, plan.columns) d[j] = 0, trial[j] = position[j];
    EACH(i, 0, plan.rows) w[i] = 0, left[i] = 0;
    if (threadIdx.x == 0) info[sample] = 0, stalled[sample] = false;
    return;
  }
  real lambda = level[own ? sample : 0];
  EACH(i, 0, plan.rows) damping[i] = all || violated[first + i] ? scale[i] * lambda : (real)1;
  EACH(e, 0, plan.nonzeros) values[e] = all || violated[first + plan.row[e]] ? raw[e] : (real)0;
  EACH(j, 0, first) {
    bool used = all || violated[j];
    weights[j] = used ? lambda / (1 + lambda) : (real)1;
    d[j] = used ? residual[j] / (unit(units, given, j) * (1 + lambda)) : (real)0;
  }
  __syncthreads();
  bool done = factorise(plan, of, least, most);
  if (threadIdx.x == 0) info[sample] = !done;
  auto wanted = [&](int i) { return all || violated[first + i] ? residual[first + i] : (real)0; };
  if (first) row_sums(plan, values, d, [&](int i, real sum) { left[i] = wanted(i) - sum; });
  else EACH(i, 0, plan.rows) left[i] = wanted(i);
  __syncthreads();
  solve_refined(plan, of, left, w, refinements, rounding);
  column_sums(plan, values, w, [&](int j, real sum) {
    real move = first ? d[j] + weights[j] * sum : sum;
    d[j] = move, trial[j] = position[j] - move;
  });
  EACH(i, 0, plan.rows) {
    left[i] = damping[i] * w[i];
    of.rest[i] = residual[first + i] / scale[i];
  }
  __syncthreads();
  real size = total(first + plan.rows, of.partial, [&](int i) {
    if (i >= first) return residual[i] * of.rest[i - first];
    real r = residual[i] / unit(units, given, i);
    return r * r;
  });
  real length_of_d = sqrt(total(plan.columns, of.partial, [&](int j) { return d[j] * d[j]; }));
  size = sqrt(size);
  bool flat = length_of_d * (first + plan.rows + lambda) <= negligible * size && size < (real)INFINITY;
  if (flat) {  // the same for all threads; made certain by the gradient itself
    column_sums(plan, values, of.rest, [&](int j, real sum) { of.across[j] = sum; });
    __syncthreads();
    real gradient = total(plan.columns, of.partial, [&](int j) {
      real g = of.across[j] + (first ? residual[j] / unit(units, given, j) : (real)0);
      return g * g;
    });
    flat = sqrt(gradient) <= negligible * size;
  }
  if (threadIdx.x == 0) stalled[sample] = flat;
}

// Where a step led: value (B, rows) are g of the rows beside the box at `trial`. Everything behind `floor` is written. Rows
// are held as in repair/holding.py, if they are at all (`holds`).
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) settle(
    int rows, int first, int columns, const real* value, const real* lower, const real* upper, const real* residual,
    const bool* violated, const real* strictness, int strict, const real* scale, const real* units, int given,
    const real* sizes, int sized, const real* position, const real* trial, const real* d, const real* left,
    const real* level, const bool* stalled, const long long* status, const long long* steps, const real* worst,
    const real* best_position, const real* best, const long long* best_steps, const real* mark, const bool* held,
    int holds, double hold, double tol, int look, double progress, int exact, int paced, double ratio, double quick,
    double safe, double near_by, double good, double far_off, double just, double careful, double start, double fall,
    double smallest, double floor, real* new_position, real* new_residual, real* new_worst, real* new_level,
    long long* new_status, long long* new_steps, real* new_best_position, real* new_best, long long* new_best_steps,
    bool* new_held, bool* moved) {
  SHARED_MEMORY(partial);
  long long sample = blockIdx.x;
  int all = first + rows;
  value += sample * rows, scale += sample * rows, left += sample * rows;
  lower += sample * all, upper += sample * all, residual += sample * all, violated += sample * all;
  strictness += strict ? sample * all : 0, new_residual += sample * all;
  held += holds ? sample * all : 0, new_held += holds ? sample * all : 0;
  position += sample * columns, trial += sample * columns, d += sample * columns;
  best_position += sample * columns, new_position += sample * columns, new_best_position += sample * columns;
  auto row = [&](int i) { return i < first ? unit(units, given, i) * trial[i] : value[i - first]; };
  auto length = [&](int i) {
    if (i >= first) return scale[i - first];
    real c = unit(units, given, i);
    return c * c;
  };
  auto foreseen = [&](int i) {
    if (!violated[i]) return (real)0;
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
    real before = total(all, partial, [&](int i) { return residual[i] * residual[i] / length(i); });
    real later = total(all, partial, [&](int i) { return new_residual[i] * new_residual[i] / length(i); });
    real expected = total(all, partial, [&](int i) { return foreseen(i) * foreseen(i) / length(i); });
    real away = most_of(all, partial, [&](int i) { return residual[i] / sqrt(length(i)); });
    real size = sqrt(total(columns, partial, [&](int j) {
      real entry = position[j] * unit(sizes, sized, j);
      return entry * entry;
    }) / columns);
    real distance = size > 0 ? away / size : (real)INFINITY, gain = (before - later) / fabs(before - expected);
    bool right = (gain > (real)good && distance < (real)near_by) || (fabs(gain - 1) < (real)just && distance < (real)far_off);
    real lower_level = level[sample] * (real)ratio, quicker = fmax(level[sample] * (real)quick, (real)safe);
    real next = right ? fmin(lower_level, quicker) : lower_level;
    real within = fmin(fmax(distance, (real)smallest), (real)1), jumps = ceil(log(within) * (real)(2 / fall));
    real least = exp(jumps * (real)fall) * (real)start * (real)careful;  // of a start at this distance, and its share
    if (threadIdx.x == 0) new_level[sample] = fmax(fmax(next, least), (real)floor);
  } else if (paced && threadIdx.x == 0) {
    new_level[sample] = level[sample];
  }
  if (holds) {
    real reach = go ? sqrt(total(columns, partial, [&](int j) { return d[j] * d[j]; })) * (real)hold : (real)0;
    EACH(i, 0, all) {
      bool keeps = !go && held[i];
      if (go && violated[i] && lower[i] < upper[i] && new_residual[i] == 0 && foreseen(i) != 0) {
        real slack = row(i) - (foreseen(i) > 0 ? upper[i] : lower[i]);
        keeps = fabs(slack) <= reach * sqrt(length(i));
        if (keeps) new_residual[i] = slack;
      }
      new_held[i] = keeps;
    }
    __syncthreads();
  }
  EACH(i, 0, all) if (!go) new_residual[i] = residual[i];
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
