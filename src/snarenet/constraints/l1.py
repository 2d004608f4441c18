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
    store,
)
from snarenet.constraints.maps import L1BallMap
from snarenet.tracing import tracing


class L1Ball(LimitedRows):
    """sum_i |y_i - center_i| <= radius: the turnover of a portfolio, a budget of changes.

    Its one row is g(y) <= 0 with g(y) = sum |y - center| - radius inside. Outside it is sqrt(n) times the distance from
    the ball, which is never less than what the sum exceeds the radius by: a tolerance is kept by the sum. Alone, it
    is repaired to the nearest point of the ball, where small differences become 0 (to the tolerance); that is
    differentiable in y, center and radius except where a difference just becomes 0. Beside other rows, a start at the
    nearest point is exact, too, if there is one ball and no relaxation.

    Args:
        center: a number, (n,), (B, n), or a function of x that returns (B, n).
        radius: a number, (B, 1), or a function of x that returns (B, 1); at least 0.

    Example:
        >>> import torch, snarenet as sn
        >>> ball = sn.L1Ball(torch.zeros(2), 1.0)
        >>> sn.repair(ball, torch.tensor([[3.0, 0.5]])).value.round(decimals=6)
        tensor([[1., 0.]])
    """

    center: Tensor | Callable[[Any], Any]
    radius: Tensor | Callable[[Any], Any]

    def __init__(self, center: Datum, radius: Datum) -> None:
        super().__init__()
        self.rows, self.limit = 1, Bounds(upper=0.0)
        store(self, "center", center)
        store(self, "radius", radius)
        if isinstance(self.center, Tensor):
            check_shape("center", self.center, (), ("n",), ("B", "n"))
            check_finite("center", self.center)
            self.size = self.center.shape[-1] if self.center.ndim else None
        if isinstance(self.radius, Tensor):
            check_shape("radius", self.radius, (), ("B", 1))
            _check_radius(self.radius)

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        center, radius = (self._datum(name, y, x) for name in ("center", "radius"))
        check_shape("radius", radius, (), (y.shape[0], 1))
        if center.ndim:
            check_shape("center", center, (y.shape[1],), tuple(y.shape))
        if is_function(self.center):
            check_finite("center", center)
        if is_function(self.radius):
            _check_radius(radius)
        return self._instance(y, L1BallMap(center if center.ndim else center.expand(y.shape[1]), radius), x)

    def _datum(self, name: str, y: Tensor, x: Any) -> Tensor:
        datum = recall(self, name, x)
        if datum.ndim == 1 and is_function(getattr(self, name)):  # (B,) and (n,) could be mistaken for each other
            want = "(B, n)" if name == "center" else "(B, 1)"
            raise ValueError(f"`{name}(x)` must return {want} or a number, but got {describe(datum)}")
        return datum.to(y.dtype)


def _check_radius(radius: Tensor) -> None:
    check_finite("radius", radius)
    if not tracing() and not bool((radius >= 0).all()):
        raise ValueError(f"`radius` must be at least 0, but its least entry is {float(radius.min()):.3g}")
