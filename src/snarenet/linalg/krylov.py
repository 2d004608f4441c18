"""`ConjugateGradients`: systems solved by products with J alone, for problems too large for a matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snarenet.constraints.maps import Map

_LOOK = 4  # iterations of conjugate gradients between two looks at who is still going: a look waits for the GPU


@dataclass(frozen=True)
class ConjugateGradients:
    """Solve each step by conjugate gradients on products with J and its transpose; J itself is never formed.

    The preconditioner is the diagonal of the system: the squared row lengths of J at the step's y, and the damping.

    Attributes:
        tol: relative residual, in the norm of the preconditioner, at which a sample's solve stops; the adjoint is exact
            to about this.
        max_iterations: limit for one solve.
        probes: random directions that estimate the row lengths of a nonlinear function.
    """

    tol: float = 1e-8
    max_iterations: int = 500
    probes: int = 8

    def solve(self, operator: Callable[[Tensor], Tensor], rhs: Tensor, diagonal: Tensor) -> Tensor:
        """w with operator(w) = rhs, both (B, m), preconditioned by the diagonal (B, m)."""
        w, r = torch.zeros_like(rhs), rhs
        z = r / diagonal
        direction, rho = z, (r * z).sum(1, keepdim=True)
        target = self.tol * rho.sqrt()  # in this norm the scale of a row does not matter
        look = _LOOK if rhs.is_cuda else 1
        for k in range(self.max_iterations):
            going = rho.sqrt() > target  # the others stay as they are
            if k % look == 0 and not bool(going.any()):
                break
            image = operator(direction)
            curvature = (direction * image).sum(1, keepdim=True)
            alpha = torch.where(going & (curvature > 0), rho / curvature, 0.0)
            w, r = torch.addcmul(w, alpha, direction), torch.addcmul(r, alpha, image, value=-1)
            z = r / diagonal
            previous, rho = rho, torch.where(going, (r * z).sum(1, keepdim=True), rho)
            direction = torch.where(going, torch.addcmul(z, direction, rho / previous), direction)
        return w

    def row_norms(self, map: Map, y: Tensor) -> Tensor:
        """Squared row lengths of J(y), (B, rows): exact where the map knows them, else estimated; differentiable."""
        return torch.cat([y.new_empty(y.shape[0], 0), *(self._row_norms(part, y) for part in map.parts)], 1)

    def _row_norms(self, map: Map, y: Tensor) -> Tensor:
        return self._estimate(map, y) if map.implicit else map.row_norms(y)

    def _estimate(self, map: Map, y: Tensor) -> Tensor:
        r"""The mean of $(J z)^2$ over fixed random signs z, drawn towards the mean of all rows.

        The logarithm of a row's own estimate has a variance of about $2/p + 2/p^2$ for p probes. Where the rows of a
        sample differ by no more than that, they are taken to be equal; the more they differ, the more they are trusted.
        """
        signs = torch.randint(0, 2, (self.probes, y.shape[1]), generator=torch.Generator().manual_seed(0)).to(y) * 2 - 1
        linear = map.linearize(y)
        squares = torch.stack([linear.jvp(z.expand_as(y)).square() for z in signs]).mean(0)
        squares = squares.clamp(min=torch.finfo(y.dtype).tiny)
        own, mean = squares.log(), squares.mean(1, keepdim=True).log()
        noise = 2 / self.probes + 2 / self.probes**2
        trust = 1 - noise / own.var(1, keepdim=True, correction=0).clamp(min=noise)
        return (mean + trust * (own - mean)).exp()
