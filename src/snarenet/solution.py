"""What a repair returns: value, status, steps and violation of every sample, and the errors that report failures."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor


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
    Status.CONVERGED: "every constraint holds to the tolerance.",
    Status.MAX_STEPS: "the step limit came before the tolerance; allow more steps or a larger tolerance.",
    Status.STALLED: "the violation stopped decreasing above the tolerance; the set may be empty for this input.",
    Status.NONFINITE: "the prediction or a constraint value was NaN or infinite, or the repair ran away from the set.",
}


class Solution(NamedTuple):
    """The repaired batch.

    Attributes:
        value: (B, n) repaired outputs; differentiable.
        raw: (B, n) the predictions that were repaired.
        status: (B,) integer codes of `Status`.
        steps: (B,) steps that each sample took.
        violation: (B,) largest violation of any constraint by `value`; infinite where it is not a number.
    """

    value: Tensor
    raw: Tensor
    status: Tensor
    steps: Tensor
    violation: Tensor

    @property
    def converged(self) -> Tensor:
        """(B,) true where every constraint holds to the tolerance."""
        return self.status == Status.CONVERGED

    def describe(self) -> str:
        """A sentence or two on the samples that did not converge, or on the whole batch when all did."""
        failed = ~self.converged
        if not failed.any():
            return f"all {len(self.status)} samples converged."
        parts = [f"{int(failed.sum())} of {len(failed)} samples were not repaired to the tolerance"]
        parts.append(f"(worst violation {self.violation[failed].max().item():.2e}).")
        for status in Status:
            count = int((self.status == status).sum())
            if count and status is not Status.CONVERGED:
                parts.append(f"{count} {status.name}: {status.message}")
        return " ".join(parts)


class RepairError(RuntimeError):
    """Raised when samples could not be repaired and `on_failure="raise"`; carries the `solution`."""

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution


class RepairWarning(UserWarning):
    """Issued when samples could not be repaired and `on_failure="warn"`."""
