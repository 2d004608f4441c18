"""Figures of results, as data first: a specification that JSON can hold, and `draw`, which makes a picture of it.

So a figure can be drawn again, elsewhere and later, from the file of an item's results. There are four kinds: `panels`
(a quantity of many rows), `curves`, `points` with names, and `paths` in the plane.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from snarenet.report.figures import BLUE, GREEN, ORANGE, Picture, canvas, log_axis, to_svg
from snarenet_lab.report.results import Sheet

Spec = dict[str, Any]

GREY, PURPLE = "0.35", "#7b3294"
_INK = {"paper": GREY, "parity": BLUE, "best": ORANGE, "solver": GREEN, "measured": GREEN}
_MARK = {"paper": "D", "parity": "o", "best": "s", "solver": "^", "measured": "o"}
_SHIFT = {"paper": -0.24, "parity": 0.0, "best": 0.24, "solver": 0.0, "measured": 0.0}
_FAR = 6  # decades: a mark so far beyond most others is put at the edge, with an arrow
_CYCLE = (BLUE, ORANGE, GREEN, PURPLE, "#b8860b", "#008b8b", "0.35", "#c71585")
_WIDTH = 4.8  # inches; readable on a phone


def axis(label: str, log: bool = False) -> Spec:
    """An axis, its label with the unit."""
    return {"label": label, "log": log}


def panels(name: str, caption: str, sheet: Sheet, keys: Sequence[str]) -> Spec:
    """A panel for each of some columns of a sheet, with a line for each label, and a mark for each source."""
    labels = list(dict.fromkeys(row.label for row in sheet.rows))
    found = []
    for column in sheet.columns:
        if column.key not in keys:
            continue
        marks = [
            {"row": labels.index(row.label), "source": row.source, "mean": cell.mean, "spread": cell.spread}
            for row in sheet.rows
            if (cell := row.cell(column)).mean is not None
        ]
        if marks:
            unit = " (s)" if column.style == "seconds" else f" ({column.unit})" if column.unit else ""
            log = column.style in ("short", "seconds")
            share = column.style == "percent"
            found.append({"label": column.label + unit, "log": log, "share": share, "marks": marks})
    return {"kind": "panels", "name": name, "caption": caption, "rows": labels, "panels": found}


_LINES: dict[str, dict[str, Any]] = {
    "solid": {"linestyle": "-", "marker": "o"},
    "dashed": {"linestyle": "--", "marker": "D", "markerfacecolor": "white"},
    "bold": {"linestyle": "-", "marker": "s", "linewidth": 2.2},
}
LINE_OF = {"paper": "dashed", "parity": "solid", "best": "bold", "solver": "solid", "measured": "solid"}


def curve(label: str, x: Sequence[float], y: Sequence[float], style: str = "solid", color: int | None = None) -> Spec:
    """A line of `curves`.

    Args:
        label: its name.
        x: of its points.
        y: of its points.
        style: "solid", "dashed" or "bold"; `LINE_OF` a source.
        color: counts through the palette; one line after another unless given.
    """
    return {"label": label, "x": list(x), "y": list(y), "style": style, "color": color}


def curves(name: str, caption: str, x: Spec, y: Spec, series: Sequence[Spec], marked: bool = False) -> Spec:
    """Lines, with marks at their points if `marked`."""
    return {
        "kind": "curves", "name": name, "caption": caption, "x": x, "y": y, "series": list(series), "marked": marked
    }  # fmt: skip


def points(name: str, caption: str, x: Spec, y: Spec, series: Sequence[Spec], levels: Mapping[str, float]) -> Spec:
    """Named points, and levels to compare them with.

    Args:
        name: of the figure.
        caption: a sentence.
        x: the horizontal axis.
        y: the vertical axis.
        series: each with "label", "x", "y", "names".
        levels: horizontal lines, by their labels.
    """
    levels = dict(levels)
    return {
        "kind": "points",
        "name": name,
        "caption": caption,
        "x": x,
        "y": y,
        "series": list(series),
        "levels": levels,
    }


def paths(name: str, caption: str, series: Sequence[Spec], obstacles: Sequence[Sequence[float]]) -> Spec:
    """Paths in the plane, each series with "label" and "paths" (N, K, 2), among ellipses (cx, cy, rx, ry)."""
    return {"kind": "paths", "name": name, "caption": caption, "series": list(series), "obstacles": list(obstacles)}


def draw(spec: Mapping[str, Any]) -> str:
    """The figure as SVG; panels side by side."""
    if spec["kind"] == "panels":
        return _draw_panels(spec, spec["panels"], min(3, len(spec["panels"])))
    return {"curves": _draw_curves, "points": _draw_points, "paths": _draw_paths}[spec["kind"]](spec)


def pictures(spec: Mapping[str, Any]) -> list[Picture]:
    """The figure for a page: every panel is a picture of its own, as wide as a phone."""
    if spec["kind"] != "panels":
        return [Picture(draw(spec), spec["caption"] + ".", spec["caption"] + ".")]
    found = []
    for panel in spec["panels"]:
        arrows = any(mark["mean"] > _far(panel) for mark in panel["marks"])
        caption = f"{_capital(panel['label'])}; mean and standard deviation over the seeds"
        caption += "; an arrow is a number far beyond the frame." if arrows else "."
        found.append(Picture(_draw_panels(spec, [panel], 1), caption, f"{spec['caption']}: {panel['label']}."))
    return found


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _draw_panels(spec: Mapping[str, Any], shown: Sequence[Spec], columns: int) -> str:
    rows = spec["rows"]
    if not shown:
        with canvas((_WIDTH, 1.0)) as figure:
            figure.text(0.5, 0.5, "no numbers yet", ha="center")
            return to_svg(figure)
    lines = -(-len(shown) // columns)
    size = (_WIDTH if columns == 1 else 3.0 * columns + 1.5, lines * (0.26 * len(rows) + 0.9) + 0.4)
    with canvas(size) as figure:
        grid = figure.subplots(lines, columns, sharey=True, squeeze=False).ravel()
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid, shown, strict=False):
            _draw_panel(axes, panel)
        grid[0].set_yticks(range(len(rows)), rows)
        grid[0].set_ylim(len(rows) - 0.4, -0.6)
        sources = dict.fromkeys(mark["source"] for panel in shown for mark in panel["marks"])
        handles = [
            grid[0].plot([], [], _MARK[source], color=_INK[source], mfc="none" if source == "paper" else None)[0]
            for source in sources
        ]
        figure.legend(handles, [_NAMES[source] for source in sources], loc="outside upper center", ncols=len(sources))
        return to_svg(figure)


_NAMES = {
    "paper": "the paper",
    "parity": "ours, parity",
    "best": "ours, best",
    "solver": "solver",
    "measured": "measured",
}


def _far(panel: Spec) -> float:
    """From where on a number is put at the edge of a panel."""
    known = [mark["mean"] for mark in panel["marks"]]
    positive = [math.log10(value) for value in known if value > 0 and math.isfinite(value)]
    return 10.0 ** (float(np.quantile(positive, 0.75)) + _FAR) if panel["log"] and positive else math.inf


def _draw_panel(axes: Any, panel: Spec) -> None:
    marks = [mark for mark in panel["marks"] if mark["mean"] is not None and math.isfinite(mark["mean"])]
    known = np.array([mark["mean"] for mark in marks])
    far = _far(panel)
    place = log_axis(axes, "x", np.minimum(known, far), "≤ 0", most=5) if panel["log"] and len(known) else -math.inf
    for mark in marks:
        value, spread, source = max(mark["mean"], place), mark["spread"] or 0.0, mark["source"]
        ink = {"color": _INK[source], "markersize": 4, "capsize": 1.5, "linewidth": 0.9, "zorder": 3}
        ink |= {"markerfacecolor": "white"} if source == "paper" else {}
        height = mark["row"] + _SHIFT[source]
        if value > far:
            axes.plot(
                far, height, ">", clip_on=False, **{name: ink[name] for name in ("color", "markersize", "zorder")}
            )
            continue
        low = min(spread, 0.9 * value) if panel["log"] else spread  # a bar to zero has no end on a log axis
        high = min(spread, max(far - value, 0.0))
        axes.errorbar(value, height, xerr=[[low], [high]], fmt=_MARK[source], **ink)
    if panel["share"]:
        axes.set(xlim=(-0.05, 1.05), xticks=[0, 0.5, 1], xticklabels=["0", "50%", "100%"])
    elif not panel["log"]:
        axes.locator_params(axis="x", nbins=5)
    axes.set_xlabel(panel["label"], fontsize=8.5)
    axes.tick_params(labelsize=8)


def _scale(axes: Any, which: str, spec: Spec, values: Sequence[float]) -> float:
    """Set an axis up; where on it numbers up to zero go."""
    axes.set(**{f"{which}label": spec["label"]})
    known = np.array([value for value in values if value is not None and math.isfinite(value)], dtype=float)
    return log_axis(axes, which, known, "≤ 0") if spec["log"] and len(known) else -math.inf


def _finite(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array([x, y], dtype=float)
    return tuple(both[:, np.isfinite(both).all(0)])  # pyright: ignore[reportReturnType]


def _draw_curves(spec: Mapping[str, Any]) -> str:
    series = spec["series"]
    with canvas((_WIDTH, 3.4 + 0.16 * len(series))) as figure:
        axes = figure.subplots()
        floor_x = _scale(axes, "x", spec["x"], [v for line in series for v in line["x"]])
        floor_y = _scale(axes, "y", spec["y"], [v for line in series for v in line["y"]])
        for index, line in enumerate(series):
            x, y = _finite(line["x"], line["y"])
            color = _CYCLE[(index if line["color"] is None else line["color"]) % len(_CYCLE)]
            ink = {"color": color, "markersize": 4, **_LINES[line["style"]]} | (
                {} if spec["marked"] else {"marker": None}
            )
            axes.plot(np.maximum(x, floor_x), np.maximum(y, floor_y), label=line["label"], **ink)
        if not spec["x"]["log"] and axes.xaxis.get_major_locator().__class__.__name__ == "AutoLocator":
            axes.locator_params(axis="x", nbins=6)
        _legend(figure, axes)
        return to_svg(figure)


def _draw_points(spec: Mapping[str, Any]) -> str:
    with canvas((_WIDTH, 4.2)) as figure:
        axes = figure.subplots()
        _scale(axes, "x", spec["x"], [v for one in spec["series"] for v in one["x"]])
        _scale(axes, "y", spec["y"], [v for one in spec["series"] for v in one["y"]] + list(spec["levels"].values()))
        for index, one in enumerate(spec["series"]):
            axes.plot(one["x"], one["y"], "os^D"[index % 4], color=_CYCLE[index], markersize=5, label=one["label"])
        for label, level in spec["levels"].items():
            axes.axhline(level, color=GREY, linestyle=":", linewidth=1, label=label)
        _legend(figure, axes)
        figure.draw_without_rendering()  # the layout decides where points are
        _name_points(axes, spec["series"])
        return to_svg(figure)


def _name_points(axes: Any, series: Sequence[Spec]) -> None:
    """Write the names beside their points, where they hide neither points nor each other."""
    dots = [(*axes.transData.transform((x, y)), index, name)
            for index, one in enumerate(series)
            for x, y, name in zip(one["x"], one["y"], one["names"], strict=True)]  # fmt: skip
    frame, size = axes.bbox, 7.0
    scale = axes.figure.dpi / 72
    taken = [(x - 3 * scale, y - 3 * scale, x + 3 * scale, y + 3 * scale) for x, y, *_ in dots]
    for x, y, index, name in dots:
        wide, tall = 0.62 * size * len(name) * scale, 1.15 * size * scale
        choices = [
            (x + dx * gap * scale - (wide if dx < 0 else wide / 2 if dx == 0 else 0), y + dy * gap * scale - tall / 2)
            for gap in (7, 12, 19, 28)
            for dx, dy in ((1, 0), (0, 1), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
        ]
        boxes = [(left, low, left + wide, low + tall) for left, low in choices]
        inside = [b for b in boxes if b[0] > frame.x0 and b[1] > frame.y0 and b[2] < frame.x1 and b[3] < frame.y1]
        box = min(inside or boxes, key=lambda b: sum(_overlap(b, other) for other in taken))  # the first of the best
        taken.append(box)
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        spot = axes.transData.inverted().transform(middle)
        far = max(box[0] - x, x - box[2], box[1] - y, y - box[3]) > 9 * scale
        line = {"arrowstyle": "-", "color": _CYCLE[index], "linewidth": 0.5} if far else None
        ink = {"va": "center", "ha": "center", "fontsize": size, "color": _CYCLE[index]}
        point = axes.transData.inverted().transform((x, y))
        axes.annotate(name, point, spot, arrowprops=line, **ink)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """The area that two boxes (left, bottom, right, top) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _draw_paths(spec: Mapping[str, Any]) -> str:
    with canvas((_WIDTH, 4.4)) as figure:
        from matplotlib.patches import Ellipse

        axes = figure.subplots()
        for index, (cx, cy, rx, ry) in enumerate(spec["obstacles"]):
            label = "obstacle" if index == 0 else None
            axes.add_patch(Ellipse((cx, cy), 2 * rx, 2 * ry, facecolor="0.88", edgecolor="0.45", label=label))
        for index, one in enumerate(spec["series"]):
            for k, path in enumerate(one["paths"]):
                x, y = np.array(path).T
                color = GREY if one.get("plain") else _CYCLE[index % len(_CYCLE)]
                ink = {"color": color, "linewidth": 0.9, "alpha": 0.8, "linestyle": ":" if one.get("plain") else "-"}
                axes.plot(x, y, label=one["label"] if k == 0 else None, **ink)
        starts = np.array([path[0] for one in spec["series"] for path in one["paths"]])
        if len(starts):
            axes.plot(*starts.T, "o", color="0.2", markersize=2, label="start")
        axes.plot(0, 0, "x", color="0.2", markersize=6, label="goal")
        axes.set(xlabel="position $p_x$ (units of length)", ylabel="position $p_y$ (units of length)", aspect="equal")
        axes.margins(0.05)
        _legend(figure, axes)
        return to_svg(figure)


def _legend(figure: Any, axes: Any) -> None:
    """Above the axes, in as many columns as fit."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, min(len(labels), 62 // (max(map(len, labels)) + 8)))
        figure.legend(loc="outside upper center", ncols=columns, fontsize=8, handlelength=2.6, columnspacing=1)
