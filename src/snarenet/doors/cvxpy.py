"""CVXPY's constraints as a set: variables become y, parameters become x.

Every expression is translated to torch, atom by atom (`atoms.py`), and its rows go to the simplest set that has them:

    affine in y       Box (rows that are entries of y), Linear
    quadratic in y    Quadratic
    sum |Ay - c| <= r L1Ball
    others            Nonlinear

Data in which parameters enter are functions of x, all others are computed once. Nothing need be convex, DCP or DPP.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any

from torch import Tensor, nn

from snarenet.constraints import Constraints
from snarenet.doors.expressions import Model, Rows
from snarenet.doors.extras import need
from snarenet.doors.layout import Layout
from snarenet.doors.rewriting import Ball, Row, declared, domains, simplified
from snarenet.doors.sorting import ball_of, sets_of


def constraints(given: Any, variables: Any = None, parameters: Any = None) -> Constraints:
    """The set of all y that obey them; see `Constraints.from_cvxpy`."""
    cp = need("cvxpy")
    problem = _problem(cp, given)
    model = _model(problem, variables, parameters)
    asked = [*problem.constraints, *(bound for variable in model.variables for bound in declared(variable))]
    asked = [constraint for constraint in asked if constraint.variables()]  # others say something of x alone
    found: list[Constraints] = []
    rows: list[Row] = []
    for simple in (simple for constraint in asked for simple in simplified(cp, constraint)):
        if isinstance(simple, Row):
            rows.append(simple)
        elif (ball := ball_of(simple, model)) is not None:
            found.append(ball)
        else:
            rows.append(Row(cp.norm1(simple.inside) - simple.radius, equality=False))
    found = [*sets_of([*rows, *_domains(cp, rows)], model), *found]
    if not found:
        raise ValueError("`constraints` must hold at least one constraint on a variable, but got none")
    return reduce(and_, found)


def objective(problem: Any, variables: Any = None, parameters: Any = None) -> nn.Module:
    """The function (y, x) -> (B,) that a problem minimises; of one that is maximised, the negative."""
    value = problem.objective.args[0]
    maximised = type(problem.objective).__name__ == "Maximize"
    return _Single(Rows([-value if maximised else value], _model(problem, variables, parameters)))


def join(arrays: Sequence[Tensor], leaves: Sequence[Any]) -> Tensor:
    """(B, n), the y or x of arrays (B, *shape), one for each variable or parameter."""
    return _layout(leaves).join(arrays)


def split(vector: Tensor, leaves: Sequence[Any]) -> list[Tensor]:
    """The arrays (B, *shape) of a y or x (B, n), one for each variable or parameter."""
    return _layout(leaves).split(vector)


class _Single(nn.Module):
    """The only row of a function."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, y: Tensor, x: Any = None) -> Tensor:
        return self.rows(y, x)[:, 0]


def _layout(leaves: Sequence[Any]) -> Layout:
    return Layout("vector", [leaf.name() for leaf in leaves], [tuple(leaf.shape) for leaf in leaves])


def _problem(cp: Any, given: Any) -> Any:
    """A problem with these constraints."""
    if isinstance(given, cp.Problem):
        return given
    asked = list(given) if isinstance(given, list | tuple) else [given]
    for constraint in asked:
        if not isinstance(constraint, cp.Constraint):
            raise TypeError(
                "`constraints` must be a cvxpy.Problem, or a constraint or a list of them, but it holds "
                f"{type(constraint).__name__}"
            )
    return cp.Problem(cp.Minimize(0), asked)


def _model(problem: Any, variables: Any, parameters: Any) -> Model:
    """The order of variables and parameters: as asked for, or as they appear."""
    return Model(
        _ordered("variables", variables, problem.variables()), _ordered("parameters", parameters, problem.parameters())
    )


def _ordered(name: str, asked: Any, there: list[Any]) -> list[Any]:
    if asked is None:
        return there
    leaves = list(asked) if isinstance(asked, list | tuple) else [asked]
    known = {leaf.id for leaf in leaves}
    missing = [leaf.name() for leaf in there if leaf.id not in known]
    if missing:
        raise ValueError(f"`{name}` must hold all {name} of the model, but it lacks {', '.join(missing)}")
    return leaves


def _domains(cp: Any, rows: list[Row]) -> list[Row]:
    """Where the expressions of the rows are defined."""
    asked = [constraint for row in rows for constraint in domains(row.expression)]
    found = [simple for constraint in asked for simple in simplified(cp, constraint)]
    return [row for row in found if not isinstance(row, Ball)]
