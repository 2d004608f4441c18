"""`Layer`: what every method offers, whichever way it makes predictions obey constraints."""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints
from snarenet.constraints.base import Instance, largest, residual
from snarenet.repair import Options
from snarenet.solution import RepairError, RepairWarning, Solution, Status
from snarenet.tracing import tracing

OnFailure = Literal["warn", "raise", "ignore"]
Progress = Callable[[int, int], None]


class Layer(nn.Module, ABC):
    """Takes predictions to outputs that obey constraints, as far as its method can, and says how it went.

    Args:
        constraints: the set to obey.
        options: what was asked of the method; of a method other than ours, tolerance and limit on steps.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".
    """

    title: str  # the method's name, for tables
    recordable = True  # can a CUDA graph hold it? Not if it asks about values as it goes along

    def __init__(self, constraints: Constraints, options: Options, on_failure: OnFailure) -> None:
        super().__init__()
        if not isinstance(constraints, Constraints):
            raise TypeError(f"`constraints` must be a set of constraints, but got {type(constraints).__name__}")
        if on_failure not in ("warn", "raise", "ignore"):
            raise ValueError(f"`on_failure` must be 'warn', 'raise' or 'ignore', but got {on_failure!r}")
        self.constraints, self.options, self.on_failure = constraints, options, on_failure

    @property
    def tol(self) -> float:
        """The largest violation that counts as feasible."""
        return self.options.tol

    @tol.setter
    def tol(self, tol: float) -> None:
        self.options = replace(self.options, tol=tol)

    @property
    def max_steps(self) -> int:
        """The limit on the method's steps."""
        return self.options.max_steps

    @max_steps.setter
    def max_steps(self, max_steps: int) -> None:
        self.options = replace(self.options, max_steps=max_steps)

    @abstractmethod
    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        """The method itself: predictions y (B, k) to outputs (B, n) at the inputs x, for bounds widened by `relax`."""

    def predictions(self, size: int) -> int:
        """How many numbers k the network has to predict for an output of `size` entries."""
        return size

    def pretrain(
        self, inputs: Tensor, *, steps: int | None = None, seed: int = 0, progress: Progress | None = None
    ) -> None:
        """Learn what the method itself has to learn before the network is trained, from the training inputs.

        Args:
            inputs: (N, d) the training inputs.
            steps: how many steps of its own training to take; the method's number unless given.
            seed: of all that is random about it.
            progress: called with (steps done, steps in all) now and then.
        """

    def forward(self, y: Tensor, x: Any = None, relax: float | Tensor | None = None) -> Tensor:
        """The outputs for predictions y, in the dtype of y; see `solve`."""
        return self.solve(y, x, relax).value

    def solve(self, y: Tensor, x: Any = None, relax: float | Tensor | None = None) -> Solution:
        """Outputs for predictions y (B, k) at the inputs x, with a status for each of them.

        `relax` widens the bounds while the layer is in training mode; in eval mode the true set always holds.
        """
        solution = self.repair(y, x, 0.0 if relax is None or not self.training else relax)
        if self.on_failure != "ignore" and not tracing() and not bool(solution.converged.all()):
            self._report(solution)
        return solution

    def judge(self, instance: Instance, value: Tensor, raw: Tensor, steps: Tensor | int) -> Solution:
        """The solution that consists of these outputs: what they violate decides their status."""
        with torch.no_grad():
            worst = largest(residual(instance.map.value(value.detach()), instance.lower, instance.upper))
            finite = worst.isfinite() & raw.detach().isfinite().all(1)
            status = torch.where(worst <= self.tol, int(Status.CONVERGED), int(Status.MAX_STEPS))
            status = torch.where(finite, status, int(Status.NONFINITE))
            worst = torch.where(finite, worst, torch.inf)
            steps = steps if isinstance(steps, Tensor) else torch.full_like(status, steps)
        return Solution(value, raw, status, steps, worst)

    def rounded(self, solution: Solution, instance: Instance, dtype: torch.dtype) -> Solution:
        """The solution in the precision of the predictions; its violation is that of the rounded value."""
        if solution.value.dtype == dtype:
            return solution
        value = solution.value.to(dtype)
        again = self.judge(instance, value.to(solution.value.dtype), solution.raw, solution.steps)
        return solution._replace(value=value, raw=solution.raw.to(dtype), violation=again.violation)

    def _report(self, solution: Solution) -> None:
        message = (
            f"{solution.describe()} Try more steps (max_steps={self.max_steps}), a larger tolerance "
            f"(tol={self.tol:g}), or check that the set is not empty; `solve` returns the status of every sample."
        )
        if self.on_failure == "raise":
            raise RepairError(message, solution)
        warnings.warn(message, RepairWarning, stacklevel=_levels_up())


def _levels_up() -> int:
    """How many calls lie between a warning and the user's code: those of this package and of torch."""
    inside = tuple(os.path.dirname(module.__file__ or "") for module in (sys.modules["snarenet"], torch))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
