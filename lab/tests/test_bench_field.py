"""The comparison with the field, the training race and data-parallel scaling, on tiny problems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import snarenet as sn
from snarenet.reference.engines import Clarabel
from snarenet.reference.program import QuadraticRows, Structured
from snarenet_lab.bench import field, kkt_hardnet, original, parallel, race
from snarenet_lab.bench.common import Benchmark
from snarenet_lab.bench.field import Setup
from snarenet_lab.bench.rivals import pieces, qpth

CPU = torch.device("cpu")
SIZES = {"size": 8, "inequalities": 4, "equalities": 3, "instances": 120}
CHANGES = {"width": 16, "batch": 20, "lr": 0.05}
NCLP, QCQP = Setup("nclp", 6, sizes=SIZES), Setup("qcqp", 6, sizes=SIZES)


def records(table: Benchmark) -> list[dict[str, Any]]:
    return json.loads(table.to_json())["rows"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No original Pi-net, wherever it may be."""
    monkeypatch.setattr(original, "interpreter", lambda: None)


def nearest(setup: Setup) -> torch.Tensor:
    """The projections by a conic solver, one by one."""
    problem, y, x = setup.load(CPU)
    _, lower, upper, *_ = problem.constraints.at(y.detach(), x)
    A, _, C = pieces(problem)
    J, n = torch.cat([A, C]).numpy(), problem.size
    found = [
        Clarabel(Structured(np.ones(n), -point, np.zeros(n), (QuadraticRows(J),)))(point, low, high)
        for point, low, high in zip(y.detach().numpy(), lower.numpy(), upper.numpy(), strict=True)
    ]
    return torch.from_numpy(np.stack(found))


class TestField:
    def test_every_method_reaches_the_tolerance_or_says_why_not(self, tmp_path: Path, alone: None) -> None:
        """Ours are ahead of nobody here, for the problem is tiny: what is tested is that the rows are true."""
        names = ["snarenet", "snarenet, the same, nearest=20", "the authors' layer", "Pi-net (ours)", field.ORIGINAL]
        found = records(field.measure(CPU, tmp_path, [NCLP, QCQP], methods=names, repeats=2, memory=False))
        rows = {(row["problem"], row["violation to reach"], row["method"]): row for row in found}
        assert len(rows) == 2 * 5 + 2 * 3  # QCQP without those that take linear constraints only
        for (_, tol, name), row in rows.items():
            if name == field.ORIGINAL:
                assert row["ms"] == "not installed"
                assert row["violation"] is None
            else:
                assert row["violation"] <= tol
                assert row["ms"] > 0
        for tol in field.TOLERANCES:
            ours = rows["nclp", tol, "snarenet"]
            assert ours["times snarenet's"] == 1
            theirs = rows["nclp", tol, "the authors' layer"]
            assert theirs["times snarenet's"] == pytest.approx(theirs["ms"] / ours["ms"])
            assert theirs["setting"] == "damping 0.01"

    def test_distance_of_those_that_project(self, tmp_path: Path) -> None:
        """Pi-net's is that of the nearest points; the authors' layer goes further."""
        pytest.importorskip("clarabel")
        names = ["Pi-net (ours)", "the authors' layer"]
        project, step = records(field.measure(CPU, tmp_path, [NCLP], [1e-8], names, repeats=2, memory=False))
        _, y, _ = NCLP.load(CPU)
        moved = (nearest(NCLP) - y.detach()).norm(dim=1).mean().item()
        assert project["distance"] == pytest.approx(moved, rel=1e-6)
        assert step["distance"] > 1.01 * moved

    def test_a_method_that_does_not_reach_the_tolerance(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its violation stands in the place of a time; the fastest setting that does reach it is chosen."""

        def shifted(problem: sn.problems.Problem, tol: float, shift: float) -> field.Repair:
            right = torch.linalg.pinv(pieces(problem)[-1])
            return lambda y, x: (0 * y + x @ right.T + shift, None)  # feasible, but for the shift

        monkeypatch.setitem(field.METHODS, "wrong", field.Method(shifted, (2.0, 1.0), "shift"))
        monkeypatch.setitem(field.METHODS, "right", field.Method(shifted, (1.0, 0.0), "shift"))
        wrong, right = records(
            field.measure(CPU, tmp_path, [NCLP], [1e-6], ["wrong", "right"], repeats=2, memory=False)
        )
        problem, _, x = NCLP.load(CPU)
        y = x @ torch.linalg.pinv(pieces(problem)[-1]).T + 1.0
        worst = problem.constraints.violation(y, x).max().item()
        assert wrong["violation"] == pytest.approx(worst, rel=1e-9)
        assert wrong["ms"] == f"not reached: {worst:.0e}"
        assert wrong["setting"] == "shift 1"  # the better of the two
        assert right["setting"] == "shift 0"
        assert right["violation"] < 1e-12

    @pytest.mark.parametrize("setup", [NCLP, QCQP], ids=["nclp", "qcqp"])
    def test_enforce(self, setup: Setup, tmp_path: Path) -> None:
        pytest.importorskip("enforce")
        (row,) = records(field.measure(CPU, tmp_path, [setup], [1e-8], ["enforce-nn"], repeats=2, memory=False))
        assert row["violation"] <= 1e-8

    def test_qpth_finds_the_nearest_points(self) -> None:
        pytest.importorskip("qpth")
        problem, y, x = NCLP.load(CPU)
        value, _ = qpth(problem, 1e-8, 1e-10)(y, x)
        torch.testing.assert_close(value.detach(), nearest(NCLP), rtol=0, atol=1e-6)

    @pytest.mark.parametrize(("name", "package"), [("POUNCE", "pounce"), ("Moreau", "moreau")])
    def test_others_that_find_the_nearest_points(self, name: str, package: str) -> None:
        pytest.importorskip(package)
        for setup in (NCLP, QCQP):
            problem, y, x = setup.load(CPU)
            build = field.METHODS[name].build
            assert build is not None
            value, _ = build(problem, 1e-8, field.METHODS[name].settings[-1])(y, x)
            assert problem.constraints.violation(value.detach(), x).max() <= 1e-8
            if setup is NCLP:
                torch.testing.assert_close(value.detach(), nearest(NCLP), rtol=0, atol=1e-6)
            value.square().sum().backward()
            assert y.grad is not None
            assert y.grad.isfinite().all()

    @pytest.mark.parametrize("setup", [NCLP, QCQP], ids=["nclp", "qcqp"])
    def test_rayen_stops_on_the_way_to_the_prediction(self, setup: Setup) -> None:
        """Every result is a point of the set between one point inside and the prediction on C y = x."""
        pytest.importorskip("rayen")
        problem, y, x = replace(setup, fixed=True).load(CPU)
        build = field.METHODS["RAYEN"].build
        assert build is not None
        value, _ = build(problem, 1e-8, None)(y, x)
        assert problem.constraints.violation(value.detach(), x).max() <= 1e-8
        C = pieces(problem)[-1]
        plane = y - (y @ C.T - x) @ torch.linalg.pinv(C).T
        left = (plane - value).detach()
        rays = torch.nn.functional.normalize(left[left.norm(dim=1) > 1e-6], dim=1)
        points = value.detach()[left.norm(dim=1) > 1e-6]
        projectors = torch.eye(problem.size, dtype=x.dtype) - rays.unsqueeze(2) * rays.unsqueeze(1)
        where = torch.linalg.lstsq(projectors.sum(0), (projectors @ points.unsqueeze(2)).sum(0)).solution
        missed = (projectors @ (points.unsqueeze(2) - where)).abs().max()  # all rays meet in one point
        assert missed < 1e-6

    def test_a_fixed_set(self, tmp_path: Path) -> None:
        """All samples have one input, and predictions as far from its set as before; what needs such a set is here."""
        _, y, x = NCLP.load(CPU)
        problem, fixed, same = replace(NCLP, fixed=True).load(CPU)
        assert (same == x[:1]).all()
        right = torch.linalg.pinv(pieces(problem)[-1]).T
        torch.testing.assert_close((fixed - same @ right).detach(), (y - x @ right).detach())
        names = ["snarenet", "RAYEN"]
        both = [NCLP, replace(NCLP, fixed=True)]
        found = records(field.measure(CPU, tmp_path, both, [1e-6], names, repeats=2, memory=False))
        assert [row["method"] for row in found] == ["snarenet", "snarenet", "RAYEN"]

    @pytest.mark.slow
    @pytest.mark.skipif(kkt_hardnet.interpreter() is None, reason="kkt-hardnet is not installed")
    @pytest.mark.parametrize("setup", [NCLP, QCQP], ids=["nclp", "qcqp"])
    def test_kkt_hardnet(self, setup: Setup, tmp_path: Path) -> None:
        """It comes as near to the predictions as a projection can."""
        names = ["KKT-HardNet", "cvxpylayers"]
        theirs, exact = records(field.measure(CPU, tmp_path, [setup], [1e-8], names, repeats=2, memory=False))
        assert theirs["violation"] <= 1e-8
        assert theirs["distance"] == pytest.approx(exact["distance"], rel=1e-4)

    @pytest.mark.slow
    def test_memory_in_a_process_of_its_own(self, tmp_path: Path) -> None:
        """The authors' layer keeps at least J'J of every sample and step."""
        setup = Setup("qcqp", 100, sizes={"instances": 1300})
        found = records(field.measure(CPU, tmp_path, [setup], [1e-6], ["snarenet", "the authors' layer"], repeats=1))
        ours, theirs = found
        assert theirs["MiB"] > theirs["steps"] * 100 * 100 * 100 * 8 / 2**20
        assert 0 < ours["MiB"] < theirs["MiB"] / 4

    @pytest.mark.slow
    @pytest.mark.skipif(original.interpreter() is None, reason="pinet-hcnn is not installed")
    @pytest.mark.parametrize("setup", [NCLP, QCQP], ids=["nclp", "qcqp"])
    def test_the_original_pi_net(self, setup: Setup, tmp_path: Path) -> None:
        """It comes as near to the predictions as a projection can."""
        names = [field.ORIGINAL, "cvxpylayers"]
        theirs, exact = records(field.measure(CPU, tmp_path, [setup], [1e-8], names, repeats=2, memory=False))
        assert theirs["violation"] <= 1e-8
        assert theirs["distance"] == pytest.approx(exact["distance"], rel=1e-4)


def test_the_problems_pieces() -> None:
    problem, y, x = QCQP.load(CPU)
    H, G, upper, C = pieces(problem)
    y = y.detach()
    rows = torch.cat([torch.relu(y.square() @ H.T + y @ G.T - upper), y @ C.T - x], 1)
    torch.testing.assert_close(problem.constraints.residual(y, x), rows)
    with pytest.raises(ValueError, match="`problem` must be an NCLP or a QCQP, but got cbf"):
        pieces(sn.problems.load("cbf"))


class TestRace:
    def run(self, out: Path, reference: Path, **options: Any) -> Benchmark:
        options = {"ladder": (1, 4), "sizes": SIZES, "changes": CHANGES, "reference": reference} | options
        return race.measure(CPU, out, **options)

    @pytest.fixture
    def reference(self, tmp_path: Path) -> Path:
        """Optima that are three below what y = C^+ x achieves: the truth does not matter here."""
        problem = sn.problems.load("nclp", **SIZES)
        x = problem.split("test")
        best = problem.objective(x @ torch.linalg.pinv(pieces(problem)[-1]).T, x) - 3
        np.savez(tmp_path / "optima.npz", nclp=best.numpy())
        return tmp_path / "optima.npz"

    def test_first_run_that_meets_a_target(self, tmp_path: Path, reference: Path, alone: None) -> None:
        names = ("snare", "hardnet", race.ORIGINAL)
        ours, hardnet, package = records(self.run(tmp_path, reference, methods=names, targets=(10.0, 1e-9)))
        for row, tol in ((ours, 1e-8), (hardnet, 1e-6)):
            assert row["feasible to"] == tol
            assert row["epochs to 1.0e+01"] == 1
            assert 0 < row["s to 1.0e+01"] < row["longest run, s"]
            assert row["s to 1.0e-09"] == "not reached"
            assert row["its violation"] <= tol
        assert package["remark"] == "not installed"
        folders = list((tmp_path / "race").iterdir())
        assert len(folders) == 4  # two methods, two runs each
        run = next(sn.Run.open(path) for path in folders if "snare" in path.name)
        arrays = run.read_arrays("evaluation.npz")
        assert arrays is not None
        best = np.load(reference)["nclp"]
        relative = (arrays["objective"] - best) / abs(best)
        expected = np.exp(np.log(relative.clip(1e-16)).mean())
        assert ours["best gap"] <= expected * (1 + 1e-12)

    def test_done_runs_are_read(self, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = records(self.run(tmp_path, reference, methods=("snare",), targets=(10.0,)))

        def never(*_: Any, **__: Any) -> None:
            raise AssertionError("trained again")

        monkeypatch.setattr(sn.Trainer, "fit", never)
        assert records(self.run(tmp_path, reference, methods=("snare",), targets=(10.0,))) == first

    def test_the_limit_ends_the_ladder(self) -> None:
        """At a second an epoch, and half a second before the first: four epochs end at 4.5 seconds, eight at 8.5."""
        made = []

        def run(epochs: int) -> race.Rung:
            made.append(epochs)
            return race.Rung(epochs, 0.5 + epochs, 1 / epochs, 1e-7, 1.0)

        assert [r.epochs for r in race._climb(run, (0.01,), 1e-6, (1, 2, 4, 8), 5.0)] == [1, 2, 4]
        assert [r.epochs for r in race._climb(run, (0.3,), 1e-6, (1, 2, 4, 8), 50.0)] == [1, 2, 4]
        assert [r.epochs for r in race._climb(run, (0.3,), 1e-8, (1, 2, 4, 8), 50.0)] == [1, 2, 4, 8]  # infeasible
        assert made == [1, 2, 4, 1, 2, 4, 1, 2, 4, 8]

    def test_unknown_methods(self, tmp_path: Path, reference: Path) -> None:
        with pytest.raises(ValueError, match=r"`methods` are snare, .*, pinet-jax, but got snair"):
            self.run(tmp_path, reference, methods="snair")
        with pytest.raises(ValueError, match=r"`methods` are snarenet; .*, but got snair"):
            field.measure(CPU, tmp_path, methods=("snarenet", "snair"))

    def test_a_file_of_other_instances(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "optima.npz", nclp=np.zeros(3))
        with pytest.raises(ValueError, match=r"`reference` must hold \d+ values under 'nclp'"):
            self.run(tmp_path, tmp_path / "optima.npz")

    @pytest.mark.slow
    @pytest.mark.skipif(original.interpreter() is None, reason="pinet-hcnn is not installed")
    def test_the_original_pi_net(self, tmp_path: Path, reference: Path) -> None:
        """Its network learns, and its test instances are feasible."""
        sizes = SIZES | {"instances": 1000}
        problem = sn.problems.load("nclp", **sizes)
        x = problem.split("test")
        flat = problem.objective(x @ torch.linalg.pinv(pieces(problem)[-1]).T, x)
        np.savez(reference, nclp=flat.numpy() - 3)
        options = {"methods": (race.ORIGINAL,), "targets": (1e-9,), "sizes": sizes, "ladder": (1, 16)}
        (row,) = records(self.run(tmp_path, reference, **options))
        assert row["its violation"] <= 1e-6
        assert row["best gap"] < race.Race(problem, flat - 3, CPU, tmp_path, 1.0, {}).gap(flat)


@pytest.mark.slow
def test_parallel_trains_the_same(tmp_path: Path) -> None:
    changes = {"width": 16, "precision": "float64"}
    table = parallel.measure(CPU, tmp_path, batches={"nclp": 30}, epochs=2, sizes=SIZES, changes=changes)
    one, two, threads = records(table)
    assert [(row["processes"], row["threads each"]) for row in (one, two, threads)] == [(1, 1), (2, 1), (1, 2)]
    assert one["speed-up"] == 1
    assert two["speed-up"] == pytest.approx(one["s per epoch"] / two["s per epoch"])
    assert two["difference"] < 1e-9
    alone = sn.Run.open(tmp_path / "parallel" / "nclp-1x1").metrics()
    together = sn.Run.open(tmp_path / "parallel" / "nclp-2x1").metrics()
    assert together[-1]["loss"] == pytest.approx(alone[-1]["loss"], rel=1e-9)
    assert two["loss"] == together[-1]["loss"]
