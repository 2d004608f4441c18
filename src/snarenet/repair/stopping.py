"""When a sample stops, and with which status; every number of it once, for the plain loop and for the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from snarenet.constraints.base import largest
from snarenet.damping import Damping
from snarenet.solution import Status

# plain numbers: a compiled loop does not compare tensors with members of an enum
CONVERGED, GOING, STALLED, NONFINITE = (
    int(status) for status in (Status.CONVERGED, Status.MAX_STEPS, Status.STALLED, Status.NONFINITE)
)

_ROUNDING = 256  # in units of the precision: what rounding may do to a residual
_SHORTEST = 1e-3  # least length of a row that makes its tolerance stricter
_LOOK = 40  # steps between two looks at the progress: a search may reject some 25 in a row
PROGRESS = 0.9  # what must be left at most, at the second look, of the least violation at the first
_SMALL = 1e-3  # relative damping up to which a step is nearly Newton's, so that it should make progress
_FAR = 1e8  # how many times larger a point or its violation is than the best one, if the repair ran away


def judge(worst: Tensor, tol: float, broken: Tensor, stalled: Tensor | None) -> Tensor:
    """(B,) the status of samples whose largest violation is `worst`."""
    status = torch.where(worst <= tol, CONVERGED, GOING)
    if stalled is not None:
        status = torch.where(stalled & (worst > tol), STALLED, status)
    return torch.where(broken, NONFINITE, status)


def all_go_on(worst: Tensor, tol: float, stalled: Tensor | None) -> bool:
    """Did nobody converge, break or stall? The common case, in one look."""
    low, high = torch.aminmax(worst)
    return float(low) > tol and float(high) < math.inf and (stalled is None or not bool(stalled.any()))


def settle(
    status: Tensor, before: Tensor, worst: Tensor, gain: Tensor | None, stalled: Tensor | None, tol: float
) -> tuple[Tensor, Tensor]:
    """Who takes a step, and everybody's status after it.

    Args:
        status: (B,) before the step; a sample is going while it is GOING.
        before: (B,) largest violation before the step.
        worst: (B,) the one that the step leads to.
        gain: (B,) actual over predicted decrease, of a damping that searches.
        stalled: (B,) true where no step can reduce the violation.
        tol: the tolerance.
    """
    going = status == GOING
    finite = worst < math.inf  # False where it is NaN
    moved, broken = going & finite, ~finite
    if gain is not None:  # a search rejects what it does not like, and tries again
        moved, broken = moved & (gain > 0), torch.zeros_like(broken)
    after = judge(torch.where(moved, worst, before), tol, broken, stalled)
    return moved, torch.where(going, after, status)


def looks(step: int, damping: Damping, level: float | Tensor) -> bool:
    """Is it time to look at the progress? With a large damping none is expected yet."""
    due = step > 0 and step % _LOOK == 0
    return due and damping.relative and (isinstance(level, Tensor) or level <= _SMALL)


def idle(best: Tensor, mark: Tensor) -> Tensor:
    """(B,) true where the least violation so far, `best`, is hardly less than at the last look, `mark`."""
    return best > PROGRESS * mark


def ran_away(position: Tensor, worst: Tensor, best_position: Tensor, best: Tensor) -> Tensor:
    """(B,) true where a point is far beyond the best one seen, or its largest violation is."""
    return (largest(position) > _FAR * (1 + largest(best_position))) | (worst > _FAR * best)


def strictness(scales: Tensor, tol: float) -> Tensor:
    """How much stricter than `tol` to be with short rows, so that scaling a constraint down does not loosen it.

    A row of length 1 or more stops at `tol`, a shorter one at `tol` times its length, but not below a thousandth of
    `tol` nor below what rounding allows.
    """
    return 1 / scales.sqrt().clamp(shortest(tol, scales.dtype), 1.0)


def shortest(tol: float, dtype: torch.dtype) -> float:
    """The least length of a row that `strictness` takes as it is."""
    return max(_SHORTEST, min(1.0, slack(dtype) / tol)) if tol else 1.0


def slack(dtype: torch.dtype) -> float:
    """How far rounding may move a residual of usual size."""
    return _ROUNDING * torch.finfo(dtype).eps


def inner_tolerance(tol: float, slack: float) -> float:
    """What to stop at while iterating, if rounding moves the residual by up to `slack` afterwards."""
    return max(tol / 2, tol - slack)


def negligible(dtype: torch.dtype) -> float:
    """The share of the residual below which its gradient is nothing: no step can reduce the violation."""
    return torch.finfo(dtype).eps ** 0.6
