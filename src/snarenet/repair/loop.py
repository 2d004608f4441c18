r"""`repair`: the only loop. It takes predictions to the set l(x) <= g(y, x) <= u(x); its backward is the exact adjoint.

$$ y \leftarrow y - J^\top w, \qquad (J J^\top + \lambda_k D)\, w = r, $$
$$ r = \mathrm{relu}(g - u - \varepsilon) - \mathrm{relu}(l - \varepsilon - g) $$

A sample stops when its own max |r| is at most `tol`, and is never moved again. The steps are recorded, not unrolled:
`_iterate` goes forward and writes a tape, `_pull_back` reads it backward; what a step is, either way, says `spaces.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Constraints, Instance, largest, residual
from snarenet.constraints.maps import add
from snarenet.damping import Adaptive, Annealed, Damping, as_damping
from snarenet.linalg import ConjugateGradients
from snarenet.repair import curved, fused
from snarenet.repair.curved import CurvedSpace
from snarenet.repair.nearest import approach
from snarenet.repair.options import Rows, Solver, Store, check_count, check_options, check_weights, relaxed
from snarenet.repair.spaces import ConstraintSpace, Space
from snarenet.repair.structure import choose_space
from snarenet.repair.tape import Step, Tape
from snarenet.solution import Solution, Status
from snarenet.tracing import tracing, without_grad

# plain numbers: a compiled loop does not compare tensors with members of an enum
_CONVERGED, _GOING, _STALLED, _NONFINITE = (
    int(status) for status in (Status.CONVERGED, Status.MAX_STEPS, Status.STALLED, Status.NONFINITE)
)

_STORE_BYTES = 2**30  # factors kept for the backward pass when `store_factors="auto"`


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
        rescue: repair samples that did not converge again, from y, with active rows and `Adaptive` damping.
        nearest: first go towards the nearest point of the set, by so many iterations. Where all rows are linear and
            constant, these are of ADMM, and 20 to 60 make the result nearly the orthogonal projection; then a small
            damping does for the rest, such as `Annealed(1e-3, 0.1)`. With diagonal Hessians, or rows that depend on
            x, they are of Newton's method, 10 to 26, and the projection is exact, or, where it was not found, not made.
            Next to other rows only those that are linear and constant count.
        weights: (n,) positive numbers, how dear it is to move each variable: `nearest` then measures distances by
            sum_i weights_i (y_i - z_i)^2. The second derivatives of an objective make the nearest point a good one.
        solver: "auto" chooses direct linear algebra by structure; `ConjugateGradients()` never forms J, for large
            problems.
        store_factors: keep each step's factor for the backward pass, or compute it again; "auto" keeps up to 1 GiB.
        dtype: precision of the repair, float64 unless given; values come back in the dtype of y.
    """
    damping = as_damping(damping)
    dtype = check_options(rows, tol, max_steps, solver, store_factors, dtype)
    check_count("nearest", nearest)
    if not nearest or not isinstance(weights, Tensor):  # their numbers are checked once, where they are used
        check_weights(weights, nearest)
    work = constraints.check(y).to(dtype)
    finite = work.isfinite().all(1)
    start = torch.where(finite.unsqueeze(1), work, 0.0)
    instance = relaxed(constraints.at(start, x), relax)
    if nearest:
        start = approach(constraints.memo, instance, start, nearest, weights)
    room = _STORE_BYTES if store_factors == "auto" else math.inf if store_factors else 0
    krylov = solver if isinstance(solver, ConjugateGradients) else None

    def attempt(instance: Instance, y: Tensor, finite: Tensor, damping: Damping, rows: Rows) -> _Outcome:
        space, lower, upper = choose_space(constraints.memo, instance, y, damping, rows, krylov, room)
        value, status, steps = _run(_Job(space, damping, tol, max_steps, finite), y, lower, upper)
        violation = _violation(instance, value)
        reached = finite & (violation <= tol)  # certain only now: the loop rounds, and may be stricter than it has to
        status = torch.where(reached, _CONVERGED, torch.where(status == _CONVERGED, _GOING, status))
        return _Outcome(value, status, steps, violation)

    out = attempt(instance, start, finite, damping, rows)
    if rescue and (damping, rows) != (Adaptive(), "active") and not tracing():
        failed = ((out.status != _CONVERGED) & finite).nonzero().squeeze(1)
        if len(failed):
            again = attempt(instance.select(failed), start[failed], finite[failed], Adaptive(), "active")
            out = out.improved(failed, again)
    value = torch.where(finite.unsqueeze(1), out.value, work).to(y.dtype)
    violation = out.violation if y.dtype == dtype else _violation(instance, value.to(dtype))
    return Solution(value, y, out.status, out.steps, torch.where(finite, violation, math.inf))


class _Outcome(NamedTuple):
    """What one attempt at a repair led to, for every sample."""

    value: Tensor
    status: Tensor
    steps: Tensor
    violation: Tensor

    def improved(self, samples: Tensor, again: _Outcome) -> _Outcome:
        """This outcome with `samples` replaced by a second attempt, where that is better; its steps count anyway."""
        better = (again.violation < self.violation[samples]).nonzero().squeeze(1)
        value, status, _, violation = (
            old.index_copy(0, samples[better], new[better]) for old, new in zip(self, again, strict=True)
        )
        return _Outcome(value, status, self.steps.index_add(0, samples, again.steps), violation)


def _violation(instance: Instance, y: Tensor) -> Tensor:
    """(B,) the largest violation of y, infinite where it is not a number."""
    with without_grad():
        worst = largest(residual(instance.map.value(y), instance.lower, instance.upper))
        return torch.where(worst.isnan(), math.inf, worst)


class _Job(NamedTuple):
    """An attempt at a repair, ready to run."""

    space: Space | CurvedSpace
    damping: Damping
    tol: float
    max_steps: int
    finite: Tensor  # (B,) true where the prediction is


def _run(job: _Job, y: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, ...]:
    """The loop: (value, status, steps), with the adjoint behind it where a gradient is needed."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():  # an exported model is for inference
        with without_grad():
            return _iterate(job, y, lower, upper)
    if torch.compiler.is_compiling() and not job.space.traceable:
        return _differentiate_eagerly(job, y, lower, upper)  # pyright: ignore
    return _differentiate(job, y, lower, upper)


def _differentiate(job: _Job, y: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, ...]:
    tensors = job.space.tensors(y)
    if any(t.requires_grad for t in (y, lower, upper, *tensors)):
        return _Repair.apply(job, y, lower, upper, *tensors)  # pyright: ignore
    with torch.no_grad():
        return _iterate(job, y, lower, upper)


_differentiate_eagerly = torch.compiler.disable(_differentiate)


class _Repair(torch.autograd.Function):
    """The loop as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, job: _Job, y: Tensor, lower: Tensor, upper: Tensor, *tensors: Tensor) -> Any:
        tape, leaves = Tape(bounds=lower.requires_grad or upper.requires_grad), {}
        job = job._replace(space=job.space.detached(leaves))
        value, status, steps = _iterate(job, y, lower, upper, tape)
        ctx.space, ctx.tape, ctx.tensors = job.space, tape, tuple(leaves.get(id(t), t) for t in tensors)
        ctx.failures = tape.whole is None and not tracing() and bool((status != _CONVERGED).any())
        ctx.save_for_backward(y, *tensors)  # so that autograd notices when one of them is overwritten
        ctx.mark_non_differentiable(status, steps)
        return value, status, steps

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        y, v = ctx.saved_tensors[0], gradients[0]
        if ctx.tape.whole is not None:
            found = ctx.tape.whole(y, v)
            return None, found.y, found.lower, found.upper
        steps = ctx.tape.steps
        if ctx.failures:  # one that was given up, or rescued, may have gone too far for its steps to be pulled back
            steps = ctx.tape.without((v == 0).all(1))
        found = _pull_back(ctx.space, steps, y, v, ctx.tensors)
        return None, found.y, found.lower, found.upper, *found.tensors


class _Live(NamedTuple):
    """The samples at work and where they stand; a sample is going while its status is MAX_STEPS."""

    samples: Tensor | None  # their places in the batch; None for the whole batch
    space: Space
    lower: Tensor
    upper: Tensor
    pinned: Tensor  # rows that are equalities
    strictness: Tensor | None  # factors on the residual before it is compared with the tolerance
    position: Tensor
    residual: Tensor
    worst: Tensor
    level: float | Tensor  # the damping of the next step
    status: Tensor
    steps: Tensor

    def select(self, keep: Tensor) -> _Live:
        """Some of these samples."""
        samples = keep if self.samples is None else self.samples[keep]
        rest: Any = (tensor[keep] if isinstance(tensor, Tensor) else tensor for tensor in self[2:])
        return _Live(samples, self.space.select(keep), *rest)

    def write(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(position, status, steps) of the whole batch, with these samples brought up to date."""
        mine = (self.position, self.status, self.steps)
        if self.samples is None:
            return mine
        return tuple(old.index_copy(0, self.samples, new) for old, new in zip(batch, mine, strict=True))


def _iterate(job: _Job, y: Tensor, lower: Tensor, upper: Tensor, tape: Tape | None = None) -> tuple[Tensor, ...]:
    """Run the loop: (value, status, steps). Each step is written to `tape`, if there is one.

    In eager mode samples that stop leave the batch, and the loop ends with the last one. A compiled or recorded loop
    cannot choose: it takes all `max_steps` steps and freezes the samples that have stopped.
    """
    space, damping, eager = job.space, job.damping, not tracing()
    if isinstance(space, CurvedSpace):
        return _iterate_curved(job, space, y, lower, upper, tape)
    tol = max(job.tol / 2, job.tol - space.slack)
    position = space.start(y)
    if isinstance(space, ConstraintSpace) and fused.available(position, damping):
        return _iterate_fused(job, space, y, position, lower, upper, tape)
    r = residual(space.value(position), lower, upper)
    worst = largest(r)
    status = _judge(worst, job.tol, broken=~job.finite | ~(worst < math.inf), stalled=None)
    strictness = _strictness(space.scales().expand_as(r), job.tol) if damping.relative else None
    if strictness is not None and eager and bool((strictness == 1).all()):
        strictness = None
    level, steps = damping.first(y), torch.zeros_like(status)
    s = _Live(None, space, lower, upper, lower == upper, strictness, position, r, worst, level, status, steps)
    batch = s.write(())
    stopped = eager and (y.shape[0] == 0 or not bool((status == _GOING).all()))
    for k in range(job.max_steps):
        if stopped:
            batch = s.write(batch)
            s = s.select((s.status == _GOING).nonzero().squeeze(1))
            if not len(s.status):
                break
        violated = (s.residual != 0) | s.pinned
        trial, record = s.space.step(s.position, s.residual, violated, s.level)
        r = residual(s.space.value(trial), s.lower, s.upper)
        worst = largest(r if s.strictness is None else r * s.strictness)
        stalled, gain = s.space.stationary(s.residual, s.level, record), None
        if damping.searches:
            gain, idle = _gain(s, violated, trial, r, record)
            stalled = idle if stalled is None else idle | stalled
        if eager and gain is None and _all_go_on(worst, tol, stalled):
            stopped, moved, status = False, None, s.status
        else:
            moved, status = _settle(s, worst, gain, stalled, tol)
            stopped = eager and not bool((status == _GOING).all())
            if eager and bool(moved.all()):
                moved = None
            else:
                trial, r = (torch.where(moved.unsqueeze(1), *pair) for pair in ((trial, s.position), (r, s.residual)))
                worst = torch.where(moved, worst, s.worst)
        if tape is not None:
            below = s.residual < 0 if tape.bounds else None
            tape.steps.append(Step(s.samples, violated, below, s.level, moved, record))
        level = damping.following(k, s.level, gain)
        steps = s.steps + (1 if eager else (s.status == _GOING))
        s = s._replace(position=trial, residual=r, worst=worst, level=level, status=status, steps=steps)
    position, status, steps = s.write(batch)
    return space.finish(y, position), status, steps


def _iterate_fused(
    job: _Job, space: ConstraintSpace, y: Tensor, position: Tensor, lower: Tensor, upper: Tensor, tape: Tape | None
) -> tuple[Tensor, ...]:
    """`_iterate` by the kernels of `fused.py`."""
    scales = space.scales()
    strictness = _strictness(scales, job.tol) if job.damping.relative else torch.ones_like(scales)
    tol = max(job.tol / 2, job.tol - space.slack)
    work = fused.Job(space.spectrum, job.damping, strictness, job.tol, tol, job.max_steps)
    bounds = tape is not None and tape.bounds
    position, status, steps, record = fused.iterate(work, position, lower, upper, job.finite, tape is not None, bounds)

    def pull_back(y: Tensor, v: Tensor) -> _Gradients:
        assert record is not None
        cotangent, lower, upper = fused.pull_back(record, space.pull_start(v))
        return _Gradients(space.pull_finish(y, v, cotangent, None, ())[0], lower, upper, ())

    if tape is not None:
        tape.whole = pull_back
    return space.finish(y, position), status, steps


def _iterate_curved(
    job: _Job, space: CurvedSpace, y: Tensor, lower: Tensor, upper: Tensor, tape: Tape | None
) -> tuple[Tensor, ...]:
    """`_iterate` by the kernels of `curved.py`."""
    finest = _finest(job.tol, y.dtype) if space.relative else 0.0
    work = curved.Job(space, job.damping, job.tol, finest, job.max_steps)
    bounds = tape is not None and tape.bounds
    value, status, steps, record = curved.iterate(work, y, lower, upper, job.finite, tape is not None, bounds)

    def pull_back(y: Tensor, v: Tensor) -> _Gradients:
        assert record is not None
        return _Gradients(*curved.pull_back(record, v), ())

    if tape is not None:
        tape.whole = pull_back
    return value, status, steps


def _all_go_on(worst: Tensor, tol: float, stalled: Tensor | None) -> bool:
    """Did nobody converge, break or stall? The common case, in one look."""
    low, high = torch.aminmax(worst)
    return bool(low > tol) and bool(high < math.inf) and (stalled is None or not bool(stalled.any()))


def _settle(s: _Live, worst: Tensor, gain: Tensor | None, stalled: Tensor | None, tol: float) -> tuple[Tensor, Tensor]:
    """Who takes the step, and everybody's status after it; `worst` is the violation that the step leads to."""
    going = s.status == _GOING
    finite = worst < math.inf  # False where it is NaN
    moved, broken = going & finite, ~finite
    if gain is not None:  # a search rejects what it does not like, and tries again
        moved, broken = moved & (gain > 0), torch.zeros_like(broken)
    status = _judge(torch.where(moved, worst, s.worst), tol, broken, stalled)
    return moved, torch.where(going, status, s.status)


def _judge(worst: Tensor, tol: float, broken: Tensor, stalled: Tensor | None) -> Tensor:
    """(B,) the status of samples whose largest violation is `worst`."""
    status = torch.where(worst <= tol, _CONVERGED, _GOING)
    if stalled is not None:
        status = torch.where(stalled & (worst > tol), _STALLED, status)
    return torch.where(broken, _NONFINITE, status)


def _gain(s: _Live, violated: Tensor, trial: Tensor, r: Tensor, record: Any) -> tuple[Tensor, Tensor]:
    """(B,) actual over predicted decrease of the squared violation, and whether rounding would hide the latter."""
    scales = s.space.scales()
    before, after = (s.residual.square() / scales).sum(1), (r.square() / scales).sum(1)
    foreseen = s.space.predict(s.position, trial, s.residual, record) * violated
    predicted = before - (foreseen.square() / scales).sum(1)
    return (before - after) / predicted, predicted <= 8 * torch.finfo(r.dtype).eps * before


def _strictness(scales: Tensor, tol: float) -> Tensor:
    """How much stricter than `tol` to be with short rows, so that scaling a constraint down does not loosen it.

    A row of length 1 or more stops at `tol`, a shorter one at `tol` times its length, but not below a thousandth of
    `tol` nor below what rounding allows.
    """
    return 1 / scales.sqrt().clamp(_finest(tol, scales.dtype), 1.0)


def _finest(tol: float, dtype: torch.dtype) -> float:
    """The least length of a row that `_strictness` takes as it is."""
    return max(1e-3, min(1.0, 256 * torch.finfo(dtype).eps / tol)) if tol else 1.0


class _Gradients(NamedTuple):
    """Gradients of the loss in the prediction, the bounds, and the tensors inside g."""

    y: Tensor
    lower: Tensor | None
    upper: Tensor | None
    tensors: Sequence[Tensor | None]


def _pull_back(space: Space, steps: list[Step], y: Tensor, v: Tensor, wanted: tuple[Tensor, ...]) -> _Gradients:
    """Pull the cotangent v (B, n) of the output back through all steps to the prediction y and everything else."""
    cotangent = space.pull_start(v)
    totals: list[Tensor | None] = [None] * len(wanted)
    lower = upper = scale = None
    for _, group in groupby(reversed(steps), key=lambda step: id(step.samples)):
        together = list(group)
        samples = together[0].samples
        with torch.set_grad_enabled(bool(wanted)):  # so that gradients reach the tensors of the whole batch
            part = space if samples is None else space.select(samples)
        mine = cotangent if samples is None else cotangent[samples]
        for step in together:
            pulled = part.pull_step(step, mine, wanted)
            mine = pulled.cotangent
            if step.below is not None:
                below = pulled.rows * step.below
                lower = _scatter_add(lower, samples, below, v.shape[0])
                upper = _scatter_add(upper, samples, pulled.rows - below, v.shape[0])
            if pulled.scale is not None:
                scale = _scatter_add(scale, samples, pulled.scale, v.shape[0])
            totals = [add(a, b) for a, b in zip(totals, pulled.tensors, strict=True)]
        cotangent = mine if samples is None else cotangent.index_copy(0, samples, mine)
    found_y, found = space.pull_finish(y, v, cotangent, scale, wanted)
    return _Gradients(found_y, lower, upper, [add(a, b) for a, b in zip(totals, found, strict=True)])


def _scatter_add(total: Tensor | None, samples: Tensor | None, part: Tensor, batch: int) -> Tensor:
    """total + part, where part holds only some samples of the batch and None stands for zero."""
    if samples is None:
        return part if total is None else total + part
    total = part.new_zeros(batch, *part.shape[1:]) if total is None else total
    return total.index_add(0, samples, part)
