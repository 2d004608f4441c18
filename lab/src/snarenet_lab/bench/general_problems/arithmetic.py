"""What the problems are written with, so that torch repairs and CasADi solves the same rows.

Entries of a vector are in the last dimension for torch, which has a batch before it, and in a column for CasADi.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.reference.program import need

Array = np.ndarray[Any, Any]


class Constants:
    """Arrays by name; as tensors they are copied to a device once, where neither a compiler nor a recording sees it.

    Args:
        arrays: numbers or indices.
    """

    def __init__(self, **arrays: Array) -> None:
        self.arrays = arrays
        self._tensors: dict[torch.device, dict[str, Tensor]] = {}

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors on a device."""
        if device not in self._tensors:
            self._tensors[device] = {name: torch.from_numpy(v).to(device) for name, v in self.arrays.items()}
        return self._tensors[device]


class Torch:
    """Arithmetic of a batch.

    Args:
        device: where.
    """

    sin, cos = staticmethod(torch.sin), staticmethod(torch.cos)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def given(self, constants: Constants) -> dict[str, Tensor]:
        """What the methods take as constants."""
        return constants.on(self.device)

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


class Casadi:
    """The same for the columns of CasADi."""

    def __init__(self) -> None:
        ca = need("casadi")
        self.sin, self.cos, self.const, self.join, self.cross, self.total = (
            *(ca.sin, ca.cos, ca.DM, ca.vertcat, ca.cross, ca.sum1),
        )
        self._casadi = ca

    def given(self, constants: Constants) -> dict[str, Array]:
        """What the methods take as constants."""
        return constants.arrays

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
