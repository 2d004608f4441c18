"""`FamilyItem`: what the three test tables of the paper, and their figure, have in common.

Every method of the paper is trained by the recipe `paper` and by the recipe `best`, the methods that the paper leaves
out by the latter. Ours is then tested at five tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from snarenet.layers import METHODS
from snarenet_lab.experiments.budget import TOLERANCES, Budget
from snarenet_lab.experiments.item import Entry, Item, together
from snarenet_lab.experiments.quantities import columns
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import panels
from snarenet_lab.report.results import Row, Sheet

FRESH = "SnareNet, fresh inputs"
_ERRORS = ("ineq_max", "ineq_gmean", "violations", "eq_max", "eq_gmean")
GAPS = ("gap_max", "gap_gmean")
AFTER_GAPS = (*_ERRORS, "feasible", "kept", "steps_max", "test_time", "training")  # quantities, in the paper's order


def at_tolerance(tol: float) -> str:
    """The label of our row for a tolerance."""
    return f"SnareNet, tol {tol:.0e}".replace("e-0", "e-")


def title_of(method: str) -> str:
    """The name of a method as the recipe `best` builds it."""
    return "Soft + projection" if method == "soft" else METHODS[method].title


class FamilyItem(Item):
    """One family's test table.

    Attributes:
        family: the problem.
        epochs: of the paper's runs.
        rivals: methods of the paper's table.
        others: methods that it leaves out, and that can handle the family.
        keys: the quantities, in the paper's order.
        paper: the paper's rows.
    """

    family: ClassVar[str]
    epochs: ClassVar[int]
    rivals: ClassVar[tuple[str, ...]]
    others: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[str, ...]]
    paper: ClassVar[Sequence[Row]]

    def entries(self, budget: Budget, seeds: int) -> list[Entry]:
        family, sizes = self.family, budget.sizes_of(self.family)
        found = []
        for method in self.rivals:
            found.append(
                Entry.make(
                    title_of(method),
                    "parity",
                    family,
                    lambda seed, m=method: budget.parity_config(family, seed, self.epochs, m),
                    sizes,
                    seeds,
                    paper_epochs=self.epochs,
                )
            )
        for method in (*self.rivals, *self.others):
            found.append(
                Entry.make(
                    title_of(method),
                    "best",
                    family,
                    lambda seed, m=method: budget.best_config(family, seed, m),
                    sizes,
                    seeds,
                )
            )
        found = [entry for entry in found if entry.jobs[0].config.method in budget.methods]
        each = budget.each_tolerance and family == "ncqcqp"
        for tol in TOLERANCES:
            changes: dict[str, Any] = {"tol": tol} if each else {}
            found += [
                Entry.make(
                    at_tolerance(tol),
                    "parity",
                    family,
                    lambda seed, changes=changes: budget.parity_config(family, seed, self.epochs, **changes),
                    sizes,
                    seeds,
                    tol,
                    self.epochs,
                ),
                Entry.make(
                    at_tolerance(tol), "best", family, lambda seed: budget.best_config(family, seed), sizes, seeds, tol
                ),
            ]
        found.append(
            Entry.make(
                FRESH, "best", family, lambda seed: budget.best_config(family, seed, fresh=True), sizes, seeds, 1e-8
            )
        )
        return found

    def sheets(self, study: Study) -> list[Sheet]:
        rows = [study.row(entry) for entry in self.entries(study.budget, study.seeds)]
        note = (
            "Rows marked paper are the paper's numbers, of its own machine. Errors, gaps and objectives have the units "
            "of the problem; gmean is the geometric mean, max the largest over the test instances. Test time is that "
            "of all test instances in one batch. One trained model is tested at all five tolerances."
        )
        return [Sheet("test", f"{self.title}: test instances", columns(*self.keys), together(self.paper, rows), note)]

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        shown = ("gap_gmean", "objective", "ineq_gmean", "eq_gmean", "training", "gap_max", "ineq_max", "eq_max")
        keys = [key for key in (*shown, "test_time") if key in self.keys]
        caption = f"{self.title}: the metrics of the test table, mean and standard deviation over the seeds"
        return [panels("metrics", caption, sheets[0], keys)]
