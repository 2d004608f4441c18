"""Cholesky factors of a batch of matrices: factor once, solve many; the rows in use, packed."""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.tracing import to_onnx, tracing

_INVERSE_SIZE = 64  # rows up to which a GPU inverts a factor rather than solving with it: two products for two solves
_FEW = 0.75  # share of the rows up to which the active ones get a system of their own


def add_to_diagonal(matrix: Tensor, diagonal: float | Tensor) -> Tensor:
    """matrix + diag(diagonal), in place: matrices (B, m, m), and a diagonal that broadcasts to (B, m)."""
    entries = matrix.diagonal(dim1=-2, dim2=-1)
    if torch.compiler.is_exporting():  # a graph that is made functional cannot hold a write to a view
        return matrix + torch.diag_embed(torch.zeros_like(entries) + diagonal)
    entries.add_(diagonal)
    return matrix


def cholesky_ex(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of each matrix (B, m, m) for `triangular_solve`, and (B,) a code that is 0 where there is one."""
    if not to_onnx():
        factor, code = torch.linalg.cholesky_ex(matrix)
        return factor, code
    factor = _inverse_factor(matrix)
    return factor, (~factor.isfinite()).flatten(1).any(1).to(torch.int32)


def _inverse_factor(matrix: Tensor) -> Tensor:
    """The inverse of the Cholesky factor, by halves: sums, products and roots alone."""
    size = matrix.shape[-1]
    if size <= 1:
        return matrix.rsqrt()
    half = size // 2
    first = _inverse_factor(matrix[..., :half, :half])
    below = matrix[..., half:, :half] @ first.mT
    second = _inverse_factor(matrix[..., half:, half:] - below @ below.mT)
    corner = torch.zeros_like(matrix[..., :half, half:])
    return torch.cat([torch.cat([first, corner], -1), torch.cat([-(second @ below @ first), second], -1)], -2)


def cholesky(matrix: Tensor, active: Tensor | None = None, rows: int | None = None) -> Tensor:
    """The factor for `cholesky_solve`; a matrix singular to working precision gets the smallest shift it needs.

    The shift is measured by the diagonal of the `active` (B, m) rows alone, and by the number of `rows` that there are:
    how many idle ones a matrix is filled up with depends on the rest of the batch.
    """
    factor, info = cholesky_ex(matrix)
    shift = 4 * torch.finfo(matrix.dtype).eps * (rows or matrix.shape[-1])
    while not tracing() and bool((info > 0).any()) and shift < 1:
        left = (info > 0).nonzero().squeeze(1)  # the others keep the factor that they have
        again = matrix[left]
        used = torch.ones_like(again[..., 0]) if active is None else active[left].to(matrix)
        mean = (again.diagonal(dim1=-2, dim2=-1) * used).sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp(min=1)
        found, code = torch.linalg.cholesky_ex(add_to_diagonal(again, shift * mean))
        factor, info = factor.index_copy(0, left, found), info.index_copy(0, left, code)
        shift *= 100
    if _inverted(factor):
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return factor


def cholesky_solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """The solution (B, m) of M w = rhs for the factor that `cholesky` made of M (B, m, m)."""
    if _inverted(factor):
        return (factor.mT @ (factor @ rhs.unsqueeze(-1))).squeeze(-1)
    return triangular_solve(factor, rhs)


def triangular_solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """The solution (B, m) of L L' w = rhs for factors (B, m, m) of `cholesky_ex`."""
    column = rhs.unsqueeze(-1)
    if to_onnx():
        return (factor.mT @ (factor @ column)).squeeze(-1)
    if factor.is_cuda:  # torch.cholesky_solve waits for the device there, and cannot be recorded
        column = torch.linalg.solve_triangular(factor, column, upper=False)
        return torch.linalg.solve_triangular(factor.mT, column, upper=True).squeeze(-1)
    return torch.cholesky_solve(column, factor).squeeze(-1)


def _inverted(factor: Tensor) -> bool:
    """Is this the inverse of a Cholesky factor, and not the factor?"""
    return factor.is_cuda and factor.shape[-1] <= _INVERSE_SIZE


def rows_at(matrices: Tensor, places: Tensor) -> Tensor:
    """The rows (B, k, n) of matrices (B, m, n) at places (B, k)."""
    return matrices.gather(1, places.unsqueeze(2).expand(-1, -1, matrices.shape[2]))


def places_of(active: Tensor, factor: Tensor | None) -> Tensor | None:
    """(B, k) the places of each sample's active rows, filled up with others; None if most rows are active anyway.

    A factor that was kept says how many there are.
    """
    rows = active.shape[1]
    if factor is None:
        count = rows if tracing() or not active.numel() else max(1, int(active.sum(1).max()))
        if count > _FEW * rows:
            return None
    else:
        count = factor.shape[-1]
        if count == rows:
            return None
    return active.sort(dim=1, descending=True, stable=True).indices[:, :count]
