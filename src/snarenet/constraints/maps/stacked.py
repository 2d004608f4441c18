"""`StackedMap`: the rows of several maps, one below the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snarenet.constraints.maps.base import Linearization, Map, Pairs, add
from snarenet.constraints.sparsity import Pattern


def _join(blocks: list[Tensor], empty: Tensor, dim: int = 1) -> Tensor:
    """The blocks side by side; one block is not copied, and no block at all is `empty`."""
    if len(blocks) > 1:
        return torch.cat(blocks, dim)
    return blocks[0] if blocks else empty


def _below(blocks: list[Tensor], y: Tensor) -> Tensor:
    """Jacobians one below the other, per sample if one of them is."""
    if any(block.ndim == 3 for block in blocks):
        blocks = [block.expand(y.shape[0], -1, -1) for block in blocks]
    return _join(blocks, y.new_empty(0, y.shape[1]), -2)


def _stacked(patterns: list[Pattern | None]) -> Pattern | None:
    """The patterns one below the other, if all parts have one."""
    known = [pattern for pattern in patterns if pattern is not None]
    return Pattern.stack(known) if known and len(known) == len(patterns) else None


class StackedMap(Map):
    """The rows of several maps, one below the other."""

    def __init__(self, parts: Sequence[Map]) -> None:
        self._parts = tuple(parts)
        self.sizes = [part.rows for part in self.parts]
        self.rows = sum(self.sizes)
        self.linear = all(part.linear for part in self.parts)
        self.diagonal_hessian = all(part.diagonal_hessian for part in self.parts)

    @property
    def parts(self) -> tuple[Map, ...]:
        return self._parts

    @property
    def pattern(self) -> Pattern | None:
        return _stacked([part.pattern for part in self.parts])

    def value(self, y: Tensor) -> Tensor:
        return _join([part.value(y) for part in self.parts], y.new_empty(y.shape[0], 0))

    def jacobian(self, y: Tensor) -> Tensor:
        return _below([part.jacobian(y) for part in self.parts], y)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return _join([part.jvp(y, direction) for part in self.parts], y.new_empty(y.shape[0], 0))

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        pieces = zip(self.parts, weights.split(self.sizes, 1), strict=True)
        return sum((part.vjp(y, w) for part, w in pieces), torch.zeros_like(y))

    def linearize(self, y: Tensor) -> Linearization:
        return self.parts[0].linearize(y) if len(self.parts) == 1 else _StackedLinearization(self, y)

    def row_norms(self, y: Tensor) -> Tensor:
        return _join([part.row_norms(y) for part in self.parts], y.new_empty(y.shape[0], 0))

    def magnitudes(self, y: Tensor) -> Tensor:
        return _join([part.magnitudes(y) for part in self.parts], y.new_empty(y.shape[0], 0))

    def hessian_diagonal(self, weights: Tensor) -> Tensor:
        pieces = zip(self.parts, weights.split(self.sizes, 1), strict=True)
        return torch.stack([part.hessian_diagonal(own) for part, own in pieces]).sum(0)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        found = {id(t): t for part in self.parts for t in part.tensors(y)}  # parts may share one
        return tuple(found.values())

    def detached(self, leaves: dict[int, Tensor]) -> StackedMap:
        return StackedMap([part.detached(leaves) for part in self.parts])

    def of_y_alone(self) -> StackedMap:
        return StackedMap([part.of_y_alone() for part in self.parts])

    def select(self, index: Tensor) -> StackedMap:
        return StackedMap([part.select(index) for part in self.parts])

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        total: list[Tensor | None] = [None] * (1 + len(wanted))
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.rows)
            start += part.rows
            own = [(a[:, rows], t) for a, t in pairs]
            for i, gradient in enumerate(part.pullback(y, own, weights[:, rows], wanted)):
                total[i] = add(total[i], gradient)
        return total


class _StackedLinearization(Linearization):
    """Every part to first order."""

    def __init__(self, map: StackedMap, y: Tensor) -> None:
        super().__init__(map, y)
        self.parts, self.sizes = [part.linearize(y) for part in map.parts], map.sizes

    @property
    def pattern(self) -> Pattern | None:
        return _stacked([part.pattern for part in self.parts])

    @property
    def values(self) -> Tensor:
        return torch.cat([part.values.T for part in self.parts]).T  # the batch stays the fastest axis

    def jvp(self, direction: Tensor) -> Tensor:
        return _join([part.jvp(direction) for part in self.parts], self.y.new_empty(self.y.shape[0], 0))

    def vjp(self, weights: Tensor) -> Tensor:
        pieces = zip(self.parts, weights.split(self.sizes, 1), strict=True)
        return sum((part.vjp(own) for part, own in pieces), torch.zeros_like(self.y))

    def _evaluate(self) -> Tensor:
        return _below([part.jacobian for part in self.parts], self.y)
