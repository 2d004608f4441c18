"""Objectives that are a sum over the entries of y, as both optimisation families of the paper have them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from snarenet.problems.base import Problem, check_sizes


class Separable(Problem):
    r"""$f(y) = \sum_j \tfrac12 a_j y_j^2 + b_j y_j + c_j \sin y_j + d$, all of which a reference solver can be told.

    b is `linear` and d is zero, unless a family has `slope` and `offset` depend on x.
    """

    square: Tensor
    linear: Tensor
    sine: Tensor

    def check(self, size: int, inequalities: int, equalities: int, instances: int, seed: int) -> None:
        """Raise unless there is such a family: more equalities than variables could not be kept."""
        check_sizes(size=size, equalities=equalities, instances=instances)
        check_sizes(0, inequalities=inequalities, seed=seed)
        if equalities > size:
            raise ValueError(f"`equalities` must be at most `size` = {size}, but got {equalities}")

    def store(self, inputs: np.ndarray, **terms: np.ndarray) -> None:
        """Keep the data: the inputs, and the coefficients `square`, `linear` and `sine` (0 unless given), each (n,)."""
        self.register_buffer("inputs", torch.from_numpy(inputs))
        for name in ("square", "linear", "sine"):
            self.register_buffer(name, torch.from_numpy(terms.get(name, np.zeros(self.size))))

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        total = (0.5 * self.square * y.square() + self.slope(x) * y + self.sine * y.sin()).sum(1)
        offset = self.offset(x)
        return total if offset is None else total + offset

    def slope(self, x: Tensor) -> Tensor:
        """The b_j, (n,) for all x or (B, n)."""
        return self.linear

    def offset(self, x: Tensor) -> Tensor | None:
        """(B,) the d; None for zero."""
        return None
