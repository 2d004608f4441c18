"""`KernelLoop` in a `KernelSpace`: the loop on sparse rows beside a box, three kernels around the user's function.

A step is one launch, where it led another, and the way back through it a third; g, its Jacobian and its pullback come
between them. With a launch for every operation of torch there are some 150 a step, which take longer than the
arithmetic, also in a CUDA graph. Values, gradients, status and steps are those of the plain loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.maps import IdentityMap, add
from snarenet.damping import CAREFUL, EXACT, FAR, GOOD, NEAR, QUICK, SAFE, Annealed, smallest
from snarenet.linalg import column
from snarenet.repair.foresight import BREAK, TOUCH, Rows
from snarenet.repair.gpu import launching
from snarenet.repair.gpu.sparse import MOST, THREADS, KernelFactor, kernel_systems, loaded, rounding, start
from snarenet.repair.loop import Live, Loop, OutputSpace
from snarenet.repair.loop.steps import Pulled, Step, Trial
from snarenet.repair.stopping import GOING, PROGRESS, inner_tolerance, negligible


class Saved(NamedTuple):
    """A step: where it started, how far it went, its multipliers, its factor if there was room."""

    y: Tensor
    d: Tensor
    w: Tensor
    left: Tensor  # (b, m) the residual that the linear model foresees
    stalled: Tensor  # (b,) true where no step can reduce the violation
    factor: KernelFactor | None


@dataclass(eq=False)
class KernelSpace(OutputSpace):
    """`OutputSpace` with sparse systems by kernels; what is eliminated is a box, or nothing."""

    @property
    def box(self) -> Tensor | None:
        """(n,) the scale of each row of the box; None where it is 1."""
        (box,) = self.eliminated.parts if self.eliminated is not None else (None,)
        return box.scale if isinstance(box, IdentityMap) else None

    def start(self, y: Tensor) -> Tensor:
        return y.contiguous()

    def step_of(self, s: Live) -> Trial:
        """A step of those samples that are going."""
        position = s.position
        linear = self.others.linearize(position)
        raw, pattern = linear.values, linear.pattern  # in this order: evaluating J may widen the pattern
        assert pattern is not None
        systems, batch = kernel_systems(pattern), len(position)
        weights = None if self.eliminated is None else torch.empty_like(position)
        factor = systems.empty(torch.empty_like(raw, memory_format=torch.contiguous_format), self.scale.new_empty(
            batch, self.others.rows), weights)  # fmt: skip
        d, trial = torch.empty_like(position), torch.empty_like(position)
        w, left = torch.empty_like(factor.damping), torch.empty_like(factor.damping)
        stalled = torch.empty(batch, dtype=torch.bool, device=position.device)
        residual, used = torch.empty_like(s.residual), torch.empty_like(s.pinned)
        value, foresees = _given(s.value, position)
        low = torch.empty_like(used) if foresees else None
        factor.launch(
            "step", factor.info, systems.shift(raw), MOST, systems.refinements, rounding(raw),
            raw.contiguous(), s.residual.contiguous(), s.pinned.contiguous(), int(not self.active),
            self.scale.contiguous(), *_given(self.box, position), *_level(s.level, position), s.status, position,
            value, s.lower.contiguous(), s.upper.contiguous(), foresees, TOUCH, BREAK, used, residual,
            used if low is None else low, d, w, left, trial, stalled, negligible(raw.dtype),
            making=True, source="stepping",
        )  # fmt: skip
        kept = self.budget.take(factor)
        assert kept is None or isinstance(kept, KernelFactor)
        loaded("sparse", raw, systems.threads)  # a recorded way back may have to make factors again, and cannot load
        return Trial(trial, Rows(used, residual, low), Saved(position, d, w, left, stalled, kept))

    def pull_step(self, step: Step, cotangent: Tensor, wanted: tuple[Tensor, ...]) -> Pulled:
        y, d, w, _, _, factor = step.saved
        if factor is None:
            factor = self.system(y, step.used, step.damping).factor
        v, moved = cotangent.contiguous(), step.moved
        assert moved is not None
        p, q, e = torch.empty_like(w), torch.empty_like(w), torch.empty_like(v)
        box = v.new_empty(len(v), self.first)
        factor.launch(
            "adjoint", factor.systems.refinements, rounding(v), step.used.contiguous(), moved,
            *_given(self.box, v), *_level(step.damping, v), v, p, q, e, box, source="stepping",
        )  # fmt: skip
        w = torch.where(moved.unsqueeze(1), w, 0.0)
        change, *found = self.others.pullback(y, [(-w, e), (p, d)], -q, wanted)  # of minus psi
        if self.first:
            change, q = add(change, -box if self.box is None else -self.box * box), torch.cat([box, q], 1)
        scale = None if self.scale_fn is None else column(step.damping) * p * w
        return Pulled(cotangent if change is None else cotangent + change, q, scale, found)


class KernelLoop(Loop):
    """The loop in a `KernelSpace`, for a damping that does not search."""

    name = "loop with a kernel a step"

    def _trial(self, s: Live) -> Trial:
        assert isinstance(s.space, KernelSpace)
        return s.space.step_of(s)

    def _look(self, k: int, s: Live, step: Trial, eager: bool) -> tuple[Live, Tensor | None, bool]:
        space, damping, (trial, rows, saved) = s.space, self.damping, step
        assert isinstance(space, KernelSpace)
        value, like = space.others.value(trial), partial(torch.empty_like, memory_format=torch.contiguous_format)
        look, strict = self._looks(k, s), s.strictness
        after = [*map(like, (s.position, s.residual, s.worst))]
        after += [like(s.level) if isinstance(s.level, Tensor) else like(s.worst)]
        after += [*map(like, (s.status, s.steps, s.best_position, s.best, s.best_steps))]
        moved, known = torch.empty_like(saved.stalled), None if s.value is None else like(s.value)
        paced, pace = False, [0.0] * 12
        if self.paced and isinstance(damping, Annealed):
            quick, rule = min(QUICK, damping.ratio), (SAFE, NEAR, GOOD, FAR, EXACT, CAREFUL)
            beginning = damping.start, math.log(damping.ratio), smallest(trial.dtype)
            paced, pace = True, [*map(float, (damping.ratio, quick, *rule, *beginning, damping.floor))]
        start(
            "stepping", "settle", trial, THREADS * trial.element_size(),
            value.shape[1], space.first, trial.shape[1], value.contiguous(), s.lower.contiguous(), s.upper.contiguous(),
            s.residual.contiguous(), rows.residual, rows.used, *_given(strict, trial), space.scale.contiguous(),
            *_given(space.box, trial), *_given(space.units, trial), s.position, trial, saved.d, saved.left,
            _level(s.level, trial)[0], saved.stalled,
            s.status, s.steps, s.worst, s.best_position, s.best, s.best_steps, s.mark, *_given(s.value, trial),
            inner_tolerance(self.tol, space.slack), int(look), PROGRESS, int(self.tol == 0), int(paced), *pace,
            *after, trial if known is None else known, moved,
        )  # fmt: skip
        position, r, worst, level, status, steps, best_position, best, best_steps = after
        if not paced:
            level = damping.following(k, s.level, None)
        stopped = eager and not bool((status == GOING).all())
        mark = s.best if look else s.mark
        best_so_far = best_position, best, best_steps
        return Live(*s[:6], position, r, worst, level, status, steps, *best_so_far, mark, known), moved, stopped


def _given(tensor: Tensor | None, like: Tensor) -> tuple[Tensor, int]:
    """A tensor for the kernels, and whether there is one; else any other, which is not read."""
    return (like, 0) if tensor is None else (tensor.contiguous(), 1)


def _level(damping: float | Tensor, like: Tensor) -> tuple[Tensor, int]:
    """A damping for the kernels, and whether each sample has its own."""
    if isinstance(damping, Tensor):
        return damping.contiguous(), 1
    return launching.constants((damping,), like.dtype, like.device), 0
