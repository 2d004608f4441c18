"""Methods side by side: one table (terminal, Markdown, CSV) and one figure, over the seeds of each method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from snarenet.report.evaluation import pick
from snarenet.report.figures import BLUE, ORANGE, canvas, log_axis, to_svg
from snarenet.report.numbers import short
from snarenet.report.tables import Column, Table
from snarenet_lab.report.results import Cell, csv_text


class Metric(NamedTuple):
    """A number of each run.

    Attributes:
        column: its heading, in two lines, and how it is written.
        read: finds it in what is known about a run; None if it is not there.
        log: is its axis logarithmic?
        unit: what its axis counts in.
        wide: is it left to wide tables?
    """

    column: Column
    read: Callable[[dict[str, Any]], float | None]
    log: bool = True
    unit: str = ""
    wide: bool = False

    def write(self, values: Sequence[float]) -> str | None:
        """Mean ± standard deviation over the seeds, two digits and one; None without a value."""
        cell = Cell.of(values)
        if cell.mean is None:
            return None
        if self.column.style != "short":
            return self.column.write(cell.mean)
        return short(cell.mean, 2) + (f" ± {short(cell.spread, 1)}" if cell.spread else "")


class Contender(NamedTuple):
    """A method, or a solver.

    Attributes:
        label: its name.
        budget: what was spent on it, in words.
        runs: what is known about each seed: the summary of `evaluate`, with "training", the seconds of training, and
            "parallel", the seconds an instance takes where all cores work on instances of their own.
    """

    label: str
    budget: str
    runs: Sequence[dict[str, Any]]

    def values(self, metric: Metric) -> list[float]:
        """The metric for every seed that has it."""
        return [value for run in self.runs if (value := metric.read(run)) is not None]


def _at(*keys: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda run: pick(run, *keys)


def positive_gap(summary: Any) -> float | None:
    """The geometric mean of the gaps, which is 1e-16 by convention where none is positive: then, 0."""
    most, mean = pick(summary, "gap", "max"), pick(summary, "gap", "gmean")
    return mean if most is None or most > 0 else 0.0


def _objective(run: dict[str, Any]) -> float | None:
    """The mean objective, where no gap says more."""
    return None if run.get("gap") else pick(run, "objective", "mean")


METRICS = [
    Metric(Column("gap_gmean", "gap\ngmean"), positive_gap),
    Metric(Column("gap_max", "gap\nmax"), _at("gap", "max")),
    Metric(Column("objective", "objective\nmean", "number"), _objective, log=False),
    Metric(Column("ineq_gmean", "ineq.\ngmean"), _at("ineq", "gmean"), wide=True),
    Metric(Column("ineq_max", "ineq.\nmax"), _at("ineq", "max")),
    Metric(Column("eq_gmean", "eq.\ngmean"), _at("eq", "gmean"), wide=True),
    Metric(Column("eq_max", "eq.\nmax"), _at("eq", "max")),
    Metric(Column("feasible_4", "feasible\nto 1e-4", "percent"), _at("feasible", "1e-04"), log=False),
    Metric(Column("feasible_8", "feasible\nto 1e-8", "percent"), _at("feasible", "1e-08"), log=False),
    Metric(Column("seconds", "time per\ninstance", "seconds"), _at("seconds", "model"), unit=" (s)"),
    Metric(Column("parallel", "in\nparallel", "seconds"), _at("parallel"), unit=" (s)", wide=True),
    Metric(Column("training", "training\ntime", "seconds"), _at("training"), unit=" (s)"),
]
_FIRST = (Column("method", "method", "text"), Column("budget", "budget", "text"))


def comparison_table(contenders: Sequence[Contender]) -> Table:
    """The table for a document: mean ± standard deviation over the seeds; empty columns are left out."""
    rows = [
        {"method": one.label, "budget": one.budget} | {m.column.key: m.write(one.values(m)) for m in METRICS}
        for one in contenders
    ]
    return Table((*_FIRST, *(metric.column for metric in METRICS)), rows).filled()


def terminal_table(contenders: Sequence[Contender]) -> Table:
    """The table for a terminal of 100 columns: without the columns that are for wide tables, in more lines."""
    table = comparison_table(contenders)
    wide = {metric.column.key for metric in METRICS if metric.wide}
    rows = [
        {key: text and text.replace(" ± ", "\n± ").replace(", ", ",\n") for key, text in row.items()}
        for row in table.rows
    ]
    return replace(table, columns=[column for column in table.columns if column.key not in wide], rows=rows)


def csv_table(contenders: Sequence[Contender]) -> str:
    """Every number of every seed, unrounded: one line a seed."""
    head = ["method", "budget", "seed", *(metric.column.label.replace("\n", " ") for metric in METRICS)]
    body = [
        [one.label, one.budget, run.get("seed", ""), *(metric.read(run) for metric in METRICS)]
        for one in contenders
        for run in one.runs
    ]
    return csv_text([head, *body])


def draw_comparison(contenders: Sequence[Contender], title: str) -> str:
    """The figure as SVG: a panel a metric, a line a method, a dot a seed, and the mean with its standard deviation."""
    count = len(contenders)
    used = [m for m in METRICS if sum(bool(one.values(m)) for one in contenders) > count / 2]  # else, see the table
    columns = min(4, len(used))
    lines = -(-len(used) // columns)
    size = (2.4 * columns + 1.2, lines * (0.27 * count + 0.8) + 0.4)
    with canvas(size) as figure:
        grid = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
        for axes in grid[len(used) :]:
            axes.set_visible(False)
        for axes, metric in zip(grid, used, strict=False):
            _draw_panel(axes, metric, [one.values(metric) for one in contenders])
        grid[0].set_yticks(range(count), [one.label for one in contenders])
        grid[0].set_ylim(count - 0.4, -0.6)
        figure.suptitle(title, fontsize=10)
        return to_svg(figure)


def _draw_panel(axes: Any, metric: Metric, values: list[list[float]]) -> None:
    known = np.array([value for row in values for value in row])
    floor = log_axis(axes, "x", known, "0", most=3) if metric.log else -np.inf
    for place, row in enumerate(values):
        points = np.maximum(row, floor)
        if not len(points):
            continue
        mean, spread = points.mean(), points.std(ddof=1) if len(points) > 1 else 0.0
        low = min(spread, 0.9 * mean) if metric.log else spread  # a bar to zero has no end on a log axis
        axes.plot(points, np.full(len(points), place), ".", color="0.6", markersize=4, zorder=2)
        ink = {"color": ORANGE if place == 0 else BLUE, "markersize": 4, "capsize": 2, "zorder": 3}
        axes.errorbar(mean, place, xerr=[[low], [spread]], fmt="o", **ink)
    if metric.column.style == "percent":
        axes.set(xlim=(-0.05, 1.05), xticks=[0, 0.5, 1], xticklabels=["0", "50%", "100%"])
    elif not metric.log:
        axes.locator_params(axis="x", nbins=3)
    axes.set_title(_long(metric), fontsize=8.5)
    axes.tick_params(labelsize=7.5)


def _long(metric: Metric) -> str:
    """The heading of a panel, in full."""
    words = {
        "ineq.": "inequality error,",
        "eq.": "equality error,",
        "gap": "gap,",
        "gmean": "geometric mean",
        "max": "largest",
    }
    return " ".join(words.get(word, word) for word in metric.column.label.split()) + metric.unit
