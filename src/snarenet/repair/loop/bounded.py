r"""The space of the rescue: the box is never left, and rows are weighed anew at every step.

$$ y^+ = \mathrm{clip}(y - P J^\top w,\ l,\ u), \qquad (J P J^\top + \lambda D(y))\, w = r, $$

P keeps the free variables: not those that stand at a bound and would leave. D(y) are the squared row lengths at y,
where the other spaces keep those at the prediction, or 1. What decides P and the clip is piecewise constant, so the
adjoint is that of `spaces.py` with J P for J; beside it D(y) gives its cotangent to y, and a variable that was clipped
gives its own to the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.maps import Linearization, Map, add
from snarenet.linalg import Dual, EliminatedBox, Primal, SparseDual, SparseFactor, System, Systems, column
from snarenet.repair.loop.spaces import Budget, Factor, Space, keep_where, pull_scale
from snarenet.repair.loop.steps import Pulled, Step
from snarenet.repair.scale import positive
from snarenet.repair.stopping import negligible


class Saved(NamedTuple):
    """A step: where it started, how far it would have gone, and what it was made of."""

    y: Tensor
    d: Tensor  # before the clip
    w: Tensor
    free: Tensor  # (b, n) variables that may move
    scale: Tensor  # (b, m) D(y)
    change: Tensor  # (b, m) of the rows, as the linear model foresees it
    stuck: Tensor  # (b,) no direction that is free reduces the violation
    factor: Factor


@dataclass(eq=False)
class BoundedSpace(Space):
    """Any rows beside a box; the position is y, and the rows of the box come first.

    Args:
        others: the rows beside the box.
        lower: (B, n) the box, as bounds on the position; infinite where there is none.
        upper: (B, n).
        first: how many rows of the batch are those of the box: n, or 0 if it has none.
        scaled: weigh rows by their lengths at each step, else all alike.
        budget: memory for factors that the backward pass reuses.
        sparse: the systems on the pattern of the rows; None for dense ones.
        scale: (n,) what the rows of the box multiply the position by; 1 unless given.
    """

    others: Map
    lower: Tensor
    upper: Tensor
    first: int
    scaled: bool
    budget: Budget
    sparse: Systems | None = None
    scale: Tensor | None = None

    def start(self, y: Tensor) -> Tensor:
        return y

    def value(self, position: Tensor) -> Tensor:
        box = position if self.scale is None else position * self.scale
        return torch.cat([box[:, : self.first], self.others.value(position)], 1)

    def finish(self, y: Tensor, position: Tensor) -> Tensor:
        return position

    def select(self, keep: Tensor) -> BoundedSpace:
        return replace(self, others=self.others.select(keep), lower=self.lower[keep], upper=self.upper[keep])

    def detached(self, leaves: dict[int, Tensor]) -> BoundedSpace:
        return replace(self, others=self.others.detached(leaves))

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return self.others.tensors(y)

    def scales(self) -> Tensor:
        return self.lower.new_ones(self.first + self.others.rows)  # a sample that needs a rescue is not judged stricter

    def merit(self, residual: Tensor, saved: Saved) -> Tensor:
        return (residual[:, self.first :].square() / saved.scale).sum(1)

    def step(
        self, position: Tensor, residual: Tensor, violated: Tensor, damping: float | Tensor
    ) -> tuple[Tensor, Saved]:
        linear, r, active = self.others.linearize(position), residual[:, self.first :], violated[:, self.first :]
        lengths = self._lengths(linear)
        scale = positive(lengths) if self.scaled else torch.ones_like(lengths)
        gradient = linear.vjp(keep_where(active, r / scale))
        leaving = ((position <= self.lower) & (gradient > 0)) | ((position >= self.upper) & (gradient < 0))
        longest = torch.where(active, lengths / scale, 0.0).sum(1)
        size = (r.square() / scale).sum(1) * longest
        stuck = keep_where(~leaving, gradient).square().sum(1) <= negligible(r.dtype) ** 2 * size
        system = self._system(linear, ~leaving, active, scale, damping)
        d, w = system.step(r, torch.zeros_like(position))
        trial = torch.clamp(position - d, self.lower, self.upper)
        change = linear.jvp(position - trial)
        return trial, Saved(position, d, w, ~leaving, scale, change, stuck, self.budget.take(system.factor))

    def _lengths(self, linear: Linearization) -> Tensor:
        """(b, m) squared lengths of the rows."""
        if self.sparse is not None:
            values, pattern = linear.values, linear.pattern  # in this order: evaluating J may widen the pattern
            assert pattern is not None
            return pattern.row_sums(values.square())
        return linear.jacobian.square().sum(-1).expand(len(linear.y), self.others.rows)

    def _system(
        self,
        linear: Linearization,
        free: Tensor,
        active: Tensor,
        scale: Tensor,
        damping: float | Tensor,
        factor: Factor = None,
    ) -> System:
        if self.sparse is not None:
            fixed = EliminatedBox((~free).to(scale), 0.0)  # variables that give way to nothing
            if not isinstance(factor, SparseFactor):
                values, pattern = linear.values, linear.pattern
                assert pattern is not None
                factor = self.sparse(pattern).factor(values, scale * column(damping), fixed.weights, active)
            return SparseDual(factor, damping, fixed)
        assert not isinstance(factor, SparseFactor)
        rows = _FreeColumns(linear, free).linearize(linear.y)
        if self.others.rows > free.shape[1]:
            return Primal(rows, active, scale, damping, factor)
        return Dual(rows, active, scale * column(damping), damping, factor=factor)

    def describe(self, position: Tensor, violated: Tensor, damping: float | Tensor) -> tuple[str, str]:
        everything = torch.ones_like(position, dtype=torch.bool)
        active, scale = violated[:, self.first :], position.new_ones(len(position), self.others.rows)
        system = self._system(self.others.linearize(position), everything, active, scale, damping)
        return "on y, which never leaves the box", system.describe()

    def predict(self, position: Tensor, trial: Tensor, residual: Tensor, saved: Saved) -> Tensor:
        return torch.cat([residual[:, : self.first], residual[:, self.first :] - saved.change], 1)

    def stationary(self, residual: Tensor, damping: float | Tensor, saved: Saved) -> Tensor:
        return saved.stuck

    def below(self, residual: Tensor, saved: Saved) -> Tensor:
        clipped = saved.y - saved.d < self.lower
        return torch.cat([clipped[:, : self.first], residual[:, self.first :] < 0], 1)

    def pull_start(self, v: Tensor) -> Tensor:
        return v

    def pull_step(self, step: Step, cotangent: Tensor, wanted: tuple[Tensor, ...]) -> Pulled:
        y, d, w, free, scale, _, _, factor = step.saved
        target, active = y - d, step.used[:, self.first :]
        clipped = (target < self.lower) | (target > self.upper)
        if step.moved is not None:
            clipped = clipped & step.moved.unsqueeze(1)
        v = torch.where(clipped, 0.0, cotangent)
        system = self._system(self.others.linearize(y), free, active, scale, step.damping, factor)
        p, e, _ = system.adjoint(v)
        p, w = keep_where(step.moved, p), keep_where(step.moved, w)
        q = keep_where(active, p)
        change, *found = self.others.pullback(y, [(w, keep_where(free, e)), (-p, d)], q, wanted)
        scales = self._pull_scale(y, system.weight * p * w, wanted)
        change, *found = (_difference(b, a) for a, b in zip([change, *found], scales, strict=True))
        to_box = torch.where(clipped, cotangent, 0.0)[:, : self.first]
        to_box = to_box if self.scale is None else to_box / self.scale
        return Pulled(v if change is None else v + change, torch.cat([to_box, q], 1), None, found)

    def _pull_scale(self, y: Tensor, weights: Tensor, wanted: tuple[Tensor, ...]) -> Sequence[Tensor | None]:
        """The gradient of <weights, D(y)> in y and in `wanted`."""
        if not self.scaled:
            return [None] * (1 + len(wanted))
        return pull_scale(self.others, y, weights, lambda map, y: positive(map.row_norms(y)), wanted)

    def pull_finish(
        self, y: Tensor, v: Tensor, cotangent: Tensor, scale: Tensor | None, wanted: tuple[Tensor, ...]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        return cotangent, [None] * len(wanted)


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a - b, where None stands for zero."""
    return add(a, None if b is None else -b)


class _FreeColumns(Map):
    """J P at one y: the columns of free variables, zero elsewhere."""

    def __init__(self, linear: Linearization, free: Tensor) -> None:
        self.linear_at, self.free, self.rows = linear, free, linear.map.rows

    def value(self, y: Tensor) -> Tensor:
        return self.linear_at.map.value(y)

    def jacobian(self, y: Tensor) -> Tensor:
        return torch.where(self.free.unsqueeze(1), self.linear_at.jacobian, 0.0)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return self.linear_at.jvp(keep_where(self.free, direction))

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return keep_where(self.free, self.linear_at.vjp(weights))
