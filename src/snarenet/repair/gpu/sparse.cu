// Kernels of sparse systems: factors of a batch, solutions with them, and products with J. `sparse.py` starts them.

#include "sparse.cuh"

// values (B, nonzeros) and damping (B, rows) of the rows in use, else 0 and 1; weights (B, columns) are the inverse ones.
// Writes transfer (B, kept), length (B,) and info (B,), not 0 where there is no factor.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) factor(
    const int* places, const real* values, const real* damping, const real* weights, int weighted, real* transfer,
    real* length, real* scratch, int room, int inside, int* info, double least, double most) {
  SHARED_MEMORY(shared);
  const Work& work = set_up(
      shared, places, values, damping, weighted ? weights : nullptr, transfer, length, scratch, room, inside, false);
  const Plan& plan = work.plan;
  const Sample& of = work.of;
  bool done = factorise(plan, of, least, most);
  if (threadIdx.x == 0) info[blockIdx.x] = !done;
}

// found (B, rows) for right-hand sides rhs (B, rows)
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT) solve(
    const int* places, const real* values, const real* damping, const real* weights, int weighted, real* transfer,
    real* length, real* scratch, int room, int inside, const real* rhs, real* found, int refinements, double rounding) {
  SHARED_MEMORY(shared);
  const Work& work = set_up(
      shared, places, values, damping, weighted ? weights : nullptr, transfer, length, scratch, room, inside, true);
  const Plan& plan = work.plan;
  const Sample& of = work.of;
  long long first = (long long)blockIdx.x * plan.rows;
  solve_refined(plan, of, rhs + first, found + first, refinements, rounding);
}

extern "C" __global__ void push(const int* places, const real* values, const real* v, real* out) {
  const Plan plan = plan_of(places);
  long long sample = blockIdx.x;
  row_sums(plan, values + sample * plan.nonzeros, v + sample * plan.columns, [&](int i, real sum) { out[sample * plan.rows + i] = sum; });
}

extern "C" __global__ void pull(const int* places, const real* values, const real* w, real* out) {
  const Plan plan = plan_of(places);
  long long sample = blockIdx.x;
  column_sums(plan, values + sample * plan.nonzeros, w + sample * plan.rows, [&](int j, real sum) { out[sample * plan.columns + j] = sum; });
}
