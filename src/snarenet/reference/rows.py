r"""From the rows of a set in torch to those of a program in numpy, for one instance after another.

The rows of an `L1Ball` $\|A y - c\|_1 \le r$ have kinks. With as many further variables t as A has rows, which stand
behind those of y, they are linear: $A y - t \le c$, $-A y - t \le -c$ and $\sum_j t_j \le r$; A = I where it has none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints.maps import FactoredMap, IdentityMap, L1BallMap, L1ImageMap, LinearMap, Map, QuadraticMap
from snarenet.reference.program import Array, QuadraticRows


class Rows(NamedTuple):
    """The rows y'(H + F F') y + G y of some instances; each with a dimension for instances in front where x changes it.

    Attributes:
        G: (m, width).
        H: (m, width) or (m, width, width); None for zero.
        F: (m, width, k); None for zero.
        whole: are the H matrices, or diagonals?
    """

    G: Array
    H: Array | None = None
    F: Array | None = None
    whole: bool = False

    @property
    def vary(self) -> bool:
        """Does x change them?"""
        return any(array is not None and array.ndim > depth for array, depth in self._depths())

    def at(self, i: int) -> QuadraticRows:
        """Those of instance i."""
        return QuadraticRows(
            *(None if array is None else array[i] if array.ndim > depth else array for array, depth in self._depths())  # pyright: ignore[reportArgumentType]
        )

    def _depths(self) -> tuple[tuple[Array | None, int], ...]:
        return (self.G, 2), (self.H, 3 if self.whole else 2), (self.F, 3)


def read_rows(part: Map, size: int, width: int) -> Rows | None:
    """The rows of a part on `size` variables, with zeros for further ones up to `width`; None where they are others."""
    if isinstance(part, IdentityMap):
        return Rows(np.eye(size, width))
    if isinstance(part, LinearMap):
        return Rows(widened(part.A, width))
    if isinstance(part, QuadraticMap):
        H = part.H if part.diagonal else (part.H + part.H.mT) / 2
        return Rows(widened(part.G, width), widened(H, width, 1 if part.diagonal else 2), whole=not part.diagonal)
    if isinstance(part, FactoredMap):
        F = widened(part.F.mT, width).swapaxes(-1, -2)
        return Rows(widened(part.G, width), widened(part.D, width), F)
    return None


def read_ball(part: L1BallMap | L1ImageMap, size: int, first: int, width: int, count: int) -> tuple[Rows, Array, Array]:
    """The linear rows of a ball on `size` variables, its own behind them, and their bounds for `count` instances."""
    k = part.center.shape[-1]
    A, eye = array(part.matrix) if isinstance(part, L1ImageMap) else np.eye(size), np.eye(k)
    G = np.zeros((*A.shape[:-2], 2 * k + 1, width))
    G[..., :k, :size], G[..., k : 2 * k, :size] = A, -A
    G[..., : 2 * k, first : first + k] = -np.vstack([eye, eye])
    G[..., -1, first : first + k] = 1.0
    center, radius = np.broadcast_to(array(part.center), (count, k)), np.broadcast_to(array(part.radius), (count, 1))
    upper = np.hstack([center, -center, radius])
    return Rows(G), np.full_like(upper, -np.inf), upper


def widened(tensor: Tensor, width: int, axes: int = 1) -> Array:
    """The last axes of a tensor with zeros up to `width`."""
    more = width - tensor.shape[-1]
    return array(torch.nn.functional.pad(tensor, (0, more) * axes))


def array(tensor: Tensor) -> Array:
    """A tensor in numpy, in float64."""
    return tensor.detach().to("cpu", torch.float64).numpy()
