"""An evaluation as text: one sentence, a table for the terminal, and all of its numbers in groups for a page.

An evaluation is what `Run.summary` gives; a part that is missing or null is left out, or shown as a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snarenet.report.numbers import duration, number, percent, short
from snarenet.report.tables import Column, Table

Evaluation = Mapping[str, Any]

_SPLITS = {"train": "training", "valid": "validation", "test": "test"}


def pick(summary: Any, *keys: str) -> Any:
    """`summary[key][key]...`, or None where a part is missing."""
    for key in keys:
        summary = summary.get(key) if isinstance(summary, Mapping) else None
    return summary


def feasible_at(evaluation: Evaluation) -> tuple[str, float] | None:
    """The tolerance of the evaluation, or the next looser one that was counted, and the share of feasible instances."""
    tol, counted = evaluation.get("tol"), evaluation.get("feasible") or {}
    looser = [key for key in counted if tol is not None and float(key) >= tol * (1 - 1e-9)]
    tightest = min(looser, key=float, default=None)
    return None if tightest is None else (tightest, counted[tightest])


def times_faster(evaluation: Evaluation) -> float | None:
    """Time of the reference solver over time of the model, both per instance."""
    ours, theirs = pick(evaluation, "seconds", "model"), pick(evaluation, "seconds", "reference")
    return theirs / ours if ours and theirs else None


def sentence(evaluation: Evaluation) -> str:
    """The result in one sentence: gap, feasible share, steps, and time against the reference solver."""
    split, instances = evaluation.get("split"), evaluation.get("instances")
    where = " ".join(str(word) for word in (instances, _SPLITS.get(str(split), split)) if word is not None)
    clauses = [c for c in (_quality(evaluation), _feasibility(evaluation), _time(evaluation)) if c]
    if not clauses:
        return "The evaluation holds no results."
    *others, last = clauses
    said = f"On {where or 'the'} instances {', '.join(others)}{', and ' if others else ''}{last}."
    left_out = evaluation.get("infeasible")
    return f"{said} Left out: {left_out} further ones that have no feasible point." if left_out else said


def _quality(evaluation: Evaluation) -> str:
    gap, objective = evaluation.get("gap"), pick(evaluation, "objective", "mean")
    if gap:
        engine = pick(evaluation, "seconds", "engine")
        reference = f"the {engine} reference" if engine else "the reference"
        negative = f"; {percent(gap['negative'])} negative" if gap.get("negative") else ""
        mean, most = short(gap.get("gmean")), short(gap.get("max"))
        return f"the gap to {reference} is {mean} (geometric mean; {most} at most{negative})"
    return "" if objective is None else f"the mean objective is {number(objective)}, with no reference to compare it to"


def _feasibility(evaluation: Evaluation) -> str:
    feasible, steps = feasible_at(evaluation), evaluation.get("steps")
    if feasible is None:
        return ""
    after = f" after {number(steps.get('median'))} steps (median; {number(steps.get('max'))} at most)" if steps else ""
    return f"{percent(feasible[1])} are feasible to {feasible[0]}{after}"


def _time(evaluation: Evaluation) -> str:
    seconds, ratio = evaluation.get("seconds") or {}, times_faster(evaluation)
    if seconds.get("model") is None:
        return ""
    against = ""
    if ratio is not None:
        how = f"{ratio:.3g} times faster" if ratio >= 1 else f"{1 / ratio:.3g} times slower"
        against = f", {how} than {seconds.get('engine') or 'the reference solver'} ({duration(seconds['reference'])})"
    batch = f" in a batch of {evaluation['instances']}" if evaluation.get("instances") else ""
    return f"one instance{batch} takes {duration(seconds['model'])}{against}"


def _optional(format: Callable[[Any], str], value: Any) -> str | None:
    return None if value is None else format(value)


def evaluation_groups(evaluation: Evaluation) -> dict[str, list[tuple[str, str]]]:
    """Every number of an evaluation, as (label, text) under the headings of a page."""
    e = evaluation
    spread = {"geometric mean": "gmean", "mean": "mean", "median": "median", "90% below": "q90", "99% below": "q99"}
    errors = {"largest": "max", "mean": "mean", "geometric mean": "gmean"}
    engine = pick(e, "seconds", "engine")
    groups: dict[str, list[tuple[str, str | None]]] = {
        "Gap to the reference": [
            *((label, _optional(short, pick(e, "gap", key))) for label, key in spread.items()),
            ("largest", _optional(short, pick(e, "gap", "max"))),
            ("relative to |f*|, mean", _optional(short, pick(e, "gap", "relative"))),
            ("below 0", _optional(percent, pick(e, "gap", "negative"))),
            ("below 1e-4", _optional(percent, pick(e, "gap", "optimal"))),
            ("below 1e-4 and feasible to 1e-4", _optional(percent, e.get("solved"))),
            ("left out: no feasible point", _optional(str, e.get("infeasible") or None)),
            ("instances with a reference", _optional(str, pick(e, "gap", "instances"))),
        ],
        "Objective": [
            ("mean", _optional(number, pick(e, "objective", "mean"))),
            ("largest", _optional(number, pick(e, "objective", "max"))),
        ],
        "Violation": [
            *((f"inequalities, {label}", _optional(short, pick(e, "ineq", k))) for label, k in errors.items()),
            *((f"equalities, {label}", _optional(short, pick(e, "eq", k))) for label, k in errors.items()),
            ("of any row at any time", _optional(short, e.get("violation"))),
            ("inequalities above 1e-4, mean count", _optional(number, e.get("violations"))),
        ],
        "Feasible instances": [
            (f"to {key}", percent(share))
            for key, share in sorted((e.get("feasible") or {}).items(), key=lambda item: -float(item[0]))
        ],
        "Repair and time": [
            ("tolerance", _optional("{:g}".format, e.get("tol"))),
            ("converged", _optional(percent, e.get("converged"))),
            ("inequalities at a bound", _optional(percent, e.get("tight"))),
            ("from predictions to outputs, over what outputs vary by", _optional(number, e.get("distance"))),
            ("outputs that are stuck", _optional(percent, e.get("stuck"))),
            ("steps, median", _optional(number, pick(e, "steps", "median"))),
            ("steps, largest", _optional(number, pick(e, "steps", "max"))),
            ("time per instance", _optional(duration, pick(e, "seconds", "model"))),
            (f"{engine or 'reference solver'} per instance", _optional(duration, pick(e, "seconds", "reference"))),
            ("times faster", _optional("{:.3g}".format, times_faster(e))),
        ],
    }
    known = {title: [(label, text) for label, text in rows if text is not None] for title, rows in groups.items()}
    return {title: rows for title, rows in known.items() if rows}


_COLUMNS: tuple[tuple[Column, Callable[[Evaluation], Any]], ...] = (
    (Column("gap_gmean", "gap\ngmean"), lambda e: pick(e, "gap", "gmean")),
    (Column("gap_max", "gap\nmax"), lambda e: pick(e, "gap", "max")),
    (Column("objective", "mean\nf(y)", "number"), lambda e: None if e.get("gap") else pick(e, "objective", "mean")),
    (Column("error", "max\nerror"), lambda e: _worst(e)),
    (Column("infeasible", "no\npoint", "count"), lambda e: e.get("infeasible") or None),
    (Column("feasible", "feasible", "percent"), lambda e: found[1] if (found := feasible_at(e)) else None),
    (Column("tol", "to"), lambda e: found[0] if (found := feasible_at(e)) else None),
    (Column("steps", "steps", "number"), lambda e: pick(e, "steps", "median")),
    (Column("seconds", "time\neach", "seconds"), lambda e: pick(e, "seconds", "model")),
    (Column("faster", "times\nfaster", "brief"), lambda e: times_faster(e)),
)


def _worst(evaluation: Evaluation) -> float | None:
    found = (pick(evaluation, kind, "max") for kind in ("ineq", "eq"))
    return max((value for value in found if value is not None), default=None)


def evaluation_table(evaluations: Sequence[tuple[str, Evaluation]]) -> Table:
    """The table of labelled evaluations, one row each.

    It fits 80 columns: the objective f(y) is only there where no gap is known, and empty columns are left out. Steps
    are the median.
    """
    rows = [
        {"run": label} | {column.key: read(evaluation) for column, read in _COLUMNS}
        for label, evaluation in evaluations
    ]
    return Table([Column("run", "run", "text"), *(column for column, _ in _COLUMNS)], rows).filled()
