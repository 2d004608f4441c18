"""Which weights of a run are its best, and which its model has: those of the best validation, or of the last epoch.

Better are weights with fewer validation instances that miss the tolerance, and, with as many, a lower mean objective.
Where every instance misses it, none are best: an infeasible output may have any objective.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from snarenet.model import ConstrainedModel


class Score(NamedTuple):
    """How a validation went; the smaller one is the better.

    Attributes:
        missed: how many instances missed the tolerance.
        objective: mean over all instances.
        epoch: after which epoch.
        instances: how many there are.
    """

    missed: int
    objective: float
    epoch: int
    instances: int

    @classmethod
    def of(cls, epoch: int, summary: dict[str, Any]) -> Score | None:
        """The score of what `evaluate` found after an epoch; None where no instance has kept the tolerance."""
        count, objective = summary["instances"], summary["objective"]["mean"]
        kept = round(summary["converged"] * count)
        return cls(count - kept, objective, epoch, count) if kept and math.isfinite(objective) else None

    def words(self) -> str:
        """The numbers, for people."""
        missed = f"{self.missed} of {self.instances} miss" if self.missed else f"none of {self.instances} misses"
        return f"{missed} the tolerance, mean objective {self.objective:.6g}"


class Best:
    """The best validated weights so far: their score, and a copy of them; None and nothing before there are any."""

    def __init__(self) -> None:
        self.score: Score | None = None
        self.tensors: dict[str, Tensor] = {}

    def offer(self, score: Score | None, model: ConstrainedModel) -> None:
        """Keep a copy of the model's weights if they are better; among equals the first stay."""
        if score is not None and (self.score is None or score[:2] < self.score[:2]):
            self.score = score
            self.tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Kept(NamedTuple):
    """Which weights a trained model has.

    Attributes:
        epoch: those after this epoch.
        last: how many epochs there were.
        best: the score of the best validation, if any.
    """

    epoch: int
    last: int
    best: Score | None

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        return {"epoch": self.epoch, "last": self.last, "best": self.best and self.best._asdict()}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> Kept:
        """From what `to_dict` gave."""
        return cls(saved["epoch"], saved["last"], saved["best"] and Score(**saved["best"]))

    def sentence(self) -> str:
        """For people."""
        if self.best is None:
            return f"The weights are those of the last epoch, {self.last}, as no validation found a feasible output."
        if self.epoch == self.best.epoch == self.last:
            words = f"the last, and the best on the validation instances ({self.best.words()})"
        elif self.epoch == self.best.epoch:
            words = f"the best on the validation instances ({self.best.words()}); the checkpoint also has the last"
        else:
            words = f"the last; those of epoch {self.best.epoch} were better on the validation instances"
            words += f" ({self.best.words()}), and the checkpoint has them"
        return f"The weights are those of epoch {self.epoch} of {self.last}, {words}."
