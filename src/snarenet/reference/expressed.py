"""Programs of families that are written for CasADi too (`Problem.expressions`), which differentiates them once.

Only the input x differs between instances, and the bounds; rows of boxes are bounds on y.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from snarenet.problems.arithmetic import Casadi
from snarenet.problems.base import Problem
from snarenet.reference.program import Array, Program, digest, need


@dataclass(frozen=True)
class Family:
    """A problem without its inputs, to be sent to other processes.

    Attributes:
        text: its functions (y, x) -> (f, g), as CasADi writes them.
        size: the n of y.
        boxed: bytes of (m,) true for the rows of boxes, each of which has one for every variable.
    """

    text: str
    size: int
    boxed: bytes

    @classmethod
    def of(cls, problem: Problem, boxed: NDArray[np.bool_]) -> Family:
        """That of a problem which defines `expressions`."""
        ca = need("casadi")
        y, x = ca.SX.sym("y", problem.size), ca.SX.sym("x", int(problem.inputs.shape[1]))
        found = problem.expressions(y, x, Casadi())
        assert found is not None
        return cls(ca.Function("values", [y, x], list(found)).serialize(), problem.size, boxed.tobytes())


class Model:
    """What CasADi makes of a family: functions of (y, x) with their derivatives, and what a solver is given."""

    def __init__(self, family: Family) -> None:
        ca = need("casadi")
        self.values = ca.Function.deserialize(family.text)
        y, x = ca.SX.sym("y", self.values.size1_in(0)), ca.SX.sym("x", self.values.size1_in(1))
        f, g = self.values(y, x)
        self.nlp = {"x": y, "p": x, "f": f, "g": g}
        self.slopes = ca.Function("slopes", [y, x], [ca.gradient(f, y), ca.jacobian(g, y)])


@lru_cache(maxsize=4)
def model_of(family: Family) -> Model:
    """The functions of a family, made once in a process."""
    return Model(family)


@dataclass(frozen=True, eq=False)
class Expressed(Program):
    """An instance of a family.

    Attributes:
        family: f and g.
        x: (d,) its input.
    """

    family: Family
    x: Array

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The n of y."""
        return self.family.size

    @property
    def linear_rows(self) -> NDArray[np.bool_]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(m,) true for the rows of boxes."""
        return self.boxed

    @property
    def boxed(self) -> NDArray[np.bool_]:
        return np.frombuffer(self.family.boxed, dtype=bool)

    @property
    def portable(self) -> bool:
        return True

    def objective(self, y: Array) -> float:
        return float(model_of(self.family).values(y, self.x)[0])

    def gradient(self, y: Array) -> Array:
        return _column(model_of(self.family).slopes(y, self.x)[0])

    def value(self, y: Array) -> Array:
        found = np.empty(len(self.boxed))
        found[~self.boxed] = _column(model_of(self.family).values(y, self.x)[1])
        found[self.boxed] = np.tile(y, self.boxes)
        return found

    def jacobian(self, y: Array) -> Array:
        found = np.zeros((len(self.boxed), self.size))
        found[~self.boxed] = model_of(self.family).slopes(y, self.x)[1].full()
        found[self.boxed] = np.tile(np.eye(self.size), (self.boxes, 1))
        return found

    def pull(self, y: Array, multipliers: Array) -> Array:
        rows = _column(model_of(self.family).slopes(y, self.x)[1].T @ multipliers[~self.boxed])
        return rows + multipliers[self.boxed].reshape(self.boxes, self.size).sum(0)

    def digest(self) -> bytes:
        """A hash of x, and of f and g at three points: code has no hash that outlives a process."""
        points = np.random.default_rng(0).standard_normal((3, self.size))
        values = [_column(part) for y in points for part in model_of(self.family).values(y, self.x)]
        return digest(self.x, *values)


def disagreement(problem: Problem, family: Family, x: torch.Tensor) -> str:
    """What is wrong with `expressions`, by their numbers at a random point for the input x (1, d); "" for nothing."""
    y = torch.randn(1, problem.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    program = Expressed(family, x[0].cpu().numpy())
    with torch.no_grad():
        f = problem.objective(y.to(x.device), x).item()
        g = problem.feasible_set.value(y.to(x.device), x)[0].cpu().numpy()
    point = y[0].numpy()
    if not np.isclose(program.objective(point), f, rtol=1e-9):
        return f"its `expressions` have an objective of {program.objective(point)!r} where `objective` has {f!r}"
    found = _column(model_of(family).values(point, program.x)[1])
    if len(found) != int((~program.boxed).sum()) or not np.allclose(program.value(point), g, rtol=1e-9, atol=1e-9):
        return "the rows of its `expressions` are not those of its `constraints`, boxes left out"
    return ""


def _column(matrix: Any) -> Array:
    return matrix.full().ravel()
