"""From a problem in torch to programs in numpy: its structure where it has one, else its derivatives by autograd."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import FactoredMap, IdentityMap, LinearMap, Map, QuadraticMap
from snarenet.problems.base import Problem
from snarenet.problems.separable import Separable
from snarenet.reference.program import Array, Program, QuadraticRows, Structured, digest


def read_structure(problem: Problem, map: Map) -> Structured | str:
    """The program of a problem whose g is `map`, or a clause that says why only autograd can read it."""
    if not isinstance(problem, Separable) or type(problem).objective is not Separable.objective:
        return "its objective is not the one of `Separable`"
    blocks = []
    for part, rows in zip(problem.constraints.parts, map.parts, strict=True):
        block = _read_rows(rows, problem.size)
        if block is None:
            return f"its set `{type(part).__name__}` is not linear or quadratic in y, with matrices that all x share"
        blocks.append(block)
    return Structured(_array(problem.square), _array(problem.linear), _array(problem.sine), tuple(blocks))


def _read_rows(part: Map, size: int) -> QuadraticRows | None:
    """The rows of a part; None where they are functions, or differ between the samples."""
    if isinstance(part, IdentityMap):
        return QuadraticRows(np.eye(size))
    if isinstance(part, LinearMap) and part.A.ndim == 2:
        return QuadraticRows(_array(part.A))
    part = part.whole() if isinstance(part, FactoredMap) else part
    if isinstance(part, QuadraticMap) and part.G.ndim == 2 and part.H.ndim == (2 if part.diagonal else 3):
        return QuadraticRows(_array(part.G), _array(part.H if part.diagonal else (part.H + part.H.mT) / 2))
    return None


class Autograd(Program):
    """An instance of any problem; every call evaluates the problem's own functions.

    Args:
        problem: the problem.
        x: (1, d) the input of the instance.
        instance: the constraints at x.
    """

    def __init__(self, problem: Problem, x: Tensor, instance: Instance) -> None:
        self.problem, self.x, self.map = problem, x, instance.map
        self.size = problem.size
        self.linear_rows = np.concatenate([np.full(part.rows, part.linear) for part in self.map.parts])

    def objective(self, y: Array) -> float:
        with torch.no_grad():
            return self.problem.objective(self._tensor(y), self.x).item()

    def gradient(self, y: Array) -> Array:
        with torch.enable_grad():
            point = self._tensor(y).requires_grad_()
            return _array(torch.autograd.grad(self.problem.objective(point, self.x).sum(), point)[0][0])

    def value(self, y: Array) -> Array:
        return _array(self.map.value(self._tensor(y))[0])

    def jacobian(self, y: Array) -> Array:
        J = self.map.jacobian(self._tensor(y))
        return _array(J if J.ndim == 2 else J[0])

    def digest(self) -> bytes:
        """A hash of f, g and their derivatives at three points: code has no hash that outlives a process."""
        points = np.random.default_rng(0).standard_normal((3, self.size))
        each = (self.objective, self.gradient, self.value, self.jacobian)
        return digest(_array(self.x), *(np.asarray(function(y)) for y in points for function in each))

    def _tensor(self, y: Array) -> Tensor:
        return torch.tensor(y[None], dtype=torch.float64, device=self.x.device)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float64).numpy()
