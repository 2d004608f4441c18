"""`Problem`: a family of constrained optimisation problems, one instance for every input x."""

from __future__ import annotations

from abc import ABC, abstractmethod

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

    def _cuts(self) -> tuple[int, int]:
        train = 1 - _SHARE - _SHARE
        return int(len(self.inputs) * train), int(len(self.inputs) * (train + _SHARE))

    @property
    def train(self) -> Tensor:
        """Inputs to train on."""
        return self.inputs[: self._cuts()[0]]

    @property
    def valid(self) -> Tensor:
        """Inputs to choose by."""
        first, second = self._cuts()
        return self.inputs[first:second]

    @property
    def test(self) -> Tensor:
        """Inputs to report on."""
        return self.inputs[self._cuts()[1] :]
