"""A controller's plan for a unicycle around an ellipse: states (T, 3), then controls (T, 2); x is its first state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet_lab.bench.general_problems.arithmetic import Torch
from snarenet_lab.bench.general_problems.base import F64, General


def unicycle(horizon: int = 20, step: float = 0.2) -> General:
    """The plan of a unicycle around an ellipse, of HardNet++'s benchmark, over any horizon."""
    ellipse, goal = (0.51020408, 0.90702948), (3.5, 0.0, 0.0)

    def split(y: Any, m: Any) -> tuple[Any, ...]:
        """px, py, angle, speed and turn, each at every step."""
        states, controls = m.take(y, slice(0, 3 * horizon)), m.take(y, slice(3 * horizon, None))
        state = (m.take(states, slice(i, None, 3)) for i in range(3))
        return *state, *(m.take(controls, slice(i, None, 2)) for i in range(2))

    def rows(y: Any, x: Any, m: Any) -> Any:
        px, py, angle, speed, turn = split(y, m)
        last = [m.join(m.take(x, slice(i, i + 1)), m.take(v, slice(0, -1))) for i, v in enumerate((px, py, angle))]
        moved = last[0] + step * speed * m.cos(last[2]), last[1] + step * speed * m.sin(last[2])
        dynamics = m.join(px - moved[0], py - moved[1], angle - last[2] - step * turn)
        return m.join(dynamics, ellipse[0] * px * px + ellipse[1] * py * py)

    def objective(y: Any, x: Any, m: Any) -> Any:
        px, py, angle, speed, turn = split(y, m)
        off = [px - goal[0], py - goal[1], angle - goal[2]]
        last = slice(horizon - 1, horizon)
        end = [math.sqrt(w) * m.take(v, last) for w, v in zip((10.0, 10.0, 1.0), off, strict=True)]
        terms = m.join(*off, *end, math.sqrt(0.1) * speed, math.sqrt(0.1) * turn)
        return terms * terms

    free, zeros = torch.full((3 * horizon,), math.inf, dtype=F64), torch.zeros(3 * horizon, dtype=F64)
    lower = torch.cat([zeros, torch.ones(horizon, dtype=F64)])
    upper = torch.cat([zeros, torch.full((horizon,), math.inf, dtype=F64)])
    controls = torch.tensor([0.0, -1.5, 2.0, 1.5], dtype=F64).view(2, 1, 2).expand(-1, horizon, -1).flatten(1)
    box = sn.Box(torch.cat([-free, controls[0]]), torch.cat([free, controls[1]]))
    constraints = sn.Nonlinear(lambda y, x: rows(y, x, Torch(y.device)), 4 * horizon, lower, upper) & box
    spread = torch.cat([torch.full((3 * horizon,), 0.3, dtype=F64), torch.full((2 * horizon,), 0.2, dtype=F64)])
    return General(f"unicycle {horizon}", constraints, _arc(horizon, step), spread, _starts, objective, rows)


def _arc(horizon: int, step: float) -> Tensor:
    """A way over the ellipse from (-3, 0) to (3.5, 0), with its controls."""
    share = torch.linspace(0, 1, horizon + 1, dtype=F64)
    share = (share * max(1.0, horizon * step / 5)).clamp(max=1.0)  # 5 s on the way, then at rest
    path = torch.stack([-3 + 6.5 * share, 1.6 * (math.pi * share).sin()], 1)
    change = path.diff(dim=0)
    angle = torch.atan2(change[:, 1], change[:, 0])
    angle = torch.where(change.norm(dim=1) > 0, angle, 0.0)
    states = torch.cat([path[1:], torch.cat([angle[1:], angle[-1:]]).unsqueeze(1)], 1)
    turn = torch.cat([angle.diff() / step, angle.new_zeros(1)]).clamp(-1.5, 1.5)
    return torch.cat([states.flatten(), torch.stack([change.norm(dim=1) / step, turn], 1).flatten()])


def _starts(batch: int, generator: torch.Generator) -> Tensor:
    """First states left of the ellipse."""
    low, high = torch.tensor([[-4.0, -2.4, -0.45], [-2.2, 2.4, 0.45]], dtype=F64)
    return low + (high - low) * torch.rand(batch, 3, generator=generator, dtype=F64)
