"""`Problem`: a family of constrained optimisation problems, one instance for every input x."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor, nn

from snarenet.constraints import Constraints

_SHARE = 0.0833  # of the instances, for validation and again for testing


class Problem(nn.Module, ABC):
    """min f(y, x) subject to constraints, for the inputs x of a data set.

    Attributes:
        constraints: the feasible set.
        inputs: (N, d) all inputs x, in float64; split contiguously into training, validation and test instances.
        size: the n of a solution y.
    """

    constraints: Constraints
    inputs: Tensor
    size: int

    @abstractmethod
    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        """f(y, x) for every sample: (B,)."""

    def split(self, name: Literal["train", "valid", "test"]) -> Tensor:
        """The inputs to train on, to choose by, or to report on."""
        if name not in ("train", "valid", "test"):
            raise ValueError(f"`name` must be 'train', 'valid' or 'test', but got {name!r}")
        train = 1 - _SHARE - _SHARE
        first, second = int(len(self.inputs) * train), int(len(self.inputs) * (train + _SHARE))
        return {"train": self.inputs[:first], "valid": self.inputs[first:second], "test": self.inputs[second:]}[name]
