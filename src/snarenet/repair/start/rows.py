r"""`RowsAt`: rows to first order at one z, and the saddle-point systems made of them.

With the metric as a diagonal $\Omega$ (variables may be held: $d_i$ is given), the damping $\delta$ of each row and the
curvature $\sum_i \mu_i \nabla^2 g_i(z) = D + G^\top G + B$, a `Saddle` solves

$$ \begin{pmatrix} \Omega + D + B & J^\top & G^\top \\ J & -\mathrm{diag}(\delta) & \\ G & & -I \end{pmatrix}
   \begin{pmatrix} d \\ \eta \\ \zeta \end{pmatrix} = \begin{pmatrix} a \\ b \\ 0 \end{pmatrix}. $$

D, a diagonal, and G, a few rows, are the curvature of *bowls*: convex rows with an upper bound alone whose Hessians are
known by factors. G stands below J like further rows. Without B one factor of
$J (\Omega + D)^{-1} J^\top + \mathrm{diag}(\delta)$ solves the system, a repair's; B, of all other rows, is known by
its products alone, and conjugate gradients that this factor preconditions need few of them where the set is near in
sizes of its radii of curvature.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from snarenet.constraints.maps import Map, times, transposed_times
from snarenet.linalg import SparseFactor, Systems, add_to_diagonal, cholesky_ex, triangular_solve

_UNDAMPED = 20  # steps that take the damping out of a system, at most
_CONVEX = 0.01  # share of the metric that the curvature must leave in a direction


class RowsAt:
    """Rows at z: J, once for many systems.

    Args:
        map: the rows.
        z: (B, n) where.
        weights: (n,) the metric.
        systems: those on the pattern of J; None for dense ones.
        bowls: for every part of the map whether it is a bowl; none of them is if J is on its pattern.
    """

    def __init__(self, map: Map, z: Tensor, weights: Tensor, systems: Systems | None, bowls: tuple[bool, ...]) -> None:
        linear = map.linearize(z)
        self.map, self.z, self.weights, self.systems, self.bowls = map, z, weights, systems, bowls
        if systems is not None:
            self.values, self.pattern = linear.values, linear.pattern  # in this order: it may widen the pattern
            assert self.pattern is not None
        else:
            self.values, self.pattern = linear.jacobian.expand(len(z), -1, -1), None

    @cached_property
    def lengths(self) -> Tensor:
        """(B, m) squared lengths of the rows in the metric, J W^-1 J' at its diagonal; positive."""
        if self.pattern is None:
            squares = self.values.square() @ (1 / self.weights)
        else:
            column = self.pattern.on(self.z.device)[1]
            squares = self.pattern.row_sums(self.values.square() / self.weights[column])
        return torch.where(squares > 0, squares, 1.0)

    def pull(self, multipliers: Tensor) -> Tensor:
        """J' times multipliers (B, m)."""
        if self.pattern is None:
            return transposed_times(self.values, multipliers)
        return self.pattern.transposed_times(self.values, multipliers)

    def saddle(self, system: System, exact: bool) -> Saddle:
        """A system, factored.

        An exact one divides by no damping: the primal form of a sparse system, which does, has half of the digits.
        """
        metric, held, damping, active, multipliers = system
        damping = torch.where(active, damping, 1.0)
        pieces = list(zip(self.map.parts, multipliers.split([part.rows for part in self.map.parts], 1), strict=True))
        rest = [piece for piece, bowl in zip(pieces, self.bowls, strict=True) if not bowl]
        B = Curvature(rest, self.z)
        systems = None if self.systems is None or self.pattern is None else self.systems(self.pattern)
        systems = systems.exact if systems is not None and exact else systems
        if systems is not None:
            inverse = torch.where(held, 0.0, 1 / metric)
            return Saddle(systems.factor(self.values, damping, inverse, active), inverse, B)
        J = self.values if self.pattern is None else self.pattern.dense(self.values)
        rows = [J]
        for part, own in (piece for piece, bowl in zip(pieces, self.bowls, strict=True) if bowl):
            hessian = part.convex_hessian(own.clamp(min=0))  # below 0 on the way there, never at the end
            assert hessian is not None
            metric, rows = metric + hessian[0], [*rows, hessian[1]]
        inverse = torch.where(held, 0.0, 1 / metric)
        return Saddle(_dense(torch.cat(rows, 1) if len(rows) > 1 else J, inverse, damping, active), inverse, B)


class System(NamedTuple):
    """What a saddle-point system is made of, beside J.

    Attributes:
        metric: (B, n) Omega.
        held: (B, n) the variables that are held.
        damping: (B, m) delta.
        active: (B, m) the rows that are in it.
        multipliers: (B, m) those of the curvature.
    """

    metric: Tensor
    held: Tensor
    damping: Tensor
    active: Tensor
    multipliers: Tensor


class _Dense(NamedTuple):
    """J and below it G, which of these rows are in the system, and its Cholesky factor."""

    J: Tensor
    used: Tensor
    factor: Tensor
    info: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        return triangular_solve(self.factor, rhs)

    def push(self, v: Tensor) -> Tensor:
        return torch.where(self.used, times(self.J, v), 0.0)

    def pull(self, w: Tensor) -> Tensor:
        return transposed_times(self.J, w)


def _dense(J: Tensor, inverse: Tensor, damping: Tensor, active: Tensor) -> _Dense:
    """The system of J (B, m + k, n), whose last k rows are those of G."""
    more = J.shape[1] - damping.shape[1]
    used, diagonal = pad(active, (0, more), value=True), pad(damping, (0, more), value=1.0)
    system = torch.where(used.unsqueeze(1) & used.unsqueeze(2), (J * inverse.unsqueeze(1)) @ J.mT, 0.0)
    return _Dense(J, used, *cholesky_ex(add_to_diagonal(system, diagonal)))


class Curvature:
    """v -> B v for parts and their multipliers."""

    def __init__(self, pieces: list[tuple[Map, Tensor]], z: Tensor) -> None:
        found = (part.curvature(z, own.detach()) for part, own in pieces if not part.linear)
        self.products = [product for product in found if product is not None]

    @property
    def flat(self) -> bool:
        """Is there no curvature at all?"""
        return not self.products

    def __call__(self, v: Tensor) -> Tensor:
        """B v."""
        return sum((product(v) for product in self.products), torch.zeros_like(v))


class Solved(NamedTuple):
    """What a saddle-point system gives.

    Attributes:
        d: (B, n).
        multipliers: (B, m + k) eta and zeta.
        convex: (B,) false where a direction was met that the curvature bends down.
    """

    d: Tensor
    multipliers: Tensor
    convex: Tensor


class Saddle:
    """One system, factored.

    Args:
        factor: dense or on the pattern.
        inverse: (B, n) the inverse of the metric with D, 0 for variables that are held.
        B: the curvature that is not in the factor.
    """

    def __init__(self, factor: _Dense | SparseFactor, inverse: Tensor, B: Curvature) -> None:
        self.factor, self.inverse, self.B = factor, inverse, B
        self.sound = factor.info == 0  # (B,) false where there is no factor
        self.solve, self.push, self.pull = factor.solve, factor.push, factor.pull

    def move(self, t: Tensor, off: Tensor) -> Solved:
        """The solution without B, where t (B, n) is d without rows, and J d = delta eta - off, (B, m)."""
        right = self.push(t)
        eta = self.solve(right + pad(off, (0, right.shape[1] - off.shape[1])))
        return Solved(t - self.inverse * self.pull(eta), eta, self.sound)

    def split(self, a: Tensor, rows: int | None = None) -> tuple[Tensor, Tensor]:
        """(d, eta) for (a, 0) without B; without the damping of J's rows, too, if it is said how many they are."""
        right = self.push(self.inverse * a)
        eta = self.solve(right)
        if rows is not None:
            eta = self._undamped(eta, right, rows)
        return self.inverse * (a - self.pull(eta)), eta

    def _undamped(self, eta: Tensor, right: Tensor, rows: int) -> Tensor:
        """eta (B, m + k) of the system without damping, from that with it.

        By conjugate gradients that the factor preconditions: one or two steps, more where rows are nearly dependent.
        One is enough where this is part of a search for the solution with curvature.
        """

        def times(w: Tensor) -> Tensor:
            image = self.push(self.inverse * self.pull(w))
            image[:, rows:] += w[:, rows:]
            return image

        small = torch.finfo(eta.dtype).eps ** 1.5 * _dot(right, eta)
        left, p, size = right - times(eta), torch.zeros_like(eta), torch.ones_like(small)
        for _ in range(_UNDAMPED if self.B.flat else 1):
            step = self.solve(left)
            now = _dot(left, step)
            going = now > small
            if not bool(going.any()):
                break
            p = step + torch.where(going, now / size, 0.0) * p
            image, size = times(p), torch.where(going, now, size)
            bend = _dot(p, image)
            far = torch.where(going & (bend > 0), now / bend, 0.0)
            eta, left = eta + far * p, left - far * image
        return eta

    def bent(self, solved: Solved, products: int, small: float, rows: int | None = None) -> Solved:
        """The solution with curvature, from the one without, by at most so many products with B.

        A sample stops where the squared residual, in the inverse metric, is `small` beside the first one, and where a
        direction p leaves no more than a hundredth of the metric: p'(Omega + D + G'G + B) p.
        """
        if self.B.flat or not products:
            return solved
        d, multipliers, convex = solved
        B = self.B
        r = B(d)
        step, eta = self.split(r, rows)
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
            step, eta = self.split(r, rows)
            now = torch.where(going, _dot(r, step), size)
            turn = torch.where(going, now / torch.where(going, size, 1.0), 0.0)
            p, lift = turn * p - step, turn * lift - eta
            image = turn * image - torch.where(self.inverse > 0, r, 0.0)
            size, going = now, going & (now > small * first)
        return Solved(d, multipliers - eta, convex)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(B, 1)."""
    return (a * b).sum(1, keepdim=True)
