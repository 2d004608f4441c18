"""What the problems are written with, so that torch repairs and CasADi solves the same rows.

Entries of a vector are in the last dimension for torch, which has a batch before it, and in a column for CasADi.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.reference.program import need

Array = np.ndarray[Any, Any]


class Torch:
    """Arithmetic of a batch; constants are copied to the device once.

    Args:
        device: where.
    """

    sin, cos = staticmethod(torch.sin), staticmethod(torch.cos)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[int, tuple[Array, Tensor]] = {}  # with the array, whose id must not be used again

    def const(self, v: Array) -> Tensor:
        """Numbers that stay as they are: an array that is kept elsewhere."""
        if id(v) not in self._kept:
            self._kept[id(v)] = v, torch.from_numpy(v).to(self.device)
        return self._kept[id(v)][1]

    def take(self, v: Tensor, index: slice | Array) -> Tensor:
        """Some entries of v."""
        return v[..., index if isinstance(index, slice) else self.const(index)]

    def collect(self, v: Tensor, index: Array, size: int) -> Tensor:
        """The sum of the entries of v at every one of `size` places."""
        return v.new_zeros(*v.shape[:-1], size).index_add(-1, self.const(index), v)

    def times(self, A: Array, v: Tensor) -> Tensor:
        """A v."""
        return v @ self.const(A).T

    def total(self, v: Tensor) -> Tensor:
        """The sum of all entries, as a vector of one."""
        return v.sum(-1, keepdim=True)

    def cross(self, a: Tensor, b: Tensor) -> Tensor:
        """The vector product in space."""
        return torch.linalg.cross(a, b)

    def join(self, *blocks: Tensor) -> Tensor:
        """Blocks one after the other."""
        return torch.cat(blocks, -1)


class Casadi:
    """The same for the columns of CasADi."""

    def __init__(self) -> None:
        ca = need("casadi")
        self.sin, self.cos, self.const, self.join, self.cross, self.total = (
            *(ca.sin, ca.cos, ca.DM, ca.vertcat, ca.cross, ca.sum1),
        )
        self._casadi = ca

    def take(self, v: Any, index: slice | Array) -> Any:
        """Some entries of v."""
        return v[index if isinstance(index, slice) else index.tolist()]

    def collect(self, v: Any, index: Array, size: int) -> Any:
        """The sum of the entries of v at every one of `size` places."""
        ca, count = self._casadi, len(index)
        return ca.DM(ca.Sparsity.triplet(size, count, index.tolist(), list(range(count))), 1.0) @ v

    def times(self, A: Array, v: Any) -> Any:
        """A v."""
        return self._casadi.DM(A) @ v


@lru_cache
def on(device: torch.device) -> Torch:
    """The arithmetic of a device."""
    return Torch(device)
