"""`repair`: set aside what is not finite, start, attempt, rescue, judge; what an attempt is says the engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from snarenet.constraints.base import Constraints, Instance, largest, residual
from snarenet.damping import Damping, as_damping
from snarenet.memo import Memo
from snarenet.repair.autograd import differentiable
from snarenet.repair.choose import choose, choose_bounded
from snarenet.repair.conflict import remember
from snarenet.repair.engine import Batch
from snarenet.repair.metric import Metric, metric_of
from snarenet.repair.options import Options, Rescue, Rows, Solver, Start, Store, as_start, as_weights
from snarenet.repair.precision import in_full_precision, judge, output_dtype, tell
from snarenet.repair.rescue import attempts, begin, elsewhere
from snarenet.repair.start.nearest import Plan, approach, plan, seek, slide
from snarenet.repair.stopping import CONVERGED, GOING, NONFINITE, ran_away
from snarenet.solution import Solution
from snarenet.tracing import tracing, without_grad


def repair(
    constraints: Constraints,
    y: Tensor,
    x: Any = None,
    *,
    start: Start = "auto",
    damping: float | Damping | Literal["auto"] = "auto",
    rows: Rows = "auto",
    tol: float = 1e-8,
    max_steps: int = 100,
    relax: float | Tensor = 0.0,
    rescue: Rescue = False,
    restarts: int = 0,
    weights: Tensor | None = None,
    scale: Tensor | None = None,
    solver: Solver = "auto",
    store_factors: Store = "auto",
    dtype: torch.dtype | None = None,
    nearest: int | None = None,
) -> Solution:
    """Repair a batch of predictions; gradients flow to y, x, the bounds and every tensor inside the constraints.

    Args:
        constraints: the set to reach.
        y: (B, n) predictions.
        x: inputs of the set: None, a tensor or a pytree of tensors, each with one row per sample.
        start: where the steps begin. None: at y, as in the paper. `Nearest(k)`: at the nearest point of the set, or
            close to it, after so many iterations. Where all rows are linear and constant, these are of ADMM, and 20 to
            60 make the result nearly the orthogonal projection. With rows that have diagonal Hessians, or depend on x,
            they are of an active-set method, 10 to 26; with any others they are interior-point steps, 10 to 20, from
            a repaired point unless the set is known to be convex. Then the projection is exact, or, where it did not
            settle, near, or not made. "auto" is `Nearest()`: numbers of 35, 26 and 20, and other methods for what these
            do not find, so that linear rows end within 0.1 % of the nearest distance; and a second beginning, at y, for
            samples that do not reach the set. It is None with a solver without matrices, and for rows of the last kind
            where the repair is exported (with a warning) or recorded.
        damping: `Constant`, `Annealed` or `Adaptive`; a number means `Constant`. "auto" is what suits the start:
            `Annealed(1e-3, 0.1)` after 20 iterations of ADMM or more, else `Annealed()`.
        rows: rows of J in a step: "all" (the paper), "active" (equalities and violated inequalities), or "auto": all
            where the Jacobian is constant with full row rank, active otherwise.
        tol: a sample stops when no row is violated by more than this; 0 takes `max_steps` steps.
        max_steps: limit on steps.
        relax: widens every bound, a number, (rows,) or (B, rows), all >= 0.
        rescue: repair samples that did not converge again: by other `weights`, equal ones first, in up to six attempts
            that never leave the first box, with `Adaptive` damping, rows weighed at each step or not at all, a bold
            first step, small random moves from the best point so far, and last, or first where all rows are linear, by
            interior-point steps to the nearest point. "first" makes the first of these attempts alone. Results are
            reproducible and do not depend on the batch.
        restarts: repair samples that are still outside then so many times more, from predictions moved far away at
            random, and keep the nearest point of the set that was found: for sets with several pieces. Samples that
            reached the set before are left as they are.
        weights: (n,) positive numbers: how dear it is to move each variable. Every step, and most of the rescue's, and
            the start measure distances by sum_i weights_i (y_i - z_i)^2. Only their ratios matter, and they get no
            gradient. The second derivatives of an objective make the result a good one.
        scale: (n,) a typical size of each variable, or how far it spreads: the same as weights = 1 / scale**2.
        solver: "auto" chooses direct linear algebra by structure; `ConjugateGradients()` never forms J, for large
            problems.
        store_factors: keep each step's factor for the backward pass, or compute it again; "auto" keeps up to 1 GiB,
            or on a GPU a thirty-second of its memory if that is more.
        dtype: precision of the repair, float64 unless given. Values come back in the dtype of y, but at least in
            float32; a tolerance that this cannot hold is judged by what it can, with a `PrecisionWarning`.
        nearest: deprecated, the iterations of `start=Nearest(nearest)`.
    """
    options = Options(
        as_damping(damping), rows, tol, max_steps, rescue, as_start(start, nearest), restarts, solver, store_factors,
        dtype or torch.float64,
    )  # fmt: skip
    weights = as_weights(weights, scale, constraints.memo)
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
    first: Solution | None = None,
    recorded: bool = False,
    near: Tensor | None = None,
) -> Solution:
    """`repair` with options that were checked before; it warns of nothing.

    `first` is what a first attempt came to, if there was one: only samples that it left outside are attempted again.
    `recorded` has it begin where a recorded repair can. `near` are points (B, n) in whose valley of a set that is not
    convex the nearest point to y is sought, y itself unless given.
    """
    if not tracing() and torch.is_inference_mode_enabled():  # which makes no graphs, and derivatives come from these
        with torch.inference_mode(False), torch.no_grad():
            y, x, near = (tree_map(_copied, given) for given in (y, x, near))
            return repair_with(options, constraints, y, x, relax, weights, first, recorded, near)
    return in_full_precision(
        lambda y, x: _repair(options, constraints, y, x, relax, weights, first, recorded, near), y, x
    )


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _repair(
    options: Options,
    constraints: Constraints,
    y: Tensor,
    x: Any,
    relax: float | Tensor,
    weights: Tensor | None,
    first: Solution | None,
    recorded: bool,
    near: Tensor | None,
) -> Solution:
    """The whole course, without autocast."""
    work, finite, predicted, instance = constraints.prepare(y, x, relax, options.dtype)
    metric = metric_of(options, constraints.memo, weights, predicted.shape[1])
    output = output_dtype(y.dtype)
    chosen = plan(constraints.memo, options, instance, metric, recorded)
    asked = replace(options, tol=options.aim(output), damping=chosen.damping)
    course = _Course(constraints.memo, instance, instance, None, chosen, weights)
    if metric is not None:
        course = course._replace(taken=instance._replace(map=metric.map(instance.map)), metric=metric)
    start = course.begin(asked, predicted, None if near is None else near.detach().to(predicted))
    if first is None:
        out = course.attempt(asked, start, finite)
    else:
        known = _Judged(first.value.to(start.dtype), first.status, first.steps, first.violation)
        out = _again(known, asked, course, start, finite)
    if not tracing():
        out = _others(options, asked, course, _Points(predicted, start, finite), out)
    value = torch.where(finite.unsqueeze(1), out.value, work).to(output)
    violation, allowance, status = out.violation, torch.zeros_like(out.violation), out.status
    if output != torch.float64 or options.dtype != torch.float64:  # what is returned is not what was judged
        if options.dtype != torch.float64:
            instance = constraints.at(predicted.to(torch.float64), x).relaxed(relax)
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

    def nearest(self, other: _Judged, y: Tensor, weights: Tensor | None) -> _Judged:
        """The same with what is nearer to y in the set, or, where neither is in it, less outside; steps add up."""
        far, near = (_distance(judged.value, y, weights) for judged in (self, other))
        reached, before = other.status == CONVERGED, self.status == CONVERGED
        better = torch.where(reached & before, near < far, torch.where(reached | before, reached, False))
        better = better | (~reached & ~before & (other.violation < self.violation))
        value = torch.where(better.unsqueeze(1), other.value, self.value)
        status, violation = (torch.where(better, b, a) for a, b in ((self.status, other.status), (self[3], other[3])))
        return _Judged(value, status, self.steps + other.steps, violation)


class _Course(NamedTuple):
    """What a repair goes by, the same for all attempts.

    Attributes:
        memo: keeps what is computed once.
        given: the constraints on y: what was reached is judged by them.
        taken: the constraints on the variables that steps are taken in; the same without a metric.
        metric: the way between these variables and y.
        plan: where it begins.
        weights: (n,) those of the start.
    """

    memo: Memo
    given: Instance
    taken: Instance
    metric: Metric | None
    plan: Plan
    weights: Tensor | None

    def select(self, index: Tensor) -> _Course:
        """That of some of the samples."""
        given = self.given.select(index)
        return self._replace(given=given, taken=self.taken.select(index) if self.metric else given)

    def by(self, power: float, options: Options) -> _Course:
        """That in the metric of a power of the weights."""
        if power == 1:
            return self
        metric = metric_of(options, self.memo, self.weights, None, power) if power else None
        taken = self.given if metric is None else self.given._replace(map=metric.map(self.given.map))
        return self._replace(taken=taken, metric=metric)

    def begin(self, options: Options, y: Tensor, near: Tensor | None = None) -> Tensor:
        """Where the repair of y begins."""
        return approach(self.memo, self.given, y, self.plan, self.weights, self.metric, options.tol, near)

    def attempt(self, options: Options, y: Tensor, finite: Tensor, bounded: bool | None = None) -> _Judged:
        """One way from y to the set, judged by what it leads to; `bounded`: in the rescue's space, scaled or not."""
        first, asked, units, memo = y, options, None, self.memo
        if self.metric is not None:
            first, asked, units = self.metric.into(y), self.metric.stricter(options), self.metric.units
            memo = self.metric.memo
        if bounded is None:
            engine, lower, upper = choose(asked, memo, self.taken, first, units)
        else:
            (engine, lower, upper), first = choose_bounded(asked, self.taken, first, bounded)
        value, status, steps = differentiable(engine, Batch(first, lower, upper, finite))
        if self.metric is not None:
            value, first = self.metric.back(value, y), self.metric.back(first, y)
        violation = _violation(self.given, value)
        reached = finite & (
            violation <= options.tol
        )  # certain only now: engines round, and may be stricter than needed
        status = torch.where(reached, CONVERGED, torch.where(status == CONVERGED, GOING, status))
        judged = _Judged(value, status, steps, violation)
        # kernels keep no point but the last: what they made worse is set back to where it began
        kept = engine.keeps_best or options.tol == 0 or tracing()
        return judged if kept else _no_worse(judged, self.given, first)


class _Points(NamedTuple):
    """(B, n) what was predicted, and where its repair began; (B,) which of them are finite."""

    predicted: Tensor
    start: Tensor
    finite: Tensor


def _others(options: Options, asked: Options, course: _Course, points: _Points, out: _Judged) -> _Judged:
    """The same with whatever else may help samples that did not converge."""
    predicted, start, finite = points
    if options.start == "auto" and course.plan.method != "none" and options.tol:
        other = (start != predicted).any(1).detach() | (asked.damping != options.rule)
        out = _again(out, replace(asked, damping=options.rule), course, predicted, finite & other)
    if options.rescue:
        out = _rescue(asked, course, points, out)
    if options.restarts:
        out = _restart(options, asked, course, points, out)
    if course.plan.method != "none" and options.tol:  # a projection that failed may be worse than the prediction
        out = _no_worse(out, course.given, predicted)
    return out


def _again(out: _Judged, options: Options, course: _Course, start: Tensor, finite: Tensor) -> _Judged:
    """The same with samples that did not converge attempted from the start."""
    failed = ((out.status != CONVERGED) & finite).nonzero().squeeze(1)
    if not len(failed):
        return out
    return out.improved(failed, course.select(failed).attempt(options, start[failed], finite[failed]))


def _rescue(options: Options, course: _Course, points: _Points, out: _Judged) -> _Judged:
    """The same with other attempts for samples that did not converge, as long as there are any."""
    for attempt in attempts(options, course.given, course.metric is not None):
        failed = ((out.status != CONVERGED) & points.finite).nonzero().squeeze(1)
        if not len(failed):
            break
        if attempt.straight:
            out = _sought(options, course, points, failed, out)
            continue
        y = begin(attempt, points.start[failed], out.value[failed])
        plain = attempt.damping is None or options.krylov is not None  # the space of the rescue needs a matrix
        part = course.by(attempt.power, options).select(failed)
        again = part.attempt(attempt.options(options), y, points.finite[failed], None if plain else attempt.scaled)
        out = out.improved(failed, again)
    return out


def _sought(options: Options, course: _Course, points: _Points, failed: Tensor, out: _Judged) -> _Judged:
    """The same with samples that are repaired from the nearest point to their prediction, where it is found."""
    predicted = points.predicted[failed]
    found = seek(course.given.select(failed), predicted, course.weights, options.tol)
    some = (found != predicted).any(1).detach().nonzero().squeeze(1)
    if not len(some):
        return out
    samples = failed[some]
    return out.improved(samples, course.select(samples).attempt(options, found[some], points.finite[samples]))


def _restart(options: Options, asked: Options, course: _Course, points: _Points, out: _Judged) -> _Judged:
    """The same with samples that are still outside repaired from elsewhere; of the points found, the nearest counts."""
    failed = ((out.status != CONVERGED) & points.finite).nonzero().squeeze(1)
    if not len(failed):
        return out
    part, y, finite = course.select(failed), points.predicted[failed], points.finite[failed]
    best, once = _Judged(*(tensor[failed] for tensor in out)), replace(options, restarts=0)
    for k in range(options.restarts):
        other = elsewhere(k, y)
        start = part.begin(asked, other)
        found = part.attempt(asked, start, finite)
        found = _others(once, asked, part, _Points(other, start, finite), found)
        best = best.nearest(found, y, course.weights)
        if course.plan.looks:  # from a point of a piece to the one of this piece that is nearest to y
            start = slide(part.given, y, found.value, found.status == CONVERGED, course.weights)
            best = best.nearest(part.attempt(asked, start, finite), y, course.weights)
    return _Judged(*(old.index_copy(0, failed, new) for old, new in zip(out, best, strict=True)))


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


def _distance(z: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """(B,) the squared distance in the metric."""
    squares = (z - y).detach().square()
    return squares.sum(1) if weights is None else (weights.to(z.dtype) * squares).sum(1)


def _violation(instance: Instance, y: Tensor) -> Tensor:
    """(B,) the largest violation of y, infinite where it is not a number."""
    with without_grad():
        worst = largest(residual(instance.map.value(y), instance.lower, instance.upper))
        return torch.where(worst.isnan(), math.inf, worst)
