r"""A certificate that a set is empty, found by nonnegative least squares and checked with its rounding errors.

Every y of the set obeys the sum of its inequalities with weights $\lambda \ge 0$. Around a point z it reads

$$ q(d) = \sum_k \lambda_k h_k(z + d) = \lambda^\top e + (J^\top \lambda)^\top d + d^\top H_\lambda d \;\le\; 0, $$

so the set is empty if q > 0 everywhere. For linear rows that is Farkas' lemma: $J^\top \lambda = 0$ and
$\lambda^\top e > 0$. Such weights solve

$$ \min_{\lambda \ge 0} \; \lVert J^\top \lambda \rVert^2 + (\lambda^\top e - 1)^2 $$

with value 0. Lawson and Hanson's method ends at weights whose columns are independent: a vertex of the solutions, and
Gleeson and Ryan showed that linear rows of a vertex are irreducible: any left out, the others can be obeyed. Rows
that curve the right way ($H_\lambda \succeq 0$) add the least value of q in closed form.

What is computed is never exactly zero. With rounding errors bounded by the magnitudes that went in, q > 0 holds in a
ball around z; the certificate says its radius.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from snarenet.repair.conflict.sides import Array, Sides

_EPS = float(np.finfo(np.float64).eps)
_FAR = 1e6  # least radius of a certificate, in distances of z from the origin and from its rows
_SLIGHT = 1e-9  # share of the weights below which one is rounding, if the certificate holds without it
_FLAT = 1e-10  # share of the largest curvature below which a direction counts as flat
_DEPENDENT = 1e-10  # distance of a column of length 1 from those before it below which they may be dependent
_ZERO = 2.0**10 * _EPS  # share of its terms below which a sum is zero up to rounding


@dataclass(frozen=True, eq=False)
class Certificate:
    r"""Weights of the bounds that prove a set empty: for linear rows A they obey Farkas' conditions

    (upper - lower)' A = 0,   upper, lower >= 0,   gap = lower' l - upper' u > 0.

    Attributes:
        lower: (rows,) weights of the lower bounds, float64; zero for rows that are not needed.
        upper: (rows,) weights of the upper bounds; sum_i (lower_i + upper_i) |J_i| = 1.
        gap: how much the weighted sum of the rows is above what it may be, after rounding errors: positive.
        slope: the length of (upper - lower)' J, zero but for rounding or, if `exact` is False, nearly.
        radius: no y within this distance of `SampleConflict.point` obeys the rows. It is as large as rounding errors
            allow to say.
        exact: is `slope` zero up to rounding, or harmless, because the rows are strictly convex?
    """

    lower: Tensor
    upper: Tensor
    gap: float
    slope: float
    radius: float
    exact: bool


def certify(sides: Sides, z: Array, rows: int) -> Certificate | None:
    """A certificate for the set of these sides, taken at z, which has so many rows; None if none was found."""
    violated = (sides.excess > 0).nonzero()[0]
    if not len(violated):
        return None
    # at a least-squares point the violated sides are enough, and few
    return _certify(sides.select(violated), z, rows) or _certify(sides, z, rows)


def _certify(sides: Sides, z: Array, rows: int) -> Certificate | None:
    while len(sides) and sides.excess.max() > 0:
        weights = _weights(sides)
        used = weights.nonzero()[0]
        if not len(used):
            return None
        few, weights = _pruned(sides.select(used), weights[used])
        if _convex(few, weights):
            return _check(few, weights, z, rows)
        bent = np.array([not _convex(few.select(np.array([k])), np.ones(1)) for k in range(len(few))])
        if not bent.any():
            return None
        out = few.sign[bent] * (few.row[bent] + 1)  # a side is known by its row and sign
        sides = sides.select((~np.isin(sides.sign * (sides.row + 1), out)).nonzero()[0])
    return None


def _weights(sides: Sides) -> Array:
    """(K,) the weights that come nearest to Farkas' conditions, for sides of length 1, violated by 1 at most."""
    length = sides.length
    excess = sides.excess / length
    columns = np.vstack([(sides.slope / length[:, None]).T, excess / excess.max()])
    norms = np.linalg.norm(columns, axis=0)
    return nonnegative_least_squares(columns / norms) / norms / length


def _pruned(sides: Sides, weights: Array) -> tuple[Sides, Array]:
    """The sides without those that are in by rounding, with weights that sum to 1 in sides of length 1."""
    shares = weights * sides.length / (weights @ sides.length)
    kept = (shares > _SLIGHT).nonzero()[0]
    if len(kept) < len(sides):
        few = sides.select(kept)
        again = _weights(few)
        if (again > 0).all():
            return few, again / (again @ few.length)
    return sides, weights / (weights @ sides.length)


def _convex(sides: Sides, weights: Array) -> bool:
    """Is the weighted sum convex, up to rounding?"""
    values, _ = sides.curvature(weights)
    norms = np.array([0.0 if H is None else np.linalg.norm(H) for H in sides.hessian])
    return bool(values.min(initial=0.0) >= -_ZERO * (weights @ norms))


def _check(sides: Sides, weights: Array, z: Array, rows: int) -> Certificate | None:
    """The certificate with these weights, if q > 0 in a large ball around z in spite of all rounding."""
    n = len(z)
    slope, terms = weights @ sides.slope, weights @ sides.slope_size
    slope_error = _EPS * (len(sides) + n + 2) * terms
    gap = weights @ sides.excess - _EPS * (len(sides) + n + 4) * (weights @ sides.size)
    curvature, directions = sides.curvature(weights)
    curved = curvature > _FLAT * max(curvature.max(initial=0.0), 0.0)
    if directions is None:
        along = np.abs(slope) + slope_error
    else:
        along = np.abs(directions.T @ slope) + np.abs(directions.T) @ slope_error
    gap = float(gap - (along[curved] ** 2 / (4 * curvature[curved])).sum())
    level = float(np.linalg.norm(along[~curved]))
    if not gap > 0:
        return None
    radius = gap / level if level else np.inf
    reach = np.linalg.norm(z) + (np.abs(sides.excess) / sides.length).max()
    if not radius >= _FAR * reach:
        return None
    upper, lower = np.zeros(rows), np.zeros(rows)
    np.add.at(upper, sides.row[sides.sign > 0], weights[sides.sign > 0])
    np.add.at(lower, sides.row[sides.sign < 0], weights[sides.sign < 0])
    length = float(np.linalg.norm(slope))
    exact = not level or length <= 2 * np.linalg.norm(slope_error)
    return Certificate(torch.from_numpy(lower), torch.from_numpy(upper), gap, length, float(radius), bool(exact))


def nonnegative_least_squares(columns: Array) -> Array:
    """(K,) the t >= 0 for which columns (n, K), of length 1, add up nearest to the last unit vector.

    Lawson and Hanson's method: columns come in one at a time, and leave where their weight would become negative; those
    in use are independent.
    """
    target = np.zeros(len(columns))
    target[-1] = 1.0
    weights, barred = np.zeros(columns.shape[1]), np.zeros(columns.shape[1], bool)
    used: list[int] = []
    for _ in range(3 * max(columns.shape)):
        rest = target - columns[:, used] @ weights[used]
        pull = columns.T @ rest
        pull[used], pull[barred] = -np.inf, -np.inf
        best = int(pull.argmax())
        if pull[best] <= 2 * _EPS * (1 + weights.sum()):
            break
        tried = _solve(columns, [*used, best], target)
        if tried[-1] <= 0:  # by rounding: it depends on those in use
            barred[best] = True
            continue
        used.append(best)
        used = _retreat(columns, used, weights, tried, target)
        barred[:] = False
    return weights


def _solve(columns: Array, used: list[int], target: Array) -> Array:
    """The weights, of any sign, with which the columns in use add up nearest to the target."""
    some = columns[:, used]
    if len(used) <= len(columns):
        q, r = np.linalg.qr(some)
        if np.abs(np.diagonal(r)).min(initial=1.0) > _DEPENDENT:
            return np.linalg.solve(r, q.T @ target)
    return np.linalg.lstsq(some, target, rcond=None)[0]


def _retreat(columns: Array, used: list[int], weights: Array, tried: Array, target: Array) -> list[int]:
    """The columns still in use when all weights, which are changed in place, are positive."""
    while len(used) and tried.min() <= 0:
        old = weights[used]
        falling = tried <= 0
        shares = np.where(falling, old / np.where(falling, old - tried, 1.0), np.inf)
        moved = old + shares.min() * (tried - old)
        moved[falling & (moved <= _EPS * moved.max())] = 0.0
        moved[shares.argmin()] = 0.0  # also in spite of rounding
        weights[used] = moved
        used = [k for k in used if weights[k] > 0]
        tried = _solve(columns, used, target)
    weights[:] = 0.0
    weights[used] = tried
    return used
