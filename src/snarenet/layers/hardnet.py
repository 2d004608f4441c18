r"""`HardNetLayer`: linear constraints in closed form; `HardNetPlusPlusLayer`: its successor, a setting of `SnareLayer`.

HardNet-Aff moves every violated row to its bound and leaves the others where they are:

$$ y + A^+ \big( \mathrm{relu}(l - A y) - \mathrm{relu}(A y - u) \big). $$

$A A^+ = I$ if the rows of A are linearly independent, and then all of them hold, to rounding. HardNet++ takes the steps

$$ y \leftarrow y - J^\top (J J^\top + \epsilon I)^{-1} r, \qquad r = \mathrm{relu}(g - u) - \mathrm{relu}(l - g), $$

which are those of `SnareLayer` with constant damping and all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Box, Constraints, Linear
from snarenet.constraints.base import residual
from snarenet.constraints.maps import LinearMap, Map, transposed_times
from snarenet.damping import Constant
from snarenet.layers.base import Layer, OnFailure
from snarenet.layers.snare import SnareLayer
from snarenet.repair import Options
from snarenet.solution import Solution
from snarenet.tracing import tracing

_DEPENDENT = 1e-10  # distance from the rows before it, in its own length, at which a row counts as dependent on them


class HardNetLayer(Layer):
    """HardNet-Aff: one closed-form step to the bounds of the violated rows, for linearly independent linear rows.

    All constraints hold afterwards, to rounding; gradients flow to y, A, the bounds and x. A constant A is factored
    once. It is no projection: satisfied rows keep their value, which can move y far.

    Args:
        constraints: `Linear` sets and boxes, with no more rows than outputs, linearly independent.
        tol: largest violation that counts as feasible.
        max_steps: without effect; there is one step.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".

    Example:
        >>> import torch, snarenet as sn
        >>> layer = HardNetLayer(sn.Linear(torch.ones(1, 2), upper=1.0))
        >>> layer(torch.tensor([[3.0, 1.0]])).round(decimals=6).tolist()
        [[1.5, -0.5]]
    """

    title = "HardNet"

    def __init__(
        self, constraints: Constraints, tol: float = 1e-8, max_steps: int = 1, on_failure: OnFailure = "warn"
    ) -> None:
        super().__init__(constraints, Options(tol=tol, max_steps=max_steps), on_failure)
        for part in (parts := constraints.parts):
            if not isinstance(part, Linear | Box):
                raise ValueError(f"HardNet repairs linear constraints only, but got {type(part).__name__}")
        if (size := constraints.size) is not None:  # else the call checks it
            _check_count(sum(size if isinstance(part, Box) else part.rows or 0 for part in parts), size)
        maps = [part.constant_map(torch.float64) if isinstance(part, Linear) else None for part in parts]
        if all(map is not None for map in maps):
            _inverse(torch.cat([map.A for map in maps if map is not None]))

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        work, finite, start, instance = self.constraints.prepare(y, x, relax)
        r = residual(instance.map.value(start), instance.lower, instance.upper)
        value = torch.where(finite.unsqueeze(1), start - transposed_times(self._inverse(instance.map, start), r), work)
        return self.judge(instance, value, work, (r != 0).any(1).long(), y.dtype)

    def _inverse(self, map: Map, y: Tensor) -> Tensor:
        """The transposed pseudo-inverse of the rows, computed once where they are constant."""
        parts = map.parts
        if not all(part.constant for part in parts):
            return _inverse(map.jacobian(y))
        matrices = tuple(part.A for part in parts if isinstance(part, LinearMap))
        key = ("hardnet", y.shape[1], y.dtype, y.device)
        return self.constraints.memo.get(key, matrices, lambda: _inverse(map.jacobian(y)))


def _inverse(A: Tensor) -> Tensor:
    """The transposed pseudo-inverse of A (m, n) or (B, m, n): R^-1 Q' with A' = Q R, more exact than by A A'."""
    _check_count(*A.shape[-2:])
    Q, R = torch.linalg.qr(A.mT)
    if not tracing():
        distance = R.detach().diagonal(dim1=-2, dim2=-1).abs()  # of each row from the span of those before it
        dependent = distance <= _DEPENDENT * A.detach().norm(dim=-1)
        if bool(dependent.any()):
            samples = f" in {int(dependent.any(1).sum())} of {len(A)} samples" if A.ndim == 3 else ""
            row = int(dependent.nonzero()[0, -1])
            raise ValueError(f"HardNet needs linearly independent rows, but row {row} depends on others{samples}")
    return torch.linalg.solve_triangular(R, Q.mT, upper=True)


def _check_count(rows: int, size: int) -> None:
    if rows > size:
        raise ValueError(f"HardNet needs linearly independent rows, but got {rows} rows for {size} outputs")


class HardNetPlusPlusLayer(SnareLayer):
    """HardNet++: damped Gauss-Newton steps on all rows, without a search or a rescue, for any constraints.

    Args:
        constraints: the set to obey.
        epsilon: the damping.
        tol: largest violation that counts as feasible; 0 takes `max_steps` steps whatever happens, as its authors do.
        max_steps: limit on steps.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".
        dtype: precision of the repair, float64 unless given; its authors use float32.
    """

    title = "HardNet++"
    limits_gradients = False  # as in its paper

    def __init__(
        self,
        constraints: Constraints,
        epsilon: float = 0.3,
        tol: float = 1e-8,
        max_steps: int = 500,
        on_failure: OnFailure = "warn",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(constraints, Constant(epsilon), "all", tol, max_steps, False, on_failure, dtype, start=None)


def hardnet_plus_plus(constraints: Constraints, **settings: Any) -> SnareLayer:
    """HardNet++ as a named configuration of `SnareLayer`; the settings are those of `HardNetPlusPlusLayer`."""
    return HardNetPlusPlusLayer(constraints, **settings)
