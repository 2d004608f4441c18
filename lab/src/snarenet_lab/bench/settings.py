"""How the defaults of training were chosen: the same training with one setting changed, judged on validation instances.

Test instances have no part in it. Runs are short and problems small, so that all of them take minutes; the order of the
settings is what counts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import snarenet as sn
from snarenet.problems import Problem
from snarenet.reference import solve
from snarenet_lab.bench.common import Benchmark, command_line, hardware

SETTINGS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "AdamW, rate 1e-3": {"optimizer": "adamw", "lr": 1e-3},
    "rate 2.5e-3": {"lr": 2.5e-3},
    "rate 1e-2": {"lr": 1e-2},
    "width 200": {"width": 200},
    "width 800": {"width": 800},
    "no weight decay": {"weight_decay": 0.0},
    "no proximity": {"proximity": 0.0},
    "proximity 0.01": {"proximity": 0.01},
    "no step down the objective": {"descent": "none"},
    "no metric": {"weights": "none"},
    "repair from the prediction": {"start": "none"},
    "no units": {"standardise": False},
}
SMALL = {"size": 40, "inequalities": 20, "equalities": 20, "instances": 3000}


def measure(
    device: torch.device,
    out: Path,
    families: Sequence[str] = ("nclp", "qcqp", "ncqcqp"),
    epochs: int = 10,
    seeds: int = 1,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Train with every setting.

    Args:
        device: where.
        out: nothing is kept there but the table.
        families: what to train on.
        epochs: of each run.
        seeds: runs of each setting.
        settings: the fields in which each differs from the defaults; `SETTINGS` unless given.
        sizes: arguments of the families; `SMALL` unless given.
    """
    problems = {name: sn.problems.load(name, **SMALL if sizes is None else sizes).to(device) for name in families}
    best = {name: solve(problem.cpu(), problem.split("valid")).objective for name, problem in problems.items()}
    rows = []
    for label, changes in (SETTINGS if settings is None else settings).items():
        found = [_gap(problems[name].to(device), best[name], epochs, seeds, changes) for name in families]
        rows.append([label, *(gap for gap, _ in found), sum(failed for _, failed in found)])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    title = f"Mean relative gap on validation instances after {epochs} epochs, {seeds} seed{'s' * (seeds > 1)}"
    columns = ("setting", *families, "infeasible")
    return Benchmark(title, columns, rows, command_line("settings", device), hardware(device))


def _gap(
    problem: Problem, best: torch.Tensor, epochs: int, seeds: int, changes: Mapping[str, Any]
) -> tuple[float, int]:
    """The mean gap over the seeds, and how many instances were not feasible."""
    gaps, failed = [], 0
    for seed in range(seeds):
        config = sn.TrainConfig.recipe("best", problem, epochs=epochs, seed=seed, validate_every=epochs, **changes)
        model = config.build(problem)
        with tempfile.TemporaryDirectory() as folder:
            sn.Trainer(config, Path(folder), quiet=True).fit(model, problem)
        summary = sn.evaluate(model, problem, "valid", reference=best, timed=False).summary
        gaps.append(summary["gap"]["relative"])
        failed += round((1 - summary["converged"]) * summary["instances"])
    return sum(gaps) / len(gaps), failed
