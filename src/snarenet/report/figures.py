"""Figures; matplotlib comes with the extra `plots` and is imported where it is used."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.report.evaluation import pick
from snarenet.report.hover import Hint, Mark, place, thin
from snarenet.report.numbers import short

BLUE, ORANGE, GREEN = "#3b6ea8", "#c1440e", "#1b7837"
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.45",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "0.92",
    "lines.linewidth": 1.3,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "snarenet",
}


def _matplotlib() -> Any:
    """matplotlib, or an error that names what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "snarenet[plots]"') from error
    return matplotlib


def pyplot() -> Any:
    """matplotlib's pyplot without a screen, or an error that names what to install."""
    _matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_repair_paths(constraints: Constraints, paths: Tensor, file: Path, title: str = "") -> None:
    """Draw a set in the plane and the paths (K, B, 2) of B repairs, from prediction to feasible point, to a PNG."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 5.5), layout="constrained")
    flat = paths.reshape(-1, 2)
    low, high = flat.amin(0) - 0.4, flat.amax(0) + 0.4
    grid = [torch.linspace(float(a), float(b), 400, dtype=torch.float64) for a, b in zip(low, high, strict=True)]
    points = torch.cartesian_prod(*grid)
    _, lower, upper, *_ = constraints.at(points)
    value = constraints.value(points)
    excess = torch.maximum(value - upper, lower - value)  # of each constraint, negative inside
    shape = (len(grid[0]), len(grid[1]))
    for row in excess.T:
        axes.contour(*(g.numpy() for g in grid), row.reshape(shape).T.numpy(), [0.0], colors="0.45", linewidths=1)
    inside = excess.amax(1).reshape(shape).T.numpy()
    axes.contourf(*(g.numpy() for g in grid), inside, [-torch.inf, 0.0], colors=["#bfe3c0"])
    for path in paths.transpose(0, 1):
        axes.plot(*path.T.numpy(), "-", color="#3b6ea8", linewidth=0.9, marker=".", markersize=3, alpha=0.8)
    axes.plot(*paths[0].T.numpy(), "o", color="#c1440e", markersize=5, label="prediction")
    axes.plot(*paths[-1].T.numpy(), "o", color="#1b7837", markersize=5, label="repaired")
    axes.set(xlabel="$y_1$", ylabel="$y_2$", title=title, aspect="equal")
    figure.legend(loc="outside lower center", ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)


class Picture(NamedTuple):
    """A figure of a page.

    Attributes:
        svg: the drawing.
        caption: one sentence under it.
        alt: one sentence for readers who do not see it.
        marks: values to hover over.
    """

    svg: str
    caption: str
    alt: str
    marks: tuple[Mark, ...] = ()


def draw_loss(metrics: list[dict[str, Any]]) -> Picture:
    """Loss and objective of the training batches, epoch by epoch."""
    curves = {"loss": _series(metrics, "loss"), "objective": _series(metrics, "objective")}
    with _axes() as (figure, axes):
        hints = _draw_curves(axes, _series(metrics, "epoch"), curves)
        cut = _cut_peaks(axes, np.concatenate(list(curves.values())))
        axes.set(xlabel="epoch", ylabel="mean per instance\n(units of the objective)")
        caption = "Training loss and objective"
        caption += f"; values above the frame: {cut}" if cut else ""
        caption += _nonfinite(curves["loss"], "epochs whose loss is not finite")
        alt = f"Line plot of the training loss, at the end {_last(curves['loss'])}."
        return finish(figure, caption + ".", alt, hints)


def draw_gap_curve(metrics: list[dict[str, Any]]) -> Picture | None:
    """Gap on the validation instances, epoch by epoch; None if none was measured."""
    curves = {
        "geometric mean": _series(metrics, "valid", "gap", "gmean"),
        "largest": _series(metrics, "valid", "gap", "max"),
    }
    if all(np.isnan(values).all() for values in curves.values()):
        return None
    with _axes() as (figure, axes):
        hints = _draw_curves(axes, _series(metrics, "epoch"), curves, zero="≤ 0")
        axes.set(xlabel="epoch", ylabel="gap f(y) − f*\n(units of the objective)")
        last = _last(curves["geometric mean"])
        caption = f"Gap to the reference on the validation instances; the last geometric mean is {last}."
        return finish(figure, caption, f"Line plot on a log axis of the validation gap, at the end {last}.", hints)


def draw_violation_curve(metrics: list[dict[str, Any]]) -> Picture:
    """Violation in training and on the validation instances, epoch by epoch."""
    curves = {
        "training": _series(metrics, "violation"),
        "inequalities (valid)": _series(metrics, "valid", "ineq", "max"),
        "equalities (valid)": _series(metrics, "valid", "eq", "max"),
    }
    curves = {label: values for label, values in curves.items() if label == "training" or not np.isnan(values).all()}
    with _axes() as (figure, axes):
        hints = _draw_curves(axes, _series(metrics, "epoch"), curves, zero="0")
        axes.set(xlabel="epoch", ylabel="violation\n(units of the constraints)")
        caption = "Violation of the constraints in training, where they may be relaxed"
        caption += ", and the largest on the validation instances, where they are not" if len(curves) > 1 else ""
        last = _last(curves["training"])
        alt = f"Line plot on a log axis of the violation, in training at the end {last}."
        return finish(figure, f"{caption}.", alt, hints)


def draw_schedules(metrics: list[dict[str, Any]]) -> Picture:
    """Relaxation and learning rate, epoch by epoch."""
    epochs, hints = _series(metrics, "epoch"), []
    with _axes(rows=2) as (figure, (above, below)):
        for axes, key, name in ((above, "relax", "relaxation"), (below, "lr", "learning rate")):
            hints += _draw_curves(axes, epochs, {name: _series(metrics, key)})
            top = axes.get_ylim()[1]
            axes.set_ylim(-0.05 * top, top)  # from zero, and zero can be seen
        above.set(ylabel="relaxation\n(of the bounds)")
        below.set(xlabel="epoch", ylabel="learning\nrate (per step)")
        above.tick_params(labelbottom=False)
        figure.align_ylabels()
        caption = "How far the bounds are relaxed, and the learning rate."
        return finish(figure, caption, "Two line plots: the relaxation and the learning rate of every epoch.", hints)


def draw_gaps(gap: np.ndarray) -> Picture:
    """Histogram of the size of the gaps (N,) on a log axis; gaps below zero in their own colour, NaN left out."""
    known = gap[np.isfinite(gap)]
    groups = {"at or above the reference": known[known >= 0], "below it: negative": -known[known < 0]}
    with _axes() as (figure, axes):
        hints = _draw_log_histogram(axes, groups)
        axes.set(xlabel="size of the gap f(y) − f* (units of the objective)", ylabel="instances (count)")
        negative = len(groups["below it: negative"])
        share = f"{negative} of {len(known)} gaps are negative"
        least = f", the lowest {short(float(known.min()))}" if negative else ""
        caption = f"Gap of every instance to its reference; {share}{least}"
        caption += _nonfinite(gap, "instances without a reference")
        return finish(figure, caption + ".", f"Histogram on a log axis of the gaps; {share}.", hints)


def draw_violations(violation: np.ndarray, tol: float | None) -> Picture:
    """Histogram of the largest violation (N,) of every instance on a log axis, with the tolerance marked."""
    known = violation[np.isfinite(violation)]
    limit = np.inf if tol is None else tol
    groups = {"within": known[known <= limit], "above": known[known > limit]}
    with _axes() as (figure, axes):
        hints = _draw_log_histogram(axes, groups, mark=tol)
        axes.set(xlabel="largest violation of an instance (units of the constraints)", ylabel="instances (count)")
        share = f"{len(groups['within'])} of {len(violation)} are within the tolerance {tol:g}" if tol else ""
        caption = "Largest violation of every instance" + (f"; {share}, the dashed line" if share else "")
        caption += _nonfinite(violation, "violations that are not finite")
        alt = "Histogram on a log axis of the largest violation of every instance"
        return finish(figure, f"{caption}.", f"{alt}{'; ' if share else ''}{share}.", hints)


def draw_steps(steps: np.ndarray) -> Picture:
    """Histogram of the steps (N,) that the repair took."""
    known = steps[np.isfinite(steps)].astype(int)
    first, last = (int(known.min()), int(known.max())) if len(known) else (0, 0)
    width = -(-(last - first + 1) // 40)  # one bar for every number of steps, until there are too many of them
    edges = np.arange(first, last + width + 1, width) - 0.5
    with _axes() as (figure, axes):
        counts = np.histogram(known, edges)[0]
        axes.stairs(counts, edges, fill=True, color=BLUE)
        axes.set(xlabel="steps of the repair (count)", ylabel="instances (count)", xlim=(first - 2, last + width + 1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        caption = f"Steps of the repair on every instance, from {first} to {last}."
        hints = [
            Hint(axes, (a, 0), f"{_range(math.ceil(a), math.floor(b))} steps: {_count(count)}", (b, count))
            for a, b, count in zip(edges, edges[1:], counts, strict=False)
            if count
        ]
        return finish(figure, caption, f"Histogram of the steps, from {first} to {last}.", hints)


def draw_trajectories(
    trajectory: np.ndarray,
    obstacles: np.ndarray | None = None,
    most: int = 100,
    goal: tuple[float, float] = (0.0, 0.0),
) -> Picture:
    """Paths in the plane of vehicles that drive to a goal.

    Args:
        trajectory: (N, K, 2 or more) states whose first two entries are the position.
        obstacles: (M, 4) ellipses: centre (cx, cy) and radii (rx, ry).
        most: at most so many paths are drawn, evenly chosen.
        goal: where they drive.
    """
    chosen = np.linspace(0, len(trajectory) - 1, min(most, len(trajectory))).round().astype(int)
    drawn = trajectory[chosen]
    with _axes(height=4.0) as (figure, axes):
        from matplotlib.patches import Ellipse

        for index, (cx, cy, rx, ry) in enumerate([] if obstacles is None else obstacles):
            label = "obstacle" if index == 0 else None
            axes.add_patch(Ellipse((cx, cy), 2 * rx, 2 * ry, facecolor="0.85", edgecolor="0.45", label=label))
        for path in drawn:
            axes.plot(path[:, 0], path[:, 1], color=BLUE, linewidth=0.7, alpha=0.6)
        axes.plot(drawn[:, 0, 0], drawn[:, 0, 1], "o", color=ORANGE, markersize=2.5, label="start")
        axes.plot(drawn[:, -1, 0], drawn[:, -1, 1], "o", color=GREEN, markersize=2.5, label="end")
        axes.plot(*goal, "x", color="0.2", markersize=6, label="goal")
        axes.set(xlabel="position $p_x$ (units of length)", ylabel="position $p_y$ (units of length)", aspect="equal")
        axes.margins(0.05)
        _legend(axes)
        among = f" among {len(obstacles)} obstacles" if obstacles is not None else ""
        caption = f"Trajectories of {len(drawn)} of {len(trajectory)} instances{among}."
        away = np.linalg.norm(drawn[:, -1, :2] - np.asarray(goal), axis=1)
        hints = [
            Hint(axes, tuple(path[k, :2]), f"instance {i}: ends {short(float(far))} from the goal")
            for i, path, far in zip(chosen, drawn, away, strict=True)
            for k in (0, -1)
        ]
        return finish(figure, caption, f"Map of the paths from their starts towards the goal{among}.", hints)


@contextmanager
def canvas(size: tuple[float, float]) -> Iterator[Any]:
    """A figure outside pyplot, which keeps no list of it, of so many inches, in our style."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"axes.prop_cycle": matplotlib.cycler(color=[BLUE, ORANGE, GREEN])}):
        yield Figure(figsize=size, layout="constrained")


@contextmanager
def _axes(rows: int = 1, height: float = 3.0) -> Iterator[tuple[Any, Any]]:
    """A figure with `rows` axes, small enough to be read on a phone."""
    with canvas((4.8, height)) as figure:
        yield figure, figure.subplots(rows)


def to_svg(figure: Any) -> str:
    """The figure as SVG; text as shapes and without a date, so that it is the same everywhere and every time."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()


def finish(figure: Any, caption: str, alt: str, hints: Iterable[Hint]) -> Picture:
    """The figure drawn, with values to hover over."""
    return Picture(to_svg(figure), caption, alt, place(figure, hints))


def _series(metrics: list[dict[str, Any]], *keys: str) -> np.ndarray:
    """One number of every epoch, NaN where it was not measured."""
    found = (pick(line, *keys) for line in metrics)
    return np.array([np.nan if value is None else float(value) for value in found])


def _draw_curves(axes: Any, epochs: np.ndarray, curves: dict[str, np.ndarray], zero: str | None = None) -> list[Hint]:
    """Lines over the epochs; with `zero`, on a log axis where values up to 0 have a place with this label."""
    lowest = None if zero is None else log_axis(axes, "y", np.concatenate(list(curves.values())), zero)
    hints = []
    for label, values in curves.items():
        known = np.isfinite(values)  # joins what was measured every few epochs
        x, said = epochs[known], values[known]
        y = said if lowest is None else np.where(said <= 0, lowest, said)
        axes.plot(x, y, "." if len(x) == 1 else "-", label=label)
        points = thin(list(zip(x, y, said, strict=True)))
        hints += [Hint(axes, (at, height), f"epoch {at:g}: {label} {short(value)}") for at, height, value in points]
    if not hints:
        _say_empty(axes)
    axes.set_xlim(0, 1.02 * epochs.max() + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(curves) > 1:
        _legend(axes)
    return hints


def _draw_log_histogram(axes: Any, groups: dict[str, np.ndarray], mark: float | None = None) -> list[Hint]:
    """Stacked histogram of numbers ≥ 0 on a log axis, with a place for zero, and a dashed line at `mark`."""
    everything = np.concatenate([*groups.values(), [mark] if mark else []])
    place = log_axis(axes, "x", everything, "0")
    low, high = _decades(everything)
    edges = np.logspace(low, high, (high - low) * max(1, 30 // (high - low)) + 1)
    half = (edges[1] / edges[0]) ** 0.5  # the bar of zero is as wide as the others
    starts, widths = np.append(edges[:-1], place / half), np.append(np.diff(edges), place * (half - 1 / half))
    names = [f"{short(low)} to {short(high)}" for low, high in pairwise(edges)] + ["0"]
    bottom, hints = np.zeros(len(starts)), []
    for (label, values), color in zip(groups.items(), (BLUE, ORANGE), strict=True):
        counts = np.histogram(values[values > 0].clip(edges[0], edges[-1]), edges)[0]
        counts = np.append(counts, (values == 0).sum())
        some = counts > 0
        if some.any():
            ink = {"color": color, "edgecolor": color, "linewidth": 1}  # the edge shows even a single instance
            title = f"{label} ({len(values)})"
            axes.bar(starts[some], counts[some], widths[some], bottom[some], align="edge", label=title, **ink)
        ends, top = starts + widths, bottom + counts
        hints += [
            Hint(axes, (starts[k], bottom[k]), f"{names[k]}: {_count(counts[k])}, {label}", (ends[k], top[k]))
            for k in np.flatnonzero(some)
        ]
        bottom = top
    axes.set_ylim(0, 1.05 * max(1, bottom.max()))
    if mark:
        axes.axvline(mark, color="0.2", linestyle="--", linewidth=1, label=f"tolerance {mark:g}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    if not bottom.any():
        _say_empty(axes)
    if axes.get_legend_handles_labels()[0]:
        _legend(axes)
    return hints


def _decades(values: np.ndarray) -> tuple[int, int]:
    """Exponents of the powers of ten around the positive values."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive):
        return -16, -15  # below what float64 can tell from zero
    # Diverged numbers go to the edge of an axis that float64 can still hold.
    low, high = np.log10([positive.min(), positive.max()]).clip(-150, 149)
    return math.floor(low), max(math.ceil(high), math.floor(low) + 1)


def log_axis(axes: Any, which: str, values: np.ndarray, zero: str, most: int = 6) -> float:
    """Make the axis `which` logarithmic, with whole decades around the values; where on it values up to zero go.

    It gets at most `most` labels, and one more.
    """
    low, high = _decades(values)
    stride = -(-(high - low) // most)
    place = 10.0 ** (low - stride)
    ticks = {10.0**power: f"$10^{{{power}}}$" for power in range(high, low - 1, -stride)}
    margin = 10.0 ** (0.04 * (high - low))
    first = 10.0**low
    if (values <= 0).any():
        ticks[place] = zero
        first = place * 10.0 ** (-0.5 * stride)
    axes.set(**{f"{which}scale": "log", f"{which}lim": (first / margin, 10.0**high * margin)})
    axes.set(**{f"{which}ticks": list(ticks), f"{which}ticklabels": list(ticks.values())})
    axes.minorticks_off()
    return place


def _cut_peaks(axes: Any, values: np.ndarray) -> int:
    """Lower the frame if a few large values, as those of the first epochs, would flatten the rest; how many it cuts."""
    values = values[np.isfinite(values)]
    if not len(values):
        return 0
    low, high = values.min(), np.quantile(values, 0.95)
    top = high + 0.25 * (high - low)
    if values.max() <= high + 2 * (high - low):
        return 0
    axes.set_ylim(low - 0.05 * (top - low), top)
    return int((values > top).sum())


def _say_empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center")


def _legend(axes: Any) -> None:
    """Above the axes and to the right, where it hides nothing, not even the power of ten of an axis."""
    columns = len(axes.get_legend_handles_labels()[0])
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=1,
    )


def _last(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return short(float(known[-1])) if len(known) else "not finite"


def _count(instances: int) -> str:
    return f"{instances} instance{'' if instances == 1 else 's'}"


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first} to {last}"


def _nonfinite(values: np.ndarray, what: str) -> str:
    count = int((~np.isfinite(values)).sum())
    return f"; {what}: {count}" if count else ""
