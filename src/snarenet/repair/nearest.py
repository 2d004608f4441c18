r"""`approach`: towards the nearest point that obeys the linear constraints, by a few iterations of ADMM.

The repair finds *a* feasible point; with satisfied rows frozen it may lie far from the prediction, and the map from one
to the other may stretch distances, and with them the errors of a network. The orthogonal projection does not: it never
moves two points apart. For constant linear rows A, of unit length, it is

$$ \min_y \tfrac12 \| y - \hat y \|^2 \;\text{ so that }\; A y = z, \; l \le z \le u, $$

and, with $K = (I + \rho A A^\top)^{-1}$ computed once, every iteration is one product in constraint space:

$$ a = K A \hat y + (I - K)(z - s), \quad v = \alpha a + (1 - \alpha) z + s, \quad
   z \leftarrow \min(\max(v, l), u), \quad s \leftarrow v - z; \qquad y = \hat y - \rho A^\top s. $$

Plain differentiable operations. Whatever they leave of the violation, and all other rows, are the repair's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.data import Memo
from snarenet.constraints.maps import IdentityMap, LinearMap, Map, StackedMap
from snarenet.repair.structure import is_constant

# chosen by the distance to the projection after 20 iterations, on validation inputs of NCLP
_PENALTY, _RELAXATION = 3.0, 1.8


class _Rows(NamedTuple):
    """Constant rows, scaled to unit length."""

    A: Tensor  # (m, n)
    lengths: Tensor  # (m,) what they were divided by
    K: Tensor  # (m, m)


def approach(memo: Memo, instance: Instance, y: Tensor, iterations: int) -> Tensor:
    """Points (B, n) near the projections of y onto the constant linear rows; y itself if there are none."""
    parts = instance.map.parts if isinstance(instance.map, StackedMap) else (instance.map,)
    chosen = [i for i, part in enumerate(parts) if isinstance(part, IdentityMap) or is_constant(part)]
    if not chosen:
        return y
    rows = _rows(memo, parts, chosen, y)
    counts = [part.rows for part in parts]
    lower, upper = (
        torch.cat([b for i, b in enumerate(bound.split(counts, 1)) if i in chosen], 1) / rows.lengths
        for bound in (instance.lower, instance.upper)
    )
    image = y @ rows.A.T
    fixed, z, s = image @ rows.K, torch.minimum(torch.maximum(image, lower), upper), torch.zeros_like(image)
    for _ in range(iterations):
        t = z - s
        v = _RELAXATION * (fixed + t - t @ rows.K) + (1 - _RELAXATION) * z + s
        z = torch.minimum(torch.maximum(v, lower), upper)
        s = v - z
    return y - _PENALTY * (s @ rows.A)


def _rows(memo: Memo, parts: Sequence[Map], chosen: list[int], y: Tensor) -> _Rows:
    """The rows of the chosen parts; computed once."""
    matrices = tuple(part.A for part in (parts[i] for i in chosen) if isinstance(part, LinearMap))

    def build() -> _Rows:
        eye = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
        A = torch.cat([part.A if isinstance(part, LinearMap) else eye for part in (parts[i] for i in chosen)])
        lengths = A.norm(dim=1)
        lengths = torch.where(lengths > 0, lengths, 1.0)
        A = A / lengths.unsqueeze(1)
        gram = torch.eye(len(A), dtype=A.dtype, device=A.device) + _PENALTY * A @ A.T
        return _Rows(A, lengths, torch.linalg.inv(gram))

    return memo.get(("nearest", *chosen, y.shape[1], y.dtype, y.device), matrices, build)
