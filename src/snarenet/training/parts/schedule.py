"""`Schedule`: how long training lasts, what the loss has beside the objective, and what is validated and kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from snarenet.relaxation import AdaptiveRelaxation
from snarenet.training.parts.base import Count, Part, Seconds, Size, Weight

Keep = Literal["best", "last"]


@dataclass(frozen=True)
class Schedule(Part):
    """The course of training."""

    epochs: Count = 100
    """Passes over the training inputs; the gap keeps falling with more."""
    batch: Size = 200
    """Inputs a step, over all processes (the paper's size)."""
    fresh: bool = False
    """Draw new inputs for every step instead of the data set's: the loss needs no labels, so they cost nothing."""

    penalty: Weight = 0.0
    """Weight of the violation of the true set in the loss; the repair leaves nothing to punish."""
    penalised: Literal["squares", "sizes"] = "squares"
    """What that penalty adds up: the squares of violations, or their sizes."""
    proximity: Literal["auto"] | Weight = "auto"
    """Weight of the squared distance between prediction and repaired output, so that outputs on a bound go on learning;
    "auto" is a share of the loss's own gradient, where there are inequalities: `Layer.proximity`."""
    relaxation: Literal["none", "adarel", "soft"] = "none"
    """Start on a relaxed set, or without repair ("soft"); needed with a small constant damping only."""
    relax_epochs: Count = 0
    """How many epochs that start lasts; 0 for a third of all."""
    decay: Literal["linear", "cosine", "harmonic"] = "linear"
    """How the relaxation shrinks."""
    relax_mode: Literal["eval", "train"] = "eval"
    """How the untrained network is measured for it: without dropout and with the statistics of batch norm as they are
    at first, or as in training (the paper). With batch norm only the latter holds what the first steps predict."""

    validate_every: Size = 5
    """Epochs between two validations."""
    keep: Keep = "best"
    """Which weights the trained model has: those of the validation with the fewest samples that missed the tolerance,
    and among these the lowest mean objective, or those of the last epoch (the paper). The checkpoint has both."""
    checkpoint_seconds: Seconds = 30.0
    """Least time between two checkpoints; the last epoch is always saved."""

    @property
    def relaxed_epochs(self) -> int:
        """How many epochs are relaxed, or soft."""
        return 0 if self.relaxation == "none" else self.relax_epochs or math.ceil(self.epochs / 3)

    def build_relaxation(self) -> AdaptiveRelaxation:
        """The relaxation of each epoch."""
        return AdaptiveRelaxation(self.relaxed_epochs if self.relaxation == "adarel" else 0, self.decay)

    def validates(self, epoch: int) -> bool:
        """Is there a validation after this epoch, the first of which is 1?"""
        return epoch % self.validate_every == 0 or epoch == self.epochs
