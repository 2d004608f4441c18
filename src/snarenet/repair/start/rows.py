r"""`RowsAt`: rows to first order at one z, and the saddle-point systems made of them.

With the metric as a diagonal $\Omega$ ($\Omega_i^{-1} = 0$ for a variable that is held), the damping $\delta$ of each
row and the curvature $B = \sum_i \mu_i \nabla^2 g_i(z)$, a `Saddle` solves

$$ \begin{pmatrix} \Omega + B & J^\top \\ J & -\mathrm{diag}(\delta) \end{pmatrix}
   \begin{pmatrix} d \\ \eta \end{pmatrix} = \begin{pmatrix} a \\ b \end{pmatrix}: $$

without B by a factor of $J \Omega^{-1} J^\top + \mathrm{diag}(\delta)$, the system of a repair's step; with it by
conjugate gradients that this factor preconditions, so that B is known by its products alone and few are needed where
the set is near in sizes of its radii of curvature.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.maps import Map, times, transposed_times
from snarenet.constraints.sparsity import Pattern
from snarenet.linalg import PlainFactor, SparseNormal, add_to_diagonal, cholesky_ex, sparse_normal, triangular_solve

_CONVEX = 0.01  # share of the metric that the curvature must leave in a direction


class RowsAt:
    """Rows at z: J, once for many systems.

    Args:
        map: the rows.
        z: (B, n) where.
        weights: (n,) the metric.
        sparse: keep J on its pattern.
    """

    def __init__(self, map: Map, z: Tensor, weights: Tensor, sparse: bool) -> None:
        linear = map.linearize(z)
        self.map, self.z, self.weights = map, z, weights
        if sparse:
            self.values, self.pattern = linear.values, linear.pattern  # in this order: it may widen the pattern
            assert self.pattern is not None
        else:
            self.values, self.pattern = linear.jacobian.expand(len(z), -1, -1), None

    @cached_property
    def lengths(self) -> Tensor:
        """(B, m) squared lengths of the rows in the metric, J W^-1 J' at its diagonal; positive."""
        if self.pattern is None:
            squares = (self.values.square() / self.weights).sum(-1)
        else:
            column = self.pattern.on(self.z.device)[1]
            squares = self.pattern.row_sums(self.values.square() / self.weights[column])
        return torch.where(squares > 0, squares, 1.0)

    def pull(self, multipliers: Tensor) -> Tensor:
        """J' times multipliers (B, m)."""
        if self.pattern is None:
            return transposed_times(self.values, multipliers)
        return self.pattern.transposed_times(self.values, multipliers)

    def saddle(self, inverse: Tensor, damping: Tensor, active: Tensor, exact: bool) -> Saddle:
        """The systems with inverse metric (B, n), damping (B, m) and the active rows (B, m).

        An exact one divides by no damping: the primal form of a sparse system, which does, has half of the digits.
        """
        damping = torch.where(active, damping, 1.0)
        normal = None if self.pattern is None else _dual(self.pattern) if exact else sparse_normal(self.pattern)
        if normal is not None:
            return Saddle(_Sparse(normal.factor(self.values, damping, inverse, active)), inverse)
        J = self.values if self.pattern is None else self.pattern.dense(self.values)
        J = torch.where(active.unsqueeze(2), J, 0.0)
        system = add_to_diagonal((J * inverse.unsqueeze(1)) @ J.mT, damping)
        return Saddle(_Dense(J, *cholesky_ex(system)), inverse)

    def curvature(self, multipliers: Tensor) -> Curvature:
        """B for multipliers (B, m)."""
        return Curvature(self.map, self.z, multipliers)


@lru_cache(maxsize=64)
def _dual(pattern: Pattern) -> SparseNormal | None:
    """The dual form of the systems, None where it fills."""
    normal = sparse_normal(pattern)
    if normal.form == "dual":
        return normal
    normal = SparseNormal(pattern.row, pattern.col, pattern.shape, "dual")
    return None if normal.gram.full else normal


class _Dense(NamedTuple):
    """J of the active rows, zero elsewhere, and the Cholesky factor of the system."""

    J: Tensor
    factor: Tensor
    info: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        return triangular_solve(self.factor, rhs)

    def push(self, v: Tensor) -> Tensor:
        return times(self.J, v)

    def pull(self, w: Tensor) -> Tensor:
        return transposed_times(self.J, w)


class _Sparse(NamedTuple):
    """The same on the pattern."""

    factor: PlainFactor

    @property
    def info(self) -> Tensor:
        return self.factor.info

    def solve(self, rhs: Tensor) -> Tensor:
        return self.factor.solve(rhs)

    def push(self, v: Tensor) -> Tensor:
        return self.factor.push(v)

    def pull(self, w: Tensor) -> Tensor:
        return self.factor.pull(w)


class Curvature:
    """v -> B v, by a second pass through the gradient of <multipliers, g>, which is kept."""

    def __init__(self, map: Map, z: Tensor, multipliers: Tensor) -> None:
        self.z = z.detach().requires_grad_()
        pieces = multipliers.detach().split([part.rows for part in map.parts], 1)
        bent = [(part, piece) for part, piece in zip(map.parts, pieces, strict=True) if not part.linear]
        with torch.enable_grad():
            terms = [(piece * part.value(self.z)).sum() for part, piece in bent]
            total = torch.stack(terms).sum() if terms else self.z.new_zeros(())
            slope = torch.autograd.grad(total, self.z, create_graph=True, allow_unused=True) if terms else (None,)
        self.slope = slope[0]

    @property
    def flat(self) -> bool:
        """Is there no curvature at all?"""
        return self.slope is None or not self.slope.requires_grad

    def __call__(self, v: Tensor) -> Tensor:
        """B v."""
        if self.slope is None or not self.slope.requires_grad:
            return torch.zeros_like(v)
        (found,) = torch.autograd.grad(self.slope, self.z, v, retain_graph=True, allow_unused=True)
        return torch.zeros_like(v) if found is None else found


class Solved(NamedTuple):
    """What a saddle-point system gives.

    Attributes:
        d: (B, n).
        multipliers: (B, m).
        convex: (B,) false where a direction was met that the curvature bends down.
    """

    d: Tensor
    multipliers: Tensor
    convex: Tensor


class Saddle:
    """One system, factored.

    Args:
        factor: dense or on the pattern.
        inverse: (B, n) the inverse metric, 0 for variables that are held.
    """

    def __init__(self, factor: _Dense | _Sparse, inverse: Tensor) -> None:
        self.factor, self.inverse = factor, inverse
        self.sound = factor.info == 0  # (B,) false where there is no factor
        self.solve, self.push, self.pull = factor.solve, factor.push, factor.pull

    def split(self, a: Tensor, refined: bool = False) -> tuple[Tensor, Tensor]:
        """(d, eta) for (a, 0) without curvature; refined, it is that of rows without damping, to first order."""
        eta = self.solve(self.push(self.inverse * a))
        if refined:
            eta = eta + self.solve(self.push(self.inverse * (a - self.pull(eta))))
        return self.inverse * (a - self.pull(eta)), eta

    def bent(self, solved: Solved, B: Curvature, products: int, small: float, refined: bool = False) -> Solved:
        """The solution with curvature, from the one without, by at most so many products with B.

        A sample stops where the squared residual, in the inverse metric, is `small` beside the first one, and where a
        direction p leaves no more than a hundredth of the metric: p'(Omega + B) p.
        """
        if B.flat or not products:
            return solved
        d, multipliers, convex = solved
        r = B(d)
        step, eta = self.split(r, refined)
        p, image, lift = -step, torch.where(self.inverse > 0, -r, 0.0), -eta
        size = first = _dot(r, step)
        going = size > 0
        for _ in range(products):
            Bp, length = B(p), _dot(p, image)
            bend = length + _dot(p, Bp)
            down = going & ~(bend > _CONVEX * length)
            convex, going = convex & ~down.squeeze(1), going & ~down
            if not bool(going.any()):
                break
            far = torch.where(going, size / torch.where(going, bend, 1.0), 0.0)
            d, multipliers, r = d + far * p, multipliers + far * lift, r + far * (image + Bp)
            step, eta = self.split(r, refined)
            now = torch.where(going, _dot(r, step), size)
            turn = torch.where(going, now / torch.where(going, size, 1.0), 0.0)
            p, lift = turn * p - step, turn * lift - eta
            image = turn * image - torch.where(self.inverse > 0, r, 0.0)
            size, going = now, going & (now > small * first)
        return Solved(d, multipliers - eta, convex)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(B, 1)."""
    return (a * b).sum(1, keepdim=True)
