r"""`approach`: towards the nearest point that obeys the linear constraints, by a few iterations of ADMM.

For constant linear rows A, of unit length, the orthogonal projection is

$$ \min_y \tfrac12 \| y - \hat y \|^2 \;\text{ so that }\; A y = z, \; l \le z \le u, $$

and, with $K = (I + \rho A A^\top)^{-1}$ computed once, every iteration is one product in constraint space:

$$ a = K A \hat y + (I - K)(z - s), \quad v = \alpha a + (1 - \alpha) z + s, \quad
   z \leftarrow \min(\max(v, l), u), \quad s \leftarrow v - z; \qquad y = \hat y - \rho A^\top s. $$

With weights W, a diagonal, the distance is $\| y - \hat y \|_W$: rows have unit length if $a^\top W^{-1} a = 1$, and
$A^\top$ alone becomes $W^{-1} A^\top$.

Whatever the iterations leave of the violation, and all other rows, are the repair's.

How near that is, the multipliers $\mu = \rho s$ tell. Each is that of the bound b at which its z is, so by duality no
point of the set is nearer to $\hat y$ than d,

$$ d^2 = \| y - \hat y \|^2 + 2 \mu^\top (A y - b). $$

The iterations have settled where the terms of that product are small beside the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import LinearMap, Map
from snarenet.memo import Memo
from snarenet.tracing import tracing, without_grad

# chosen by the distance to the projection after 20 iterations, on validation inputs of NCLP
_PENALTY, RELAXATION = 3.0, 1.8
_SETTLED = 1e-3  # share of a squared distance that the terms of the bound on it leave open

Iterate = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class _UnitRows(NamedTuple):
    """Constant rows, scaled to unit length."""

    A: Tensor  # (m, n)
    lengths: Tensor  # (m,) what they were divided by
    K: Tensor  # (m, m)
    back: Tensor  # (m, n) A, its columns divided by the weights


def approach(
    memo: Memo,
    instance: Instance,
    y: Tensor,
    iterations: int,
    weights: Tensor | None,
    iterate: Iterate,
    strict: bool = False,
) -> Tensor:
    """Points (B, n) near the projections of y onto the constant linear rows; y itself if there are none.

    Args:
        memo: keeps what is computed once.
        instance: the constraints.
        y: (B, n) predictions.
        iterations: how many.
        weights: (n,) those of the squared distance, equal unless given.
        iterate: `multipliers`, or another that computes the same.
        strict: y itself where the iterations have not settled.
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
    s = iterate(image, lower, upper, rows.K, iterations)
    found = y - _PENALTY * (s @ rows.back)
    if not strict:
        return found
    with without_grad():
        now = found @ rows.A.T
        bound = torch.where(s > 0, upper, torch.where(s < 0, lower, now))
        settled = 2 * (s * (now - bound)).abs().sum(1) <= _SETTLED * (s * (image - now)).sum(1)
    return torch.where(settled.unsqueeze(1), found, y)


def prepare(memo: Memo, parts: Sequence[Map], weights: Tensor | None, size: int) -> None:
    """Compute beforehand what is the same for all batches, for constant rows on so many variables."""
    matrix = next((part.A for part in parts if isinstance(part, LinearMap)), None)
    if matrix is not None:
        _rows(memo, parts, list(range(len(parts))), matrix.new_empty(0, size), weights)


def multipliers(image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int) -> Tensor:
    """s after so many iterations from the image A y (B, rows)."""
    given = image, lower, upper
    if tracing() or not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)):
        return _iterate(*given, K, iterations)
    found: Any = _Multipliers.apply(*given, K, iterations)
    return found


def _iterate(
    image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int, cuts: list[Tensor] | None = None
) -> Tensor:
    """The same; `cuts` takes on which side of its bounds each entry was, at first and after every iteration."""
    fixed, z, s = image @ K, torch.minimum(torch.maximum(image, lower), upper), torch.zeros_like(image)
    if cuts is not None:
        cuts.append((image - z).sign().to(torch.int8))
    for _ in range(iterations):
        t = z - s
        v = RELAXATION * (fixed + t - t @ K) + (1 - RELAXATION) * z + s
        z = torch.minimum(torch.maximum(v, lower), upper)
        s = v - z
        if cuts is not None:
            cuts.append(s.sign().to(torch.int8))
    return s


class _Multipliers(torch.autograd.Function):
    r"""The iterations with a tape of a byte an entry and iteration.

    With $\bar z$ and $\bar s$ after an iteration, $\bar v$ is $\bar z$ where v was inside its bounds and $\bar s$ where
    it was cut off, which gives $\bar z - \bar s$ to the bound; then $\bar t = \alpha (\bar v - \bar v K)$,
    $\bar z = (1 - \alpha) \bar v + \bar t$ and $\bar s = \bar v - \bar t$.
    """

    @staticmethod
    def forward(ctx: Any, image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int) -> Tensor:
        ctx.K, ctx.cuts = K, []
        return _iterate(image, lower, upper, K, iterations, ctx.cuts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        s = gradients[0]
        z, inside, cut_off, signed = (torch.zeros_like(s) for _ in range(4))
        for cut in reversed(ctx.cuts[1:]):
            gone = torch.where(cut == 0, 0.0, z - s)
            cut_off, signed, v = cut_off + gone, signed + gone * cut, z - gone
            t = RELAXATION * (v - v @ ctx.K)
            inside, z, s = inside + v, (1 - RELAXATION) * v + t, v - t
        gone = torch.where(ctx.cuts[0] == 0, 0.0, z)
        cut_off, signed = cut_off + gone, signed + gone * ctx.cuts[0]
        image = z - gone + RELAXATION * inside @ ctx.K
        return image, (cut_off - signed) / 2, (cut_off + signed) / 2, None, None


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
