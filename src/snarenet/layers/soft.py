"""`SoftLayer`: predictions as they are; a penalty in the loss teaches them the constraints.

The penalty, the sum of squared violations, is the trainer's (`TrainConfig.penalty`). Nothing is guaranteed, unless the
predictions are repaired afterwards.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.layers.base import Layer, OnFailure
from snarenet.repair import Options, repair_with
from snarenet.repair.precision import output_dtype
from snarenet.solution import Solution


class SoftLayer(Layer):
    """Leaves predictions as they are; with `project`, repairs them in eval mode, where training cannot see it.

    Args:
        constraints: the set to obey.
        project: in eval mode, take predictions to the set with `repair`; then they obey it to `tol`.
        tol: largest violation that counts as feasible.
        max_steps: limit on the steps of that repair.
        on_failure: what to do about samples that could not be repaired: "warn", "raise" a `RepairError`, or "ignore".
            Violations of predictions that nobody repaired are this method's nature, and in the status only.

    Example:
        >>> import torch, snarenet as sn
        >>> layer = SoftLayer(sn.Box(0.0, 1.0), project=True)
        >>> y = torch.tensor([[2.0, 0.5]])
        >>> layer(y).tolist(), layer.eval()(y).tolist()
        ([[2.0, 0.5]], [[1.0, 0.5]])
    """

    title = "Soft"

    def __init__(
        self,
        constraints: Constraints,
        project: bool = False,
        tol: float = 1e-8,
        max_steps: int = 100,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__(constraints, Options(tol=tol, max_steps=max_steps, rescue=True, start=None), on_failure)
        self.project = project
        self.title = "Soft + projection" if project else "Soft"

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        if self._projects:
            return repair_with(self.options, self.constraints, y, x, relax)
        work, _, start, instance = self.constraints.prepare(y.detach(), x, relax)
        value = y.to(output_dtype(y.dtype))
        return self.judge(instance, start, work, 0, y.dtype)._replace(value=value, raw=value)

    @property
    def _projects(self) -> bool:
        return self.project and not self.training

    def _report(self, solution: Solution) -> None:
        if self._projects:
            super()._report(solution)

    def extra_repr(self) -> str:
        return f"project={self.project}, tol={self.tol:g}"
