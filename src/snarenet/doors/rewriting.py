"""CVXPY's constraints in simple words: expressions that are zero or at most zero.

Maxima, minima and absolute values that are bounded from the right side are undone: max(a, b) <= c is a <= c and b <= c,
smooth rows for one that is not. Cones are written with their functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_SIGNS = {"nonneg": 1, "pos": 1, "nonpos": -1, "neg": -1}  # attributes of a variable that are bounds


class Row(NamedTuple):
    """An expression that must be zero, or at most zero."""

    expression: Any
    equality: bool


class Ball(NamedTuple):
    """sum |inside| <= radius, with `inside` affine and a radius without variables."""

    inside: Any
    radius: Any


def simplified(cp: Any, constraint: Any) -> list[Row | Ball]:
    """What a constraint says."""
    kind, args = name_of(constraint), constraint.args
    if kind in ("equality", "zero"):
        return [Row(constraint.expr, equality=True)]
    if kind == "inequality":
        return _inequality(*args)
    if kind == "nonpos":
        return [Row(args[0], equality=False)]
    if kind == "nonneg":
        return [Row(-args[0], equality=False)]
    if kind == "soc":  # |X| <= t, a column or a row of X for every t
        t, X = args
        return [Row(cp.norm(X, 2, axis=constraint.axis if X.ndim > 1 else None) - t, equality=False)]
    if kind == "expcone":  # b exp(a / b) <= c
        a, b, c = args
        return [Row(a + cp.rel_entr(b, c), equality=False)]
    raise NotImplementedError(f"CVXPY's constraint `{type(constraint).__name__}` is not taken: {constraint}")


def _inequality(left: Any, right: Any) -> list[Row | Ball]:
    parts: Sequence[Any] = ()
    if name_of(left) == "maximum" or _of_all(left, "max"):
        parts = left.args
    elif name_of(left) == "abs" or _of_all(left, "norminf"):
        parts = left.args[0], -left.args[0]
    if parts:
        return [row for part in parts for row in _inequality(part, right)]
    if name_of(right) == "minimum" or _of_all(right, "min"):
        return [row for part in right.args for row in _inequality(left, part)]
    sizes = left.args[0] if _of_all(left, "sum") else None
    added = sizes.args[0] if sizes is not None and name_of(sizes) == "abs" else None
    inside = left.args[0] if _of_all(left, "norm1") else added
    if inside is not None and inside.is_affine() and not right.variables():
        return [Ball(inside, right)]
    return [Row(left - right, equality=False)]


def name_of(thing: Any) -> str:
    """The kind of an expression or a constraint, in lower case and without underscores."""
    return type(thing).__name__.lower().replace("_", "")


def _of_all(expression: Any, name: str) -> bool:
    """Is this the function of all entries?"""
    return name_of(expression) == name and expression.axis is None


def declared(variable: Any) -> list[Any]:
    """The bounds that a variable was declared with, as constraints."""
    attributes = {name: value for name, value in variable.attributes.items() if _is_set(value)}
    found = [sign * variable >= 0 for name, sign in _SIGNS.items() if attributes.pop(name, False)]
    lower, upper = attributes.pop("bounds", (None, None))
    found += [] if lower is None else [variable >= lower]
    found += [] if upper is None else [variable <= upper]
    if attributes:
        raise NotImplementedError(
            f"the variable {variable.name()} is declared with `{next(iter(attributes))}`, which is not taken: only "
            f"{', '.join(_SIGNS)} and bounds are"
        )
    return found


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, list | tuple) and len(value) == 0)


def domains(expression: Any) -> list[Any]:
    """Where an expression is defined, as constraints that hold a variable: those of log and others."""
    return [constraint for constraint in expression.domain if constraint.variables()]
