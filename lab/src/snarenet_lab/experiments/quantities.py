"""What a row of a table says of a run: the paper's six metrics, and time, steps and feasible shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from snarenet.report.results import Cell, Column
from snarenet.report.tables import feasible_at, pick

Record = Mapping[str, Any]  # the summary of `evaluate`, with "gap", "training" (seconds) and "collisions" where known


def _at(*keys: str) -> Callable[[Record], float | None]:
    return lambda record: pick(record, *keys)


def _gap(record: Record) -> float | None:
    """The geometric mean of the gaps, which is 1e-16 by convention where none is positive: then, 0."""
    most, mean = pick(record, "gap", "max"), pick(record, "gap", "gmean")
    return mean if most is None or most > 0 else 0.0


def _whole(record: Record) -> float | None:
    """Seconds for all test instances in one batch, as the paper measures."""
    each = pick(record, "seconds", "model")
    return None if each is None else each * record["instances"]


def _kept(record: Record) -> float | None:
    """The share of instances feasible to the tolerance that was asked for."""
    found = feasible_at(record)
    return None if found is None else found[1]


_READERS: dict[str, tuple[Column, Callable[[Record], float | None]]] = {
    column.key: (column, read)
    for column, read in (
        (Column("gap_max", "gap, max"), _at("gap", "max")),
        (Column("gap_gmean", "gap, gmean"), _gap),
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


def cells(records: list[dict[str, Any]]) -> dict[str, Cell]:
    """Every quantity of the records of some seeds."""
    found = {key: Cell.of([read(record) for record in records]) for key, (_, read) in _READERS.items()}
    return {key: cell for key, cell in found.items() if cell.mean is not None}
