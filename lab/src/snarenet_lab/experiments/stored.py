"""Rows outlive their runs: when results are written again, what ITEM.json holds stays unless there is better.

Better is more epochs, or, of the same training, other seeds beside the old ones, or as many seeds of another. Folders
of runs are large and may go; the numbers of every seed are in ITEM.json. A row that must go is deleted there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from snarenet_lab.experiments.item import together
from snarenet_lab.report.results import Cell, Results, Row, Sheet


def with_stored(sheets: Sequence[Sheet], stored: Results | None) -> list[Sheet]:
    """The tables with the better of every new and every stored row; the paper's are always the new ones."""
    before = {sheet.key: sheet for sheet in stored.sheets} if stored is not None else {}
    found = []
    for sheet in sheets:
        known = {_key(row): row for row in before[sheet.key].rows} if sheet.key in before else {}
        rows = [row if row.source == "paper" else better(row, known.get(_key(row))) for row in sheet.rows]
        names = {*map(_key, rows)}
        # what is measured, not trained, has no row where it is not at hand
        gone = [row for key, row in known.items() if key not in names and row.source != "paper"]
        found.append(replace(sheet, rows=together(rows, gone)))
    return found


def better(new: Row, old: Row | None) -> Row:
    """The row with more epochs; of the same training the seeds of both; of another the new one, if it lacks no seed."""
    if old is None or not old.cells:
        return new
    same = (new.command, new.epochs) == (old.command, old.epochs)
    if new.cells and same and _each_seed(new) and _each_seed(old):
        return _joined(new, old)
    if new.cells and (new.epochs > old.epochs or (new.epochs == old.epochs and new.done >= old.done)):
        return new
    return replace(old, planned=max(new.planned, old.done), paper_epochs=new.paper_epochs)


def held(row: Row, epochs: int, command: str, seeds: Sequence[int]) -> set[int]:
    """The seeds of a training that a stored row makes needless: its own, or all, if it has them by whatever command."""
    complete = row.epochs >= epochs and set(seeds) <= set(row.seeds)
    return set(row.seeds) if complete or (row.command, row.epochs) == (command, epochs) else set()


def _joined(new: Row, old: Row) -> Row:
    """A row of the seeds of both; where both have one, the new."""
    order = tuple(dict.fromkeys((*new.seeds, *old.seeds)))
    cells = {}
    for key in dict.fromkeys((*new.cells, *old.cells)):
        values: dict[int, float] = {}
        for row in (old, new):
            values |= dict(zip(row.seeds, row.cells.get(key, Cell()).values, strict=False))
        if len(values) == len(order):  # else a quantity that one of them lacks, such as a gap without references
            cells[key] = Cell.of([values[seed] for seed in order])
    return replace(new, cells=cells, done=len(order), planned=max(new.planned, len(order)), seeds=order)


def _each_seed(row: Row) -> bool:
    """Has every cell a value for every seed?"""
    return bool(row.seeds) and all(len(cell.values) == len(row.seeds) for cell in row.cells.values())


def _key(row: Row) -> tuple[str, str]:
    return row.label, row.source


def with_stored_figures(new: Sequence[dict[str, Any]], stored: Results | None) -> list[dict[str, Any]]:
    """Figures of runs: the series of runs that are at hand, and the stored ones of those that are not."""
    before = {figure["name"]: figure for figure in stored.figures} if stored is not None else {}
    found = [figure | {"series": _series(figure, before.get(figure["name"], {}))} for figure in new]
    names = [figure["name"] for figure in new]
    return found + [dict(figure) for name, figure in before.items() if name not in names]


def _series(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[Any]:
    labels = [one["label"] for one in new["series"]]
    return [*new["series"], *(one for one in old.get("series", []) if one["label"] not in labels)]
