r"""`approach`: towards the nearest point that obeys the linear constraints, by a few iterations of ADMM.

For constant linear rows A, of unit length, the orthogonal projection is

$$ \min_y \tfrac12 \| y - \hat y \|^2 \;\text{ so that }\; A y = z, \; l \le z \le u, $$

and, with $K = (I + \rho A A^\top)^{-1}$ computed once, every iteration is one product in constraint space:

$$ a = K A \hat y + (I - K)(z - s), \quad v = \alpha a + (1 - \alpha) z + s, \quad
   z \leftarrow \min(\max(v, l), u), \quad s \leftarrow v - z; \qquad y = \hat y - \rho A^\top s. $$

With weights W, a diagonal, the distance is $\| y - \hat y \|_W$: rows have unit length if $a^\top W^{-1} a = 1$, and
$A^\top$ alone becomes $W^{-1} A^\top$.

Whatever the iterations leave of the violation, and all other rows, are the repair's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import LinearMap, Map
from snarenet.memo import Memo

# chosen by the distance to the projection after 20 iterations, on validation inputs of NCLP
_PENALTY, RELAXATION = 3.0, 1.8

Iterate = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class _UnitRows(NamedTuple):
    """Constant rows, scaled to unit length."""

    A: Tensor  # (m, n)
    lengths: Tensor  # (m,) what they were divided by
    K: Tensor  # (m, m)
    back: Tensor  # (m, n) A, its columns divided by the weights


def approach(
    memo: Memo, instance: Instance, y: Tensor, iterations: int, weights: Tensor | None, iterate: Iterate
) -> Tensor:
    """Points (B, n) near the projections of y onto the constant linear rows; y itself if there are none.

    `weights` (n,) are those of the squared distance; `iterate` is `multipliers`, or another that computes the same.
    """
    parts = instance.map.parts
    chosen = [i for i, part in enumerate(parts) if part.constant]
    if not chosen:
        return y
    rows = _rows(memo, parts, chosen, y, weights)
    counts = [part.rows for part in parts]
    lower, upper = (
        torch.cat([b for i, b in enumerate(bound.split(counts, 1)) if i in chosen], 1) / rows.lengths
        for bound in (instance.lower, instance.upper)
    )
    image = y @ rows.A.T
    return y - _PENALTY * (iterate(image, lower, upper, rows.K, iterations) @ rows.back)


def prepare(memo: Memo, parts: Sequence[Map], weights: Tensor | None, size: int) -> None:
    """Compute beforehand what is the same for all batches, for constant rows on so many variables."""
    matrix = next((part.A for part in parts if isinstance(part, LinearMap)), None)
    if matrix is not None:
        _rows(memo, parts, list(range(len(parts))), matrix.new_empty(0, size), weights)


def multipliers(image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int) -> Tensor:
    """s after so many iterations, by plain differentiable operations."""
    fixed, z, s = image @ K, torch.minimum(torch.maximum(image, lower), upper), torch.zeros_like(image)
    for _ in range(iterations):
        t = z - s
        v = RELAXATION * (fixed + t - t @ K) + (1 - RELAXATION) * z + s
        z = torch.minimum(torch.maximum(v, lower), upper)
        s = v - z
    return s


def _rows(memo: Memo, parts: Sequence[Map], chosen: list[int], y: Tensor, weights: Tensor | None) -> _UnitRows:
    """The rows of the chosen parts; computed once."""
    matrices = tuple(part.A for part in (parts[i] for i in chosen) if isinstance(part, LinearMap))
    given = () if weights is None else (weights,)

    def build() -> _UnitRows:
        eye = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
        A = torch.cat([part.A if isinstance(part, LinearMap) else eye for part in (parts[i] for i in chosen)])
        back = A if weights is None else A / weights.to(A.dtype)
        lengths = (A * back).sum(1).sqrt()
        lengths = torch.where(lengths > 0, lengths, 1.0)
        A, back = A / lengths.unsqueeze(1), back / lengths.unsqueeze(1)
        gram = torch.eye(len(A), dtype=A.dtype, device=A.device) + _PENALTY * A @ back.T
        return _UnitRows(A, lengths, torch.linalg.inv(gram).contiguous(), back)

    return memo.get(("nearest", *chosen, len(given), y.shape[1], y.dtype, y.device), (*matrices, *given), build)
