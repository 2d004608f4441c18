"""`L1Ball`: a limit on the sum of absolute differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from snarenet.constraints.base import Instance, LimitedRows
from snarenet.constraints.bounds import Bounds
from snarenet.constraints.data import (
    Datum,
    check_finite,
    check_inputs,
    check_shape,
    describe,
    is_function,
    recall,
    recall_matrix,
    store,
)
from snarenet.constraints.maps import L1BallMap, L1ImageMap
from snarenet.tracing import tracing


class L1Ball(LimitedRows):
    """sum_i |y_i - center_i| <= radius: the turnover of a portfolio, a budget of changes.

    With a matrix A it is sum_i |(A y - center)_i| <= radius: the total variation of a signal, the ramping of a plant.

    Without a matrix there is one row g(y) <= 0, with g(y) = sum |y - center| - radius inside. Outside it is sqrt(n)
    times the distance from the ball. With one there is a row for each of its k rows, which is k times what the
    projection of A y onto the ball changes this entry by. Neither is less than what the sum exceeds the radius by: a
    tolerance is kept by the sum.

    A repair begins at the nearest point, where small differences become 0 (to the tolerance); that is differentiable in
    y, center, radius and matrix, except where a difference just becomes 0. With a matrix, or where there are several
    balls, it is the nearest to 1e-4 of the distance or better. It does so beside other rows, too, unless a ball is
    relaxed.

    Args:
        center: a number, (n,), (B, n), or a function of x that returns (B, n); with a matrix k stands for n.
        radius: a number, (B, 1), or a function of x that returns (B, 1); at least 0.
        matrix: (k, n), one per sample (B, k, n), or a function of x that returns either; None for none.

    Example:
        >>> import torch, snarenet as sn
        >>> ball = sn.L1Ball(torch.zeros(2), 1.0)
        >>> sn.repair(ball, torch.tensor([[3.0, 0.5]])).value.round(decimals=6)
        tensor([[1., 0.]])
        >>> variation = sn.L1Ball(0.0, 1.0, torch.eye(3).diff(dim=0))
        >>> sn.repair(variation, torch.tensor([[0.0, 4.0, 0.0]])).value.round(decimals=6)
        tensor([[1.1667, 1.6667, 1.1667]])
    """

    center: Tensor | Callable[[Any], Any]
    radius: Tensor | Callable[[Any], Any]
    matrix: Tensor | Callable[[Any], Any] | None

    def __init__(self, center: Datum, radius: Datum, matrix: Datum | None = None) -> None:
        super().__init__()
        self.rows, self.limit = 1, Bounds(upper=0.0)
        store(self, "center", center)
        store(self, "radius", radius)
        if isinstance(self.center, Tensor):
            check_shape("center", self.center, (), ("n",), ("B", "n"))
            check_finite("center", self.center)
        if isinstance(self.radius, Tensor):
            check_shape("radius", self.radius, (), ("B", 1))
            _check_radius(self.radius)
        length = self.center.shape[-1] if isinstance(self.center, Tensor) and self.center.ndim else None
        if matrix is None:
            self.matrix, self.size = None, length
            return
        store(self, "matrix", matrix)
        self.rows = length
        if isinstance(self.matrix, Tensor):
            check_shape("matrix", self.matrix, (length or "k", "n"), ("B", length or "k", "n"))
            check_finite("matrix", self.matrix)
            self.rows, self.size = self.matrix.shape[-2:]

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        center, radius = (self._datum(name, y, x) for name in ("center", "radius"))
        check_shape("radius", radius, (), (y.shape[0], 1))
        matrix = None if self.matrix is None else recall_matrix(self, "matrix", self.rows, y, x).to(y.dtype)
        length = y.shape[1] if matrix is None else matrix.shape[-2]
        if center.ndim:
            check_shape("center", center, (length,), (y.shape[0], length))
        if is_function(self.center):
            check_finite("center", center)
        if is_function(self.radius):
            _check_radius(radius)
        center = center if center.ndim else center.expand(length)
        map = L1BallMap(center, radius) if matrix is None else L1ImageMap(matrix, center, radius)
        return self._instance(y, map, x)

    def _datum(self, name: str, y: Tensor, x: Any) -> Tensor:
        datum = recall(self, name, x)
        if datum.ndim == 1 and is_function(getattr(self, name)):  # (B,) and (n,) could be mistaken for each other
            want = "(B, 1)" if name == "radius" else "(B, n)" if self.matrix is None else "(B, k)"
            raise ValueError(f"`{name}(x)` must return {want} or a number, but got {describe(datum)}")
        return datum.to(y.dtype)


def _check_radius(radius: Tensor) -> None:
    check_finite("radius", radius)
    if not tracing() and not bool((radius >= 0).all()):
        raise ValueError(f"`radius` must be at least 0, but its least entry is {float(radius.min()):.3g}")
