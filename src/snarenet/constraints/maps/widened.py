r"""Maps of more variables than count: $v = (y, \ldots) \mapsto g(y)$.

Where the kind of a row decides how a projection goes about it, `widened` returns one of the same kind, with zeros for
the others: a matrix stays a matrix, a bowl a bowl. Every other map is wrapped, and evaluated where it always was, at y.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from snarenet.constraints.maps.base import ExplicitLinearization, Linearization, Map, Pairs
from snarenet.constraints.maps.factored import FactoredMap
from snarenet.constraints.maps.linear import LinearMap
from snarenet.constraints.maps.quadratic import QuadraticMap
from snarenet.constraints.structure import Seen


def widened(part: Map, size: int, more: int, bowl: bool, seen: Seen) -> Map:
    """v (B, size + more) -> g(y) for y (B, size); `bowl`: it is convex, with an upper bound alone."""
    behind = (0, more)
    if isinstance(part, LinearMap):
        return LinearMap(pad(part.A, behind), seen)
    if bowl and isinstance(part, FactoredMap):
        return FactoredMap(pad(part.F, (0, 0, *behind)), pad(part.D, behind), pad(part.G, behind), seen)
    if bowl and isinstance(part, QuadraticMap) and part.diagonal:
        return QuadraticMap(pad(part.H, behind), pad(part.G, behind), True, seen)
    return WidenedMap(part, size)


class WidenedMap(Map):
    """v -> g(y) for any g, of the first `size` entries of v."""

    def __init__(self, inner: Map, size: int) -> None:
        self.inner, self.size = inner, size
        self.rows, self.linear, self.implicit = inner.rows, inner.linear, inner.implicit

    def _y(self, v: Tensor) -> Tensor:
        return v[:, : self.size]

    def _v(self, in_y: Tensor, v: Tensor) -> Tensor:
        return pad(in_y, (0, v.shape[1] - self.size))

    def value(self, y: Tensor) -> Tensor:
        return self.inner.value(self._y(y))

    def jacobian(self, y: Tensor) -> Tensor:
        return self._v(self.inner.jacobian(self._y(y)), y)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return self.inner.jvp(self._y(y), self._y(direction))

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return self._v(self.inner.vjp(self._y(y), weights), y)

    def linearize(self, y: Tensor) -> Linearization:
        return ExplicitLinearization(self, y)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return self.inner.tensors(self._y(y))

    def detached(self, leaves: dict[int, Tensor]) -> WidenedMap:
        return WidenedMap(self.inner.detached(leaves), self.size)

    def select(self, index: Tensor) -> WidenedMap:
        return WidenedMap(self.inner.select(index), self.size)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        inside = [(a, self._y(t)) for a, t in pairs]
        in_y, *found = self.inner.pullback(self._y(y), inside, weights, wanted)
        return [None if in_y is None else self._v(in_y, y), *found]
