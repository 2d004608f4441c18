r"""`L1BallMap`: the row of the ball $\{y : \|y - c\|_1 \le r\}$, negative inside and a distance outside.

The derivative of $\|y - c\|_1$ is a vector of signs, the same for entries that are far from $c_i$ and for those beside
it, which a step then throws to the other side: along it a repair zigzags, and often does not arrive. So the row is

$$ g(y) = \begin{cases} \|y - c\|_1 - r & \text{inside} \\ \sqrt{n} \, \|y - P y\|_2 & \text{outside} \end{cases} $$

with P the projection onto the ball, $c + \mathrm{soft}_\theta(y - c)$, whose threshold $\theta$ comes from a sort. With
$s = \mathrm{clip}((y - c) / \theta, -1, 1)$ the outside is $\sqrt{n} \, \theta \|s\|$ and its derivative
$\sqrt{n} \, s / \|s\|$: an undamped step is P itself, and rows have the same length inside and out. As
$\|y - c\|_1 - r \le \|y - P y\|_1 \le g(y)$, a tolerance on g is kept by the norm.

In other units, $y = s z$, P is the projection in z: its threshold for $z_i$ is $\theta s_i$, from a sort of
$|y_i - c_i| / s_i^2$, and $\|s\|$ stands for $\sqrt{n}$.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from snarenet.constraints.maps.base import (
    ExplicitLinearization,
    Linearization,
    Map,
    Pairs,
    cut,
    gradients,
    needing_grad,
    times,
    transposed_times,
)
from snarenet.constraints.sparsity import Pattern

_full = lru_cache(maxsize=64)(Pattern.full)


class L1BallMap(Map):
    """One row, for a center (n,) or (B, n) and a radius () or (B, 1); of z, where y = scale z, if a scale is given."""

    rows = 1

    def __init__(self, center: Tensor, radius: Tensor, scale: Tensor | None = None) -> None:
        self.center, self.radius, self.scale = center, radius, scale

    @property
    def pattern(self) -> Pattern | None:
        return _full(1, self.center.shape[-1])

    def _evaluate(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """g (B, 1) and its derivative (B, 1, n)."""
        if self.scale is not None:
            return self._evaluate_scaled(y, self.scale)
        d = y - self.center
        sizes = d.abs().sort(1, descending=True).values
        counts = torch.arange(1, y.shape[1] + 1, dtype=y.dtype, device=y.device)
        sums = sizes.cumsum(1) - self.radius
        levels = sums / counts
        support = (sizes > levels).sum(1, keepdim=True).clamp(min=1)  # a radius of 0 leaves none
        level = levels.gather(1, support - 1)
        outside = level > 0
        s = torch.where(outside, (d / torch.where(outside, level, 1.0)).clamp(-1, 1), 1.0)
        length, root = s.norm(dim=1, keepdim=True), y.shape[1] ** 0.5
        value = torch.where(outside, root * level * length, sums[:, -1:])
        return value, torch.where(outside, root * s / length, d.sign()).unsqueeze(1)

    def _evaluate_scaled(self, z: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The same in other units."""
        d, squares = z * scale - self.center, scale.square()
        sizes, order = (d.abs() / squares).sort(1, descending=True)
        sums = d.abs().gather(1, order).cumsum(1) - self.radius
        levels = sums / squares.expand_as(d).gather(1, order).cumsum(1)
        support = (sizes > levels).sum(1, keepdim=True).clamp(min=1)
        level = levels.gather(1, support - 1)
        outside = level > 0
        s = torch.where(outside, (d / torch.where(outside, level * squares, 1.0)).clamp(-1, 1), 1.0) * scale
        length, root = s.norm(dim=1, keepdim=True), scale.norm()
        value = torch.where(outside, root * level * length, sums[:, -1:])
        return value, torch.where(outside, root * s / length, d.sign() * scale).unsqueeze(1)

    def value(self, y: Tensor) -> Tensor:
        return self._evaluate(y)[0]

    def jacobian(self, y: Tensor) -> Tensor:
        return self._evaluate(y)[1]

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return times(self.jacobian(y), direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return transposed_times(self.jacobian(y), weights)

    def linearize(self, y: Tensor) -> Linearization:
        return ExplicitLinearization(self, y)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return needing_grad(self.center, self.radius)

    def detached(self, leaves: dict[int, Tensor]) -> L1BallMap:
        return L1BallMap(cut(self.center, leaves), cut(self.radius, leaves), self.scale)

    def select(self, index: Tensor) -> L1BallMap:
        center = self.center if self.center.ndim == 1 else self.center[index]
        return L1BallMap(center, self.radius if self.radius.ndim == 0 else self.radius[index], self.scale)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            value, J = self._evaluate(y)
            total = (weights * value).sum()
            for a, t in pairs:
                total = total + (a * times(J, t)).sum()
        return gradients(total, (y, *wanted))
