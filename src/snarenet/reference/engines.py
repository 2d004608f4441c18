r"""Solvers behind one interface: `Engine(program)(start, lower, upper)` is the y that the solver ends with.

Whether that y is a solution is not asked here; `Program` checks every engine's answer in the same way. Each engine is
told to go well below the tolerances of that check, to print nothing, and to use one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from snarenet.reference.program import VIOLATION, Array, Program, QuadraticRows, Structured, need


class Engine(ABC):
    """A solver set up for one program, to be called for one instance after another.

    Attributes:
        structured: does it read a `Structured` program, or make do with values and derivatives?
        convex: does it solve convex problems only?
        options: what the solver is told.
        multipliers: (m,) of the rows, from the last call, by a solver that gives them.
    """

    structured: ClassVar[bool] = True
    convex: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Any]] = {}
    multipliers: Array | None = None

    @abstractmethod
    def __init__(self, program: Any) -> None: ...

    @abstractmethod
    def __call__(self, start: Array, lower: Array, upper: Array) -> Array:
        """The last iterate (n,) from `start`; NaN where the solver gives none."""

    def turn_to(self, program: Program) -> bool:
        """Take on another program; False if the engine must be made anew for it."""
        return False

    def finish(self, y: Array, lower: Array, upper: Array) -> Array:
        """What is made of the last iterate, not counted as the solver's time."""
        return y


class Clarabel(Engine):
    r"""The conic interior-point method Clarabel; the optimum of a convex problem, wherever it starts.

    Diagonal rows become linear in y and $s_j \ge y_j^2$, n small cones $\| (s_j - 1, 2 y_j) \| \le s_j + 1$. A row
    $y^\top F^\top F y + G y \le h$ with a whole matrix, or one of low rank plus a diagonal, is one cone
    $\| (t - 1, 2 F y) \| \le t + 1$, $t = h - G y$. A lower bound is the upper bound of the negative row.
    """

    convex: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Any]] = {
        "tol_gap_abs": 1e-11,
        "tol_gap_rel": 1e-11,
        "tol_feas": 1e-11,
        "verbose": False,
        "max_threads": 1,
    }

    def __init__(self, program: Structured) -> None:
        self.clarabel, self.sparse = need("clarabel"), need("scipy.sparse")
        self.settings = self.clarabel.DefaultSettings()
        for name, value in self.options.items():
            setattr(self.settings, name, value)
        self.program, n = program, program.size
        rows, self.factors = _lift(program)
        self.squared = n if rows[:, n:].any() else 0  # how many s there are
        rows = rows[:, : n + self.squared]
        self.rows, self.zero = self.sparse.csr_array(rows), np.zeros(self.squared)
        self.P = self.sparse.diags_array(np.concatenate([program.square, self.zero]), format="csc")
        self.q = np.concatenate([program.slope, self.zero])
        self.squares = []
        if self.squared:
            eye, zero = np.eye(n), np.zeros((n, n))
            triple = [np.hstack([zero, -eye]), np.hstack([zero, -eye]), np.hstack([-2 * eye, zero])]
            self.squares = [self.sparse.csr_array(np.stack(triple, 1).reshape(3 * n, 2 * n))]

    def __call__(self, start: Array, lower: Array, upper: Array) -> Array:
        n, equal = self.program.size, lower == upper
        plain = np.array([F is None for F in self.factors])
        top, bottom = ~equal & np.isfinite(upper), ~equal & np.isfinite(lower)
        blocks = [self.rows[equal], self.rows[top & plain], -self.rows[bottom & plain], *self.squares]
        right = [upper[equal], upper[top & plain], -lower[bottom & plain], np.tile([1.0, -1.0, 0.0], self.squared)]
        cones = [self.clarabel.ZeroConeT(equal.sum()), self.clarabel.NonnegativeConeT(len(right[1]) + len(right[2]))]
        cones += [self.clarabel.SecondOrderConeT(3)] * self.squared
        for sign, side, bound in ((1, top, upper), (-1, bottom, lower)):
            for i in np.flatnonzero(side & ~plain):
                F, row = self.factors[i], sign * self.rows[[i]]
                assert F is not None
                blocks += [row, row, self.sparse.csr_array(np.hstack([-2 * F, np.zeros((len(F), self.squared))]))]
                right.append(np.concatenate([sign * bound[i] + np.array([1.0, -1.0]), np.zeros(len(F))]))
                cones.append(self.clarabel.SecondOrderConeT(2 + len(F)))
        A = self.sparse.vstack(blocks, format="csc")
        solver = self.clarabel.DefaultSolver(self.P, self.q, A, np.concatenate(right), cones, self.settings)
        return np.array(solver.solve().x)[:n]

    def finish(self, y: Array, lower: Array, upper: Array) -> Array:
        return _polished(self.program, y, lower, upper)


def _lift(program: Structured) -> tuple[Array, list[Array | None]]:
    """All rows as linear in (y, s), s = y^2: (m, 2n); and for a row with a whole matrix, plus or minus F'F, its F."""
    rows: list[Array] = []
    factors: list[Array | None] = []
    for block in program.blocks:
        H, plain = block.H, block.F is None and (block.H is None or block.H.ndim == 2)
        rows.append(np.hstack([block.G, H if plain and H is not None else np.zeros_like(block.G)]))
        factors += [None] * len(block.G) if plain else _roots(block)
    return np.concatenate(rows), factors


def _roots(block: QuadraticRows) -> list[Array | None]:
    """For each row with a matrix its root; low rank plus a diagonal keeps its structure."""
    if block.F is None or block.H is None or (block.H < 0).any():
        return [_root(H) for H in block.whole()]
    return [np.vstack([F.T, np.diag(np.sqrt(D))[D > 0]]) for F, D in zip(block.F, block.H, strict=True)]


def _root(H: Array) -> Array | None:
    """F with F'F = |H|, without its zero rows; None if H is zero."""
    values, vectors = np.linalg.eigh(H)
    root = np.sqrt(np.abs(values))
    return (root[:, None] * vectors.T)[root > 1e-8 * root.max()] if root.any() else None


def _polished(program: Structured, y: Array, lower: Array, upper: Array) -> Array:
    """y after a Newton step, if that is better: the y of a cone is only as good as the root of the duality gap."""
    moved = program.newton_step(y, lower, upper)
    better = program.kkt_residual(moved, lower, upper) < program.kkt_residual(y, lower, upper)
    return moved if better and program.violation(moved, lower, upper) <= VIOLATION else y


class Slsqp(Engine):
    """SciPy's sequential quadratic programming, on values and first derivatives alone; finds local optima."""

    structured: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Any]] = {"ftol": 1e-12, "maxiter": 1000}

    def __init__(self, program: Program) -> None:
        self.program, self.minimize = program, need("scipy.optimize").minimize

    def __call__(self, start: Array, lower: Array, upper: Array) -> Array:
        equal = lower == upper
        sides = [
            ("eq", equal, 1.0, upper),
            ("ineq", ~equal & np.isfinite(upper), -1.0, upper),
            ("ineq", ~equal & np.isfinite(lower), 1.0, lower),
        ]
        program = self.program
        constraints = [
            {
                "type": kind,  # sign (g - bound) is zero, or not negative
                "fun": lambda y, rows=rows, sign=sign, bound=bound: sign * (program.value(y) - bound)[rows],
                "jac": lambda y, rows=rows, sign=sign: sign * program.jacobian(y)[rows],
            }
            for kind, rows, sign, bound in sides
            if rows.any()
        ]
        return self.minimize(
            program.objective,
            start,
            jac=program.gradient,
            method="SLSQP",
            constraints=constraints,
            options=dict(self.options),
        ).x


class Gurobi(Engine):
    """Gurobi's barrier method for convex problems, with s >= y^2 as for Clarabel; needs gurobipy and a licence."""

    convex: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Any]] = {
        "OutputFlag": 0,
        "Threads": 1,
        "FeasibilityTol": 1e-9,
        "OptimalityTol": 1e-9,
        "BarConvTol": 1e-10,
        "BarQCPConvTol": 1e-10,
    }

    def __init__(self, program: Structured) -> None:
        self.gurobi = need("gurobipy", "gurobipy")
        self.environment = self.gurobi.Env(params=dict(self.options))
        self.program, (self.rows, self.factors) = program, _lift(program)

    def __call__(self, start: Array, lower: Array, upper: Array) -> Array:
        program = self.program
        with self.gurobi.Model(env=self.environment) as model:
            y, s = (model.addMVar(program.size, lb=-np.inf) for _ in range(2))
            model.setObjective(0.5 * (program.square @ (y * y)) + program.slope @ y)
            model.addConstr(y * y <= s)
            for row, F, low, high in zip(self.rows, self.factors, lower, upper, strict=True):
                linear = row[: program.size] @ y + row[program.size :] @ s
                square = 0.0 if F is None else y @ (F.T @ F) @ y
                if low == high:
                    model.addConstr(linear == high)
                    continue
                if np.isfinite(high):
                    model.addConstr(linear + square <= high)
                if np.isfinite(low):
                    model.addConstr(square - linear <= -low)
            model.optimize()
            return np.array(y.X) if model.SolCount else np.full(program.size, np.nan)

    def finish(self, y: Array, lower: Array, upper: Array) -> Array:
        return _polished(self.program, y, lower, upper)
