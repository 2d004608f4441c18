"""Recipes and settings: data, no code but the look-up.

A *recipe* fills the fields of `TrainConfig`. `best` is what their defaults say, for every problem, but for what the
problem itself or another method than ours needs; `paper` goes by the family as well. A *setting* is what the layer of
another method than ours is told, by the method, the setting's name and the family.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from snarenet import problems
from snarenet.problems import Problem

Setting = Literal["fair", "paper"]
Fields = dict[str, Any]


def fields(recipe: str, problem: str | Problem, method: str) -> Fields:
    """What a recipe says about a problem, or family, and a method; fields that it does not name have their defaults."""
    name = problem if isinstance(problem, str) else problem.name
    if recipe == "paper":
        return _PAPER | _PAPER_FAMILIES.get(name, {}) | _PAPER_METHODS.get(method, {})
    if recipe == "best":
        own = problems.recipe(problem) if isinstance(problem, str) else problem.recipe
        return {**own, **_BEST_METHODS.get(method, {})}
    raise ValueError(f"`name` must be 'best' or 'paper', but got {recipe!r}")


def settings(method: str, setting: Setting, family: str = "") -> Fields:
    """Arguments of a method's layer: "fair" lets it do its best, "paper" is that of the paper's experiments."""
    return SETTINGS.get((method, setting), {}) | _OF_FAMILIES.get((method, setting, family), {})


_CURVED = ("qcqp", "ncqcqp", "ncqcqp-fast", "ncqcqp-hard")

# The released code to the letter: Adam without schedule, batch norm, dropout, a penalty in every loss, summed losses.
_PAPER: Fields = {
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
    "relax_mode": "train",
    "proximity": 0.0,
    "damping": 0.01,
    "damping_start": 10.0,  # of no use beside a constant damping; as in runs made before
    "damping_ratio": 0.6,
    "start": "none",
    "weights": "none",
    "descent": "none",
    "standardise": False,
    "rows": "all",
    "rescue": False,
    "keep": "last",
}
_PAPER_FAMILIES: dict[str, Fields] = {
    **{family: {"batch": 100} for family in _CURVED},
    "cbf": {
        "epochs": 200,
        "batch": 100,
        "dropout": 0.0,
        "batch_norm": False,
        "relaxation": "soft",
        "relax_epochs": 50,
    },
}

# Methods that leave violations need a penalty in the loss. Chosen by the mean objective on the validation instances of
# `nclp` and `qcqp`, one seed, 40 epochs.
_BEST_METHODS: dict[str, Fields] = {
    "soft": {"penalty": 10.0, "proximity": 0.0},
    "dc3": {"penalty": 100.0, "proximity": 0.0},
    "hardnet": {"relaxation": "adarel", "proximity": 0.0},
    "hardnet++": {"relaxation": "adarel", "proximity": 1e-3},
    "optnet": {"proximity": 1e-3},
    "hproj": {"penalty": 10.0, "proximity": 0.0},
    "pinet": {"proximity": 0.0},
    "fsnet": {"penalty": 10.0, "proximity": 0.1},
}
_NO_RELAXATION = {"relaxation": "none", "relax_epochs": 0, "setting": "paper"}
_PAPER_METHODS: dict[str, Fields] = {
    "soft": _NO_RELAXATION,
    "dc3": _NO_RELAXATION,
    # its predictor has a training of its own: larger steps that shrink, larger batches, new inputs, another penalty
    "hproj": _NO_RELAXATION
    | {"lr": 1e-3, "schedule": "cosine", "batch": 512, "fresh": True, "penalty": 100.0, "penalised": "sizes"},
    "optnet": _NO_RELAXATION,
    "pinet": _NO_RELAXATION,
    "fsnet": _NO_RELAXATION,
    "hardnet++": _NO_RELAXATION,
    "hardnet": {"relaxation": "soft", "relax_epochs": 100, "setting": "paper"},
}

# What a layer is told; HardNet has nothing to set.
SETTINGS: dict[tuple[str, Setting], Fields] = {
    ("soft", "paper"): {"project": False},
    ("soft", "fair"): {"project": True},
    ("dc3", "paper"): {"step": 1e-7, "partial": "random"},  # NCLP
    ("dc3", "fair"): {"step": "auto", "partial": "pivoted"},
    ("hardnet++", "paper"): {
        "epsilon": 0.3,
        "tol": 0.0,
        "max_steps": 500,
        "on_failure": "ignore",
        "dtype": torch.float32,
    },
    ("hardnet++", "fair"): {"epsilon": 0.3, "tol": 1e-8, "max_steps": 500},
    ("optnet", "paper"): {"mode": "lsqr"},
    ("optnet", "fair"): {"mode": "dense"},
    ("hproj", "paper"): {"box": 100.0, "bisect": "all", "partial": "random", "widen": 0.1, "lr": 1e-4},
    ("hproj", "fair"): {  # three times the steps gain nothing on `nclp`, and a third of them loses a little on `qcqp`
        "box": 5.0,
        "bisect": "infeasible",
        "partial": "pivoted",
        "widen": None,
        "lr": 1e-3,
        "pretrain_steps": 5000,
    },
    # Pi-net's published benchmark of NCLP's size; its sigma, 0.068, times its squared scale of y on NCLP, 3.3
    ("pinet", "paper"): {"omega": 1.7, "sigma": 0.22, "max_steps": 50},
    ("pinet", "fair"): {},  # the defaults: few steps to 1e-8, on average and at most, on the validation inputs of NCLP
    ("fsnet", "paper"): {
        "memory": 30,
        "unroll": 30,
        "halvings": 10,
        "stop": (1e-7, 1e-9),
        "tol": 1e-3,
        "max_steps": 50,
    },
    ("fsnet", "fair"): {"halvings": 30, "stop": None, "gradient_tol": 0.0, "tol": 1e-8, "max_steps": 100},
}
_OF_FAMILIES: dict[tuple[str, Setting, str], Fields] = {
    # so small that in effect nothing is corrected; the non-convex families' is not known
    ("dc3", "paper", family): {"step": 1e-13}
    for family in (*_CURVED, "cbf")
}
