r"""Maps in other units: $z \mapsto g(s z)$, where each variable is $y_i = s_i z_i$. Rows keep theirs.

$$ J_z = J_y\, \mathrm{diag}(s), \qquad \nabla_z = s \nabla_y. $$

Where the kind of a row decides how a repair goes about it, `scaled` returns one of the same kind: a matrix stays a
matrix, a diagonal Hessian diagonal, a box a box; the row of an L1 ball is a distance in z where it was one in y. Every
other map is wrapped, and evaluated where it always was, at y.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snarenet.constraints.maps.base import Linearization, Map, Pairs
from snarenet.constraints.maps.function import FunctionMap
from snarenet.constraints.maps.l1 import L1BallMap, L1ImageMap
from snarenet.constraints.maps.linear import IdentityMap, LinearMap
from snarenet.constraints.maps.quadratic import QuadraticMap
from snarenet.constraints.maps.sparse import SparseMap
from snarenet.constraints.maps.stacked import StackedMap
from snarenet.constraints.sparsity import Pattern
from snarenet.memo import Memo


def scaled(map: Map, scale: Tensor, memo: Memo) -> Map:
    """z -> g(scale z) for a scale (n,); `memo` keeps what is the same for all batches."""
    parts = [_scaled(k, part, scale, memo) for k, part in enumerate(map.parts)]
    return parts[0] if len(parts) == 1 else StackedMap(parts)


def _scaled(k: int, part: Map, scale: Tensor, memo: Memo) -> Map:
    """The same of part k."""
    if isinstance(part, IdentityMap):
        return IdentityMap(part.rows, scale)
    if isinstance(part, L1BallMap):
        return L1BallMap(part.center, part.radius, scale)
    if isinstance(part, L1ImageMap):
        return L1ImageMap(part.matrix * scale, part.center, part.radius)
    if isinstance(part, SparseMap):
        return memo.get(("scaled", k), part.sources, lambda: part.scaled(scale))
    if isinstance(part, LinearMap):
        build: Any = lambda: LinearMap(part.A * scale, part.seen)  # noqa: E731
        return memo.get(("scaled", k), (part.A,), build) if part.constant else build()
    if isinstance(part, QuadraticMap) and part.diagonal:
        build = lambda: QuadraticMap(part.H * scale.square(), part.G * scale, True, part.seen)  # noqa: E731
        shared = part.H.ndim == part.G.ndim == 2 and not (part.H.requires_grad or part.G.requires_grad)
        return memo.get(("scaled", k), (part.H, part.G), build) if shared else build()
    return ScaledMap(part, scale)


class ScaledMap(Map):
    """z -> g(scale z) for any g, with a scale (n,)."""

    def __init__(self, inner: Map, scale: Tensor) -> None:
        self.inner, self.scale = inner, scale
        self.rows, self.linear, self.diagonal_hessian = inner.rows, inner.linear, inner.diagonal_hessian
        self.implicit = inner.implicit

    @property
    def pattern(self) -> Pattern | None:
        return self.inner.pattern

    def value(self, y: Tensor) -> Tensor:
        return self.inner.value(y * self.scale)

    def jacobian(self, y: Tensor) -> Tensor:
        return self.inner.jacobian(y * self.scale) * self.scale

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return self.inner.jvp(y * self.scale, direction * self.scale)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return self.inner.vjp(y * self.scale, weights) * self.scale

    def entries(self, y: Tensor, pattern: Pattern) -> Tensor:
        return self.inner.entries(y * self.scale, pattern) * pattern.of_columns(self.scale)

    def linearize(self, y: Tensor) -> Linearization:
        return _ScaledLinearization(self, y)

    def of_y_alone(self) -> ScaledMap:
        return ScaledMap(self.inner.of_y_alone(), self.scale)

    def row_norms(self, y: Tensor) -> Tensor:
        if isinstance(self.inner, FunctionMap):
            return self.inner.row_norms(y * self.scale, self.scale)
        linear = self.linearize(y)
        if not self.implicit or (pattern := linear.pattern) is None:
            return linear.jacobian.square().sum(-1).expand(y.shape[0], self.rows)
        return pattern.row_sums(linear.values.square())

    def magnitudes(self, y: Tensor) -> Tensor:
        return self.inner.magnitudes(y * self.scale)

    def hessian_diagonal(self, weights: Tensor) -> Tensor:
        return self.inner.hessian_diagonal(weights) * self.scale.square()

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return self.inner.tensors(y * self.scale)

    def select(self, index: Tensor) -> ScaledMap:
        return ScaledMap(self.inner.select(index), self.scale)

    def detached(self, leaves: dict[int, Tensor]) -> ScaledMap:
        return ScaledMap(self.inner.detached(leaves), self.scale)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        pairs = [(a, t * self.scale) for a, t in pairs]
        in_y, *found = self.inner.pullback(y * self.scale, pairs, weights, wanted)
        return [None if in_y is None else in_y * self.scale, *found]


class _ScaledLinearization(Linearization):
    """What the wrapped map is to first order, in the other units."""

    def __init__(self, map: ScaledMap, y: Tensor) -> None:
        super().__init__(map, y)
        self.inner, self.scale = map.inner.linearize(y * map.scale), map.scale

    @property
    def pattern(self) -> Pattern | None:
        return self.inner.pattern

    @property
    def values(self) -> Tensor:
        values, pattern = self.inner.values, self.inner.pattern  # in this order: evaluating J may widen the pattern
        assert pattern is not None
        return values * pattern.of_columns(self.scale)

    def jvp(self, direction: Tensor) -> Tensor:
        return self.inner.jvp(direction * self.scale)

    def vjp(self, weights: Tensor) -> Tensor:
        return self.inner.vjp(weights) * self.scale

    def _evaluate(self) -> Tensor:
        return self.inner.jacobian * self.scale
