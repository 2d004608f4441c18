r"""`SparseNormal`: the systems of a step, for a Jacobian with one sparse pattern.

With rows J, inverse weights $W^{-1}$ (0 for a fixed variable) and the damping $\delta = \lambda D$ of each row, solve

$$ (J W^{-1} J^\top + \mathrm{diag}(\delta))\, \mu = r, $$

where a row that is not in use counts as one of the identity. Two forms give the same $\mu$:

- *dual*: this matrix, m by m;
- *primal*: $\mu = \delta^{-1} (r - J d)$ with $(W + J^\top \delta^{-1} J)\, d = J^\top \delta^{-1} r$, n by n, in
  variables scaled by $W^{1/2}$, so that fixed ones need no infinity. Rows cost it nothing but products, however many
  there are. It needs $\delta > 0$, and refinement gets back what a small damping cancels.

Order, fronts and places are found once for the pattern; factors and solves are for the whole batch, and no operation
mixes samples. The same factor serves the step and its adjoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from snarenet.constraints.sparsity import Pattern
from snarenet.linalg.fronts import dense_cost
from snarenet.linalg.gram import GramFactor, SparseGram
from snarenet.linalg.simplicial import Nonzeros, SimplicialFactor, usable
from snarenet.tracing import tracing

Form = Literal["dual", "primal"]

ROUNDING = 256.0  # backward error, in roundings, up to which a solution is left as it is: the next step mends the rest
REFINEMENTS = 3  # at most: the first gains the digits that a damping of 1e-8 cancels
_PRIMAL = 0.7  # share of the dual's cost below which the primal form is worth its refinement
_HOPELESS = 1.5  # times the products of nonzeros from which on a form is not even ordered


@dataclass(frozen=True)
class Estimate:
    """What a sparse system costs beside a dense one, from the pattern alone.

    Attributes:
        form: dual or primal.
        sparse: microseconds a sample on one core for a factor and a solve; infinite for a pattern that fills.
        dense: the same with a dense matrix of the smaller of both sizes.
        dense_rows: the same with one of the rows.
        size: rows of the factored matrix.
        entries: of the factor, with padding.
        levels: of the elimination tree, 0 for a pattern that fills.
        heavy: rows or columns that touch nearly everything and were set aside.
    """

    form: Form
    sparse: float
    dense: float
    dense_rows: float
    size: int
    entries: int
    levels: int
    heavy: int

    @property
    def worthwhile(self) -> bool:
        """Is sparse faster?"""
        return self.sparse < self.dense

    @property
    def worthwhile_for_rows(self) -> bool:
        """Is it faster than a dense matrix of all rows?"""
        return self.sparse < self.dense_rows


class SparseFactor(ABC):
    """Factors of a batch, with what a product with the systems needs.

    Attributes:
        damping: (B, m) that of each row, 1 for those that are not in use.
        info: (B,) 0 where there is a factor.
    """

    damping: Tensor
    info: Tensor

    @property
    @abstractmethod
    def estimate(self) -> Estimate:
        """What one of them costs."""

    @abstractmethod
    def describe(self) -> str:
        """How large one of them is, and how it is computed."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory that keeping it takes."""

    @abstractmethod
    def __getitem__(self, samples: Tensor) -> SparseFactor:
        """The factors of some samples (their places)."""

    @abstractmethod
    def replaced(self, samples: Tensor, other: Any) -> SparseFactor:
        """The same with the factors of another of its kind for these samples (their places)."""

    @abstractmethod
    def solve(self, rhs: Tensor) -> Tensor:
        """The solutions (B, m) for right-hand sides (B, m)."""

    @abstractmethod
    def push(self, v: Tensor) -> Tensor:
        """J v, (B, m) for v (B, n): 0 in rows that are not in use."""

    @abstractmethod
    def pull(self, w: Tensor) -> Tensor:
        """J'w, (B, n) for w (B, m), of the rows in use."""


class SparseSystems(Protocol):
    """What makes the factors of systems on one pattern."""

    @property
    def estimate(self) -> Estimate:
        """Sparse or dense?"""
        ...

    @property
    def exact(self) -> SparseSystems | None:
        """The same in the form that divides by no damping; None where its pattern fills."""
        ...

    def factor(
        self, values: Tensor, damping: Tensor, inverse_weights: Tensor | None = None, active: Tensor | None = None
    ) -> SparseFactor:
        """The factors of a batch; see `SparseNormal`."""
        ...


Systems = Callable[[Pattern], SparseSystems]  # what is made once for a pattern


class SparseNormal:
    """The pattern's part of the systems, made once; numbers by operations of torch.

    Args:
        row: (nnz,) the row of each nonzero of J, each place once.
        col: (nnz,) its column.
        shape: (m, n) of J.
        form: "dual", "primal", or "auto" for the cheaper one by the estimate.
    """

    def __init__(self, row: Tensor, col: Tensor, shape: tuple[int, int], form: Form | Literal["auto"] = "auto") -> None:
        self.shape = shape
        _check_places(row, col, shape)
        self.row, self.col = row, col
        forms: tuple[Form, ...] = ("dual", "primal") if form == "auto" else (form,)
        rows, columns = row.cpu().numpy(), col.cpu().numpy()
        ends: dict[Form, SparseGram] = {}
        for name in forms:
            nodes, vectors = (rows, columns) if name == "dual" else (columns, rows)
            ends[name] = SparseGram(nodes, vectors, shape[name == "primal"])
        self.form: Form = forms[0] if len(forms) == 1 else _cheaper(ends)
        self.gram = ends[self.form]
        self.refines = self.form == "primal" or self.gram.rank > 0  # are there differences of large numbers?

    @cached_property
    def compiled(self) -> Nonzeros:
        """Nonzeros with J by compiled code."""
        return Nonzeros(self.row, self.col, self.shape)

    @property
    def estimate(self) -> Estimate:
        """Sparse or dense?"""
        gram, full = self.gram, self.gram.full
        entries, levels = (gram.size**2, 0) if full else (gram.tree.entries, gram.tree.levels)
        dense = dense_cost(min(self.shape), max(self.shape)), dense_cost(*self.shape)
        return Estimate(self.form, gram.cost, *dense, gram.size, entries, levels, gram.rank)

    @property
    def exact(self) -> SparseNormal | None:
        return self if self.form == "dual" else self._dual

    @cached_property
    def _dual(self) -> SparseNormal | None:
        dual = SparseNormal(self.row, self.col, self.shape, "dual")
        return None if dual.gram.full else dual

    def factor(
        self, values: Tensor, damping: Tensor, inverse_weights: Tensor | None = None, active: Tensor | None = None
    ) -> PlainFactor:
        """The factors of a batch.

        Args:
            values: (B, nnz) nonzeros of J. Nothing of a row that is not in use enters, be it infinite.
            damping: (B, m) the damping of each row; 0 only in the dual form.
            inverse_weights: (B, n), 0 for a fixed variable; all 1 if None.
            active: (B, m) true for rows in use; all if None.
        """
        if self.row.device != values.device:
            self.row, self.col = self.row.to(values.device), self.col.to(values.device)
        values = values.T.contiguous()
        if active is not None:
            damping = torch.where(active, damping, 1.0)
            values = torch.where(active.T[self.row], values, 0.0)
        K = values if inverse_weights is None else values * inverse_weights.sqrt().T[self.col]
        length = (K.square().sum(0) / max(1, self.shape[0])).sqrt().unsqueeze(1)
        diagonal = damping
        if self.form == "primal":
            K = K * damping.rsqrt().T[self.row]
            diagonal = damping.new_ones(len(damping), self.shape[1])
        gram = self.gram.factor(K, diagonal)
        return PlainFactor(self, values, damping, inverse_weights, length, gram, gram.info)


@lru_cache(maxsize=64)
def sparse_normal(pattern: Pattern) -> SparseNormal:
    """What follows from the pattern of J, computed once."""
    return SparseNormal(pattern.row, pattern.col, pattern.shape)


@dataclass(frozen=True)
class PlainFactor(SparseFactor):
    """Factors of a batch by operations of torch."""

    normal: SparseNormal
    values: Tensor  # (nnz, B) of rows in use, else 0
    damping: Tensor
    inverse_weights: Tensor | None
    length: Tensor  # (B, 1) of a typical row, in the metric
    gram: GramFactor
    info: Tensor

    @property
    def estimate(self) -> Estimate:
        return self.normal.estimate

    def describe(self) -> str:
        core = self.gram.core
        if isinstance(core, SimplicialFactor):
            return f"{core.pattern.entries:,} entries, compiled"
        return f"{self.estimate.entries:,} entries in {self.estimate.levels} levels"

    def __getitem__(self, samples: Tensor) -> PlainFactor:
        weights = None if self.inverse_weights is None else self.inverse_weights[samples]
        values, damping, length = self.values[:, samples], self.damping[samples], self.length[samples]
        gram = self.gram[samples]
        return PlainFactor(self.normal, values, damping, weights, length, gram, gram.info)

    def replaced(self, samples: Tensor, other: PlainFactor) -> PlainFactor:
        mine, theirs = ((f.damping, f.length, f.inverse_weights) for f in (self, other))
        damping, length, weights = (
            None if a is None or b is None else a.index_copy(0, samples, b) for a, b in zip(mine, theirs, strict=True)
        )
        assert damping is not None
        assert length is not None
        values, gram = self.values.index_copy(1, samples, other.values), self.gram.replaced(samples, other.gram)
        return PlainFactor(self.normal, values, damping, weights, length, gram, gram.info)

    @property
    def nbytes(self) -> int:
        return self.gram.nbytes + self.values.nbytes

    def solve(self, rhs: Tensor) -> Tensor:
        """The solutions (B, m), or (B, m, k), for such right-hand sides."""
        if rhs.ndim == 2:
            return self._refined(rhs.unsqueeze(1)).squeeze(1)
        return self._refined(rhs.mT).mT

    def push(self, v: Tensor) -> Tensor:
        if usable(v):
            return self.normal.compiled.times(self.values, v, transposed=False)
        return self._push(v.unsqueeze(1)).squeeze(1)

    def pull(self, w: Tensor) -> Tensor:
        if usable(w):
            return self.normal.compiled.times(self.values, w, transposed=True)
        return self._pull(w.unsqueeze(1)).squeeze(1)

    def _push(self, v: Tensor) -> Tensor:
        return _sums(self.values, v, self.normal.col, self.normal.row, self.normal.shape[0])

    def _pull(self, w: Tensor) -> Tensor:
        return _sums(self.values, w, self.normal.row, self.normal.col, self.normal.shape[1])

    def _times(self, w: Tensor) -> Tensor:
        """The system's matrix times w (B, k, m)."""
        d = self._pull(w)
        if self.inverse_weights is not None:
            d = d * self.inverse_weights.unsqueeze(1)
        return self._push(d) + self.damping.unsqueeze(1) * w

    def _refined(self, rhs: Tensor) -> Tensor:
        """The solution, refined until its backward error is one of rounding, or no longer halves.

        Who needs that changes no one else.
        """
        if not self.normal.refines:
            return self._once(rhs)
        if isinstance(self.gram.core, SimplicialFactor) and not self.normal.gram.rank:
            system = (self.values, self.damping, self.inverse_weights, self.length)
            effort, primal = (ROUNDING, REFINEMENTS), self.normal.form == "primal"
            return self.normal.compiled.refined(self.gram.core, primal, effort, system, rhs)
        found = self._once(rhs)
        goal = ROUNDING * torch.finfo(rhs.dtype).eps * self._reach(rhs, found)
        residual = rhs - self._times(found)
        size = residual.norm(dim=2, keepdim=True)
        going = size > goal
        for _ in range(REFINEMENTS):
            if not tracing() and not bool(going.any()):
                break
            trial = found + self._once(residual)
            left = rhs - self._times(trial)
            now = left.norm(dim=2, keepdim=True)
            better = going & (now < size)
            found, residual = torch.where(better, trial, found), torch.where(better, left, residual)
            going = better & (now > goal) & (now < size / 2)
            size = torch.where(better, now, size)
        return found

    def _reach(self, rhs: Tensor, found: Tensor) -> Tensor:
        """(B, k, 1) the size of the numbers that cancel in a residual: no factor leaves less than their rounding."""
        sums = _sums(self.values.abs(), found.abs(), self.normal.row, self.normal.col, self.normal.shape[1])
        if self.inverse_weights is not None:
            sums = sums * self.inverse_weights.sqrt().unsqueeze(1)
        return rhs.norm(dim=2, keepdim=True) + self.length.unsqueeze(2) * sums.norm(dim=2, keepdim=True)

    def _once(self, rhs: Tensor) -> Tensor:
        if self.normal.form == "dual":
            return self.gram.solve(rhs)
        damping = self.damping.unsqueeze(1)
        scaled = rhs / damping
        root = 1.0 if self.inverse_weights is None else self.inverse_weights.sqrt().unsqueeze(1)
        return scaled - self._push(root * self.gram.solve(root * self._pull(scaled))) / damping


def _cheaper(ends: dict[Form, SparseGram]) -> Form:
    """The form with the lower cost; the dual one unless the other is clearly lower."""
    dual, primal = ends["dual"], ends["primal"]
    if dual.full or primal.full:  # the one that fills less
        return (
            "dual" if dual.products / max(1, dual.size) ** 2 <= primal.products / max(1, primal.size) ** 2 else "primal"
        )
    if primal.rank:  # setting rows aside and dividing by a small damping together cost too many digits
        return "dual"
    if dual.products > _HOPELESS * primal.products:
        return "primal"
    if primal.products > _HOPELESS * dual.products:
        return "dual"
    return "primal" if primal.cost < _PRIMAL * dual.cost else "dual"


def _sums(values: Tensor, v: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
    """Each nonzero (nnz, B) times v (B, k, .) at its source, added up at its target: (B, k, size)."""
    terms = v.permute(2, 0, 1).contiguous().index_select(0, source) * values.unsqueeze(2)
    zeros = terms.new_zeros(size, *terms.shape[1:])
    if terms.is_cuda:  # where `index_add_` adds in any order
        return zeros.index_put_((target,), terms, accumulate=True).permute(1, 2, 0)
    return zeros.index_add_(0, target, terms).permute(1, 2, 0)


def _check_places(row: Tensor, col: Tensor, shape: tuple[int, int]) -> None:
    if row.shape != col.shape or row.ndim != 1:
        raise ValueError(
            f"`row` and `col` must be vectors of one length, got {tuple(row.shape)} and {tuple(col.shape)}"
        )
    for name, index, limit in (("row", row, shape[0]), ("col", col, shape[1])):
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < limit:
            raise ValueError(f"`{name}` must be from 0 to {limit - 1}, got {int(index.min())} to {int(index.max())}")
    if len(torch.unique(row * max(1, shape[1]) + col)) != len(row):
        raise ValueError("`row` and `col` must name each place once, but some come twice")
