"""Values to hover over lie where they were drawn, and say what was drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from snarenet.report import figures
from snarenet.report.hover import Hint, Mark, overlay, place, thin

pytest.importorskip("matplotlib")


@pytest.fixture
def axes() -> Any:
    """x from 0 to 10 and y from 0 to 4 over the middle of a figure."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(4, 2)).add_axes((0.25, 0.25, 0.5, 0.5))
    made.set(xlim=(0, 10), ylim=(0, 4))
    return made


def test_places(axes: Any) -> None:
    hints = [Hint(axes, (5, 3), "point"), Hint(axes, (0, 0), "bar", (10, 2)), Hint(axes, (5, 9), "outside")]
    point, bar = place(axes.figure, hints)
    assert point[:4] == pytest.approx((0.5, 0.375, 0, 0))
    assert bar[:4] == pytest.approx((0.25, 0.5, 0.5, 0.25))
    assert (point.text, bar.text) == ("point", "bar")


def test_marks_lie_on_the_line() -> None:
    """In the SVG, after the layout that only drawing makes."""
    picture = figures.draw_loss([{"epoch": k, "loss": value} for k, value in ((1, 5.0), (4, 2.0), (9, 3.0))])
    [path] = re.findall(r'<path d="(M [^"]*)"[^>]*stroke: #3b6ea8', picture.svg.replace("\n", " "))[:1]
    drawn = np.array(re.findall(r"[\d.]+", path), dtype=float).reshape(-1, 2)
    width, height = (float(size) for size in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.svg)[0])
    placed = [(mark.left * width, mark.top * height) for mark in picture.marks]
    np.testing.assert_allclose(placed, drawn, atol=0.05)
    assert [mark.text for mark in picture.marks] == [
        f"epoch {k}: loss {value}" for k, value in ((1, "5.00"), (4, "2.00"), (9, "3.00"))
    ]


def test_zero_is_said_where_it_has_a_place() -> None:
    picture = figures.draw_violation_curve([{"epoch": 1, "violation": 0.0}, {"epoch": 2, "violation": 1e-3}])
    assert [mark.text for mark in picture.marks] == ["epoch 1: training 0", "epoch 2: training 1.00e-3"]


def test_bars() -> None:
    gaps = figures.draw_gaps(np.array([1.5e-3, 1.5e-3, 0.0, -1.5e-3]))
    texts = [mark.text for mark in gaps.marks]
    assert [text.split(": ", 1)[1] for text in texts] == [
        "2 instances, at or above the reference",
        "1 instance, at or above the reference",
        "1 instance, below it: negative",
    ]
    low, high = map(float, texts[0].split(":")[0].split(" to "))
    assert low <= 1.5e-3 <= high
    assert texts[1].startswith("0: ")
    above, _, below = gaps.marks
    assert above.height == pytest.approx(2 * below.height)
    assert above.top == pytest.approx(below.top + below.height)  # stacked
    steps = figures.draw_steps(np.array([3, 3, 5]))
    assert [mark.text for mark in steps.marks] == ["3 steps: 2 instances", "5 steps: 1 instance"]


def test_long_curves_are_thinned() -> None:
    assert thin(range(10)) == list(range(10))
    some = thin(range(5000))
    assert len(some) == 150
    assert (some[0], some[-1]) == (0, 4999)


def test_overlay() -> None:
    root = ET.fromstring(overlay([Mark(0.5, 0.25, 0, 0, "a < b", 7), Mark(0, 0, 0.1, 0.2, "bar")]))
    point, bar = root
    assert (point.tag, point.get("cx"), point.get("cy"), point.get("data-pick")) == ("circle", "50.00%", "25.00%", "7")
    assert point.findtext("title") == "a < b"
    assert (bar.tag, bar.get("width"), bar.get("height"), bar.get("data-pick")) == ("rect", "10.00%", "20.00%", None)
