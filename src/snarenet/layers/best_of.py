"""`BestOfLayer`: several predictions a sample, each repaired, and the best of them returned.

Where a set has several pieces, or an objective several valleys, the best point jumps as the input changes, and a
network, which is continuous, cannot follow. With two predictions it need not: each stays in a piece of its own, and
what is returned jumps between them. Only the prediction that was chosen has a gradient, so each learns where it is the
best. They must begin in different pieces, and stay there: a pull towards the set (`proximity`) sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from snarenet.constraints import Constraints
from snarenet.constraints.data import check_objective
from snarenet.layers.snare import SnareLayer
from snarenet.repair import Explanation
from snarenet.repair.options import check_count
from snarenet.solution import Solution


class BestOfLayer(SnareLayer):
    """Repairs `count` predictions for every sample, and returns the feasible point with the least objective.

    Args:
        constraints: the set to obey.
        objective: f(y, x) of a batch, (B,): what decides between feasible points.
        count: predictions a sample; a network predicts so many points, one after the other, (B, count * n).
        step: factor of a step down the objective before each repair, see `SnareLayer`; none unless given.
        options: the others of `SnareLayer`, but `record`.

    Example:
        >>> import torch, snarenet as sn
        >>> outside = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), 1, 1.0)  # of the unit circle
        >>> layer = sn.BestOfLayer(outside, lambda y, x: (y - x).square().sum(1), 2)
        >>> y = torch.tensor([[0.9, 0.0, -0.9, 0.0]], dtype=torch.float64)  # a point on the right, one on the left
        >>> layer(y, torch.tensor([[-0.5, 0.0]], dtype=torch.float64)).round(decimals=6)
        tensor([[-1.,  0.]], dtype=torch.float64)
    """

    title = "SnareNet, best of several"
    polishes = "none"  # another prediction is there for a sample that was hard to reach

    def __init__(
        self,
        constraints: Constraints,
        objective: Callable[[Tensor, Any], Tensor],
        count: int,
        step: float | Tensor | None = None,
        **options: Any,
    ) -> None:
        check_count("count", count, 1)
        if options.get("record"):
            raise ValueError("`record` is not an option here: record the whole training step")
        super().__init__(constraints, objective=objective, step=step, **options)
        self.count = count

    def predictions(self, size: int) -> int:
        return self.count * size

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        x = tree_map_only(Tensor, lambda leaf: leaf.repeat_interleave(self.count, 0), x)
        if isinstance(relax, Tensor) and relax.ndim == 2:
            relax = relax.repeat_interleave(self.count, 0)
        return self._best(super().repair(self._apart(y), x, relax), x)

    def explain(self, y: Tensor | None = None, x: Any = None) -> Explanation:
        return super().explain(None if y is None else self._apart(y)[:: self.count], x)

    def _apart(self, y: Tensor) -> Tensor:
        """(B count, n) the predictions (B, count n) of each sample, one after the other."""
        if y.ndim != 2 or y.shape[1] % self.count:
            raise ValueError(f"`y` must have shape (B, {self.count} n), but got {tuple(y.shape)}")
        return y.unflatten(1, (self.count, -1)).flatten(0, 1)

    def _best(self, found: Solution, x: Any) -> Solution:
        """Of the solutions of every sample, the best: first by its violation, if it is outside, then by f."""
        with torch.no_grad():
            outside = torch.where(found.converged, 0.0, found.violation)
            assert self.objective is not None
            value = check_objective(self.objective(found.value, x), found.value)
            value = torch.where(found.converged, value, 0.0)
            order = torch.stack([outside, value], 0).unflatten(1, (-1, self.count))
            outside, value = order.nan_to_num(torch.inf)
            least = outside == outside.amin(1, keepdim=True)
            best = torch.where(least, value, torch.inf).argmin(1)
            best = best + self.count * torch.arange(len(best), device=best.device)
        return Solution(*(tensor[best] for tensor in found))
