"""`QuadraticMap`: rows y'H_i y + G_i y."""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.constraints.maps.base import (
    ExplicitLinearization,
    Linearization,
    Map,
    Pairs,
    chained,
    cut,
    needing_grad,
    summed,
    times,
    transposed_times,
)
from snarenet.constraints.sparsity import Pattern
from snarenet.constraints.structure import Seen


class QuadraticMap(Map):
    r"""g_i(y) = y'H_i y + G_i y.

    H holds diagonals, (rows, n), or whole matrices, (rows, n, n), which must be symmetric; a leading batch dimension
    makes it one per sample. The Jacobian is $2 y'H_i + G_i$, so a pair (a, t) pulls back to $\sum_i 2 a_i H_i t$.
    """

    def __init__(
        self, H: Tensor, G: Tensor, diagonal: bool, seen: Seen | None = None, pattern: Pattern | None = None
    ) -> None:
        self.H, self.G, self.diagonal, self.seen, self._pattern = H, G, diagonal, seen, pattern
        self.rows, self.diagonal_hessian = G.shape[-2], diagonal

    @property
    def pattern(self) -> Pattern | None:
        if self._pattern is None and self.seen is not None:
            H, G = self.H.detach(), self.G.detach()
            if self.seen.covers(*G.shape[-2:]):  # a look at whole matrices costs as much as a step
                self._pattern = self.seen.pattern
            else:
                self._pattern = self.seen.add(H if self.diagonal else (H != 0).any(-1), G)
        return self._pattern

    def entries(self, y: Tensor, pattern: Pattern) -> Tensor:
        if not self.diagonal:
            return super().entries(y, pattern)
        column = y[:, pattern.on(y.device)[1]]
        return pattern.gather(self.G) + 2 * pattern.gather(self.H) * column

    def _hessian_times(self, t: Tensor) -> Tensor:
        """2 H_i t for every row i: (B, rows, n)."""
        if self.diagonal:
            return 2 * self.H * t.unsqueeze(-2)
        if self.H.ndim == 3:  # one product for all rows
            return 2 * (t @ self.H.flatten(0, 1).T).unflatten(1, self.H.shape[:2])
        return 2 * (t[:, None, None, :] @ self.H).squeeze(-2)

    def _form(self, s: Tensor, t: Tensor) -> Tensor:
        """2 s'H_i t for every row i: (B, rows)."""
        return 2 * times(self.H, s * t) if self.diagonal else times(self._hessian_times(t), s)

    def _combine(self, a: Tensor, t: Tensor) -> Tensor:
        """sum_i 2 a_i H_i t: (B, n)."""
        return 2 * transposed_times(self.H, a) * t if self.diagonal else transposed_times(self._hessian_times(t), a)

    def value(self, y: Tensor) -> Tensor:
        return self._form(y, y) / 2 + times(self.G, y)

    def jacobian(self, y: Tensor) -> Tensor:
        if self.diagonal:  # one pass over the result
            return torch.addcmul(self.G, self.H, y.unsqueeze(-2), value=2)
        return self._hessian_times(y) + self.G

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return self._form(y, direction) + times(self.G, direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return self._combine(weights, y) + transposed_times(self.G, weights)

    def linearize(self, y: Tensor) -> Linearization:
        return Linearization(self, y) if self.diagonal else ExplicitLinearization(self, y)

    def row_norms(self, y: Tensor) -> Tensor:
        if not self.diagonal:
            return super().row_norms(y)
        squares = 4 * times(self.H.square(), y.square()) + 4 * times(self.H * self.G, y)  # without a Jacobian
        return (squares + self.G.square().sum(-1)).clamp(min=0)

    def hessian_diagonal(self, weights: Tensor) -> Tensor:
        return 2 * transposed_times(self.H, weights) if self.diagonal else super().hessian_diagonal(weights)

    @property
    def convex(self) -> bool:
        return self.diagonal and bool((self.H >= 0).all())

    def convex_hessian(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        diagonal = self.hessian_diagonal(weights)
        return diagonal, diagonal.new_empty(len(diagonal), 0, diagonal.shape[1])

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return needing_grad(self.H, self.G)

    def detached(self, leaves: dict[int, Tensor]) -> QuadraticMap:
        return QuadraticMap(cut(self.H, leaves), cut(self.G, leaves), self.diagonal, self.seen, self._pattern)

    def select(self, index: Tensor) -> QuadraticMap:
        shared = 2 if self.diagonal else 3
        H = self.H if self.H.ndim == shared else self.H[index]
        G = self.G if self.G.ndim == 2 else self.G[index]
        return QuadraticMap(H, G, self.diagonal, self.seen, self._pattern)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not self.diagonal:
            return self._pullback_whole(y, pairs, weights, wanted)
        if self.H.requires_grad or self.G.requires_grad:
            return super().pullback(y, pairs, weights, wanted)
        total = self.vjp(y, weights)
        for a, t in pairs:
            total = total + self._combine(a, t)
        return [total, *(None for _ in wanted)]

    def _pullback_whole(
        self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        r"""With $v_i = \sum_j a_{ij} t_j + q_i y$: $\sum_i 2 H_i v_i + G_i q_i$ in y, $v_i$ in $G_i$.

        In $H_i$ it is $2 y u_i'$ with $u_i = v_i - q_i y / 2$, up to a part that is not symmetric.
        """
        v, found = summed(y, pairs, weights), []
        with torch.no_grad():
            in_y = 2 * transposed_times(self.H.flatten(-3, -2), v.flatten(1)) + transposed_times(self.G, weights)
            if self.H.requires_grad:
                twice_u = 2 * v - weights.unsqueeze(2) * y.unsqueeze(1)
                shared = self.H.ndim == 3
                in_H = torch.einsum("bmi,bj->mij", twice_u, y) if shared else twice_u.unsqueeze(3) * y[:, None, None]
                found.append((self.H, in_H))
            if self.G.requires_grad:
                found.append((self.G, v if self.G.ndim == 3 else v.sum(0)))
        return [in_y, *chained(found, wanted)]
