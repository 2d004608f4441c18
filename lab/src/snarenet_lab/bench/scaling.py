"""The paper's scaling table: training on NCLP with 100, 500 and 1,000 variables under 100, 500 and 1,000 constraints.

A cell is trained twice with the library's `Trainer`, batch 200: with the recipe `best`, and with the recipe `paper`
(damping 0.01, all rows), whose relaxation lasts half of the epochs as in 500 of 1,000. The paper does not say how many
epochs its times are for; ours are for 1,000, extrapolated from the epochs that were run. Every finished cell is a line
of `scaling.jsonl`, and is not run again.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem, load
from snarenet.training import TrainConfig, Trainer, evaluate
from snarenet_lab.bench.common import Benchmark, Ledger, Peak, command_line, hardware

EQUALITIES, BATCH, TOL = 50, 200, 1e-8
# (variables, inequalities) -> seconds of training, GB of GPU memory, most repair steps; on an L40S
PAPER: dict[tuple[int, int], tuple[float, float, int]] = {
    (100, 50): (3674.4, 2.3, 32),
    (100, 450): (3496.9, 4.4, 100),
    (100, 950): (5832.5, 4.9, 100),
    (500, 50): (869.1, 1.3, 3),
    (500, 450): (6493.8, 11.6, 11),
    (500, 950): (29301.7, 23.8, 30),
    (1000, 50): (1107.3, 1.3, 3),
    (1000, 450): (2724.5, 3.3, 3),
    (1000, 950): (86400.0, 31.1, 8),
}
_STOPPED = (1000, 950)  # the paper gives a lower limit for the time of this one
COLUMNS = (
    "variables", "constraints", "recipe", "epochs run", "seconds for 1,000 epochs", "paper's seconds", "times faster",
    "MiB", "paper's GB", "steps in training", "most steps in test", "paper's steps", "feasible to 1e-8",
    "objective before", "objective after", "mean relative gap",
)  # fmt: skip


def measure(
    device: torch.device,
    out: Path,
    epochs: int | None = None,
    limit: float = 240.0,
    cells: Sequence[tuple[int, int]] = tuple(PAPER),
    recipes: Sequence[str] = ("best", "paper"),
    references: str | None = None,
    instances: int = 10_000,
    equalities: int = EQUALITIES,
    **changes: Any,
) -> Benchmark:
    """Train every cell that is not there yet.

    Args:
        device: where.
        out: the folder of `scaling.jsonl`.
        epochs: of every cell; 1,000 on a GPU and 2 on a CPU unless given.
        limit: seconds that the epochs of a cell should take at most; as many are run as fit, by a trial of two.
        cells: (variables, inequalities) of each.
        recipes: how to train.
        references: a JSON file of optimal values of the test instances, {"VARIABLES-INEQUALITIES": [f, ...]}.
        instances: inputs of the problem.
        equalities: of the problem.
        changes: other fields of the training configuration, such as `record`.
    """
    asked = (1000 if device.type == "cuda" else 2) if epochs is None else epochs
    known: dict[str, list[float]] = {} if references is None else json.loads(Path(references).read_text())
    ledger, machine, rows = Ledger(out / "scaling.jsonl"), hardware(device), []
    for size, inequalities in cells:
        sizes = {"size": size, "inequalities": inequalities, "equalities": equalities, "instances": instances}
        for recipe in recipes:
            key = {"recipe": recipe, **sizes, "epochs": asked, "limit": limit, **changes, "hardware": machine}
            found = ledger.get(key, lambda r=recipe, s=sizes: _train(r, s, asked, limit, device, changes))
            print(size, inequalities, recipe, {k: v for k, v in found.items() if k != "objectives"}, file=sys.stderr)
            rows.append(_row(size, inequalities, equalities, recipe, found, known.get(f"{size}-{inequalities}")))
    command = command_line("scaling", device, **({} if epochs is None else {"epochs": epochs}) | changes)
    return Benchmark("Training on NCLP of growing size, batch 200", COLUMNS, rows, command, machine)


def _train(
    recipe: str, sizes: dict[str, int], epochs: int, limit: float, device: torch.device, changes: dict[str, Any]
) -> dict[str, Any]:
    """Train one cell: what it took, and what it led to."""
    gc.collect()  # the memory of the cell before
    if epochs > 2:
        epochs = max(2, min(epochs, int(limit / _seconds_of_an_epoch(recipe, sizes, device, changes))))
    peak, peaks = Peak(device), []

    def watch(line: dict[str, Any]) -> None:
        if "valid" not in line:  # the last epoch ends with all validation instances at once
            peaks.append(peak.growth_mib())

    problem = load("nclp", **sizes).to(device)
    config = _config(recipe, epochs, **changes)
    model = config.build(problem)
    lines = _fit(config, model, problem, watch)
    peaks = peaks or [peak.growth_mib()]
    before, after = (_tested(tested, problem) for tested in (config.build(problem), model))
    return {
        "epochs": epochs,
        "seconds": lines[-1]["seconds"],
        "mib": max(peaks),
        "steps": max(line["steps"] for line in lines),
        "failed": max(line["failed"] for line in lines),
        "most": int(after["steps"].max()),
        "feasible": float((after["violation"] <= TOL).mean()),
        "before": float(before["objective"].mean()),
        "objectives": after["objective"].tolist(),
    }


def _tested(model: ConstrainedModel, problem: Problem) -> dict[str, np.ndarray]:
    """What a model achieves on every test instance."""
    model.layer.on_failure = "ignore"  # the share of feasible outputs is in the table
    return evaluate(model, problem, tol=TOL, timed=False).arrays


def _config(recipe: str, epochs: int, **changes: Any) -> TrainConfig:
    """How a cell is trained; nothing is validated or saved on the way."""
    relaxed = {"relax_epochs": max(1, epochs // 2)} if recipe == "paper" else {}
    quiet = {"validate_every": max(1, epochs), "checkpoint_seconds": 1e9}
    return TrainConfig.recipe(recipe, "nclp", **{"batch": BATCH, "epochs": epochs, **relaxed, **quiet, **changes})


def _fit(
    config: TrainConfig, model: ConstrainedModel, problem: Problem, *callbacks: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Train; the metrics of all epochs."""
    model.layer.on_failure = "ignore"
    with tempfile.TemporaryDirectory() as folder:
        return Trainer(config, folder, callbacks=callbacks, quiet=True).fit(model, problem).metrics()


def _seconds_of_an_epoch(recipe: str, sizes: dict[str, int], device: torch.device, changes: dict[str, Any]) -> float:
    """Seconds of the second of two epochs; without relaxation, since those of the tight set count."""
    problem = load("nclp", **sizes).to(device)
    config = _config(recipe, 2, **{**changes, "relaxation": "none"})
    first, second = _fit(config, config.build(problem), problem)
    return second["seconds"] - first["seconds"]


def _row(
    size: int, inequalities: int, equalities: int, recipe: str, found: dict[str, Any], reference: list[float] | None
) -> list[Any]:
    seconds = found["seconds"] * 1000 / found["epochs"]
    took, memory, steps = PAPER.get((size, inequalities), (None, None, None))
    faster = None if took is None else took / seconds
    more = "> " if (size, inequalities) == _STOPPED else ""
    objectives, gap = np.array(found["objectives"]), None
    if reference is not None:
        best = np.array(reference)
        gap = float(np.nanmean((objectives - best) / np.abs(best)))
    return [
        size,
        inequalities + equalities,
        recipe,
        found["epochs"],
        seconds,
        took if took is None or not more else f"{more}{took:,.0f}",
        faster if faster is None or not more else f"{more}{faster:,.0f}",
        found["mib"],
        memory,
        found["steps"],
        found["most"],
        steps,
        found["feasible"],
        found["before"],
        float(objectives.mean()),
        gap,
    ]
