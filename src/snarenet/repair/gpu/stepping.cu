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

// From `position` by d = d_box + W J'w to `trial`, with the box eliminated if there is one (`weighted`); `raw` (B, nonzeros)
// are those of J there. Writes what the way back needs, `left` (B, rows), the residual that the linear model foresees, and
// whether the violation cannot be reduced any more: d is nothing beside it, and so is its gradient.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) step(
    const int* places, real* values, real* damping, real* weights, int weighted, real* transfer, real* length,
    real* scratch, int room, int inside, int* info, double least, double most, int refinements, double rounding,
    const real* raw, const real* residual, const bool* violated, int all, const real* scale, const real* level, int own,
    const real* position, real* d, real* w, real* left, real* trial, bool* stalled, double negligible) {
  const Plan plan = plan_of(places);
  SHARED_MEMORY(shared);
  Sample of = sample_of(plan, shared, scratch, room, inside);
  read_factor(plan, of, values, damping, weighted ? weights : nullptr, transfer, length);
  long long sample = blockIdx.x;
  int first = weighted ? plan.columns : 0;
  raw += sample * plan.nonzeros, values += sample * plan.nonzeros, damping += sample * plan.rows;
  residual += sample * (first + plan.rows), violated += sample * (first + plan.rows), scale += sample * plan.rows;
  weights += sample * first, w += sample * plan.rows, left += sample * plan.rows;
  position += sample * plan.columns, d += sample * plan.columns, trial += sample * plan.columns;
  real lambda = level[own ? sample : 0];
  EACH(i, 0, plan.rows) damping[i] = all || violated[first + i] ? scale[i] * lambda : (real)1;
  EACH(e, 0, plan.nonzeros) values[e] = all || violated[first + plan.row[e]] ? raw[e] : (real)0;
  EACH(j, 0, first) {
    bool used = all || violated[j];
    weights[j] = used ? lambda / (1 + lambda) : (real)1;
    d[j] = used ? residual[j] / (1 + lambda) : (real)0;
  }
  __syncthreads();
  bool done = factorise(plan, of, least, most);
  if (threadIdx.x == 0) info[sample] = !done;
  if (first) times(plan, values, d, left);
  __syncthreads();
  EACH(i, 0, plan.rows) {
    real r = all || violated[first + i] ? residual[first + i] : (real)0;
    left[i] = first ? r - left[i] : r;
  }
  __syncthreads();
  solve_refined(plan, of, left, w, refinements, rounding);
  transposed<false>(plan, values, w, of.across);
  __syncthreads();
  EACH(j, 0, plan.columns) {
    real move = first ? d[j] + weights[j] * of.across[j] : of.across[j];
    d[j] = move, trial[j] = position[j] - move;
  }
  EACH(i, 0, plan.rows) {
    left[i] = damping[i] * w[i];
    of.rest[i] = residual[first + i] / scale[i];
  }
  __syncthreads();
  real size = total(first + plan.rows, of.partial, [&](int i) {
    return residual[i] * (i < first ? residual[i] : of.rest[i - first]);
  });
  real length_of_d = sqrt(total(plan.columns, of.partial, [&](int j) { return d[j] * d[j]; }));
  size = sqrt(size);
  bool flat = length_of_d * (first + plan.rows + lambda) <= negligible * size && size < (real)INFINITY;
  if (flat) {  // the same for all threads; made certain by the gradient itself
    transposed<false>(plan, values, of.rest, of.across);
    __syncthreads();
    real gradient = total(plan.columns, of.partial, [&](int j) {
      real g = of.across[j] + (first ? residual[j] : (real)0);
      return g * g;
    });
    flat = sqrt(gradient) <= negligible * size;
  }
  if (threadIdx.x == 0) stalled[sample] = flat;
}

// Where a step led: value (B, rows) are g of the rows beside the box at `trial`. Everything behind `mark` is written.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) settle(
    int rows, int first, int columns, const real* value, const real* lower, const real* upper, const real* residual,
    const bool* violated, const real* strictness, int strict, const real* scale, const real* position,
    const real* trial, const real* d, const real* left, const real* level, const bool* stalled, const long long* status,
    const long long* steps, const real* worst, const real* best_position, const real* best, const long long* best_steps,
    const real* mark, double tol, int look, double progress, int exact, int paced, double ratio, double quick,
    double safe, double near_by, double good, double far_off, double just, double floor, real* new_position, real* new_residual, real* new_worst,
    real* new_level, long long* new_status, long long* new_steps, real* new_best_position, real* new_best,
    long long* new_best_steps, bool* moved) {
  SHARED_MEMORY(partial);
  long long sample = blockIdx.x;
  int all = first + rows;
  value += sample * rows, scale += sample * rows, left += sample * rows;
  lower += sample * all, upper += sample * all, residual += sample * all, violated += sample * all;
  strictness += strict ? sample * all : 0, new_residual += sample * all;
  position += sample * columns, trial += sample * columns, d += sample * columns;
  best_position += sample * columns, new_position += sample * columns, new_best_position += sample * columns;
  EACH(i, 0, all) {
    real g = i < first ? trial[i] : value[i - first];
    new_residual[i] = g - (g < lower[i] ? lower[i] : g > upper[i] ? upper[i] : g);
  }
  __syncthreads();
  real seen = most_of(all, partial, [&](int i) { return new_residual[i]; }), now = seen;
  if (strict) now = most_of(all, partial, [&](int i) { return new_residual[i] * strictness[i]; });
  bool going = status[sample] == GOING, finite = now < (real)INFINITY, go = going && finite;
  real held = go ? now : worst[sample];
  bool stuck = stalled[sample] || (look && best[sample] > (real)progress * mark[sample]);
  long long after = held <= (real)tol ? CONVERGED : stuck ? STALLED : GOING, count = steps[sample] + going;
  bool better = exact || (go && seen < best[sample]);
  if (paced) {
    auto length = [&](int i) { return i < first ? (real)1 : scale[i - first]; };
    real before = total(all, partial, [&](int i) { return residual[i] * residual[i] / length(i); });
    real later = total(all, partial, [&](int i) { return new_residual[i] * new_residual[i] / length(i); });
    real foreseen = total(all, partial, [&](int i) {
      real r = !violated[i] ? (real)0 : i < first ? residual[i] - d[i] : left[i - first];
      return r * r / length(i);
    });
    real away = most_of(all, partial, [&](int i) { return residual[i] / sqrt(length(i)); });
    real size = sqrt(total(columns, partial, [&](int j) { return position[j] * position[j]; }) / columns);
    real distance = size > 0 ? away / size : (real)INFINITY, gain = (before - later) / fabs(before - foreseen);
    bool right = (gain > (real)good && distance < (real)near_by) || (fabs(gain - 1) < (real)just && distance < (real)far_off);
    real lower_level = level[sample] * (real)ratio, quicker = fmax(level[sample] * (real)quick, (real)safe);
    real next = right ? fmin(lower_level, quicker) : lower_level;
    if (threadIdx.x == 0) new_level[sample] = fmax(next, (real)floor);
  }
  EACH(i, 0, all) if (!go) new_residual[i] = residual[i];
  EACH(j, 0, columns) {
    real at = go ? trial[j] : position[j];
    new_position[j] = at, new_best_position[j] = better ? at : best_position[j];
  }
  if (threadIdx.x == 0) {
    moved[sample] = go, new_worst[sample] = held, new_steps[sample] = count;
    new_status[sample] = !going ? status[sample] : !finite ? NONFINITE : after;
    new_best[sample] = better ? seen : best[sample], new_best_steps[sample] = better ? count : best_steps[sample];
  }
}

// From the cotangent v (B, columns) of a step's end: p (B, rows), those of them that are violated, q, and e and the
// multipliers of the box (B, columns); p, q and the latter are 0 where a sample did not move.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) adjoint(
    const int* places, const real* values, const real* damping, const real* weights, int weighted, real* transfer,
    real* length, real* scratch, int room, int refinements, double rounding, const bool* violated, const bool* moved,
    const real* level, int own, const real* v, real* p, real* q, real* e, real* box) {
  const Plan plan = plan_of(places);
  SHARED_MEMORY(shared);
  Sample of = sample_of(plan, shared, scratch, room, 0);
  read_factor(plan, of, values, damping, weighted ? weights : nullptr, transfer, length);
  long long sample = blockIdx.x;
  int first = weighted ? plan.columns : 0;
  violated += sample * (first + plan.rows), p += sample * plan.rows, q += sample * plan.rows;
  v += sample * plan.columns, e += sample * plan.columns, box += sample * first;
  real lambda = level[own ? sample : 0];
  EACH(j, 0, plan.columns) e[j] = first ? v[j] * of.weights[j] : v[j];
  __syncthreads();
  times(plan, of.values, e, q);
  __syncthreads();
  solve_refined(plan, of, q, p, refinements, rounding);
  __syncthreads();
  transposed<false>(plan, of.values, p, of.across);
  __syncthreads();
  EACH(j, 0, plan.columns) {
    real u = v[j] - of.across[j];
    e[j] = first ? u * of.weights[j] : u;
    if (first) box[j] = moved[sample] && violated[j] ? u / (1 + lambda) : (real)0;
  }
  EACH(i, 0, plan.rows) {
    real kept = moved[sample] ? p[i] : (real)0;
    p[i] = kept, q[i] = violated[first + i] ? kept : (real)0;
  }
}
