"""Problem families by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from snarenet.problems.base import Outcome, Problem
from snarenet.problems.cbf import CBF
from snarenet.problems.nclp import NCLP
from snarenet.problems.qcqp import QCQP

__all__ = ["CBF", "NCLP", "QCQP", "Outcome", "Problem", "load", "names"]

_FAMILIES: dict[str, Callable[..., Problem]] = {
    "nclp": NCLP,
    "qcqp": QCQP,
    "ncqcqp": partial(QCQP, curvature=(-0.05, 0.1)),  # at the paper's level of the objective
    "ncqcqp-fast": partial(QCQP, curvature=(-0.02, 0.1), equalities=20),  # closest to the paper's step counts
    "ncqcqp-hard": partial(QCQP, curvature=(-1.0, 1.0)),  # several local optima
    "cbf": CBF,  # a control policy; box=2 for the second box of initial states
}


def names() -> list[str]:
    """The families that `load` knows."""
    return list(_FAMILIES)


def load(name: str, **sizes: Any) -> Problem:
    """The family `name`; `sizes` (size, inequalities, equalities, instances, seed) replace its defaults."""
    if name not in _FAMILIES:
        near = difflib.get_close_matches(name, _FAMILIES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`name` must be one of {', '.join(_FAMILIES)}, but got {name!r}{hint}")
    problem = _FAMILIES[name](**sizes)
    problem.name, problem.sizes = name, sizes
    return problem
