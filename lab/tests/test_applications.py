"""Tables and figures of applications, from runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snarenet as sn
from snarenet.training import Run
from snarenet_lab.report import applications

pytest.importorskip("matplotlib")


def run(folder: Path, name: str, seed: int, gap: list[float], polish: Any = "rescued", **sizes: Any) -> Run:
    """An untrained run with an evaluation."""
    problem = sn.problems.load(name, **sizes)
    config = sn.TrainConfig(epochs=1, width=8, seed=seed, polish=polish)
    made = Run.create(folder / f"{name}{seed}", config, problem)
    objective = np.full(len(gap), 100.0) + gap
    summary = {"instances": len(gap), "infeasible": 2, "violation": 1e-9 * (1 + seed), "feasible": {"1e-08": 1.0}}
    made.save_evaluation(summary | {"seconds": {"model": 1e-4}}, {"gap": np.array(gap), "objective": objective})
    return Run.open(made.path)


def test_rows_are_means_over_seeds(tmp_path: Path) -> None:
    sizes = {"horizon": 4, "instances": 30}
    runs = [run(tmp_path, "mpc", seed, gap, **sizes) for seed, gap in enumerate(([1.0, 3.0], [2.0, 8.0]))]
    (row,) = applications.rows(runs)
    assert (row["mean gap"], row["largest gap"]) == ("3.5 %", "8 %")
    assert row["violation"] == "2.00e-9"
    assert row["what"] == "4 steps; 2 seeds, 1 epochs of batches of 200"
    assert row["feasible"] == "100% of 2; 2 without a feasible point"
    assert row["time of an instance"] == "100 µs"


def test_settings_have_rows_of_their_own(tmp_path: Path) -> None:
    runs = [run(tmp_path, "acopf", k, [1.0], case=case, instances=30) for k, case in enumerate(("14_ieee", "30_ieee"))]
    found = [row["what"] for row in applications.rows(runs)]
    training = "all limits, uniform loads; 1 seed, 1 epochs of batches of 200"
    assert found == [f"14 buses, {training}", f"30 buses, {training}"]


def test_polished_results_have_rows_of_their_own(tmp_path: Path) -> None:
    sizes = {"horizon": 4, "instances": 30}
    runs = [run(tmp_path, "mpc", k, [1.0 + k], polish, **sizes) for k, polish in enumerate(("rescued", "all"))]
    found = [(row["what"], row["mean gap"]) for row in applications.rows(runs)]
    plain = "4 steps; 1 seed, 1 epochs of batches of 200"
    assert found == [(plain, "1 %"), (f"{plain}; every result polished", "2 %")]


def test_rows_outlive_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "draw_power", lambda run: "")

    def written(*runs: Run) -> dict[str, str]:
        applications.write("acopf", runs, tmp_path / "docs")
        rows = json.loads((tmp_path / "docs" / "data" / "acopf.json").read_text())["rows"]
        return {row["what"].partition(",")[0]: row["mean gap"] for row in rows if row["who"] == "**snarenet**"}

    small, large = (
        run(tmp_path, "acopf", k, [1.0], case=case, instances=30) for k, case in enumerate(("14_ieee", "30_ieee"))
    )
    assert written(small) == {"14 buses": "1 %"}
    assert written(large) == {"30 buses": "1 %", "14 buses": "1 %"}
    again = run(tmp_path, "acopf", 2, [2.0], case="14_ieee", instances=30)
    assert written(again) == {"30 buses": "1 %", "14 buses": "2 %"}


def test_a_run_without_an_evaluation_is_named(tmp_path: Path) -> None:
    made = run(tmp_path, "mpc", 0, [1.0], horizon=4, instances=30)
    (made.path / "evaluation.json").unlink()
    with pytest.raises(ValueError, match=r"there is no evaluation in .*mpc0: snarenet evaluate"):
        applications.rows([made])


def test_the_anchors_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "draw_control", lambda run: f"drawn of {run and run.path.name}")
    made = run(tmp_path, "mpc", 0, [1.0], horizon=4, instances=30)
    applications.main(["mpc", str(made.path), "--docs", str(tmp_path)])
    content = json.loads((tmp_path / "data" / "mpc.json").read_text())
    assert len(content["rows"]) == len(applications.ANCHORS["mpc"]) + 1
    assert content["rows"][-1]["who"] == "**snarenet**"
    assert all(set(row) == set(content["columns"]) for row in content["rows"])
    assert (tmp_path / "figures" / "mpc.svg").read_text().strip() == "drawn of mpc0"


@pytest.mark.parametrize(
    ("name", "sizes"), [("mpc", {"horizon": 5, "instances": 40}), ("acopf", {"case": "14_ieee", "instances": 40})]
)
def test_figures_of_a_run(name: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
    problem = sn.problems.load(name, **sizes)
    config = sn.TrainConfig(epochs=1, width=8, batch=40)
    trained = sn.Trainer(config, tmp_path / "run").fit(config.build(problem), problem)
    draw = applications.draw_control if name == "mpc" else applications.draw_power
    assert draw(trained).startswith("<?xml")
