"""`SparseMatrix`: a constant sparse matrix that a set keeps."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snarenet.constraints.data import as_tensor, check_finite, check_shape

_DENSE = 2**26  # entries up to which a direct route may hold a sparse matrix as a dense one (512 MiB in float64)


def is_sparse(value: object) -> bool:
    """Is this a tensor in one of torch's sparse layouts, or a sparse matrix of scipy's?"""
    return value.layout != torch.strided if isinstance(value, Tensor) else hasattr(value, "tocoo")


def _of_scipy(name: str, A: Any) -> Tensor:
    """The tensor of a sparse matrix of scipy's."""
    entries = A.tocoo()
    values, places = as_tensor(name, entries.data), np.stack([entries.row, entries.col]).astype(np.int64)
    return torch.sparse_coo_tensor(torch.from_numpy(places), values, entries.shape, check_invariants=True)


class SparseMatrix(nn.Module):
    """A constant matrix as plain buffers, which move, copy and save like any other: `values` and `indices` (2, count).

    Args:
        name: what error messages call it.
        A: (m, n) in any of torch's sparse layouts, or scipy's.
    """

    values: Tensor
    indices: Tensor

    def __init__(self, name: str, A: Any) -> None:
        super().__init__()
        A = A if isinstance(A, Tensor) else _of_scipy(name, A)
        if A.requires_grad:
            raise ValueError(f"a sparse `{name}` must be constant, but it needs a gradient: detach it or make it dense")
        check_shape(name, A, ("m", "n"))
        A = A.to_sparse_coo().coalesce()
        self.register_buffer("values", check_finite(name, as_tensor(name, A.values().clone())))  # not views of A
        self.register_buffer("indices", A.indices().clone())
        self.shape: torch.Size = A.shape

    @property
    def small(self) -> bool:
        """May it be held as a dense matrix?"""
        return self.shape.numel() <= _DENSE

    def scaled(self, scale: Tensor) -> SparseMatrix:
        """The matrix with its columns multiplied by a scale (n,)."""
        values = self.values.to(scale.dtype) * scale[self.indices[1]]
        A = torch.sparse_coo_tensor(self.indices, values, self.shape, is_coalesced=True, check_invariants=False)
        return SparseMatrix("A", A)

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
