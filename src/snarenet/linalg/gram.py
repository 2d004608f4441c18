r"""`SparseGram`: systems with $A = \mathrm{diag}(\delta) + K K^\top$, K sparse with one pattern.

A column of K that touches most nodes would fill A; a few such *heavy* columns C are set aside and enter by
Sherman-Morrison-Woodbury, with $A_0$ made of the others:

$$ (A_0 + C C^\top)^{-1} b = x - Z (I + C^\top Z)^{-1} C^\top x, \qquad x = A_0^{-1} b, \quad Z = A_0^{-1} C. $$
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.linalg.fronts import Tree, gram_cost
from snarenet.linalg.multifrontal import Cliques, Factor, Multifrontal
from snarenet.linalg.simplicial import Simplicial, SimplicialFactor, usable
from snarenet.tracing import tracing

_HEAVY = 10.0  # a column is heavy with more nonzeros than this times the root of the number of nodes
_RANK = 24  # heavy columns up to which the rest counts as sparse
_FULL = 2.0  # products of nonzeros for each entry of A from which on it is taken to be full


class SparseGram:
    """The pattern's part, made once.

    Args:
        nodes: (count,) the row of K of each nonzero; K has `size` rows.
        vectors: (count,) its column.
        size: the number of nodes.
    """

    def __init__(self, nodes: np.ndarray, vectors: np.ndarray, size: int) -> None:
        self.size = size
        counts = np.bincount(vectors, minlength=1)
        heavy = counts > _HEAVY * math.sqrt(size)
        self.rank = int(heavy.sum())
        apart = heavy[vectors]
        places = np.cumsum(heavy)[vectors[apart]] - 1
        self._light, self._apart = torch.from_numpy(np.flatnonzero(~apart)), torch.from_numpy(np.flatnonzero(apart))
        self._where = torch.from_numpy(places * size + nodes[apart])
        self._cliques = Cliques(nodes[~apart], vectors[~apart], size)
        light = counts[~heavy].astype(float)
        self.products = int((light * (light + 1) / 2).sum())

    @property
    def full(self) -> bool:
        """Is it clear at once that a dense matrix is better?"""
        return self.rank > _RANK or self.products > _FULL * self.size**2

    @cached_property
    def core(self) -> Multifrontal:
        """The ordered and analysed pattern, made when first needed: a full one takes long."""
        return Multifrontal(self._cliques)

    @cached_property
    def compiled(self) -> Simplicial:
        """The same for compiled code."""
        return Simplicial(self._cliques)

    @property
    def tree(self) -> Tree:
        return self.core.tree

    @property
    def cost(self) -> float:
        """Microseconds for a factor and a solve of one sample on one core, estimated."""
        return math.inf if self.full else gram_cost(self.products) + self.tree.cost * (1 + self.rank / 4)

    def factor(self, values: Tensor, diagonal: Tensor) -> GramFactor:
        """The factors for nonzeros (count, B), the batch as the fastest axis, and diagonals (B, size).

        A matrix that is singular to working precision gets the smallest shift of its diagonal that it needs; the others
        keep the factor they have.
        """
        if not self.rank:
            return GramFactor(self._shifted(values, diagonal))
        if self._where.device != values.device:
            places = (self._light, self._apart, self._where)
            self._light, self._apart, self._where = (place.to(values.device) for place in places)
        core = self._shifted(values[self._light], diagonal)
        C = values.new_zeros(len(diagonal), self.rank * self.size)
        C[:, self._where] = values[self._apart].T
        C = C.view(len(diagonal), self.rank, self.size)
        Z = core.solve(C)
        inner = C @ Z.mT
        inner.diagonal(dim1=1, dim2=2).add_(1)
        lower, code = torch.linalg.cholesky_ex(inner)
        return GramFactor(core, C, Z, lower, torch.maximum(core.info, code))

    def _shifted(self, values: Tensor, diagonal: Tensor) -> Factor | SimplicialFactor:
        core = self.compiled if usable(values) else self.core
        factor: Any = core.factor(values, diagonal)  # either kind, and what replaces some of it is of the same
        shift = 4 * torch.finfo(values.dtype).eps * self.size
        while not tracing() and shift < 1 and bool((factor.info > 0).any()):
            mean = diagonal.mean(1) + values.square().sum(0) / self.size
            left = ((factor.info > 0) & mean.isfinite()).nonzero().squeeze(1)
            if not len(left):
                break
            again = core.factor(values[:, left], diagonal[left] + shift * mean[left].unsqueeze(1))
            factor = factor.replaced(left, again)
            shift *= 100
        return factor


@dataclass(frozen=True)
class GramFactor:
    """Factors of a batch: those of the sparse part, and C, Z and the factor of $I + C^T Z$ of heavy columns."""

    core: Factor | SimplicialFactor
    C: Tensor | None = None
    Z: Tensor | None = None
    lower: Tensor | None = None
    code: Tensor | None = None

    def __getitem__(self, samples: Tensor) -> GramFactor:
        """The factors of some samples (their places)."""
        rest = (self.C, self.Z, self.lower, self.code)
        return GramFactor(self.core[samples], *(None if t is None else t[samples] for t in rest))

    def replaced(self, samples: Tensor, other: GramFactor) -> GramFactor:
        """The same with the factors of another for these samples (their places)."""
        core: Any = self.core  # both are of one kind
        rest = zip((self.C, self.Z, self.lower, self.code), (other.C, other.Z, other.lower, other.code), strict=True)
        rest = (None if a is None or b is None else a.index_copy(0, samples, b) for a, b in rest)
        return GramFactor(core.replaced(samples, other.core), *rest)

    @property
    def info(self) -> Tensor:
        """(B,) not 0 where there is no factor."""
        return self.core.info if self.code is None else self.code

    @property
    def nbytes(self) -> int:
        return self.core.nbytes + sum(t.nbytes for t in (self.C, self.Z, self.lower) if t is not None)

    def solve(self, rhs: Tensor) -> Tensor:
        """The solutions (B, k, size) for right-hand sides (B, k, size)."""
        x = self.core.solve(rhs)
        if self.C is None or self.Z is None or self.lower is None:
            return x
        return x - torch.cholesky_solve(self.C @ x.mT, self.lower).mT @ self.Z
