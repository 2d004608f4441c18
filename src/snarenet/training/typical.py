r"""`find`: where the solutions of a problem typically lie, how far from there, and how dear it is to move a variable.

A few training inputs tell: from a repaired point of each, interior-point steps lead nearly to a local optimum
(`optimum/descent.py`). With a length $s_j$ for each variable and the mean second derivatives $h_j$ of f there,

$$ W_{jj} = \frac{\max(u_j,\ \phi\, \bar u)}{s_j^2}, \qquad u_j = \max(h_j, 0)\, s_j^2 : $$

the curvature of f where it has any, floored: the floor $\phi$ is low where the nearest point is found in any metric.
Lengths of a curved f are a share of the room between bounds, so that a variable which most solutions leave at a bound
is no dearer than its curvature. Where f is linear all u are zero, and W is $1 / s^2$ with lengths that most solutions
differ by.

A step $t W^{-1} \nabla f$ down the objective shortens the way to the optimum if t times the Hessian does not exceed W;
t is the largest such factor, but the step is no longer than 10 to 300 times what solutions differ by, as the set
allows. Onto rows of any kind the projection is dear: it pays where f is so curved that no step is cut short. Elsewhere
there is no step, and lengths are those that most solutions differ by.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.optimum import Slope, polish
from snarenet.optimum.descent import BOLD, STEPS
from snarenet.optimum.polishing import units_of
from snarenet.problems import Problem
from snarenet.repair import Options, repair_with
from snarenet.training.rows import convex, kind

_INPUTS, _FEWEST = 32, 8
_ENTRIES = 2**15  # of a solution, in all samples together: those of large problems are fewer
# phi, of the mean. Weights that are more even are easier to repair with, and to project with: the gap of `nclp` with 40
# variables on validation instances is 1e-6 with 0.3 after 20 epochs, 7e-6 with 0.1, 4e-5 with 0.03; on `ncqcqp` a
# quarter of the projections are not found with 0.1. Interior-point steps onto convex sets do not mind, and a step down
# the objective is the better the closer the metric is to its curvature.
_FLOOR, _LOW = 0.3, 0.003
_LEAST = 0.1  # of the middle spread: that of a variable which is the same for all inputs
_SAME = 1e-6  # of the largest spread: rounding, at a bound for instance
_STILL = 1e-3  # of a variable's deviation: that of most samples, if these are at a bound
_MOST, _NORMAL = 0.8, 1.2816  # share of the samples that are within a spread, and that quantile of a normal deviation
# Spreads of solutions that a step down f may be long, for the same reasons: on `ncqcqp`, which is not convex, a twelfth
# of the projections are not found from 50 away, all are from 20.
_NEAR, _FAR, _FARTHEST = 10.0, 50.0, 300.0
_FLAT = 1e-9  # a curvature that changes the slope by so little is rounding
_TOL, _DESCENT = 1e-6, ((BOLD, STEPS),)
_SURE = Options(tol=_TOL, rescue=True, start=None)


class Found(NamedTuple):
    """What solutions have in common; all (n,), scale and weights positive, but for the last, a number.

    Attributes:
        centre: a typical solution.
        scale: how far the solutions are from it.
        weights: how dear it is to move each variable.
        step: the factor of a step down the objective in the metric of the weights; 0 for none.
    """

    centre: Tensor
    scale: Tensor
    weights: Tensor
    step: Tensor

    @classmethod
    def blank(cls, problem: Problem) -> Found:
        """Numbers of the right shapes that say nothing."""
        one = problem.inputs.new_ones(problem.size)
        return cls(torch.zeros_like(one), one, one.clone(), one.new_zeros(()))


@torch.no_grad()
def find(problem: Problem) -> Found:
    """What the problem says itself of its solutions, and, as far as it does not, what a few inputs tell.

    The same numbers each time; `Found.blank` where nothing is known, as of a policy, whose inputs are not the data's.
    """
    found = Found.blank(problem)
    if problem.typical is not None:
        found = found._replace(centre=problem.typical.to(found.centre))
    if problem.weights is not None:
        found = found._replace(weights=problem.weights)
    if not problem.direct:
        return found
    y, x = _solutions(problem, found.centre)
    if not len(y):
        return found
    slope, rows, own = Slope(problem.objective, y, x), kind(problem), problem.weights
    floor = _FLOOR if rows in ("constant", "diagonal") else _LOW
    weights = _metric(y, slope, _units(problem, y, x), floor) if own is None else own
    step, longest = _steps(y, slope, weights)
    far = _FARTHEST if rows == "convex" else _FAR if convex(problem) else _NEAR
    if rows == "any" and not step <= far * longest:
        weights = _metric(y, slope, _usual(y), _FLOOR) if own is None else own
        step = torch.zeros_like(step)
    return Found(y.mean(0), _spread(y), weights, torch.minimum(step, far * longest))


def _solutions(problem: Problem, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Good points (K, n) of a few inputs (K, d); inputs without a feasible point are left out."""
    inputs = problem.split("train")
    count = min(max(_FEWEST, min(_INPUTS, _ENTRIES // problem.size)), len(inputs))
    x = inputs[torch.linspace(0, len(inputs) - 1, count, device=inputs.device).round().long()]
    first = repair_with(_SURE, problem.feasible_set, centre.expand(len(x), -1), x)
    y, x = first.value[first.converged], x[first.converged]
    if not len(y):
        return y, x
    return polish(problem.objective, problem.feasible_set, y, x, _units(problem, y, x), _TOL, _DESCENT), x


def _units(problem: Problem, y: Tensor, x: Tensor) -> Tensor:
    """(n,) lengths to move the variables by: of their room, or else of their size; no less than they spread."""
    return units_of(problem.feasible_set, y, x).maximum(_spread(y))


def _spread(y: Tensor) -> Tensor:
    """(n,) the deviation of each variable, floored; 1 where all samples are the same."""
    return _floored(y.std(0, correction=0))


def _usual(y: Tensor) -> Tensor:
    """(n,) the same of most samples.

    A variable that leaves its bound in a few extreme samples alone is dear to move in all others. Were it cheap, the
    gap of AC-OPF with 14 buses would be ten times larger. With a fifth of the deviation for the least, a third as many
    loads of 300 buses are out of reach when training begins, but in the end gaps are 1.3 times as large with 14 buses,
    three times with 30, twice with 300, and the same with 57 and 118 (three seeds each).
    """
    usual = (y - y.median(0).values).abs().quantile(_MOST, 0) / _NORMAL
    return _floored(torch.where(usual > _STILL * y.std(0, correction=0), usual, 0.0))


def _floored(spread: Tensor) -> Tensor:
    varies = spread[spread > _SAME * spread.max()]
    return spread.clamp(min=_LEAST * varies.median().item()) if len(varies) else torch.ones_like(spread)


def _metric(y: Tensor, slope: Slope, lengths: Tensor, floor: float) -> Tensor:
    """(n,) W of the module's formula, with a mean of 1."""
    bends = slope.diagonal().clamp(min=0) * lengths.square()
    if bends.mean() <= _FLAT * (slope.value * lengths).abs().mean():
        bends, lengths = torch.ones_like(bends), _usual(y)
    weights = bends.clamp(min=floor * bends.mean().item()) / lengths.square()
    return weights / weights.mean()


def _steps(y: Tensor, slope: Slope, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of a whole step down f, 0 where f is linear, and of one as long as what solutions differ by."""
    largest = (slope.bound(weights.rsqrt()) / weights).max()
    length = (slope.value.square() / weights).sum(1).mean().sqrt()
    if not largest > 0 or not 0 < length < torch.inf:
        return torch.zeros_like(largest), torch.zeros_like(largest)
    return 1 / largest, (y.var(0, correction=0) * weights).sum().sqrt() / length
