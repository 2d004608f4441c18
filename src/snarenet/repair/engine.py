"""`Engine`: takes a batch to its set, all steps of it, and hands out the tape that leads back.

    outcome, tape = engine.run(batch, taped=True)
    gradients = tape.pull_back(batch.y, v, wanted)

The plain loop (`loop/`) is one, and so is every family of GPU kernels (`gpu/`). `choose.py` picks one, `autograd.py`
makes it differentiable, and nobody else knows which it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """What is to be repaired.

    Attributes:
        y: (B, n) where the repair begins.
        lower: (B, rows) lower bounds, in the engine's order of rows.
        upper: (B, rows) upper bounds.
        finite: (B,) true where the prediction is.
    """

    y: Tensor
    lower: Tensor
    upper: Tensor
    finite: Tensor

    @property
    def learns_bounds(self) -> bool:
        """Does a bound need a gradient?"""
        return self.lower.requires_grad or self.upper.requires_grad


class Outcome(NamedTuple):
    """Where all samples ended: value (B, n), status (B,) and steps (B,)."""

    value: Tensor
    status: Tensor
    steps: Tensor


class Gradients(NamedTuple):
    """Gradients of the loss in the first position, in the bounds, and in the tensors inside g."""

    y: Tensor
    lower: Tensor | None
    upper: Tensor | None
    tensors: Sequence[Tensor | None] = ()


class Tape(ABC):
    """What an engine wrote down on its way, for the way back."""

    @abstractmethod
    def pull_back(self, y: Tensor, v: Tensor, wanted: tuple[Tensor, ...]) -> Gradients:
        """Pull the cotangent v (B, n) of the value back through all steps, to y and to `wanted`, tensors inside g."""


class Description(NamedTuple):
    """An engine in words, for `explain`.

    Attributes:
        engine: what takes the steps, and where.
        system: the linear system of a step.
        nbytes: what a step of one sample keeps for the backward pass, on average over the batch.
    """

    engine: str
    system: str
    nbytes: float


class Engine(ABC):
    """A way to take all steps of a repair."""

    traceable: bool = False  # can torch.compile trace its backward pass?
    keeps_best: bool = False  # does a sample that does not converge end at the best point that it saw?
    paced: bool = False  # has each sample a damping at its own pace?

    @abstractmethod
    def run(self, batch: Batch, taped: bool) -> tuple[Outcome, Tape | None]:
        """Take the batch to the set; with a tape if asked for."""

    @abstractmethod
    def describe(self, batch: Batch) -> Description:
        """What it is, and does at the first step of a batch that is not empty."""

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """The tensors inside g that need a gradient."""
        return ()

    def detached(self, leaves: dict[int, Tensor]) -> Engine:
        """The same engine on tensors without a history; see `constraints.maps.cut`."""
        return self
