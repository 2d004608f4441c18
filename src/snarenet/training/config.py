"""`TrainConfig`: everything that decides a training run, the parts of `parts/` in one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem
from snarenet.training import recipes
from snarenet.training.parts import Network, Optimisation, Repair, Schedule

# Fields younger than the first run folders, and what a run did before there were any.
_ONCE = {"keep": "last", "relax_mode": "eval"}


@dataclass(frozen=True)
class TrainConfig(Repair, Optimisation, Network, Schedule):
    """How a model is built and trained. The defaults are those of the recipe `best`.

    The fields are those of `Schedule`, `Network`, `Optimisation` and `Repair`, each with its reason beside it.
    """

    @classmethod
    def recipe(cls, name: str, problem: str = "", **changes: Any) -> TrainConfig:
        """The recipe `best` or `paper` for a family, with some fields changed; see `recipes.py`."""
        return cls().replace(**recipes.fields(name, problem, changes.get("method", "snare")) | changes)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainConfig:
        """The configuration of a run from what `to_dict` gave; fields it does not know are as they once were."""
        return cls().replace(**_ONCE | dict(saved))

    def to_dict(self) -> dict[str, Any]:
        """All fields, for a file."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> TrainConfig:
        """This configuration with some fields changed."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{name!r} is no field of the training configuration{hint}")
        return dataclasses.replace(self, **changes)

    def build(self, problem: Problem) -> ConstrainedModel:
        """A fresh model for the problem, on its device."""
        layer, device = self.build_layer(problem), problem.inputs.device
        net = self.build_net(problem.inputs.shape[1], layer.predictions(problem.size))
        return ConstrainedModel(net.to(device), layer.to(device))
