"""`Repair`: what makes predictions obey the constraints, ours or another method, and how it is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snarenet.damping import Annealed, Constant, Damping
from snarenet.layers import Layer, build, layer_class
from snarenet.problems import Problem
from snarenet.repair import Options
from snarenet.training.parts.base import Count, Part, Ratio, Weight
from snarenet.training.recipes import Setting, settings


@dataclass(frozen=True)
class Repair(Part):
    """The layer behind the network. All but the first three fields are of our own method."""

    method: str = "snare"
    """What makes predictions obey the constraints: a name in `snarenet.layers.METHODS`."""
    setting: Setting = "fair"
    """How another method than ours is set up: to do its best, or as in the paper's experiments."""
    pretrain: Count = 0
    """Steps of a method's own training before the network's (HProj); 0 for the method's number."""

    damping: Weight | None = None
    """A constant damping, as in the paper; None for the annealed one below."""
    damping_start: Weight = 10.0
    """First damping of the annealed schedule."""
    damping_ratio: Ratio = 0.6
    """Factor of the damping from step to step."""
    nearest: Count = 0
    """Iterations towards the nearest point of the set before the repair, see `repair`: much smaller gaps where
    constraints are linear (35, with a damping that starts at 1e-3 with a ratio of 0.1) or have diagonal Hessians (26).
    """
    curvature: bool = False
    """Let "nearest" weigh each variable by the second derivative of the objective, where the problem knows them."""
    rows: Literal["auto", "all", "active"] = "auto"
    """Rows of the Jacobian in a step; the paper uses all."""
    tol: Weight = 1e-6
    """Tolerance of the repair in training; a finer one changes the trained weights hardly at all."""
    test_tol: Weight = 1e-8
    """Tolerance in validation and in the finished model; any other can be chosen later."""
    max_steps: Count = 100
    """Limit on the steps of a repair."""
    rescue: bool = True
    """Repair samples that did not converge once more; the paper has no such thing."""
    record: Count = 0
    """On a GPU: record a training step with this many repair steps into a CUDA graph, which is several times faster;
    0 for none. Samples that need more are trained on as far as they came."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layer_class(self.method)
        for tol in (self.tol, self.test_tol):
            self.options(tol)

    def options(self, tol: float) -> Options:
        """What our repair is told, at a tolerance; an error if it makes no sense."""
        return Options(self.build_damping(), self.rows, tol, self.max_steps, self.rescue, self.nearest, weigh="nearest")

    def build_damping(self) -> Damping:
        """The rule of the repair's damping."""
        return Annealed(self.damping_start, self.damping_ratio) if self.damping is None else Constant(self.damping)

    def build_layer(self, problem: Problem) -> Layer:
        """The repair for the problem's constraints, ours at the tolerance of evaluation."""
        if self.method == "snare":
            weights = problem.curvature if self.curvature and self.nearest else None
            chosen = {**vars(self.options(self.test_tol)), "weights": weights}
        else:
            chosen = settings(self.method, self.setting, problem.name)
        return build(self.method, problem.constraints, problem.inputs.shape[1], problem.size, self.seed, **chosen)
