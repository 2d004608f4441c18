"""Our own finding: a step with all rows of the Jacobian (the paper) against one with active rows alone.

Active rows are the equalities and the inequalities that are violated. Measured: how many predictions a repair brings to
the set and in how many steps, and what training comes to, with and without the proximity term μ|y − ŷ|² in its loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from snarenet.damping import Annealed
from snarenet.problems import Problem
from snarenet.repair import repair
from snarenet.report.tables import Column
from snarenet_lab.experiments.budget import Budget
from snarenet_lab.experiments.item import Entry, Item
from snarenet_lab.experiments.quantities import columns
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import panels
from snarenet_lab.report.results import Cell, Row, Sheet
from snarenet_lab.starts import start

_FAMILIES = ("nclp", "qcqp", "ncqcqp", "ncqcqp-hard")
_TRAINED = ("nclp", "qcqp")
_ROWS: tuple[Literal["all", "active"], ...] = ("all", "active")
_SPREADS = (0.5, 2.0)
_PROXIMITY = (0.0, 1e-3)
_TOL, _STEPS = 1e-8, 500


class RowsItem(Item):
    """All rows, active rows."""

    name = "rows"
    title = "All rows against active rows"
    about = (
        "Not in the paper, which uses all rows. Robustness: repairs of A⁺x + σN(0, I) to 1e-8 within 500 steps, "
        "annealed damping, without a second attempt. Training: the recipe `best` of a family, without the start near "
        "the projection, with all or active rows and with a proximity weight μ of 0 or 1e-3; tested at 1e-8."
    )

    def entries(self, budget: Budget, seeds: int) -> list[Entry]:
        found = []
        for family in _TRAINED:
            plain = {"start": "none", "damping_start": 10.0, "damping_ratio": 0.6 if family == "nclp" else 0.5}
            for rows in _ROWS:
                for proximity in _PROXIMITY:
                    changes = {**plain, "rows": rows, "proximity": proximity}
                    found.append(
                        Entry.make(
                            f"{family}, {rows} rows, μ = {proximity:g}",
                            "best",
                            family,
                            lambda seed, f=family, c=changes: budget.small_config(f, seed, **c),
                            budget.sizes_of(family),
                            seeds,
                            _TOL,
                        )
                    )
        return found

    def sheets(self, study: Study) -> list[Sheet]:
        trained = tuple(study.row(entry) for entry in self.entries(study.budget, study.seeds))
        shown = columns(
            "gap_max", "gap_gmean", "ineq_max", "eq_max", "kept", "steps", "steps_max", "test_time", "training"
        )
        return [self._robustness(study), Sheet("training", "Training with all and with active rows", shown, trained)]

    def _robustness(self, study: Study) -> Sheet:
        found = []
        for family in _FAMILIES:
            sizes = study.budget.sizes_of(family)
            for spread in _SPREADS:
                for rows in _ROWS:
                    arguments = {"family": family, "sizes": sizes, "spread": spread, "rows": rows}
                    known = study.measured(
                        "rows",
                        arguments,
                        lambda f=family, s=sizes, d=spread, r=rows: attempt(study.problem(f, s), d, r),
                    )
                    if known is not None:
                        cells = {key: Cell(value) for key, value in known.items()}
                        found.append(Row(f"{family}, σ = {spread:g}, {rows} rows", "measured", cells))
        shown = (
            Column("converged", "converged", "percent"),
            Column("instances", "predictions", "count"),
            Column("steps", "repair steps, median", "count"),
            Column("steps_max", "repair steps, max", "count"),
            Column("moved", "distance |y − ŷ|, mean", "number"),
        )
        note = "Steps and distance are those of the predictions that converged; one draw of the noise."
        return Sheet("robustness", "Repairs that converge to 1e-8", shown, tuple(found), note)

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        robust, trained = sheets
        caption = "Repairs of A⁺x + σN(0, I) with all and with active rows"
        more = "Training with all and with active rows, mean and standard deviation over the seeds"
        return [
            panels("robustness", caption, robust, ["converged", "steps_max"]),
            panels("training", more, trained, ["gap_gmean", "steps"]),
        ]


def attempt(problem: Problem, spread: float, rows: Literal["all", "active"]) -> dict[str, float | None]:
    """Repair predictions around the least-norm solution of the equalities of every test instance."""
    y, x = start(problem, spread)
    stop = {"tol": _TOL, "max_steps": _STEPS, "rescue": False}
    found = repair(problem.constraints, y, x, start=None, damping=Annealed(), rows=rows, **stop)
    good = found.converged
    steps, moved = found.steps[good].double(), (found.value - y)[good].norm(dim=1)
    some = bool(good.any())
    return {
        "converged": good.double().mean().item(),
        "instances": len(y),
        "steps": steps.median().item() if some else None,
        "steps_max": steps.max().item() if some else None,
        "moved": moved.mean().item() if some else None,
    }
