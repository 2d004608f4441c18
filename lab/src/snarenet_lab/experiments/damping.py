"""The paper's study of the damping λ on NCLP, with annealed schedules beside it: gap against steps of the repair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snarenet_lab.experiments.budget import Budget
from snarenet_lab.experiments.item import Entry, Item, together
from snarenet_lab.experiments.paper import paper_rows
from snarenet_lab.experiments.quantities import columns
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import axis, points
from snarenet_lab.report.results import Row, Sheet

# table:NCLP_lambda, tol 1e-8; test time in seconds for 833 instances
_PAPER = """
method    | objective      | gap_max           | gap_gmean         | ineq_max          | ineq_gmean         | violations | eq_max            | eq_gmean           | test_time
λ = 0.001 | -11.19 ± 0.29  | 2.92 ± 1.73       | (4.28 ± 2.66)e-1  | (4.07 ± 1.46)e-9  | (1.72 ± 0.14)e-16  | 0.00       | (6.57 ± 2.36)e-9  | (1.87 ± 0.97)e-10  | 0.28 ± 0.12
λ = 0.01  | -11.59 ± 0.01  | (4.28 ± 0.46)e-1  | (7.90 ± 1.00)e-2  | (5.35 ± 0.88)e-9  | (2.71 ± 0.51)e-16  | 0.00       | (7.88 ± 1.14)e-9  | (7.74 ± 3.91)e-11  | 0.76 ± 0.74
λ = 0.1   | -11.64 ± 0.00  | (2.18 ± 0.12)e-1  | (3.86 ± 0.22)e-2  | (1.40 ± 0.22)e-8  | (3.58 ± 0.04)e-16  | 0.00       | (2.08 ± 0.33)e-8  | (4.29 ± 0.82)e-10  | 0.61 ± 0.26
λ = 1     | -11.66 ± 0.00  | (6.99 ± 0.74)e-2  | (1.57 ± 0.05)e-2  | (1.96 ± 0.08)e-8  | (5.01 ± 0.09)e-16  | 0.00       | (3.21 ± 0.13)e-8  | (6.27 ± 0.93)e-10  | 1.31 ± 0.32
λ = 5     | -11.67 ± 0.00  | (2.74 ± 0.08)e-2  | (6.34 ± 0.06)e-3  | (5.07 ± 0.25)e-8  | (6.78 ± 0.12)e-16  | 0.00       | (7.52 ± 0.39)e-8  | (3.19 ± 0.24)e-9   | 2.22 ± 1.17
λ = 10    | -11.67 ± 0.00  | (1.87 ± 0.16)e-2  | (4.29 ± 0.06)e-3  | (8.65 ± 0.46)e-8  | (6.38 ± 0.16)e-16  | 0.00       | (1.20 ± 0.06)e-7  | (4.98 ± 0.61)e-9   | 2.19 ± 1.24
"""  # noqa: E501
_EPOCHS = 2000
_TOL = 1e-8
_CONSTANT = (0.001, 0.01, 0.1, 1.0, 5.0, 10.0)
_ANNEALED = ((1.0, 0.5), (10.0, 0.6), (100.0, 0.6))  # start (relative to the squared row lengths) and ratio
_NEAREST = "nearest"  # the recipe as it is: a start near the projection


def _schedules() -> dict[str, dict[str, Any]]:
    """The settings of each damping, by its label."""
    found: dict[str, dict[str, Any]] = {f"λ = {value:g}": {"damping": value} for value in _CONSTANT}
    for start, ratio in _ANNEALED:
        found[f"λ = {start:g}·{ratio:g}ᵏ"] = {"damping": None, "damping_start": start, "damping_ratio": ratio}
    return found


class DampingItem(Item):
    """Constant and annealed damping."""

    name = "damping"
    title = "Damping on NCLP"
    about = (
        "Constant damping λ as in the paper, and annealed schedules, whose λ is relative to the squared lengths of the "
        "rows; `nearest` is the recipe `best` as it is, which starts near the projection (λ = 0.001·0.1ᵏ). Trained by "
        "the recipe `paper` (2,000 epochs there) and by the recipe `best`; tested at 1e-8. The paper's figure "
        "shows validation instances and the steps of a whole batch; ours test instances, and a median."
    )
    main = ("gap_gmean", "geometric mean of the gap")

    def entries(self, budget: Budget, seeds: int) -> list[Entry]:
        sizes, found = budget.sizes_of("nclp"), []
        for label, changes in _schedules().items():
            found += [
                Entry.make(
                    label,
                    "parity",
                    "nclp",
                    lambda seed, changes=changes: budget.parity_config("nclp", seed, _EPOCHS, tol=_TOL, **changes),
                    sizes,
                    seeds,
                    _TOL,
                    _EPOCHS,
                ),
                Entry.make(
                    label,
                    "best",
                    "nclp",
                    lambda seed, changes=changes: budget.small_config("nclp", seed, start="none", **changes),
                    sizes,
                    seeds,
                    _TOL,
                ),
            ]
        found.append(
            Entry.make(_NEAREST, "best", "nclp", lambda seed: budget.small_config("nclp", seed), sizes, seeds, _TOL)
        )
        return found

    def sheets(self, study: Study) -> list[Sheet]:
        rows = [study.row(entry) for entry in self.entries(study.budget, study.seeds)]
        keys = ("objective", "gap_max", "gap_gmean", "ineq_max", "eq_max", "kept", "steps", "steps_max", "test_time")
        note = "Tolerance 1e-8. The paper's repair also stops on a small step, so its errors exceed the tolerance."
        shown = columns(*keys, "training")
        return [Sheet("damping", "Damping on NCLP: test instances", shown, together(paper_rows(_PAPER), rows), note)]

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        found = []
        names = {"parity": "the paper's recipe", "best": "recipe `best`"}
        for source, recipe in names.items():
            known, series = _longest(sheets[0], source), []
            for label, annealed in (("constant", False), ("annealed", True)):
                rows = [row for row in known if (row.label == _NEAREST or "ᵏ" in row.label) == annealed]
                series.append(
                    {
                        "label": label,
                        "x": [row.cells["steps"].mean for row in rows],
                        "y": [row.cells["gap_gmean"].mean for row in rows],
                        "names": [row.label.removeprefix("λ = ") for row in rows],
                    }
                )
            series = [one for one in series if one["x"]]
            if not series:
                continue
            best = min(cell.mean for row in paper_rows(_PAPER) if (cell := row.cells["gap_gmean"]).mean is not None)
            levels = {"the paper's best gap": best} if study.budget.name != "smoke" else {}
            done = f"{recipe}, {known[0].epochs:,} epochs"
            caption = f"Gap against steps of the repair for every damping λ, {done}; left and low is better"
            x, y = axis("repair steps, median (count)"), axis("gap, gmean (units of the objective)", log=True)
            found.append(points(source, caption, x, y, series, levels))
        return found

    def remarks(self, study: Study, sheets: Sequence[Sheet]) -> list[str]:
        return _fronts(sheets[0])


def _longest(sheet: Sheet, source: str) -> list[Row]:
    """The rows of a recipe that have gap and steps, and as many epochs as any: fewer cannot be compared with them."""
    rows = [row for row in sheet.rows if row.source == source and {"steps", "gap_gmean"} <= {*row.cells}]
    most = max((row.epochs for row in rows), default=0)
    return [row for row in rows if row.epochs == most]


def _fronts(sheet: Sheet) -> list[str]:
    """Which dampings no other beats in both gap and steps, by recipe."""
    found = []
    for source, name in (("parity", "the paper's recipe"), ("best", "the recipe `best`")):
        rows = _longest(sheet, source)
        known = {row.label: (row.cells["steps"].mean, row.cells["gap_gmean"].mean) for row in rows}
        front = [
            label
            for label, (steps, gap) in known.items()
            if not any(s <= steps and g <= gap and (s, g) != (steps, gap) for s, g in known.values())  # pyright: ignore
        ]
        if front:
            done = f"{name}, {rows[0].epochs:,} epochs"
            found.append(f"Pareto front of gap and steps by {done}: {'; '.join(front)}.")
    return found
