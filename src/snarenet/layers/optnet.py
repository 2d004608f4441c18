r"""`OptNetLayer`: the nearest point of a convex set, by a conic solver and its derivative (OptNet).

$$ \min_y \|y - \hat y\|^2 \quad \text{s.t.} \quad l \le A y \le u, \quad y^\top H_i y + G_i y \le u_i, \quad
H_i \succeq 0 $$

cvxpylayers turns this into a cone program, Clarabel solves it, and diffcp differentiates its optimality conditions in
the prediction and the bounds.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.constraints.base import Instance, largest, residual
from snarenet.constraints.linear import Box, Linear
from snarenet.constraints.maps import FactoredMap, QuadraticMap
from snarenet.constraints.quadratic import Quadratic
from snarenet.layers.base import Layer, OnFailure
from snarenet.repair import Options
from snarenet.solution import Solution

Array = NDArray[np.float64]
Mode = Literal["dense", "lsqr", "lsmr"]

# In a cone program y is only as good as the root of the gap, hence a gap far below any tolerance for y.
_SOLVER = {"solve_method": "Clarabel", "tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-10}
_ABOVE, _BELOW, _EQUAL = 1, 2, 4  # a row has an upper bound, a lower bound (or both, 3), or is an equality
_FAR = 1e-4  # the solver's own status is not passed on; the y of a failure is not a number, or violates more than this
_CONVEX = 1e-9  # an eigenvalue of H that is less negative than this, relative to the largest, counts as zero


class OptNetLayer(Layer):
    """The orthogonal projection onto linear and convex quadratic constraints with constant matrices.

    Where the solver succeeds, the constraints hold to its tolerance, and y is within about 1e-5 of the nearest point.
    Where it fails, for an empty set say, the prediction is returned and the status is STALLED. A solve counts as one
    step. Gradients flow to predictions, bounds and whatever made them, not to matrices. The solver runs on the CPU.

    Args:
        constraints: `Linear`, `Box` and `Quadratic` sets with constant matrices, or a stack of them; rows with a
            quadratic term need H >= 0 and upper bounds only.
        mode: how the system of the derivative is solved: "dense" is exact, and keeps a matrix for every sample;
            "lsqr" (the default of cvxpylayers) and "lsmr" are iterative.
        tol: largest violation that counts as feasible.
        max_steps: limit on the solver's iterations.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".
    """

    title = "OptNet"
    recordable = False

    def __init__(
        self,
        constraints: Constraints,
        mode: Mode = "dense",
        tol: float = 1e-6,
        max_steps: int = 200,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__(constraints, Options(tol=tol, max_steps=max_steps), on_failure)
        if mode not in ("dense", "lsqr", "lsmr"):
            raise ValueError(f"`mode` must be 'dense', 'lsqr' or 'lsmr', but got {mode!r}")
        for part in constraints.parts:
            _check(part)
        _need("cvxpylayers.torch")
        self.mode: Mode = mode

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        work, finite, start, instance = self.constraints.prepare(y, x, relax)
        kinds = _kinds(instance)
        value, failed = work, finite.clone()
        for kind in kinds[finite].unique(dim=0):  # samples with the same kinds of bounds share a program
            program = self.constraints.memo.get(
                ("optnet", tuple(kind.tolist()), y.shape[1]),
                tuple(self.constraints.buffers()),
                lambda kind=kind: _Program(self.constraints, instance, kind, y.shape[1]),
            )
            alike = (finite & (kinds == kind).all(1)).nonzero().squeeze(1)
            for samples, found in self._solve(program, start, instance, alike):
                value, failed[samples] = value.index_copy(0, samples, found), False
        return self.judge(instance, value, y, 1, y.dtype, stalled=failed)

    def _solve(self, program: _Program, y: Tensor, instance: Instance, samples: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The samples that the solver succeeds on with their projections: all at once, else one by one."""
        part = instance.select(samples)
        parameters = [p.cpu() for p in program.parameters(y[samples], part.lower, part.upper)]
        options: dict[str, Any] = _SOLVER | {"max_iter": self.max_steps}
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            options["mode"] = self.mode
        try:
            found = program.layer(*parameters, solver_args=options)[0].to(y.device)
            after = largest(residual(part.map.value(found.detach()), part.lower, part.upper))
            succeeded = bool((after <= max(self.tol, _FAR)).all())
        except (_need("diffcp").SolverError, RuntimeError, ArithmeticError, np.linalg.LinAlgError):
            succeeded, found = False, y[samples]
        if succeeded:
            return [(samples, found)]
        if len(samples) == 1:
            return []
        return [pair for one in samples.split(1) for pair in self._solve(program, y, instance, one)]

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, tol={self.tol:g}, max_steps={self.max_steps}"


class _Program:
    """The projection as a differentiable cvxpy problem, for samples whose rows have the same kinds of bounds.

    Args:
        constraints: the set.
        instance: its rows for a batch.
        kind: (rows,) which bounds each row has.
        size: the n of y.
    """

    def __init__(self, constraints: Constraints, instance: Instance, kind: Tensor, size: int) -> None:
        cp, layers = _need("cvxpy"), _need("cvxpylayers.torch")
        slopes = _array(instance.map.jacobian(instance.lower.new_zeros(1, size)).reshape(-1, size))
        squares, roots = _curvature(constraints, size)
        codes = kind.cpu().numpy()
        curved = squares.any(1) | np.isin(np.arange(len(codes)), list(roots))
        if (wrong := np.flatnonzero(curved & (codes & (_BELOW | _EQUAL) > 0))).size:
            raise ValueError(f"OptNet needs rows y'Hy + Gy with upper bounds only, but row {wrong[0]} has a lower one")
        above, below, equal = (np.flatnonzero(codes & side) for side in (_ABOVE, _BELOW, _EQUAL))
        y, target = cp.Variable(size), cp.Parameter(size)
        upper, lower, value = (cp.Parameter(len(rows)) for rows in (above, below, equal))
        top = slopes[above] @ y
        if squares[above].any():
            top = top + squares[above] @ cp.square(y)
        if any(int(row) in roots for row in above):
            forms = [cp.sum_squares(roots[row] @ y) if row in roots else 0.0 for row in above.tolist()]
            top = top + cp.hstack(forms)
        rules = [(upper, top <= upper), (lower, slopes[below] @ y >= lower), (value, slopes[equal] @ y == value)]
        used = [(bound, rule) for bound, rule in rules if bound.size]
        problem = cp.Problem(cp.Minimize(cp.sum_squares(y - target)), [rule for _, rule in used])
        self.layer = layers.CvxpyLayer(problem, [target, *(bound for bound, _ in used)], [y])
        self.above, self.below, self.equal = (torch.from_numpy(rows).to(kind.device) for rows in (above, below, equal))

    def parameters(self, y: Tensor, lower: Tensor, upper: Tensor) -> list[Tensor]:
        """What the problem asks for: predictions, and the bounds that there are."""
        bounds = ((upper, self.above), (lower, self.below), (upper, self.equal))
        return [y, *(bound[:, rows] for bound, rows in bounds if len(rows))]


def _kinds(instance: Instance) -> Tensor:
    """(B, rows) which bounds each row has."""
    kinds = instance.upper.isfinite() * _ABOVE + instance.lower.isfinite() * _BELOW
    return torch.where(instance.lower == instance.upper, _EQUAL, kinds)


def _curvature(constraints: Constraints, size: int) -> tuple[Array, dict[int, Array]]:
    """The quadratic terms of all rows: diagonals (rows, n), and, by row, an F with F'F = H for whole matrices."""
    blocks: list[Array] = []
    roots: dict[int, Array] = {}
    for part in constraints.parts:
        first = sum(map(len, blocks))
        block = np.zeros((size if isinstance(part, Box) else part.known_rows(), size))
        if isinstance(part, Quadratic):
            _check(part)  # again: the matrices may have changed since
            H = _array(_hessian(part))
            if H.ndim == 2:
                block = H.clip(min=0)
            else:
                roots |= {first + i: _root(matrix) for i, matrix in enumerate(H) if matrix.any()}
        blocks.append(block)
    return np.concatenate(blocks), roots


def _root(H: Array) -> Array:
    """F with F'F = H, for H >= 0."""
    values, vectors = np.linalg.eigh((H + H.T) / 2)
    return np.sqrt(values.clip(min=0))[:, None] * vectors.T


def _check(part: Constraints) -> None:
    """Raise unless this set is convex, with constant matrices, as far as can be said before a call."""
    if isinstance(part, Box):
        return
    if not isinstance(part, (Linear, Quadratic)):
        raise ValueError(f"OptNet repairs linear and convex quadratic constraints only, but got {type(part).__name__}")
    names = ("A",) if isinstance(part, Linear) else ("G", "H", "factor", "diagonal")
    for name in names:
        matrix = getattr(part, name)
        if matrix is None and name != "A":
            continue
        if not isinstance(matrix, Tensor) or matrix.requires_grad or tuple(matrix.shape) not in _shared(name, part):
            raise ValueError(f"OptNet needs constant matrices, but `{name}` is learned, per sample or a function of x")
    if isinstance(part, Quadratic):
        values = _eigenvalues(part)
        least, row = values.amin(1).min(0)
        if least < -_CONVEX * values.abs().max():
            raise ValueError(f"OptNet needs H >= 0, but row {int(row)} of `H` has the eigenvalue {least:.3g}")
        lower = getattr(part.limit, "equals" if part.limit.equal else "lower")
        if isinstance(lower, Tensor) and bool((values.any(1) & lower.isfinite()).any()):
            raise ValueError("OptNet needs `Quadratic` rows with upper bounds only, but got `lower` or `equals`")


def _shared(name: str, part: Constraints) -> list[tuple[int | None, ...]]:
    """The shapes of a matrix that all samples share."""
    m, n = part.rows, part.size
    if name == "factor" and isinstance(part, Quadratic) and isinstance(part.factor, Tensor):
        k = part.factor.shape[-1]
        return [(n, k), (m, n, k)]
    return [(m, n), *([(m, n, n)] if name == "H" else []), *([(n,)] if name == "diagonal" else [])]


def _eigenvalues(part: Quadratic) -> Tensor:
    """(rows, n) those of every H."""
    H = _hessian(part)
    return H if H.ndim == 2 else torch.linalg.eigvalsh((H + H.mT) / 2)


def _hessian(part: Quadratic) -> Tensor:
    """(rows, n) or (rows, n, n): H, written out if it was given by a factor, of a set with constant matrices."""
    if not part.factored:
        assert isinstance(part.H, Tensor)
        return part.H
    like = part.diagonal if part.factor is None else part.factor
    assert isinstance(like, Tensor)
    map = part.map_at(like.new_zeros(1, part.size or 0))
    map = map.whole() if isinstance(map, FactoredMap) else map
    assert isinstance(map, QuadraticMap)
    return map.H


def _need(module: str) -> Any:
    """A module that is not a core dependency, or an error that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.split(".")[0]
        raise ImportError(f'OptNet needs {name}: pip install "snarenet[baselines]"') from error


def _array(tensor: Tensor) -> Array:
    return tensor.detach().to("cpu", torch.float64).numpy()
