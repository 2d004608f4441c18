"""From a problem in torch to programs in numpy: its structure where it has one, else its derivatives by autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from snarenet.constraints import Nonlinear
from snarenet.constraints.base import Instance
from snarenet.constraints.maps import IdentityMap, L1BallMap, L1ImageMap, Map
from snarenet.constraints.sparsity import Pattern
from snarenet.problems.base import Problem
from snarenet.problems.separable import Separable
from snarenet.reference.program import Array, Program, Structured, digest
from snarenet.reference.rows import Rows, array, read_ball, read_rows, widened


class Reading(NamedTuple):
    """What was read of N instances.

    Attributes:
        programs: a program for each, the same for all where x changes nothing but bounds.
        lower: (N, m) lower bounds of its rows.
        upper: (N, m) upper bounds.
    """

    programs: list[Structured]
    lower: Array
    upper: Array


def read_structure(problem: Problem, instance: Instance, x: Tensor) -> Reading | str:
    """The instances of a problem at x, or a clause that says why only autograd can read them."""
    if not isinstance(problem, Separable) or type(problem).objective is not Separable.objective:
        return "its objective is not the one of `Separable`"
    n, row, parts = problem.size, 0, list(instance.map.parts)
    balls = [part for part in parts if isinstance(part, L1BallMap | L1ImageMap)]
    width, first = n + sum(ball.center.shape[-1] for ball in balls), n
    blocks: list[Rows] = []
    bounds: list[tuple[Array, Array]] = []
    for kind, part in zip(problem.constraints.parts, parts, strict=True):
        own = tuple(array(bound[:, row : row + part.rows]) for bound in (instance.lower, instance.upper))
        row += part.rows
        if isinstance(part, L1BallMap | L1ImageMap):
            block, *own = read_ball(part, n, first, width, len(x))
            first += part.center.shape[-1]
        else:
            block = read_rows(part, n, width)
        if block is None:
            return f"its set `{type(kind).__name__}` is not linear or quadratic in y"
        blocks.append(block)
        bounds.append((own[0], own[1]))
    lower, upper = (np.concatenate(side, 1) for side in zip(*bounds, strict=True))
    return Reading(_programs(problem, x, blocks, width), lower, upper)


def _programs(problem: Separable, x: Tensor, blocks: list[Rows], width: int) -> list[Structured]:
    """A program for each x, or the same for all."""
    square, slope, sine = (widened(term, width) for term in (problem.square, problem.slope(x), problem.sine))
    fixed = [None if block.vary else block.at(0) for block in blocks]  # what is shared is one object

    def program(i: int) -> Structured:
        rows = (block.at(i) if one is None else one for block, one in zip(blocks, fixed, strict=True))
        return Structured(square, slope[i] if slope.ndim == 2 else slope, sine, tuple(rows))

    if slope.ndim == 1 and None not in fixed:
        return [program(0)] * len(x)
    return [program(i) for i in range(len(x))]


def why_not_convex(programs: list[Structured], lower: Array, upper: Array) -> str | None:
    """What makes one of these instances, with bounds (N, m), non-convex; None if all are convex."""
    if len({id(program) for program in programs}) == 1:
        return programs[0].why_not_convex(lower, upper)
    each = (program.why_not_convex(lower[[i]], upper[[i]]) for i, program in enumerate(programs))
    return next((reason for reason in each if reason), None)


class Places(NamedTuple):
    """Entries of a matrix, column by column: (nnz,) each."""

    row: NDArray[np.int64]
    col: NDArray[np.int64]

    @staticmethod
    def of(row: Any, col: Any) -> Places:
        """From entries in any order."""
        order = np.lexsort((row, col))
        return Places(np.asarray(row)[order], np.asarray(col)[order])


class Autograd(Program):
    """An instance of any problem; every call evaluates the problem's own functions.

    Args:
        problem: the problem.
        x: (1, d) the input of the instance.
        instance: the constraints at x.
        lagrangian: of the problem, the same for all its instances.
    """

    def __init__(self, problem: Problem, x: Tensor, instance: Instance, lagrangian: Lagrangian) -> None:
        self.problem, self.x, self.map, self.lagrangian = problem, x, instance.map, lagrangian
        self.size = problem.size
        self.linear_rows = np.concatenate([np.full(part.rows, part.linear) for part in self.map.parts])

    @property
    def boxed(self) -> NDArray[np.bool_]:
        return boxed_rows(self.map)

    def alike(self, other: Autograd) -> bool:
        """Are they instances of the same problem?"""
        return self.problem is other.problem

    def objective(self, y: Array) -> float:
        with torch.no_grad():
            return self.problem.objective(self._tensor(y), self.x).item()

    def gradient(self, y: Array) -> Array:
        with torch.enable_grad():
            point = self._tensor(y).requires_grad_()
            return array(torch.autograd.grad(self.problem.objective(point, self.x).sum(), point)[0][0])

    def value(self, y: Array) -> Array:
        return array(self.map.value(self._tensor(y))[0])

    def jacobian(self, y: Array) -> Array:
        J = self.map.jacobian(self._tensor(y))
        return array(J if J.ndim == 2 else J[0])

    def rows(self, y: Array) -> Array:
        """Those of `value` that are no boxes."""
        return self.value(y)[~self.boxed]

    def places(self) -> Places:
        """Where the Jacobian of `rows` may be nonzero."""
        found, first = [], 0
        for part in (part for part in self.map.parts if not isinstance(part, IdentityMap)):
            pattern = part.pattern or Pattern.full(part.rows, self.size)
            found.append(np.stack([pattern.row.cpu().numpy() + first, pattern.col.cpu().numpy()]))
            first += part.rows
        return Places.of(*np.concatenate([np.empty((2, 0), dtype=np.int64), *found], 1))

    def entries(self, y: Array, places: Places) -> Array:
        """The Jacobian of `rows` there."""
        return self.jacobian(y)[~self.boxed][places.row, places.col]

    def bends(self) -> Places:
        """Where the upper triangle of the Hessian of the Lagrangian may be nonzero."""
        row, col = self.lagrangian.places(self.x, len(self.boxed))
        upper = row <= col
        return Places.of(row[upper], col[upper])

    def bent(self, y: Array, weight: float, weights: Array, places: Places) -> Array:
        """The Hessian of weight f + <weights, rows> there."""
        multipliers = np.zeros(len(self.boxed))
        multipliers[~self.boxed] = weights
        found = self.lagrangian.hessian(self._tensor(y), self.x, weight, self._tensor(multipliers))
        return found[places.row, places.col]

    def digest(self) -> bytes:
        """A hash of f, g and their derivatives at three points: code has no hash that outlives a process."""
        points = np.random.default_rng(0).standard_normal((3, self.size))
        each = (self.objective, self.gradient, self.value, self.jacobian)
        return digest(array(self.x), *(np.asarray(function(y)) for y in points for function in each))

    def _tensor(self, y: Array) -> Tensor:
        return torch.tensor(y[None], dtype=torch.float64, device=self.x.device)


class Lagrangian:
    """Second derivatives of a problem: its Lagrangian's gradient is a function whose Jacobian has a pattern too.

    Args:
        problem: the problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rows = problem, Nonlinear(self._gradient, problem.size, equals=0.0)

    def _gradient(self, y: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        x, weight, weights = given

        def total(y: Tensor) -> Tensor:
            f, g = self.problem.objective(y, x), self.problem.feasible_set.value(y, x)
            return (weight * f).sum() + (weights * g).sum()

        return torch.func.grad(total)(y)

    def places(self, x: Tensor, rows: int) -> Places:
        """Rows and columns of the entries of the Hessian, by its numbers at random points and multipliers."""
        draw = torch.Generator().manual_seed(0)
        y, weights = (torch.randn(1, k, generator=draw, dtype=torch.float64).to(x) for k in (self.problem.size, rows))
        pattern = self.rows.at(y, (x, torch.ones_like(x[:, 0]), weights)).map.pattern
        pattern = pattern or Pattern.full(self.problem.size, self.problem.size)
        return Places.of(pattern.row.cpu().numpy(), pattern.col.cpu().numpy())

    def hessian(self, y: Tensor, x: Tensor, weight: float, weights: Tensor) -> Array:
        """(n, n) of weight f + <weights, g> at y (1, n)."""
        given = x, torch.full_like(x[:, 0], weight), weights
        with torch.no_grad():
            return array(self.rows.at(y, given).map.jacobian(y)[0])


def boxed_rows(map: Map) -> NDArray[np.bool_]:
    """(m,) true for the rows of boxes."""
    return np.concatenate([np.full(part.rows, isinstance(part, IdentityMap)) for part in map.parts])
