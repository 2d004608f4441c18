"""`Task`: what is projected onto what: rows, a box beside them, predictions and their metric."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance, largest, residual
from snarenet.constraints.maps import IdentityMap, Map, StackedMap
from snarenet.linalg import Systems
from snarenet.repair.start.rows import RowsAt


class Task(NamedTuple):
    """The nearest points to y, in the metric W, with lower <= rows(z) <= upper and low <= z <= high.

    Attributes:
        rows: the rows beside the first box, m of them.
        lower: (B, m) their bounds.
        upper: (B, m).
        low: (B, n) the first box; infinite where there is none.
        high: (B, n).
        y: (B, n) the predictions.
        weights: (n,) the diagonal of W.
        systems: those on the pattern of the rows; None for dense ones.
        bowls: for every part of the rows: are they convex, with an upper bound alone, their Hessians in the systems?
    """

    rows: Map
    lower: Tensor
    upper: Tensor
    low: Tensor
    high: Tensor
    y: Tensor
    weights: Tensor
    systems: Systems | None
    bowls: tuple[bool, ...]

    @staticmethod
    def of(instance: Instance, y: Tensor, weights: Tensor, systems: Systems | None) -> Task:
        """The rows of an instance with its first box apart."""
        parts = instance.map.parts
        box = box_of(parts)
        sizes = [part.rows for part in parts]
        lower, upper = (_apart(list(bound.split(sizes, 1)), box) for bound in (instance.lower, instance.upper))
        low, high = (torch.full_like(y, -torch.inf), torch.full_like(y, torch.inf))
        if lower[0] is not None and upper[0] is not None:
            low, high = lower[0], upper[0]
        rows = StackedMap([part for i, part in enumerate(parts) if i != box])
        bowls = tuple(
            systems is None and not part.linear and part.convex and bool(bound.isneginf().all())
            for part, bound in zip(rows.parts, lower[1].split(rows.sizes, 1), strict=True)
        )
        return Task(rows, lower[1], upper[1], low, high, y, weights, systems, bowls)

    @property
    def convex(self) -> bool:
        """Is the set known to be convex?"""
        return all(part.linear or bowl for part, bowl in zip(self.rows.parts, self.bowls, strict=True))

    def select(self, index: Tensor) -> Task:
        """Some of the samples."""
        lower, upper, low, high, y = (tensor[index] for tensor in self[1:6])
        return Task(self.rows.select(index), lower, upper, low, high, y, *self[6:])

    def at(self, z: Tensor) -> RowsAt:
        """The rows to first order at z."""
        return RowsAt(self.rows, z, self.weights, self.systems, self.bowls)

    def distance(self, z: Tensor) -> Tensor:
        """(B,) the squared distance to y."""
        return (self.weights * (z - self.y).square()).sum(1)

    def away(self, z: Tensor, lengths: Tensor) -> Tensor:
        """(B,) how far the worst row or variable is from its bounds, rows divided by their length in the metric."""
        rows = residual(self.rows.value(z), self.lower, self.upper) / lengths.sqrt()
        return torch.maximum(largest(rows), largest(residual(z, self.low, self.high) * self.weights.sqrt()))


def box_of(parts: tuple[Map, ...]) -> int | None:
    """Which part is the first box, if there is one."""
    return next((i for i, part in enumerate(parts) if isinstance(part, IdentityMap)), None)


def _apart(pieces: list[Tensor], box: int | None) -> tuple[Tensor | None, Tensor]:
    """The piece of the box, and the others side by side."""
    own = None if box is None else pieces[box]
    others = [piece for i, piece in enumerate(pieces) if i != box]
    return own, torch.cat(others, 1) if others else pieces[0].new_empty(len(pieces[0]), 0)
