"""Methods side by side: one table (terminal, Markdown, CSV) and one figure, over the seeds of each method."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from snarenet.report.figures import BLUE, ORANGE, canvas, log_axis, to_svg
from snarenet.report.tables import duration, percent, pick

if TYPE_CHECKING:
    from rich.table import Table


class Metric(NamedTuple):
    """A number of each run.

    Attributes:
        label: the heading of its column, in two lines.
        read: finds it in what is known about a run; None if it is not there.
        text: writes a number.
        log: is its axis logarithmic?
        unit: what its axis counts in.
        wide: is it left to wide tables?
    """

    label: str
    read: Callable[[dict[str, Any]], float | None]
    text: Callable[[float], str]
    log: bool = True
    unit: str = ""
    wide: bool = False


class Row(NamedTuple):
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


def _gap(run: dict[str, Any]) -> float | None:
    """The geometric mean of the gaps, which is 1e-16 by convention where none is positive: then, 0."""
    most, mean = pick(run, "gap", "max"), pick(run, "gap", "gmean")
    return mean if most is None or most > 0 else 0.0


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e+")


METRICS = [
    Metric("gap\ngmean", _gap, _short),
    Metric("gap\nmax", _at("gap", "max"), _short),
    Metric(
        "objective\nmean",
        lambda run: None if run.get("gap") else pick(run, "objective", "mean"),
        "{:.4g}".format,
        False,
    ),
    Metric("ineq.\ngmean", _at("ineq", "gmean"), _short, wide=True),
    Metric("ineq.\nmax", _at("ineq", "max"), _short),
    Metric("eq.\ngmean", _at("eq", "gmean"), _short, wide=True),
    Metric("eq.\nmax", _at("eq", "max"), _short),
    Metric("feasible\nto 1e-4", _at("feasible", "1e-04"), percent, False),
    Metric("feasible\nto 1e-8", _at("feasible", "1e-08"), percent, False),
    Metric("time per\ninstance", _at("seconds", "model"), duration, unit=" (s)"),
    Metric("in\nparallel", _at("parallel"), duration, unit=" (s)", wide=True),
    Metric("training\ntime", _at("training"), duration, unit=" (s)"),
]


def cells(rows: Sequence[Row], wide: bool = True) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table, mean ± standard deviation over the seeds; empty columns are left out."""
    used = [metric for metric in METRICS if any(row.values(metric) for row in rows) and (wide or not metric.wide)]
    table = [[row.label, row.budget, *(_cell(metric, row.values(metric)) for metric in used)] for row in rows]
    return ["method", "budget", *(metric.label for metric in used)], table


def _cell(metric: Metric, values: list[float]) -> str:
    if not values:
        return "–"
    spread = stdev(values) if len(values) > 1 and metric.text is _short else 0.0
    return metric.text(fmean(values)) + (f" ± {spread:.0e}".replace("e-0", "e-") if spread else "")


def terminal_table(rows: Sequence[Row]) -> Table:
    """The table for a terminal of 100 columns: without the columns that are for wide tables."""
    from rich import box
    from rich.table import Table

    headings, lines = cells(rows, wide=False)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right", overflow="fold")
    for line in lines:
        table.add_row(*(cell.replace(" ± ", "\n± ").replace(", ", ",\n") for cell in line))
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """The table for a document."""
    headings, lines = cells(rows)
    whole = [[heading.replace("\n", " ") for heading in headings], ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in whole) + "\n"


def csv_table(rows: Sequence[Row]) -> str:
    """Every number of every seed, unrounded: one line a seed."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["method", "budget", "seed", *(metric.label.replace("\n", " ") for metric in METRICS)])
    for row in rows:
        for run in row.runs:
            numbers = [metric.read(run) for metric in METRICS]
            writer.writerow([row.label, row.budget, run.get("seed", ""), *numbers])
    return file.getvalue()


def draw_comparison(rows: Sequence[Row], title: str) -> str:
    """The figure as SVG: a panel a metric, a line a method, a dot a seed, and the mean with its standard deviation."""
    used = [m for m in METRICS if sum(bool(row.values(m)) for row in rows) > len(rows) / 2]  # else, see the table
    columns = min(4, len(used))
    lines = -(-len(used) // columns)
    size = (2.4 * columns + 1.2, lines * (0.27 * len(rows) + 0.8) + 0.4)
    with canvas(size) as figure:
        grid = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
        for axes in grid[len(used) :]:
            axes.set_visible(False)
        for axes, metric in zip(grid, used, strict=False):
            _draw_panel(axes, metric, [row.values(metric) for row in rows])
        grid[0].set_yticks(range(len(rows)), [row.label for row in rows])
        grid[0].set_ylim(len(rows) - 0.4, -0.6)
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
    if metric.text is percent:
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
    return " ".join(words.get(word, word) for word in metric.label.split()) + metric.unit
