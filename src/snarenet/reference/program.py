r"""One instance of a problem in numpy, and the check that a solution of any engine must pass.

$$ \min_y f(y) \quad \text{s.t.} \quad l \le g(y) \le u. $$

y is a solution when its *KKT residual* is small,

$$ \max\Big( \| \nabla f + J^\top \mu \|_\infty,\; \sum_i |\mu_i| s_i \Big) \Big/ \max(1, \| \nabla f \|_\infty), $$

where $s_i$ is the distance of row i to its bound, and the multipliers $\mu$ are chosen by least squares: free for
equalities, of one sign for inequalities near a bound, zero for the others. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

VIOLATION = 1e-8  # the largest violation of a solution
RESIDUAL = 1e-6  # the largest KKT residual of a solution
_LARGEST = 2**24  # entries of a Jacobian that is factored for the check
_ACTIVE = 1e-4  # a row so close to its bound, relative to the bound, may have a multiplier; its distance counts too


def at_bound(value: Array, bound: Array) -> NDArray[np.bool_]:
    """Are rows so close to this bound that they may have a multiplier?"""
    return np.isfinite(bound) & (np.abs(value - bound) <= _ACTIVE * np.maximum(1, np.abs(bound)))


def need(module: str, install: str = '"snarenet[solvers]"') -> Any:
    """A module that is not a core dependency, or an error that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"reference solutions need {module.split('.')[0]}: pip install {install}") from error


class Program(ABC):
    """f and g of an instance with their derivatives, at one point y (n,).

    Attributes:
        size: the n of y.
        linear_rows: (m,) true for the rows of g known to be linear.
    """

    size: int
    linear_rows: NDArray[np.bool_]

    @abstractmethod
    def objective(self, y: Array) -> float:
        """f(y)."""

    @abstractmethod
    def gradient(self, y: Array) -> Array:
        """The gradient of f: (n,)."""

    @abstractmethod
    def value(self, y: Array) -> Array:
        """g(y): (m,)."""

    @abstractmethod
    def jacobian(self, y: Array) -> Array:
        """The derivative of g: (m, n)."""

    @property
    def portable(self) -> bool:
        """Can it be sent to another process?"""
        return False

    @property
    def boxed(self) -> NDArray[np.bool_]:
        """(m,) true for rows of boxes, y itself, which a solver may be told as bounds on y: n of them for every box."""
        return np.zeros(len(self.linear_rows), dtype=bool)

    @property
    def boxes(self) -> int:
        """How many boxes there are."""
        return int(self.boxed.sum()) // max(1, self.size)

    def pull(self, y: Array, multipliers: Array) -> Array:
        """J'mu: (n,)."""
        return multipliers @ self.jacobian(y)

    @abstractmethod
    def digest(self) -> bytes:
        """A hash of f and g."""

    def least_norm(self, lower: Array, upper: Array) -> Array:
        """The shortest y that fulfils the linear equalities; zero if there are none."""
        rows = self.linear_rows & (lower == upper)
        zero = np.zeros(self.size)
        return zero + np.linalg.lstsq(self.jacobian(zero)[rows], upper[rows], rcond=None)[0] if rows.any() else zero

    def violation(self, y: Array, lower: Array, upper: Array) -> float:
        """The largest violation of a bound; infinite where it is not a number."""
        value = self.value(y)
        worst = np.max(np.maximum(value - upper, lower - value), initial=0.0)
        return float(worst) if np.isfinite(worst) else np.inf

    def kkt_residual(self, y: Array, lower: Array, upper: Array, multipliers: Array | None = None) -> float:
        """How far y is from a point with multipliers; see the formula above.

        Those of a solver, if given, will do where they are good enough, which saves a factorisation.
        """
        if multipliers is not None:
            found = self.residual(y, lower, upper, multipliers)
            if found <= RESIDUAL or len(multipliers) * self.size > _LARGEST:
                return found
        multipliers = self.multipliers(y, lower, upper)
        return np.inf if multipliers is None else self.residual(y, lower, upper, multipliers)

    def residual(self, y: Array, lower: Array, upper: Array, multipliers: Array) -> float:
        """The KKT residual of y with these multipliers."""
        gradient, value = self.gradient(y), self.value(y)
        used = multipliers != 0
        slack = np.where(multipliers > 0, upper - value, value - lower)[used]
        gap = np.abs(gradient + self.pull(y, multipliers)).max()
        found = max(gap, np.abs(multipliers[used]) @ np.abs(slack)) / max(1.0, np.abs(gradient).max())
        return float(found) if np.isfinite(found) else np.inf

    def multipliers(self, y: Array, lower: Array, upper: Array) -> Array | None:
        """(m,) the multipliers that come closest to grad f + J'mu = 0; None if there are no such numbers."""
        nnls = need("scipy.optimize").nnls
        gradient, jacobian, value = self.gradient(y), self.jacobian(y), self.value(y)
        if not all(np.isfinite(part).all() for part in (gradient, jacobian, value)):
            return None
        equal = lower == upper
        rows = np.flatnonzero(~equal & (at_bound(value, upper) | at_bound(value, lower)))
        signs = np.where(np.abs(value - upper) <= np.abs(value - lower), 1.0, -1.0)[rows]
        # Free multipliers take away all that lies in the span of the equalities; what is left asks for signs.
        left, sizes, span = np.linalg.svd(jacobian[equal], full_matrices=False)
        rank = int((sizes > 1e-12 * np.max(sizes, initial=0.0)).sum())
        span = span[:rank]
        result = np.zeros(len(value))
        if len(rows):
            columns = signs[:, None] * jacobian[rows]
            try:
                weights = nnls((columns - columns @ span.T @ span).T, span.T @ (span @ gradient) - gradient)[0]
            except RuntimeError:  # too many iterations
                return None
            result[rows] = signs * weights
        result[equal] = -left[:, :rank] @ (span @ (gradient + result @ jacobian) / sizes[:rank])
        return result


@dataclass(frozen=True, eq=False)
class QuadraticRows:
    """Rows y'(H_i + F_i F_i') y + G_i y.

    Attributes:
        G: (m, n).
        H: None for zero; diagonals (m, n); or symmetric matrices (m, n, n).
        F: None for zero; or (m, n, k), beside diagonals H.
    """

    G: Array
    H: Array | None = None
    F: Array | None = None

    @property
    def linear(self) -> bool:
        """Are these linear rows?"""
        return self.H is None and self.F is None

    def value(self, y: Array) -> Array:
        """(m,)."""
        return (self.G + self._bent(y)) @ y

    def jacobian(self, y: Array) -> Array:
        """(m, n)."""
        return self.G + 2 * self._bent(y)

    def _bent(self, y: Array) -> Array | float:
        """(H_i + F_i F_i') y: (m, n), or zero."""
        bent = 0.0 if self.H is None else self.H * y if self.H.ndim == 2 else self.H @ y
        return bent if self.F is None else bent + np.einsum("mnk,mk->mn", self.F, y @ self.F)

    def hessian(self, multipliers: Array) -> Array | float:
        """The second derivative of multipliers'g: (n, n), or zero."""
        total = 0.0
        if self.H is not None:
            bend = np.tensordot(multipliers, self.H, 1)
            total = 2 * (np.diag(bend) if bend.ndim == 1 else bend)
        if self.F is not None:
            total = total + 2 * np.einsum("m,mik,mjk->ij", multipliers, self.F, self.F, optimize=True)
        return total

    def whole(self) -> Array:
        """H_i + F_i F_i', written out: (m, n, n)."""
        m, n = self.G.shape
        H = np.zeros((m, n)) if self.H is None else self.H
        H = H if H.ndim == 3 else H[:, :, None] * np.eye(n)
        return H if self.F is None else H + self.F @ self.F.transpose(0, 2, 1)

    def curvatures(self) -> tuple[Array, Array]:
        """The least and the largest eigenvalue of every H_i + F_i F_i': both (m,)."""
        if self.linear:
            return np.zeros(len(self.G)), np.zeros(len(self.G))
        plain = self.F is None and self.H is not None and self.H.ndim == 2
        values = self.H if plain else np.linalg.eigvalsh(self.whole())
        assert values is not None
        return values.min(1), values.max(1)


@dataclass(frozen=True, eq=False)
class Structured(Program):
    r"""A program that a solver can be told all about; instances may share it and differ in their bounds alone.

    $f(y) = \sum_j \tfrac12 a_j y_j^2 + b_j y_j + c_j \sin y_j$, and g stacks linear and quadratic rows.

    Attributes:
        square: (n,) the a_j.
        slope: (n,) the b_j.
        sine: (n,) the c_j.
        blocks: the rows of g, in order.
    """

    square: Array
    slope: Array
    sine: Array
    blocks: tuple[QuadraticRows, ...]

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The n of y."""
        return len(self.square)

    @property
    def portable(self) -> bool:
        return True

    @property
    def linear_rows(self) -> NDArray[np.bool_]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """(m,) true for linear rows."""
        return np.concatenate([np.full(len(block.G), block.linear) for block in self.blocks])

    def objective(self, y: Array) -> float:
        return float(np.sum(0.5 * self.square * y**2 + self.slope * y + self.sine * np.sin(y)))

    def gradient(self, y: Array) -> Array:
        return self.square * y + self.slope + self.sine * np.cos(y)

    def value(self, y: Array) -> Array:
        return np.concatenate([block.value(y) for block in self.blocks])

    def jacobian(self, y: Array) -> Array:
        return np.concatenate([block.jacobian(y) for block in self.blocks])

    def newton_step(self, y: Array, lower: Array, upper: Array) -> Array:
        """One Newton step on the KKT equations of the rows that have a multiplier at y."""
        multipliers = self.multipliers(y, lower, upper)
        if multipliers is None:
            return y
        used = (lower == upper) | (multipliers != 0)
        bound = np.where(multipliers > 0, upper, lower)[used]
        jacobian, m = self.jacobian(y)[used], int(used.sum())
        system = np.block([[self._hessian(y, multipliers), jacobian.T], [jacobian, np.zeros((m, m))]])
        right = np.concatenate([self.gradient(y) + multipliers[used] @ jacobian, self.value(y)[used] - bound])
        return y - np.linalg.lstsq(system, right, rcond=None)[0][: self.size]

    def _hessian(self, y: Array, multipliers: Array) -> Array:
        """The second derivative of f + mu'g: (n, n)."""
        total, first = np.diag(self.square - self.sine * np.sin(y)), 0
        for block in self.blocks:
            mu, first = multipliers[first : first + len(block.G)], first + len(block.G)
            total = total + block.hessian(mu)
        return total

    def why_not_convex(self, lower: Array, upper: Array) -> str | None:
        """What makes an instance with these bounds, each (N, m), non-convex; None if all are convex."""
        if self.sine.any():
            return "its objective has a sine term"
        if (self.square < 0).any():
            return "its objective has a negative square term"
        least, largest = (np.concatenate(ends) for ends in zip(*(b.curvatures() for b in self.blocks), strict=True))
        rounding = 1e-12 * np.maximum(np.abs(least), np.abs(largest))
        for curved, bound, side in ((least < -rounding, upper, "upper"), (largest > rounding, lower, "lower")):
            wrong = np.flatnonzero(curved & np.isfinite(bound).any(0))
            if len(wrong):
                return f"the {side} bound of row {wrong[0]} cuts out a non-convex set"
        return None

    def digest(self) -> bytes:
        parts = [self.square, self.slope, self.sine]
        for block in self.blocks:
            parts += [block.G, np.empty(0) if block.H is None else block.H]
            parts += [] if block.F is None else [block.F]
        return digest(*parts)


def digest(*arrays: Array) -> bytes:
    """A hash of shapes and numbers."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(repr(array.shape).encode())
        total.update(np.ascontiguousarray(array, dtype=np.float64).tobytes())
    return total.digest()
