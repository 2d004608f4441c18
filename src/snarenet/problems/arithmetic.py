"""What families are written with, so that torch repairs and CasADi solves the same rows.

Entries of a vector are in the last dimension for torch, which has a batch before it, and in a column for CasADi.
Constants are tensors for both.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


class Torch:
    """Arithmetic of a batch."""

    sin, cos = staticmethod(torch.sin), staticmethod(torch.cos)

    def const(self, v: Tensor) -> Tensor:
        """Numbers for sums and products."""
        return v

    def take(self, v: Tensor, index: slice | Tensor) -> Tensor:
        """Some entries of v."""
        return v[..., index]

    def collect(self, v: Tensor, index: Tensor, size: int) -> Tensor:
        """The sum of the entries of v at every one of `size` places."""
        return v.new_zeros(*v.shape[:-1], size).index_add(-1, index, v)

    def times(self, A: Tensor, v: Tensor) -> Tensor:
        """A v."""
        return v @ A.T

    def total(self, v: Tensor) -> Tensor:
        """The sum of all entries, as a vector of one."""
        return v.sum(-1, keepdim=True)

    def cross(self, a: Tensor, b: Tensor) -> Tensor:
        """The vector product in space."""
        return torch.linalg.cross(a, b)

    def join(self, *blocks: Tensor) -> Tensor:
        """Blocks one after the other."""
        return torch.cat(blocks, -1)

    def wrap(self, angle: Tensor) -> Tensor:
        """Angles in (-pi, pi]."""
        return torch.atan2(angle.sin(), angle.cos())


class Casadi:
    """The same for the columns of CasADi."""

    def __init__(self) -> None:
        ca = importlib.import_module("casadi")
        self.sin, self.cos, self.join, self.cross, self.total = ca.sin, ca.cos, ca.vertcat, ca.cross, ca.sum1
        self._casadi = ca

    def const(self, v: Tensor) -> Any:
        """Numbers for sums and products."""
        return self._casadi.DM(v.detach().cpu().numpy())

    def take(self, v: Any, index: slice | Tensor) -> Any:
        """Some entries of v."""
        return v[index if isinstance(index, slice) else index.tolist()]

    def collect(self, v: Any, index: Tensor, size: int) -> Any:
        """The sum of the entries of v at every one of `size` places."""
        ca, count = self._casadi, len(index)
        return ca.DM(ca.Sparsity.triplet(size, count, index.tolist(), list(range(count))), 1.0) @ v

    def times(self, A: Tensor, v: Any) -> Any:
        """A v."""
        return self.const(A) @ v

    def wrap(self, angle: Any) -> Any:
        """Angles in (-pi, pi]."""
        return self._casadi.atan2(self.sin(angle), self.cos(angle))
