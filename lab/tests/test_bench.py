"""Benchmarks: the authors' layer against the textbook, tables, and every item of ours on tiny sizes."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet import cli
from snarenet.testing import autograd_jacobian, draw, textbook_repair
from snarenet_lab import bench
from snarenet_lab.bench import __main__ as without_tyro
from snarenet_lab.bench import collection, common, damping, growth, matrix_free, polish, robustness, scaling, settings
from snarenet_lab.bench import repair as one_repair
from snarenet_lab.bench.authors import repair_as_authors
from snarenet_lab.starts import start

CPU = torch.device("cpu")
TINY = {"size": 12, "inequalities": 4, "equalities": 3, "instances": 120}


def stack(kind: str) -> sn.Stack:
    A, equal = draw(3, 6, seed=1), sn.Linear(draw(2, 6, seed=2), equals=lambda x: x)
    if kind == "linear":
        return sn.Linear(A, upper=0.1) & equal
    H = draw(3, 6, seed=3).abs() if kind == "diagonal" else draw(3, 6, 6, seed=3)
    return sn.Quadratic(0.1 * H, A, upper=0.1) & equal


class TestAuthors:
    @pytest.mark.parametrize("kind", ["linear", "diagonal", "whole"])
    def test_equals_the_textbook(self, kind: str) -> None:
        constraints, x = stack(kind), draw(5, 2, seed=4)
        y = draw(5, 6, seed=5).requires_grad_()
        lower, upper = constraints.bounds(x)

        def value(y: Tensor) -> Tensor:
            return constraints.value(y, x)

        options: dict[str, Any] = {"damping": lambda k: 0.1, "tol": 1e-6, "max_steps": 60, "per_sample": False}
        expected, count = textbook_repair(value, autograd_jacobian(value), lower, upper, y, **options)
        found, steps = repair_as_authors(constraints, y, x, 0.1, 1e-6, 60)
        weights = draw(5, 6, seed=6)
        slopes = [torch.autograd.grad((weights * result).sum(), y)[0] for result in (expected, found)]
        assert 2 < steps == count < 60
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
        torch.testing.assert_close(slopes[1], slopes[0], rtol=0, atol=1e-10)
        assert constraints.violation(found, x).max() <= 1e-6

    def test_only_rows_it_can_differentiate(self) -> None:
        with pytest.raises(ValueError, match="constant Linear or Quadratic sets, but got Box"):
            repair_as_authors(sn.Box(0.0, 1.0), draw(2, 3), draw(2, 1))


class TestBenchmark:
    table = common.Benchmark(
        "A title", ["what", "number"], [["a", 1234.5678], ["b", 0.0123456], ["c", 2e-9]], "cmd", "box"
    )

    def test_people_see_three_digits(self) -> None:
        assert self.table.table().markdown().splitlines() == [
            "| what | number |", "| --- | --- |", "| a | 1,235 |", "| b | 0.0123 |", "| c | 2.00e-9 |",
        ]  # fmt: skip
        empty = common.Benchmark("", ["what", "number"], [["d", None], ["e", 0.0], ["f", 7]], "", "")
        assert empty.table().markdown().splitlines()[2:] == ["| d | – |", "| e | 0 |", "| f | 7 |"]

    def test_files_keep_all_digits(self, tmp_path: Path) -> None:
        self.table.write(tmp_path / "new", "name")
        found = json.loads((tmp_path / "new" / "name.json").read_text())
        assert found["rows"][0] == {"what": "a", "number": 1234.5678}
        assert (found["title"], found["command"], found["hardware"]) == ("A title", "cmd", "box")
        page = (tmp_path / "new" / "name.md").read_text()
        assert page.startswith("A title\n\n`cmd` on box.\n\n| what | number |")

    def test_shown_with_and_without_rich(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.table.show()
        printed = capsys.readouterr().out
        assert "1,235" in printed
        assert "| --- |" not in printed
        monkeypatch.setitem(sys.modules, "rich.console", None)
        self.table.show()
        assert self.table.table().markdown() in capsys.readouterr().out


def test_ledger_measures_once_and_survives_a_kill(tmp_path: Path) -> None:
    file, calls = tmp_path / "deep" / "ledger.jsonl", []

    def found(key: int) -> dict[str, Any]:
        return common.Ledger(file).get({"key": key}, lambda: calls.append(key) or {"twice": 2 * key})

    assert [found(1), found(2), found(1)] == [{"twice": 2}, {"twice": 4}, {"twice": 2}]
    file.write_text(file.read_text()[:-5])  # the last line was cut off
    assert [found(1), found(2), found(2)] == [{"twice": 2}, {"twice": 4}, {"twice": 4}]
    assert calls == [1, 2, 2]


def test_starts_obey_the_equalities_without_noise() -> None:
    problem = sn.problems.load("nclp", **TINY)
    y, x = start(problem, 0.0, 5)
    assert y.shape == (5, 12)
    assert problem.constraints.violation(y, x).max() < 1e-12
    with pytest.raises(ValueError, match="`problem` must end with linear equalities"):
        start(sn.problems.load("cbf"), 0.0)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory as Linux tells it")
def test_peak_of_memory() -> None:
    assert 60 < common.peak_growth_mib(lambda: torch.ones(2**23, dtype=torch.float64)) < 80  # 64 MiB
    assert common.peak_growth_mib(lambda: None) < 5


class TestRepair:
    def test_rows_on_tiny_problems(self, tmp_path: Path) -> None:
        shared: dict[str, Any] = {"problem": "qcqp", "batch": 4, "sizes": TINY, "repeats": 2}
        same = partial(one_repair.ours, rows="all", damping=0.01)
        table = one_repair.measure(
            CPU,
            tmp_path,
            [
                one_repair.Trial("authors", build=one_repair.authors, **shared),
                one_repair.Trial("ours", build=same, like=one_repair.authors, **shared),
            ],
        )
        first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
        assert first["problem, method"] == "qcqp 12 4 3 120: authors"
        assert first["times faster"] == 1
        assert second["times faster"] == first["ms"] / second["ms"]
        assert second["difference"] < 1e-7
        assert max(first["violation"], second["violation"]) <= 1e-8

    def test_the_same_set_as_a_function(self) -> None:
        row = one_repair.Trial("function", "qcqp", 4, one_repair.as_function, one_repair.ours, sizes=TINY)
        case = one_repair._Case(row, CPU)
        found, slope, steps, violation = case.outcome()
        expected, expected_slope, *_ = one_repair._Case(row, CPU, one_repair.ours).outcome()
        assert (found - expected).abs().max() < 0.1  # a function is repaired at its own pace: by other steps
        assert (slope - expected_slope).abs().max() < 0.1
        nearest = sn.repair(case.problem.constraints, case.y, case.x, start=sn.Nearest()).value
        far, near = ((value - case.y).norm(dim=1) for value in (found, nearest))
        assert (far <= 1.001 * near).all()
        assert steps > 1
        assert violation <= 1e-8
        forward = one_repair.Trial("function", "qcqp", 4, one_repair.as_function, sizes=TINY, backward=False)
        assert forward.title == "qcqp 12 4 3 120, forward only"
        value, no_slope, *_ = one_repair._Case(forward, CPU).outcome()
        torch.testing.assert_close(value, found)
        assert no_slope is value

    def test_a_failure_is_not_timed(self) -> None:
        short = one_repair.Trial("too short", "nclp", 4, partial(one_repair.ours, steps=1), sizes=TINY)
        with pytest.raises(RuntimeError, match="nclp 12 4 3 120: too short leaves a violation of"):
            one_repair._measured(short, CPU)

    def test_a_gpu_gets_every_row_of_the_table(self) -> None:
        trials = one_repair.trials_for(torch.device("cuda"))
        assert {trial.title for trial in trials if trial.build is one_repair.authors} == {
            "nclp", "nclp 500 450 50", "nclp 1000 950 50", "qcqp", "qcqp 100 100 50",
        }  # fmt: skip
        recorded = [trial for trial in trials if trial.name.endswith(", recorded")]
        plain = {(trial.title, trial.batch, trial.name) for trial in trials}
        for trial in recorded:  # each beside the same without a recording
            assert (trial.title, trial.batch, trial.name.removesuffix(", recorded")) in plain
        assert {trial.batch for trial in trials if not trial.backward} == {833}


class TestScaling:
    def options(self, tmp_path: Path) -> dict[str, Any]:
        reference = tmp_path / "references.json"
        reference.write_text(json.dumps({"12-4": [-1.0] * 10}))
        small = {"width": 8, "batch": 25, "instances": 120, "equalities": 3, "references": str(reference)}
        return {"cells": [(12, 4), (6, 8)], "epochs": 1, **small}

    def test_resumed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        table = scaling.measure(CPU, tmp_path, **self.options(tmp_path))
        monkeypatch.setattr(scaling, "_train", lambda *_: pytest.fail("done already"))
        again = scaling.measure(CPU, tmp_path, **self.options(tmp_path))
        assert again == table
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        assert [(row["variables"], row["constraints"], row["recipe"]) for row in rows] == [
            (12, 7, "best"), (12, 7, "paper"), (6, 11, "best"), (6, 11, "paper"),
        ]  # fmt: skip
        lines = [json.loads(line)["found"] for line in (tmp_path / "scaling.jsonl").read_text().splitlines()]
        for row, found in zip(rows, lines, strict=True):
            assert row["epochs run"] == 1
            assert row["seconds for 1,000 epochs"] == pytest.approx(1000 * found["seconds"])
            assert row["objective after"] == pytest.approx(sum(found["objectives"]) / 10)
        assert rows[0]["feasible to 1e-8"] == 1
        assert rows[0]["mean relative gap"] == pytest.approx(rows[0]["objective after"] + 1)  # f* = -1
        assert rows[2]["mean relative gap"] is None

    def test_as_many_epochs_as_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scaling, "_seconds_of_an_epoch", lambda *_: 2.0)
        only = self.options(tmp_path) | {"cells": [(12, 4)], "recipes": ["best"], "epochs": 9, "limit": 6.5}
        table = scaling.measure(CPU, tmp_path, **only)
        assert table.rows[0][table.columns.index("epochs run")] == 3
        assert table.command == "snarenet bench scaling --device cpu --set epochs 9 width 8 batch 25"

    def test_the_paper_beside(self) -> None:
        found = {"epochs": 10, "seconds": 1.0, "mib": 5.0, "steps": 3.0, "most": 4, "feasible": 1.0, "before": 0.0}
        rows = [
            scaling._row(n, m, 50, "best", found | {"objectives": [1.0]}, None) for n, m in ((500, 450), (1000, 950))
        ]
        first, last = (dict(zip(scaling.COLUMNS, row, strict=True)) for row in rows)
        assert (first["seconds for 1,000 epochs"], first["times faster"]) == (100.0, 64.938)
        assert (last["paper's seconds"], last["times faster"]) == ("> 86,400", "> 864")
        assert (last["paper's GB"], last["paper's steps"], last["constraints"]) == (31.1, 8, 1000)


def test_growth(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sizes": [8, 12], "batch": 4, "equalities": 3, "flops": 1e9, "bandwidth": 1e9}
    table = growth.measure(CPU, tmp_path, repeats=1, **options)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["converged"] for row in rows] == [1.0] * 4
    assert max(row["violation"] for row in rows) <= 1e-8
    last = rows[2]
    assert last["method"] == "cached spectrum"
    assert last["flop limit ms"] == pytest.approx(last["steps"] * 4 * 4 * 12**2 / 1e6)
    assert last["byte limit ms"] == pytest.approx(last["steps"] * 2 * 8 * (12**2 + 2 * 4 * 12) / 1e6)
    assert "<svg" in (tmp_path / "growth.svg").read_text()
    before = (tmp_path / "growth.jsonl").read_text()
    assert growth.measure(CPU, tmp_path, repeats=1, **options) == table
    assert (tmp_path / "growth.jsonl").read_text() == before


class TestRobustness:
    FAMILY = "second-order cones, squared, σ = 1"

    def test_defaults_must_not_fail(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(robustness, "BATCH", 20)
        found = robustness.measure(CPU, tmp_path, seeds=2, only=[self.FAMILY])
        rows = {(row["method"], row["tolerance"]): row for row in found.records()}
        assert len(rows) == len(robustness.METHODS)
        assert rows["defaults", "1e-12"]["failures"] == "0 / 40"
        assert rows["paper", "1e-12"]["failures"].endswith(" / 20")  # of one seed
        assert rows["defaults", "1e-10"]["median steps"] <= rows["defaults", "1e-10"]["max steps"]
        assert rows["defaults", "1e-10"]["displacement"] > 0.1
        assert found.failure == ""
        with pytest.raises(ValueError, match=r"`only` are nclp, σ = 0.5; .*, but got cones"):
            robustness.measure(CPU, tmp_path, only="cones")

    def test_a_failure_is_said_after_the_table(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(robustness, "BATCH", 20)
        monkeypatch.setattr(robustness, "METHODS", {"defaults": {"tol": 1e-12, "max_steps": 1}})
        with pytest.raises(sn.RunError, match="robustness: the defaults failed on 1 rows"):
            bench.bench("robustness", CPU, tmp_path, only=[self.FAMILY], seeds=1)
        assert "20 / 20" in capsys.readouterr().out
        assert json.loads((tmp_path / "robustness.json").read_text())["rows"][0]["median steps"] is None
        with pytest.raises(SystemExit, match="the defaults failed on 1 rows"):
            without_tyro.main(["robustness", "--out", str(tmp_path), "--set", "seeds", "1", "only", str([self.FAMILY])])


class TestCollection:
    ONLY = ("HS11", "HS17", "sphere from its centre")

    def test_three_systems(self, tmp_path: Path) -> None:
        found = collection.measure(CPU, tmp_path, only=self.ONLY, seeds=1)
        rows = {row["setting"]: row for row in found.records()}
        assert [*rows] == [*collection.REPAIRS, *collection.SOLVERS, collection.RIVAL]
        assert found.title == "3 nonlinear systems from 3 starts each, to 1e-06"
        for setting in (collection.OURS, collection.RIVAL):
            assert rows[setting]["all"] in ("8 / 9", "9 / 9")
            assert rows[setting]["100 % around"] == "3 / 3"
            assert 0 < rows[setting]["median steps"] <= rows[setting]["most steps"]
        assert rows["defaults"]["standard start"] == "2 / 3"
        # a step cannot leave the centre of a sphere
        assert rows["defaults"]["fails from the standard start"] == "sphere from its centre"
        assert rows["defaults"]["development"].endswith(" / 6")
        assert rows["defaults"]["held out"] == "3 / 3"  # HS17
        with pytest.raises(ValueError, match="`only` must be names in SYSTEMS, such as 'HS6', but got HS5, HS12"):
            collection.measure(CPU, tmp_path, only=["HS5", "HS6", "HS12"])

    def test_ipopt_must_not_be_ahead(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        repairs = collection.REPAIRS | {collection.OURS: {"max_steps": 1}}
        monkeypatch.setattr(collection, "REPAIRS", repairs)
        found = collection.measure(CPU, tmp_path, only="HS11", seeds=1)
        assert found.failure == "the rescue reaches 0 sets, IPOPT 3"
        monkeypatch.setattr(
            collection, "SOLVERS", dict.fromkeys(collection.SOLVERS, lambda _: pytest.fail("done already"))
        )
        again = collection.measure(CPU, tmp_path, only="HS11", seeds=1)
        assert again.rows[-1] == found.rows[-1]
        found = collection.measure(CPU, tmp_path, only="HS11", seeds=1, solvers=False)
        assert found.failure == ""
        assert [row["setting"] for row in found.records()] == [*collection.REPAIRS]

    def test_the_better_of_two(self) -> None:
        def tries(reached: list[bool], steps: list[int]) -> collection.Tries:
            return collection.Tries(torch.tensor(reached), torch.tensor(steps), 0.5)

        both = collection._better(
            tries([True, True, False, False], [5, 9, 7, 3]), tries([True, False] * 2, [4, 1, 8, 2])
        )
        assert both.reached.tolist() == [True, True, True, False]
        assert both.steps.tolist() == [4, 9, 8, 5]
        assert both.seconds == 1.0


def test_damping(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "seeds": 2, "schedules": [(10, 0.5)], "sizes": TINY}
    (row,) = damping.measure(CPU, tmp_path, **options).records()
    assert row["damping"] == "10 · 0.5ᵏ"
    assert len(row["mean objective, one per seed"].split(", ")) == 2
    assert row["largest violation"] <= 1e-10
    assert row["steps in training"] > 1
    with pytest.raises(ValueError, match="`problem` must be one of nclp, qcqp, but got 'cbf'"):
        damping.measure(CPU, tmp_path, problem="cbf")


def test_polish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("casadi")
    case = {"unicycle 20": partial(sn.problems.load, "mpc", horizon=4)}
    monkeypatch.setattr(polish, "CASES", case)
    found = polish.measure(CPU, tmp_path, samples=8, repeats=1)
    (row,) = found.records()
    assert found.failure == ""
    assert 0 <= row["mean gap"] < row["mean gap before"] / 10
    assert row["in the set"] == 1
    assert row["IPOPT / polish"] == pytest.approx(row["IPOPT ms"] / row["polish ms"])
    monkeypatch.setattr(polish, "polish", lambda objective, constraints, y, x: y + 1)
    assert "unicycle 20" in polish.measure(CPU, tmp_path, samples=8, repeats=1).failure
    with pytest.raises(ValueError, match="`only` must be of unicycle 20, but got torus"):
        polish.measure(CPU, tmp_path, only="torus")


def test_settings(tmp_path: Path) -> None:
    """Every setting is trained and judged on validation instances; one that learns nothing is behind."""
    pytest.importorskip("casadi")
    options = {"sizes": {"size": 8, "inequalities": 4, "equalities": 2, "instances": 240}, "epochs": 6}
    chosen = {"the defaults": {}, "nothing learned": {"lr": 0.0, "descent": "none"}}
    first, second = settings.measure(CPU, tmp_path, ["nclp"], settings=chosen, **options).records()
    assert first["setting"] == "the defaults"
    assert 0 <= first["nclp"] < 0.1 * second["nclp"]
    assert first["infeasible"] == second["infeasible"] == 0


class TestMatrixFree:
    def test_rows_of_the_table(self, tmp_path: Path) -> None:
        waves, sparse = matrix_free.measure(CPU, tmp_path, ["waves", "sparse"], size=40, rows=10, batch=3).records()
        assert (waves["rows x variables"], sparse["rows x variables"]) == ("10 x 40", "250 x 800")
        for row in (waves, sparse):
            assert (row["samples"], row["failures"]) == (3, 0)
            assert row["violation"] <= 1e-8
            forward, backward = map(int, row["iterations, forward + backward"].split(" + "))
            assert forward >= row["steps"] > 1
            assert backward > 0
        assert waves["one Jacobian and factor MiB"] == 8 * 3 * 10 * (40 + 10) / 2**20
        with pytest.raises(ValueError, match="`cases` are waves, sparse, nclp, qcqp, but got wave"):
            matrix_free.measure(CPU, tmp_path, "wave")

    @pytest.mark.slow
    def test_five_thousand_variables(self) -> None:
        """n = 5,000 and m = 2,000 nonlinear rows, in less memory than one Jacobian of the batch."""
        constraints, y, solutions = matrix_free.waves(5000, 2000), draw(4, 5000, scale=2), []
        solver = sn.ConjugateGradients()
        memory = common.peak_growth_mib(lambda: solutions.append(sn.repair(constraints, y, solver=solver)))
        assert solutions[0].converged.all()
        assert memory < 8 * 4 * 2000 * 5000 / 2**20

    @pytest.mark.slow
    def test_a_hundred_thousand_variables(self) -> None:
        """50,000 rows of 5 entries: a dense A alone would take 40 GB."""
        constraints, y, solutions = matrix_free.sparse(100_000, 50_000), draw(4, 100_000, scale=2), []
        solver = sn.ConjugateGradients()
        memory = common.peak_growth_mib(lambda: solutions.append(sn.repair(constraints, y, solver=solver)))
        assert solutions[0].converged.all()
        assert constraints.violation(solutions[0].value).max() <= 1e-8
        assert memory < 500


class TestCommand:
    def test_writes_the_tables(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--set", "sizes", "[8]", "batch", "4", "equalities", "3", "flops", "1e9", "bandwidth", "1e9"]
        for number, command in enumerate((lambda given: cli.main(["bench", *given]), without_tyro.main)):
            out = tmp_path / str(number)
            command(["growth", "--device", "cpu", "--out", str(out), *options])
            found = json.loads((out / "growth.json").read_text())
            assert found["rows"][0]["variables"] == 8
            assert found["command"].startswith("snarenet bench growth --device cpu --set sizes '[8]' batch 4 ")
            assert (out / "growth.md").exists()
            assert "cached spectrum" in capsys.readouterr().out

    def test_help_names_the_items(self, capsys: pytest.CaptureFixture[str]) -> None:
        for command in (lambda: cli.main(["bench", "--help"]), lambda: without_tyro.main(["--help"])):
            with pytest.raises(SystemExit) as stop:
                command()
            assert stop.value.code == 0
            printed = capsys.readouterr().out
            assert all(item in printed for item in bench.ITEMS)

    def test_refusals(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"`item` must be all or one of repair, .*, but got 'speed'"):
            bench.bench("speed", CPU, tmp_path)
        with pytest.raises(ValueError, match=r"options of growth are sizes, .*, but got 'size'"):
            bench.bench("growth", CPU, tmp_path, size=3)
        with pytest.raises(ValueError, match="options belong to one item, but got sizes for all"):
            bench.bench("all", CPU, tmp_path, sizes=[8])
        with pytest.raises(SystemExit):
            without_tyro.main(["growth", "--set", "sizes"])
