r"""Maps of buys and sells: $v = (p, m) \mapsto g(c + p - m)$, in which a sum of absolute differences is linear,

$$ \|y - c\|_1 = \sum_i (p_i + m_i), \qquad y = c + p - m, \quad p, m \ge 0, \quad p_i m_i = 0. $$

Where the kind of a row decides how a projection goes about it, `lifted` returns one of the same kind, and a constant
that is to be taken off its bounds: a matrix stays a matrix, and a bowl $y^\top (F F^\top + D) y + G y \le u$,
$D \ge 0$, a bowl with $D_i (p_i^2 + m_i^2)$ for $D_i (p_i - m_i)^2$: the same where $p_i m_i = 0$, more elsewhere.
Every other map is wrapped, and evaluated where it always was, at y.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.constraints.maps.base import (
    ExplicitLinearization,
    Linearization,
    Map,
    Pairs,
    add,
    cut,
    needing_grad,
    times,
)
from snarenet.constraints.maps.factored import FactoredMap
from snarenet.constraints.maps.linear import LinearMap
from snarenet.constraints.maps.quadratic import QuadraticMap


def lifted(part: Map, center: Tensor, bowl: bool) -> tuple[Map, Tensor | float]:
    """v -> g(c + p - m) - e for centers c (B, n), and e (B, rows); `bowl`: it is convex, with an upper bound alone."""
    if isinstance(part, LinearMap):
        return LinearMap(_both(part.A, -1)), times(part.A, center)
    if bowl and isinstance(part, FactoredMap):
        G, D = _both(part.jacobian(center), -1), torch.cat([part.D, part.D], -1)
        return FactoredMap(_both(part.F, -2), D, G), part.value(center)
    if bowl and isinstance(part, QuadraticMap) and part.diagonal:
        G, H = _both(part.jacobian(center), -1), torch.cat([part.H, part.H], -1)
        return QuadraticMap(H, G, diagonal=True), part.value(center)
    return LiftedMap(part, center), 0.0


def _both(matrix: Tensor, dim: int) -> Tensor:
    return torch.cat([matrix, -matrix], dim)


class LiftedMap(Map):
    """v -> g(c + p - m) for any g, and centers (B, n)."""

    def __init__(self, inner: Map, center: Tensor) -> None:
        self.inner, self.center = inner, center
        self.rows, self.linear, self.implicit = inner.rows, inner.linear, inner.implicit

    def _y(self, v: Tensor) -> Tensor:
        return self.center + _difference(v)

    def value(self, y: Tensor) -> Tensor:
        return self.inner.value(self._y(y))

    def jacobian(self, y: Tensor) -> Tensor:
        return _both(self.inner.jacobian(self._y(y)), -1)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return self.inner.jvp(self._y(y), _difference(direction))

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return _both(self.inner.vjp(self._y(y), weights), 1)

    def linearize(self, y: Tensor) -> Linearization:
        return ExplicitLinearization(self, y)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return (*self.inner.tensors(self._y(y)), *needing_grad(self.center))

    def detached(self, leaves: dict[int, Tensor]) -> LiftedMap:
        return LiftedMap(self.inner.detached(leaves), cut(self.center, leaves))

    def select(self, index: Tensor) -> LiftedMap:
        return LiftedMap(self.inner.select(index), self.center[index])

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        with torch.enable_grad():  # where some samples of a batch are in use, their centers lead to those of the batch
            at = self._y(y.detach())
        in_y, *found = self.inner.pullback(at.detach(), [(a, _difference(t)) for a, t in pairs], weights, wanted)
        if in_y is None:
            return [None, *found]
        if at.requires_grad and wanted:
            centers = torch.autograd.grad(at, wanted, in_y, allow_unused=True, retain_graph=True)
            found = [add(own, more) for own, more in zip(found, centers, strict=True)]
        return [_both(in_y, 1), *found]


def _difference(v: Tensor) -> Tensor:
    """p - m (B, n) of v (B, 2n)."""
    p, m = v.chunk(2, 1)
    return p - m
