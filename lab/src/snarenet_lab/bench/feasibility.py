r"""General solvers on a system of the collection: IPOPT and SLSQP look for a y with $l \le g(y) \le u$.

Either the y of least change, $\min \tfrac12 \| y - \hat y \|^2$, or any, $\min 0$. Both solvers refuse more equations
than variables; those are handed over as bands of half the tolerance, so that nobody loses by a formality.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from snarenet.reference.program import Array, need
from snarenet_lab.systems import System

TOLERANCE = 1e-6  # the largest violation of a success


class Found(NamedTuple):
    """Where a solver ended, and after how many iterations."""

    y: Array
    steps: int


class Solver:
    """What both need of a system: g in CasADi's symbols, and bounds."""

    def __init__(self, system: System) -> None:
        ca = need("casadi")
        self.ca, self.y = ca, ca.SX.sym("y", len(system.guess))
        self.g = ca.vertcat(*system.fn(*ca.vertsplit(self.y)))
        self.lower, self.upper = (bound.numpy() for bound in system.bounds())
        self.low, self.high = (bound.numpy() for bound in system.limits())
        equal = self.lower == self.upper
        if equal.sum() > len(system.guess):
            self.lower = np.where(equal, self.lower - TOLERANCE / 2, self.lower)
            self.upper = np.where(equal, self.upper + TOLERANCE / 2, self.upper)

    def __call__(self, start: Array) -> Found:
        """Where it ends from a start (n,)."""
        raise NotImplementedError


class Ipopt(Solver):
    """IPOPT with exact second derivatives.

    Args:
        system: what to solve.
        nearest: minimise the change, or nothing?
    """

    options: ClassVar[dict[str, Any]] = {
        "tol": 1e-8,
        "constr_viol_tol": 1e-8,  # well below the tolerance, and of rows that are not scaled
        "bound_relax_factor": 0.0,
        "max_iter": 3000,
        "print_level": 0,
        "sb": "yes",
    }

    def __init__(self, system: System, nearest: bool) -> None:
        super().__init__(system)
        begin = self.ca.SX.sym("start", len(system.guess))
        f = self.ca.sumsqr(self.y - begin) / 2 if nearest else self.ca.SX(0)
        settings = {f"ipopt.{name}": value for name, value in self.options.items()}
        quiet = {"print_time": False, "show_eval_warnings": False}
        program = {"x": self.y, "p": begin, "f": f, "g": self.g}
        self.solver = self.ca.nlpsol("feasibility", "ipopt", program, quiet | settings)

    def __call__(self, start: Array) -> Found:
        ends = {"lbg": self.lower, "ubg": self.upper, "lbx": self.low, "ubx": self.high}
        y = np.array(self.solver(x0=start, p=start, **ends)["x"]).ravel()
        return Found(y, self.solver.stats()["iter_count"])


class Slsqp(Solver):
    """SciPy's sequential quadratic programming, towards the least change."""

    options: ClassVar[dict[str, Any]] = {"ftol": 1e-9, "maxiter": 1000}

    def __init__(self, system: System) -> None:
        super().__init__(system)
        self.minimize = need("scipy.optimize").minimize
        self.value = self.ca.Function("g", [self.y], [self.g])
        self.slope = self.ca.Function("J", [self.y], [self.ca.jacobian(self.g, self.y)])

    def __call__(self, start: Array) -> Found:
        equal = self.lower == self.upper
        below, above = ~equal & np.isfinite(self.lower), ~equal & np.isfinite(self.upper)
        sides = [("eq", equal, 1.0, self.upper), ("ineq", above, -1.0, self.upper), ("ineq", below, 1.0, self.lower)]
        rows = [
            {
                "type": kind,  # sign (g - bound) is zero, or not negative
                "fun": lambda y, part=part, sign=sign, bound=bound: sign * (self._value(y) - bound)[part],
                "jac": lambda y, part=part, sign=sign: sign * np.array(self.slope(y))[part],
            }
            for kind, part, sign, bound in sides
            if part.any()
        ]
        with np.errstate(all="ignore"):  # where a step leaves the domain
            found = self.minimize(
                lambda y: ((y - start) ** 2).sum() / 2,
                np.clip(start, self.low, self.high),
                jac=lambda y: y - start,
                method="SLSQP",
                bounds=list(zip(self.low, self.high, strict=True)),
                constraints=rows,
                options=self.options,
            )
        return Found(found.x, found.nit)

    def _value(self, y: Array) -> Array:
        return np.array(self.value(y)).ravel()
