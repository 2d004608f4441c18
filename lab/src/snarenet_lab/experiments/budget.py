"""`Budget`: how much of the paper's work is done again: `smoke` takes minutes, `standard` a night, `paper` days."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from snarenet.layers import METHODS
from snarenet.training import TrainConfig
from snarenet_lab.experiments.compare import Plan

SEEDS = (123, 456, 789, 101, 112)  # the paper's
TOLERANCES = (1e-4, 1e-6, 1e-8, 1e-10, 1e-12)  # the paper's

_HPROJ_STEPS = 20_000  # of HProj's own training, in the paper's runs


def seed_list(count: int) -> tuple[int, ...]:
    """So many seeds: the paper's, and others after them.

    >>> seed_list(2), seed_list(7)[-2:]
    ((123, 456), (1005, 1006))
    """
    if count < 1:
        raise ValueError(f"`seeds` must be at least 1, but got {count}")
    return (*SEEDS, *range(1005, 1000 + count))[:count]


@dataclass(frozen=True)
class Budget:
    """What a run of `snarenet reproduce` may cost.

    Attributes:
        name: its name.
        about: sentences on what it leaves out, for every report.
        share: of the paper's epochs, warm-up epochs and steps of pretraining, for runs of the recipe `paper`.
        shares: the same for single items, by name, where it is another.
        epochs: of runs of the recipe `best` in the main tables, by family.
        ablation: epochs of such runs elsewhere.
        parity: settings that differ from the recipe `paper`, in all families.
        best: settings that differ from the recipe `best` in the main tables, by family.
        small: settings that differ from it elsewhere.
        own: settings of single methods, in both recipes, as METHOD.FIELD.
        sizes: arguments of the families; those left out have the paper's sizes.
        inequalities: for the paper's 10, 50 and 100.
        methods: which methods to run.
        each_tolerance: train on `ncqcqp` once for every tolerance, as the paper did, instead of once for all.
        samples: instances in measurements of the repair alone.
    """

    name: str
    about: str
    share: float
    epochs: Mapping[str, int]
    ablation: int
    parity: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inequalities: tuple[int, int, int] = (10, 50, 100)
    methods: tuple[str, ...] = tuple(METHODS)
    each_tolerance: bool = False
    samples: int = 833
    shares: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"`share` must be above 0 and at most 1, but got {self.share!r}")

    def of(self, item: str) -> Budget:
        """The budget with the share of this item."""
        return replace(self, share=self.shares.get(item, self.share))

    def scaled(self, number: int) -> int:
        """This share of the paper's number, at least 1 unless that is 0."""
        return max(1, round(self.share * number)) if number else 0

    def parity_config(self, family: str, seed: int, epochs: int, method: str = "snare", **changes: Any) -> TrainConfig:
        """The recipe `paper`, its `epochs` and those of the warm-up reduced to the share."""
        settings = dict(self.parity) | dict(self.own) | {f"{method}.{name}": v for name, v in changes.items()}
        plan = Plan(family, epochs=self.scaled(epochs), recipe="paper", changes=settings)
        config = plan.config(method, seed)
        if config.relaxation != "none":
            config = config.replace(relax_epochs=self.scaled(config.relax_epochs))
        if method == "hproj" and config.pretrain == 0 and self.share < 1:
            config = config.replace(pretrain=self.scaled(_HPROJ_STEPS))
        return config

    def best_config(self, family: str, seed: int, method: str = "snare", **changes: Any) -> TrainConfig:
        """The recipe `best`, as in the main tables."""
        settings = dict(self.best.get(family, {})) | dict(self.own) | {f"{method}.{k}": v for k, v in changes.items()}
        return Plan(family, epochs=self.epochs[family], changes=settings).config(method, seed)

    def small_config(self, family: str, seed: int, method: str = "snare", **changes: Any) -> TrainConfig:
        """The recipe `best`, with less effort, where settings are compared with each other."""
        settings = dict(self.small) | dict(self.own) | {f"{method}.{name}": v for name, v in changes.items()}
        return Plan(family, epochs=self.ablation, changes=settings).config(method, seed)

    def sizes_of(self, family: str, **more: Any) -> dict[str, Any]:
        """The arguments of a family."""
        return dict(self.sizes.get(family, {})) | more


_TINY = {"size": 12, "inequalities": 6, "equalities": 5, "instances": 300}
_NARROW = {"batch": 50, "width": 32}
_WIDE = {"width": 1024, "depth": 3}
_RECORD = {"record": 10, "hardnet++.record": 40}  # steps of a repair in a CUDA graph
_CURVED = {"batch": 400, "weight_decay": 0.0, "fsnet.epochs": 30}
_FLOW = {"hproj.pretrain": 4000}

SMOKE = Budget(
    name="smoke",
    about="Budget smoke: tiny problems and a few epochs, to see that everything runs. The numbers mean nothing, and "
    "cannot be compared with the paper's.",
    share=0.005,
    epochs={"nclp": 12, "qcqp": 12, "ncqcqp": 12, "cbf": 2},
    ablation=8,
    parity=_NARROW,
    best={"nclp": _NARROW, "qcqp": _NARROW, "ncqcqp": _NARROW, "cbf": {"batch": 25, "width": 32}},
    small=_NARROW,
    own={"hproj.pretrain": 40, "fsnet.epochs": 2, "optnet.epochs": 1},
    sizes={
        **dict.fromkeys(("nclp", "qcqp", "ncqcqp", "ncqcqp-hard"), _TINY),
        "cbf": {"instances": 60, "dt": 0.1},
    },
    inequalities=(3, 6, 9),
    samples=50,
)
STANDARD = Budget(
    name="standard",
    about="Budget standard: the paper's problems and data. Every row says its epochs, and where the paper has more, "
    "how many. OptNet, which solves a cone program for every sample, has one epoch in batches of 32.",
    share=1.0,
    shares={"inequalities": 0.5, "ncqcqp": 0.03},
    epochs={"nclp": 300, "qcqp": 150, "ncqcqp": 150, "cbf": 30},
    ablation=60,
    parity={"record": 100},
    best={
        "nclp": {**_WIDE, **_RECORD, **_FLOW, "batch": 500, "snare.start": 60, "fsnet.epochs": 60},
        "qcqp": {**_WIDE, **_RECORD, **_FLOW, **_CURVED, "snare.record": 17},
        "ncqcqp": {**_WIDE, **_RECORD, **_FLOW, **_CURVED, "snare.record": 18},
    },
    small={**_FLOW, "batch": 400, "record": 100},
    own={"optnet.epochs": 1},
)
PAPER = Budget(
    name="paper",
    about="Budget paper: the paper's problems, data, epochs and settings. OptNet has a tenth of the epochs, in batches "
    "of 32.",
    share=1.0,
    epochs=STANDARD.epochs,
    ablation=STANDARD.ablation,
    parity={"record": 100},
    best=STANDARD.best,
    small=STANDARD.small,
    each_tolerance=True,
)
BUDGETS = {budget.name: budget for budget in (SMOKE, STANDARD, PAPER)}
