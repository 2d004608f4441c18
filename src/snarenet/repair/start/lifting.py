r"""`lift`: a projection onto a set with L1 balls as one without kinks, in more variables.

Beside one ball alone, in buys and sells:

$$ \min_{p, m} \tfrac12 \| p - (y - c) \|_W^2 + \tfrac12 \| m + (y - c) \|_W^2 \quad\text{so that}\quad
   \textstyle\sum_i (p_i + m_i) \le r, \; p, m \ge 0, \; l \le g(c + p - m) \le u. $$

Taking the same amount off $p_i$ and $m_i$ leaves $z = c + p - m$ where it is and makes everything else smaller, so the
least has $p_i m_i = 0$. There the two squares are $\| z - y \|_W^2$ and a constant: z is the nearest point. A box on z
is one on p and m, as only one of them moves.

A ball $\|A z - c\|_1 \le r$, or each of several, has buys and sells of its own beside z:

$$ \min_{z, p, m} \tfrac12 \| z - y \|_W^2 + \tfrac\epsilon2 \| p - p^0 \|^2 + \tfrac\epsilon2 \| m - m^0 \|^2
   \quad\text{so that}\quad R^{-1} (A z - c) = p - m, \; \textstyle\sum_i R_{ii} (p_i + m_i) \le r, \;
   p, m \ge 0, $$

with $p^0 - m^0 = R^{-1} (A y - c)$ and $R_{ii} = \| A_i \|$, so that both are of one size. The system of a step needs
some weight for each variable; that of p and m lengthens the distance by about 1e-6 of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import (
    IdentityMap,
    L1BallMap,
    L1ImageMap,
    LinearMap,
    Map,
    StackedMap,
    lifted,
    times,
    widened,
)
from snarenet.constraints.structure import Seen
from snarenet.memo import Memo

_LIGHT = 1e-2  # epsilon; a tenth of it loses samples where there are hundreds of variables


class Lift(NamedTuple):
    """A projection in more variables v.

    Attributes:
        instance: the constraints on v.
        y: (B, N) what is projected.
        weights: (N,) those of the squared distance, equal if None.
        metric: (N,) those of the steps that lead to a point of the set, likewise: light variables would run away.
        center: (B, n) of the ball where v = (p, m) are buys and sells; None where v begins with z itself.
    """

    instance: Instance
    y: Tensor
    weights: Tensor | None
    metric: Tensor | None
    center: Tensor | None

    def back(self, v: Tensor, y: Tensor) -> Tensor:
        """The points (B, n) that v stands for; y where nothing was found."""
        if self.center is None:
            z = v[:, : y.shape[1]]
        else:
            p, m = v.chunk(2, 1)
            z = self.center + p - m
        return torch.where((v == self.y).all(1, keepdim=True), y, z)


def flat(map: Map) -> bool:
    """Is a set of these rows a polyhedron?"""
    return all(part.linear or isinstance(part, L1BallMap | L1ImageMap) for part in map.parts)


def balls_of(instance: Instance) -> list[int]:
    """Which parts are L1 balls; none where one is relaxed, which is another set."""
    parts = instance.map.parts
    bounds = instance.upper.split([part.rows for part in parts], 1)
    balls = [i for i, part in enumerate(parts) if isinstance(part, L1BallMap | L1ImageMap)]
    return balls if all(bool((bounds[i] == 0).all()) for i in balls) else []


def lift(memo: Memo, instance: Instance, balls: list[int], y: Tensor, weights: Tensor | None) -> Lift:
    """The projection of y (B, n), differentiable in y, bounds and the tensors of the map; `memo` keeps patterns."""
    parts, sizes = instance.map.parts, [part.rows for part in instance.map.parts]
    bounds = zip(parts, instance.lower.split(sizes, 1), instance.upper.split(sizes, 1), strict=True)
    low, high = torch.full_like(y, -torch.inf), torch.full_like(y, torch.inf)
    others: list[tuple[Map, Tensor, Tensor]] = []
    for i, (part, lower, upper) in enumerate(bounds):
        if isinstance(part, IdentityMap):
            low, high = torch.maximum(low, lower), torch.minimum(high, upper)
        elif i not in balls:
            others.append((part, lower, upper))
    own = [parts[i] for i in balls]
    if len(own) == 1 and isinstance(own[0], L1BallMap):
        return _in_trades(own[0], others, low, high, y, weights)
    weights = torch.ones_like(y[0]) if weights is None else weights.to(y) / weights.to(y).mean()
    return _beside_trades(memo, [_Ball.of(part, y) for part in own], others, low, high, y, weights)


def _in_trades(
    ball: L1BallMap,
    others: list[tuple[Map, Tensor, Tensor]],
    low: Tensor,
    high: Tensor,
    y: Tensor,
    weights: Tensor | None,
) -> Lift:
    """In buys and sells alone, with the other rows and a box on y."""
    center, rows = ball.center.expand_as(y), list[tuple[Map, Tensor, Tensor]]()
    for part, lower, upper in others:
        map, constant = lifted(part, center, _is_bowl(part, lower))
        rows.append((map, lower - constant, upper - constant))
    radius = ball.radius.expand(len(y), 1)
    rows.append((LinearMap(y.new_ones(1, 2 * y.shape[1])), torch.full_like(radius, -torch.inf), radius))
    least = torch.cat([low - center, center - high], 1).clamp(min=0)
    most = torch.cat([high - center, center - low], 1).clamp(min=0)
    rows.append((IdentityMap(least.shape[1]), least, most))
    d = y - center
    both = None if weights is None else weights.repeat(2)
    return Lift(_joined(rows), torch.cat([d, -d], 1), both, both, center)


class _Ball(NamedTuple):
    """A ball with rows of about length 1: |R (A z - c)|_1 <= r.

    Attributes:
        matrix: (k, n) or (B, k, n).
        center: (B, k).
        radius: (B, 1).
        lengths: (k,) or (B, k) the diagonal of R.
    """

    matrix: Tensor
    center: Tensor
    radius: Tensor
    lengths: Tensor

    @staticmethod
    def of(part: Map, y: Tensor) -> _Ball:
        """That of a part of the set."""
        assert isinstance(part, L1BallMap | L1ImageMap)
        matrix = part.matrix if isinstance(part, L1ImageMap) else torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
        squares = matrix.square().sum(-1)
        lengths = torch.where(squares > 0, squares, 1.0).sqrt()
        center = (part.center / lengths).expand(len(y), -1)
        return _Ball(matrix / lengths.unsqueeze(-1), center, part.radius.expand(len(y), 1), lengths)


def _beside_trades(
    memo: Memo,
    balls: list[_Ball],
    others: list[tuple[Map, Tensor, Tensor]],
    low: Tensor,
    high: Tensor,
    y: Tensor,
    weights: Tensor,
) -> Lift:
    """In y, and buys and sells of each ball behind it."""
    n, more = y.shape[1], sum(2 * ball.center.shape[1] for ball in balls)
    seen = iter(memo.get("seen", (), lambda: [Seen() for _ in range(len(others) + 2 * len(balls))]))
    rows = [(widened(part, n, more, _is_bowl(part, lower), next(seen)), lower, upper) for part, lower, upper in others]
    v, before = [y], 0
    for ball in balls:
        k = ball.center.shape[1]
        after = more - before - 2 * k
        eye = torch.eye(k, dtype=y.dtype, device=y.device).expand(*ball.matrix.shape[:-2], k, k)
        differences = torch.cat([ball.matrix, pad(torch.cat([-eye, eye], -1), (before, after))], -1)
        budget = pad(torch.cat([ball.lengths, ball.lengths], -1), (n + before, after)).unsqueeze(-2)
        rows.append((LinearMap(differences, next(seen)), ball.center, ball.center))
        rows.append((LinearMap(budget, next(seen)), torch.full_like(ball.radius, -torch.inf), ball.radius))
        d = times(ball.matrix, y) - ball.center
        v += [d.clamp(min=0), (-d).clamp(min=0)]
        before += 2 * k
    free = y.new_zeros(len(y), more)
    rows.append((IdentityMap(n + more), torch.cat([low, free], 1), torch.cat([high, free + torch.inf], 1)))
    apart = y.new_ones(more)
    light, metric = (torch.cat([weights, of_trades]) for of_trades in (_LIGHT * apart, apart))
    return Lift(_joined(rows), torch.cat(v, 1), light, metric, None)


def _joined(rows: list[tuple[Map, Tensor, Tensor]]) -> Instance:
    maps, lower, upper = zip(*rows, strict=True)
    return Instance(StackedMap(maps), torch.cat(lower, 1), torch.cat(upper, 1), (False,) * len(maps))


def _is_bowl(part: Map, lower: Tensor) -> bool:
    """Is it convex, and not linear, with an upper bound alone?"""
    return part.convex and not part.linear and bool(lower.isneginf().all())
