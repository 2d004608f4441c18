"""`Slope`: the gradient of an objective, and what is known of its Hessian, by products alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.data import check_objective

_NUMBERS = 2**22  # in a chunk of second derivatives

Objective = Callable[[Tensor, Any], Tensor]


class Slope:
    """The gradient of an objective, and its derivatives.

    Args:
        objective: f, from points (K, n) and their inputs to (K,).
        y: (K, n) where.
        x: the inputs.

    Attributes:
        objective: (K,) f at the points.
        value: (K, n) its gradient there.
    """

    def __init__(self, objective: Objective, y: Tensor, x: Any) -> None:
        with torch.enable_grad():
            self._y = y.detach().requires_grad_()
            found = check_objective(objective(self._y, x), self._y)
            self._slope = torch.zeros_like(y)  # of a constant
            if found.requires_grad:
                (self._slope,) = torch.autograd.grad(found.sum(), self._y, create_graph=True)
        self.objective, self.value = found.detach(), self._slope.detach()

    def product(self, vectors: Tensor, batched: bool = False) -> Tensor:
        """The Hessian times vectors (K, n), or times many of them (M, K, n)."""
        found = None
        if self._slope.requires_grad:  # else the objective is linear
            (found,) = torch.autograd.grad(
                self._slope, self._y, vectors, retain_graph=True, is_grads_batched=batched, allow_unused=True
            )
        return torch.zeros_like(vectors) if found is None else found

    @cached_property
    def separate(self) -> Tensor | None:
        """(K, n) the diagonal of the Hessian where it has nothing else: f is a sum over the variables; else None.

        A product with random signs tells it, and one with other numbers whether that was true.
        """
        draw = torch.Generator().manual_seed(0)
        signs, numbers = (torch.rand(self.value.shape[1], generator=draw).to(self.value) - 0.5 for _ in range(2))
        signs, numbers = (t.expand_as(self.value).contiguous() for t in (signs.sign(), numbers))
        found = self.product(signs) * signs
        apart = (self.product(numbers) - found * numbers).abs().amax(1)
        rounding = torch.finfo(found.dtype).eps ** 0.75 * found.abs().amax(1)
        return found if bool((apart <= rounding).all()) else None

    def diagonal(self) -> Tensor:
        """(n,) the diagonal of the Hessian, exact, in the mean over the samples; 0 where it is not a number."""
        if self.separate is not None:
            return self.separate.mean(0)
        return self._by_rows(lambda rows, some: rows.gather(2, some.view(-1, 1, 1).expand(-1, rows.shape[1], 1)))

    def bound(self, units: Tensor) -> Tensor:
        """(n,) a diagonal that the Hessian does not exceed in the mean: sums of the sizes in its rows, in units (n,).

        For an objective that is a sum over the variables these are the sizes of its diagonal.
        """
        if self.separate is not None:
            return self.separate.abs().mean(0)
        return self._by_rows(lambda rows, some: (rows.abs() * units).sum(2, keepdim=True)) / units

    def _by_rows(self, reduce: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """(n,) what `reduce` makes of rows (M, K, n) of the Hessian with these indices (M,), in the mean."""
        y = self._y.detach()
        found = torch.zeros_like(y[0])
        if not self._slope.requires_grad:
            return found
        for some in torch.arange(len(found), device=y.device).split(max(1, _NUMBERS // y.numel())):
            units = y.new_zeros(len(some), *y.shape)
            units[torch.arange(len(some), device=y.device), :, some] = 1.0
            try:
                rows = self.product(units, batched=True)
            except RuntimeError:  # of an operation that cannot be batched
                rows = torch.stack([self.product(unit) for unit in units])
            found[some] = reduce(rows, some).mean((1, 2))
        return torch.where(found.isfinite(), found, 0.0)
