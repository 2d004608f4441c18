r"""Sparse matrices: `SparseMatrix` keeps one, `SparseMap` is g(y) = A y with it.

Products go through `torch.sparse.mm`, with A and its transpose both in compressed rows:

$$ A y = \texttt{mm}(A, y^\top)^\top, \qquad A^\top w = \texttt{mm}(A^\top, w^\top)^\top. $$
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from snarenet.constraints.data import as_tensor, check_finite, check_shape
from snarenet.constraints.maps import LinearMap, Pairs, times, transposed_times

_DENSE = 2**26  # entries up to which a direct route may hold a sparse matrix as a dense one (512 MiB in float64)


def is_sparse(value: object) -> bool:
    """Is this a tensor in one of torch's sparse layouts?"""
    return isinstance(value, Tensor) and value.layout != torch.strided


class SparseMatrix(nn.Module):
    """A constant matrix as plain buffers, which move, copy and save like any other: `values` and `indices` (2, count).

    Args:
        name: what error messages call it.
        A: (m, n) in any of torch's sparse layouts.
    """

    values: Tensor
    indices: Tensor

    def __init__(self, name: str, A: Tensor) -> None:
        super().__init__()
        if A.requires_grad:
            raise ValueError(f"a sparse `{name}` must be constant, but it needs a gradient: detach it or make it dense")
        check_shape(name, A, ("m", "n"))
        A = A.to_sparse_coo().coalesce()
        self.register_buffer("values", check_finite(name, as_tensor(name, A.values().clone())))  # not views of A
        self.register_buffer("indices", A.indices().clone())
        self.shape = A.shape

    @property
    def small(self) -> bool:
        """May it be held as a dense matrix?"""
        return self.shape.numel() <= _DENSE

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix (m, n); an error if it is too large."""
        if not self.small:
            raise ValueError(
                f"a sparse `A` of shape {tuple(self.shape)} is too large to be made dense, as a direct route needs it; "
                "use `solver=ConjugateGradients()`"
            )
        dense = self.values.new_zeros(self.shape, dtype=dtype)
        dense[self.indices[0], self.indices[1]] = self.values.to(dtype)
        return dense

    def compressed(self, dtype: torch.dtype, transpose: bool = False) -> Tensor:
        """The matrix, or its transpose, in compressed rows."""
        rows, columns = self.indices.flip(0) if transpose else self.indices
        order = torch.argsort(rows, stable=True)
        m, n = reversed(self.shape) if transpose else self.shape
        starts = torch.searchsorted(rows[order], torch.arange(m + 1, device=rows.device))
        short = max(m, n, len(order)) < 2**31  # with short indices products are faster
        index = torch.int32 if short else torch.int64
        with warnings.catch_warnings():  # that the layout is in beta
            warnings.simplefilter("ignore", UserWarning)
            return torch.sparse_csr_tensor(
                starts.to(index), columns[order].to(index), self.values[order].to(dtype), (m, n), check_invariants=False
            )


class SparseMap(LinearMap):
    """g(y) = A y with one sparse A; dense, as `A`, only for a direct route that asks for it."""

    def __init__(self, matrix: SparseMatrix, dtype: torch.dtype) -> None:
        self.rows, self.separable = matrix.shape[0], matrix.small  # for direct routes
        self._matrix, self._dtype = matrix, dtype
        self.compressed = matrix.compressed(dtype), matrix.compressed(dtype, transpose=True)
        squares = matrix.values.to(dtype).square()
        self._norms = squares.new_zeros(self.rows).index_add(0, matrix.indices[0], squares)
        self._dense: Tensor | None = None

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

    def value(self, y: Tensor) -> Tensor:
        return _product(y, self, False)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return _product(direction, self, False)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return _product(weights, self, True)

    def row_norms(self, y: Tensor) -> Tensor:
        return self._norms.expand(y.shape[0], self.rows)

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
