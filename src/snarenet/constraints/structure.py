"""`Structure`: the pattern of a function's Jacobian: declared, or detected, checked in use and widened.

Detected at random points around predictions, as the union of what is nonzero there, and checked by products with random
vectors at the predictions themselves. A function may have branches that no point took (`where`, indices that depend on
y or x), so the check goes on while the pattern is used: at calls 1, 2, 4, ..., 64 and every 64th after them. What it
finds is added to the pattern, the result is computed again, and a warning says so, once.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from snarenet.constraints.products import CHUNK, Products
from snarenet.constraints.program import usable
from snarenet.constraints.recorded import Recordable, Recorded
from snarenet.constraints.sparsity import Colouring, Pattern, SparsityWarning
from snarenet.solution import warn
from snarenet.tracing import tracing

_LEAST = 16  # variables from which detection pays: with 25 to 50 a repair takes half as long or less
_LARGEST = 2**26  # entries of a Jacobian that is looked at whole; a larger one is for products, or its pattern declared
_DENSE = 0.25  # share of nonzeros above which a detected pattern is left alone: colours are as many as columns
_POINTS = 8  # at which a pattern is looked for, if that takes no more than
_SEEDS = 4096  # products, or than three points
_SCALES = (0.01, 0.1, 1.0)  # of the noise on them, in sizes of y: near branches, and far
_ROUNDS = 16  # of widening, before a pattern is taken to be full
_SUSPECTS = 4  # samples at which a pattern that failed is looked for again, in a round
_REGULAR = 64  # calls after which the check comes regularly


class Function(Recordable, Protocol):
    """What is needed of a map."""

    def select(self, index: Tensor) -> Function:
        """The function of some of the samples."""
        ...


class Structure:
    """What is known of a pattern, and how to have values on it.

    Args:
        declared: the pattern, if somebody knows it: it is believed.
    """

    def __init__(self, declared: Pattern | None = None) -> None:
        self.declared = declared
        # by the number of variables; None where the Jacobian was looked at, and is dense
        self.known: dict[int, Colouring | None] = {} if declared is None else {declared.columns: Colouring.of(declared)}
        self.calls = 0
        self.warned = False
        self._recorded: Recorded | None = None

    def find(self, function: Function, y: Tensor, look: bool = True) -> Pattern | None:
        """The pattern, detected if that is yet to be done and y (B, n) allows it; None where the Jacobian is dense."""
        n = y.shape[1]
        if self.declared is not None and self.declared.columns != n:
            shape = function.rows, n
            raise ValueError(f"`sparsity` must have shape {shape} for this `y`, but got shape {self.declared.shape}")
        if look and n not in self.known and n >= _LEAST and n * function.rows <= _LARGEST and can_look(y):
            with torch.no_grad():
                self.known[n] = self._detect(function, y.detach())
        colouring = self.known.get(n)
        return None if colouring is None else colouring.pattern

    def colouring(self, n: int) -> Colouring:
        """The colours of a pattern that was found."""
        found = self.known[n]
        assert found is not None
        return found

    def evaluate(self, function: Function, products: Products) -> tuple[Pattern, Tensor]:
        """The pattern and values (B, nnz) of J on it; now and then checked."""
        y = products.y
        colouring = self.colouring(y.shape[1])
        recorded = None if torch.is_grad_enabled() else self.recorded(function, y)
        values, due = None if recorded is None else recorded.values(function, y), can_look(y) and self._due()
        if values is None or due:
            true = colouring.values(products)
            values = values if values is not None and recorded is not None and recorded.confirm(values, true) else true
        if self.declared is not None or not due:
            return colouring.pattern, values
        with torch.no_grad():
            wider = _verified(function, Products(function.value, y.detach()), colouring, self.calls)
        if wider is not colouring:
            self._warn(colouring.pattern.missing(wider.pattern))
            self.known[y.shape[1]], values = wider, wider.values(products)
        return wider.pattern, values

    def recorded(self, function: Function, y: Tensor) -> Recorded | None:
        """The programs of the derivatives, where they can be used; what they cannot do they say themselves."""
        if not usable(y) or not can_look(y):
            return None
        colouring = self.colouring(y.shape[1])
        if self._recorded is None or not self._recorded.suits(function, y, colouring):
            self._recorded = Recorded(function, y, colouring)
        return self._recorded

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_recorded": None}  # a program belongs to its process

    def worth(self, n: int) -> int:
        """As many products by themselves as J costs: in one pass, three are had for one."""
        return 1 + self.colouring(n).count // 3

    def _due(self) -> bool:
        """Is this call to be checked?"""
        self.calls += 1
        return self.calls % _REGULAR == 0 or (self.calls < _REGULAR and self.calls & (self.calls - 1) == 0)

    @staticmethod
    def _detect(function: Function, y: Tensor) -> Colouring | None:
        """Look at points around y, and check at y."""
        found = _around(function, y, torch.arange(len(y)))
        if found.density > _DENSE:
            return None
        colouring = _verified(function, Products(function.value, y), Colouring.of(found), 0)
        return None if colouring.pattern.density > _DENSE else colouring

    def _warn(self, new: Pattern) -> None:
        if self.warned:
            return
        self.warned = True
        warn(
            f"the Jacobian of `fn` has {new.nnz} entries that were zero when its pattern was detected ({_some(new)}): "
            "a branch or an index depends on y or x. They were added and the result was computed again, but results "
            "before may lack them: give `sparsity=` a pattern with all entries, or None",
            SparsityWarning,
        )


def _around(function: Function, y: Tensor, samples: Tensor, at: bool = False) -> Pattern:
    """What is nonzero at random points around some of the samples (k,), and, if asked for, at these themselves."""
    count = min(_POINTS, max(len(_SCALES), _SEEDS // max(1, min(y.shape[1], function.rows))))
    which = samples[(torch.arange(count) * len(samples)) // count].to(y.device)
    noise = torch.randn(count, y.shape[1], generator=torch.Generator().manual_seed(0)).to(y)
    scales = torch.tensor(_SCALES).repeat(count)[:count].to(y)
    points = y[which] + scales.unsqueeze(1) * (1 + y[which].abs()) * noise
    if at:
        which = torch.cat([which, samples.to(y.device)])
        points = torch.cat([points, y[samples.to(y.device)]])
    return nonzeros(function.select(which), points)


def _verified(function: Function, products: Products, colouring: Colouring, seed: int) -> Colouring:
    """The same colouring, or one of a wider pattern: products with random vectors agree, or nothing more is found."""
    y = products.y
    v = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
    exact = products.jvp(v)
    for _ in range(_ROUNDS):
        pattern, values = colouring.pattern, colouring.values(products)
        wrong = _differ(exact, pattern.times(values, v), pattern.times(values.abs(), v.abs()))
        suspects = wrong.any(1).nonzero().squeeze(1)[:_SUSPECTS].cpu()
        if not len(suspects):
            return colouring
        wider = pattern | _around(function, y, suspects, at=True)
        if wider is pattern:  # what differs is rounding
            return colouring
        colouring = Colouring.of(wider)
    return Colouring.of(Pattern.full(function.rows, y.shape[1]))


def check(pattern: Pattern, function: Function, y: Tensor) -> None:
    """Raise if a Jacobian at y (B, n), or at random points around it, has an entry outside the pattern."""
    with torch.no_grad():
        y = y.detach()
        found = _around(function, y, torch.arange(len(y)))
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
    finite = torch.ones(batch, function.rows, dtype=torch.bool, device=y.device)
    for start in range(0, count, step):
        some = slice(start, min(count, start + step))
        seeds = torch.eye(some.stop - start, count - start, dtype=y.dtype, device=y.device)
        J = products.many(torch.nn.functional.pad(seeds, (start, 0)), by_rows)
        nonzero[some] = J != 0
        if by_rows:
            finite[:, some] = J.isfinite().all(2).T
        else:
            finite &= J.isfinite().all(0)
    return nonzero.transpose(0, 1) if by_rows else nonzero.permute(1, 2, 0), finite


class Seen:
    """The pattern of matrices that are there as data: the union of all that there were."""

    def __init__(self) -> None:
        self.pattern: Pattern | None = None

    def covers(self, rows: int, columns: int) -> bool:
        """Has every entry of matrices of this shape been seen already?"""
        return self.pattern is not None and self.pattern.shape == (rows, columns) and self.pattern.density == 1

    def add(self, *matrices: Tensor) -> Pattern | None:
        """The pattern, with what is nonzero in these (m, n) or (B, m, n); in a traced graph as it is."""
        if tracing() or transformed():
            return self.pattern
        found = torch.stack(
            [(matrix != 0).flatten(0, -3).any(0) if matrix.ndim > 2 else matrix != 0 for matrix in matrices]
        )
        found = found.any(0)
        if self.pattern is None or self.pattern.shape != found.shape:
            self.pattern = Pattern.of(found)
        elif int(found.sum()) > int(self.pattern.gather(found).sum()):
            self.pattern = self.pattern | Pattern.of(found)
        return self.pattern


class Given:
    """The pattern of Jacobians that a user computes in a sparse layout: the union of all that there were."""

    def __init__(self) -> None:
        self.pattern: Pattern | None = None
        self.dense = False  # did the first one come in a dense layout?

    def find(self, function: Any, y: Tensor, look: bool = True) -> Pattern | None:
        """The pattern; of J(y) if there was none before."""
        n = y.shape[1]
        unknown = (self.pattern is None or self.pattern.columns != n) and not self.dense
        if look and unknown and n >= _LEAST and can_look(y):
            with torch.no_grad():
                J = function.given(y.detach())
                self.dense = J.layout == torch.strided
                if not self.dense:
                    self._entries(J)
        return None if self.pattern is None or self.pattern.columns != n else self.pattern

    def worth(self, n: int) -> int:
        """As many products as J costs: the user's function is taken to be cheap."""
        return 1

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
        same = self.pattern is not None and self.pattern.shape == found.shape
        self.pattern = self.pattern | found if self.pattern is not None and same else found
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
