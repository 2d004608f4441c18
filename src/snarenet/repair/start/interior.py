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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import largest
from snarenet.repair.start.rows import RowsAt, Solved, System
from snarenet.repair.start.task import Task

_ROOM = 0.1  # share of the room between two bounds that the start keeps from each, at most
_TAKEN = 0.99  # share of the way to a bound that a step takes at most
_LEAST, _MOST = 0.05, 0.8  # of the complementarity that the next step aims at
_FAR = 0.5  # length of a step in distances of the start: the nearest point is within two
_FREE = 0.9  # length of a step that bounds do not hinder
_MET = 0.8  # power of the last complementarity up to which rows must be met
_PRODUCTS = 3  # with the curvature, in a step


class Course(NamedTuple):
    """How a search goes about it.

    Attributes:
        inside: how far from its bounds everything starts, in typical moves.
        first: the first complementarity, in squared distances.
        last: the last one.
    """

    inside: float
    first: float
    last: float


QUICK = Course(0.03, 0.03, 1e-5)
CAREFUL = Course(
    0.3, 1.0, 1e-10
)  # where bounds that hardly matter, or rows that are nearly dependent, need more digits


class Point(NamedTuple):
    """Where a sample is: z (B, n) and the multipliers (B, m) of its rows."""

    z: Tensor
    multipliers: Tensor


class _State(NamedTuple):
    """Samples on their way; bounded quantities are the slacks of m rows, then the n variables.

    Attributes:
        samples: (b,) which they are.
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

    samples: Tensor
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


def share_of(dtype: torch.dtype) -> float:
    """The share of its diagonal that is added to the system of rows that hold exactly: they may be dependent."""
    return torch.finfo(dtype).eps ** 0.6


def approach(task: Task, start: Tensor, steps: int, course: Course) -> Point:
    """Nearly the nearest points, from points (B, n) of the set, after at most so many steps; anything may have failed.

    A sample leaves the batch when it is near enough, or no longer a number.
    """
    state = _begin(task, start, course)
    z, multipliers = start, torch.zeros_like(task.lower)
    for _ in range(steps):
        if not len(state.samples):
            break
        state, done = _step(task, state, course.last)
        rows = task.lower.shape[1]
        z = z.index_copy(0, state.samples, state.t[:, rows:])
        multipliers = multipliers.index_copy(0, state.samples, state.multipliers)
        if bool(done.any()):
            keep = (~done).nonzero().squeeze(1)
            task, state = task.select(keep), _State(*(tensor[keep] for tensor in state))
    return Point(z, multipliers)


def _begin(task: Task, start: Tensor, course: Course) -> _State:
    """Everybody inside their bounds."""
    n, unit = start.shape[1], task.distance(start).unsqueeze(1)
    lower, upper = torch.cat([task.lower, task.low], 1), torch.cat([task.upper, task.high], 1)
    pinned = lower == upper
    value, lengths = task.rows.value(start), task.at(start).lengths
    typical = (unit / n).sqrt() * torch.cat([lengths.sqrt(), task.weights.rsqrt().expand_as(start)], 1)
    room = torch.where((upper - lower).isfinite(), upper - lower, torch.inf)
    margin = torch.minimum(course.inside * typical, _ROOM * room)
    t = torch.minimum(torch.maximum(torch.cat([value, start], 1), lower + margin), upper - margin)
    t = torch.where(pinned, lower, t)
    lower, upper = torch.where(pinned, -torch.inf, lower), torch.where(pinned, torch.inf, upper)
    bounds = (lower.isfinite().sum(1) + upper.isfinite().sum(1)).clamp(1, n).unsqueeze(1)
    kappa = course.first * unit / bounds
    samples = torch.arange(len(start), device=start.device)
    alpha, beta = kappa / (t - lower), kappa / (upper - t)
    off = task.rows.value(t[:, -n:]) - t[:, :-n]
    return _State(samples, t, torch.zeros_like(off), alpha, beta, lower, upper, pinned, off, kappa, unit)


def _step(task: Task, state: _State, last: float) -> tuple[_State, Tensor]:
    """Everybody after one step, and (b,) who is done."""
    t, kappa, alpha, beta, pinned = state.t, state.kappa, state.alpha, state.beta, state.pinned
    over, under = t - state.lower, state.upper - t
    sigma, q = alpha / over + beta / under, kappa / under - kappa / over
    at = task.at(t[:, task.lower.shape[1] :])
    rows, (dz, multipliers, _) = task.rows.rows, _direction(task, at, state, sigma, q)
    multipliers = multipliers[:, :rows]
    moves = ~pinned[:, :rows] & (sigma[:, :rows] > 0)  # the slack of a row without bounds is nobody's business
    ds = torch.where(moves, (multipliers - q[:, :rows]) / sigma[:, :rows], 0.0)
    dt = torch.cat([ds, dz], 1)
    rise = kappa / over - alpha - alpha / over * dt, kappa / under - beta + beta / under * dt
    primal = _length(torch.maximum(-dt / over, dt / under))
    length = (task.weights * dz.square()).sum(1, keepdim=True).sqrt()
    primal = torch.minimum(primal, _FAR * state.unit.sqrt() / length.clamp(min=torch.finfo(dz.dtype).tiny))
    dual = _length(torch.maximum(*(torch.where(v > 0, -d / v, 0.0) for v, d in zip((alpha, beta), rise, strict=True))))
    t, alpha, beta = t + primal * dt, alpha + dual * rise[0], beta + dual * rise[1]
    pairs = (alpha, t - state.lower), (beta, state.upper - t)
    products = [torch.where(v > 0, v * gap, 0.0).sum(1, keepdim=True) for v, gap in pairs]
    left = products[0] + products[1]
    count = ((alpha > 0).sum(1) + (beta > 0).sum(1)).clamp(min=1).unsqueeze(1)
    aim = (1 - torch.minimum(primal, dual)).square().clamp(_LEAST, _MOST)
    moved = state.multipliers + primal * (multipliers - state.multipliers)
    off = task.rows.value(t[:, rows:]) - t[:, :rows]
    state = state._replace(t=t, multipliers=moved, alpha=alpha, beta=beta, off=off, kappa=aim * left / count)
    met = largest(torch.where(sigma[:, :rows] > 0, off, 0.0) / at.lengths.sqrt()).unsqueeze(1)
    near = (left <= last * state.unit) & (met <= last**_MET * state.unit.sqrt()) & (primal > _FREE)
    return state, near.squeeze(1) | ~(t.isfinite().all(1) & moved.isfinite().all(1))


def _direction(task: Task, at: RowsAt, state: _State, sigma: Tensor, q: Tensor) -> Solved:
    """dz and the new multipliers."""
    rows = task.lower.shape[1]
    z, pinned, old = at.z, state.pinned, state.multipliers
    share, most = share_of(z.dtype) * at.lengths, at.lengths / torch.finfo(z.dtype).eps ** 2
    active = pinned[:, :rows] | (sigma[:, :rows] > 0)
    damping = torch.where(pinned[:, :rows], share, torch.minimum(1 / sigma[:, :rows], most))
    saddle = at.saddle(System(task.weights + sigma[:, rows:], pinned[:, rows:], damping, active, old), exact=False)
    slope = task.weights * (z - task.y) + q[:, rows:]
    # where a row holds exactly the share acts on the change of its multiplier, and moves the solution nowhere
    shift = damping * torch.where(pinned[:, :rows], old, q[:, :rows])
    flat = saddle.move(-saddle.inverse * slope, torch.where(active, state.off + shift, 0.0))
    return saddle.bent(flat, _PRODUCTS, torch.finfo(z.dtype).eps ** 0.75)


def _length(share: Tensor) -> Tensor:
    """(b, 1) the longest step, up to 1, that uses no more than most of the room, of which a whole one uses `share`."""
    return 1 / (share.amax(1, keepdim=True) / _TAKEN).clamp(min=1)
