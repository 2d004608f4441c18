r"""`lift`: a projection onto a set with an L1 ball as one without kinks, in buys and sells.

$$ \min_{p, m} \tfrac12 \| p - (y - c) \|_W^2 + \tfrac12 \| m + (y - c) \|_W^2 \quad\text{so that}\quad
   \textstyle\sum_i (p_i + m_i) \le r, \; p, m \ge 0, \; l \le g(c + p - m) \le u. $$

Taking the same amount off $p_i$ and $m_i$ leaves $z = c + p - m$ where it is and makes everything else smaller, so the
least has $p_i m_i = 0$. There the two squares are $\| z - y \|_W^2$ and a constant: z is the nearest point. A box on z
is one on p and m, as only one of them moves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import IdentityMap, L1BallMap, LinearMap, Map, StackedMap, lifted


class Lift(NamedTuple):
    """A projection in buys and sells.

    Attributes:
        instance: the constraints on v = (p, m).
        y: (B, 2n) what is projected.
        center: (B, n) of the ball.
    """

    instance: Instance
    y: Tensor
    center: Tensor

    def back(self, v: Tensor, y: Tensor) -> Tensor:
        """The points (B, n) that v stands for; y where nothing was found."""
        p, m = v.chunk(2, 1)
        return torch.where((v == self.y).all(1, keepdim=True), y, self.center + p - m)


def ball_of(instance: Instance) -> int | None:
    """Which part is an L1 ball, if there is one alone, as large as it says: a row that is relaxed is another set."""
    parts = instance.map.parts
    balls = [i for i, part in enumerate(parts) if isinstance(part, L1BallMap)]
    if len(balls) != 1:
        return None
    first = sum(part.rows for part in parts[: balls[0]])
    return balls[0] if bool((instance.upper[:, first] == 0).all()) else None


def lift(instance: Instance, ball: int, y: Tensor) -> Lift:
    """The projection of y (B, n) in buys and sells; differentiable in y, bounds and the tensors of the map."""
    parts = instance.map.parts
    own = parts[ball]
    assert isinstance(own, L1BallMap)
    sizes = [part.rows for part in parts]
    bounds = list(zip(parts, instance.lower.split(sizes, 1), instance.upper.split(sizes, 1), strict=True))
    center = own.center.expand_as(y)
    low, high = torch.full_like(y, -torch.inf), torch.full_like(y, torch.inf)
    rows: list[tuple[Map, Tensor, Tensor]] = []
    for part, lower, upper in bounds:
        if isinstance(part, IdentityMap):
            low, high = torch.maximum(low, lower), torch.minimum(high, upper)
        elif part is not own:
            bowl = part.convex and not part.linear and bool(lower.isneginf().all())
            map, constant = lifted(part, center, bowl)
            rows.append((map, lower - constant, upper - constant))
    n, radius = y.shape[1], own.radius.expand(len(y), 1)
    rows.append((LinearMap(y.new_ones(1, 2 * n)), torch.full_like(radius, -torch.inf), radius))
    least = torch.cat([low - center, center - high], 1).clamp(min=0)
    most = torch.cat([high - center, center - low], 1).clamp(min=0)
    rows.append((IdentityMap(2 * n), least, most))
    maps, lower, upper = zip(*rows, strict=True)
    d = y - center
    whole = Instance(StackedMap(maps), torch.cat(lower, 1), torch.cat(upper, 1), (False,) * len(maps))
    return Lift(whole, torch.cat([d, -d], 1), center)
