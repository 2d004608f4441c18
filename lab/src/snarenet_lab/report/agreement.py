"""Do our runs of the paper's recipe agree with the paper? They do within two of its standard deviations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from snarenet.report.numbers import brief
from snarenet_lab.report.results import Cell, Results, Row

_DIVERGED = 1e6  # times the paper's number: no mean over seeds says more than that


@dataclass(frozen=True)
class Verdict:
    """A row of ours beside the paper's.

    Attributes:
        row: ours.
        where: the table, if an item has several.
        ours: our number.
        theirs: the paper's.
    """

    row: Row
    where: str
    ours: Cell
    theirs: Cell

    @property
    def agrees(self) -> bool | None:
        """Within two of the paper's standard deviations? None if the paper prints none."""
        if not self.theirs.spread or self.ours.mean is None or self.theirs.mean is None:
            return None
        return abs(self.ours.mean - self.theirs.mean) <= 2 * self.theirs.spread

    @property
    def whole(self) -> bool:
        """Has it all the epochs of the paper?"""
        return self.row.epochs >= self.row.paper_epochs

    @property
    def ours_written(self) -> str:
        """Our number, or how many seeds have none."""
        values, limit = self.ours.values or (self.ours.mean or 0.0,), _DIVERGED * abs(self.theirs.mean or 0.0)
        lost = sum(not math.isfinite(value) or abs(value) > limit for value in values)
        return f"{lost} of {len(values)} seeds diverged" if lost else _written(self.ours)

    @property
    def theirs_written(self) -> str:
        """The paper's number."""
        return _written(self.theirs)

    @property
    def numbers(self) -> str:
        """Ours and the paper's, in words."""
        after = "" if self.whole else f" after {self.row.effort} epochs"
        return f"{self.ours_written}{after}; the paper's {self.theirs_written}"


def verdicts(results: Results) -> list[Verdict]:
    """Every row of ours that has one of the paper beside it, in the main quantity of the item."""
    key, found = results.main[0], []
    for sheet in results.sheets:
        title = sheet.title.split(":")[0]
        where = title[0].lower() + title[1:] if len(results.sheets) > 1 else ""
        paper = {row.label: row.cells[key] for row in sheet.rows if row.source == "paper" and key in row.cells}
        for row in sheet.rows:
            theirs, ours = paper.get(row.label, Cell()), row.cells.get(key, Cell())
            if row.source == "parity" and theirs.mean and ours.mean is not None:
                found.append(Verdict(row, where, ours, theirs))
    return found


def agreement(results: Results) -> list[str]:
    """A sentence on the rows that agree, one on those that differ, with all of the paper's epochs and with fewer."""
    name, found = results.main[1], verdicts(results)
    groups = {
        f"Within two standard deviations of the paper ({name})": [v for v in found if v.agrees],
        f"Further from the paper than two of its standard deviations ({name})": [
            v for v in found if v.agrees is False and v.whole
        ],
        f"Not comparable, for want of epochs ({name})": [v for v in found if v.agrees is False and not v.whole],
        f"The paper has one seed, and no deviation to judge by ({name})": [v for v in found if v.agrees is None],
    }
    return [f"{head}: {_listed(several)}." for head, several in groups.items() if several]


def grouped(several: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Verdicts by the names of their rows; rows of one table with the same numbers together."""
    alike: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in several:
        alike.setdefault((verdict.numbers, verdict.where), []).append(verdict)
    names = [_joined([verdict.row.label for verdict in group]) for group in alike.values()]
    where = [f"{group[0].where}: " if group[0].where else "" for group in alike.values()]
    return {place + name: group for place, name, group in zip(where, names, alike.values(), strict=True)}


def _listed(several: Iterable[Verdict]) -> str:
    """The rows and their numbers."""
    return "; ".join(f"{name} ({group[0].numbers})" for name, group in grouped(several).items())


def _joined(names: list[str]) -> str:
    """Names that differ in their last word, the others said once.

    >>> _joined(["SnareNet, tol 1e-4", "SnareNet, tol 1e-6"]), _joined(["DC3"])
    ('SnareNet, tol 1e-4, 1e-6', 'DC3')
    """
    starts = {name.rpartition(" ")[0] for name in names}
    return ", ".join([names[0], *(name.rpartition(" ")[2] if len(starts) == 1 else name for name in names[1:])])


def _written(cell: Cell) -> str:
    """A mean and its deviation, two digits each."""
    return brief(cell.mean, 2) + (f" ± {brief(cell.spread, 2)}" if cell.spread else "")
