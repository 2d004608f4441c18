r"""MPC: the plan of a unicycle that drives to a goal around a keep-out ellipse, HardNet++'s benchmark.

y = (X, U) flattened, states $X_k = (p_x, p_y, θ)_k$ for k = 1 … T, then controls $(v, ω)_k$ for k = 0 … T − 1; the
input x is the state at the start, $X_0$. The rows are

$$ X_{k+1} = X_k + Δt\, (v_k \cos θ_k, v_k \sin θ_k, ω_k), \qquad 0.51020408\, p_x^2 + 0.90702948\, p_y^2 \ge 1, $$

$0 \le v \le 2$, $|ω| \le 1.5$, and the objective is $\sum_k \|e_k\|^2 + e_T^\top \mathrm{diag}(10, 10, 1)\, e_T +
0.1 \sum_k \|u_k\|^2$ with $e = X - (3.5, 0, 0)$, its angle wrapped to $(-π, π]$.

A controller takes the first control of a plan and plans again: `MPC.drive`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from snarenet.constraints import Box, Nonlinear
from snarenet.problems.arithmetic import Torch
from snarenet.problems.base import Model, Problem, check_sizes, uniform

ELLIPSE = (0.51020408, 0.90702948)  # semi-axes 1.4 and 1.05
GOAL = (3.5, 0.0, 0.0)
STEP = 0.2  # Δt
_LIMITS = (0.0, -1.5), (2.0, 1.5)  # of speed and turn
_FINAL, _EFFORT = (10.0, 10.0, 1.0), 0.1  # weights in the objective
_REGIONS = {  # lowest and highest start, and its margin to the ellipse, in the value of the ellipse's function
    "paper": ((-4.0, -2.4, -0.45), (-2.2, 2.4, 0.45), 0.2),
    "wide": ((-4.0, -2.4, -1.5), (4.0, 2.4, 1.5), 0.0),
}
_EDGE = 0.1  # of the range of a control, from its limits: where a network begins at most, or it hardly learns
_TORCH = Torch()


class Unicycle(nn.Module):
    """Dynamics and keep-out rows over a horizon, as a function of (y, x).

    Args:
        horizon: steps in time.
    """

    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.horizon = horizon

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """(B, 4 horizon)."""
        return self.rows(y, x, _TORCH)

    def split(self, y: Any, m: Any) -> tuple[Any, ...]:
        """px, py, angle, speed and turn, each at every step."""
        states, controls = m.take(y, slice(0, 3 * self.horizon)), m.take(y, slice(3 * self.horizon, 5 * self.horizon))
        state = (m.take(states, slice(i, 3 * self.horizon, 3)) for i in range(3))
        return *state, *(m.take(controls, slice(i, 2 * self.horizon, 2)) for i in range(2))

    def rows(self, y: Any, x: Any, m: Any) -> Any:
        """Dynamics of px, of py and of the angle, then the keep-out, each at every step."""
        px, py, angle, speed, turn = self.split(y, m)
        before = slice(0, self.horizon - 1)
        last = [m.join(m.take(x, slice(i, i + 1)), m.take(v, before)) for i, v in enumerate((px, py, angle))]
        moved = last[0] + STEP * speed * m.cos(last[2]), last[1] + STEP * speed * m.sin(last[2])
        dynamics = m.join(px - moved[0], py - moved[1], angle - last[2] - STEP * turn)
        return m.join(dynamics, ELLIPSE[0] * px * px + ELLIPSE[1] * py * py)

    def cost(self, y: Any, m: Any) -> Any:
        """The objective, as a vector of one."""
        px, py, angle, speed, turn = self.split(y, m)
        off = [px - GOAL[0], py - GOAL[1], m.wrap(angle - GOAL[2])]
        last = slice(self.horizon - 1, self.horizon)
        end = [math.sqrt(w) * m.take(v, last) for w, v in zip(_FINAL, off, strict=True)]
        terms = m.join(*off, *end, math.sqrt(_EFFORT) * speed, math.sqrt(_EFFORT) * turn)
        return m.total(terms * terms)


class Shooting(nn.Module):
    """A network that predicts controls, and the way that these drive: its plans obey the dynamics before any repair.

    Plans that a repair hardly moves train better, and each begins where the vehicle stands. The best side to pass on
    jumps as the start changes, which a network cannot: of several plans each begins on a side of its own.

    Args:
        net: from x (B, 3) to 2 horizon numbers a plan, which are squashed into the limits of speed and turn.
        inputs: lowest and highest x, both (3,), which net sees as -1 and 1; None for x as it is.
        first: (k, horizon, 2) controls that an untrained network is to predict about; None for one of middling ones.
    """

    low: Tensor
    high: Tensor
    middle: Tensor
    width: Tensor
    first: Tensor

    def __init__(
        self, net: nn.Module, inputs: tuple[Tensor, Tensor] | None = None, first: Tensor | None = None
    ) -> None:
        super().__init__()
        self.net = net
        low, high = (-torch.ones(3), torch.ones(3)) if inputs is None else inputs
        self.register_buffer("middle", ((low + high) / 2).float())
        self.register_buffer("width", ((high - low) / 2).float())
        for name, side in zip(("low", "high"), _LIMITS, strict=True):
            self.register_buffer(name, torch.tensor(side))
        share = (
            torch.full((1, 1, 2), 0.5) if first is None else (first.to(self.low) - self.low) / (self.high - self.low)
        )
        self.register_buffer("first", share.clamp(_EDGE, 1 - _EDGE).logit() / 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 5 horizon k) plans, one after the other: states, then controls."""
        low, high, first = self.low.to(x), self.high.to(x), self.first.to(x)
        seen = (x - self.middle.to(x)) / self.width.to(x)
        numbers = self.net(seen).unflatten(1, (len(first), -1, 2)) + first
        controls = low + (high - low) * torch.sigmoid(2 * numbers)
        state, states = x.unsqueeze(1).expand(-1, len(first), -1), []
        for control in controls.unbind(2):
            state = moved(state, control)
            states.append(state)
        return torch.cat([torch.stack(states, 2).flatten(2), controls.flatten(2)], 2).flatten(1)


def moved(state: Tensor, control: Tensor) -> Tensor:
    """(..., 3) the states after a step of time."""
    angle, speed = state[..., 2], control[..., 0]
    return state + STEP * torch.stack([speed * angle.cos(), speed * angle.sin(), control[..., 1]], -1)


class Drive(NamedTuple):
    """What a controller did from B states, in K steps of time.

    Attributes:
        states: (B, K + 1, 3) the first among them.
        controls: (B, K, 2).
        cost: (B,) the objective of this way: all errors, weighed at its end, and all efforts.
        margin: (B,) the least value of the ellipse's function minus 1 on the way; negative inside.
    """

    states: Tensor
    controls: Tensor
    cost: Tensor
    margin: Tensor


class MPC(Problem):
    """The family above; y (B, 5 horizon).

    Args:
        horizon: steps in time, of 0.2 each.
        region: where to start: "paper", px U(-4, -2.2), py U(-2.4, 2.4), θ U(-0.45, 0.45), as in HardNet++'s paper;
            "wide", also beside the ellipse and beyond it, px U(-4, 4), θ U(-1.5, 1.5), for controllers that plan again
            on their way.
        instances: how many starts.
        seed: of the starts.
    """

    starts = 3  # the optimum may pass on either side
    recipe: ClassVar[Mapping[str, Any]] = {  # a plan a side, see `network`
        "candidates": 2,
        "head": 0.1,  # they begin there
        "standardise": False,
    }
    goal = GOAL[:2]
    low: Tensor
    high: Tensor

    def __init__(self, horizon: int = 20, region: str = "paper", instances: int = 10_000, seed: int = 2025) -> None:
        super().__init__()
        check_sizes(horizon=horizon, instances=instances)
        check_sizes(0, seed=seed)
        if region not in _REGIONS:
            raise ValueError(f"`region` must be one of {', '.join(_REGIONS)}, but got {region!r}")
        self.horizon, self.size = horizon, 5 * horizon
        self.plan = Unicycle(horizon)
        lower, upper = (torch.zeros(4 * horizon, dtype=torch.float64) for _ in range(2))
        lower[3 * horizon :], upper[3 * horizon :] = 1.0, math.inf
        free = torch.full((3 * horizon,), math.inf, dtype=torch.float64)
        slowest, fastest = (torch.tensor(side, dtype=torch.float64).repeat(horizon) for side in _LIMITS)
        box = Box(torch.cat([-free, slowest]), torch.cat([free, fastest]))
        self.constraints = Nonlinear(self.plan, 4 * horizon, lower, upper) & box
        low, high, self.margin = _REGIONS[region]
        self.register_buffer("low", torch.tensor(low, dtype=torch.float64))
        self.register_buffer("high", torch.tensor(high, dtype=torch.float64))
        self.register_buffer("inputs", self.sample(instances, torch.Generator().manual_seed(seed)))

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return self.plan.cost(y, _TORCH).squeeze(1)

    def expressions(self, y: Any, x: Any, m: Any) -> tuple[Any, Any]:
        return self.plan.cost(y, m), self.plan.rows(y, x, m)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        low, high = self.low.to(generator.device), self.high.to(generator.device)
        found = low.new_empty(0, 3)
        while len(found) < count:  # some starts are in the ellipse, or close to it
            more = uniform(count, low, high, generator)
            found = torch.cat([found, more[clearance(more) > self.margin]])
        return found[:count]

    def network(self, build: Callable[[int, int], nn.Module], inputs: int, outputs: int) -> nn.Module:
        """Of controls, which are driven; as it is for methods that predict something else than plans."""
        count, rest = divmod(outputs, self.size)
        if rest:
            return build(inputs, outputs)
        sides = (1.0, -1.0, 0.0)[:count]
        first = torch.stack([steered(self.horizon, side) for side in sides]) if 1 < count == len(sides) else None
        return Shooting(build(inputs, 2 * self.horizon * count), (self.low, self.high), first)

    def paths(self, y: Tensor, x: Tensor) -> Tensor:
        """(B, horizon + 1, 3) the states of plans, the first among them."""
        return torch.cat([x.unsqueeze(1), y[:, : 3 * self.horizon].unflatten(1, (self.horizon, 3))], 1)

    def trajectory(self, model: Model, x: Tensor) -> Tensor:
        """(B, horizon + 1, 3) the states of a model's plans."""
        return self.paths(model.solve(x).value, x)

    @torch.no_grad()
    def drive(self, plan: Callable[[Tensor], Tensor], x: Tensor, steps: int | None = None) -> Drive:
        """In closed loop: take the first control of a plan, go on for a step of time, and plan again.

        Args:
            plan: from states (B, 3) to plans (B, n): `lambda x: model.solve(x).value`, or those of a solver.
            x: (B, 3) the first states.
            steps: how many; as many as the horizon unless given.
        """
        states, controls = [x], []
        first = slice(3 * self.horizon, 3 * self.horizon + 2)
        for _ in range(self.horizon if steps is None else steps):
            controls.append(plan(states[-1])[:, first])
            states.append(moved(states[-1], controls[-1]))
        path, used = torch.stack(states, 1), torch.stack(controls, 1)
        whole = torch.cat([path[:, 1:].flatten(1), used.flatten(1)], 1)
        cost = Unicycle(len(controls)).cost(whole, _TORCH).squeeze(1)
        return Drive(path, used, cost, clearance(path).amin(1))

    @property
    def obstacles(self) -> Tensor:
        """(1, 4) centre and semi-axes of the ellipse."""
        return self.low.new_tensor([[0.0, 0.0, *(axis**-0.5 for axis in ELLIPSE)]])

    @property
    def typical(self) -> Tensor:
        """(n,) a way over the ellipse from (-3, 0) to the goal, with its controls; not quite in the set."""
        return arc(self.horizon).to(self.low)

    @property
    def partial(self) -> Tensor:
        """The controls: states follow from them."""
        return torch.arange(3 * self.horizon, 5 * self.horizon, device=self.low.device)

    @property
    def guesses(self) -> Tensor:
        """(3, n) above the ellipse, below it, and straight through it."""
        return torch.stack([arc(self.horizon, side) for side in (1.0, -1.0, 0.0)]).to(self.low)


def clearance(state: Tensor) -> Tensor:
    """(...,) how far states (..., 3), or points (..., 2), are off the ellipse, in the value of its function."""
    return ELLIPSE[0] * state[..., 0].square() + ELLIPSE[1] * state[..., 1].square() - 1


def arc(horizon: int, side: float = 1.0) -> Tensor:
    """(n,) a plan past the ellipse: above it for a `side` of 1, below for -1, straight through it for 0."""
    path, change, angle = _way(horizon, side)
    states = torch.cat([path[1:], torch.cat([angle[1:], angle[-1:]]).unsqueeze(1)], 1)
    turn = torch.cat([angle.diff() / STEP, angle.new_zeros(1)]).clamp(_LIMITS[0][1], _LIMITS[1][1])
    return torch.cat([states.flatten(), torch.stack([change.norm(dim=1) / STEP, turn], 1).flatten()])


def steered(horizon: int, side: float = 1.0) -> Tensor:
    """(horizon, 2) the controls of a vehicle that heads for the goal at first and is steered along `arc`."""
    _, change, angle = _way(horizon, side)
    turns, heading = [], 0.0
    for wanted in [*angle[1:].tolist(), 0.0]:
        turns.append(min(max((wanted - heading) / STEP, _LIMITS[0][1]), _LIMITS[1][1]))
        heading += STEP * turns[-1]
    return torch.stack([change.norm(dim=1) / STEP, torch.tensor(turns, dtype=torch.float64)], 1)


def _way(horizon: int, side: float) -> tuple[Tensor, Tensor, Tensor]:
    """(horizon + 1, 2) points from (-3, 0) to the goal, the steps between them, and their (horizon,) angles."""
    share = torch.linspace(0, 1, horizon + 1, dtype=torch.float64)
    share = (share * max(1.0, horizon * STEP / 5)).clamp(max=1.0)  # 5 s on the way, then at rest
    path = torch.stack([-3 + 6.5 * share, 1.6 * side * (math.pi * share).sin()], 1)
    change = path.diff(dim=0)
    angle = torch.atan2(change[:, 1], change[:, 0])
    return path, change, torch.where(change.norm(dim=1) > 0, angle, 0.0)
