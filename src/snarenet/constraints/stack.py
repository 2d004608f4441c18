"""`Stack`: several sets that must hold together, what `a & b` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from snarenet.constraints.base import Constraints, Instance
from snarenet.constraints.maps import StackedMap


class Stack(Constraints):
    """The rows of all parts, in order; each part keeps its structure, so that constant rows stay constant."""

    def __init__(self, *parts: Constraints) -> None:
        super().__init__()
        flat = [inner for part in parts for inner in part.parts]
        sizes = {part.size for part in flat if part.size is not None}
        if len(sizes) > 1:
            raise ValueError(f"all parts must constrain the same y, but they expect sizes n = {sorted(sizes)}")
        self._modules["parts"] = nn.ModuleList(flat)  # not as an attribute: that is a property
        self.size = sizes.pop() if sizes else None
        self.rows = self.rows_for(self.size)

    @property
    def parts(self) -> Sequence[Constraints]:
        return cast(Any, self._modules["parts"])

    def value(self, y: Tensor, x: Any = None) -> Tensor:
        return self.at(self.check(y), x).map.value(y)

    def bounds(self, x: Any = None) -> tuple[Tensor, Tensor]:
        sides = zip(*(part.bounds(x) for part in self.parts), strict=True)
        lower, upper = (_join(side, [part.known_rows(self.size) for part in self.parts]) for side in sides)
        return lower, upper

    def at(self, y: Tensor, x: Any = None) -> Instance:
        parts = [part.at(y, x) for part in self.parts]
        lower, upper = torch.cat([part.lower for part in parts], 1), torch.cat([part.upper for part in parts], 1)
        return Instance(StackedMap([part.map for part in parts]), lower, upper, sum((part.equal for part in parts), ()))

    @property
    def constant(self) -> bool:
        return all(part.constant for part in self.parts)

    @property
    def constant_rows(self) -> Tensor:
        return torch.cat([torch.full((part.known_rows(self.size),), part.constant) for part in self.parts])

    def rows_for(self, size: int | None) -> int | None:
        rows = [part.rows_for(self.size if size is None else size) for part in self.parts]
        return None if None in rows else sum(row for row in rows if row is not None)


def _join(bounds: tuple[Tensor, ...], rows: list[int]) -> Tensor:
    """Bounds of several parts side by side, per sample if one of them is."""
    batch = [bound.shape[:1] for bound in bounds if bound.ndim == 2]
    shape = batch[0] if batch else ()
    return torch.cat([bound.expand(*shape, size) for bound, size in zip(bounds, rows, strict=True)], -1)
