r"""`Sides`: the bounds of one sample as inequalities h_k(y) <= 0 that a certificate may add up.

A row with an upper bound is h = g - u, one with a lower bound h = l - g, and an equality is both. Around a point z

$$ h_k(z + d) = e_k + J_k d + d^\top H_k d, $$

exactly so for linear and quadratic rows; rows given by a function are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import FactoredMap, Map, QuadraticMap

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Sides:
    """K inequalities of one sample at z, in float64.

    Attributes:
        row: (K,) the row that each is a side of.
        sign: (K,) 1 for an upper bound, -1 for a lower one.
        excess: (K,) e, positive where it is violated.
        slope: (K, n) J.
        size: (K,) the sum of the magnitudes that e was computed from, by which its rounding error is bounded.
        slope_size: (K, n) likewise for J.
        hessian: K times that of the row, without the sign: a diagonal (n,) or a matrix (n, n); None for a linear row.
    """

    row: Array
    sign: Array
    excess: Array
    slope: Array
    size: Array
    slope_size: Array
    hessian: tuple[Array | None, ...]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def length(self) -> Array:
        """(K,) the length of each J; that of a vanishing one is |e|, or 1, so that it can be divided by."""
        length = np.linalg.norm(self.slope, axis=1)
        spare = np.abs(self.excess)
        return np.where(length > 0, length, np.where(spare > 0, spare, 1.0))

    def select(self, chosen: Array) -> Sides:
        """Some of them."""
        row, sign, excess, slope, size, slope_size = (field[chosen] for field in self._arrays)
        return Sides(row, sign, excess, slope, size, slope_size, tuple(self.hessian[k] for k in chosen))

    @property
    def _arrays(self) -> tuple[Array, ...]:
        return self.row, self.sign, self.excess, self.slope, self.size, self.slope_size

    def curvature(self, weights: Array) -> tuple[Array, Array | None]:
        """Eigenvalues (n,) of the weighted sum of the H_k, and their vectors, columns (n, n); None for unit vectors."""
        n = self.slope.shape[1]
        diagonal, matrix = np.zeros(n), None
        for weight, sign, H in zip(weights, self.sign, self.hessian, strict=True):
            if H is not None and H.ndim == 1:
                diagonal += weight * sign * H
            elif H is not None:
                matrix = weight * sign * H + (np.zeros((n, n)) if matrix is None else matrix)
        if matrix is None:
            return diagonal, None
        values, vectors = np.linalg.eigh((matrix + matrix.T) / 2 + np.diag(diagonal))
        return values, vectors


def sides(instance: Instance, z: Tensor) -> Sides:
    """The sides of linear and quadratic rows at z (1, n), of an instance of one sample."""
    lower, upper = instance.lower[0].cpu().numpy(), instance.upper[0].cpu().numpy()
    none, empty = np.zeros(0), np.zeros((0, z.shape[1]))
    found, start = [Sides(none.astype(int), none, none, empty, none, empty, ())], 0
    for part in instance.map.parts:
        rows = np.arange(start, start + part.rows)
        start += part.rows
        if part.linear or isinstance(part, (QuadraticMap, FactoredMap)):
            expansion = _expand(part, z)
            found += [expansion.side(rows, 1.0, upper[rows]), expansion.side(rows, -1.0, lower[rows])]
    row, sign, excess, slope, size, slope_size = (
        np.concatenate(field) for field in zip(*(one._arrays for one in found), strict=True)
    )
    return Sides(row, sign, excess, slope, size, slope_size, sum((one.hessian for one in found), ()))


class _Expansion(NamedTuple):
    """Rows around z: value (m,), slope (m, n), the magnitudes that both are made of, and H; None where it is zero."""

    value: Array
    slope: Array
    size: Array
    slope_size: Array
    hessian: Array | None

    def side(self, rows: Array, sign: float, bound: Array) -> Sides:
        """The inequalities that the bounds above, or below, are, where they are finite."""
        value, slope, size, slope_size, H = self
        kept = (np.isfinite(bound) & np.isfinite(value)).nonzero()[0]
        excess, signs = sign * (value - bound)[kept], np.full(len(kept), sign)
        bends = tuple(None if H is None else H[k] for k in kept)
        size = size[kept] + np.abs(bound[kept])
        return Sides(rows[kept], signs, excess, sign * slope[kept], size, slope_size[kept], bends)


def _expand(part: Map, z: Tensor) -> _Expansion:
    """A linear or quadratic part of one sample around z."""
    y = z[0]
    value, J = part.value(z)[0], part.jacobian(z).expand(1, part.rows, len(y))[0]
    size, slope_size, H = J.abs() @ y.abs(), J.abs(), None
    sizes = part
    if isinstance(part, FactoredMap):  # what F F' is summed up from may be larger than what it is
        part, sizes = part.whole(), FactoredMap(part.F.abs(), part.D.abs(), part.G).whole()
    if isinstance(part, QuadraticMap) and isinstance(sizes, QuadraticMap):
        H, absolute = (one.H if one.H.ndim == (2 if one.diagonal else 3) else one.H[0] for one in (part, sizes))
        G, absolute = (part.G if part.G.ndim == 2 else part.G[0]).abs(), absolute.abs()
        bent = absolute * y.abs() if part.diagonal else absolute @ y.abs()
        size, slope_size = (bent + G) @ y.abs(), 2 * bent + G
    value, slope, size, slope_size = (tensor.cpu().numpy() for tensor in (value, J, size, slope_size))
    return _Expansion(value, slope, size, slope_size, None if H is None else H.cpu().numpy())
