"""The benches of portfolios and forecasts, on small sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import snarenet as sn
from snarenet.layers import METHODS
from snarenet_lab.bench import forecast, portfolio
from snarenet_lab.experiments.compare import Plan

CPU = torch.device("cpu")


def test_portfolios_are_as_good_as_clarabel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = portfolio.measure(CPU, tmp_path, assets=(8,), instances=120, batch=10, epochs=1)
    assert list(found.columns) == list(portfolio.COLUMNS)
    rows = {row[1]: row for row in found.rows}
    assert list(rows) == ["Clarabel, one core", "projection", "projection, on weights", "network"]
    assert all(abs(rows[name][2]) < 1e-4 for name in ("projection", "projection, on weights"))  # percent
    assert rows["network"][2] > 0
    assert all(row[4] <= 1e-8 and row[5] > 0 for row in rows.values())
    monkeypatch.setattr(portfolio, "solve", lambda *_, **__: pytest.fail("Clarabel is asked again"))
    again = portfolio.measure(CPU, tmp_path, assets=(8,), instances=120, batch=10)
    assert again.rows[0] == found.rows[0]
    assert again.rows[1][2:5] == pytest.approx(found.rows[1][2:5], abs=1e-10)


def test_forecasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method but the first adds up, ours keeps to what is known, and what was found is not measured again."""
    monkeypatch.setattr(forecast, "_SAMPLES", 3)
    found = forecast.measure(CPU, tmp_path, levels="2x2", known=(0.2,), epochs=1, seeds=1)
    rows = {row[1]: row for row in found.rows}
    assert set(forecast._METHODS) - set(rows) <= {"MinT, shrunk, non-negative"}
    for method, row in rows.items():
        ours = method.startswith("SnareNet")
        assert (row[3] < 1e-12) == ours, method  # the error of known series
        assert (row[4] <= 1e-7) == ours, method
        assert 0 < row[2] < 10
    monkeypatch.setattr(forecast, "run", lambda *_: pytest.fail("measured again"))
    assert forecast.measure(CPU, tmp_path, levels="2x2", known=(0.2,), epochs=1, seeds=1).rows == found.rows


def test_mint_adds_up() -> None:
    """And leaves forecasts that add up as they are."""
    pytest.importorskip("hierarchicalforecast")
    problem = sn.problems.Forecast(levels=(2, 2), history=3, period=12)
    draw = torch.Generator().manual_seed(0)
    target = 10 + problem.target(problem.inputs[:60])
    forecasts = target + torch.randn(target.shape, generator=draw, dtype=torch.float64)
    reconcile = forecast.mint(problem, forecasts, target)
    y = reconcile(forecasts, None)
    assert np.abs(problem.hierarchy.coherence @ y.numpy().T).max() < 1e-6
    torch.testing.assert_close(reconcile(y, None), y, rtol=0, atol=1e-4)


def test_who_can_be_compared() -> None:
    """Methods for linear rows take forecasts, those for any set portfolios as well; the others say why not."""
    every = tuple(method for method in METHODS if method != "optnet")  # whose package may be missing
    sizes = {"forecast": {"levels": (2, 2), "history": 3, "period": 12}, "portfolio": {"assets": 6, "instances": 60}}
    found = {}
    for name, chosen in sizes.items():
        jobs, refused = Plan(name, chosen, every).jobs(sn.problems.load(name, **chosen))
        found[name] = set(jobs)
        assert set(refused) == set(every) - found[name]
    assert found["portfolio"] == {"snare", "soft", "dc3", "hardnet++", "hproj", "fsnet"}
    assert found["forecast"] == found["portfolio"] | {"pinet"}
