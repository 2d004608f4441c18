r"""The damping $\lambda_k$ of the step: how far the repair trusts the linear model.

The step solves $(J J^\top + \lambda_k D) w = r$. With `relative=True`, $D$ holds the squared row lengths of J at the
prediction (Marquardt's scaling), so that a constraint may be multiplied by any number without changing the path; else
$D = I$, as in the paper. A large $\lambda$ moves like gradient flow and stays near the prediction, a small one is
Newton's.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ValueError(f"`{name}` must be a finite number >= 0, but got {value!r}")


class Damping(ABC):
    """A rule for the damping of each step."""

    relative: bool
    searches: ClassVar[bool]  # may it reject a step?

    @abstractmethod
    def first(self, like: Tensor) -> float | Tensor:
        """The damping of step 0: one number, or (B,) for the samples of `like` (B, ...)."""

    def near(self, step: int, damping: float | Tensor, distance: Tensor) -> float | Tensor:
        """The damping of step `step` for samples at a distance (B,) from their bounds, relative to their size."""
        return damping

    @abstractmethod
    def following(self, step: int, damping: float | Tensor, gain: Tensor | None) -> float | Tensor:
        """The damping after step `step`, from the last one and the gain ratio (B,) that it achieved."""


@dataclass(frozen=True)
class Constant(Damping):
    """The same damping at every step; the paper uses 0.01, and 0 gives Newton's method (HardNet's for linear rows)."""

    value: float
    relative: bool = False
    searches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(value=self.value)

    def first(self, like: Tensor) -> float:
        return float(self.value)

    def following(self, step: int, damping: float | Tensor, gain: Tensor | None) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Annealed(Damping):
    """max(floor, start * ratio**k): a gentle start that keeps training signals, then Newton's finish.

    Under rows that are neither linear nor quadratic with a diagonal H it also falls with the distance d to the bounds,
    relative to the size of y: to the first of these numbers that is at most `nearness * d`. Near the set the steps
    converge quadratically, so that a trained network needs few. It changes by jumps, so its derivative is zero almost
    everywhere and the adjoint stays exact.
    """

    start: float = 10.0
    ratio: float = 0.6
    floor: float = 1e-12
    relative: bool = True
    nearness: float = 10.0
    searches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(start=self.start, ratio=self.ratio, floor=self.floor, nearness=self.nearness)
        if self.ratio > 1:
            raise ValueError(f"`ratio` must be at most 1, but got {self.ratio!r}")

    def at(self, step: int) -> float:
        """The damping of step `step`."""
        return max(float(self.floor), self.start * self.ratio**step)

    def near(self, step: int, damping: float | Tensor, distance: Tensor) -> float | Tensor:
        if not (self.relative and 0 < self.ratio < 1 and self.start > 0 and self.nearness > 0):
            return damping
        most = (self.nearness * distance).clamp(min=torch.finfo(distance.dtype).tiny)
        jumps = ((most / self.start).log() / math.log(self.ratio)).ceil().clamp(min=step)
        return (self.start * self.ratio**jumps).clamp(min=self.floor)

    def first(self, like: Tensor) -> float:
        return self.at(0)

    def following(self, step: int, damping: float | Tensor, gain: Tensor | None) -> float:
        return self.at(step + 1)


@dataclass(frozen=True)
class Adaptive(Damping):
    """A damping per sample that follows the gain ratio: actual over predicted decrease of the squared violation.

    A step that does not decrease the violation is rejected and tried again with more damping. The damping changes by
    fixed factors at fixed thresholds, so its derivative is zero almost everywhere and the adjoint stays exact.
    """

    start: float = 1.0
    up: float = 4.0
    down: float = 0.2
    floor: float = 1e-15
    ceiling: float = 1e10
    poor: float = 0.25
    good: float = 0.75
    relative: bool = True
    searches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(start=self.start, up=self.up, down=self.down, floor=self.floor, ceiling=self.ceiling)
        if not self.down <= 1 < self.up:
            raise ValueError(f"expected `down` <= 1 < `up`, but got {self.down!r} and {self.up!r}")

    def first(self, like: Tensor) -> Tensor:
        return like.new_full((like.shape[0],), self.start)

    def following(self, step: int, damping: float | Tensor, gain: Tensor | None) -> Tensor:
        assert gain is not None
        assert isinstance(damping, Tensor)
        lowered = torch.where(gain > self.good, damping * self.down, damping)
        raised = damping * self.up  # also where the gain is NaN
        return torch.where(gain > self.poor, lowered, raised).clamp(self.floor, self.ceiling)


def as_damping(value: float | Damping) -> Damping:
    """`value` as a rule; a plain number means `Constant`."""
    if isinstance(value, Damping):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Constant(value)
    raise TypeError(f"`damping` must be a number, Constant, Annealed or Adaptive, but got {type(value).__name__}")


@functools.lru_cache(maxsize=64)
def schedule(damping: Damping, max_steps: int) -> tuple[float, ...]:
    """The damping of the first steps, of a rule that does not search; the last one is that of all later steps."""
    levels = [float(damping.first(torch.empty(0)))]
    for k in range(max_steps - 1):
        following = float(damping.following(k, levels[-1], None))
        if following == levels[-1]:
            break
        levels.append(following)
    return tuple(levels)
