"""`repair`: set aside what is not finite, start, attempt, rescue, judge; what an attempt is says the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Constraints, Instance, largest, residual
from snarenet.damping import Annealed, Damping, as_damping
from snarenet.repair.autograd import differentiable
from snarenet.repair.choose import Choice, choose, choose_bounded
from snarenet.repair.conflict import remember
from snarenet.repair.engine import Batch
from snarenet.repair.options import Options, Rows, Solver, Store, check_weights
from snarenet.repair.precision import in_full_precision, judge, output_dtype, tell
from snarenet.repair.rescue import attempts, begin
from snarenet.repair.start.nearest import approach
from snarenet.repair.stopping import CONVERGED, GOING, NONFINITE, ran_away
from snarenet.solution import Solution
from snarenet.tracing import tracing, without_grad


def repair(
    constraints: Constraints,
    y: Tensor,
    x: Any = None,
    *,
    damping: float | Damping = Annealed(),
    rows: Rows = "auto",
    tol: float = 1e-8,
    max_steps: int = 100,
    relax: float | Tensor = 0.0,
    rescue: bool = False,
    nearest: int = 0,
    weights: Tensor | None = None,
    solver: Solver = "auto",
    store_factors: Store = "auto",
    dtype: torch.dtype | None = None,
) -> Solution:
    """Repair a batch of predictions; gradients flow to y, x, the bounds and every tensor inside the constraints.

    Args:
        constraints: the set to reach.
        y: (B, n) predictions.
        x: inputs of the set: None, a tensor or a pytree of tensors, each with one row per sample.
        damping: `Constant`, `Annealed` or `Adaptive`; a number means `Constant`.
        rows: rows of J in a step: "all" (the paper), "active" (equalities and violated inequalities), or "auto": all
            where the Jacobian is constant with full row rank, active otherwise.
        tol: a sample stops when no row is violated by more than this; 0 takes `max_steps` steps.
        max_steps: limit on steps.
        relax: widens every bound, a number, (rows,) or (B, rows), all >= 0.
        rescue: repair samples that did not converge again, in up to six attempts that never leave the first box: with
            `Adaptive` damping, rows weighed at each step or not at all, a bold first step, small random moves from the
            best point so far. Results are reproducible and do not depend on the batch.
        nearest: first go towards the nearest point of the set, by so many iterations. Where all rows are linear and
            constant, these are of ADMM, and 20 to 60 make the result nearly the orthogonal projection; then a small
            damping does for the rest, such as `Annealed(1e-3, 0.1)`. With rows that have diagonal Hessians, or depend
            on x, they are of an active-set method, 10 to 26; with any others they are interior-point steps from a
            repaired point, 10 to 20. Then the projection is exact, or, where it was not found, not made. Without
            matrices, exported or recorded, only constant linear rows count next to those others.
        weights: (n,) positive numbers, the metric of `nearest`: it measures distances by
            sum_i weights_i (y_i - z_i)^2. The second derivatives of an objective make the nearest point a good one.
        solver: "auto" chooses direct linear algebra by structure; `ConjugateGradients()` never forms J, for large
            problems.
        store_factors: keep each step's factor for the backward pass, or compute it again; "auto" keeps up to 1 GiB.
        dtype: precision of the repair, float64 unless given. Values come back in the dtype of y, but at least in
            float32; a tolerance that this cannot hold is judged by what it can, with a `PrecisionWarning`.
    """
    options = Options(
        as_damping(damping), rows, tol, max_steps, rescue, nearest, solver, store_factors, dtype or torch.float64
    )
    if not nearest or not isinstance(weights, Tensor):  # their numbers are checked once, where they are used
        check_weights(weights, nearest)
    solution = repair_with(options, constraints, y, x, relax, weights)
    tell(solution, tol)
    return remember(solution, constraints, x, relax, options)


def repair_with(
    options: Options,
    constraints: Constraints,
    y: Tensor,
    x: Any = None,
    relax: float | Tensor = 0.0,
    weights: Tensor | None = None,
) -> Solution:
    """`repair` with options that were checked before; it warns of nothing."""
    return in_full_precision(lambda y, x: _repair(options, constraints, y, x, relax, weights), y, x)


def _repair(
    options: Options, constraints: Constraints, y: Tensor, x: Any, relax: float | Tensor, weights: Tensor | None
) -> Solution:
    """The whole course, without autocast."""
    work, finite, start, instance = constraints.prepare(y, x, relax, options.dtype)
    predicted = start
    if options.nearest:
        matrix_free = options.krylov is not None
        start = approach(constraints.memo, instance, start, options.nearest, weights, matrix_free)
    output = output_dtype(y.dtype)
    aim = options.aim(output)
    asked = options if aim == options.tol else replace(options, tol=aim)
    out = _attempt(aim, choose(asked, constraints.memo, instance, start), instance, start, finite)
    if options.rescue and not tracing():
        out = _rescue(asked, constraints, instance, start, finite, out)
    if options.nearest and options.tol and not tracing():  # a projection that failed may be worse than the prediction
        out = _no_worse(out, instance, predicted)
    value = torch.where(finite.unsqueeze(1), out.value, work).to(output)
    violation, allowance, status = out.violation, torch.zeros_like(out.violation), out.status
    if output != torch.float64 or options.dtype != torch.float64:  # what is returned is not what was judged
        if options.dtype != torch.float64:
            instance = constraints.at(start.to(torch.float64), x).relaxed(relax)
        violation, allowance, status = judge(instance, value, options.tol, options.dtype, status)
    return Solution(value, y, status, out.steps, torch.where(finite, violation, math.inf), allowance)


class _Judged(NamedTuple):
    """What one attempt at a repair led to, for every sample."""

    value: Tensor
    status: Tensor
    steps: Tensor
    violation: Tensor

    def improved(self, samples: Tensor, again: _Judged) -> _Judged:
        """This with `samples` replaced by a second attempt, where that is better; its steps count anyway."""
        better = (again.violation < self.violation[samples]).nonzero().squeeze(1)
        value, status, _, violation = (
            old.index_copy(0, samples[better], new[better]) for old, new in zip(self, again, strict=True)
        )
        return _Judged(value, status, self.steps.index_add(0, samples, again.steps), violation)


def _rescue(
    options: Options, constraints: Constraints, instance: Instance, start: Tensor, finite: Tensor, out: _Judged
) -> _Judged:
    """The same with other attempts for samples that did not converge, as long as there are any."""
    for attempt in attempts(options, instance):
        failed = ((out.status != CONVERGED) & finite).nonzero().squeeze(1)
        if not len(failed):
            break
        part, asked = instance.select(failed), attempt.options(options)
        y = begin(attempt, start[failed], out.value[failed])
        if attempt.damping is None or options.krylov is not None:  # the space of the rescue needs a matrix
            choice = choose(asked, constraints.memo, part, y)
        else:
            choice, y = choose_bounded(asked, part, y, attempt.scaled)
        out = out.improved(failed, _attempt(asked.tol, choice, part, y, finite[failed]))
    return out


def _attempt(tol: float, choice: Choice, instance: Instance, y: Tensor, finite: Tensor) -> _Judged:
    """One way from y to the set, judged by what it leads to."""
    engine, lower, upper = choice
    value, status, steps = differentiable(engine, Batch(y, lower, upper, finite))
    violation = _violation(instance, value)
    reached = finite & (violation <= tol)  # certain only now: engines round, and may be stricter than needed
    status = torch.where(reached, CONVERGED, torch.where(status == CONVERGED, GOING, status))
    judged = _Judged(value, status, steps, violation)
    # kernels keep no point but the last: what they made worse is set back to where it began
    return judged if engine.keeps_best or tol == 0 or tracing() else _no_worse(judged, instance, y)


def _no_worse(judged: _Judged, instance: Instance, y: Tensor) -> _Judged:
    """The same with y, and a word on those that ran away, where a sample that failed is worse than y was."""
    failed = (judged.status != CONVERGED).nonzero().squeeze(1)
    if not len(failed):
        return judged
    before, after = _violation(instance.select(failed), y[failed]), judged.violation[failed]
    lost = failed[ran_away(judged.value[failed].detach(), after, y[failed].detach(), before)]
    status = judged.status.index_fill(0, lost, NONFINITE)
    worse = failed[before < after]
    value = judged.value.index_copy(0, worse, y[worse])
    violation = judged.violation.index_copy(0, worse, before[before < after])
    return _Judged(value, status, judged.steps, violation)


def _violation(instance: Instance, y: Tensor) -> Tensor:
    """(B,) the largest violation of y, infinite where it is not a number."""
    with without_grad():
        worst = largest(residual(instance.map.value(y), instance.lower, instance.upper))
        return torch.where(worst.isnan(), math.inf, worst)
