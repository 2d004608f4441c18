"""The paper's neural control policies: the table of the two boxes of initial states, and their trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from snarenet.layers import METHODS
from snarenet.problems import CBF
from snarenet.training import evaluate
from snarenet_lab.experiments.budget import Budget
from snarenet_lab.experiments.item import Entry, Item, together
from snarenet_lab.experiments.paper import paper_rows
from snarenet_lab.experiments.quantities import cells, columns
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import paths
from snarenet_lab.report.results import Row, Sheet

# tab:cbf_base_seed89_dc3_snarenet; one seed, 84 test instances: 58, 84, 51 and 83 of them are feasible to 1e-4
_PAPER = {
    1: """
method   | objective | feasible | ineq_max | ineq_gmean
DC3      | 3656      | 0.690476 | 6.555    | 6.785e-15
SnareNet | 4060      | 1.00     | 4.21e-8  | 1.763e-14
""",
    2: """
method   | objective | feasible | ineq_max | ineq_gmean
DC3      | 4269      | 0.607143 | 4.17     | 1.913e-14
SnareNet | 5226      | 0.988095 | 0.7483   | 4.038e-14
""",
}
_EPOCHS, _TOL = 200, 1e-6
_METHODS = ("dc3", "snare")
_DRAWN = 8  # trajectories of each method in a figure


class CBFItem(Item):
    """Safe driving."""

    name = "cbf"
    title = "Neural control policies (CBF)"
    about = (
        "T = 1 and 50 steps of 0.02, as in the released data; the paper's text says 10 steps. Errors are integrals "
        "over time, as in the paper; the peak violation is that of any single time. One seed (123), as in the paper, "
        "200 epochs there, the first 50 of them soft. The nominal controller knows nothing of the obstacles."
    )
    most_seeds = 1
    main = ("objective", "objective")
    draws_runs = True  # trajectories

    def entries(self, budget: Budget, seeds: int) -> list[Entry]:
        return [entry for box in _PAPER for entry in self._entries(budget, seeds, box)]

    def _entries(self, budget: Budget, seeds: int, box: int) -> list[Entry]:
        # limits on the epochs of single methods are for the other families, which have many more
        budget = replace(budget, parity={k: v for k, v in budget.parity.items() if not k.endswith(".epochs")})
        sizes, found = budget.sizes_of("cbf", box=box), []
        for method in _METHODS:
            label = METHODS[method].title
            tol = _TOL if method == "snare" else None
            found += [
                Entry.make(
                    label,
                    "parity",
                    "cbf",
                    lambda seed, m=method: budget.parity_config("cbf", seed, _EPOCHS, m),
                    sizes,
                    seeds,
                    tol,
                    _EPOCHS,
                ),
                Entry.make(
                    label,
                    "best",
                    "cbf",
                    lambda seed, m=method: budget.best_config("cbf", seed, m),
                    sizes,
                    seeds,
                    None,
                ),
            ]
        return found

    def sheets(self, study: Study) -> list[Sheet]:
        shown = columns(
            "objective", "feasible", "ineq_max", "ineq_gmean", "peak", "collisions", "steps_max", "training"
        )
        found = []
        for box, text in _PAPER.items():
            rows = [self._row(study, entry) for entry in self._entries(study.budget, study.seeds, box)]
            nominal = [
                Row("nominal controller", "measured", cells([known])) for known in [self._nominal(study, box)] if known
            ]
            note = "Collisions: trajectories with a point of the grid inside an obstacle."
            title = f"Policies from box {box}: test instances"
            found.append(Sheet(f"box-{box}", title, shown, together(paper_rows(text, 1), rows, nominal), note))
        return found

    def _row(self, study: Study, entry: Entry) -> Row:
        """The row of an entry, with collisions."""
        row = study.row(entry)
        collisions = []
        for job in entry.jobs:
            found = study.evaluation(job, entry.tol)
            if found is not None:
                collisions.append({"collisions": _collisions(study, dict(job.sizes), found[1]["trajectory"])})
        return Row(**{**vars(row), "cells": {**row.cells, **cells(collisions)}})

    def _nominal(self, study: Study, box: int) -> dict[str, Any] | None:
        sizes = study.budget.sizes_of("cbf", box=box)

        def measure() -> dict[str, Any]:
            problem = study.problem("cbf", sizes)
            assert isinstance(problem, CBF)
            found = evaluate(problem.nominal().to(study.device), problem, timed=False)
            return {"summary": found.summary, "trajectory": _short(found.arrays["trajectory"])} | {
                "collisions": _collisions(study, sizes, found.arrays["trajectory"])
            }

        known = study.measured("nominal", {"sizes": sizes}, measure)
        return known and known["summary"] | {"collisions": known["collisions"], "trajectory": known["trajectory"]}

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        found = []
        for box in _PAPER:
            nominal = self._nominal(study, box)
            series = [{"label": "nominal", "paths": nominal["trajectory"], "plain": True}] if nominal else []
            for entry in self._entries(study.budget, study.seeds, box):
                known = study.evaluation(entry.jobs[0], entry.tol)
                if known is not None:
                    series.append({"label": f"{entry.label}, {entry.source}", "paths": _short(known[1]["trajectory"])})
            problem = study.problem("cbf", study.budget.sizes_of("cbf", box=box))
            obstacles = problem.constraints.obstacles.tolist()  # pyright: ignore
            caption = f"Trajectories from box {box}, {_DRAWN} test instances of each policy"
            found.append(paths(f"box-{box}", caption, series, obstacles))
        return found


def _short(trajectory: np.ndarray) -> list[list[list[float]]]:
    """The positions of the first trajectories, rounded for a file."""
    return np.round(trajectory[:_DRAWN, :, :2], 4).tolist()


def _collisions(study: Study, sizes: dict[str, Any], trajectory: np.ndarray) -> int:
    problem = study.problem("cbf", sizes)
    assert isinstance(problem, CBF)
    return int(problem.collisions(torch.from_numpy(trajectory).to(study.device)).sum())
