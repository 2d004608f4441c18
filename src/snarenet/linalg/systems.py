r"""Linear algebra of one step: factor once, solve many.

A step from y with residual r, rows J, row damping $\delta = \lambda s > 0$ and multipliers w is

$$ d = J^\top w, \qquad (J J^\top + \mathrm{diag}(\delta))\, w = r, $$

and its adjoint asks, for a cotangent v, for $p = (J J^\top + \mathrm{diag}(\delta))^{-1} J v$ and $e = v - J^\top p$.
Rows whose Gram matrix is diagonal in a known basis (a box, constant equalities) are *eliminated*: they turn into a
metric $P = (I + J_e^\top \mathrm{diag}(\delta_e)^{-1} J_e)^{-1}$ for the others, whose system is
$J P J^\top + \mathrm{diag}(\delta)$. Each class says which of these systems it solves; docs/mathematics.md derives
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.maps import Linearization
from snarenet.linalg.dense import add_to_diagonal, cholesky, cholesky_solve, places_of, rows_at
from snarenet.linalg.eliminated import Eliminated, EliminatedBox
from snarenet.linalg.krylov import ConjugateGradients
from snarenet.linalg.sparse import SparseFactor
from snarenet.linalg.spectrum import column


class System(ABC):
    """The linear system of one step, at one y.

    `weight` times p times w is the cotangent of the row scales: w and e are fixed only up to a common factor, which
    each class chooses so that nothing is divided by a small damping.
    """

    weight: float | Tensor
    factor: Any  # what the backward pass may reuse: a tensor, a sparse factor or None

    @abstractmethod
    def step(self, residual: Tensor, eliminated: Tensor | None) -> tuple[Tensor, Tensor]:
        """(d, w) for the residual (B, m) of these rows and that of the eliminated ones."""

    @abstractmethod
    def left(self, w: Tensor) -> Tensor:
        """(B, m) what a step with multipliers w leaves of the residual, r - J d, of the rows in use."""

    @abstractmethod
    def adjoint(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(p, e, p of the eliminated rows) for the cotangent v (B, n) of y - d."""

    @abstractmethod
    def describe(self) -> str:
        """Which system it is, how large, and how it is solved."""


class DualSystem(System):
    """J P J' + diag(delta), m by m, however it is solved. With P = I, w and e are those of the module's formulas."""

    active: Tensor | None  # (B, m), true for rows in use; None for all
    delta: Tensor  # (B, m) damping of each row
    eliminated: Eliminated | None

    @abstractmethod
    def _solve(self, rhs: Tensor) -> Tensor: ...

    @abstractmethod
    def _push(self, v: Tensor) -> Tensor:
        """J v, zero in rows that are not in use."""

    @abstractmethod
    def _pull(self, w: Tensor) -> Tensor:
        """J'w, of the rows in use."""

    def _mask(self, w: Tensor) -> Tensor:
        return w if self.active is None else torch.where(self.active, w, 0.0)

    def _shrink(self, v: Tensor) -> Tensor:
        return v if self.eliminated is None else self.eliminated.shrink(v)

    def step(self, residual: Tensor, eliminated: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.eliminated is None:
            w = self._solve(residual)
            return self._pull(w), w
        assert eliminated is not None
        d = self.eliminated.step(eliminated)
        w = self._solve(self._mask(residual) - self._push(d))
        return d + self._shrink(self._pull(w)), w

    def left(self, w: Tensor) -> Tensor:
        return self._mask(self.delta * w)

    def adjoint(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        p = self._solve(self._push(self._shrink(v)))
        u = v - self._pull(p)
        return p, self._shrink(u), None if self.eliminated is None else self.eliminated.multipliers(u)


class Dual(DualSystem):
    """The dual system by dense Cholesky factors, or by products alone.

    Args:
        linear: the rows that were not eliminated, to first order at y.
        active: (B, m), true for rows in use, or None for all. Nothing of another row enters, be it infinite.
        delta: (B, m) damping of each row, `damping` times its scale.
        damping: the scalar damping, a number or (B,).
        eliminated: rows solved for beforehand, if any.
        factor: the Cholesky factor, if it was kept.
        krylov: solve by conjugate gradients instead of a factor.
    """

    def __init__(
        self,
        linear: Linearization,
        active: Tensor | None,
        delta: Tensor,
        damping: float | Tensor,
        eliminated: Eliminated | None = None,
        factor: Tensor | None = None,
        krylov: ConjugateGradients | None = None,
    ) -> None:
        self.linear, self.active, self.delta, self.eliminated = linear, active, delta, eliminated
        self.weight = column(damping)
        self.diagonal = delta if active is None else torch.where(active, delta, 1.0)
        self.krylov = krylov
        self.places = None if active is None or krylov else places_of(active, factor)
        self.factor = None if krylov else (self._factor() if factor is None else factor)

    def describe(self) -> str:
        rows = self.linear.map.rows
        if not rows:
            return "none: what is eliminated needs no factor"
        if self.krylov is not None:
            return f"conjugate gradients, {rows:,} x {rows:,} a sample, by products with J alone"
        which = "" if self.active is None else " at most: the rows in use"
        return f"dense Cholesky factors, {rows:,} x {rows:,} a sample{which}"

    def _factor(self) -> Tensor:
        J, active, diagonal, places = self.linear.jacobian, self.active, self.diagonal, self.places
        if places is not None and active is not None:
            active, diagonal = active.gather(1, places), diagonal.gather(1, places)
        if places is not None and J.ndim == 3:
            J, places = rows_at(J, places), None
        if places is None and active is not None and J.ndim == 3:
            J = _rows_in_use(J, active)
        W = J if self.eliminated is None else self.eliminated.root(J)
        if places is not None and W.ndim == 3:  # what was eliminated differs from sample to sample
            W, places = rows_at(W, places), None
        gram = W @ W.mT
        if gram.ndim == 2:
            gram = (
                gram.repeat(len(self.linear.y), 1, 1)
                if places is None
                else gram[places.unsqueeze(2), places.unsqueeze(1)]
            )
        if active is not None and J.ndim == 2:
            gram = torch.where(active.unsqueeze(1) & active.unsqueeze(2), gram, 0.0)
        return cholesky(add_to_diagonal(gram, diagonal), active, self.linear.map.rows)

    def _push(self, v: Tensor) -> Tensor:
        return self._mask(self.linear.jvp(v))

    def _pull(self, w: Tensor) -> Tensor:
        return self.linear.vjp(self._mask(w))

    def _solve(self, rhs: Tensor) -> Tensor:
        if self.factor is not None and self.places is not None:
            found = cholesky_solve(self.factor, rhs.gather(1, self.places))
            return torch.zeros_like(rhs).scatter(1, self.places, found)
        if self.factor is not None:
            return cholesky_solve(self.factor, rhs)
        assert self.krylov is not None
        # an eliminated P would make them little shorter
        lengths = self._mask(self.krylov.row_norms(self.linear.map, self.linear.y))
        return self.krylov.solve(
            lambda w: self._push(self._shrink(self._pull(w))) + self.diagonal * w, rhs, self.diagonal + lengths
        )


class SparseDual(DualSystem):
    """The dual system on the pattern of J.

    Args:
        factor: of this system; it has all that products with J need.
        damping: the scalar damping, a number or (B,).
        eliminated: a box, whose weights are the factor's inverse weights, or None.
    """

    def __init__(self, factor: SparseFactor, damping: float | Tensor, eliminated: EliminatedBox | None = None) -> None:
        self.factor: SparseFactor = factor
        self.weight, self.eliminated = column(damping), eliminated
        self.active, self.delta = None, factor.damping  # the factor knows which rows are in use

    def describe(self) -> str:
        found = self.factor.estimate
        apart = f", {found.heavy} heavy {'columns' if found.form == 'dual' else 'rows'} apart" if found.heavy else ""
        which = f"{found.form}, {found.size:,} x {found.size:,} a sample"
        return f"sparse Cholesky factors, {which}: {self.factor.describe()}{apart}"

    def _solve(self, rhs: Tensor) -> Tensor:
        return self.factor.solve(rhs)

    def _push(self, v: Tensor) -> Tensor:
        return self.factor.push(v)

    def _pull(self, w: Tensor) -> Tensor:
        return self.factor.pull(w)


class Primal(System):
    """J'diag(s)^(-1) J + damping I, n by n, for more rows than variables.

    Here w stands for damping times w of the formulas above, and e for their e over the damping.
    """

    def __init__(
        self,
        linear: Linearization,
        active: Tensor | None,
        scale: Tensor,
        damping: float | Tensor,
        factor: Tensor | None = None,
    ) -> None:
        self.linear = linear
        self.inverse, self.active = 1 / scale if active is None else torch.where(active, 1 / scale, 0.0), active
        self.weight, self.scale = 1.0, scale
        if factor is None:
            J = self.linear.jacobian
            if active is not None and J.ndim == 3:
                J = _rows_in_use(J, active)
            gram = (J.mT * self.inverse.unsqueeze(1)) @ J
            factor = cholesky(add_to_diagonal(gram, column(damping)))
        self.factor = factor

    def describe(self) -> str:
        n = self.linear.y.shape[1]
        return f"dense Cholesky factors, {n:,} x {n:,} a sample: there are more rows than variables"

    def _solve(self, v: Tensor) -> Tensor:
        assert self.factor is not None
        return cholesky_solve(self.factor, v)

    def step(self, residual: Tensor, eliminated: Tensor | None) -> tuple[Tensor, Tensor]:
        d = self._solve(self.linear.vjp(residual * self.inverse))
        return d, self._scaled(residual - self.linear.jvp(d))

    def left(self, w: Tensor) -> Tensor:
        return w * self.scale

    def adjoint(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        e = self._solve(v)
        return self._scaled(self.linear.jvp(e)), e, None

    def _scaled(self, w: Tensor) -> Tensor:
        w = w * self.inverse
        return w if self.active is None else torch.where(self.active, w, 0.0)


def _rows_in_use(J: Tensor, active: Tensor) -> Tensor:
    """J (B, m, n) with zeros for rows that are not in use: squares of one that is satisfied may overflow."""
    return torch.where(active.unsqueeze(2), J, 0.0)
