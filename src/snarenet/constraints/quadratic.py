"""`Quadratic`: rows y'H_i y + G_i y."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.base import Constraints, Instance
from snarenet.constraints.bounds import Bounds
from snarenet.constraints.data import Datum, check_finite, check_inputs, check_shape, recall, store
from snarenet.constraints.maps import QuadraticMap
from snarenet.constraints.structure import Seen


class Quadratic(Constraints):
    """lower <= y'H_i y + G_i y <= upper for every row i, or = equals; convex or not.

    Args:
        H: diagonals (m, n) or whole matrices (m, n, n); with a leading B, one per sample; or a function of x that
            returns (B, m, n) or (B, m, n, n). A tensor of shape (m, n, n) is always read as whole matrices. None for
            zero.
        G: (m, n), (B, m, n), or a function of x; None for zero.
        lower: lower bounds: a number, (m,), (B, m), or a function of x; None for none.
        upper: upper bounds, likewise.
        equals: right-hand side of equalities, instead of `lower` and `upper`.

    Example:
        >>> import torch, snarenet as sn
        >>> disk = sn.Quadratic(torch.ones(1, 2), upper=1.0)
        >>> disk.violation(torch.tensor([[3.0, 4.0]])).item()
        24.0
    """

    H: Tensor | Callable[[Any], Any] | None
    G: Tensor | Callable[[Any], Any] | None

    def __init__(
        self,
        H: Datum | None = None,
        G: Datum | None = None,
        lower: Datum | None = None,
        upper: Datum | None = None,
        equals: Datum | None = None,
    ) -> None:
        super().__init__()
        if H is None and G is None:
            raise ValueError("give at least one of `H` and `G`")
        self.limit, self.seen = Bounds(lower, upper, equals), Seen()
        for name, datum in (("H", H), ("G", G)):
            if datum is None:
                self.register_buffer(name, None)
            else:
                store(self, name, datum)
        self.rows = self.limit.rows
        if isinstance(self.G, Tensor):
            check_shape("G", self.G, ("m", "n"), ("B", "m", "n"))
            self._fix_sizes("G", self.G.shape[-2:])
            check_finite("G", self.G)
        if isinstance(self.H, Tensor):
            m, n = self.rows or "m", self.size or "n"
            check_shape("H", self.H, (m, n), (m, n, n), ("B", m, n), ("B", m, n, n))
            check_finite("H", self.H)
        # zeros that are kept, not saved: what is computed once is known by its tensors
        if self.G is None and isinstance(self.H, Tensor):
            self.register_buffer("G", self.H.new_zeros(_sizes(self.H, fixed=True)), persistent=False)
            self._fix_sizes("H", _sizes(self.H, fixed=True))
        elif self.H is None and isinstance(self.G, Tensor):
            self.register_buffer("H", self.G.new_zeros(self.G.shape[-2:]), persistent=False)

    def _fix_sizes(self, name: str, sizes: torch.Size) -> None:
        self.rows, self.size = sizes
        self.limit.check_rows(sizes[0], name)

    def value(self, y: Tensor, x: Any = None) -> Tensor:
        return self.at(self.check(y), x).map.value(y)

    def bounds(self, x: Any = None) -> tuple[Tensor, Tensor]:
        return self.limit.at(x)

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        batch, n = y.shape
        rows = self.rows or "m"
        fixed = isinstance(self.H, Tensor)
        G = None if self.G is None else recall(self, "G", x).to(y.dtype)
        if G is not None:
            check_shape("G", G, (rows, n), (batch, rows, n))
            rows = G.shape[-2]
        H = y.new_zeros(int(rows), n) if self.H is None else recall(self, "H", x).to(y.dtype)
        whole = [(rows, n, n)] if fixed else []  # a function of x returns data per sample
        check_shape("H", H, (rows, n), *whole, (batch, rows, n), (batch, rows, n, n))
        G = H.new_zeros(_sizes(H, fixed)) if G is None else G
        if not fixed or not isinstance(self.G, Tensor):
            check_finite("G", G)
            check_finite("H", H)
        diagonal = H.ndim == 2 or (H.ndim == 3 and tuple(H.shape) not in whole)
        return self._instance(y, QuadraticMap(H, G, diagonal, self.seen), x)


def _sizes(H: Tensor, fixed: bool) -> torch.Size:
    """(m, n) of diagonals or whole matrices; a constant H of three dimensions is whole if it can be."""
    whole = H.ndim == 4 or (fixed and H.ndim == 3 and H.shape[1] == H.shape[2])
    return H.shape[-3:-1] if whole else H.shape[-2:]
