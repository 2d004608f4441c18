"""What a repair returns: value, status, steps and violation of every sample, and the errors that report failures."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from snarenet.repair.conflict import Conflict, Origin


class Status(IntEnum):
    """How the repair of one sample ended."""

    CONVERGED = 0
    MAX_STEPS = 1
    STALLED = 2
    NONFINITE = 3

    @property
    def message(self) -> str:
        """One sentence that says what happened."""
        return _MESSAGES[self]


_MESSAGES = {
    Status.CONVERGED: "every constraint holds to the tolerance, or to what the precision can hold.",
    Status.MAX_STEPS: "the step limit came before the tolerance; allow more steps or a larger tolerance.",
    Status.STALLED: "the violation stopped decreasing above the tolerance; the set may be empty for this input: "
    "`solution.conflict()` names the rows that conflict.",
    Status.NONFINITE: "the prediction, a constraint, its derivative or the output in its precision was NaN or "
    "infinite, or the repair ran away from the set.",
}


class _Fields(NamedTuple):
    value: Tensor
    raw: Tensor
    status: Tensor
    steps: Tensor
    violation: Tensor
    allowance: Tensor


class Solution(_Fields):
    """The repaired batch: a tuple of tensors.

    Attributes:
        value: (B, n) repaired outputs, in the dtype of the predictions, but at least float32; differentiable.
        raw: (B, n) the predictions that were repaired.
        status: (B,) integer codes of `Status`.
        steps: (B,) steps that each sample took.
        violation: (B,) largest violation of any constraint by `value` as it is, in float64; infinite where it is not a
            number.
        allowance: (B,) zero where the tolerance decided. Where the dtype of `value` could not hold it: the violation
            that rounding can cause there, which then stands in for the tolerance.
        origin: the set and inputs that it is of, for `conflict`; no entry of the tuple, and None where a solution was
            traced, saved or put together from others.
    """

    origin: Origin | None = None

    @property
    def converged(self) -> Tensor:
        """(B,) true where every constraint holds to the tolerance, or to what the precision can hold."""
        return self.status == Status.CONVERGED

    def describe(self) -> str:
        """A sentence or two on the samples that did not converge, or on the whole batch when all did."""
        failed = ~self.converged
        if not failed.any():
            rounded = self.allowance > 0
            if not rounded.any():
                return f"all {len(self.status)} samples converged."
            worst = f"{self.violation[rounded].max().item():.2e}"
            return (
                f"all {len(self.status)} samples converged, {int(rounded.sum())} of them to what float32 can hold "
                f"(worst violation {worst})."
            )
        parts = [f"{int(failed.sum())} of {len(failed)} samples were not repaired to the tolerance"]
        parts.append(f"(worst violation {self.violation[failed].max().item():.2e}).")
        for status in Status:
            count = int((self.status == status).sum())
            if count and status is not Status.CONVERGED:
                parts.append(f"{count} {status.name}: {status.message}")
        return " ".join(parts)

    def conflict(self, samples: Sequence[int] | None = None) -> Conflict:
        r"""Which rows keep the samples that failed from their sets, with weights, and a proof where a set is empty.

        It is computed when asked for, in milliseconds a sample for a few dozen rows, from the constraints and x as they
        are then; that they have not changed is checked.

        Args:
            samples: their places in the batch; all that failed unless given.

        Example:
            >>> import torch, snarenet as sn
            >>> empty = sn.Box(None, 1.0) & sn.Linear(torch.tensor([[1.0, 0.0]]), lower=3.0)
            >>> print(*str(sn.repair(empty, torch.zeros(1, 2)).conflict()).split("; "), sep="\n")
            sample 0: Box y[0] (<= 1) and Linear row 0 (>= 3) conflict: weights 0.5 and 0.5
            certified: no y satisfies both.
        """
        if self.origin is None:
            raise ValueError(
                "this solution does not know its constraints: it was compiled or recorded, saved, or put together from "
                "others; call `conflict()` on what `repair` or `solve` returned, outside torch.compile"
            )
        return self.origin.conflict(self, samples)


class RepairError(RuntimeError):
    """Raised when samples could not be repaired and `on_failure="raise"`; carries the `solution`."""

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution


class RepairWarning(UserWarning):
    """Issued when samples could not be repaired and `on_failure="warn"`."""


class PrecisionWarning(RepairWarning):
    """Issued when a tolerance is finer than what the precision of the output, or of the repair, can hold."""


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code that led here."""
    warnings.warn(message, category, stacklevel=_levels_up())


def _levels_up() -> int:
    """How many calls lie between a warning and the user's code: those of this package and of torch."""
    inside = tuple(os.path.dirname(module.__file__ or "") for module in (sys.modules["snarenet"], torch))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
