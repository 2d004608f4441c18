r"""`descend`: from points of a set to local optima of an objective on it, for a batch, by interior-point steps.

$$ \min_z f(z) \;\text{ so that }\; l \le g(z) \le u. $$

A projection's step (`repair/start/interior.py`) solves with the force $W (z - y)$ and the metric W. With
$y = z - W^{-1} \nabla f(z)$ the force is the gradient of f, and with

$$ W = H + \delta_k \operatorname{diag}\bigl( \|\nabla f \circ v\| / v_j^2 \bigr) $$

it is a step of an interior-point method for f: H is a diagonal that the Hessian does not exceed, v the units in which
variables move, and the second term, whose share $\delta_k$ falls from step to step, keeps a step about as long as
$1 / \delta_k$ units where f is flat and the set curved, as Levenberg and Marquardt do. The curvature of the rows counts
by its products, as there. 80 steps leave relative gaps below 1e-5 on a grid of 14 buses (tests/optimum).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.optimum.slope import Objective, Slope
from snarenet.repair.choose import sparse_systems
from snarenet.repair.start import interior
from snarenet.repair.start.interior import Course
from snarenet.repair.start.smooth import differentiable
from snarenet.repair.start.task import Task

STEPS = 80
BOLD, _FINE = 1e-3, 1e-4  # shares: of most steps, and of the last; with less, grids of 300 buses are left
_HOLD, _FALL = 40, 0.9  # steps until it falls from one to the other, and by how much a step
_AGAIN = 20  # steps after which the bound on the Hessian is computed anew
_COURSE = Course(0.03, 0.1, (1e-5,))
_LAST = 1e-4  # of the first complementarity: with less, forces of bounds that do not matter vanish
_STILL = 1e-5  # largest move of a variable, in units, at which everybody has arrived
_WORK = 2e12  # products of numbers in all dense systems together, beyond which it is not worth it


def descend(
    objective: Objective,
    constraints: Constraints,
    start: Tensor,
    x: Any,
    units: Tensor,
    share: float = BOLD,
    steps: int = STEPS,
) -> Tensor:
    """Nearly local optima (B, n), nearly in the set; the start where that fails, or takes too much work.

    Args:
        objective: f(z, x), (B,).
        constraints: the set.
        start: (B, n) points of the set.
        x: their inputs.
        units: (n,) typical moves of the variables, positive.
        share: that of most steps, delta of the module's formula; more where the optimum is farther away.
        steps: the most of them.
    """
    instance = constraints.at(start, x)
    systems, slope = sparse_systems(instance, of_rows=True), Slope(objective, start, x)
    size = (slope.value * units).norm(dim=1).nanmean()
    work = steps * len(start) * instance.map.rows**2 * (instance.map.rows / 3 + start.shape[1])
    if not size > 0 or not differentiable(instance.map, start[:1]) or (work > _WORK and systems is None):
        return start
    plain, bend = size / units.square(), slope.bound(units)
    task = _aimed(Task.of(instance, start, plain, systems), start, slope, plain + bend)
    state = interior.begin(task, start, _COURSE)
    floor = _LAST * state.kappa
    state = state._replace(unit=torch.full_like(state.unit, torch.inf))  # no limit on the length of steps
    for k in range(steps):
        z = state.point.z
        slope = Slope(objective, z, x)
        bend = slope.bound(units) if k % _AGAIN == _AGAIN - 1 else bend
        state, _ = interior.step(_aimed(task, z, slope, _share(k, share) * plain + bend), state, 0.0, straight=False)
        state = state._replace(kappa=state.kappa.maximum(floor))
        if not bool(((state.point.z - z).abs() > _STILL * units).any()):
            break
    found = state.point.z
    return torch.where(found.isfinite().all(1, keepdim=True), found, start)


def _aimed(task: Task, z: Tensor, slope: Slope, weights: Tensor) -> Task:
    """The task whose force at z is the gradient of the objective."""
    return task._replace(y=z - slope.value / weights, weights=weights)


def _share(step: int, most: float) -> float:
    """The share of the plain metric; `most` is that of most steps."""
    return max(0.5**step, most) if step < _HOLD else max(most * _FALL ** (step - _HOLD), _FINE)
