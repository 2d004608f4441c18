r"""`approach`: towards the nearest point that obeys the linear constraints, by a few iterations of ADMM.

The repair finds *a* feasible point; with satisfied rows frozen it may lie far from the prediction, and the map from one
to the other may stretch distances, and with them the errors of a network. The orthogonal projection does not: it never
moves two points apart. For constant linear rows A, of unit length, it is

$$ \min_y \tfrac12 \| y - \hat y \|^2 \;\text{ so that }\; A y = z, \; l \le z \le u, $$

and, with $K = (I + \rho A A^\top)^{-1}$ computed once, every iteration is one product in constraint space:

$$ a = K A \hat y + (I - K)(z - s), \quad v = \alpha a + (1 - \alpha) z + s, \quad
   z \leftarrow \min(\max(v, l), u), \quad s \leftarrow v - z; \qquad y = \hat y - \rho A^\top s. $$

With weights W, a diagonal, the distance is $\| y - \hat y \|_W$: rows have unit length if $a^\top W^{-1} a = 1$, and
$A^\top$ alone becomes $W^{-1} A^\top$.

On a GPU all iterations are one kernel each way. Whatever they leave of the violation, and all other rows, are the
repair's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import IdentityMap, LinearMap, Map
from snarenet.memo import Memo
from snarenet.repair import fused, kernels
from snarenet.repair.options import check_weights
from snarenet.repair.projection import project
from snarenet.repair.structure import is_constant

# chosen by the distance to the projection after 20 iterations, on validation inputs of NCLP
_PENALTY, _RELAXATION = 3.0, 1.8


class _Rows(NamedTuple):
    """Constant rows, scaled to unit length."""

    A: Tensor  # (m, n)
    lengths: Tensor  # (m,) what they were divided by
    K: Tensor  # (m, m)
    back: Tensor  # (m, n) A, its columns divided by the weights


def approach(memo: Memo, instance: Instance, y: Tensor, iterations: int, weights: Tensor | None = None) -> Tensor:
    """Points (B, n) near the projections of y.

    Where all rows have diagonal Hessians, and some are not constant and linear, these are the projections onto all
    rows, by `project`; else onto the constant linear rows, by ADMM, and y itself if there are none. `weights` (n,) are
    those of the squared distance, one for each variable; equal unless given.
    """
    if weights is not None:
        memo.get(("weights", y.shape[1]), (weights,), lambda: check_weights(weights, iterations, y.shape[1]))
    parts = instance.map.parts
    chosen = [i for i, part in enumerate(parts) if isinstance(part, IdentityMap) or is_constant(part)]
    if len(chosen) < len(parts) and instance.map.diagonal_hessian:
        return project(memo, instance, y, iterations, weights)
    if not chosen:
        return y
    rows = _rows(memo, parts, chosen, y, weights)
    counts = [part.rows for part in parts]
    lower, upper = (
        torch.cat([b for i, b in enumerate(bound.split(counts, 1)) if i in chosen], 1) / rows.lengths
        for bound in (instance.lower, instance.upper)
    )
    image = y @ rows.A.T
    in_kernel = kernels.supported(image) and image.shape[1] <= fused.MOST_ROWS
    multipliers = _Multipliers.apply if in_kernel else _multipliers
    return y - _PENALTY * (multipliers(image, lower, upper, rows.K, iterations) @ rows.back)


def _multipliers(image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int) -> Tensor:
    """s after so many iterations, by plain differentiable operations."""
    fixed, z, s = image @ K, torch.minimum(torch.maximum(image, lower), upper), torch.zeros_like(image)
    for _ in range(iterations):
        t = z - s
        v = _RELAXATION * (fixed + t - t @ K) + (1 - _RELAXATION) * z + s
        z = torch.minimum(torch.maximum(v, lower), upper)
        s = v - z
    return s


class _Multipliers(torch.autograd.Function):
    r"""The same by one kernel each way.

    With $\bar z$ and $\bar s$ after an iteration, $\bar v$ is $\bar z$ where v was inside its bounds and $\bar s$ where
    it was cut off, which gives $\bar z - \bar s$ to the bound; then $\bar t = \alpha (\bar v - \bar v K)$,
    $\bar z = (1 - \alpha) \bar v + \bar t$ and $\bar s = \bar v - \bar t$.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int) -> Tensor:
        image, lower, upper = (tensor.contiguous() for tensor in (image, lower, upper))
        record = any(ctx.needs_input_grad)
        codes = torch.empty((iterations + 1) * record, *image.shape, dtype=torch.int8, device=image.device)
        found = torch.empty_like(image)
        fused.launch("approach", image, 6, lower, upper, K, iterations, _RELAXATION, found, codes, int(record))
        ctx.K, ctx.codes, ctx.iterations = K, codes, iterations
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        cotangent = gradients[0].clone(memory_format=torch.contiguous_format)
        lower, upper = torch.empty_like(cotangent), torch.empty_like(cotangent)
        fused.launch("approach_back", cotangent, 6, ctx.K, ctx.iterations, _RELAXATION, ctx.codes, lower, upper)
        return cotangent, lower, upper, None, None


def _rows(memo: Memo, parts: Sequence[Map], chosen: list[int], y: Tensor, weights: Tensor | None) -> _Rows:
    """The rows of the chosen parts; computed once."""
    matrices = tuple(part.A for part in (parts[i] for i in chosen) if isinstance(part, LinearMap))
    given = () if weights is None else (weights,)

    def build() -> _Rows:
        eye = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
        A = torch.cat([part.A if isinstance(part, LinearMap) else eye for part in (parts[i] for i in chosen)])
        back = A if weights is None else A / weights.to(A.dtype)
        lengths = (A * back).sum(1).sqrt()
        lengths = torch.where(lengths > 0, lengths, 1.0)
        A, back = A / lengths.unsqueeze(1), back / lengths.unsqueeze(1)
        gram = torch.eye(len(A), dtype=A.dtype, device=A.device) + _PENALTY * A @ back.T
        return _Rows(A, lengths, torch.linalg.inv(gram).contiguous(), back)

    return memo.get(("nearest", *chosen, len(given), y.shape[1], y.dtype, y.device), (*matrices, *given), build)
