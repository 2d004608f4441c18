"""`TrainConfig`: everything that decides a training run, the parts of `parts/` in one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from snarenet.layers import Layer, SnareLayer
from snarenet.model import ConstrainedModel, Units
from snarenet.problems import Problem
from snarenet.training import recipes
from snarenet.training.parts import Network, Optimisation, Repair, Schedule
from snarenet.training.typical import Found, find

# Of the spread of solutions, that of a network's outputs. The learning rate suits outputs of about this scale: after 15
# epochs of `nclp` with 40 variables gaps on the validation instances are 6e-4 with 1, 9e-5 with 3, 4e-5 with 10.
# On rows of any other kind predictions must not go far between two steps: with 10 the samples of AC-OPF (118 buses)
# leave the reach of the repair when the learning rate is at its largest.
_WIDE, _NARROW = 10.0, 3.0

# Fields younger than the first run folders, and what a run did before there were any.
_ONCE = {
    "keep": "last",
    "relax_mode": "eval",
    "start": "none",
    "weights": "none",
    "descent": "none",
    "standardise": False,
    "proximity": 0.0,
    "damping_start": 10.0,
    "damping_ratio": 0.6,
}


@dataclass(frozen=True)
class TrainConfig(Repair, Optimisation, Network, Schedule):
    """How a model is built and trained. The defaults are those of the recipe `best`.

    The fields are those of `Schedule`, `Network`, `Optimisation` and `Repair`, each with its reason beside it.
    """

    @classmethod
    def recipe(cls, name: str, problem: str | Problem = "", **changes: Any) -> TrainConfig:
        """The recipe `best` or `paper` for a problem or a family, with some fields changed; see `recipes.py`."""
        return cls().replace(**recipes.fields(name, problem, changes.get("method", "snare")) | changes)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> TrainConfig:
        """The configuration of a run from what `to_dict` gave; fields it does not know are as they once were."""
        known = dict(saved)
        nearest, curvature = known.pop("nearest", None), known.pop("curvature", False)
        if nearest is not None:  # the names of `start` and `weights` at first
            known |= {"start": nearest or "none", "weights": "own" if nearest and curvature else "none"}
        return cls().replace(**_ONCE | known)

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

    def build_layer(self, problem: Problem, found: Found | None = None) -> Layer:
        layer = super().build_layer(problem, found)
        if layer.polishes != "none":  # it can
            layer.polishes = self.polish
        if isinstance(layer, SnareLayer) and self.proximity != "auto":
            layer.limits_gradients = False  # a loss by numbers, as in the paper, has its own gradients
        return layer

    def build(
        self, problem: Problem, net: torch.nn.Module | None = None, *, found: Found | None = None, loads: bool = False
    ) -> ConstrainedModel:
        """A fresh model for the problem, on its device.

        Args:
            problem: the problem.
            net: a network of your own, from what a model sees of x to predictions, instead of the one that the
                configuration describes.
            found: what is known of the problem's solutions; found out unless given.
            loads: will its tensors be read from a file? Then nothing is computed for their sake: which training inputs
                have a feasible point, say.
        """
        found = self.find(problem) if found is None else found
        layer, device = self.build_layer(problem, found), problem.inputs.device
        outputs = layer.predictions(problem.size)
        own = net is None and type(problem).network is not Problem.network  # which knows the units of its problem
        standardised = self.standardise and problem.direct and not own
        units = self.build_units(problem, found, outputs, loads) if standardised else None
        inputs = problem.seen(problem.inputs).shape[1]
        net = problem.network(self.build_net, inputs, outputs) if net is None else net
        if units is not None and isinstance(layer, SnareLayer) and outputs == problem.size:
            layer.typical = units.centre  # one tensor: a run that is loaded writes to it
        return ConstrainedModel(net.to(device), layer.to(device), units)

    def find(self, problem: Problem) -> Found:
        """What is to be known of the problem's solutions before a model can be built."""
        return find(problem) if self.standardise or self.weights == "auto" else Found.blank(problem)

    def build_units(self, problem: Problem, found: Found, outputs: int, loads: bool = False) -> Units:
        """Those of a network with so many outputs; where these are not points of the set, only inputs have any."""
        inputs = problem.inputs if loads else problem.split("train")
        inputs = problem.seen(inputs if len(inputs) else problem.inputs)
        units = Units.of(inputs, inputs.new_zeros(1, outputs))
        points, rest = divmod(outputs, problem.size)
        if not rest:
            map = problem.feasible_set.at(problem.inputs.new_zeros(1, problem.size), problem.inputs[:1]).map
            scale = (_WIDE if map.diagonal_hessian else _NARROW) * found.scale
            units.centre, units.scale = found.centre.repeat(points), scale.repeat(points)
        return units
