"""How matrices become one vector: one after the other, each column by column, as CVXPY and CasADi count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.data import check_shape, describe


def flatten(value: Tensor) -> Tensor:
    """(B, *shape) to (B, size), column by column."""
    columns_first = value.permute(0, *range(value.ndim - 1, 0, -1))
    return columns_first.reshape(len(value), math.prod(value.shape[1:]))


def unflatten(vector: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, size) to (B, *shape)."""
    return vector.reshape(len(vector), *shape[::-1]).permute(0, *range(len(shape), 0, -1))


def samples(*values: Tensor) -> int:
    """How many samples there are, if those that have one share it."""
    return torch.broadcast_shapes(*(value.shape[:1] for value in values))[0]


class Layout:
    """Named arrays, one after the other in a vector.

    Args:
        what: the argument that they come as, for errors: "y" or "x".
        names: of the arrays.
        shapes: of the arrays.
    """

    def __init__(self, what: str, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        self.what, self.names, self.shapes = what, tuple(names), tuple(shapes)
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)

    def split(self, value: Any) -> list[Tensor]:
        """The arrays, each (B, *shape), of a vector (B, size) or of a mapping from names to arrays."""
        if isinstance(value, Mapping):
            return [self._named(value, name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]
        if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[1] != self.size:
            raise ValueError(f"`{self.what}` must have shape (B, {self.size}): {self}, but got {describe(value)}")
        parts = value.split(self.sizes, 1)
        return [unflatten(part, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, arrays: Sequence[Tensor]) -> Tensor:
        """(B, size), the vector of arrays (B, *shape)."""
        for name, array, shape in zip(self.names, arrays, self.shapes, strict=True):
            check_shape(name, array, ("B", *shape))
        return torch.cat([flatten(array) for array in arrays], 1)

    def _named(self, value: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in value:
            raise ValueError(f"`{self.what}` must have an entry {name!r}, but it has {sorted(value)}")
        check_shape(f"{self.what}[{name!r}]", value[name], ("B", *shape))
        return value[name]

    def __str__(self) -> str:
        return ", ".join(f"{name} {shape}" for name, shape in zip(self.names, self.shapes, strict=True))
