"""`Structure`: the pattern of a function's Jacobian: declared, or detected, checked in use and widened.

Detected at random points around predictions, as the union of what is nonzero there, and checked by products with random
vectors at the predictions themselves. A function may have branches that no point took (`where`, indices that depend on
y or x), so the check goes on while the pattern is used: at calls 1, 2, 4, ..., 64 and every 64th after them. What it
finds is added to the pattern, the result is computed again, and a warning says so, once.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import torch
from torch import Tensor

from snarenet.constraints.products import CHUNK, Products
from snarenet.constraints.sparsity import Colouring, Pattern, SparsityWarning
from snarenet.tracing import tracing

_LEAST = 48  # variables from which detection pays: below, a dense Jacobian takes as long as a compressed one
_DENSE = 0.25  # share of nonzeros above which a detected pattern is left alone: colours are as many as columns
_POINTS = 8  # at which a pattern is looked for, if that takes no more than
_SEEDS = 4096  # products, or than three points
_SCALES = (0.01, 0.1, 1.0)  # of the noise on them, in sizes of y: near branches, and far
_ROUNDS = 16  # of widening, before a pattern is taken to be full
_SUSPECTS = 4  # samples at which a pattern that failed is looked for again, in a round
_REGULAR = 64  # calls after which the check comes regularly


class Function(Protocol):
    """What is needed of a map."""

    rows: int

    def value(self, y: Tensor) -> Tensor:
        """g(y)."""
        ...

    def select(self, index: Tensor) -> Function:
        """The function of some of the samples."""
        ...


class Structure:
    """What is known of a pattern, and how to have values on it.

    Args:
        declared: the pattern, if somebody knows it: it is believed.
    """

    def __init__(self, declared: Pattern | None = None) -> None:
        self.declared = declared is not None
        self.colouring = None if declared is None else Colouring.of(declared)
        self.dense = False  # was it looked at, and found to be dense?
        self.calls = 0
        self.warned = False

    @property
    def pattern(self) -> Pattern | None:
        """The pattern, as far as it is known; None while it is not, and where the Jacobian is dense."""
        return None if self.colouring is None else self.colouring.pattern

    def find(self, function: Function, y: Tensor) -> Pattern | None:
        """The pattern, detected if that is yet to be done and y (B, n) allows it."""
        if self.pattern is None and not self.dense and y.shape[1] >= _LEAST and can_look(y):
            with torch.no_grad():
                self._detect(function, y.detach())
        if self.pattern is not None and self.pattern.shape != (function.rows, y.shape[1]):
            shape = function.rows, y.shape[1]
            raise ValueError(f"`sparsity` must have shape {shape} for this `y`, but got shape {self.pattern.shape}")
        return self.pattern

    def evaluate(self, function: Function, products: Products) -> tuple[Pattern, Tensor]:
        """The pattern and values (B, nnz) of J on it; now and then checked."""
        assert self.colouring is not None
        values = self.colouring.values(products)
        if not self.declared and can_look(products.y):
            self.calls += 1
            if self.calls % _REGULAR == 0 or (self.calls < _REGULAR and self.calls & (self.calls - 1) == 0):
                before = self.colouring.pattern
                with torch.no_grad():
                    self._verify(function, Products(function.value, products.y.detach()), self.calls)
                if self.colouring.pattern != before:
                    self._warn(before)
                    values = self.colouring.values(products)
        return self.colouring.pattern, values

    def _detect(self, function: Function, y: Tensor) -> None:
        """Look at points around y, and check at y."""
        found = self._around(function, y, torch.arange(len(y)))
        if found.density <= _DENSE:
            self.colouring = Colouring.of(found)
            self._verify(function, Products(function.value, y), 0)
        if self.pattern is None or self.pattern.density > _DENSE:
            self.colouring, self.dense = None, True

    def _around(self, function: Function, y: Tensor, samples: Tensor) -> Pattern:
        """What is nonzero at random points around some of the samples (k,), which are few enough to be looked at."""
        count = min(_POINTS, max(len(_SCALES), _SEEDS // max(1, min(y.shape[1], function.rows))))
        which = samples[(torch.arange(count) * len(samples)) // count].to(y.device)
        noise = torch.randn(count, y.shape[1], generator=torch.Generator().manual_seed(0)).to(y)
        scales = torch.tensor(_SCALES).repeat(count)[:count].to(y)
        near = y[which]
        return nonzeros(function.select(which), near + scales.unsqueeze(1) * (1 + near.abs()) * noise)

    def _verify(self, function: Function, products: Products, seed: int) -> None:
        """Widen the pattern until products with random vectors agree, or nothing more is found."""
        y = products.y
        v = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
        exact = products.jvp(v)
        for _ in range(_ROUNDS):
            assert self.colouring is not None
            pattern = self.colouring.pattern
            values = self.colouring.values(products)
            wrong = _differ(exact, pattern.times(values, v), pattern.times(values.abs(), v.abs()))
            suspects = wrong.any(1).nonzero().squeeze(1)[:_SUSPECTS].cpu()
            if not len(suspects):
                return
            here = suspects.to(y.device)
            wider = pattern | nonzeros(function.select(here), y[here]) | self._around(function, y, suspects)
            if wider == pattern:  # what differs is rounding
                return
            self.colouring = Colouring.of(wider)
        self.colouring = Colouring.of(Pattern.full(function.rows, y.shape[1]))

    def _warn(self, before: Pattern) -> None:
        assert self.pattern is not None
        new = before.missing(self.pattern)
        if self.warned:
            return
        self.warned = True
        warnings.warn(
            f"the Jacobian of `fn` has {new.nnz} entries that were zero when its pattern was detected ({_some(new)}): "
            "a branch or an index depends on y or x. They were added and the result was computed again, but results "
            "before may lack them: give `sparsity=` a pattern with all entries, or None",
            SparsityWarning,
            stacklevel=2,
        )


def check(pattern: Pattern, function: Function, y: Tensor) -> None:
    """Raise if a Jacobian at y (B, n), or at random points around it, has an entry outside the pattern."""
    with torch.no_grad():
        y = y.detach()
        found = Structure()._around(function, y, torch.arange(len(y)))
        for some in torch.arange(len(y), device=y.device).split(_POINTS):
            found = found | nonzeros(function.select(some), y[some])
    missing = pattern.missing(found)
    if missing.nnz:
        raise ValueError(f"`sparsity` lacks {missing.nnz} entries of the Jacobian: {_some(missing)}")


def nonzeros(function: Function, y: Tensor) -> Pattern:
    """The union of what is nonzero in the Jacobians at y (B, n).

    A row that is not finite says nothing (zero times NaN is NaN), unless it is so at all points: then all of its
    entries that are not zero count.
    """
    nonzero, finite = _looked_at(function, y, by_rows=function.rows <= y.shape[1])
    if function.rows <= y.shape[1] and not bool(finite.all()):  # backward passes spread NaN to all rows, forward not
        nonzero, finite = _looked_at(function, y, by_rows=False)
    used = finite | ~finite.any(0)
    return Pattern.of((nonzero & used.unsqueeze(2)).any(0))


def _looked_at(function: Function, y: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    """(B, rows, n) true where J(y) is not zero, and (B, rows) where its rows are finite, by rows or by columns."""
    products, (batch, n) = Products(function.value, y), y.shape
    count = function.rows if by_rows else n
    step = max(1, CHUNK // max(1, batch * max(n, function.rows)))
    nonzero = torch.zeros(count, batch, n if by_rows else function.rows, dtype=torch.bool, device=y.device)
    finite = torch.ones_like(nonzero)
    for start in range(0, count, step):
        some = slice(start, min(count, start + step))
        seeds = torch.eye(some.stop - start, count - start, dtype=y.dtype, device=y.device)
        J = products.many(torch.nn.functional.pad(seeds, (start, 0)), by_rows)
        nonzero[some], finite[some] = J != 0, J.isfinite()
    if by_rows:
        return nonzero.transpose(0, 1), finite.all(2).T
    return nonzero.permute(1, 2, 0), finite.all(0)


class Seen:
    """The pattern of matrices that are there as data: the union of all that there were."""

    def __init__(self) -> None:
        self.pattern: Pattern | None = None

    @property
    def full(self) -> bool:
        """Has every entry been seen already?"""
        return self.pattern is not None and self.pattern.density == 1

    def add(self, *matrices: Tensor) -> Pattern | None:
        """The pattern, with what is nonzero in these (m, n) or (B, m, n); in a traced graph as it is."""
        if tracing() or transformed():
            return self.pattern
        found = torch.stack(
            [(matrix != 0).flatten(0, -3).any(0) if matrix.ndim > 2 else matrix != 0 for matrix in matrices]
        )
        found = found.any(0)
        if self.pattern is None or int(found.sum()) > int(self.pattern.gather(found).sum()):
            self.pattern = Pattern.of(found) if self.pattern is None else self.pattern | Pattern.of(found)
        return self.pattern


class Given:
    """The pattern of Jacobians that a user computes in a sparse layout: the union of all that there were."""

    def __init__(self) -> None:
        self.pattern: Pattern | None = None
        self.dense = False  # did the first one come in a dense layout?

    def find(self, function: Any, y: Tensor) -> Pattern | None:
        """The pattern; of J(y) if there was none before."""
        if self.pattern is None and not self.dense and y.shape[1] >= _LEAST and can_look(y):
            with torch.no_grad():
                J = function.given(y.detach())
                self.dense = J.layout == torch.strided
                if not self.dense:
                    self._entries(J)
        return self.pattern

    def evaluate(self, function: Any, products: Products) -> tuple[Pattern, Tensor]:
        """The pattern, with what is new in J, and its values (B, nnz)."""
        J = function.given(products.y)
        pattern, sample, place, given = self._entries(J)
        zeros = given.new_zeros(len(products.y), pattern.nnz)
        if sample is None:
            return pattern, zeros.index_add(1, place, given.expand(len(zeros), -1))
        return pattern, zeros.index_put((sample, place), given, accumulate=True)

    def _entries(self, J: Tensor) -> tuple[Pattern, Tensor | None, Tensor, Tensor]:
        """The pattern with the entries of J; sample, place on it and value of each, no sample if J is shared."""
        sample, row, col, values = _stored(J)
        m, n = J.shape[-2:]
        places = row * n + col
        own = torch.unique(places).cpu()
        found = Pattern(own // max(1, n), own % max(1, n), (m, n))
        self.pattern = found if self.pattern is None else self.pattern | found
        place = torch.searchsorted(self.pattern.places.to(places.device), places)
        return self.pattern, sample, place, values


def _stored(J: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """(sample, row, column, value) of everything that a sparse layout stores; no sample of a single matrix."""
    if J.layout == torch.sparse_csr:  # by hand: torch cannot differentiate the conversion of a batch
        ends, col, values = J.crow_indices(), J.col_indices(), J.values()
        index = torch.arange(col.shape[-1], device=col.device).expand(col.shape).contiguous()
        row = torch.searchsorted(ends, index, right=True) - 1
        if J.ndim == 2:
            return None, row, col, values
        sample = torch.arange(len(J), device=col.device).unsqueeze(1).expand(col.shape)
        return sample.flatten(), row.flatten(), col.flatten(), values.flatten()
    J = J.to_sparse_coo().coalesce()
    *sample, row, col = J.indices()
    return sample[0] if sample else None, row, col, J.values()


def _differ(exact: Tensor, product: Tensor, size: Tensor) -> Tensor:
    """(B, rows) true where two products differ by more than rounding makes them."""
    slack = torch.finfo(exact.dtype).eps ** 0.75 * (size + exact.abs())
    return exact.isfinite() & ~((exact - product).abs() <= slack)


def can_look(y: Tensor) -> bool:
    """May values be looked at here: are there any, outside of traced graphs and of transforms?"""
    return len(y) > 0 and not tracing() and not transformed()


def transformed() -> bool:
    """Is this call inside a transform of torch.func, such as vmap?"""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def _some(pattern: Pattern) -> str:
    """The first few entries, in words."""
    entries = [f"({i}, {j})" for i, j in zip(pattern.row[:3].tolist(), pattern.col[:3].tolist(), strict=True)]
    return ", ".join(entries) + (", ..." if pattern.nnz > 3 else "")
