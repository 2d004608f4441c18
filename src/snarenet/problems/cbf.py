r"""CBF: a unicycle drives to the origin past three ellipses, made safe by control barrier functions.

The state is (px, py, θ, v, ω), the control u = (dv/dt, dω/dt) is a nominal controller plus the network's correction y,
and the point $q = p + l (\cos θ, \sin θ)$ ahead of the robot must stay out of every ellipse,
$e(q) = \|(q - c) / r\|^2 - 1 \ge 0$. That holds for all time if $h = \dot e + κ e$ starts and stays non-negative, which
$\dot h + α h \ge 0$ ensures. With $\ddot e$ linear in the control, this is one row per ellipse,

$$ -\frac{\partial \ddot e}{\partial u}\, y \;\le\; \ddot e(u_{nom}) + (κ + α)\, \dot e + κ α\, e. $$

The data, the cost and the integrator are the paper's, so that results can be compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from snarenet.constraints import Linear
from snarenet.layers import SnareLayer
from snarenet.model import ConstrainedModel
from snarenet.problems.base import Model, Outcome, Problem, check_sizes, uniform

_OBSTACLES = ((-5.0, 5.0, 2.0, 1.41), (-1.0, 3.0, 0.25, 1.41), (-9.0, 2.0, 1.0, 1.0))  # centre, radii
_CORNERS = {1: (-5.5, -5.0, 7.5, 8.0), 2: (-8.5, -8.0, 5.5, 6.0)}  # lowest and highest px, then py
_SEEDS = {1: 8, 2: 9}
_LEAD = 0.1  # l: how far the guarded point is ahead of the robot
_KAPPA, _ALPHA = 10.0, 20.0
_BRISK = 100.0  # a control larger than this takes shorter steps in time
_LARGEST = 1e5  # a control larger than this (a thousand short steps for a dt), or NaN, ends its trajectory
_ENOUGH = 20_000.0  # a trajectory's loss grows no further, so that a few bad ones do not rule a batch
_PENALTY = 10.0  # weight of the penalty in that loss, the paper's
_TERMINAL = 1000.0


def encode(state: Tensor) -> Tensor:
    """(B, 6) what the network sees, (px, py, cos θ, sin θ, v, ω), of states (B, 5)."""
    angle = state[:, 2:3]
    return torch.cat([state[:, :2], angle.cos(), angle.sin(), state[:, 3:]], 1)


def decode(x: Tensor) -> Tensor:
    """(B, 5) the states of encoded ones."""
    return torch.cat([x[:, :2], torch.atan2(x[:, 3:4], x[:, 2:3]), x[:, 4:]], 1)


def nominal_control(x: Tensor) -> Tensor:
    """(B, 2) the control that drives to the origin and knows nothing of obstacles."""
    p, heading = x[:, :2], x[:, 2:4]
    distance = p.norm(dim=1)
    turn = 10 * (p[:, 0] * heading[:, 1] - p[:, 1] * heading[:, 0]) / (distance + 1e-5)
    speed = (-10 * distance * (p * heading).sum(1)).clamp(-5, 5)
    return 5 * (torch.stack([speed, turn], 1) - x[:, 4:])


def _turned(vector: Tensor) -> Tensor:
    """Vectors (B, 2) turned left by a right angle."""
    return torch.stack([-vector[:, 1], vector[:, 0]], 1)


class Barriers(Linear):
    """The rows of the module's formula, one per ellipse: A(x) y <= upper(x) for encoded states x.

    Args:
        obstacles: (K, 4) centre and radii of the ellipses.
    """

    obstacles: Tensor

    def __init__(self, obstacles: Tensor) -> None:
        free = torch.full((len(obstacles),), -torch.inf, dtype=torch.float64)  # says how many rows there are
        super().__init__(self.matrix, lower=free, upper=self.upper)
        self.size = 2
        self.register_buffer("obstacles", obstacles)

    def clearance(self, point: Tensor) -> Tensor:
        """(..., K) e at points (..., 2): negative inside an ellipse."""
        return ((point.unsqueeze(-2) - self.obstacles[:, :2]) / self.obstacles[:, 2:]).square().sum(-1) - 1

    def matrix(self, x: Tensor) -> Tensor:
        """(B, K, 2) minus the derivative of e's second time derivative in the control."""
        x = x.to(self.obstacles.dtype)
        return -self._slope(x) @ self._frame(x)

    def upper(self, x: Tensor) -> Tensor:
        """(B, K) what the rows may reach."""
        x = x.to(self.obstacles.dtype)
        slope, frame = self._slope(x), self._frame(x)
        velocity = (frame @ x[:, 4:, None]).squeeze(2)  # of q
        acceleration = (frame @ nominal_control(x).unsqueeze(2)).squeeze(2) + x[:, 5:] * _turned(velocity)
        rate = (slope @ velocity.unsqueeze(2)).squeeze(2)
        bend = 2 * (velocity.unsqueeze(1) / self.obstacles[:, 2:]).square().sum(2)
        second = bend + (slope @ acceleration.unsqueeze(2)).squeeze(2)
        return second + (_KAPPA + _ALPHA) * rate + _KAPPA * _ALPHA * self.clearance(ahead(x))

    def _slope(self, x: Tensor) -> Tensor:
        """(B, K, 2) the gradient of e at q."""
        centre, radius = self.obstacles[:, :2], self.obstacles[:, 2:]
        return 2 * (ahead(x).unsqueeze(1) - centre) / radius.square()

    def _frame(self, x: Tensor) -> Tensor:
        """(B, 2, 2) takes (v, ω) to the velocity of q, and the control to its share of the acceleration."""
        heading = x[:, 2:4]
        return torch.stack([heading, _LEAD * _turned(heading)], 2)


def ahead(x: Tensor) -> Tensor:
    """(B, 2) the guarded point q of encoded states."""
    return x[:, :2] + _LEAD * x[:, 2:4]


class CBF(Problem):
    """Safe driving from one of the paper's two boxes of initial states; y (B, 2) is a correction of the control.

    `inputs` are encoded initial states. `run` rolls a model out in time and integrates; `objective` is one instant.

    Args:
        box: where to start, 1 or 2.
        instances: how many initial states.
        horizon: the time to simulate, a whole number of `dt`.
        dt: the step in time; a control larger than 100 shortens it in proportion.
        seed: of the data; the paper's for the box unless given.
    """

    # a policy that starts as the nominal controller; with two variables few steps of the repair suffice
    recipe: ClassVar[Mapping[str, Any]] = {
        "epochs": 30,
        "batch": 100,
        "width": 200,
        "head": 0.01,
        "optimizer": "adamw",
        "lr": 3e-3,
        "weight_decay": 0.0,
        "penalty": 10.0,
        "start": "none",
        "damping_ratio": 0.3,
    }

    low: Tensor
    high: Tensor

    def __init__(
        self, box: int = 1, instances: int = 1000, horizon: float = 1.0, dt: float = 0.02, seed: int | None = None
    ) -> None:
        super().__init__()
        if box not in _CORNERS:
            raise ValueError(f"`box` must be 1 or 2, but got {box!r}")
        check_sizes(instances=instances)
        check_sizes(0, seed=0 if seed is None else seed)
        if not (0 < dt <= horizon < math.inf) or not math.isclose(round(horizon / dt) * dt, horizon):
            raise ValueError(f"`horizon` must be a whole number of `dt` > 0, but got {horizon!r} and dt={dt!r}")
        self.size, self.dt, self.intervals = 2, dt, round(horizon / dt)
        left, right, bottom, top = _CORNERS[box]
        low = np.array([left, bottom, -np.pi / 4, 0, 0])
        high = np.array([right, top, -np.pi / 8, 0, 0])
        share = np.random.RandomState(_SEEDS[box] if seed is None else seed).random_sample((instances, 5))
        self.register_buffer("inputs", encode(torch.from_numpy(share * low + (1 - share) * high)))
        self.register_buffer("low", torch.from_numpy(low))
        self.register_buffer("high", torch.from_numpy(high))
        self.constraints = Barriers(torch.tensor(_OBSTACLES, dtype=torch.float64))

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        """The cost of one instant: 100 |p|^2 + 0.1 (v^2 + ω^2 + |u|^2); `run` integrates it over time."""
        control = nominal_control(x) + y
        return 100 * x[:, :2].square().sum(1) + 0.1 * (x[:, 4:].square().sum(1) + control.square().sum(1))

    def run(self, model: Model, x: Tensor, relax: float | Tensor | None = None) -> Outcome:
        """What `model` achieves from the encoded initial states x, in closed loop.

        Objective, penalty, distance and errors are integrals over time; `cost` adds 1000 |p|^2 at the end. Cost,
        penalty and distance stop growing once the cost so far plus 10 times the penalty reaches 20,000. The violation
        and the steps are the largest at any time. A trajectory whose control is NaN, infinite or absurdly large ends
        there: its objective and violation are infinite, and it has not converged.
        """
        return self._roll(model, x, relax)[-1].outcome()

    @torch.no_grad()
    def trajectory(self, model: Model, x: Tensor) -> Tensor:
        """(B, K+1, 5) states at the times 0, dt, ..., K dt = horizon; a trajectory that ended early stays put."""
        return torch.stack([moment.state for moment in self._roll(model, x, None)], 1)

    def collisions(self, trajectory: Tensor) -> Tensor:
        """(B,) true where the robot's centre or the point ahead of it is inside an ellipse at a time of the grid."""
        centre, angle = trajectory[..., :2], trajectory[..., 2:3]
        point = centre + _LEAD * torch.cat([angle.cos(), angle.sin()], -1)
        barriers = self.constraints
        assert isinstance(barriers, Barriers)
        return torch.minimum(barriers.clearance(centre), barriers.clearance(point)).lt(0).flatten(1).any(1)

    def nominal(self) -> ConstrainedModel:
        """The nominal controller as a model: its correction is zero, whatever the constraints say."""
        layer = SnareLayer(self.constraints, start=None, max_steps=0, rescue=False, on_failure="ignore")
        return ConstrainedModel(_Zero(), layer)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return encode(uniform(count, self.low, self.high, generator))

    def _roll(self, model: Model, x: Tensor, relax: float | Tensor | None) -> list[_Moment]:
        """The batch at every time of the grid."""
        moments = [_Moment.start(decode(x), self.constraints.known_rows())]
        for _ in range(self.intervals):
            moments.append(self._advance(model, moments[-1], relax))
        return moments

    def _advance(self, model: Model, now: _Moment, relax: float | Tensor | None) -> _Moment:
        """One dt, in as many steps as each sample needs; only those that need more take more."""
        now = now._replace(left=self.dt * now.sound.to(now.state.dtype))
        nothing = 1e-9 * self.dt  # what rounding leaves of a dt
        while len(late := (now.left > nothing).nonzero().squeeze(1)):
            if len(late) == len(now.left):
                now = self._step(model, now, relax)
            else:
                some = relax[late] if isinstance(relax, Tensor) and relax.ndim == 2 else relax
                now = now.write(late, self._step(model, now.select(late), some))
        return now

    def _step(self, model: Model, now: _Moment, relax: float | Tensor | None) -> _Moment:
        """One step of Euler's method, and what it adds to the integrals."""
        x = encode(now.state)
        solution, nominal = model.solve(x, relax), nominal_control(x)
        sound = (nominal + solution.value).abs().amax(1) <= _LARGEST  # false for NaN
        y, raw = (torch.where(sound.unsqueeze(1), tensor, 0.0) for tensor in (solution.value, solution.raw))
        control = nominal + y
        time = torch.minimum(now.left, self.dt * _BRISK / control.abs().amax(1).clamp(min=_BRISK)) * sound
        stage, errors = self.objective(y, x), self.constraints.residual(y, x)
        trained = torch.stack([stage, errors.square().sum(1), (y - raw).square().sum(1)], 1)
        counts = now.trained[:, 0] + _PENALTY * now.trained[:, 1] < _ENOUGH
        motion = torch.cat([x[:, 4:5] * x[:, 2:4], x[:, 5:], control], 1)
        worst = torch.where(sound, errors.detach().amax(1), math.inf)
        return _Moment(
            state=now.state + time.unsqueeze(1) * motion,
            left=torch.where(sound, now.left - time, 0.0),
            sound=sound,
            objective=now.objective + time * stage,
            trained=now.trained + (time * counts).unsqueeze(1) * trained,
            errors=now.errors + time.detach().unsqueeze(1) * errors,
            violation=torch.maximum(now.violation, worst),
            steps=torch.maximum(now.steps, solution.steps),
            converged=now.converged & solution.converged & sound,
        )


class _Moment(NamedTuple):
    """A batch at one time, and what came together until then.

    Attributes:
        state: (B, 5).
        left: (B,) time to the next grid point.
        sound: (B,) false where the trajectory has ended early.
        objective: (B,) integral of the stage cost.
        trained: (B, 3) integrals of stage cost, penalty and distance, frozen for trajectories that cost enough.
        errors: (B, K) integral of every row's violation.
        violation: (B,) the largest so far.
        steps: (B,) most steps of a repair so far.
        converged: (B,) true while all repairs were.
    """

    state: Tensor
    left: Tensor
    sound: Tensor
    objective: Tensor
    trained: Tensor
    errors: Tensor
    violation: Tensor
    steps: Tensor
    converged: Tensor

    @staticmethod
    def start(state: Tensor, rows: int) -> _Moment:
        """The batch at time 0."""
        zero, true = state.new_zeros(len(state)), torch.ones(len(state), dtype=torch.bool, device=state.device)
        sums = zero, state.new_zeros(len(state), 3), state.new_zeros(len(state), rows)
        return _Moment(state, zero, true, *sums, violation=zero, steps=zero.long(), converged=true)

    def select(self, samples: Tensor) -> _Moment:
        """Some of the samples."""
        return _Moment(*(tensor[samples] for tensor in self))

    def write(self, samples: Tensor, part: _Moment) -> _Moment:
        """This batch with some of its samples replaced."""
        return _Moment(*(old.index_copy(0, samples, new) for old, new in zip(self, part, strict=True)))

    def outcome(self) -> Outcome:
        """What is reported of a whole rollout."""
        stage, penalty, distance = self.trained.unbind(1)
        return Outcome(
            objective=torch.where(self.sound, self.objective, math.inf),
            cost=stage + _TERMINAL * self.state[:, :2].square().sum(1),
            penalty=penalty,
            distance=distance,
            errors=self.errors,
            violation=self.violation,
            steps=self.steps,
            converged=self.converged,
        )


class _Zero(nn.Module):
    """Predicts no correction."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 2)
