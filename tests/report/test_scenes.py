"""Pictures of grids and plans: what is in them, and that they are the same every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from snarenet.problems import ACOPF, MPC
from snarenet.report import scenes

pytest.importorskip("matplotlib")
TRIANGLE = str(Path(__file__).parents[1] / "problems" / "triangle.m")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, as matplotlib has them."""
    kept: list[Any] = []
    draw = scenes.to_svg
    monkeypatch.setattr(scenes, "to_svg", lambda figure: (kept.append(figure), draw(figure))[1])
    return kept


def test_broken_limits_are_red(figures: list[Any]) -> None:
    problem = ACOPF(TRIANGLE, instances=1)
    good, bad = problem.flat, problem.flat.clone()
    bad[1], bad[4] = 1.0, 1.2  # an angle that overloads the branches at bus 2, and its voltage
    picture = scenes.draw_grid(problem, {"before": bad, "after": good}, problem.inputs[0])
    before, after, *_ = figures[0].axes
    red = "#b2182b"
    assert [line.get_color() == red for line in before.lines] == [True, False, False]  # the third has no rating
    assert not any(line.get_color() == red for line in after.lines)
    (buses,) = before.collections
    assert buses.get_array().tolist() == pytest.approx([1.0, 1.2, 1.0])
    edges = buses.get_edgecolors()
    assert edges[1].tolist() != edges[0].tolist() == edges[2].tolist()
    assert "imbalance" in picture.caption
    assert picture.svg == scenes.draw_grid(problem, {"before": bad, "after": good}, problem.inputs[0]).svg


def test_the_layout_keeps_buses_apart() -> None:
    problem = ACOPF("30_ieee", instances=1)
    place = scenes.layout(problem)
    distance = np.linalg.norm(place[:, None] - place[None], axis=2)[np.triu_indices(30, 1)]
    along = np.linalg.norm(place[problem.grid.ends[0]] - place[problem.grid.ends[1]], axis=1)
    assert distance.min() > 0.05
    assert along.mean() < 0.5 * distance.mean()


def test_plans_have_a_colour_each(figures: list[Any]) -> None:
    problem = MPC(5, instances=4)
    paths = torch.rand(4, 6, 3)
    picture = scenes.draw_plans(problem, {"ours": paths, "theirs": paths + 1}, most=3)
    lines = figures[0].axes[0].lines
    assert len(lines) == 2 * 3 + 2  # and starts and goal
    assert len({line.get_color() for line in lines[:6]}) == 2
    np.testing.assert_allclose(lines[3].get_xydata(), (paths[0, :, :2] + 1).numpy())
    assert lines[-1].get_xydata().tolist() == [[3.5, 0.0]]
    assert picture.caption == "3 starts; ways of ours and theirs."
