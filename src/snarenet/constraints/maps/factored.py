"""`FactoredMap`: rows y'(F_i F_i' + diag(D_i)) y + G_i y, at the cost of products with F."""

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
from snarenet.constraints.maps.quadratic import QuadraticMap
from snarenet.constraints.sparsity import Pattern
from snarenet.constraints.structure import Seen


class FactoredMap(Map):
    r"""g_i(y) = y'S_i y + G_i y with $S_i = F_i F_i' + \mathrm{diag}(D_i)$, which is never formed.

    F is (rows, n, k), D and G are (rows, n); a leading batch dimension makes each of them one per sample. The Jacobian
    is $2 (F_i F_i' y + D_i y)' + G_i$.
    """

    def __init__(
        self, F: Tensor, D: Tensor, G: Tensor, seen: Seen | None = None, pattern: Pattern | None = None
    ) -> None:
        self.F, self.D, self.G, self.seen, self._pattern = F, D, G, seen, pattern
        self.rows = G.shape[-2]

    @property
    def pattern(self) -> Pattern | None:
        if self._pattern is None and self.seen is not None:
            covered = self.seen.covers(*self.G.shape[-2:])
            F, D, G = self.F.detach(), self.D.detach(), self.G.detach()
            self._pattern = self.seen.pattern if covered else self.seen.add((F != 0).any(-1), D, G)
        return self._pattern

    @property
    def convex(self) -> bool:
        return bool((self.D >= 0).all())

    def convex_hessian(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        G = (2 * weights).sqrt()[..., None, None] * self.F.mT
        return 2 * transposed_times(self.D, weights), G.flatten(1, 2)

    def _factors(self, v: Tensor) -> Tensor:
        """F_i'v_i for every row i: (B, rows, n) to (B, rows, k)."""
        if self.F.ndim == 3:
            return (v.transpose(0, 1) @ self.F).transpose(0, 1)
        return (v.unsqueeze(-2) @ self.F).squeeze(-2)

    def _times(self, v: Tensor) -> Tensor:
        """S_i v_i for every row i: (B, rows, n)."""
        z = self._factors(v)
        if self.F.ndim == 3:
            return (z.transpose(0, 1) @ self.F.mT).transpose(0, 1) + self.D * v
        return (z.unsqueeze(-2) @ self.F.mT).squeeze(-2) + self.D * v

    def _for_every_row(self, t: Tensor) -> Tensor:
        """t (B, n) as (B, rows, n)."""
        return t.unsqueeze(1).expand(-1, self.rows, -1)

    def _form(self, s: Tensor, t: Tensor) -> Tensor:
        """s'S_i t for every row i: (B, rows)."""
        left = self._factors(self._for_every_row(s))
        right = left if s is t else self._factors(self._for_every_row(t))
        return (left * right).sum(-1) + times(self.D, s * t)

    def value(self, y: Tensor) -> Tensor:
        return self._form(y, y) + times(self.G, y)

    def jacobian(self, y: Tensor) -> Tensor:
        return 2 * self._times(self._for_every_row(y)) + self.G

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return 2 * self._form(y, direction) + times(self.G, direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return 2 * self._times(weights.unsqueeze(2) * y.unsqueeze(1)).sum(1) + transposed_times(self.G, weights)

    def linearize(self, y: Tensor) -> Linearization:
        return ExplicitLinearization(self, y)  # J costs two products with F, as one jvp does

    def whole(self) -> QuadraticMap:
        """The same rows with H = S written out, n by n, for those who must have it."""
        return QuadraticMap(self.F @ self.F.mT + torch.diag_embed(self.D), self.G, diagonal=False)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return needing_grad(self.F, self.D, self.G)

    def detached(self, leaves: dict[int, Tensor]) -> FactoredMap:
        F, D, G = (cut(datum, leaves) for datum in (self.F, self.D, self.G))
        return FactoredMap(F, D, G, self.seen, self._pattern)

    def select(self, index: Tensor) -> FactoredMap:
        F = self.F if self.F.ndim == 3 else self.F[index]
        D, G = (datum if datum.ndim == 2 else datum[index] for datum in (self.D, self.G))
        return FactoredMap(F, D, G, self.seen, self._pattern)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        r"""With $v_i = \sum_j a_{ij} t_j + q_i y$ and $u_i = v_i - q_i y / 2$ it is the gradient of $2 y'S_i u_i$ in S.

        That is $2 (y (F_i'u_i)' + u_i (F_i'y)')$ in F and $2 y \circ u_i$ in D; $v_i$ in G, and
        $\sum_i 2 S_i v_i + G_i q_i$ in y.
        """
        v, found = summed(y, pairs, weights), []
        with torch.no_grad():
            in_y = 2 * self._times(v).sum(1) + transposed_times(self.G, weights)
            every, twice_u = self._for_every_row(y), 2 * v - weights.unsqueeze(2) * y.unsqueeze(1)
            if self.F.requires_grad:
                zy, zu = self._factors(every), self._factors(twice_u)
                subscripts = "bmn,bmk->mnk" if self.F.ndim == 3 else "bmn,bmk->bmnk"
                found.append((self.F, torch.einsum(subscripts, every, zu) + torch.einsum(subscripts, twice_u, zy)))
            if self.D.requires_grad:
                in_D = every * twice_u
                found.append((self.D, in_D if self.D.ndim == 3 else in_D.sum(0)))
            if self.G.requires_grad:
                found.append((self.G, v if self.G.ndim == 3 else v.sum(0)))
        return [in_y, *chained(found, wanted)]
