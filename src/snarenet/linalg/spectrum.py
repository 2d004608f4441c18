"""`Spectrum`: the singular values of constant rows, computed once, from which every damping has its systems."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snarenet.tracing import to_onnx, tracing

_TRANSFER_BYTES = 2**28  # memory for the cached transfer matrices of one spectrum


def column(damping: float | Tensor) -> float | Tensor:
    """A damping per sample as a column, a shared one as it is."""
    if isinstance(damping, Tensor):
        return damping.unsqueeze(-1)
    return torch.tensor(damping, dtype=torch.float64) if to_onnx() else damping


class Spectrum:
    """Singular values of constant rows A (m, n), each divided by the root of its scale: A = diag(s)^(1/2) U S V'."""

    def __init__(self, A: Tensor, scale: Tensor) -> None:
        self.A = A
        self.root = scale.sqrt()
        U, values, Vh = torch.linalg.svd(A / self.root.unsqueeze(1), full_matrices=False)
        cutoff = torch.finfo(A.dtype).eps * max(A.shape) * (values[0] if len(values) else 0)
        rank = int((values > cutoff).sum())
        self.left, self.values, self.right = U[:, :rank], values[:rank], Vh[:rank].T
        self.squares = self.values.square()
        self.pseudo_inverse = (self.right / self.values) @ self.left.T / self.root
        typical = (A / self.root.unsqueeze(1)).square().sum(1).mean().sqrt() if rank else 1
        # the least singular value, in typical row lengths: 0 without full row rank
        self.least = float(values[-1] / typical) if rank == A.shape[0] > 0 else float(rank == A.shape[0])
        self.faintest = float(self.values[-1] / typical) if rank else 1.0  # the least of those that count
        self._transfers: dict[float, Tensor] = {}
        self._stacks: dict[tuple[tuple[float, ...], bool], Tensor] = {}
        self.memo: dict[float, Any] = {}  # what else is known of these rows at a damping

    def transfer(self, r: Tensor, damping: float | Tensor, transpose: bool = False) -> Tensor:
        r"""r T, or r T', for r (B, m), with $T = D^{-1/2} U \frac{S^2}{S^2+\lambda} U^\top D^{1/2}$.

        T' = A A' (A A' + damping D)^-1 takes the residual of all rows to the change of A y in one step.
        """
        matrix = None
        if not isinstance(damping, Tensor) and not torch.compiler.is_compiling():
            matrix = self._transfers.get(damping)
            size = self.root.numel() ** 2 * self.root.element_size()
            if matrix is None and (len(self._transfers) + 1) * size <= _TRANSFER_BYTES:
                matrix = self._matrix(damping)
                if not tracing():  # what is made while a graph is recorded belongs to the graph
                    self._transfers[damping] = matrix
        if matrix is not None:
            return r @ (matrix.T if transpose else matrix)
        weights = self.squares / (self.squares + column(damping))
        r = r * self.root if transpose else r / self.root
        r = (r @ self.left * weights) @ self.left.T
        return r / self.root if transpose else r * self.root

    def _matrix(self, damping: float) -> Tensor:
        matrix = (self.left * (self.squares / (self.squares + damping))) @ self.left.T
        return matrix * self.root / self.root.unsqueeze(1)

    def transfers(self, dampings: tuple[float, ...], transpose: bool = False) -> Tensor:
        """(count, m, m) the T, or T', of several dampings; kept, since a recorded graph knows where they are."""
        known = self._stacks.get((dampings, transpose))
        if known is None:
            matrices = (self._matrix(damping) for damping in dampings)
            known = torch.stack([matrix.T if transpose else matrix for matrix in matrices])
            if not tracing():
                self._stacks[dampings, transpose] = known
        return known
