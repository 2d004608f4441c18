"""`Layer`: what every method offers, whichever way it makes predictions obey constraints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from snarenet.constraints import Constraints
from snarenet.constraints.base import Instance
from snarenet.constraints.data import describe
from snarenet.layers.proximity import proximity
from snarenet.repair import Explanation, Options, explain_alone
from snarenet.repair.conflict import remember
from snarenet.repair.precision import in_full_precision, judge, output_dtype, tell
from snarenet.solution import RepairError, RepairWarning, Solution, Status, warn
from snarenet.tracing import tracing

OnFailure = Literal["warn", "raise", "ignore"]
Progress = Callable[[int, int], None]
Polish = Literal["none", "rescued", "all"]


class Layer(nn.Module, ABC):
    """Takes predictions to outputs that obey constraints, as far as its method can, and says how it went.

    Args:
        constraints: the set to obey.
        options: what was asked of the method; of a method other than ours, tolerance and limit on steps.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".
    """

    title: str  # the method's name, for tables
    recordable = True  # can a CUDA graph hold it? Not if it asks about values as it goes along
    polishes: Polish = "none"  # which samples are led to points with a lower objective, in eval mode

    def __init__(self, constraints: Constraints, options: Options, on_failure: OnFailure) -> None:
        super().__init__()
        if not isinstance(constraints, Constraints):
            raise TypeError(f"`constraints` must be a set of constraints, but got {type(constraints).__name__}")
        if on_failure not in ("warn", "raise", "ignore"):
            raise ValueError(f"`on_failure` must be 'warn', 'raise' or 'ignore', but got {on_failure!r}")
        self.constraints, self.options, self.on_failure = constraints, options, on_failure
        self._solution_hooks: OrderedDict[int, Callable[[Solution], object]] = OrderedDict()

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
        """The outputs for predictions y, in the dtype of y, but at least float32; see `solve`."""
        return self.solve(y, x, relax).value

    def solve(self, y: Tensor, x: Any = None, relax: float | Tensor | None = None) -> Solution:
        """Outputs for predictions y (B, k) at the inputs x, with a status for each of them.

        `relax` widens the bounds while the layer is in training mode; in eval mode the true set always holds.
        """
        bounds = 0.0 if relax is None or not self.training else relax
        solution = remember(in_full_precision(self.repair, y, x, bounds), self.constraints, x, bounds, self.options)
        self._report(solution)
        return solution

    def register_solution_hook(self, hook: Callable[[Solution], object]) -> RemovableHandle:
        """Call `hook(solution)` after every `solve` and forward pass, but those that are traced; `remove()` ends it."""
        handle = RemovableHandle(self._solution_hooks)
        self._solution_hooks[handle.id] = hook
        return handle

    def proximity(self, solution: Solution, loss: Tensor) -> Tensor:
        """A term to add to a loss of `solution.value`, so that outputs on a bound go on learning; of the loss's shape.

        A prediction far behind a bound has no gradient across it, and an output may be stuck there. The term pulls
        predictions towards the set, with a share of the gradient that the loss has: there is nothing to set.

        Args:
            solution: what `solve` returned.
            loss: a number, or (B,), computed from `solution.value`.

        Example:
            >>> import torch, snarenet as sn
            >>> raw = torch.tensor([[-3.0, 1.0]], dtype=torch.float64, requires_grad=True)
            >>> layer = sn.SnareLayer(sn.Box(0.0, 9.0))
            >>> solution = layer.solve(raw)  # y = (0, 1): no gradient leads to the first entry
            >>> loss = (solution.value - 5).square().sum()
            >>> (loss + layer.proximity(solution, loss)).backward()
            >>> bool(raw.grad[0, 0] < 0)  # but a step along this one increases it
            True
        """
        if loss.shape not in (torch.Size(), solution.status.shape):
            raise ValueError(
                f"`loss` must be a number or have shape ({len(solution.status)},), but got {describe(loss)}"
            )
        found = proximity(solution.value, solution.raw, loss, self.metric)
        return found if loss.ndim else found.sum()

    @property
    def metric(self) -> Tensor | None:
        """(n,) the weights of squared distances; None where all are alike."""
        return None

    def explain(self, y: Tensor | None = None, x: Any = None) -> Explanation:
        """What is found in the constraints and how they are met, for predictions y at x: see `snarenet.explain`."""
        return explain_alone(self.constraints, f"{self.title}, a method without a choice of linear algebra")

    def aim(self, y: Tensor) -> float:
        """The violation at which to stop for predictions y, in float64: outputs are rounded afterwards."""
        return self.options.aim(output_dtype(y.dtype))

    def judge(
        self,
        instance: Instance,
        value: Tensor,
        raw: Tensor,
        steps: Tensor | int,
        dtype: torch.dtype,
        stalled: Tensor | None = None,
    ) -> Solution:
        """The solution that consists of these outputs, rounded: what they violate then decides their status.

        Args:
            instance: the constraints, in float64.
            value: (B, n) outputs, in float64.
            raw: (B, n) what they were made from; a sample of which it is not finite is NONFINITE.
            steps: how many steps were taken.
            dtype: that of the predictions.
            stalled: (B,) true where further steps would not help; none unless given.
        """
        value = value.to(output_dtype(dtype))
        status = torch.full((len(value),), int(Status.MAX_STEPS), device=value.device)
        if stalled is not None:
            status = torch.where(stalled, int(Status.STALLED), status)
        violation, allowance, status = judge(instance, value, self.tol, torch.float64, status)
        finite = raw.detach().isfinite().all(1)
        status = torch.where(finite, status, int(Status.NONFINITE))
        violation, allowance = torch.where(finite, violation, torch.inf), torch.where(finite, allowance, 0.0)
        steps = steps if isinstance(steps, Tensor) else torch.full_like(status, steps)
        return Solution(value, raw.to(value.dtype), status, steps, violation, allowance)

    def _report(self, solution: Solution) -> None:
        """Tell hooks, warn or raise about failures as asked, and warn of a tolerance that the precision cannot hold."""
        if tracing():
            return
        for hook in tuple(self._solution_hooks.values()):
            hook(solution)
        if self.on_failure == "ignore":
            return
        if not bool(solution.converged.all()):
            message = (
                f"{solution.describe()} Try more steps (max_steps={self.max_steps}), a larger tolerance "
                f"(tol={self.tol:g}), or check that the set is not empty; `solve` returns the status of every sample."
            )
            if self.on_failure == "raise":
                raise RepairError(message, solution)
            warn(message, RepairWarning)
        tell(solution, self.tol)
