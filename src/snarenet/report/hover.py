"""Values to hover over: marks above a picture, which cannot be seen, each with its text.

A `Hint` says in data coordinates where a value was drawn. Once the figure is laid out, `place` turns hints into marks,
in shares of the picture, and `overlay` writes those as SVG to lie on top of it. Browsers show the titles by themselves;
`page.js` shows the one nearest to the pointer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

_MOST = 150  # marks for a curve; what they leave out lies between two of them


class Hint(NamedTuple):
    """A value that was drawn.

    Attributes:
        axes: where.
        start: a point (x, y), in the coordinates of the data.
        text: what to say of it.
        end: the corner opposite to `start`, of a bar.
        pick: which instance of a page a click picks, if one does.
    """

    axes: Any
    start: tuple[float, float]
    text: str
    end: tuple[float, float] | None = None
    pick: int | None = None


class Mark(NamedTuple):
    """A point or, with a width or height, a rectangle: numbers from 0 to 1, from the left and from the top."""

    left: float
    top: float
    width: float
    height: float
    text: str
    pick: int | None = None


def thin(points: Sequence[Any]) -> list[Any]:
    """At most so many of the points of a curve as are worth a mark, evenly chosen, both ends included."""
    if len(points) <= _MOST:
        return list(points)
    return [points[i] for i in np.linspace(0, len(points) - 1, _MOST).round().astype(int)]


def place(figure: Any, hints: Iterable[Hint]) -> tuple[Mark, ...]:
    """Where hints lie on a figure that was drawn; those outside the frame of their axes are left out."""
    marks = []
    for axes, start, text, end, pick in hints:
        ends = axes.transData.transform([start, start if end is None else end]) / figure.bbox.size
        (left, right), (low, high) = np.sort(ends.T)
        frame = axes.get_position()
        across, up = np.clip([left, right], frame.x0, frame.x1), np.clip([low, high], frame.y0, frame.y1)
        if end is None and not np.allclose([across[0], up[0]], [left, low], atol=1e-3):
            continue
        marks.append(Mark(across[0], 1 - up[1], across[1] - across[0], up[1] - up[0], text, pick))
    return tuple(marks)


def overlay(marks: Iterable[Mark]) -> str:
    """The marks as SVG as large as what it lies on."""
    return f'<svg class="marks">{"".join(map(_shape, marks))}</svg>'


def _shape(mark: Mark) -> str:
    left, top, width, height = (f"{100 * share:.2f}%" for share in mark[:4])
    pick = "" if mark.pick is None else f' data-pick="{mark.pick}"'
    title = f"<title>{escape(mark.text)}</title>"
    if mark.width or mark.height:
        return f'<rect x="{left}" y="{top}" width="{width}" height="{height}"{pick}>{title}</rect>'
    return f'<circle cx="{left}" cy="{top}" r="5"{pick}>{title}</circle>'
