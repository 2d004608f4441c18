r"""`find`: where the solutions of a problem typically lie, how far from there, and how dear it is to move a variable.

A few training inputs tell. From a repaired point of each, projected gradient steps in the metric W lead towards its
optimum, $y \leftarrow \mathrm{repair}_W(y - t\, W^{-1} \nabla f)$, as long as the curvature of f says, or as the spread
where it says nothing; taken where f falls, else with a quarter of the length. Where variables have bounds of their own,
steps of Adam through the repair follow, in units of the room between these bounds: the curvature of f says little then
(the fuel of power plants costs nearly the same at every load), but how far a variable can go is known. With the spread
$s_j$ of what was found and the mean second derivatives $h_j$ of f there,

$$ W_{jj} = \frac{\max(u_j,\ 0.3\, \bar u)}{s_j^2}, \qquad u_j = \max(h_j, 0)\, s_j^2 : $$

the curvature of f where it has any, floored in units of what solutions differ by. Where f is linear all u are zero, and
W is $1 / s^2$.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.maps import IdentityMap
from snarenet.layers.proximity import proximity
from snarenet.problems import Problem
from snarenet.repair import Options, repair_with

_INPUTS, _FEWEST = 32, 8
_ENTRIES = 2**14  # of a solution, in all samples together: those of large problems are fewer
_STEPS = 10
_DESCENT, _RATE = 40, 0.5  # steps of Adam, and the first one's length in units
_ROOM = 0.1  # of the room between the bounds of a variable, or of its size: a unit
_FLOOR = 0.3  # of the mean: weights that are more even are easier to project with, see `problems/separable.py`
_LEAST = 0.1  # of the middle spread: that of a variable which is the same for all inputs
_FLAT = 1e-9  # a curvature that changes the slope by so little is rounding
_NUMBERS = 2**22  # in a chunk of second derivatives
_SURE = Options(tol=1e-6, rescue=True, start=None)
_FINE = Options(tol=1e-6, start=None)
_ROUGH = Options(tol=1e-4, max_steps=12, start=None)  # of a point on the way: one that fails is left out


class Found(NamedTuple):
    """What solutions have in common; all (n,), the last two positive.

    Attributes:
        centre: a typical solution.
        scale: how far the solutions are from it.
        weights: how dear it is to move each variable.
    """

    centre: Tensor
    scale: Tensor
    weights: Tensor

    @classmethod
    def blank(cls, problem: Problem) -> Found:
        """Numbers of the right shapes that say nothing."""
        one = problem.inputs.new_ones(problem.size)
        return cls(torch.zeros_like(one), one, one.clone())


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
    y, x = _solutions(problem, found, known=problem.weights is not None)
    if not len(y):
        return found
    found = found._replace(centre=y.mean(0), scale=_spread(y))
    return found if problem.weights is not None else found._replace(weights=_metric(y, Slope(problem, y, x)))


def _solutions(problem: Problem, found: Found, known: bool) -> tuple[Tensor, Tensor]:
    """Good points (K, n) of a few inputs (K, d); inputs without a feasible point are left out."""
    inputs = problem.split("train")
    count = min(max(_FEWEST, min(_INPUTS, _ENTRIES // problem.size)), len(inputs))
    x = inputs[torch.linspace(0, len(inputs) - 1, count, device=inputs.device).round().long()]
    first = repair_with(_SURE, problem.constraints, found.centre.expand(len(x), -1), x)
    y, x = first.value[first.converged], x[first.converged]
    share = torch.ones_like(y[:, :1])
    for _ in range(_STEPS if len(y) else 0):
        slope = Slope(problem, y, x)
        weights = found.weights if known else _metric(y, slope)
        move = slope.value / weights
        bend = (move * slope.product(move)).sum(1, keepdim=True)
        along = (move * slope.value).sum(1, keepdim=True)
        plain = _spread(y).norm() / move.norm(dim=1, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
        length = torch.where(bend > _FLAT * along, along / bend, plain)
        again = repair_with(_FINE, problem.constraints, y - share * length * move, x, weights=weights)
        better = (again.converged & (problem.objective(again.value, x) < slope.objective)).unsqueeze(1)
        y, share = torch.where(better, again.value, y), torch.where(better, (2 * share).clamp(max=1.0), share / 4)
    units = _units(problem, y, x) if len(y) else None
    return (y if units is None else _descend(problem, y, x, units)), x


def _units(problem: Problem, y: Tensor, x: Tensor) -> Tensor | None:
    """(n,) lengths to move the variables by: of their room, or else of their size; None if none has own bounds."""
    instance, first = problem.constraints.at(y, x), 0
    lower, upper = torch.full_like(y, -torch.inf), torch.full_like(y, torch.inf)
    for part in instance.map.parts:
        rows = slice(first, first + part.rows)
        if isinstance(part, IdentityMap):
            lower, upper = lower.maximum(instance.lower[:, rows]), upper.minimum(instance.upper[:, rows])
        first += part.rows
    room = (upper - lower).mean(0)
    known = room.isfinite() & (room > 0)
    size = y.square().mean().sqrt().expand_as(room)
    return (_ROOM * torch.where(known, room, size)).maximum(_spread(y)) if known.any() else None


def _descend(problem: Problem, y: Tensor, x: Tensor, units: Tensor) -> Tensor:
    """Better points by Adam on what is repaired, in units (n,), with the pull that keeps it near the set."""
    weights, at = units.pow(-2), (y / units).requires_grad_()
    optimizer = torch.optim.Adam([at], lr=_RATE, betas=(0.9, 0.99))
    least = problem.objective(y, x)
    for k in range(_DESCENT):
        optimizer.param_groups[0]["lr"] = _RATE * (1 - k / _DESCENT)
        with torch.enable_grad():
            solution = repair_with(_ROUGH, problem.constraints, at * units, x, weights=weights)
            loss = problem.objective(solution.value, x)
            pull = proximity(solution.value, solution.raw, loss, weights)
            (at.grad,) = torch.autograd.grad((loss + pull).sum(), at)
        at.grad.nan_to_num_(0.0, 0.0, 0.0)
        better = solution.converged & (loss < least)
        y, least = (
            torch.where(better.unsqueeze(1), solution.value, y).detach(),
            torch.where(better, loss, least).detach(),
        )
        optimizer.step()
    return y


def _spread(y: Tensor) -> Tensor:
    """(n,) the deviation of each variable, floored; 1 where all samples are the same."""
    spread = y.std(0, correction=0)
    varies = spread[spread > 0]
    return spread.clamp(min=_LEAST * varies.median().item()) if len(varies) else torch.ones_like(spread)


def _metric(y: Tensor, slope: Slope) -> Tensor:
    """(n,) W of the module's formula, with a mean of 1."""
    spread = _spread(y)
    bends = slope.diagonal().clamp(min=0) * spread.square()
    if bends.mean() <= _FLAT * (slope.value * spread).abs().mean():
        bends = torch.ones_like(bends)
    weights = bends.clamp(min=_FLOOR * bends.mean().item()) / spread.square()
    return weights / weights.mean()


class Slope:
    """The gradient of a problem's objective, and its derivatives.

    Attributes:
        objective: (K,) f at the points y (K, n).
        value: (K, n) its gradient there.
    """

    def __init__(self, problem: Problem, y: Tensor, x: Tensor) -> None:
        with torch.enable_grad():
            self._y = y.detach().requires_grad_()
            objective = problem.objective(self._y, x)
            (self._slope,) = torch.autograd.grad(objective.sum(), self._y, create_graph=True)
        self.objective, self.value = objective.detach(), self._slope.detach()

    def product(self, vectors: Tensor, batched: bool = False) -> Tensor:
        """The Hessian times vectors (K, n), or times many of them (M, K, n)."""
        found = None
        if self._slope.requires_grad:  # else the objective is linear
            (found,) = torch.autograd.grad(
                self._slope, self._y, vectors, retain_graph=True, is_grads_batched=batched, allow_unused=True
            )
        return torch.zeros_like(vectors) if found is None else found

    def diagonal(self) -> Tensor:
        """(n,) the diagonal of the Hessian, exact, in the mean over the samples; 0 where it is not a number."""
        y = self._y.detach()
        found = torch.zeros_like(y[0])
        for some in torch.arange(len(found), device=y.device).split(max(1, _NUMBERS // y.numel())):
            each = torch.arange(len(some), device=y.device)
            units = y.new_zeros(len(some), *y.shape)
            units[each, :, some] = 1.0
            try:
                products = self.product(units, batched=True)
            except RuntimeError:  # of an operation that cannot be batched
                products = torch.stack([self.product(unit) for unit in units])
            found[some] = products[each, :, some].mean(1)
        return torch.where(found.isfinite(), found, 0.0)
