"""What came of a case: a solution with gradients, and what a point violates by the formula, without the library."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet import Solution
from snarenet_lab.fuzz.case import Case, Part

_EPS = torch.finfo(torch.float64).eps
_ROUNDING = 64  # units of the precision that two ways to compute g may differ by, in the sizes of its terms


class Measured(NamedTuple):
    """What a point violates, by the formula.

    Attributes:
        worst: (B,) the largest violation; infinite where it is no number.
        rounding: (B,) what rounding may make of it, in float64.
        held: (B,) what rounding each entry of y to float32 may make of it.
    """

    worst: Tensor
    rounding: Tensor
    held: Tensor


@dataclass(frozen=True)
class Outcome:
    """A case and what came of it: a solution with gradients by leaf, or an error."""

    case: Case
    solution: Solution | None = None
    gradients: dict[str, Tensor] | None = None
    error: Exception | None = None

    @cached_property
    def alone(self) -> tuple[int, Outcome]:
        """A sample, one that took steps and converged if there is one, and its outcome without the others."""
        s = solved(self)
        i = first(s.converged & (s.steps > 0))
        i = len(s.status) // 2 if i is None else i
        return i, self if len(s.status) == 1 else run(self.case.select([i]))


def run(case: Case, gradient: bool = True) -> Outcome:
    """Repair, and differentiate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            solution, leaves = case.run()
            total = (solution.value * cotangent(case)).sum()
            if not gradient or not total.requires_grad:
                return Outcome(case, solution, {})
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        except Exception as error:
            return Outcome(case, error=error)
    gradients = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
    return Outcome(case, solution, gradients)


def cotangent(case: Case) -> Tensor:
    """(n,) the same for every sample."""
    return torch.cos(1.0 + 2.0 * torch.arange(case.y.shape[1], dtype=torch.float64))


def measure(case: Case, y: Tensor) -> Measured:
    """What y violates."""
    y = y.detach().double()
    if not case.rows:
        none = torch.where(y.isfinite().all(1), 0.0, math.inf).to(y)
        return Measured(none, y.new_zeros(len(y)), y.new_zeros(len(y)))
    g, (lower, upper) = case.value(y), case.bounds()
    over = torch.maximum(g - upper, lower - g).clamp(min=0)
    over = torch.where(over.isnan() | ~y.isfinite().all(1, keepdim=True), math.inf, over)
    sizes = torch.cat([_terms(part, y, case.x) for part in case.parts], 1) + g.abs()
    sizes = (sizes + torch.where(over > 0, g.abs() + over, 0.0)).nan_to_num(math.inf, math.inf).amax(1)
    return Measured(over.amax(1), _ROUNDING * _EPS * sizes, 2.0**-22 * sizes)


def _terms(part: Part, y: Tensor, x: Tensor | None) -> Tensor:
    """(B, rows) the sizes of what is added up in g, from absolute values, or from slopes where it is a function."""
    if part.kind != "nonlinear":
        return part.absolute().value(y.abs(), None if x is None else x.abs())
    y = y.detach().requires_grad_()
    g = part.value(y, x)
    slopes = [torch.autograd.grad(g[:, i].sum(), y, retain_graph=True)[0] for i in range(part.rows)]
    return torch.stack([(slope * y).abs().sum(1) for slope in slopes], 1).detach() if slopes else g.detach()


def solved(seen: Outcome) -> Solution:
    """The solution of an outcome that is no error."""
    assert seen.solution is not None
    return seen.solution


def first(mask: Tensor) -> int | None:
    """The first place where the mask is true."""
    return next(iter(mask.nonzero().flatten().tolist()), None)
