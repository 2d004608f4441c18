"""The coefficients of functions that are known to be polynomials in y: f(y, x) = y'H(x) y + A(x) y + b(x).

They are derivatives at y = 0, in forward mode: exact, differentiable in x, and computed once where x does not enter.
Where a graph is traced (`torch.export`), which knows no forward mode, A is a difference of values, the same but for
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from snarenet.constraints.data import cast
from snarenet.tracing import tracing


class Coefficient(nn.Module):
    """b(x), A(x) or H(x), as a function of x.

    Args:
        fn: (y, x) -> (B, rows), a module if it has tensors of its own.
        size: the n of y.
        degree: which of them: 0, 1 or 2.
        factor: what it is multiplied by: -1 makes a bound of b.
    """

    origin: Tensor

    def __init__(self, fn: Callable[[Tensor, Any], Tensor], size: int, degree: int, factor: float = 1.0) -> None:
        super().__init__()
        self.fn, self.degree, self.factor = fn, degree, factor
        self.register_buffer("origin", torch.zeros(1, size, dtype=torch.float64), persistent=False)

    def forward(self, x: Any) -> Tensor:
        """(B, rows), (B, rows, n) or (B, rows, n, n); as many samples as x has."""
        return self.factor * self._derivative(cast(x, self.origin.dtype))

    def _derivative(self, x: Any) -> Tensor:
        if self.degree == 0:
            return self.fn(self.origin, x)
        if self.degree == 1 and tracing():
            return self._differences(x)
        if self.degree == 1:
            return self._slopes(lambda y: self.fn(y, x), self.origin).movedim(0, -1)
        second = self._slopes(lambda y: self._slopes(lambda z: self.fn(z, x), y), self.origin)
        return second.movedim((0, 1), (-2, -1)) / 2

    def _differences(self, x: Any) -> Tensor:
        """A(x) by the values at the unit vectors and their negatives."""
        unit = torch.eye(self.origin.shape[1], dtype=self.origin.dtype, device=self.origin.device)
        return torch.stack([(self.fn(e, x) - self.fn(-e, x)) / 2 for e in unit.split(1)], -1)

    def _slopes(self, fn: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        """(n, ...) the derivative of fn in every direction."""
        directions = torch.eye(y.shape[1], dtype=y.dtype, device=y.device).unsqueeze(1)
        return vmap(lambda v: jvp(fn, (y,), (v,))[1])(directions)

    def constant(self, example: Any) -> Tensor:
        """The coefficient itself, where it is the same for all x, at some x; without the dimension of the batch."""
        with torch.no_grad():
            return self(example)[0]
