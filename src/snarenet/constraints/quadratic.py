"""`Quadratic`: rows y'H_i y + G_i y, with H whole, diagonal, or of low rank plus a diagonal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.base import Instance, LimitedRows
from snarenet.constraints.bounds import Bounds
from snarenet.constraints.data import Datum, check_finite, check_inputs, check_shape, recall, store
from snarenet.constraints.maps import FactoredMap, Map, QuadraticMap
from snarenet.constraints.structure import Seen


class Quadratic(LimitedRows):
    """lower <= y'H_i y + G_i y <= upper for every row i, or = equals; convex or not.

    H is given as `H`, or as H = F F' + diag(D) by its `factor` F and its `diagonal` D, either of which may be left out.
    With k columns in F a repair then costs n k for every sample where it costs n n with H, and H is never formed.

    Args:
        H: diagonals (m, n) or whole matrices (m, n, n); with a leading B, one per sample; or a function of x that
            returns (B, m, n) or (B, m, n, n). A tensor of shape (m, n, n) is always read as whole matrices. None for
            zero.
        G: (m, n), (B, m, n), or a function of x; None for zero.
        lower: lower bounds: a number, (m,), (B, m), or a function of x; None for none.
        upper: upper bounds, likewise.
        equals: right-hand side of equalities, instead of `lower` and `upper`.
        factor: F, (n, k) for all rows, (m, n, k), or (B, m, n, k); or a function of x that returns (B, n, k) for all
            rows, or (B, m, n, k).
        diagonal: D, (n,) for all rows, (m, n), or (B, m, n); or a function of x that returns (B, n) for all rows, or
            (B, m, n).

    Example:
        >>> import torch, snarenet as sn
        >>> disk = sn.Quadratic(torch.ones(1, 2), upper=1.0)
        >>> disk.violation(torch.tensor([[3.0, 4.0]])).item()
        24.0
        >>> risk = sn.Quadratic(factor=torch.ones(2, 1), diagonal=torch.ones(2), upper=1.0)
        >>> risk.violation(torch.tensor([[3.0, 4.0]])).item()
        73.0
    """

    H: Tensor | Callable[[Any], Any] | None
    G: Tensor | Callable[[Any], Any] | None
    factor: Tensor | Callable[[Any], Any] | None
    diagonal: Tensor | Callable[[Any], Any] | None

    def __init__(
        self,
        H: Datum | None = None,
        G: Datum | None = None,
        lower: Datum | None = None,
        upper: Datum | None = None,
        equals: Datum | None = None,
        factor: Datum | None = None,
        diagonal: Datum | None = None,
    ) -> None:
        super().__init__()
        data = {"H": H, "G": G, "factor": factor, "diagonal": diagonal}
        if all(datum is None for datum in data.values()):
            raise ValueError("give at least one of `H` and `G`, or a `factor` or `diagonal` of H")
        self.factored = factor is not None or diagonal is not None
        if H is not None and self.factored:
            raise ValueError("give either `H`, or a `factor` and `diagonal` of it, not both")
        self.limit, self.seen = Bounds(lower, upper, equals), Seen()
        for name, datum in data.items():
            if datum is None:
                self.register_buffer(name, None)
            else:
                store(self, name, datum)
        self.rows = self.limit.rows
        if isinstance(self.G, Tensor):
            check_shape("G", self.G, ("m", "n"), ("B", "m", "n"))
            self._fix_sizes("G", self.G.shape[-2:])
            check_finite("G", self.G)
        if self.factored:
            self._check_factored()
        else:
            self._check_whole()

    def _check_whole(self) -> None:
        """Check what is constant of H, and put zeros for H or G where none were given."""
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

    def _check_factored(self) -> None:
        """Check what is constant of F and D, and find out how many rows there are."""
        given = [(name, getattr(self, name)) for name in ("factor", "diagonal") if getattr(self, name) is not None]
        for name, datum in given:
            if not isinstance(datum, Tensor):
                continue
            tail = (self.size or "n", *(("k",) if name == "factor" else ()))
            check_shape(name, datum, tail, (self.rows or "m", *tail), ("B", self.rows or "m", *tail))
            check_finite(name, datum)
            self.size = datum.shape[-len(tail)]
            if datum.ndim > len(tail):
                self._fix_sizes(name, torch.Size((datum.shape[-len(tail) - 1], self.size)))
        if self.rows is None and self.G is None and all(isinstance(datum, Tensor) for _, datum in given):
            self.rows = 1

    def _fix_sizes(self, name: str, sizes: torch.Size) -> None:
        self.rows, self.size = sizes
        self.limit.check_rows(sizes[0], name)

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        return self._instance(y, self.map_at(y, x), x)

    def map_at(self, y: Tensor, x: Any = None) -> Map:
        """The rows of the batch x without their bounds, in the dtype of y (B, n)."""
        return self._factored_map(y, x) if self.factored else self._whole_map(y, x)

    def _linear_term(self, y: Tensor, x: Any) -> Tensor | None:
        G = None if self.G is None else recall(self, "G", x).to(y.dtype)
        if G is not None:
            check_shape("G", G, (self.rows or "m", y.shape[1]), (y.shape[0], self.rows or "m", y.shape[1]))
            if not isinstance(self.G, Tensor):
                check_finite("G", G)
        return G

    def _whole_map(self, y: Tensor, x: Any) -> QuadraticMap:
        batch, n = y.shape
        fixed, G = isinstance(self.H, Tensor), self._linear_term(y, x)
        rows = self.rows or "m" if G is None else G.shape[-2]
        H = y.new_zeros(int(rows), n) if self.H is None else recall(self, "H", x).to(y.dtype)
        whole = [(rows, n, n)] if fixed else []  # a function of x returns data per sample
        check_shape("H", H, (rows, n), *whole, (batch, rows, n), (batch, rows, n, n))
        G = H.new_zeros(_sizes(H, fixed)) if G is None else G
        if not fixed:
            check_finite("H", H)
        diagonal = H.ndim == 2 or (H.ndim == 3 and tuple(H.shape) not in whole)
        return QuadraticMap(H if diagonal else self._symmetric(H), G, diagonal, self.seen)

    def _symmetric(self, H: Tensor) -> Tensor:
        """(H + H') / 2; of a constant H once."""
        if H is not self.H or H.requires_grad:
            return (H + H.mT) / 2
        return self.memo.get(("H", H.dtype), (H,), lambda: (H + H.mT) / 2)

    def _factored_map(self, y: Tensor, x: Any) -> Map:
        """The rows by F and D; made once where all samples share them, as what is packed is known by its tensors."""
        data = (self.factor, 3), (self.diagonal, 2), (self.G, 2)
        if not all(_shared(datum, most) for datum, most in data):
            return self._build_factored(y, x)
        sources = tuple(datum for datum, _ in data if isinstance(datum, Tensor))
        return self.memo.get(("map", y.dtype), sources, lambda: self._build_factored(y, x))

    def _build_factored(self, y: Tensor, x: Any) -> Map:
        n, G = y.shape[1], self._linear_term(y, x)
        rows = self.rows if G is None else G.shape[-2]
        F, rows = self._per_row("factor", y, x, (n, "k"), rows)
        D, rows = self._per_row("diagonal", y, x, (n,), rows)
        rows = rows or 1
        G = y.new_zeros(rows, n) if G is None else G
        D = y.new_zeros(rows, n) if D is None else D.expand(*D.shape[:-2], rows, n)
        if F is None:
            return QuadraticMap(D, G, diagonal=True, seen=self.seen)
        return FactoredMap(F.expand(*F.shape[:-3], rows, *F.shape[-2:]), D, G, self.seen)

    def _per_row(
        self, name: str, y: Tensor, x: Any, tail: tuple[int | str, ...], rows: int | None
    ) -> tuple[Tensor | None, int | None]:
        """The datum with a dimension for rows, of 1 where it holds for all, and their number as far as it is known."""
        if getattr(self, name) is None:
            return None, rows
        fixed, datum = isinstance(getattr(self, name), Tensor), recall(self, name, x).to(y.dtype)
        one_more = (rows or "m") if fixed else y.shape[0]  # a function of x returns data per sample
        check_shape(name, datum, tail, (one_more, *tail), (y.shape[0], rows or "m", *tail))
        if not fixed:
            check_finite(name, datum)
        if datum.ndim == len(tail) or (datum.ndim == len(tail) + 1 and not fixed):
            return datum.unsqueeze(-len(tail) - 1), rows
        return datum, datum.shape[-len(tail) - 1]


def _shared(datum: object, most: int) -> bool:
    """Is this nothing, or one tensor for all samples that is not learned, of so many dimensions at most?"""
    return datum is None or (isinstance(datum, Tensor) and datum.ndim <= most and not datum.requires_grad)


def _sizes(H: Tensor, fixed: bool) -> torch.Size:
    """(m, n) of diagonals or whole matrices; a constant H of three dimensions is whole if it can be."""
    whole = H.ndim == 4 or (fixed and H.ndim == 3 and H.shape[1] == H.shape[2])
    return H.shape[-3:-1] if whole else H.shape[-2:]
