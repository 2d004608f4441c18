"""One step: what the tape keeps of it, and what it adds to the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from snarenet.linalg import SparseFactor
from snarenet.repair.foresight import Rows


class Trial(NamedTuple):
    """A step that is yet to be taken.

    Attributes:
        position: where it leads.
        rows: those that it uses.
        saved: what its way back needs.
    """

    position: Tensor
    rows: Rows
    saved: Any


class Step(NamedTuple):
    """One step as the tape keeps it.

    Attributes:
        samples: (b,) the samples that took it, or None for the whole batch.
        used: (b, rows) true for rows outside their bounds, equalities, and those that it would have broken.
        below: (b, rows) true for rows that it led to their lower bound; None where no bound needs a gradient.
        damping: its damping, a number or (b,).
        moved: (b,) true where the step was accepted, or None where all were.
        saved: what the space wants to know again.
    """

    samples: Tensor | None
    used: Tensor
    below: Tensor | None
    damping: float | Tensor
    moved: Tensor | None
    saved: Any

    def select(self, keep: Tensor) -> Step:
        """The step of some of its samples."""
        rest = tree_map(lambda leaf: leaf[keep] if isinstance(leaf, Tensor | SparseFactor) else leaf, self[1:])
        return Step(keep if self.samples is None else self.samples[keep], *rest)


class Pulled(NamedTuple):
    """What one step adds to the gradients.

    Attributes:
        cotangent: that of the position before the step.
        rows: (b, rows) cotangent of minus the residual, which is that of the bounds.
        scale: (b, m) cotangent of the row scales, or None.
        tensors: gradients of the tensors inside g.
    """

    cotangent: Tensor
    rows: Tensor
    scale: Tensor | None
    tensors: Sequence[Tensor | None]
