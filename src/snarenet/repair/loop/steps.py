"""One step: what the tape keeps of it, and what it adds to the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map


class Step(NamedTuple):
    """One step as the tape keeps it.

    Attributes:
        samples: (b,) the samples that took it, or None for the whole batch.
        violated: (b, rows) true for rows outside their bounds, and for all equalities.
        below: (b, rows) true for rows below their lower bound; None where no bound needs a gradient.
        damping: its damping, a number or (b,).
        moved: (b,) true where the step was accepted, or None where all were.
        saved: what the space wants to know again.
    """

    samples: Tensor | None
    violated: Tensor
    below: Tensor | None
    damping: float | Tensor
    moved: Tensor | None
    saved: Any

    def select(self, keep: Tensor) -> Step:
        """The step of some of its samples."""
        rest = tree_map(lambda leaf: _select(leaf, keep), self[1:])
        return Step(keep if self.samples is None else self.samples[keep], *rest)


def _select(leaf: Any, keep: Tensor) -> Any:
    """Some samples of what a step keeps; a factor that cannot be taken apart is left out, to be computed again."""
    if isinstance(leaf, Tensor):
        return leaf[keep]
    return leaf if isinstance(leaf, float | int) else None


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
