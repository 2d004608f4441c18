"""`TrainConfig`: everything that decides a training run, with the reason for each default, and the two recipes."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from snarenet.damping import Annealed, Constant, Damping
from snarenet.layers import Layer, SnareLayer, build
from snarenet.model import MLP, ConstrainedModel
from snarenet.problems import Problem
from snarenet.relaxation import AdaptiveRelaxation

_ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class TrainConfig:
    """How a model is built and trained. The defaults are those of the recipe `best`."""

    epochs: int = 100
    """Passes over the training inputs; the gap keeps falling with more."""
    batch: int = 200
    """Inputs a step, over all processes (the paper's size)."""
    seed: int = 0
    """Seed of the initial weights, the order of the inputs and dropout."""
    fresh: bool = False
    """Draw new inputs for every step instead of the data set's: the loss needs no labels, so they cost nothing."""

    method: str = "snare"
    """What makes predictions obey the constraints: a name in `snarenet.layers.METHODS`."""
    setting: Literal["fair", "paper"] = "fair"
    """How another method than ours is set up: to do its best, or as in the paper's experiments."""
    pretrain: int = 0
    """Steps of a method's own training before the network's (HProj); 0 for the method's number."""

    width: int = 400
    """Size of the hidden layers; wider is better, as far as time allows."""
    depth: int = 2
    """Hidden layers."""
    activation: Literal["silu", "relu", "gelu", "tanh"] = "silu"
    """Nonlinearity; a smooth one fits a smooth solution map better."""
    dropout: float = 0.0
    """Share of hidden units dropped: noise in a regression with unlimited data only costs accuracy."""
    batch_norm: bool = False
    """Normalise hidden layers over the batch; not needed at these depths."""
    init: Literal["torch", "kaiming"] = "torch"
    """Initial weights: PyTorch's, or Kaiming's normal ones (the paper)."""
    head: float = 1.0
    """Factor on the initial weights of the last layer; a small one starts near y = 0, at a nominal policy, say."""
    precision: Literal["float32", "float64"] = "float32"
    """Precision of the network; the repair always runs in float64."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """For the weight matrices: Muon's orthogonal updates reach a gap 30 times smaller than AdamW in as many steps.
    Biases and all else are always AdamW's."""
    lr: float = 5e-3
    """Largest learning rate; Muon's is scaled to the size of AdamW's updates, which want about 1e-3."""
    weight_decay: float = 0.1
    """Keeps the largest gap down on a finite data set; 0 is slightly better with fresh inputs."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises to its largest value."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after that: to zero along a cosine, where the last digits of the gap are won, or constant."""
    clip: float = 0.0
    """Largest norm of the gradient; 0 for no limit."""
    average: float = 0.0
    """Decay of a running average of the weights, which is then what is evaluated; 0 for none."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the loss adds up over a batch."""

    penalty: float = 0.0
    """Weight of the squared violation of the true set in the loss; the repair leaves nothing to punish."""
    proximity: float = 0.0
    """Weight of the squared distance between prediction and repaired output; keeps predictions near a curved set."""
    relaxation: Literal["none", "adarel", "soft"] = "none"
    """Start on a relaxed set, or without repair ("soft"); needed with a small constant damping only."""
    relax_epochs: int = 0
    """How many epochs that start lasts; 0 for a third of all."""
    decay: Literal["linear", "cosine", "harmonic"] = "linear"
    """How the relaxation shrinks."""

    damping: float | None = None
    """A constant damping, as in the paper; None for the annealed one below."""
    damping_start: float = 10.0
    """First damping of the annealed schedule."""
    damping_ratio: float = 0.6
    """Factor of the damping from step to step."""
    nearest: int = 0
    """Iterations towards the nearest point of the set before the repair, see `repair`: much smaller gaps where the
    constraints are linear (35, with a damping that starts at 1e-3 with a ratio of 0.1) or bend along the axes (26)."""
    curvature: bool = False
    """Let "nearest" weigh each variable by the second derivative of the objective, where the problem knows them."""
    rows: Literal["auto", "all", "active"] = "auto"
    """Rows of the Jacobian in a step; the paper uses all."""
    tol: float = 1e-6
    """Tolerance of the repair in training; a finer one changes the trained weights hardly at all."""
    test_tol: float = 1e-8
    """Tolerance in validation and in the finished model; any other can be chosen later."""
    max_steps: int = 100
    """Limit on the steps of a repair."""
    rescue: bool = True
    """Repair samples that did not converge once more; the paper has no such thing."""

    validate_every: int = 5
    """Epochs between two validations."""
    checkpoint_seconds: float = 30.0
    """Least time between two checkpoints; the last epoch is always saved."""
    record: int = 0
    """On a GPU: record a training step with this many repair steps into a CUDA graph, which is several times faster;
    0 for none. Samples that need more are trained on as far as they came."""

    def __post_init__(self) -> None:
        weights = ("lr", "clip", "penalty", "proximity", "weight_decay")
        for name in ("epochs", "relax_epochs", "record", "pretrain", "nearest", *weights):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be >= 0, but got {getattr(self, name)!r}")
        for name in ("batch", "width", "validate_every"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"`{name}` must be at least 1, but got {getattr(self, name)!r}")
        for name in ("dropout", "average", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be in [0, 1), but got {getattr(self, name)!r}")
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"`activation` must be one of {', '.join(_ACTIVATIONS)}, but got {self.activation!r}")

    @classmethod
    def recipe(cls, name: str, problem: str = "", **changes: Any) -> TrainConfig:
        """The recipe `best` or `paper` for a family, with some fields changed."""
        if name not in ("best", "paper"):
            raise ValueError(f"`name` must be 'best' or 'paper', but got {name!r}")
        rival = changes.get("method", "snare")
        if name == "paper":
            chosen = _PAPER | _PAPER_FAMILIES.get(problem, {}) | _PAPER_METHODS.get(rival, {})
        else:
            own = _BEST_OURS.get(problem, {}) if rival == "snare" else _BEST_METHODS.get(rival, {})
            chosen = _BEST_FAMILIES.get(problem, {}) | own
        return cls().replace(**chosen | changes)

    def replace(self, **changes: Any) -> TrainConfig:
        """This configuration with some fields changed."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{name!r} is no field of the training configuration{hint}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields, for a file."""
        return dataclasses.asdict(self)

    def build_damping(self) -> Damping:
        """The rule of the repair's damping."""
        return Annealed(self.damping_start, self.damping_ratio) if self.damping is None else Constant(self.damping)

    def build_layer(self, problem: Problem) -> Layer:
        """The repair for the problem's constraints, ours at the tolerance of evaluation."""
        if self.method != "snare":
            inputs = problem.inputs.shape[1]
            return build(self.method, problem.constraints, inputs, problem.size, self.setting, problem.name, self.seed)
        damping = self.build_damping()
        options = (damping, self.rows, self.test_tol, self.max_steps, self.rescue)
        weights = problem.curvature if self.curvature and self.nearest else None
        return SnareLayer(problem.constraints, *options, nearest=self.nearest, weights=weights)

    def build_net(self, inputs: int, outputs: int) -> MLP:
        """A fresh network; only `seed` decides its weights, and the global random numbers are left alone."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            activation = _ACTIVATIONS[self.activation]
            net = MLP(inputs, outputs, self.width, self.depth, activation, self.dropout, self.batch_norm)
            if self.init == "kaiming":
                for layer in net:
                    if isinstance(layer, nn.Linear):
                        nn.init.kaiming_normal_(layer.weight)
            if self.head != 1:
                with torch.no_grad():
                    for parameter in net[-1].parameters():
                        parameter.mul_(self.head)
        return net.to(getattr(torch, self.precision))

    def build(self, problem: Problem) -> ConstrainedModel:
        """A fresh model for the problem, on its device."""
        layer, device = self.build_layer(problem), problem.inputs.device
        net = self.build_net(problem.inputs.shape[1], layer.predictions(problem.size))
        return ConstrainedModel(net.to(device), layer.to(device))

    def build_relaxation(self) -> AdaptiveRelaxation:
        """The relaxation of each epoch."""
        return AdaptiveRelaxation(self.relaxed_epochs if self.relaxation == "adarel" else 0, self.decay)

    @property
    def relaxed_epochs(self) -> int:
        """How many epochs are relaxed, or soft."""
        return 0 if self.relaxation == "none" else self.relax_epochs or math.ceil(self.epochs / 3)

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of step `step` of `steps`."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


# The released code to the letter: Adam without schedule, batch norm, dropout, a penalty in every loss, summed losses.
_PAPER: dict[str, Any] = {
    "epochs": 1000,
    "batch": 200,
    "width": 200,
    "activation": "relu",
    "dropout": 0.2,
    "batch_norm": True,
    "init": "kaiming",
    "precision": "float64",
    "optimizer": "adamw",
    "lr": 1e-4,
    "weight_decay": 0.0,
    "warmup": 0.0,
    "schedule": "constant",
    "reduction": "sum",
    "penalty": 10.0,
    "relaxation": "adarel",
    "relax_epochs": 500,
    "damping": 0.01,
    "rows": "all",
    "rescue": False,
}
_PAPER_CURVED = {"batch": 100}
_PAPER_FAMILIES: dict[str, dict[str, Any]] = {
    "qcqp": _PAPER_CURVED,
    "ncqcqp": _PAPER_CURVED,
    "ncqcqp-fast": _PAPER_CURVED,
    "ncqcqp-hard": _PAPER_CURVED,
    "cbf": {
        "epochs": 200,
        "batch": 100,
        "dropout": 0.0,
        "batch_norm": False,
        "relaxation": "soft",
        "relax_epochs": 50,
    },
}

# Curved sets: without the pull of the proximity predictions drift away from the set and learning slows down.
# There a ratio of 0.5 trains as well as 0.6, in fewer steps.
_BEST_CURVED = {"proximity": 1e-3, "damping_ratio": 0.5}
_BEST_FAMILIES: dict[str, dict[str, Any]] = {
    "qcqp": _BEST_CURVED,
    "ncqcqp": _BEST_CURVED,
    "ncqcqp-fast": _BEST_CURVED,
    "ncqcqp-hard": _BEST_CURVED,
    # a policy that starts as the nominal controller; with two variables few steps of the repair suffice
    "cbf": {
        "epochs": 30,
        "batch": 100,
        "width": 200,
        "head": 0.01,
        "optimizer": "adamw",
        "lr": 3e-3,
        "weight_decay": 0.0,
        "penalty": 10.0,
        "damping_ratio": 0.3,
    },
}

# A start at the projection, or near it, trains better, and more so if distances are weighed by the curvature of the
# objective. Gaps on the validation instances, one seed, batches of 400: after 40 epochs of `nclp` 1.9e-5, unweighted
# 6.4e-5; after 12 of `ncqcqp` 1.4e-4, without it 1.6e-3. On test instances, after 60 of `qcqp` 2.9e-5 and 5.1e-4
# (`snarenet reproduce inequalities` and `rows`).
_AT_PROJECTION = {"nearest": 26, "curvature": True}
_BEST_OURS: dict[str, dict[str, Any]] = {
    "nclp": {"nearest": 35, "curvature": True, "damping_start": 1e-3, "damping_ratio": 0.1},
    **dict.fromkeys(("qcqp", "ncqcqp", "ncqcqp-fast", "ncqcqp-hard"), _AT_PROJECTION),
}

# Methods that leave violations need a penalty in the loss. Chosen by the mean objective on the validation instances of
# `nclp` and `qcqp`, one seed, 40 epochs; ours has settings of its own above.
_BEST_METHODS: dict[str, dict[str, Any]] = {
    "soft": {"penalty": 10.0},
    "dc3": {"penalty": 100.0},
    "hardnet": {"relaxation": "adarel"},
    "hardnet++": {"relaxation": "adarel", "proximity": 1e-3},
    "hproj": {"penalty": 10.0},
    "fsnet": {"penalty": 10.0, "proximity": 0.1},
}
_NO_RELAXATION = {"relaxation": "none", "relax_epochs": 0, "setting": "paper"}
_PAPER_METHODS: dict[str, dict[str, Any]] = {
    "soft": _NO_RELAXATION,
    "dc3": _NO_RELAXATION,
    # its predictor has a training of its own: larger steps that shrink, larger batches, new inputs
    "hproj": _NO_RELAXATION | {"lr": 1e-3, "schedule": "cosine", "batch": 512, "fresh": True},
    "optnet": _NO_RELAXATION,
    "pinet": _NO_RELAXATION,
    "fsnet": _NO_RELAXATION,
    "hardnet++": _NO_RELAXATION,
    "hardnet": {"relaxation": "soft", "relax_epochs": 100, "setting": "paper"},
}
