"""`Witness`: a model that remembers what it returned, for those who only see what a problem makes of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from snarenet.model import ConstrainedModel
from snarenet.solution import Solution


class Witness:
    """A model whose solutions are kept, in the order of its calls.

    A sample that ran away from its set may have a gradient that is no number, even where the loss leaves it out (0 NaN
    is NaN): the network gets none of it.
    """

    def __init__(self, model: ConstrainedModel) -> None:
        self.model = model
        self.solutions: list[Solution] = []

    def solve(self, x: Any, relax: float | Tensor | None = None) -> Solution:
        """What the model returns."""
        raw = self.model.raw(x)
        self.solutions.append(self.model.layer.solve(raw, x, relax))
        if raw.requires_grad:
            raw.register_hook(partial(_usable, self.solutions[-1].converged))
        return self.solutions[-1]

    def __call__(self, x: Any, relax: float | Tensor | None = None) -> Tensor:
        """The outputs alone."""
        return self.solve(x, relax).value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def only(self) -> Solution | None:
        """What the model returned if it was called once; None for a policy, say, that was called again and again."""
        return self.solutions[0] if len(self.solutions) == 1 else None


def _usable(converged: Tensor, gradient: Tensor) -> Tensor:
    """The gradient (B, k), 0 for samples that failed without one."""
    usable = converged | gradient.isfinite().all(1)
    return torch.where(usable.unsqueeze(1), gradient, 0.0)
