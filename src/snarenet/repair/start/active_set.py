r"""`project`: the nearest point of a set whose rows have diagonal Hessians, by a primal-dual active-set method.

$$ \min_z \tfrac12 \| z - y \|_W^2 \;\text{ so that }\; l \le g(z) \le u, \qquad
   W (z - y) + J(z)^\top \mu = 0. $$

A row counts as active if it is an equality, or if its multiplier and its value together say so: above where
$\mu_i + c_i (g_i - u_i) > 0$, below where $\mu_i + c_i (g_i - l_i) < 0$, with $c_i$ one over the squared length of the
row at y. With the active rows held at their bounds and all other multipliers at zero, one step of Newton's method is

$$ (J D^{-1} J^\top)\, d\mu = r - J D^{-1} s, \quad dz = -D^{-1} (s + J^\top d\mu), \quad
   s = W (z - y) + J^\top \mu, \quad D = W + \sum_i \mu_i \nabla^2 g_i(z), $$

D being a diagonal. Far away, where active rows come and go, a share of its diagonal is added to the system: first a
large one that vanishes within a few steps, then, for those who did not settle, from the start with one that stays for a
while. From predictions near the set that takes about ten steps to all digits. Where it has not settled after the number
allowed, the prediction stays as it is, and the set is the repair's to reach.

The gradient is that of one more step: at a fixed point of Newton's method its derivative in y, in the bounds and in
every tensor inside g, with z, mu and the factor held fixed, is that of the projection itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain, islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance, largest, residual
from snarenet.constraints.maps import times, transposed_times
from snarenet.linalg import add_to_diagonal, cholesky_ex, places_of, rows_at, triangular_solve
from snarenet.tracing import tracing

FLAT = 0.1  # D is at least this share of W, where Hessians are negative
_LEAST = 1e-13  # share of its diagonal that is always added to the system: active rows may depend on each other
# the shares step by step; where one is larger than the one before, the search begins anew
_SHARES = (
    *(1.0, 0.1, 0.01, 1e-3, 1e-4, *[_LEAST] * 7),
    *(*[0.1] * 8, *[_LEAST] * 6),
    *(*[1.0] * 4, *[0.3] * 8, *[0.03] * 3, *[_LEAST] * 6),
)


class Task(NamedTuple):
    """What is projected onto what."""

    instance: Instance
    y: Tensor
    weights: Tensor  # (n,)
    reach: Tensor  # (B, rows) one over the squared length of each row at y

    def select(self, index: Tensor) -> Task:
        """Some of the samples."""
        return Task(self.instance.select(index), self.y[index], self.weights, self.reach[index])


Search = Callable[[Task, tuple[float, ...]], tuple[Tensor, Tensor, Tensor]]


class _Newton(NamedTuple):
    """One step of the method."""

    z: Tensor  # (B, n) where it leads
    multipliers: Tensor  # (B, rows)
    sound: Tensor  # (B,) false where the system had no factor


def project(
    instance: Instance, y: Tensor, iterations: int, weights: Tensor | None, search: Search, strict: bool = False
) -> Tensor:
    """The nearest points (B, n) to y, y itself where they were not found; differentiable in y, bounds and data.

    Args:
        instance: the constraints.
        y: (B, n) the predictions.
        iterations: of the search.
        weights: (n,) those of the squared distance; all 1 if None.
        search: the one below, or another that finds the same.
        strict: count as found only where D is what it says, and not the floor that negative Hessians meet: there the
            point may be a saddle, and the gradient is not exact.
    """
    metric = y.new_ones(y.shape[1]) if weights is None else weights.to(y.dtype)
    with torch.no_grad():
        squares = (instance.map.jacobian(y).square() / metric).sum(-1).expand_as(instance.lower)
        reach = 1 / squares.clamp(min=torch.finfo(y.dtype).tiny)
        task = Task(instance._replace(map=instance.map.detached({})), y, metric, reach)
        z, multipliers, found = search(task, tuple(islice(chain(_SHARES, repeat(_LEAST)), iterations)))
        away = largest(residual(task.instance.map.value(z), instance.lower, instance.upper) * reach.sqrt())
        found = found & (away <= torch.finfo(y.dtype).eps ** 0.5 * (1 + largest(z)))  # an empty set has none
        if strict:
            found = found & (metric + task.instance.map.hessian_diagonal(multipliers) >= FLAT * metric).all(1)
        # of the others anything finite will do: their gradient is zero times that
        z, multipliers = (torch.where(found.unsqueeze(1), tensor, 0.0) for tensor in (z, multipliers))
    if torch.is_grad_enabled():
        z = _step(Task(instance, y, metric, reach), z, multipliers, _LEAST, refined=True).z
    return torch.where(found.unsqueeze(1), z, y)


def enough(y: Tensor) -> float:
    """A step that is smaller than this share of z was the last one."""
    return torch.finfo(y.dtype).eps ** (2 / 3)


def search(task: Task, shares: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(z, multipliers, found) after a step with each of the shares; samples that have settled rest."""
    y, traced, last, small = task.y, tracing(), math.inf, enough(task.y)
    z, multipliers = y, torch.zeros_like(task.reach)
    found = torch.zeros(y.shape[0], dtype=torch.bool, device=y.device)
    for share in shares:
        if share > last:
            z = torch.where(found.unsqueeze(1), z, y)
            multipliers = torch.where(found.unsqueeze(1), multipliers, 0.0)
        last = share
        # a compiled or recorded search cannot choose
        left = torch.arange(y.shape[0], device=y.device) if traced else (~found).nonzero().squeeze(1)
        if not left.shape[0]:
            break
        before = z[left]
        step = _step(task.select(left), before, multipliers[left], share)
        moves = (step.sound & ~found[left]).unsqueeze(1)
        z = z.index_copy(0, left, torch.where(moves, step.z, before))
        multipliers = multipliers.index_copy(0, left, torch.where(moves, step.multipliers, multipliers[left]))
        still = (step.z - before).abs().amax(1) <= small * (1 + before.abs().amax(1))
        found = found.index_copy(0, left, found[left] | (step.sound & still))
    return z, multipliers, found


def _step(task: Task, z: Tensor, multipliers: Tensor, share: float, refined: bool = False) -> _Newton:
    """One step from z; gradients flow to y, the bounds and the tensors of g, not through the system.

    One that is refined is that of the system without the share, to first order.
    """
    (map, lower, upper, _), y, weights, reach = task
    value = map.value(z)
    with torch.no_grad():
        J = map.jacobian(z).expand(z.shape[0], -1, -1)
        above = (lower == upper) | (multipliers + reach * (value - upper) > 0)
        active = above | (multipliers + reach * (value - lower) < 0)
        multipliers = torch.where(active, multipliers, 0.0)
        D = torch.maximum(weights + map.hessian_diagonal(multipliers), FLAT * weights)
        places = places_of(active, None)
        used = active if places is None else active.gather(1, places)
        J = torch.where(used.unsqueeze(2), J if places is None else rows_at(J, places), 0.0)
        lifted = J / D.unsqueeze(1)
        system = lifted @ J.mT
        shift = torch.where(used, share * system.diagonal(dim1=1, dim2=2), 1.0)
        factor, broken = cholesky_ex(add_to_diagonal(system, shift))
        factor = torch.where((broken == 0).view(-1, 1, 1), factor, 1.0)
    off = torch.where(above, value - upper, torch.where(active, value - lower, 0.0))
    slope = weights * (z - y) + map.vjp(z, multipliers)
    right = (off if places is None else off.gather(1, places)) - times(lifted, slope)
    right = torch.where(used, right, 0.0)
    change = triangular_solve(factor, right)
    if refined:  # a share of 1e-13 is 0.1 % of a gradient if the condition is 1e10
        change = change + triangular_solve(factor, right - times(lifted, transposed_times(J, change)))
    moved = z - (slope + transposed_times(J, change)) / D
    spread = change if places is None else torch.zeros_like(off).scatter(1, places, change)
    return _Newton(moved, multipliers + spread, broken == 0)
