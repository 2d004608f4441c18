"""The paper done again: budgets, the paper's numbers, runs that are never made twice, tables, files, golden metrics."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import snarenet as sn
from snarenet import cli
from snarenet_lab.experiments.budget import PAPER, SMOKE, STANDARD, TOLERANCES, seed_list
from snarenet_lab.experiments.damping import DampingItem
from snarenet_lab.experiments.item import together
from snarenet_lab.experiments.nclp import NCLPItem
from snarenet_lab.experiments.ncqcqp import NonConvexQCQPItem
from snarenet_lab.experiments.paper import paper_cell, paper_rows
from snarenet_lab.experiments.qcqp import QCQPItem
from snarenet_lab.experiments.reproduce import ITEMS, reproduce
from snarenet_lab.experiments.rows import attempt
from snarenet_lab.experiments.soft import SoftItem, train_with_curve
from snarenet_lab.experiments.study import Study, command
from snarenet_lab.experiments.theory import SAFE, convex, linear
from snarenet_lab.report.results import Cell, Results, Row, Sheet
from snarenet_lab.sweep import TrainingJob

TINY = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
# what the ordinary tests can afford
BRIEF = replace(
    SMOKE,
    share=0.002,
    epochs=dict.fromkeys(SMOKE.epochs, 2),
    ablation=2,
    sizes={**dict.fromkeys(("nclp", "qcqp", "ncqcqp", "ncqcqp-hard"), TINY), "cbf": {"instances": 36, "dt": 0.25}},
    inequalities=(2, 3, 4),
    methods=("snare", "hardnet"),
    samples=10,
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # reference solutions in this process


def rows_of(results: Results, sheet: int = 0) -> dict[tuple[str, str], Row]:
    return {(row.label, row.source): row for row in results.sheets[sheet].rows}


def mean(row: Row, key: str) -> float:
    found = row.cells[key].mean
    assert found is not None
    return found


class TestPaper:
    def test_cells(self) -> None:
        assert paper_cell("(4.57 ± 0.64)e-1") == Cell(0.457, 0.064)
        assert paper_cell("-12.70 ± 9.39") == Cell(-12.7, 9.39)
        assert paper_cell("1.42e-14") == Cell(1.42e-14)
        assert paper_cell("> 86400 s") == Cell(text="> 86400 s")

    def test_a_number_too_few(self) -> None:
        with pytest.raises(ValueError, match="the row 'DC3' must have 2 numbers, but has 1"):
            paper_rows("method | gap_max | gap_gmean\nDC3 | 1.0")

    @pytest.mark.parametrize(
        ("rows", "label", "key", "cell"),
        [  # read from the paper a second time, not from where they were typed
            (NCLPItem.paper, "HardNet", "gap_gmean", (0.917, 0.099)),
            (NCLPItem.paper, "SnareNet, tol 1e-8", "test_time", (0.972, 0.152)),
            (QCQPItem.paper, "OptNet", "gap_gmean", (0.0415, 0.0001)),
            (NonConvexQCQPItem.paper, "SnareNet, tol 1e-10", "ineq_max", (1.11e-5, 2.49e-5)),
        ],
    )
    def test_typed_as_printed(self, rows: list[Row], label: str, key: str, cell: tuple[float, float]) -> None:
        (row,) = [row for row in rows if row.label == label]
        assert (row.cells[key].mean, row.cells[key].spread) == pytest.approx(cell)

    @pytest.mark.parametrize("item", [NCLPItem(), QCQPItem(), NonConvexQCQPItem()])
    def test_every_row_of_the_paper_has_a_run_beside_it(self, item: NCLPItem) -> None:
        entries = item.entries(PAPER, 1)
        assert {row.label for row in item.paper} <= {entry.label for entry in entries if entry.source == "parity"}
        assert {row.label for row in item.paper} <= {entry.label for entry in entries if entry.source == "best"}


class TestBudget:
    def test_seeds_are_the_papers_first(self) -> None:
        assert seed_list(5) == (123, 456, 789, 101, 112)
        assert len(set(seed_list(9))) == 9
        with pytest.raises(ValueError, match="`seeds` must be at least 1, but got 0"):
            seed_list(0)

    def test_the_papers_budget_is_the_papers_recipe(self) -> None:
        config = PAPER.parity_config("nclp", 123, 1500)
        expected = sn.TrainConfig.recipe("paper", "nclp", epochs=1500, seed=123, validate_every=1500)
        assert config == expected.replace(record=config.max_steps)  # on a GPU, as fast as that can be
        assert (config.relax_epochs, config.damping, config.rows, config.rescue) == (500, 0.01, "all", False)
        assert PAPER.parity_config("nclp", 1, 1500, "hproj").pretrain == 0  # the method's own: all 20,000
        assert PAPER.parity_config("nclp", 1, 1500, "hardnet").relax_epochs == 100

    def test_a_share_is_one_of_everything(self) -> None:
        part = replace(STANDARD, share=0.2)
        config = part.parity_config("nclp", 123, 1500)
        assert (config.epochs, config.relax_epochs) == (300, 100)
        assert part.parity_config("nclp", 123, 1500, "hproj").pretrain == 4000
        assert STANDARD.parity_config("nclp", 123, 1500, "optnet").epochs == 1
        assert STANDARD.of("nclp").parity_config("nclp", 123, 1500).epochs == 1500
        assert STANDARD.of("inequalities").parity_config("qcqp", 123, 1500).epochs == 750
        assert STANDARD.of("rows") == STANDARD
        assert SMOKE.scaled(10) == 1
        assert SMOKE.scaled(0) == 0
        with pytest.raises(ValueError, match="`share` must be above 0 and at most 1, but got 2"):
            replace(STANDARD, share=2)

    @pytest.mark.parametrize("name", ["nclp", "qcqp", "damping", "inequalities", "warmup", "soft", "cbf"])
    def test_parity_rows_know_the_papers_epochs(self, name: str) -> None:
        """Budget paper trains them for that many, but for OptNet."""
        entries = ITEMS[name].entries(replace(PAPER, own={}), 1)
        parity = [e for e in entries if e.source == "parity" and e.jobs[0].config.method != "optnet"]
        assert {entry.paper_epochs - entry.jobs[0].config.epochs for entry in parity} == {0}
        assert all(entry.paper_epochs == 0 for entry in entries if entry.source == "best")

    def test_tolerances_are_trained_for_where_the_paper_does(self) -> None:
        def trained(budget: object) -> set[float]:
            entries = NonConvexQCQPItem().entries(budget, 1)  # pyright: ignore
            parity = [e for e in entries if e.source == "parity" and e.tol is not None]
            return {entry.jobs[0].config.tol for entry in parity}

        assert trained(PAPER) == set(TOLERANCES)
        assert trained(STANDARD) == {1e-6}

    def test_counts_of_runs(self) -> None:
        """One training for all tolerances; every damping and warm-up twice; three counts of three methods twice."""
        counts = {"nclp": 5 + 9 + 1, "damping": 9 * 2 + 1, "inequalities": 18, "warmup": 24, "cbf": 8, "rows": 8}
        for name, count in counts.items():
            entries = ITEMS[name].entries(STANDARD, 1)
            assert len({job.name for entry in entries for job in entry.jobs}) == count, name


class TestStudy:
    def job(self, **changes: object) -> TrainingJob:
        return TrainingJob("nclp", BRIEF.parity_config("nclp", 123, 1500, **changes), TINY)  # pyright: ignore

    def test_the_command_of_a_row_trains_the_same(self, tmp_path: Path) -> None:
        for job in (
            TrainingJob("nclp", BRIEF.small_config("nclp", 456, fresh=True, damping=None), TINY),
            self.job(batch_norm=False, damping=None),
        ):
            words = shlex.split(command(job))
            assert words[0] == "snarenet"
            out = tmp_path / job.name
            cli.main([*words[1:], "--engine", "none", "--device", "cpu", "--out", str(out)])
            trained, meant = sn.Run.open(out), job.config
            assert trained.config.replace(validate_every=meant.validate_every) == meant
            assert trained.sizes == TINY

    def test_an_evaluation_is_made_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from snarenet_lab.experiments import study as module
        from snarenet_lab.sweep import sweep

        study, job = Study(BRIEF, 1, tmp_path), self.job()
        assert study.evaluation(job, 1e-4) is None
        sweep([job], study.runs, quiet=True)
        first = study.evaluation(job, 1e-4)
        assert first is not None
        assert first[0]["tol"] == 1e-4
        assert first[0]["violation"] <= 1e-4
        monkeypatch.setattr(module, "evaluate", None)
        again = study.evaluation(job, 1e-4)
        assert again is not None
        assert again[0] == first[0]
        assert (study.runs / job.name / "evaluation-1e-04.json").exists()

    def test_optima_are_kept_where_no_solver_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        best = Study(BRIEF, 1, tmp_path).optima("nclp", TINY)
        assert best is not None
        direct = sn.problems.load("nclp", **TINY)
        from snarenet.reference import solve

        expected = solve(direct, cache=False, workers=1).objective
        torch.testing.assert_close(best.objective, expected)

        def refuse(*_: object, **__: object) -> None:
            raise ImportError("no casadi")

        monkeypatch.setattr("snarenet_lab.experiments.study.solve", refuse)
        later = Study(BRIEF, 1, tmp_path)
        again = later.optima("nclp", TINY)
        assert again is not None
        assert torch.equal(again.objective, best.objective)
        assert later.optima("nclp", TINY | {"size": 9}) is None
        assert "No gaps on nclp: no casadi" in next(iter(later.missing.values()))

    def test_measured_once(self, tmp_path: Path) -> None:
        calls: list[int] = []
        study = Study(BRIEF, 1, tmp_path)
        for _ in range(2):
            assert study.measured("x", {"a": 1}, lambda: calls.append(1) or {"b": 2}) == {"b": 2}
        assert calls == [1]
        assert Study(BRIEF, 1, tmp_path, measures=False).measured("x", {"a": 2}, lambda: 3) is None


def test_rows_of_a_label_stay_together() -> None:
    rows = together(
        [Row("a", "paper", {}), Row("b", "paper", {})],
        [Row("b", "best", {}), Row("c", "best", {}), Row("a", "parity", {})],
    )
    assert [(row.label, row.source) for row in rows] == [
        ("a", "paper"), ("a", "parity"), ("b", "paper"), ("b", "best"), ("c", "best")
    ]  # fmt: skip


class TestDamping:
    def test_rows_of_fewer_epochs_are_not_drawn(self, tmp_path: Path) -> None:
        def row(label: str, epochs: int, gap: float, steps: float) -> Row:
            return Row(label, "parity", {"gap_gmean": Cell(gap), "steps": Cell(steps)}, epochs=epochs)

        rows = (row("λ = 1", 9, 1.0, 5.0), row("λ = 5", 9, 2.0, 6.0), row("λ = 1·0.5ᵏ", 3, 0.1, 2.0))
        sheet, item = Sheet("damping", "T", (), rows), DampingItem()
        (figure,) = item.figures(Study(SMOKE, 1, tmp_path), [sheet])
        assert [(one["label"], one["names"]) for one in figure["series"]] == [("constant", ["1", "5"])]
        assert item.remarks(Study(SMOKE, 1, tmp_path), [sheet]) == [
            "Pareto front of gap and steps by the paper's recipe, 9 epochs: λ = 1."
        ]


class TestTheory:
    def test_linear_rows_keep_the_bound(self) -> None:
        problem = sn.problems.load("nclp", **TINY)
        for damping in (0.01, 1.0):
            found = linear(problem, 10, damping)
            assert found["broken"] == 0
            assert 0 < found["tightest"] <= 1
            A = torch.cat([part.A for part in problem.constraints.parts])
            square = np.linalg.eigvalsh((A @ A.T).numpy())[0]
            assert found["limit"][3] == pytest.approx((1 - square / (square + damping)) ** 3)
            assert found["worst"][0] == 1
            assert found["worst"][1] < 1

    @pytest.mark.parametrize("kind", ["ball", "ellipsoids"])
    def test_convex_rows_keep_the_bound(self, kind: str) -> None:
        found = convex(kind, 8, "cpu")
        assert (found["broken"], found["samples"]) == (0, 8)
        assert found["tightest"] <= 1
        assert found["worst"] == sorted(found["worst"], reverse=True)

    def test_a_broken_bound_is_counted(self) -> None:
        from snarenet_lab.experiments.theory import _summary

        path = torch.tensor([[1.0, 1.0], [0.5, 0.2], [0.4, 0.1]])
        found = _summary("x", 1.0, path, torch.tensor([[1.0], [0.4], [0.3]]).expand(3, 2))
        assert found["broken"] == 1
        assert found["tightest"] == pytest.approx(0.4 / 0.3)

    def test_the_safe_condition(self) -> None:
        """The larger root of λ² − 2 L M λ − L² M² / 16 for L M = 1."""
        root = SAFE
        assert root**2 - 2 * root - 1 / 16 == pytest.approx(0)


def test_attempts_with_active_rows_need_fewer_steps() -> None:
    problem = sn.problems.load("qcqp", size=12, inequalities=8, equalities=5, instances=300)
    every, active = (attempt(problem, 2.0, rows) for rows in ("all", "active"))
    assert every["converged"] == active["converged"] == 1
    assert active["steps"] < every["steps"]  # pyright: ignore
    assert active["instances"] == 25


class TestSoft:
    def test_curves_go_on_where_a_run_was_stopped(self, tmp_path: Path) -> None:
        budget = replace(BRIEF, share=0.003)  # 6 epochs, 2 or 3 of them soft
        entry = SoftItem().entries(budget, 1)[0]
        job = TrainingJob("nclp", entry.jobs[0].config.replace(checkpoint_seconds=0.0), entry.jobs[0].sizes)
        whole, parts = Study(budget, 1, tmp_path / "whole"), Study(budget, 1, tmp_path / "parts")
        train_with_curve(job, whole)
        folder = parts.runs / job.name

        class StopError(Exception):
            pass

        def stop(line: dict) -> None:
            if line["epoch"] == 4:
                raise StopError

        from snarenet_lab.experiments import soft

        problem = parts.problem("nclp", job.sizes)
        model = job.config.build(problem)
        notes = soft._Notes(problem, model, folder, 1)
        with pytest.raises(StopError):
            sn.Trainer(job.config, folder, callbacks=[notes, stop], quiet=True).fit(model, problem)
        train_with_curve(job, parts)
        one, two = (sn.Run.open(study.runs / job.name).read_arrays("curve.npz") for study in (whole, parts))
        assert one is not None
        assert two is not None
        assert one["epoch"].tolist() == two["epoch"].tolist() == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose(one["repaired"], two["repaired"], rtol=1e-9)
        run = whole.run(job)
        assert run is not None
        final = run.load_model().eval()
        x = problem.split("valid")
        np.testing.assert_allclose(one["repaired"][-1], problem.objective(final(x), x).detach(), rtol=1e-9)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some items, done once, with the smallest budget."""
    out = tmp_path_factory.mktemp("reproduction")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNARENET_CACHE", str(out / "cache"))
        patch.setattr("os.cpu_count", lambda: 1)
        reproduce(["nclp", "cbf", "theory"], BRIEF, 2, out, quiet=True)
    return out


class TestReproduce:
    def read(self, out: Path, name: str) -> Results:
        return Results.read(json.loads((out / f"{name}.json").read_text()))

    def test_paper_parity_and_best_side_by_side(self, out: Path) -> None:
        rows = rows_of(self.read(out, "nclp"))
        for tol in ("1e-4", "1e-12"):
            for source in ("paper", "parity", "best"):
                row = rows[f"SnareNet, tol {tol}", source]
                assert mean(row, "eq_max") <= float(tol)
                assert row.count == {"paper": "5"}.get(source, "2")
        best = rows["SnareNet, tol 1e-8", "best"]
        assert best.seeds == (123, 456)
        assert len(best.cells["gap_gmean"].values) == 2
        assert mean(best, "kept") == 1
        assert ("DC3", "paper") in rows
        assert ("DC3", "best") not in rows  # not in this budget

    def test_the_same_model_at_every_tolerance(self, out: Path) -> None:
        rows = rows_of(self.read(out, "nclp"))
        loose, tight = (rows[f"SnareNet, tol {tol}", "best"] for tol in ("1e-4", "1e-12"))
        assert mean(loose, "gap_gmean") == pytest.approx(mean(tight, "gap_gmean"), rel=1e-2)
        assert loose.cells["training"] == tight.cells["training"]
        loose, tight = (rows[f"SnareNet, tol {tol}", "parity"] for tol in ("1e-4", "1e-12"))
        assert mean(loose, "steps_max") < mean(tight, "steps_max")

    def test_golden(self, out: Path) -> None:
        """Coarse, since rounding differs from machine to machine."""
        nclp = rows_of(self.read(out, "nclp"))
        assert mean(nclp["SnareNet, tol 1e-8", "best"], "gap_gmean") < 0.03  # it starts at typical solutions
        assert mean(nclp["HardNet", "parity"], "gap_max") == pytest.approx(2.4930, rel=0.05)
        cbf = self.read(out, "cbf")
        for box, golden in enumerate((9308.4, 9353.2)):
            rows = rows_of(cbf, box)
            assert (
                mean(rows["SnareNet", "best"], "ineq_max")
                < 1e-6
                < mean(rows["nominal controller", "measured"], "ineq_max")
            )
            assert mean(rows["SnareNet", "best"], "objective") == pytest.approx(golden, rel=0.05)

    def test_files(self, out: Path) -> None:
        text = (out / "nclp.md").read_text()
        assert "| *HardNet* | *paper* | *5* | *–* | *10.2 ± 4.7* |" in text
        assert "| HardNet | parity | 2 | 3 of 1,500 |" in text
        assert "| HardNet | best | 2 | 2 |" in text
        assert "snarenet reproduce nclp --budget smoke --seeds 2 --share 0.002 --device cpu" in text
        lines = list(csv.DictReader(io.StringIO((out / "nclp.csv").read_text())))
        seeds = [line["seed"] for line in lines if (line["method"], line["source"]) == ("HardNet", "best")]
        assert set(seeds) == {"123", "456"}
        assert r"HardNet & paper & 5 & -- & $(1.02 \pm 0.47) \times 10^{1}$" in (out / "nclp.tex").read_text()
        assert {file.name for file in out.glob("*.svg")} == {
            "nclp-metrics.svg", "cbf-box-1.svg", "cbf-box-2.svg", "theory-theorem-1.svg", "theory-theorem-2.svg"
        }  # fmt: skip

    def test_nothing_is_done_twice(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")}
        monkeypatch.setattr("snarenet_lab.sweep._attempt", None)
        for broken in ("study.evaluate", "study.solve", "theory.linear", "cbf.evaluate"):
            monkeypatch.setattr(f"snarenet_lab.experiments.{broken}", None)
        found = reproduce(["nclp", "cbf", "theory"], BRIEF, 2, out, quiet=True)
        assert {path: path.stat().st_mtime_ns for path in out.glob("runs/*/*")} == before
        assert [results.origin["done"] for results in found] == [results.origin["runs"] for results in found]

    def test_what_is_missing_is_said(self, out: Path) -> None:
        (other,) = reproduce(["nclp"], BRIEF, 2, out, share=0.1, train=False, quiet=True)
        assert "--seeds 2 --share 0.1" in other.origin["command"]
        kept = rows_of(other)["HardNet", "parity"]
        assert (kept.count, kept.effort) == ("2", "3 of 1,500")  # what is there, and what it is
        assert "4 runs of 10 are not done; the same command goes on with them." in other.remarks
        (found,) = reproduce(["nclp"], BRIEF, 3, out, train=False, quiet=True)
        assert "5 runs of 15 are not done; the same command goes on with them." in found.remarks
        assert rows_of(found)["HardNet", "best"].count == "2 of 3"
        reproduce(["nclp"], BRIEF, 2, out, quiet=True)

    def test_rows_outlive_their_runs(self, out: Path, tmp_path: Path) -> None:
        for name in ("nclp", "cbf", "theory"):
            shutil.copy(out / f"{name}.json", tmp_path)
        found = reproduce(["nclp", "cbf", "theory"], BRIEF, 2, tmp_path, train=False, engine="none", quiet=True)
        for results in found:
            before = self.read(out, results.item)
            assert results.sheets == before.sheets
            assert [figure["name"] for figure in results.figures] == [figure["name"] for figure in before.figures]
            assert results.origin["done"] == before.origin["done"]
            assert results.origin["trained on"] == before.origin["trained on"]
        drawn = found[1].figures[0]["series"]  # of trajectories, which no row holds
        assert {"nominal", "SnareNet, parity", "DC3, best"} < {one["label"] for one in drawn}

    def test_nor_are_their_runs_made_again(self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copy(out / "nclp.json", tmp_path)
        asked: list[str] = []
        monkeypatch.setattr(
            "snarenet_lab.experiments.reproduce.sweep", lambda jobs, *_, **__: asked.extend(j.name for j in jobs) or {}
        )
        reproduce(["nclp"], BRIEF, 2, tmp_path, engine="none", quiet=True)
        assert asked == []
        reproduce(["nclp"], BRIEF, 3, tmp_path, engine="none", quiet=True)
        assert len(asked) == 5
        assert all("seed789" in name for name in asked)

    def test_some_rows_alone(self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copy(out / "cbf.json", tmp_path)
        asked: list[str] = []
        monkeypatch.setattr(
            "snarenet_lab.experiments.reproduce.sweep", lambda jobs, *_, **__: asked.extend(j.name for j in jobs) or {}
        )
        reproduce(["nclp"], BRIEF, 2, tmp_path, only=["Hard*"], engine="none", quiet=True)
        assert len(asked) == 4  # by two recipes
        assert all("hardnet" in name for name in asked)
        asked.clear()
        more = replace(BRIEF, epochs={**BRIEF.epochs, "cbf": 9})
        (found,) = reproduce(["cbf"], more, 1, tmp_path, only=["DC3"], engine="none", quiet=True)
        assert len(asked) == 2  # from two boxes
        assert all("dc3" in name for name in asked)
        assert found.sheets == self.read(out, "cbf").sheets  # the others keep what they have

    def test_a_row_with_all_epochs_is_done(self, out: Path, tmp_path: Path) -> None:
        shutil.copy(out / "cbf.json", tmp_path)  # two tables with the same labels
        again = replace(BRIEF, parity={**BRIEF.parity, "lr": 1e-5})  # its command says how it was trained
        (found,) = reproduce(["cbf"], again, 1, tmp_path, train=False, engine="none", quiet=True)
        assert found.sheets == self.read(out, "cbf").sheets
        assert not [remark for remark in found.remarks if "not done" in remark]
        more = replace(again, epochs={**BRIEF.epochs, "cbf": 9})
        (found,) = reproduce(["cbf"], more, 1, tmp_path, train=False, engine="none", quiet=True)
        assert "4 runs of 8 are not done; the same command goes on with them." in found.remarks

    def test_other_budgets_share_nothing(self, out: Path, tmp_path: Path) -> None:
        shutil.copy(out / "nclp.json", tmp_path)
        (found,) = reproduce(["nclp"], replace(BRIEF, name="other"), 2, tmp_path, train=False, quiet=True)
        assert rows_of(found)["HardNet", "parity"].count == "0 of 2"

    def test_what_fails_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise ValueError("not today")

        monkeypatch.setattr("snarenet.layers.hardnet.HardNetLayer.__init__", refuse)
        (found,) = reproduce(["nclp"], replace(BRIEF, methods=("snare", "hardnet")), 1, tmp_path, quiet=True)
        assert "Could not finish 2 runs of nclp-hardnet: ValueError: not today" in found.remarks
        row = rows_of(found)["HardNet", "best"]
        assert (row.count, row.cells) == ("0 of 1", {})
        assert mean(rows_of(found)["SnareNet, tol 1e-8", "best"], "kept") == 1

    def test_mistakes(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"`items` must be some of all, nclp, .* but got nlcp"):
            reproduce(["nlcp"], BRIEF, 1, tmp_path)
        with pytest.raises(ValueError, match="`budget` must be one of smoke, standard, paper, but got 'large'"):
            reproduce(["nclp"], "large", 1, tmp_path)
        with pytest.raises(ValueError, match=r"`only` must be labels of rows \(HardNet; .*\), but got 'Hardnet'"):
            reproduce(["nclp"], BRIEF, 1, tmp_path, only=["HardNet", "Hardnet"])

    def test_the_commands(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("snarenet_lab.experiments.theory._SETS", 2)
        cli.main(["reproduce", "theory", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)])
        printed = capsys.readouterr().out
        assert f"The report is {tmp_path / 'report.html'}" in printed
        cli.main(["report", str(tmp_path)])
        assert "Measured convergence" in (tmp_path / "report.html").read_text()
        with pytest.raises(SystemExit):
            cli.main(["report", str(tmp_path / "measured")])
        assert "holds no run" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_all_of_smoke(tmp_path: Path) -> None:
    pytest.importorskip("cvxpylayers")  # OptNet
    found = {results.item: results for results in reproduce(["all"], "smoke", 2, tmp_path, quiet=True)}
    assert list(found) == list(ITEMS)
    for results in found.values():
        assert results.origin["done"] == results.origin["runs"], results.remarks
        for sheet in results.sheets:
            assert all(row.done == row.planned for row in sheet.rows if row.source in ("parity", "best"))
            numbers = [cell.mean for row in sheet.rows for cell in row.cells.values() if cell.mean is not None]
            assert not any(map(math.isnan, numbers))
        assert results.figures
    for item in ("nclp", "qcqp", "ncqcqp"):  # every tolerance is kept, on all instances and seeds
        rows = rows_of(found[item])
        for tol in TOLERANCES:
            label = f"SnareNet, tol {tol:.0e}".replace("e-0", "e-")
            assert rows[label, "best"].cells["kept"].values == (1, 1)
    assert all(mean(row, "broken") == 0 for row in found["theory"].sheets[0].rows)
    for (item, label, source, key), golden in SMOKE_GOLDEN.items():
        assert mean(rows_of(found[item])[label, source], key) == pytest.approx(golden, rel=0.1), (item, label)
    for box in (0, 1):
        rows = rows_of(found["cbf"], box)
        assert (
            mean(rows["SnareNet", "best"], "ineq_max")
            < 1e-8
            < 1
            < mean(rows["nominal controller", "measured"], "ineq_max")
        )


SMOKE_GOLDEN = {  # of the run that this test was written with
    ("nclp", "SnareNet, tol 1e-8", "best", "gap_gmean"): 0.6016,
    ("nclp", "SnareNet, tol 1e-8", "parity", "gap_gmean"): 5.227,
    ("nclp", "Pi-net", "best", "gap_gmean"): 0.6016,
    ("qcqp", "SnareNet, tol 1e-8", "best", "gap_gmean"): 3.489,
    ("qcqp", "HardNet++", "best", "gap_gmean"): 3.317,
    ("ncqcqp", "SnareNet, tol 1e-10", "best", "objective"): -1.516,
    ("ncqcqp", "DC3", "best", "gap_gmean"): 3.827,
    ("damping", "λ = 10", "best", "gap_gmean"): 0.8707,
    ("damping", "nearest", "best", "gap_gmean"): 0.8734,
    ("inequalities", "SnareNet", "best", "gap_gmean"): 4.61,
    ("warmup", "λ = 0.1, AdaRel", "parity", "gap_gmean"): 4.063,
    ("warmup", "annealed, soft", "best", "gap_gmean"): 0.9091,
    ("soft", "500 soft epochs", "parity", "gap_gmean"): 5.538,
    ("cbf", "SnareNet", "best", "objective"): 7071,
    ("theory", "Theorem 1, λ = 1", "measured", "tightest"): 0.2475,
    ("theory", "Theorem 2, ball", "measured", "tightest"): 0.3298,
    ("rows", "ncqcqp-hard, σ = 2, active rows", "measured", "steps_max"): 22,
}
