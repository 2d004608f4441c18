"""`Products`: a function to first order at one y, by plain autograd: evaluated once, for any number of products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 2**24  # numbers that one vectorised pass for the Jacobian may hold (128 MiB in float64)
_CACHED = (
    2**20
)  # the same on a CPU, for a few seeds: what its caches hold; more made 200 samples take up to twice as long


class Products:
    """Products with J(y) and its transpose.

    Args:
        function: g, from (B, n) to (B, rows).
        y: where.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], y: Tensor) -> None:
        self.function, self.y = function, y
        self._value: tuple[Tensor, Tensor] | None = None
        self._transposed: tuple[Tensor, Tensor] | None = None

    def jvp(self, direction: Tensor) -> Tensor:
        """J(y) @ direction: (B, rows)."""
        weights, pulled = self._pulled()
        return self._grad(pulled, weights, direction)

    def vjp(self, weights: Tensor) -> Tensor:
        """J(y).T @ weights: (B, n)."""
        y, value = self._evaluated()
        return self._grad(value, y, weights)

    def many(self, seeds: Tensor, by_rows: bool) -> Tensor:
        """(k, B, rows) the products of J(y) with seeds (k, n), or (k, B, n) those of its transpose with (k, rows)."""
        y, value = self._evaluated()
        source, output = (y, value) if by_rows else self._pulled()
        batch = len(y)
        seeds = seeds.unsqueeze(1).expand(-1, batch, -1)
        if not seeds.numel() or not output.requires_grad:
            return source.new_zeros(len(seeds), *source.shape)
        room = _CACHED if y.device.type == "cpu" else CHUNK
        chunk = max(1, room // max(1, batch * max(y.shape[1], value.shape[1])))
        return torch.cat([self._grad(output, source, some, batched=True) for some in seeds.split(chunk)])

    def _evaluated(self) -> tuple[Tensor, Tensor]:
        """(y, g(y)), with their graph."""
        if self._value is None:
            y = self.y if torch.is_grad_enabled() and self.y.requires_grad else self.y.detach().requires_grad_()
            with torch.enable_grad():
                self._value = y, self.function(y)
        return self._value

    def _pulled(self) -> tuple[Tensor, Tensor]:
        """(w, J'w) at w = 0, with their graph: J is the transpose of w -> J'w, linear as it is."""
        if self._transposed is None:
            y, value = self._evaluated()
            with torch.enable_grad():
                weights = torch.zeros_like(value).requires_grad_()
                self._transposed = weights, self._grad(value, y, weights)
        return self._transposed

    @staticmethod
    def _grad(output: Tensor, source: Tensor, cotangent: Tensor, batched: bool = False) -> Tensor:
        if output.requires_grad:
            (found,) = torch.autograd.grad(
                output, source, cotangent, retain_graph=True, create_graph=torch.is_grad_enabled(), allow_unused=True,
                is_grads_batched=batched,
            )  # fmt: skip
            if found is not None:
                return found
        return torch.zeros_like(source.expand(len(cotangent), *source.shape) if batched else source)
