"""`Repair`: what makes predictions obey the constraints, ours or another method, and how it is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from snarenet.damping import Annealed, Constant
from snarenet.layers import BestOfLayer, Layer, build, layer_class
from snarenet.layers.base import Polish
from snarenet.problems import Problem
from snarenet.repair import Nearest, Options, Start
from snarenet.training.parts.base import Count, Part, Ratio, Size, Weight
from snarenet.training.recipes import Setting, settings
from snarenet.training.rows import kind
from snarenet.training.typical import Found, find

# Iterations of ADMM after a step down the objective, which may lead far from the set. With 30 variables, 23 linear rows
# and a barrier as the objective, 15 epochs: the mean gap is 1e-3 with 35, 9e-6 with 70, 4e-6 with 120; without such a
# step it is 5e-4.
_FROM_AFAR = 70


@dataclass(frozen=True)
class Repair(Part):
    """The layer behind the network. All but the first three fields are of our own method."""

    method: str = "snare"
    """What makes predictions obey the constraints: a name in `snarenet.layers.METHODS`."""
    setting: Setting = "fair"
    """How another method than ours is set up: to do its best, or as in the paper's experiments."""
    pretrain: Count = 0
    """Steps of a method's own training before the network's (HProj); 0 for the method's number."""

    candidates: Size = 1
    """Points that the network predicts for every input; each is repaired, and the best one counts. More than one where
    the best point jumps as the input changes: past an obstacle on either side, say. See `BestOfLayer`."""
    start: Literal["auto", "none"] | Count = "auto"
    """Where the repair begins: "auto" at the nearest point of the set, or near it, as its rows allow, "none" at the
    prediction (the paper); a number is that of iterations towards the nearest point. Gaps are much smaller."""
    weights: Literal["auto", "own", "none"] = "auto"
    """How dear it is to move each variable, for the repair and its start: "auto" is what the problem says, or else the
    second derivatives of its objective, found on a few inputs; "own" is what the problem says alone."""
    descent: Literal["auto", "none"] = "auto"
    """Step down the objective before the nearest point is sought: "auto" where it is, and the objective is curved. The
    network predicts where to take that step, and its errors shrink by it."""
    damping: Weight | None = None
    """A constant damping, as in the paper; None for an annealed one."""
    damping_start: Weight | None = None
    """First damping of the annealed schedule; None for one that suits the start."""
    damping_ratio: Ratio | None = None
    """Factor of the damping from step to step; None for one that suits the start."""
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
    polish: Polish = "rescued"
    """Lead results to a lower objective by interior-point steps, when the model is used: those that only the rescue
    brought to the set, "all", or "none". Not where training is validated."""
    record: Literal["auto"] | Count = "auto"
    """On a GPU: record a training step with this many repair steps into a CUDA graph, which is several times faster;
    0 for none. Samples that need more are trained on as far as they came. "auto" is some more than nearly all samples
    of a first batch need, for our method, unless it projects onto curved rows of any kind, which cannot be recorded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layer_class(self.method)
        for tol in (self.tol, self.test_tol):
            self.options(tol)

    def options(self, tol: float, problem: Problem | None = None, descends: bool = False) -> Options:
        """What our repair is told, at a tolerance; an error if it makes no sense.

        The start needs the problem, and whether the layer steps down its objective.
        """
        start = _start(problem, descends) if self.start == "auto" and problem else None
        if isinstance(self.start, int) and self.start:
            start = Nearest(self.start)
        damping = None if self.damping is None else Constant(self.damping)
        if damping is None and (self.damping_start is not None or self.damping_ratio is not None):
            usual = Annealed()
            first, ratio = self.damping_start, self.damping_ratio
            damping = Annealed(usual.start if first is None else first, usual.ratio if ratio is None else ratio)
        return Options(damping or "auto", self.rows, tol, self.max_steps, self.rescue, start)

    def may_descend(self, problem: Problem) -> bool:
        """May the layer step down the objective where it projects? It must know all that the objective depends on."""
        known = problem.direct and problem.features is None
        return known and self.descent == "auto" and self.weights == "auto"

    def build_layer(self, problem: Problem, found: Found | None = None) -> Layer:
        """The repair for the problem's constraints, ours at the tolerance of evaluation.

        `found` is what is known of the problem's solutions; found out if it is needed and not given.
        """
        seen = problem.seen(problem.inputs)
        if self.method == "snare":
            auto, may, own = self.weights == "auto" and problem.direct, self.may_descend(problem), problem.weights
            known = find(problem) if auto and found is None else found
            options = self.options(self.test_tol, problem, may and known is not None and bool(known.step))
            if own is None and problem.direct:  # equal ones where nothing is found: a run with "own" has a tensor
                own = known.weights if auto and known is not None else problem.inputs.new_ones(problem.size)
            kept = None if own is None or self.weights == "none" else own.detach().clone()  # a loaded run writes to it
            chosen = {**vars(options), "weights": kept}
            if known is not None and may:
                chosen |= {"objective": problem.objective, "step": None if options.start is None else known.step}
            if self.candidates > 1:
                if problem.features is not None:
                    raise ValueError("`candidates` must be 1 where the objective needs what a model does not see of x")
                chosen |= {"objective": problem.objective, "count": self.candidates}
                return BestOfLayer(problem.constraints, **chosen)
        else:
            chosen = settings(self.method, self.setting, problem.name)
            if self.method == "dc3" and problem.guesses is not None:
                own = {} if problem.partial is None else {"partial": problem.partial}
                chosen = chosen | own | {"around": (problem.guesses[0], seen[0])}
        return build(self.method, problem.constraints, seen.shape[1], problem.size, self.seed, **chosen)


def _start(problem: Problem, descends: bool) -> Start:
    """Where a repair begins in training: at the nearest point where that is cheap or pays, else at the prediction.

    Onto curved rows of any other kind the projection takes four to five times as long as the repair in the metric.
    With a step down a curved objective it pays: after as much time the gap of `mpc` is hundreds of times smaller.
    Without one it does not: after as many steps the gap is half as large, in the same time it is larger (AC-OPF with
    118 buses).
    """
    rows = kind(problem)
    if rows == "any" and not descends:
        return None
    return Nearest(_FROM_AFAR) if descends and rows == "constant" else "auto"
