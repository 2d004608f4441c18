"""What a row of a table says of a run: the paper's six metrics, and time, steps and feasible shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from snarenet.report.evaluation import feasible_at, pick
from snarenet.report.tables import Column
from snarenet_lab.report.comparison import positive_gap
from snarenet_lab.report.results import Cell

Summary = Mapping[str, Any]  # the summary of `evaluate`, with "gap", "training" (seconds) and "collisions" where known


def _at(*keys: str) -> Callable[[Summary], float | None]:
    return lambda summary: pick(summary, *keys)


def _whole(summary: Summary) -> float | None:
    """Seconds for all test instances in one batch, as the paper measures."""
    each = pick(summary, "seconds", "model")
    return None if each is None else each * summary["instances"]


def _kept(summary: Summary) -> float | None:
    """The share of instances feasible to the tolerance that was asked for."""
    found = feasible_at(summary)
    return None if found is None else found[1]


_READERS: dict[str, tuple[Column, Callable[[Summary], float | None]]] = {
    column.key: (column, read)
    for column, read in (
        (Column("gap_max", "gap, max"), _at("gap", "max")),
        (Column("gap_gmean", "gap, gmean"), positive_gap),
        (Column("objective_max", "objective, max", "number"), _at("objective", "max")),
        (Column("objective", "objective, mean", "number"), _at("objective", "mean")),
        (Column("ineq_max", "ineq. error, max"), _at("ineq", "max")),
        (Column("ineq_gmean", "ineq. error, gmean"), _at("ineq", "gmean")),
        (Column("violations", "ineq. violations > 1e-4", unit="per instance"), _at("violations")),
        (Column("eq_max", "eq. error, max"), _at("eq", "max")),
        (Column("eq_gmean", "eq. error, gmean"), _at("eq", "gmean")),
        (Column("feasible", "feasible to 1e-4", "percent"), _at("feasible", "1e-04")),
        (Column("kept", "within its tol", "percent"), _kept),
        (Column("peak", "peak violation"), _at("violation")),
        (Column("collisions", "collisions", "count"), _at("collisions")),
        (Column("steps", "repair steps, median", "count"), _at("steps", "median")),
        (Column("steps_max", "repair steps, max", "count"), _at("steps", "max")),
        (Column("test_time", "test time", "seconds"), _whole),
        (Column("training", "training time", "seconds"), _at("training")),
    )
}


def columns(*keys: str) -> tuple[Column, ...]:
    """The columns of these keys."""
    return tuple(_READERS[key][0] for key in keys)


def cells(summaries: list[dict[str, Any]]) -> dict[str, Cell]:
    """Every quantity of the summaries of some seeds."""
    found = {key: Cell.of([read(summary) for summary in summaries]) for key, (_, read) in _READERS.items()}
    return {key: cell for key, cell in found.items() if cell.mean is not None}
