r"""`approach`: from a point of the set nearly to the nearest one, by primal-dual interior-point steps.

With slacks s for the rows and t = (s, z) for all that is bounded, $a \le t \le b$,

$$ \min_{z, s} \tfrac12 \| z - y \|_W^2 - \kappa \sum_i \log (t_i - a_i) - \kappa \sum_i \log (b_i - t_i)
   \quad\text{so that}\quad g(z) = s, \qquad \kappa \to 0. $$

Multipliers of the bounds, $\alpha_i (t_i - a_i) = \beta_i (b_i - t_i) = \kappa$, turn into a metric: with
$\Sigma = \alpha / (t - a) + \beta / (b - t)$ and $q = \kappa / (b - t) - \kappa / (t - a)$, a step solves

$$ \begin{pmatrix} W + \Sigma_z + B & J^\top \\ J & -\Sigma_s^{-1} \end{pmatrix}
   \begin{pmatrix} dz \\ \mu^+ \end{pmatrix} =
   \begin{pmatrix} -W (z - y) - q_z \\ s - g - \Sigma_s^{-1} q_s \end{pmatrix}, \qquad
   ds = \Sigma_s^{-1} (\mu^+ - q_s), $$

one system of a repair's kind, all rows in it. No row comes or goes, so nothing cycles. It starts at a point of the set,
moved inside by a share of its distance from y; numbers are in units of that distance. Some five steps leave 1e-5 of
it, and then it is known which rows and variables end at a bound.

Onto a convex set it may start anywhere, and a step has two solves with one factor (Mehrotra): the first aims at
$\kappa = 0$ and says how far the second may, which allows for the products of changes that the first has left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import largest, residual
from snarenet.repair.start.rows import RowsAt, System
from snarenet.repair.start.task import Task

_ROOM = 0.1  # share of the room between two bounds that the start keeps from each, at most
_TAKEN = 0.99  # share of the way to a bound that a step takes at most
_LEAST, _MOST = 0.05, 0.8  # of the complementarity that the next step aims at
_FAR = 0.5  # length of a step in distances of the start: the nearest point is within two
_FREE = 0.9  # length of a step that bounds do not hinder
_DIGITS = 1e-8  # share of a squared distance as complementarity, from which on a system needs all of its digits
_MET = 0.8  # power of the last complementarity up to which rows must be met
_PRODUCTS = 3  # with the curvature, in a step


class Course(NamedTuple):
    """How a search goes about it.

    Attributes:
        inside: how far from its bounds everything starts, in typical moves.
        first: the first complementarity, in squared distances.
        last: the last one, and those after it for whom that was too early: bounds may hardly matter.
        straight: for convex sets: steps of any length, with a second solve.
    """

    inside: float
    first: float
    last: tuple[float, ...]
    straight: bool = False


QUICK, CAREFUL = Course(0.03, 0.03, (1e-5,)), Course(0.3, 1.0, (1e-10, 1e-13))
STRAIGHT = Course(1.0, 1.0, (1e-5, 1e-13), straight=True)


class Point(NamedTuple):
    """Where a sample is: z (B, n) and the multipliers (B, m) of its rows."""

    z: Tensor
    multipliers: Tensor


class State(NamedTuple):
    """Samples on their way; bounded quantities are the slacks of m rows, then the n variables.

    Attributes:
        t: (b, m + n) where they are.
        multipliers: (b, m) of the rows.
        alpha: (b, m + n) of lower bounds, 0 where there is none.
        beta: (b, m + n) of upper bounds.
        lower: (b, m + n), with -inf where the two bounds are equal: such slacks and variables do not move.
        upper: (b, m + n), likewise.
        pinned: (b, m + n) true for these.
        off: (b, m) g(z) - s.
        kappa: (b, 1) the complementarity that the next step aims at.
        unit: (b, 1) the squared distance from y at the start.
    """

    t: Tensor
    multipliers: Tensor
    alpha: Tensor
    beta: Tensor
    lower: Tensor
    upper: Tensor
    pinned: Tensor
    off: Tensor
    kappa: Tensor
    unit: Tensor

    @property
    def point(self) -> Point:
        """Where they are, without slacks."""
        return Point(self.t[:, self.off.shape[1] :], self.multipliers)

    @property
    def left(self) -> Tensor:
        """(b, 1) the complementarity that is left: the sum of all multipliers times distances from bounds."""
        pairs = (self.alpha, self.t - self.lower), (self.beta, self.upper - self.t)
        low, high = (torch.where(v > 0, v * gap, 0.0).sum(1, keepdim=True) for v, gap in pairs)
        return low + high

    @property
    def finite(self) -> Tensor:
        """(b,) are they numbers?"""
        return self.t.isfinite().all(1) & self.multipliers.isfinite().all(1)

    def select(self, index: Tensor) -> State:
        """Some of the samples."""
        return State(*(tensor[index] for tensor in self))

    def put(self, index: Tensor, others: State) -> State:
        """The same with these samples in their places."""
        return State(*(old.index_copy(0, index, new) for old, new in zip(self, others, strict=True)))


def share_of(dtype: torch.dtype) -> float:
    """The share of its diagonal that is added to the system of rows that hold exactly: they may be dependent."""
    return torch.finfo(dtype).eps ** 0.6


def approach(task: Task, state: State, steps: int, last: float, straight: bool) -> State:
    """Nearly the nearest points, after at most so many steps; anything may have failed.

    A sample leaves the batch when it is near enough, or before it is no longer a number.
    """
    left, now = torch.arange(len(state.t), device=state.t.device), state
    for _ in range(steps):
        if not len(left):
            return state
        then, (now, done) = now, step(task, now, last, straight)
        if bool(done.any()):
            lost = (~now.finite).nonzero().squeeze(1)
            now = now.put(lost, then.select(lost))
            leave, keep = done.nonzero().squeeze(1), (~done).nonzero().squeeze(1)
            state = state.put(left[leave], now.select(leave))
            left, task, now = left[keep], task.select(keep), now.select(keep)
    return state.put(left, now)


def begin(task: Task, start: Tensor, course: Course) -> State:
    """Everybody inside their bounds, from (B, n) points of the set, or anywhere if it is convex."""
    n, at, value = start.shape[1], task.at(start), task.rows.value(start)
    off = residual(value, task.lower, task.upper)
    unit = (task.distance(start) + (off.square() / at.lengths).sum(1)).unsqueeze(1)
    lower, upper = torch.cat([task.lower, task.low], 1), torch.cat([task.upper, task.high], 1)
    pinned = lower == upper
    typical = (unit / n).sqrt() * torch.cat([at.lengths.sqrt(), task.weights.rsqrt().expand_as(start)], 1)
    room = torch.where((upper - lower).isfinite(), upper - lower, torch.inf)
    margin = torch.minimum(course.inside * typical, _ROOM * room)
    t = torch.minimum(torch.maximum(torch.cat([value, start], 1), lower + margin), upper - margin)
    t = torch.where(pinned, lower, t)
    lower, upper = torch.where(pinned, -torch.inf, lower), torch.where(pinned, torch.inf, upper)
    bounds = (lower.isfinite().sum(1) + upper.isfinite().sum(1)).clamp(1, n).unsqueeze(1)
    kappa = course.first * unit / bounds
    alpha, beta = kappa / (t - lower), kappa / (upper - t)
    off = task.rows.value(t[:, -n:]) - t[:, :-n]
    return State(t, torch.zeros_like(off), alpha, beta, lower, upper, pinned, off, kappa, unit)


class _Step(NamedTuple):
    """What t and the multipliers of lower and of upper bounds change by, and what those of the rows become."""

    dt: Tensor
    multipliers: Tensor
    rise: tuple[Tensor, Tensor]


def step(task: Task, state: State, last: float, straight: bool) -> tuple[State, Tensor]:
    """Everybody after one step, and (b,) who is done."""
    rows, at = task.rows.rows, task.at(state.point.z)
    system = _System(task, at, state, exact=straight and last < _DIGITS)
    step = _corrected(system) if straight else system.aim(state.kappa, state.kappa)
    primal, dual = _lengths(state, step)
    if straight:
        primal = dual = torch.minimum(primal, dual)
    else:
        length = (task.weights * step.dt[:, rows:].square()).sum(1, keepdim=True).sqrt()
        primal = torch.minimum(primal, _FAR * state.unit.sqrt() / length.clamp(min=torch.finfo(length.dtype).tiny))
    state = _moved(state, step, primal, dual)
    off, left = task.rows.value(state.point.z) - state.t[:, :rows], state.left
    aim = (1 - torch.minimum(primal, dual)).square().clamp(_LEAST, _MOST)
    met = largest(torch.where(system.sigma[:, :rows] > 0, off, 0.0) / at.lengths.sqrt()).unsqueeze(1)
    near = (left <= last * state.unit) & (met <= last**_MET * state.unit.sqrt()) & (primal > _FREE)
    state = state._replace(off=off, kappa=aim * left / _count(state))
    return state, near.squeeze(1) | ~state.finite


def _corrected(system: _System) -> _Step:
    """A step of Mehrotra's: what one to the bounds would leave of the complementarity says what to aim at."""
    state, ahead = system.state, system.aim(0.0, 0.0)
    far = torch.minimum(*_lengths(state, ahead))
    kappa = _moved(state, ahead, far, far).left.square() / (state.left * _count(state))
    return system.aim(kappa - ahead.dt * ahead.rise[0], kappa + ahead.dt * ahead.rise[1])


def _moved(state: State, step: _Step, primal: Tensor, dual: Tensor) -> State:
    """After steps of these lengths (b, 1); `off` and `kappa` are as before."""
    alpha, beta = state.alpha + dual * step.rise[0], state.beta + dual * step.rise[1]
    multipliers = state.multipliers + primal * (step.multipliers - state.multipliers)
    return state._replace(t=state.t + primal * step.dt, multipliers=multipliers, alpha=alpha, beta=beta)


class _System:
    """The system of a step, factored once."""

    def __init__(self, task: Task, at: RowsAt, state: State, exact: bool) -> None:
        self.task, self.at, self.state, rows = task, at, state, task.rows.rows
        self.over, self.under = state.t - state.lower, state.upper - state.t
        self.sigma = state.alpha / self.over + state.beta / self.under
        pinned, slack = state.pinned[:, :rows], self.sigma[:, :rows]
        share, most = share_of(at.z.dtype) * at.lengths, at.lengths / torch.finfo(at.z.dtype).eps ** 2
        self.active = pinned | (slack > 0)
        self.damping = torch.where(pinned, share, torch.minimum(1 / slack, most))
        metric, held = task.weights + self.sigma[:, rows:], state.pinned[:, rows:]
        self.saddle = at.saddle(System(metric, held, self.damping, self.active, state.multipliers), exact)

    def aim(self, low: float | Tensor, high: float | Tensor) -> _Step:
        """The step to products of these sizes with lower and with upper bounds."""
        state, over, under, rows = self.state, self.over, self.under, self.task.rows.rows
        pinned, old, slack = state.pinned[:, :rows], state.multipliers, self.sigma[:, :rows]
        low, high = low / over, high / under
        q = high - low
        slope = self.task.weights * (self.at.z - self.task.y) + q[:, rows:]
        # where a row holds exactly the share acts on the change of its multiplier, and moves the solution nowhere
        shift = self.damping * torch.where(pinned, old, q[:, :rows])
        flat = self.saddle.move(-self.saddle.inverse * slope, torch.where(self.active, state.off + shift, 0.0))
        dz, multipliers, _ = self.saddle.bent(flat, _PRODUCTS, torch.finfo(slope.dtype).eps ** 0.75)
        multipliers = multipliers[:, :rows]
        moves = ~pinned & (slack > 0)  # the slack of a row without bounds is nobody's business
        dt = torch.cat([torch.where(moves, (multipliers - q[:, :rows]) / slack, 0.0), dz], 1)
        rise = low - state.alpha - state.alpha / over * dt, high - state.beta + state.beta / under * dt
        return _Step(dt, multipliers, rise)


def _lengths(state: State, step: _Step) -> tuple[Tensor, Tensor]:
    """(b, 1) the longest steps, up to 1, that use no more than most of the room, of t and of its multipliers."""
    room = torch.maximum(-step.dt / (state.t - state.lower), step.dt / (state.upper - state.t))
    pairs = zip((state.alpha, state.beta), step.rise, strict=True)
    force = torch.maximum(*(torch.where(v > 0, -d / v, 0.0) for v, d in pairs))
    primal, dual = (1 / (share.amax(1, keepdim=True) / _TAKEN).clamp(min=1) for share in (room, force))
    return primal, dual


def _count(state: State) -> Tensor:
    """(b, 1) how many bounds there are."""
    return ((state.alpha > 0).sum(1) + (state.beta > 0).sum(1)).clamp(min=1).unsqueeze(1)
