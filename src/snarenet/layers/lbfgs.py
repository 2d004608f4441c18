r"""L-BFGS for a batch: an estimate H of the inverse Hessian of each sample from the last steps that it took.

With pairs $s_j$ (change of position) and $t_j$ (change of gradient), $\rho_j = 1 / s_j^\top t_j$, newest pair last:

$$ q \leftarrow q - t_j \alpha_j, \; \alpha_j = \rho_j s_j^\top q \;\; (\text{newest first}); \quad
   z = \gamma q; \quad z \leftarrow z + s_j (\alpha_j - \rho_j t_j^\top z) \;\; (\text{oldest first}) $$

takes q = g to z = H g, where $\gamma = s^\top t / t^\top t$ of the newest pair. Plain differentiable operations.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CURVATURE = 1e-8  # cosine between s and t below which a pair is left out: it would spoil H, or make it indefinite


class Pair(NamedTuple):
    """One step of every sample, (B, n) each, and 1 / s't as (B, 1): zero for samples whose pair is left out."""

    s: Tensor
    t: Tensor
    rho: Tensor


class InverseHessian:
    """H for a batch of samples, each on its own.

    Args:
        scale: (B, 1) the gamma of samples that have no pair yet: H is this number times the identity.
        memory: how many pairs are kept.
        pairs: the pairs, oldest first.
    """

    def __init__(self, scale: Tensor, memory: int, pairs: tuple[Pair, ...] = ()) -> None:
        self.scale, self.memory, self.pairs = scale, memory, pairs

    def times(self, gradient: Tensor) -> Tensor:
        """H g for g (B, n), by the two-loop recursion; H is positive definite."""
        q, weights = gradient, []
        for s, t, rho in reversed(self.pairs):
            weights.append(rho * _dot(s, q))
            q = q - weights[-1] * t
        z = self.scale * q
        for (s, t, rho), weight in zip(self.pairs, reversed(weights), strict=True):
            z = z + (weight - rho * _dot(t, z)) * s
        return z

    def updated(self, s: Tensor, t: Tensor) -> InverseHessian:
        """H after steps s (B, n) that changed the gradients by t (B, n)."""
        st, tt = _dot(s, t), _dot(t, t)
        curved = (st > _CURVATURE * (_dot(s, s) * tt).sqrt()).detach()
        rho = torch.where(curved, 1 / torch.where(curved, st, 1.0), 0.0)
        scale = torch.where(curved, st / torch.where(curved, tt, 1.0), self.scale)
        return InverseHessian(scale, self.memory, (*self.pairs, Pair(s, t, rho))[-self.memory :])

    def select(self, keep: Tensor) -> InverseHessian:
        """H of some of the samples."""
        pairs = tuple(Pair(*(tensor[keep] for tensor in pair)) for pair in self.pairs)
        return InverseHessian(self.scale[keep], self.memory, pairs)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)
