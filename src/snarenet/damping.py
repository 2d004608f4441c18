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
from typing import ClassVar, Literal

import torch
from torch import Tensor

from snarenet.tracing import to_onnx

POOR, GOOD = 0.25, 0.75  # actual over predicted decrease, up to which a step was poor, and from which it was good
NEAR = 0.01  # distance to the bounds, in sizes of y, below which a good step says that Newton's will do
FAR, EXACT = 1.0, 0.02  # the same for a step that did just what was foreseen: a gain of 1, give or take this
QUICK = 0.03  # what is left of the damping after such a step, but
SAFE = 1e-10  # not less than this: dependent rows amplify rounding by as much as the damping is small
CAREFUL = 1e-3  # of the damping that a start at the same distance has: far away there is never less


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ValueError(f"`{name}` must be a finite number >= 0, but got {value!r}")


class Damping(ABC):
    """A rule for the damping of each step."""

    relative: bool
    searches: ClassVar[bool]  # may it reject a step?

    @property
    def paced(self) -> bool:
        """Does it follow the gain and the distance of each sample, where rows are curved?"""
        return False

    @abstractmethod
    def first(self, like: Tensor, distance: Tensor | None = None) -> float | Tensor:
        """The damping of step 0: one number, or (B,) for the samples of `like` (B, ...).

        `distance` (B,) is how far away their bounds are, in sizes of y; given if the damping is `paced`.
        """

    @abstractmethod
    def following(
        self, step: int, damping: float | Tensor, gain: Tensor | None, distance: Tensor | None = None
    ) -> float | Tensor:
        """The damping after step `step`, from the last one, the gain ratio (B,) that it achieved, and the distance."""


@dataclass(frozen=True)
class Constant(Damping):
    """The same damping at every step; the paper uses 0.01, and 0 gives Newton's method (HardNet's for linear rows)."""

    value: float
    relative: bool = False
    searches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(value=self.value)

    def first(self, like: Tensor, distance: Tensor | None = None) -> float:
        return float(self.value)

    def following(
        self, step: int, damping: float | Tensor, gain: Tensor | None, distance: Tensor | None = None
    ) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Annealed(Damping):
    """max(floor, start * ratio**k): a gentle start that keeps training signals, then Newton's finish.

    Under rows that are neither linear nor quadratic with a diagonal H each sample has a pace of its own. At a distance
    d < 1 to its bounds, in sizes of y, its first damping is about `start * d**2`. The damping falls to 3 % after a step
    that did what the linear model foresaw, near the set roughly and farther away exactly, else as in the schedule; but
    never below a thousandth of the first damping of a start at its distance, as the linear model of a point far
    away is not worth more. A sample that is near needs less than half the steps. All of it changes by jumps, so its
    derivative is zero almost everywhere and the adjoint stays exact. `own_pace=False` is the schedule alone.
    """

    start: float = 10.0
    ratio: float = 0.6
    floor: float = 1e-12
    relative: bool = True
    own_pace: bool = True
    searches: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(start=self.start, ratio=self.ratio, floor=self.floor)
        if self.ratio > 1:
            raise ValueError(f"`ratio` must be at most 1, but got {self.ratio!r}")

    def at(self, step: int) -> float:
        """The damping of step `step`."""
        return max(float(self.floor), self.start * self.ratio**step)

    @property
    def paced(self) -> bool:
        return self.own_pace and self.relative and 0 < self.ratio < 1 and self.start > 0

    def first(self, like: Tensor, distance: Tensor | None = None) -> float | Tensor:
        return self.at(0) if distance is None else self._begun(distance)

    def _begun(self, distance: Tensor) -> Tensor:
        """(B,) the damping of a start at this distance."""
        fall = math.log(self.ratio)
        jumps = (distance.clamp(smallest(distance.dtype), 1.0).log() * _exact(2 / fall, distance)).ceil()
        return ((jumps * _exact(fall, jumps)).exp() * _exact(self.start, jumps)).clamp(min=self.floor)

    def following(
        self, step: int, damping: float | Tensor, gain: Tensor | None, distance: Tensor | None = None
    ) -> float | Tensor:
        if distance is None:
            return self.at(step + 1)
        assert gain is not None
        assert isinstance(damping, Tensor)
        lower = damping * _exact(self.ratio, damping)
        quick = (damping * _exact(min(QUICK, self.ratio), damping)).clamp(min=SAFE)
        right = ((gain > GOOD) & (distance < NEAR)) | (((gain - 1).abs() < EXACT) & (distance < FAR))
        least = (self._begun(distance) * _exact(CAREFUL, damping)).clamp(min=self.floor)
        return torch.where(right, torch.minimum(lower, quick), lower).clamp(min=least)


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
    poor: float = POOR
    good: float = GOOD
    relative: bool = True
    searches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(start=self.start, up=self.up, down=self.down, floor=self.floor, ceiling=self.ceiling)
        if not self.down <= 1 < self.up:
            raise ValueError(f"expected `down` <= 1 < `up`, but got {self.down!r} and {self.up!r}")

    def first(self, like: Tensor, distance: Tensor | None = None) -> Tensor:
        return like.new_full((like.shape[0],), self.start)

    def following(
        self, step: int, damping: float | Tensor, gain: Tensor | None, distance: Tensor | None = None
    ) -> Tensor:
        assert gain is not None
        assert isinstance(damping, Tensor)
        lowered = torch.where(gain > self.good, damping * self.down, damping)
        raised = damping * self.up  # also where the gain is NaN
        return torch.where(gain > self.poor, lowered, raised).clamp(self.floor, self.ceiling)


def smallest(dtype: torch.dtype) -> float:
    """The least distance that the first damping of a sample looks at."""
    return torch.finfo(dtype).tiny ** 0.25


def _exact(number: float, like: Tensor) -> float | Tensor:
    """The number; as a tensor for ONNX, whose exporter rounds plain numbers to float32."""
    return torch.tensor(number, dtype=like.dtype, device=like.device) if to_onnx() else number


def as_damping(value: float | Damping | Literal["auto"]) -> Damping | Literal["auto"]:
    """`value` as a rule; a plain number means `Constant`, and "auto" is whatever suits the start."""
    if isinstance(value, Damping):
        return value
    if value == "auto":
        return "auto"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Constant(value)
    raise TypeError(
        f"`damping` must be 'auto', a number, Constant, Annealed or Adaptive, but got {type(value).__name__}"
    )


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
