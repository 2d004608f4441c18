"""`SnareLayer`: the repair as a layer behind a network."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints
from snarenet.constraints.data import tracing
from snarenet.damping import Annealed, Damping, as_damping
from snarenet.repair import Rows, Solver, Store, check_options, prepare, repair
from snarenet.solution import RepairError, RepairWarning, Solution

OnFailure = Literal["warn", "raise", "ignore"]


class SnareLayer(nn.Module):
    """Takes predictions to the feasible set, differentiably, by Levenberg-Marquardt steps.

    Args:
        constraints: the set to obey.
        damping: `Annealed()` unless given; a number means `Constant`, as in the paper.
        rows: "auto", "all" (the paper) or "active"; see `repair`.
        tol: largest violation that counts as feasible.
        max_steps: limit on steps.
        rescue: repair samples that did not converge once more, from their predictions, with active rows and `Adaptive`
            damping, before they count as failed.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".
        dtype: precision of the repair, float64 unless given.
        solver: "auto", or `ConjugateGradients()` for problems too large for a Jacobian.
        store_factors: keep factors for the backward pass; see `repair`.

    Example:
        >>> import torch, snarenet as sn
        >>> layer = sn.SnareLayer(sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 3), equals=1.0))
        >>> y = layer(torch.tensor([[2.0, 1.0, -3.0]]))
        >>> bool((y >= -1e-8).all()), round(y.sum().item(), 6)
        (True, 1.0)
    """

    def __init__(
        self,
        constraints: Constraints,
        damping: float | Damping = Annealed(),
        rows: Rows = "auto",
        tol: float = 1e-8,
        max_steps: int = 100,
        rescue: bool = True,
        on_failure: OnFailure = "warn",
        dtype: torch.dtype | None = None,
        *,
        solver: Solver = "auto",
        store_factors: Store = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(constraints, Constraints):
            raise TypeError(f"`constraints` must be a set of constraints, but got {type(constraints).__name__}")
        if on_failure not in ("warn", "raise", "ignore"):
            raise ValueError(f"`on_failure` must be 'warn', 'raise' or 'ignore', but got {on_failure!r}")
        check_options(rows, tol, max_steps, solver, store_factors, dtype)
        self.constraints = constraints
        self.damping = as_damping(damping)
        self.rows: Rows = rows
        self.tol, self.max_steps, self.rescue, self.on_failure = tol, max_steps, rescue, on_failure
        self.dtype = dtype
        self.solver: Solver = solver
        self.store_factors: Store = store_factors
        self.register_load_state_dict_post_hook(_prepare_again)
        self.prepare()

    def prepare(self) -> None:
        """Compute what constant constraints allow to compute once; called whenever they are built, moved or loaded."""
        prepare(self.constraints, self.damping.relative, self.dtype or torch.float64)

    def _apply(self, fn: Any, recurse: bool = True) -> SnareLayer:
        super()._apply(fn, recurse)
        self.prepare()
        return self

    def forward(self, y: Tensor, x: Any = None, relax: float | Tensor | None = None) -> Tensor:
        """The repaired predictions, in the dtype of y; see `solve`."""
        return self.solve(y, x, relax).value

    def solve(self, y: Tensor, x: Any = None, relax: float | Tensor | None = None) -> Solution:
        """Repair predictions y (B, n) for the inputs x and say how it went for each of them.

        `relax` widens the bounds while the layer is in training mode; in eval mode the true set always holds.
        """
        relax = 0.0 if relax is None or not self.training else relax
        solution = repair(
            self.constraints,
            y,
            x,
            damping=self.damping,
            rows=self.rows,
            tol=self.tol,
            max_steps=self.max_steps,
            relax=relax,
            rescue=self.rescue,
            solver=self.solver,
            store_factors=self.store_factors,
            dtype=self.dtype,
        )
        if self.on_failure != "ignore" and not tracing() and not bool(solution.converged.all()):
            self._report(solution)
        return solution

    def _report(self, solution: Solution) -> None:
        message = (
            f"{solution.describe()} Try more steps (max_steps={self.max_steps}), a larger tolerance "
            f"(tol={self.tol:g}), or check that the set is not empty; `solve` returns the status of every sample."
        )
        if self.on_failure == "raise":
            raise RepairError(message, solution)
        warnings.warn(message, RepairWarning, stacklevel=_levels_up())

    def extra_repr(self) -> str:
        return f"damping={self.damping}, rows={self.rows!r}, tol={self.tol:g}, max_steps={self.max_steps}"


def _prepare_again(layer: SnareLayer, _: Any) -> None:
    layer.prepare()


def _levels_up() -> int:
    """How many calls lie between a warning and the user's code: those of this package and of torch."""
    inside = tuple(os.path.dirname(module.__file__ or "") for module in (sys.modules["snarenet"], torch))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
