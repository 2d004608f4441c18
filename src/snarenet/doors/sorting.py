"""Which set the rows of CVXPY's expressions belong to, and which of its data depend on x."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints, L1Ball, Linear, Nonlinear, Quadratic
from snarenet.doors.coefficients import Coefficient
from snarenet.doors.expressions import Model, Rows
from snarenet.doors.inequalities import bounded
from snarenet.doors.rewriting import Ball, Row, name_of

_LARGEST = 2**24  # entries of the matrices H of quadratic rows; larger ones stay functions
_JOINING = {"addexpression", "hstack", "vstack", "stack", "concatenate"}  # what adds arguments, or puts them together

Kind = Literal["affine", "quadratic", "curved"]


def sets_of(rows: list[Row], model: Model) -> list[Constraints]:
    """The sets of some rows, the simplest first: rows that go together are one set."""
    groups: dict[tuple[Kind, bool, bool], list[Row]] = {}
    for row in rows:
        kind = kind_of(row.expression, model.y.size)
        varies = kind != "curved" and reach(row.expression) >= {"affine": 1, "quadratic": 2}[kind]
        groups.setdefault((kind, row.equality, varies), []).append(row)
    found: list[Constraints] = []
    for kind, make in (("affine", _affine), ("quadratic", _quadratic), ("curved", _curved)):
        for (of, equality, varies), group in groups.items():
            if of == kind:
                found += make(group, model, equality, varies)
    return found


def kind_of(expression: Any, size: int) -> Kind:
    """What an expression is in y."""
    if expression.is_affine():
        return "affine"
    return "quadratic" if expression.is_quadratic() and expression.size * size**2 <= _LARGEST else "curved"


def reach(expression: Any) -> int:
    """The highest power of y, at most 2, whose coefficient depends on parameters; -1 where none does.

    A parameter that is added reaches the offset alone; a factor reaches all; and a function that is not affine, as in
    (y - p)^2, takes what is inside one power further.
    """
    if not expression.parameters():
        return -1
    if not expression.variables():
        return 0
    inside = max(reach(arg) for arg in expression.args)
    if name_of(expression) in _JOINING:
        return inside
    if any(arg.parameters() and not arg.variables() for arg in expression.args):
        return 2
    return inside if expression.is_atom_affine() else min(2, inside + 1)


def _affine(group: list[Row], model: Model, equality: bool, varies: bool) -> list[Constraints]:
    """A y + b = 0, or <= 0, with A constant unless it varies."""
    rows = Rows([row.expression for row in group], model)
    matrix, limit = _coefficient(rows, model, 1, varies), _coefficient(rows, model, 0, rows.varies, factor=-1.0)
    if isinstance(matrix, Tensor) and not equality:
        return bounded(matrix, limit)
    return [_sized(Linear(matrix, **_bound(equality, limit)), rows.rows, model)]


def _quadratic(group: list[Row], model: Model, equality: bool, varies: bool) -> list[Constraints]:
    """y'H y + G y + b = 0, or <= 0, with H constant unless it varies; diagonal where all of them are."""
    rows = Rows([row.expression for row in group], model)
    H = _coefficient(rows, model, 2, varies)
    if isinstance(H, Tensor) and torch.equal(H, torch.diag_embed(H.diagonal(0, 1, 2))):
        H = H.diagonal(0, 1, 2).clone()
    G = _coefficient(rows, model, 1, max(reach(row.expression) for row in group) > 0)
    limit = _coefficient(rows, model, 0, rows.varies, factor=-1.0)
    return [_sized(Quadratic(H, G, **_bound(equality, limit)), rows.rows, model)]


def _curved(group: list[Row], model: Model, equality: bool, varies: bool) -> list[Constraints]:
    rows = Rows([row.expression for row in group], model)
    return [_sized(Nonlinear(rows, rows.rows, **_bound(equality, 0.0)), rows.rows, model)]


def _coefficient(rows: Rows, model: Model, degree: int, varies: bool, factor: float = 1.0) -> Tensor | Coefficient:
    found = Coefficient(rows, model.y.size, degree, factor)
    return found if varies else found.constant(model.example())


def _bound(equality: bool, limit: Any) -> dict[str, Any]:
    return {"equals" if equality else "upper": limit}


def _sized(found: Constraints, rows: int, model: Model) -> Constraints:
    """The set, which knows its sizes even if all of its data are functions."""
    found.rows, found.size = rows, model.y.size
    return found


def ball_of(ball: Ball, model: Model) -> L1Ball | None:
    """sum |A y - c| <= r; without A where it takes every entry of y once, as it is or negated."""
    n, example = model.y.size, model.example()
    inside, radius = Rows([ball.inside], model), Rows([ball.radius], model)
    if radius.rows != 1:
        return None
    limit = Coefficient(radius, n, 0)
    r = limit if radius.varies else limit.constant(example)[0]
    A, c = Coefficient(inside, n, 1), Coefficient(inside, n, 0, -1.0)
    constant = None if reach(ball.inside) > 0 else A.constant(example)
    if constant is not None and _permutes(constant.abs()):
        center = _Center(c, constant)
        found = L1Ball(center if inside.varies else center(example)[0], r)
    else:
        found = L1Ball(c if inside.varies else c.constant(example), r, A if constant is None else constant)
    found.rows, found.size = 1 if found.matrix is None else inside.rows, n
    return found


def _permutes(A: Tensor) -> bool:
    """Has A (k, n) a single 1 in every row and column, and nothing else?"""
    ones = bool(((A == 0) | (A == 1)).all() and (A.sum(0) == 1).all() and (A.sum(1) == 1).all())
    return ones and A.shape[0] == A.shape[1]


class _Center(nn.Module):
    """Where A y + b is zero, for an A that only permutes and negates."""

    A: Tensor

    def __init__(self, negative: Coefficient, A: Tensor) -> None:
        super().__init__()
        self.negative = negative
        self.register_buffer("A", A, persistent=False)

    def forward(self, x: Any) -> Tensor:
        return self.negative(x) @ self.A
