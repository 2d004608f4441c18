r"""`SparseMap`: g(y) = A y with one sparse A.

Products go through `torch.sparse.mm`, with A and its transpose both in compressed rows:

$$ A y = \texttt{mm}(A, y^\top)^\top, \qquad A^\top w = \texttt{mm}(A^\top, w^\top)^\top. $$
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.maps.base import Pairs, times, transposed_times
from snarenet.constraints.maps.linear import LinearMap
from snarenet.constraints.sparse import SparseMatrix
from snarenet.constraints.sparsity import Pattern


class SparseMap(LinearMap):
    """g(y) = A y with one sparse A; dense, as `A`, only for a direct route that asks for it."""

    def __init__(self, matrix: SparseMatrix, dtype: torch.dtype) -> None:
        self.rows, self.diagonal_hessian = matrix.shape[0], matrix.small  # for direct routes
        self._matrix, self._dtype = matrix, dtype
        self.compressed = matrix.compressed(dtype), matrix.compressed(dtype, transpose=True)
        squares = matrix.values.to(dtype).square()
        self._norms = squares.new_zeros(self.rows).index_add(0, matrix.indices[0], squares)
        self._dense: Tensor | None = None
        self._pattern: Pattern | None = None

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """The tensors that it was made from."""
        return self._matrix.values, self._matrix.indices

    def scaled(self, scale: Tensor) -> SparseMap:
        """z -> A (scale z)."""
        return SparseMap(self._matrix.scaled(scale), self._dtype)

    @property
    def A(self) -> Tensor:  # noqa: N802  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dense matrix, made once."""
        if self._dense is None:
            self._dense = self._matrix.to_dense(self._dtype)
        return self._dense

    @property
    def constant(self) -> bool:
        """It always is, but direct routes may not know where they could not hold it."""
        return self._matrix.small

    @property
    def pattern(self) -> Pattern | None:
        if self._pattern is None:
            row, col = self._matrix.indices.cpu()
            self._pattern = Pattern(row, col, (self.rows, self._matrix.shape[1]))
        return self._pattern

    def entries(self, y: Tensor, pattern: Pattern) -> Tensor:
        return self._matrix.values.to(y.dtype).expand(len(y), -1)

    def value(self, y: Tensor) -> Tensor:
        return _product(y, self, False)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return _product(direction, self, False)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return _product(weights, self, True)

    def row_norms(self, y: Tensor) -> Tensor:
        return self._norms.expand(y.shape[0], self.rows)

    def magnitudes(self, y: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self.constant:  # as in `_product`
            return super().magnitudes(y)
        (rows, columns), sizes = self._matrix.indices, self._matrix.values.to(y.dtype).abs()
        return y.new_zeros(len(y), self.rows).index_add(1, rows, sizes * y.abs()[:, columns])

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return ()

    def detached(self, leaves: dict[int, Tensor]) -> SparseMap:
        return self

    def select(self, index: Tensor) -> SparseMap:
        return self

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        return [self.vjp(y, weights), *(None for _ in wanted)]


class _Product(torch.autograd.Function):
    """A v for every sample, or A'v: torch cannot differentiate a product with compressed rows in every mode."""

    @staticmethod
    def forward(v: Tensor, map: SparseMap, transpose: bool) -> Tensor:
        A = map.compressed[transpose]
        if not len(v):
            return v.new_empty(0, A.shape[0])
        return torch.sparse.mm(A, v.T).T.contiguous()  # sums of two memory orders are slow

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.map, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _product(gradients[0], ctx.map, not ctx.transpose), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _product(tangents[0], ctx.map, ctx.transpose)


def _product(v: Tensor, map: SparseMap, transpose: bool) -> Tensor:
    if torch.compiler.is_compiling() and map.constant:  # a traced program cannot hold compressed rows
        return transposed_times(map.A, v) if transpose else times(map.A, v)
    product: Any = _Product.apply(v, map, transpose)
    return product
