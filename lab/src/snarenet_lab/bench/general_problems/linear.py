"""Linear rows over time that are nearly dependent: sparse ones, of a track, and whole ones, of forces on a cart."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet_lab.bench.general_problems.base import F64, General


def track(times: int = 200) -> General:
    """Positions at so many times, the first of them given, with limits on speed and acceleration."""
    unit, step = torch.eye(times, dtype=F64), 2 * math.pi / times
    speed, acceleration = unit.diff(dim=0), unit.diff(n=2, dim=0)

    def rows(y: Any, x: Any, m: Any) -> Any:
        left, middle, right = (m.take(y, slice(i, times - 2 + i)) for i in range(3))
        moves = m.take(y, slice(1, None)) - m.take(y, slice(0, -1))
        return m.join(m.take(y, slice(0, 1)), moves, left - 2 * middle + right)

    constraints = (
        sn.Linear(unit[:1], equals=lambda x: x)
        & sn.Linear(speed, -1.2 * step, 1.2 * step)
        & sn.Linear(acceleration, -1.5 * step**2, 1.5 * step**2)
        & sn.Box(-1.5, 1.5)
    )
    typical = (step * torch.arange(times, dtype=F64)).sin()  # a unit of speed and of acceleration

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        return 0.3 * torch.randn(batch, 1, generator=generator, dtype=F64)

    spread = torch.full_like(typical, 0.3)
    return General(f"track {times}", constraints, typical, spread, draw, lambda y, x, m: y * y, rows)


def cart(times: int = 50, seconds: float = 5.0) -> General:
    """Forces at so many times that keep speed and position within limits, from a position and a speed x."""
    unit, step = torch.ones(times, dtype=F64), seconds / times
    speed = step * torch.ones(times, times, dtype=F64).tril()
    position, passed = speed @ speed, speed.diagonal().cumsum(0)

    def faster(x: Tensor) -> Tensor:
        return x[:, 1:] * unit.to(x)

    def farther(x: Tensor) -> Tensor:
        return x[:, :1] + x[:, 1:] * passed.to(x)

    constraints = (
        sn.Linear(speed, lambda x: -1 - faster(x), lambda x: 1 - faster(x))
        & sn.Linear(position, lambda x: -1 - farther(x), lambda x: 1 - farther(x))
        & sn.Box(-2.0, 2.0)
    )

    def rows(y: Any, x: Any, m: Any) -> Any:
        return m.join(m.times(speed, y), m.times(position, y))

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        return 0.2 * torch.randn(batch, 2, generator=generator, dtype=F64)

    still = torch.zeros(times, dtype=F64)
    return General(f"cart {times}", constraints, still, unit, draw, lambda y, x, m: y * y, rows)
