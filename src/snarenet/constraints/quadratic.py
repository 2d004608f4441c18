"""`Quadratic`: rows y'H_i y + G_i y."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from snarenet.constraints.base import Constraints, Instance
from snarenet.constraints.bounds import Bounds
from snarenet.constraints.data import Datum, check_finite, check_inputs, check_shape, recall, store
from snarenet.constraints.maps import QuadraticMap


class Quadratic(Constraints):
    """lower <= y'H_i y + G_i y <= upper for every row i, or = equals; convex or not.

    Args:
        H: diagonals (m, n) or whole matrices (m, n, n); with a leading B, one per sample; or a function of x that
            returns (B, m, n) or (B, m, n, n). A tensor of shape (m, n, n) is always read as whole matrices.
        G: (m, n), (B, m, n), or a function of x.
        lower: lower bounds: a number, (m,), (B, m), or a function of x; None for none.
        upper: upper bounds, likewise.
        equals: right-hand side of equalities, instead of `lower` and `upper`.

    Example:
        >>> import torch, snarenet as sn
        >>> disk = sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), upper=1.0)
        >>> disk.violation(torch.tensor([[3.0, 4.0]])).item()
        24.0
    """

    H: Tensor | Callable[[Any], Any]
    G: Tensor | Callable[[Any], Any]

    def __init__(
        self,
        H: Datum,
        G: Datum,
        lower: Datum | None = None,
        upper: Datum | None = None,
        equals: Datum | None = None,
    ) -> None:
        super().__init__()
        self.limit = Bounds(lower, upper, equals)
        store(self, "H", H)
        store(self, "G", G)
        self.rows = self.limit.rows
        if isinstance(self.G, Tensor):
            check_shape("G", self.G, ("m", "n"), ("B", "m", "n"))
            check_finite("G", self.G)
            self.rows, self.size = self.G.shape[-2:]
            self.limit.check_rows(self.rows, "G")
        if isinstance(self.H, Tensor):
            m, n = self.rows or "m", self.size or "n"
            check_shape("H", self.H, (m, n), (m, n, n), ("B", m, n), ("B", m, n, n))
            check_finite("H", self.H)

    def value(self, y: Tensor, x: Any = None) -> Tensor:
        return self.at(self.check(y), x).map.value(y)

    def bounds(self, x: Any = None) -> tuple[Tensor, Tensor]:
        return self.limit.at(x)

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        H, G = recall(self, "H", x).to(y.dtype), recall(self, "G", x).to(y.dtype)
        batch, n = y.shape
        check_shape("G", G, (self.rows or "m", n), (batch, self.rows or "m", n))
        m = G.shape[-2]
        fixed = isinstance(self.H, Tensor)
        whole = [(m, n, n)] if fixed else []  # a function of x returns data per sample
        check_shape("H", H, (m, n), *whole, (batch, m, n), (batch, m, n, n))
        if not fixed or not isinstance(self.G, Tensor):
            check_finite("G", G)
            check_finite("H", H)
        diagonal = H.ndim == 2 or (H.ndim == 3 and tuple(H.shape) not in whole)
        return self._instance(y, QuadraticMap(H, G, diagonal), x)
