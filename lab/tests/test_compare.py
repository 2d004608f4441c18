"""Sweeps that never do a thing twice, and comparisons: plan, rows, table, figure, command."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import snarenet as sn
from snarenet.cli import main
from snarenet.reference import solve
from snarenet_lab import sweep as sweeping
from snarenet_lab.experiments.compare import Plan, compare
from snarenet_lab.report.comparison import (
    METRICS,
    Contender,
    comparison_table,
    csv_table,
    draw_comparison,
    terminal_table,
)
from snarenet_lab.sweep import TrainingJob, results, run_job, sweep

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
CONFIG = sn.TrainConfig(epochs=2, width=8, batch=40, checkpoint_seconds=0.0)


def job(seed: int = 0, **changes: object) -> TrainingJob:
    return TrainingJob("nclp", CONFIG.replace(seed=seed, **changes), SIZES)


class TestSweep:
    def test_a_name_says_all_that_counts(self) -> None:
        names = {
            job().name,
            job(1).name,
            job(lr=1e-3).name,
            TrainingJob("nclp", CONFIG).name,
            TrainingJob("qcqp", CONFIG, SIZES).name,
        }
        assert len(names | {TrainingJob("nclp", CONFIG, SIZES, tol=1e-3).name}) == 6
        assert job(validate_every=2, checkpoint_seconds=5.0).name == job().name
        assert job(relax_mode="train").name == job().name  # nothing is relaxed
        assert job(relax_mode="train", relaxation="adarel").name != job(relaxation="adarel").name
        # as ever: fields may be added
        first = sn.TrainConfig.from_dict({})  # the defaults of the first runs
        assert TrainingJob("nclp", first).name == "nclp-snare-seed0-163d291e1a"
        paper = sn.TrainConfig.recipe("paper", "nclp", relax_mode="eval")
        assert TrainingJob("nclp", paper).name == "nclp-snare-seed0-51e2303b90"
        assert TrainingJob("qcqp", first.replace(lr=1e-3, seed=4)).name == "qcqp-snare-seed4-b00cee5b43"

    def test_done_work_is_not_done_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert sweep([job(), job(1)], tmp_path, quiet=True) == {}
        monkeypatch.setattr(sweeping, "run_job", None)  # whoever calls it now fails
        assert sweep([job(), job(1)], tmp_path, quiet=True) == {}
        found = list(results([job(), job(1), job(2)], tmp_path))
        assert [result.job.config.seed for result in found] == [0, 1]
        assert all(result.summary["converged"] == 1 and result.seconds > 0 for result in found)

    def test_a_default_that_has_changed(self, tmp_path: Path) -> None:
        run = run_job(job(), tmp_path, "cpu", quiet=True)
        saved = run.read_json("config.json")
        saved["config"]["damping_ratio"] = 0.7
        run.write_json("config.json", saved)
        with pytest.raises(sn.RunError, match="another default of damping_ratio: choose another `out`"):
            sweep([job()], tmp_path, quiet=True)

    def test_a_run_that_was_stopped_goes_on(self, tmp_path: Path) -> None:
        whole = run_job(job(), tmp_path / "whole", "cpu", quiet=True)

        class StopError(Exception):
            pass

        def stop(line: dict) -> None:
            raise StopError

        problem, folder = sn.problems.load("nclp", **SIZES), tmp_path / "cut" / job().name
        with pytest.raises(StopError):
            sn.Trainer(CONFIG, folder, callbacks=[stop], quiet=True).fit(CONFIG.build(problem), problem)
        again = run_job(job(), tmp_path / "cut", "cpu", quiet=True)
        for a, b in zip(whole.load_model().parameters(), again.load_model().parameters(), strict=True):
            assert torch.equal(a, b)

    def test_a_run_without_a_checkpoint_begins_again(self, tmp_path: Path) -> None:
        folder = tmp_path / job().name
        sn.Run.create(folder, CONFIG, sn.problems.load("nclp", **SIZES)).log({"epoch": 7})
        assert [line["epoch"] for line in run_job(job(), tmp_path, "cpu", quiet=True).metrics()] == [1, 2]

    def test_a_failure_does_not_end_the_others(self, tmp_path: Path) -> None:
        wrong = job(method="hardnet")
        failures = sweep([TrainingJob("qcqp", wrong.config, SIZES), job()], tmp_path, quiet=True)
        assert list(failures.values()) == ["ValueError: HardNet repairs linear constraints only, but got Quadratic"]
        assert len(list(results([job()], tmp_path))) == 1

    def test_side_by_side(self, tmp_path: Path) -> None:
        jobs = [job(), job(1)]
        assert sweep(jobs, tmp_path / "two", workers=2, quiet=True) == {}
        assert sweep(jobs, tmp_path / "one", quiet=True) == {}
        two, one = (list(results(jobs, tmp_path / name)) for name in ("two", "one"))
        for a, b in zip(two, one, strict=True):
            assert a.summary["objective"]["mean"] == pytest.approx(b.summary["objective"]["mean"], rel=1e-6)

    def test_gaps_against_a_reference(self, tmp_path: Path) -> None:
        sweep([job()], tmp_path, quiet=True)
        problem = sn.problems.load("nclp", **SIZES)
        best = solve(problem, cache=False, workers=1).objective
        (result,) = results([job()], tmp_path, best)
        objective = sn.Run.open(tmp_path / job().name).read_arrays("evaluation.npz")["objective"]
        assert result.summary["gap"]["mean"] == pytest.approx((objective - best.numpy()).mean())


class TestPlan:
    def test_settings_for_all_and_for_one(self) -> None:
        plan = Plan("nclp", epochs=7, changes={"width": 9, "batch": 50, "dc3.penalty": 3.0, "optnet.epochs": 2})
        snare, dc3, optnet = (plan.config(method, 4) for method in ("snare", "dc3", "optnet"))
        assert (snare.epochs, snare.width, snare.seed, snare.penalty) == (7, 9, 4, 0.0)
        assert (dc3.epochs, dc3.width, dc3.penalty) == (7, 9, 3.0)
        assert (optnet.epochs, optnet.batch, optnet.width) == (2, 32, 9)
        assert [Plan("nclp", epochs=50).config(method, 0).epochs for method in ("dc3", "fsnet", "optnet")] == [
            50,
            10,
            5,
        ]
        assert Plan("nclp", recipe="paper").config("hardnet", 0).setting == "paper"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"methods": ["dc4"]}, "`methods` are snare.*but got 'dc4'"),
            ({"changes": {"dc4.lr": 1.0}}, "`methods` are snare.*but got 'dc4'"),
            ({"seeds": 0}, "`seeds` must be at least 1"),
            ({"changes": {"epochs": 3}}, "must not set 'epochs' for all methods: that is what `epochs` does"),
        ],
    )
    def test_mistakes(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Plan("nclp", **options)

    def test_a_field_that_there_is_not(self) -> None:
        with pytest.raises(ValueError, match="'widht' is no field of the training configuration; did you mean 'width'"):
            Plan("nclp", changes={"widht": 3}).config("snare", 0)


class TestCompare:
    def test_rows_remarks_and_files(self, tmp_path: Path) -> None:
        plan = Plan("qcqp", SIZES, ["snare", "hardnet", "dc3"], 2, 2, changes={"width": 8})
        best = solve(sn.problems.load("qcqp", **SIZES), cache=False, workers=1).objective
        rows, remarks = compare(plan, tmp_path, reference=best, quiet=True)
        assert [(row.label, row.budget) for row in rows] == [
            ("SnareNet", "2 epochs, 2 seeds"),
            ("DC3", "2 epochs, 2 seeds"),
            *((solver, "10 instances") for solver in ("IPOPT", "Clarabel", "SLSQP")),
        ]
        assert remarks == ["HardNet: not here, since HardNet repairs linear constraints only, but got Quadratic"]
        ours, dc3, *solvers = (
            dict(zip((m.column.label for m in METRICS), map(row.values, METRICS), strict=True)) for row in rows
        )
        assert len(ours["gap\ngmean"]) == len(dc3["training\ntime"]) == 2
        assert len(ours["time per\ninstance"]) == 1
        assert ours["feasible\nto 1e-8"] == [1, 1]
        for solver in solvers:
            assert abs(solver["gap\nmax"][0]) < 1e-6
            assert 0 < solver["time per\ninstance"][0] < 1
            assert 0 < solver["in\nparallel"][0] < 1
        times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")}
        again, _ = compare(plan, tmp_path, reference=best, quiet=True)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*")} == times
        assert json.dumps([row._asdict() for row in again]) == json.dumps([row._asdict() for row in rows])
        assert json.loads((tmp_path / "comparison.json").read_text())["remarks"] == remarks
        assert (tmp_path / "comparison.md").read_text() == comparison_table(rows).markdown() + f"\n- {remarks[0]}\n"
        ElementTree.fromstring((tmp_path / "comparison.svg").read_text())
        without, _ = compare(plan, tmp_path, quiet=True)  # the solvers' rows know gaps only where a reference is given
        assert without[-1].runs[0]["gap"] is None
        smaller, _ = compare(replace(plan, sizes=SIZES | {"inequalities": 2}, seeds=1, epochs=1), tmp_path, quiet=True)
        assert smaller[0].budget == "1 epoch, 1 seed"
        assert smaller[-1].runs[0]["objective"] != rows[-1].runs[0]["objective"]

    def test_a_problem_without_references(self, tmp_path: Path) -> None:
        plan = Plan("cbf", {"instances": 60, "horizon": 0.06}, ["snare", "hardnet"], 1, 1, changes={"width": 8})
        rows, remarks = compare(plan, tmp_path, quiet=True, classical=False)
        assert [row.label for row in rows] == ["SnareNet"]
        assert "HardNet needs linearly independent rows" in remarks[0]
        assert "objective mean" in comparison_table(rows).markdown()

    def test_a_solver_that_refuses_is_listed_and_a_policy_has_none(self, tmp_path: Path) -> None:
        rows, remarks = compare(Plan("nclp", SIZES, ["hardnet"], 1, 1, changes={"width": 8}), tmp_path, quiet=True)
        assert [row.label for row in rows] == ["HardNet", "IPOPT", "SLSQP"]
        assert [remark[:62] for remark in remarks] == ["Clarabel: not here, since `engine` 'clarabel' solves convex pr"]
        policy = Plan("cbf", {"instances": 60, "horizon": 0.06}, ["soft"], 1, 1, changes={"width": 8})
        assert [row.label for row in compare(policy, tmp_path, quiet=True)[0]] == ["Soft + projection"]

    def test_the_command(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sizes = [str(part) for pair in SIZES.items() for part in pair]
        arguments = [
            "compare",
            "nclp",
            "--methods",
            "snare",
            "hardnet",
            "--seeds",
            "1",
            "--epochs",
            "1",
            "--no-classical",
        ]
        main([*arguments, "--sizes", *sizes, "--set", "width", "8", "snare.lr", "1e-3", "--out", str(tmp_path)])
        printed = capsys.readouterr().out
        assert "SnareNet" in printed
        assert "HardNet" in printed
        assert {json.loads(file.read_text())["config"]["lr"] for file in tmp_path.glob("*/config.json")} == {1e-3, 5e-3}


def run(seed: int, gap: float, largest: float, training: float | None) -> dict:
    return {
        "seed": seed,
        "gap": {"gmean": gap, "max": 2 * gap},
        "ineq": {"gmean": 1e-16, "max": largest},
        "eq": {"gmean": 1e-9, "max": 1e-8},
        "feasible": {"1e-04": 1.0, "1e-08": 0.5},
        "seconds": {"model": 2e-5 if seed == 0 else None},
        "training": training,
    }


ROWS = [
    Contender("ours", "9 epochs, 2 seeds", [run(0, 1e-4, 0.0, 60.0), run(1, 3e-4, 0.0, 62.0)]),
    Contender("theirs", "1 instance", [run(0, 1e-12, 1e-3, None) | {"parallel": 0.01}]),
]


class TestTable:
    def test_cells_are_mean_and_deviation(self) -> None:
        table = comparison_table(ROWS)
        headings, lines = [column.label for column in table.columns], table.texts()
        mine, other = (dict(zip(headings, line, strict=True)) for line in lines)
        assert mine["gap\ngmean"] == "2.0e-4 ± 1e-4"  # of 1e-4 and 3e-4: deviation 1.4e-4
        assert mine["ineq.\nmax"] == "0"
        assert mine["feasible\nto 1e-8"] == "50%"
        assert (mine["time per\ninstance"], mine["training\ntime"]) == ("20 µs", "61 s")
        assert (other["training\ntime"], other["in\nparallel"], mine["in\nparallel"]) == ("–", "10 ms", "–")
        assert "objective\nmean" not in headings

    def test_a_terminal_gets_the_narrow_table(self) -> None:
        headings = [column.label for column in terminal_table(ROWS).columns]
        assert "gap\ngmean" in headings
        assert "in\nparallel" not in headings

    def test_csv_has_every_seed_unrounded(self) -> None:
        lines = list(csv.DictReader(io.StringIO(csv_table(ROWS))))
        assert [(line["method"], line["seed"], float(line["gap gmean"])) for line in lines] == [
            ("ours", "0", 1e-4),
            ("ours", "1", 3e-4),
            ("theirs", "0", 1e-12),
        ]

    def test_the_figure_has_a_panel_for_each_metric(self) -> None:
        drawing = draw_comparison(ROWS, "a title")
        used = [metric for metric in METRICS if all(row.values(metric) for row in ROWS)]  # half of the rows do not do
        visible = [g for g in ElementTree.fromstring(drawing).iter() if g.get("id", "").startswith("axes_")]
        assert len(visible) == len(used) == 9
        assert drawing == draw_comparison(ROWS, "a title")
