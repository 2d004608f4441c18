"""Maps that are linear in y: `LinearMap`, A y, and `IdentityMap`, y itself."""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.constraints.maps.base import Map, Pairs, cut, needing_grad, times, transposed_times
from snarenet.constraints.sparsity import Pattern, identity
from snarenet.constraints.structure import Seen


class LinearMap(Map):
    """g(y) = A y, with A (rows, n), or (B, rows, n) for a matrix per sample.

    `seen` keeps the pattern of all that there were; `pattern` is known where A was looked at already.
    """

    linear = diagonal_hessian = True

    def __init__(self, A: Tensor, seen: Seen | None = None, pattern: Pattern | None = None) -> None:
        self.A, self.seen, self._pattern = A, seen, pattern
        self.rows = A.shape[-2]

    @property
    def pattern(self) -> Pattern | None:
        if self._pattern is None and self.seen is not None:
            self._pattern = self.seen.add(self.A.detach())
        return self._pattern

    @property
    def constant(self) -> bool:
        return self.A.ndim == 2 and not self.A.requires_grad

    def value(self, y: Tensor) -> Tensor:
        return times(self.A, y)

    def jacobian(self, y: Tensor) -> Tensor:
        return self.A

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return times(self.A, direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return transposed_times(self.A, weights)

    def magnitudes(self, y: Tensor) -> Tensor:
        return times(self.A.abs(), y.abs())

    def hessian_diagonal(self, weights: Tensor) -> Tensor:
        return weights.new_zeros(weights.shape[0], self.A.shape[-1])

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return needing_grad(self.A)

    def detached(self, leaves: dict[int, Tensor]) -> LinearMap:
        return LinearMap(cut(self.A, leaves), self.seen, self._pattern)

    def select(self, index: Tensor) -> LinearMap:
        return self if self.A.ndim == 2 else LinearMap(self.A[index], self.seen, self._pattern)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        if self.A.requires_grad:
            return super().pullback(y, pairs, weights, wanted)
        return [transposed_times(self.A, weights), *(None for _ in wanted)]


class IdentityMap(Map):
    """g(y) = y: the rows of a box; or g(z) = scale z, where z are y in other units: y = scale z."""

    linear = diagonal_hessian = True

    def __init__(self, rows: int, scale: Tensor | None = None) -> None:
        self.rows, self.scale = rows, scale

    def _scaled(self, v: Tensor) -> Tensor:
        return v if self.scale is None else v * self.scale

    @property
    def constant(self) -> bool:
        return True

    @property
    def pattern(self) -> Pattern | None:
        return identity(self.rows)

    def value(self, y: Tensor) -> Tensor:
        return self._scaled(y)

    def entries(self, y: Tensor, pattern: Pattern) -> Tensor:
        return self._scaled(torch.ones_like(y))

    def jacobian(self, y: Tensor) -> Tensor:
        return self._scaled(torch.eye(self.rows, dtype=y.dtype, device=y.device))

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return self._scaled(direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return self._scaled(weights)

    def row_norms(self, y: Tensor) -> Tensor:
        return self._scaled(self._scaled(torch.ones_like(y)))

    def magnitudes(self, y: Tensor) -> Tensor:
        return self._scaled(y.abs())

    def hessian_diagonal(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        return [self._scaled(weights), *(None for _ in wanted)]
