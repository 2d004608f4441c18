"""`Witness`: a model that remembers what it returned, for those who only see what a problem makes of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from snarenet.model import ConstrainedModel
from snarenet.solution import Solution


class Witness:
    """A model whose solutions are kept, in the order of its calls."""

    def __init__(self, model: ConstrainedModel) -> None:
        self.model = model
        self.solutions: list[Solution] = []

    def solve(self, x: Any, relax: float | Tensor | None = None) -> Solution:
        """What the model returns."""
        self.solutions.append(self.model.solve(x, relax))
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
