"""The paper's scaling table: time, memory and steps of training NCLPs of nine sizes; `snarenet bench scaling` measures.

The item reads `bench/scaling.json` in its folder, which `snarenet bench scaling --out FOLDER/bench` writes as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from snarenet.report.tables import Column
from snarenet_lab.bench.scaling import measure
from snarenet_lab.experiments.budget import Budget
from snarenet_lab.experiments.item import Item, together
from snarenet_lab.experiments.paper import paper_rows
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import LINE_OF, axis, curve, curves
from snarenet_lab.report.results import Cell, Row, Sheet, Source

# tab:noncvx_scaling_metrics; total training time in seconds on an L40S, memory in GB, most repair iterations
_PAPER = """
method                            | seconds   | memory | steps
100 variables, 100 constraints    | 3674.4    | 2.3    | 32
100 variables, 500 constraints    | 3496.9    | 4.4    | 100
100 variables, 1000 constraints   | 5832.5    | 4.9    | 100
500 variables, 100 constraints    | 869.1     | 1.3    | 3
500 variables, 500 constraints    | 6493.8    | 11.6   | 11
500 variables, 1000 constraints   | 29301.7   | 23.8   | 30
1000 variables, 100 constraints   | 1107.3    | 1.3    | 3
1000 variables, 500 constraints   | 2724.5    | 3.3    | 3
1000 variables, 1000 constraints  | > 86400 s | 31.1   | 8
"""
_SMOKE: dict[str, Any] = {"cells": [(12, 6), (24, 12)], "equalities": 5, "instances": 300, "epochs": 2}


def options(budget: Budget) -> dict[str, Any]:
    """Arguments of the benchmark: tiny cells for smoke, else as many of 1,000 epochs as fit into four minutes each."""
    return _SMOKE if budget.name == "smoke" else {"epochs": 1000, "limit": 240.0 if budget.share < 1 else 1e9}


class ScalingItem(Item):
    """Nine sizes."""

    name = "scaling"
    title = "Scaling: training NCLPs of growing size"
    about = (
        "The paper does not say for how many epochs its times are, nor λ, tolerance and batch; ours are for 1,000 "
        "epochs of 8,334 inputs in batches of 200, extrapolated from the epochs that were run. The paper's GPU is an "
        "L40S. Memory is what training adds to the GPU's, or, on a CPU, to the process's."
    )
    most_seeds = 1

    def prepare(self, study: Study) -> None:
        if _file(study).exists():
            return
        measured = measure(torch.device(study.device), study.out / "bench", **options(study.budget))
        measured.write(study.out / "bench", "scaling")

    def sheets(self, study: Study) -> list[Sheet]:
        shown = (
            Column("seconds", "training time", "seconds"),
            Column("memory", "memory", "number", "GB"),
            Column("steps", "repair steps, max", "count"),
            Column("feasible", "feasible to 1e-8", "percent"),
            Column("epochs", "epochs run", "count"),
        )
        rows = together(paper_rows(_PAPER, 1), [_row(found) for found in _read(study)])
        note = "Time of 1,000 epochs. The paper's times are for an unstated number of epochs."
        return [Sheet("scaling", "Time, memory and steps of training", shown, rows, note)]

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        names = {"paper": "paper", "parity": "parity", "best": "best"}
        series: dict[tuple[str, str], list[tuple[float, Row]]] = {}
        for row in sheets[0].rows:
            variables, constraints = (float(part.split()[0]) for part in row.label.split(", "))
            series.setdefault((f"{variables:g} variables", row.source), []).append((constraints, row))
        found = []
        for key, y in (
            ("seconds", axis("training time (s)", log=True)),
            ("memory", axis("memory (GB)", log=True)),
            ("steps", axis("repair steps, max (count)", log=True)),
        ):
            lines, colors = [], {}
            for (label, source), pairs in series.items():
                color = colors.setdefault(label, len(colors))
                known = [
                    (count, row.cells[key].mean) for count, row in pairs if row.cells.get(key, Cell()).mean is not None
                ]
                if known:
                    x, values = zip(*known, strict=True)
                    lines.append(curve(f"{label}, {names[source]}", x, values, LINE_OF[source], color))
            quantity = y["label"].partition(" (")[0].capitalize()
            caption = f"{quantity} against the number of constraints; dashed: the paper, bold: our best"
            found.append(curves(key, caption, axis("constraints (count)", log=True), y, lines, marked=True))
        return found

    def remarks(self, study: Study, sheets: Sequence[Sheet]) -> list[str]:
        if all(row.source == "paper" for row in sheets[0].rows):
            return ["Not measured yet: snarenet bench scaling, or the same command without --no-train."]
        if not _read(study):
            return []  # measured before
        content = json.loads(_file(study).read_text())
        return [f"Measured with `{content['command']}` on {content['hardware']}."]


def _file(study: Study) -> Path:
    return study.out / "bench" / "scaling.json"


def _read(study: Study) -> list[dict[str, Any]]:
    """The rows of the benchmark, if it was run."""
    file = _file(study)
    return json.loads(file.read_text())["rows"] if file.exists() else []


def _row(found: dict[str, Any]) -> Row:
    source: Source = "parity" if found["recipe"] == "paper" else "best"
    cells = {
        "seconds": Cell(found["seconds for 1,000 epochs"]),
        "memory": Cell(max(found["MiB"], 0.0) * 2**20 / 1e9),
        "steps": Cell(max(found["most steps in test"], found["steps in training"])),
        "feasible": Cell(found["feasible to 1e-8"]),
        "epochs": Cell(found["epochs run"]),
    }
    return Row(f"{found['variables']} variables, {found['constraints']} constraints", source, cells, 1, 1)
