"""When a sample stops, and with which status; every number of it once, for the plain loop and for the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from snarenet.solution import Status

# plain numbers: a compiled loop does not compare tensors with members of an enum
CONVERGED, GOING, STALLED, NONFINITE = (
    int(status) for status in (Status.CONVERGED, Status.MAX_STEPS, Status.STALLED, Status.NONFINITE)
)

_ROUNDING = 256  # in units of the precision: what rounding may do to a residual
_SHORTEST = 1e-3  # least length of a row that makes its tolerance stricter


def judge(worst: Tensor, tol: float, broken: Tensor, stalled: Tensor | None) -> Tensor:
    """(B,) the status of samples whose largest violation is `worst`."""
    status = torch.where(worst <= tol, CONVERGED, GOING)
    if stalled is not None:
        status = torch.where(stalled & (worst > tol), STALLED, status)
    return torch.where(broken, NONFINITE, status)


def all_go_on(worst: Tensor, tol: float, stalled: Tensor | None) -> bool:
    """Did nobody converge, break or stall? The common case, in one look."""
    low, high = torch.aminmax(worst)
    return bool(low > tol) and bool(high < math.inf) and (stalled is None or not bool(stalled.any()))


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
