r"""`L1BallMap`: the row of the ball $\{y : \|y - c\|_1 \le r\}$; `L1ImageMap`: those of $\{y : \|A y - c\|_1 \le r\}$.

The derivative of $\|y - c\|_1$ is a vector of signs, the same for entries that are far from $c_i$ and for those beside
it, which a step then throws to the other side: along it a repair zigzags, and often does not arrive. So the row is

$$ g(y) = \begin{cases} \|y - c\|_1 - r & \text{inside} \\ \sqrt{n} \, \|y - P y\|_2 & \text{outside} \end{cases} $$

with P the projection onto the ball, $c + \mathrm{soft}_\theta(y - c)$, whose threshold $\theta$ comes from a sort. With
$s = \mathrm{clip}((y - c) / \theta, -1, 1)$ the outside is $\sqrt{n} \, \theta \|s\|$ and its derivative
$\sqrt{n} \, s / \|s\|$: an undamped step is P itself, and rows have the same length inside and out. As
$\|y - c\|_1 - r \le \|y - P y\|_1 \le g(y)$, a tolerance on g is kept by the norm.

In other units, $y = s z$, P is the projection in z: its threshold for $z_i$ is $\theta s_i$, from a sort of
$|y_i - c_i| / s_i^2$, and $\|s\|$ stands for $\sqrt{n}$.

With a matrix a distance of $d = A y - c$ would have the derivative $A^\top s$, along which one row at a time takes
hundreds of steps if A is a difference, say. So each of the k entries of d has a row,

$$ g_i(y) = \begin{cases} \|d\|_1 - r & \text{inside} \\ k \min(|d_i|, \theta) & \text{outside,} \end{cases} $$

k times what P changes it by: an undamped step makes $d_i = 0$ where P does, and takes the rest from the others in equal
parts. As $\|d\|_1 - r \le \|d - P d\|_1 \le \max_i g_i$, a tolerance is kept by the norm here, too.
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
        level, excess = _threshold(d, self.radius)
        outside = level > 0
        s = torch.where(outside, (d / torch.where(outside, level, 1.0)).clamp(-1, 1), 1.0)
        length, root = s.norm(dim=1, keepdim=True), y.shape[1] ** 0.5
        value = torch.where(outside, root * level * length, excess)
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


class L1ImageMap(Map):
    """k rows, for a matrix (k, n) or (B, k, n), a center (k,) or (B, k) and a radius () or (B, 1)."""

    def __init__(self, matrix: Tensor, center: Tensor, radius: Tensor) -> None:
        self.matrix, self.center, self.radius = matrix, center, radius
        self.rows = matrix.shape[-2]

    def _evaluate(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """g (B, k) and its derivative (B, k, n)."""
        d = times(self.matrix, y) - self.center
        level, excess = _threshold(d, self.radius)
        outside, far, signs = level > 0, d.abs() > level, d.sign()
        even = transposed_times(self.matrix, torch.where(far, signs, 0.0)) / far.sum(1, keepdim=True).clamp(min=1)
        apart = torch.where(far.unsqueeze(2), even.unsqueeze(1), signs.unsqueeze(2) * self.matrix)
        together = transposed_times(self.matrix, signs).unsqueeze(1)
        value = torch.where(outside, self.rows * torch.minimum(d.abs(), level), excess)
        return value, torch.where(outside.unsqueeze(2), self.rows * apart, together)

    def value(self, y: Tensor) -> Tensor:
        d = times(self.matrix, y) - self.center
        level, excess = _threshold(d, self.radius)
        return torch.where(level > 0, self.rows * torch.minimum(d.abs(), level), excess)

    def jacobian(self, y: Tensor) -> Tensor:
        return self._evaluate(y)[1]

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return times(self.jacobian(y), direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return transposed_times(self.jacobian(y), weights)

    def linearize(self, y: Tensor) -> Linearization:
        return ExplicitLinearization(self, y)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return needing_grad(self.matrix, self.center, self.radius)

    def detached(self, leaves: dict[int, Tensor]) -> L1ImageMap:
        return L1ImageMap(*(cut(tensor, leaves) for tensor in (self.matrix, self.center, self.radius)))

    def select(self, index: Tensor) -> L1ImageMap:
        shared = (self.matrix, 2), (self.center, 1), (self.radius, 0)
        return L1ImageMap(*(tensor if tensor.ndim == depth else tensor[index] for tensor, depth in shared))

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not self.tensors(y):  # J is constant but for its jumps
            return [self.vjp(y, weights), *(None for _ in wanted)]
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            value, J = self._evaluate(y)
            total = (weights * value).sum()
            for a, t in pairs:
                total = total + (a * times(J, t)).sum()
        return gradients(total, (y, *wanted))


def _threshold(d: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1) what a projection onto the ball takes off every entry of d, negative inside, and (B, 1) |d|_1 - r."""
    sizes = d.abs().sort(1, descending=True).values
    sums = sizes.cumsum(1) - radius
    levels = sums / torch.arange(1, d.shape[1] + 1, dtype=d.dtype, device=d.device)
    support = (sizes > levels).sum(1, keepdim=True).clamp(min=1)  # a radius of 0 leaves none
    return levels.gather(1, support - 1), sums[:, -1:]
