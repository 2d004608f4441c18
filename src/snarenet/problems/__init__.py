"""Problem families by name."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable
from functools import partial, reduce
from numbers import Integral, Real
from operator import or_
from typing import Any, Union, get_args, get_origin, get_type_hints

from snarenet.problems.acopf import ACOPF
from snarenet.problems.base import Outcome, Problem
from snarenet.problems.cbf import CBF
from snarenet.problems.forecast import Forecast, crps
from snarenet.problems.mpc import MPC
from snarenet.problems.nclp import NCLP
from snarenet.problems.portfolio import Portfolio
from snarenet.problems.qcqp import QCQP
from snarenet.problems.supervised import Supervised

__all__ = [
    "ACOPF",
    "CBF",
    "MPC",
    "NCLP",
    "QCQP",
    "Forecast",
    "Outcome",
    "Portfolio",
    "Problem",
    "Supervised",
    "crps",
    "load",
    "names",
    "recipe",
]

_FAMILIES: dict[str, Callable[..., Problem]] = {
    "nclp": NCLP,
    "qcqp": QCQP,
    "ncqcqp": partial(QCQP, curvature=(-0.05, 0.1)),  # at the paper's level of the objective
    "ncqcqp-fast": partial(QCQP, curvature=(-0.02, 0.1), equalities=20),  # closest to the paper's step counts
    "ncqcqp-hard": partial(QCQP, curvature=(-1.0, 1.0)),  # several local optima
    "cbf": CBF,  # a control policy; box=2 for the second box of initial states
    "acopf": ACOPF,  # AC optimal power flow; case="57_ieee", or a file of MATPOWER's
    "mpc": MPC,  # a unicycle's plan around an ellipse; any horizon
    "forecast": Forecast,  # levels of a tree, or csv for a file of your own; known, missing, history, horizon
    "portfolio": Portfolio,  # assets, factors, groups, turnover; risk="full" for a constant matrix
}


def names() -> list[str]:
    """The families that `load` knows."""
    return list(_FAMILIES)


def recipe(name: str) -> dict[str, Any]:
    """What the family `name` says about its own training; nothing of a name that is none."""
    family = _FAMILIES.get(name, Problem)
    kind = family.func if isinstance(family, partial) else family
    return dict(getattr(kind, "recipe", {}))


def load(name: str, **sizes: Any) -> Problem:
    """The family `name`; `sizes` (size, inequalities, equalities, instances, seed) replace its defaults."""
    if name not in _FAMILIES:
        raise ValueError(f"`name` must be one of {', '.join(_FAMILIES)}, but got {name!r}{_hint(name, _FAMILIES)}")
    _check(name, sizes)
    problem = _FAMILIES[name](**sizes)
    problem.name, problem.sizes = name, sizes
    return problem


def _check(name: str, sizes: dict[str, Any]) -> None:
    """Raise unless the family has arguments of these names and kinds; which values make sense it says itself."""
    family = _FAMILIES[name]
    hints = get_type_hints((family.func if isinstance(family, partial) else family).__init__)
    # Python 3.10 makes `int | None = None` an Optional
    kinds = {key: reduce(or_, get_args(hint)) if get_origin(hint) is Union else hint for key, hint in hints.items()}
    known = list(inspect.signature(family).parameters)
    for key, value in sizes.items():
        if key not in known:
            raise ValueError(f"{key!r} is no size of {name}, which has {', '.join(known)}{_hint(key, known)}")
        if not _fits(value, kinds[key]):
            kind = str(kinds[key]) if get_args(kinds[key]) else kinds[key].__name__
            raise ValueError(f"`{key}` of {name} must be of type {kind}, but got {value!r}")


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if kinds := get_args(kind):  # of a tuple; JSON makes it a list
        kinds = kinds[:1] * len(value) if kinds[1:] == (...,) and isinstance(value, list | tuple) else kinds
        return isinstance(value, list | tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    number = {int: Integral, float: Real}.get(kind, kind)
    return isinstance(value, number) and not isinstance(value, bool)


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
