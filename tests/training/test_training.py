"""The trainer: what a step does, what a run folder keeps, and that nothing that goes wrong loses anything."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import snarenet as sn
from snarenet.report.page import write_report
from snarenet.training import session
from snarenet.training.best import Best, Kept, Score
from snarenet.training.parts import Network, Optimisation, Repair, Schedule
from snarenet.training.progress import describe, flatten, progress, tensorboard
from snarenet.training.run import FILES

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}


def problem(**changes) -> sn.problems.Problem:
    return sn.problems.load("nclp", **SIZES | changes)


def config(**changes) -> sn.TrainConfig:
    tiny = {"epochs": 4, "batch": 25, "width": 16, "validate_every": 2, "checkpoint_seconds": 0.0}
    return sn.TrainConfig(**tiny | changes)


def fit(out: Path, family: sn.problems.Problem | None = None, resume: Path | None = None, **changes) -> sn.Run:
    family = problem() if family is None else family
    chosen = config(**changes)
    return sn.Trainer(chosen, out, quiet=True).fit(chosen.build(family), family, resume)


class Own(sn.Problem):
    """min |y - x|^2, y >= 0, for positive x."""

    size = 3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inputs", 1 + torch.rand(120, 3, generator=torch.Generator().manual_seed(0)).double())
        self.constraints = sn.Box(0.0, None)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return (y - x).square().sum(1)


def weights(run: sn.Run) -> dict[str, Tensor]:
    return run.read_tensors("model.safetensors")[0]


def torchrun(script: Path) -> None:
    """Run the script in two processes, with patience: on a busy machine each needs its time to import torch."""
    patient = "--rdzv-conf=read_timeout=600,keep_alive_interval=60,heartbeat_timeout=60"
    options = ["--standalone", patient, "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr  # all of it: the cause comes before what torchrun makes of it


def assert_same_weights(a: sn.Run, b: sn.Run) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


class TestConfig:
    def test_recipes(self) -> None:
        paper = sn.TrainConfig.recipe("paper", "nclp")
        found = (paper.batch, paper.width, paper.dropout, paper.lr, paper.penalty, paper.damping, paper.relax_epochs)
        assert found == (200, 200, 0.2, 1e-4, 10.0, 0.01, 500)
        assert sn.TrainConfig.recipe("paper", "qcqp").batch == 100
        assert sn.TrainConfig.recipe("paper", "cbf").relaxation == "soft"
        for family in ("nclp", "qcqp", "ncqcqp-hard"):
            assert sn.TrainConfig.recipe("best", family, epochs=7) == sn.TrainConfig(epochs=7)  # one for all
        policy = sn.TrainConfig.recipe("best", "cbf")
        assert (policy.start, policy.head, policy.epochs) == ("none", 0.01, 30)  # what the problem itself asks for
        assert sn.TrainConfig.recipe("best", sn.problems.load("cbf", instances=12)) == policy
        with pytest.raises(ValueError, match="`name` must be 'best' or 'paper'"):
            sn.TrainConfig.recipe("worst")

    def test_what_the_problem_says_of_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = sn.problems.load("nclp", size=12, inequalities=4, equalities=4, instances=60)
        assert torch.equal(sn.TrainConfig(weights="own").build_layer(problem).weights, torch.ones(12))
        own = torch.linspace(1, 2, 12, dtype=torch.float64)
        monkeypatch.setattr(type(problem), "weights", own)
        for chosen in ("auto", "own"):
            assert torch.equal(sn.TrainConfig(weights=chosen).build_layer(problem).weights, own)
        assert sn.TrainConfig(weights="none").build_layer(problem).weights is None

    @pytest.mark.parametrize(
        ("family", "changes", "descends"),
        [
            ("nclp", {}, True),
            ("qcqp", {}, True),
            ("nclp", {"candidates": 2}, True),
            ("nclp", {"descent": "none"}, False),
            ("nclp", {"start": "none"}, False),
            ("nclp", {"weights": "none"}, False),
            ("forecast", {}, False),  # its objective is what happened in the end
            ("cbf", {}, False),  # a policy
            ("mpc", {}, True),  # rows of any kind
        ],
    )
    def test_where_it_steps_down_the_objective(self, family: str, changes: dict, descends: bool) -> None:
        sizes = {"horizon": 5, "instances": 60} if family == "mpc" else {} if family in ("cbf", "forecast") else SIZES
        problem = sn.problems.load(family, **sizes)
        assert sn.TrainConfig.recipe("best", problem, **changes).build_layer(problem).descends == descends

    @pytest.mark.parametrize(
        ("family", "changes", "start", "damping"),
        [
            ("nclp", {}, "auto", "auto"),
            ("qcqp", {}, "auto", "auto"),
            ("mpc", {}, None, "auto"),
            ("nclp", {"start": "none"}, None, "auto"),
            ("nclp", {"start": 7}, sn.Nearest(7), "auto"),
            ("nclp", {"damping_ratio": 0.2}, "auto", sn.Annealed(10.0, 0.2)),
            ("nclp", {"damping": 0.1}, "auto", sn.Constant(0.1)),
        ],
    )
    def test_the_start_suits_the_rows(self, family: str, changes: dict, start: Any, damping: Any) -> None:
        """Onto rows of any kind nothing is projected without a step down the objective, which needs weights."""
        sizes = {"horizon": 5, "instances": 60} if family == "mpc" else SIZES
        config = sn.TrainConfig(weights="none", **changes)
        options = config.build_layer(sn.problems.load(family, **sizes)).options
        assert (options.start, options.damping) == (start, damping)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [("batch", 0, "`batch` must be at least 1"), ("lr", -1.0, "`lr` must be >= 0"), ("dropout", 1.0, "`dropout`")],
    )
    def test_wrong_values(self, field: str, value: float, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            sn.TrainConfig(**{field: value})

    @pytest.mark.parametrize("field", dataclasses.fields(sn.TrainConfig), ids=lambda field: field.name)
    def test_every_field_is_checked_by_name(self, field: dataclasses.Field) -> None:
        wrong = [None, "neither", torch.nan, [1], 1 if isinstance(field.default, bool) else True]
        for value in wrong[field.default is None :]:  # a damping may be None
            with pytest.raises(ValueError, match=rf"^`{field.name}` must be .*but got {re.escape(repr(value))}"):
                sn.TrainConfig(**{field.name: value})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"optimizer": "sgd"}, "`optimizer` must be one of muon, adamw, but got 'sgd'"),
            ({"tol": -1}, "`tol` must be >= 0 and finite, but got -1"),
            ({"tol": 1e-17}, "`tol` = 1e-17 is finer than torch.float64 can keep"),
            ({"test_tol": torch.inf}, "`test_tol` must be >= 0 and finite, but got inf"),
            ({"epochs": 2.5}, "`epochs` must be >= 0 and a whole number, but got 2.5"),
            ({"damping_ratio": 1.5}, r"`damping_ratio` must be in \[0, 1\], but got 1.5"),
            ({"method": "hardnett"}, "`method` must be one of snare, .*did you mean 'hardnet'"),
            ({"keep": "worst"}, "`keep` must be one of best, last, but got 'worst'"),
        ],
        ids=str,
    )
    def test_errors_say_what_is_expected(self, changes: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            sn.TrainConfig(**changes)

    def test_numbers_at_the_edge(self) -> None:
        edge = sn.TrainConfig(epochs=0, depth=0, lr=0, damping_ratio=1, tol=0.0, checkpoint_seconds=torch.inf, seed=-1)
        assert sn.TrainConfig.from_dict(edge.to_dict()) == edge

    def test_the_parts_make_the_whole(self) -> None:
        names = [
            {field.name for field in dataclasses.fields(part)} for part in (Network, Optimisation, Repair, Schedule)
        ]
        assert set.union(*names) == {field.name for field in dataclasses.fields(sn.TrainConfig)}
        assert all(a & b == {"seed"} for a, b in itertools.combinations(names, 2))
        assert (
            Network(width=8, seed=3).build_net(4, 2)[0].weight.equal(config(width=8, seed=3).build_net(4, 2)[0].weight)
        )
        assert Repair(method="soft").build_layer(problem()).title == "Soft + projection"
        with pytest.raises(ValueError, match="`width` must be at least 1"):
            Network(width=0)

    def test_files_older_than_a_field(self) -> None:
        once = {
            "start": "none",
            "weights": "none",
            "descent": "none",
            "standardise": False,
            "proximity": 0.0,
            "keep": "last",
        }
        once |= {"damping_start": 10.0, "damping_ratio": 0.6}
        assert sn.TrainConfig.from_dict({"epochs": 3}) == sn.TrainConfig(epochs=3, **once)
        named = {"nearest": 35, "curvature": True, "damping_start": 1e-3, "damping_ratio": 0.1, "proximity": 0.5}
        assert sn.TrainConfig.from_dict(named) == sn.TrainConfig(
            **once | {"start": 35, "weights": "own", "damping_start": 1e-3, "damping_ratio": 0.1, "proximity": 0.5}
        )
        unused = sn.TrainConfig.from_dict({"nearest": 0, "curvature": True})
        assert (unused.start, unused.weights) == ("none", "none")  # weights were for the start alone
        assert sn.TrainConfig.from_dict(sn.TrainConfig(epochs=3).to_dict()) == sn.TrainConfig(epochs=3)

    def test_wrong_names_suggest_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"'epoch' is no field .* did you mean 'epochs'"):
            sn.TrainConfig().replace(epoch=3)
        with pytest.raises(ValueError, match="`activation` must be one of silu"):
            sn.TrainConfig(activation="elu")  # pyright: ignore

    def test_learning_rate(self) -> None:
        cosine = sn.TrainConfig(lr=2.0, warmup=0.1)
        rates = [cosine.lr_at(step, 100) for step in range(100)]
        assert rates[0] == pytest.approx(0.2)
        assert rates[9] == rates[10] == 2.0
        assert rates[55] == pytest.approx(1.0)
        assert rates[99] < 2e-3
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert sn.TrainConfig(lr=2.0, warmup=0.0, schedule="constant").lr_at(99, 100) == 2.0

    def test_networks(self) -> None:
        net = config(init="kaiming", width=500, precision="float64", dropout=0.1, batch_norm=True).build_net(40, 3)
        assert net[0].weight.dtype == torch.float64
        assert net[0].weight.std().item() == pytest.approx((2 / 40) ** 0.5, rel=0.05)
        small = config(head=0.01).build_net(4, 3)[-1].weight
        torch.testing.assert_close(small, 0.01 * config().build_net(4, 3)[-1].weight)
        state = torch.get_rng_state()
        same = [config(seed=s).build_net(4, 3)[0].weight for s in (1, 1, 2)]
        assert torch.equal(same[0], same[1])
        assert not torch.equal(same[0], same[2])
        assert torch.equal(torch.get_rng_state(), state)


class TestMetrics:
    def test_formulas_of_the_paper(self) -> None:
        errors = torch.tensor([[0.0, 2e-4, 1e-3], [1e-2, 0.0, 0.0]], dtype=torch.float64)
        objective = torch.tensor([1.0, 3.0], dtype=torch.float64)
        zero = torch.zeros(2, dtype=torch.float64)
        outcome = sn.problems.Outcome(
            objective, objective, zero, zero, errors, errors.amax(1), torch.tensor([3, 5]), torch.tensor([True, False])
        )
        equal = torch.tensor([False, False, True])
        found = sn.training.metrics.summarize(outcome, equal, torch.tensor([0.5, 3.1], dtype=torch.float64))
        assert found["ineq"]["max"] == 1e-2
        expected = ((1e-16 * 2e-4) ** 0.5 * (1e-2 * 1e-16) ** 0.5) ** 0.5
        assert found["ineq"]["gmean"] == pytest.approx(expected)
        assert found["eq"] == pytest.approx({"max": 1e-3, "mean": 5e-4, "gmean": (1e-3 * 1e-16) ** 0.5})
        assert found["violations"] == 1.0  # one row above 1e-4 in each
        assert found["feasible"]["1e-01"] == 1.0
        assert found["feasible"]["1e-02"] == 0.5
        assert found["feasible"]["1e-04"] == 0.0
        gap = found["gap"]
        assert gap["max"] == pytest.approx(0.5)
        assert gap["gmean"] == pytest.approx((0.5 * 1e-16) ** 0.5)  # a negative gap counts as 1e-16
        assert gap["mean"] == pytest.approx(0.2)
        assert gap["negative"] == 0.5
        assert gap["relative"] == pytest.approx((0.5 / 0.5 - 0.1 / 3.1) / 2)
        assert found["steps"] == {"median": 3.0, "max": 5}
        assert found["converged"] == 0.5
        assert found["objective"] == {"mean": 2.0, "max": 3.0}

    def test_unknown_references_do_not_spoil_the_rest(self) -> None:
        gaps = sn.training.metrics.gaps
        nan = torch.nan
        found = gaps(torch.tensor([1.0, nan, 3.0]), torch.tensor([2.0, nan, 2.0]))
        assert (found["mean"], found["instances"]) == (2.0, 2)
        assert gaps(torch.tensor([nan]), torch.tensor([nan])) is None
        assert gaps(torch.tensor([-1.0, 0.0, 1e-9, 3.0]), torch.ones(4))["negative"] == 0.25


class TestStep:
    @pytest.mark.filterwarnings("ignore::snarenet.RepairWarning")
    @pytest.mark.parametrize(("reduction", "penalised"), [("mean", "squares"), ("sum", "squares"), ("mean", "sizes")])
    def test_the_loss_is_what_the_config_says(self, tmp_path: Path, reduction: str, penalised: str) -> None:
        """One step on one batch equals AdamW on the loss written out by hand, where two steps leave violations."""
        changes = {"epochs": 1, "batch": 1000, "penalty": 3.0, "proximity": 0.5, "reduction": reduction, "clip": 1e-3}
        changes |= {"penalised": penalised, "start": "none", "max_steps": 2, "rescue": False, "damping": 1.0}
        changes |= {"optimizer": "adamw", "warmup": 0.0, "schedule": "constant", "weight_decay": 0.1}
        family, chosen = problem(), config(**changes)
        model, by_hand = chosen.build(family), chosen.build(family)
        sn.Trainer(chosen, tmp_path, quiet=True).fit(model, family)
        x = family.split("train")
        by_hand.layer.tol = chosen.tol
        solution = by_hand.solve(x)
        violation = family.constraints.residual(solution.value, x)
        assert violation.abs().max() > 0.01
        added = violation.square() if penalised == "squares" else violation.abs()
        loss = family.objective(solution.value, x) + 3 * added.sum(1)
        loss = loss + 0.5 * (solution.value - solution.raw).square().sum(1)
        optimizer = torch.optim.AdamW(by_hand.parameters(), lr=chosen.lr, weight_decay=0.1)
        getattr(loss, reduction)().backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1e-3)
        optimizer.step()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, by_hand.state_dict()[name], rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("proximity", ["auto", 0.0])
    def test_stuck_outputs_are_said(self, tmp_path: Path, proximity: str | float) -> None:
        """Predictions far below y >= 0 get no gradient; without the pull a warning says so, once."""

        changes = {"optimizer": "adamw", "lr": 0.2, "warmup": 0.0, "schedule": "constant", "validate_every": 1}
        family, chosen = Own(), config(proximity=proximity, standardise=False, descent="none", **changes)
        net = torch.nn.Linear(3, 3)
        with torch.no_grad():
            net.weight.zero_()
            net.bias.fill_(-1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = sn.Trainer(chosen, tmp_path, quiet=True).fit(chosen.build(family, net), family)
        said = [str(warning.message) for warning in caught if "sit on a bound" in str(warning.message)]
        last = run.metrics()[-1]["valid"]
        if proximity == "auto":
            assert not said
            assert last["tight"] == last["stuck"] == 0.0
        else:
            assert len(said) == 1
            assert "100% of the outputs" in said[0]
            assert last["tight"] == last["stuck"] == 1.0

    def test_soft_epochs_leave_the_repair_out(self, tmp_path: Path) -> None:
        run = fit(tmp_path, relaxation="soft", relax_epochs=2, penalty=10.0, start="none")
        lines = run.metrics()
        assert [line["steps"] == 0 for line in lines] == [True, True, False, False]
        assert lines[1]["violation"] > 1e-3 > lines[2]["violation"]

    def test_relaxation_shrinks_to_nothing(self, tmp_path: Path) -> None:
        lines = fit(tmp_path, relaxation="adarel", relax_epochs=3).metrics()
        relax = [line["relax"] for line in lines]
        assert relax == pytest.approx([relax[0], relax[0] * 2 / 3, relax[0] / 3, 0])
        assert lines[0]["violation"] > 1e-3
        assert lines[-1]["violation"] <= 1e-6
        assert max(line["valid"]["violation"] for line in lines if "valid" in line) <= 1e-8  # always the true set

    def test_averaged_weights(self, tmp_path: Path) -> None:
        """What is evaluated and kept is the running average."""
        run = fit(tmp_path, average=0.9)
        tensors, _ = run.read_tensors("checkpoint.safetensors")
        last, mean = tensors["model.net.0.weight"], tensors["average.net.0.weight"]
        assert not torch.equal(last, mean)
        assert torch.equal(weights(run)["net.0.weight"], mean)

    def test_fresh_inputs(self, tmp_path: Path) -> None:
        seen = []

        class Watched(type(problem())):
            def run(self, model, x, relax=None):
                seen.append(x)
                return super().run(model, x, relax)

        family = Watched(**SIZES)
        fit(tmp_path, family, fresh=True, epochs=1, validate_every=9)
        drawn = torch.cat(seen[:4])
        assert drawn.shape == (100, 2)
        assert not any((family.inputs == row).all(1).any() for row in drawn)
        assert drawn.abs().max() <= 1

    def test_no_way_to_draw_fresh_inputs(self, tmp_path: Path) -> None:
        class Bare(type(problem())):
            sample = sn.problems.Problem.sample

        with pytest.raises(ValueError, match="does not say how to draw fresh inputs"):
            fit(tmp_path, Bare(**SIZES), fresh=True)


class TestRun:
    @pytest.mark.parametrize(("descent", "learned"), [("none", 0.1), ("auto", 0.001)])  # which is near from the start
    def test_it_learns_and_keeps_everything(self, tmp_path: Path, descent: str, learned: float) -> None:
        state = torch.get_rng_state()
        family, chosen = problem(), config(epochs=30, descent=descent)
        model = chosen.build(family)
        run = sn.Trainer(chosen, tmp_path / "deep" / "run", quiet=True).fit(model, family)
        assert torch.equal(torch.get_rng_state(), state)  # the user's random numbers are left alone
        lines = run.metrics()
        assert [line["epoch"] for line in lines] == list(range(1, 31))
        assert lines[-1]["loss"] < lines[0]["loss"] - learned
        assert lines[-1]["valid"]["violation"] <= 1e-8
        assert not model.training
        x = family.split("test")
        loaded = sn.load_model(tmp_path / "deep" / "run")
        assert torch.equal(loaded(x), model(x))
        assert loaded.layer.tol == 1e-8
        assert json.loads((run.path / "environment.json").read_text())["torch"] == torch.__version__
        assert sn.Run.open(run.path).config == chosen

    def test_several_candidates(self, tmp_path: Path) -> None:
        """All learn, what is evaluated is the best, and it is loaded again as it was."""
        family, chosen = problem(), config(epochs=6, candidates=2)
        model = chosen.build(family)
        before = [part.clone() for part in model.net[-1].weight.detach().chunk(2)]
        run = sn.Trainer(chosen, tmp_path / "run", quiet=True).fit(model, family)
        assert all(not torch.equal(a, b) for a, b in zip(before, model.net[-1].weight.chunk(2), strict=True))
        x = family.split("test")
        layer = config(epochs=6).build_layer(family)
        values = torch.stack([family.objective(layer(y, x), x) for y in model.raw(x).chunk(2, 1)])
        torch.testing.assert_close(family.objective(model(x), x), values.amin(0), rtol=1e-6, atol=1e-8)
        assert torch.equal(sn.load_model(run.path)(x), model(x))
        assert run.metrics()[-1]["valid"]["converged"] == 1

    def test_too_few_instances_to_validate(self, tmp_path: Path) -> None:
        family = problem(instances=5)
        run = fit(tmp_path, family)
        assert not any("valid" in line for line in run.metrics())
        assert run.kept() == Kept(4, 4, None)
        with pytest.raises(ValueError, match="nothing to evaluate: 5 instances leave none for 'valid'"):
            sn.evaluate(run.load_model(family), family, "valid")

    def test_callbacks_see_every_line(self, tmp_path: Path) -> None:
        seen = []
        chosen, family = config(epochs=2), problem()
        sn.Trainer(chosen, tmp_path, callbacks=[seen.append], quiet=True).fit(chosen.build(family), family)
        assert [line["epoch"] for line in seen] == [1, 2]

    def test_the_gap_is_shown_where_a_reference_is_given(self, tmp_path: Path) -> None:
        family, chosen = problem(), config(epochs=2)
        best = torch.full((len(family.split("valid")),), -100.0, dtype=torch.float64)
        run = sn.Trainer(chosen, tmp_path, reference=best, quiet=True).fit(chosen.build(family), family)
        assert run.metrics()[-1]["valid"]["gap"]["mean"] > 50

    def test_default_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        family, chosen = problem(), config(epochs=1)
        run = sn.Trainer(chosen, quiet=True).fit(chosen.build(family), family)
        assert run.path.parent == Path("runs")
        assert run.path.name.startswith("nclp-")

    def test_a_problem_and_a_network_of_ones_own(self, tmp_path: Path) -> None:
        family, chosen = problem(), config(epochs=1)
        family.name = ""
        net = torch.nn.Linear(2, 8)
        model = sn.ConstrainedModel(net, chosen.build_layer(family))
        sn.Trainer(chosen, tmp_path, quiet=True).fit(model, family)
        with pytest.raises(sn.RunError, match="a problem of your own: pass it as `problem`"):
            sn.load_model(tmp_path)
        with pytest.raises(sn.RunError, match="the saved weights do not fit"):
            sn.load_model(tmp_path, family)
        loaded = sn.load_model(tmp_path, family, torch.nn.Linear(2, 8))
        assert torch.equal(loaded(family.split("test")), model(family.split("test")))

    def test_no_other_file_types_the_names_of_its_files(self) -> None:
        root = Path(sn.__file__).parents[2]
        sources = [*root.glob("src/**/*.py"), *root.glob("lab/src/**/*.py")]
        names = "|".join(re.escape(name) for name in FILES if name != "report.html")  # other folders have one, too
        assert [file.name for file in sources if re.search(names, file.read_text())] == ["run.py"]

    def test_a_folder_of_the_first_version(self, tmp_path: Path) -> None:
        """Written by snarenet 0.1: it loads, evaluates to the numbers that were noted then, and goes on."""
        shutil.copytree(OLD, tmp_path / "run")
        run, family = sn.Run.open(tmp_path / "run"), problem()
        assert run.config == config(**OLD_CONFIG)
        assert run.kept() is None
        noted, known = run.summary(), run.instances()
        assert noted is not None
        assert known is not None
        found = sn.evaluate(run.load_model(), family, timed=False)
        for name in ("instances", "objective", "tol", "converged"):
            assert found.summary[name] == pytest.approx(noted[name], rel=1e-8), name
        assert found.arrays["objective"] == pytest.approx(known["objective"], rel=1e-7)  # weights act in all steps now
        write_report(run.path)
        longer = fit(run.path, resume=run.path, **OLD_CONFIG | {"epochs": 6, "keep": "best"})
        assert [line["epoch"] for line in longer.metrics()] == [1, 2, 3, 4, 5, 6]
        kept = longer.kept()
        assert kept is not None
        assert (kept.epoch, kept.last) == (6, 6)


OLD = Path(__file__).parent / "data" / "run-0.1"
OLD_CONFIG = {
    "width": 8,
    "descent": "none",
    "record": 0,
    "schedule": "constant",
    "warmup": 0.0,
    "average": 0.5,
    "start": 35,
    "weights": "own",
    "standardise": False,
    "proximity": 0.0,
    "damping_start": 1e-3,
    "damping_ratio": 0.1,
    "checkpoint_seconds": 30.0,
    "keep": "last",
}


def scripted(scores: dict[int, list[tuple[float, float]]], monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Let validations find these (share converged, mean objective), epoch by epoch, seed by seed."""
    real, seen = session.Session._validate, session.evaluate

    def validate(self: session.Session, member: session.Member, reference: Tensor | None) -> dict:
        told = scores[self.epoch][self.members.index(member)]

        def evaluate(*args, **options) -> sn.training.Evaluation:
            found = seen(*args, **options)
            mean = {"mean": told[1], "max": told[1]}
            return found._replace(summary=found.summary | {"converged": told[0], "objective": mean})

        session.evaluate = evaluate
        try:
            return real(self, member, reference)
        finally:
            session.evaluate = seen

    if monkeypatch is None:
        session.Session._validate = validate
    else:
        monkeypatch.setattr(session.Session, "_validate", validate)


CONSTANT = {"schedule": "constant", "warmup": 0.0, "validate_every": 1}  # a shorter run is the beginning of a longer
SECOND = {1: [(1.0, 3.0)], 2: [(1.0, 1.0)], 3: [(1.0, 2.0)], 4: [(0.9, 0.0)]}  # is the best: the fourth misses some


class TestKeep:
    def test_scores(self) -> None:
        def score(converged: float, mean: float) -> Score | None:
            return Score.of(1, {"instances": 10, "converged": converged, "objective": {"mean": mean}})

        model, best = config().build(problem()), Best()
        order = [(0.1, -9.0), (0.8, 5.0), (0.8, 4.0), (1.0, 7.0), (1.0, 6.0)]  # from worse to better
        for told in order:
            with torch.no_grad():
                model.net[0].weight.fill_(told[1])
            best.offer(score(*told), model)
            assert best.score == score(*told)
        model.net[0].weight.data.fill_(0.0)
        for worse in [*order, (0.0, -99.0), (1.0, torch.nan), (1.0, torch.inf)]:
            best.offer(score(*worse), model)
        assert best.score == Score(0, 6.0, 1, 10)
        assert (best.tensors["net.0.weight"] == 6.0).all()  # a copy, of the first of its score
        assert score(0.0, 1.0) is None
        assert score(1.0, torch.nan) is None

    @pytest.mark.parametrize("changes", [{}, {"average": 0.8}, {"batch_norm": True}], ids=str)
    def test_the_best_are_returned_and_the_last_are_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict
    ) -> None:
        short = fit(tmp_path / "short", epochs=2, keep="last", **CONSTANT, **changes)
        long = fit(tmp_path / "long", epochs=4, keep="last", **CONSTANT, **changes)
        scripted(SECOND, monkeypatch)
        family, chosen = problem(), config(epochs=4, **CONSTANT, **changes)
        model = chosen.build(family)
        run = sn.Trainer(chosen, tmp_path / "run", quiet=True).fit(model, family)
        assert_same_weights(run, short)
        assert run.kept() == Kept(2, 4, Score(0, 1.0, 2, 10))
        assert [line["best"] for line in run.metrics()] == [1, 2, 2, 2]
        x = family.split("test")
        assert torch.equal(model(x), sn.load_model(short.path)(x))
        assert torch.equal(sn.load_model(run.path, keep="best")(x), model(x))
        assert torch.equal(sn.load_model(run.path, keep="last")(x), sn.load_model(long.path)(x))
        (run.path / "model.safetensors").unlink()
        assert torch.equal(sn.load_model(run.path)(x), model(x))  # as if it had been stopped

    def test_the_last_are_returned_if_so_asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        long = fit(tmp_path / "long", **CONSTANT, keep="last")
        scripted(SECOND, monkeypatch)
        run = fit(tmp_path / "run", **CONSTANT, keep="last")
        assert_same_weights(run, long)
        assert run.kept() == Kept(4, 4, Score(0, 1.0, 2, 10))
        again = fit(tmp_path / "run", resume=run.path, **CONSTANT, keep="best")  # which is not too late
        assert again.kept() == Kept(2, 4, Score(0, 1.0, 2, 10))
        assert sn.TrainConfig.recipe("paper", "nclp").keep == "last"

    def test_nothing_feasible_means_the_last(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        scripted({epoch: [(0.0, -epoch)] for epoch in range(1, 5)}, monkeypatch)
        run = fit(tmp_path, **CONSTANT)
        assert run.kept() == Kept(4, 4, None)
        assert not any("best" in line for line in run.metrics())
        with pytest.raises(sn.RunError, match="has no best weights: no validation found a feasible output"):
            run.load_model(keep="best")

    @pytest.mark.parametrize("changes", [{}, {"average": 0.8}], ids=str)
    def test_after_a_kill(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict) -> None:
        """Killed in epoch 4, after the checkpoint of epoch 3: the weights of epoch 2 come back, bit for bit."""
        code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
import snarenet as sn, test_training as t
def kill(line):
    if line["epoch"] == 4: os.kill(os.getpid(), signal.SIGKILL)
t.scripted(t.SECOND)
family, chosen = t.problem(), t.config(**t.CONSTANT, **{changes!r})
sn.Trainer(chosen, {str(tmp_path / "cut")!r}, callbacks=[kill], quiet=True).fit(chosen.build(family), family)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        scripted(SECOND, monkeypatch)
        whole = fit(tmp_path / "whole", **CONSTANT, **changes)
        resumed = fit(tmp_path / "cut", resume=tmp_path / "cut", **CONSTANT, **changes)
        assert_same_weights(whole, resumed)
        assert whole.kept() == resumed.kept() == Kept(2, 4, Score(0, 1.0, 2, 10))
        mine, theirs = (run.read_checkpoint()[0] for run in (whole, resumed))
        for group in ("model", "best", *(["average"] if changes else [])):
            assert all(torch.equal(tensor, theirs[group][name]) for name, tensor in mine[group].items()), group

    def test_every_seed_has_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        exact = {**CONSTANT, "precision": "float64", "optimizer": "adamw"}
        alone = [fit(tmp_path / f"{s}", seed=s, epochs=e, keep="last", **exact) for s, e in ((5, 3), (6, 1))]
        scripted({e: [(1.0, abs(e - 3)), (1.0, abs(e - 1))] for e in range(1, 5)}, monkeypatch)
        runs = sn.Trainer(config(**exact), tmp_path / "seeds", quiet=True).fit_seeds([5, 6], problem())
        assert [run.kept().epoch for run in runs] == [3, 1]  # pyright: ignore
        for one, other in zip(alone, runs, strict=True):
            for name, tensor in weights(one).items():
                torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-8, atol=1e-9)

    def test_in_two_processes(self, tmp_path: Path) -> None:
        """The leader chooses: what the other process returns is what the leader wrote."""
        script = tmp_path / "train.py"
        script.write_text(f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
import test_training as t, snarenet as sn
from safetensors.torch import save_file
from snarenet.training.distributed import Group
lead = Group.join(torch.device("cpu")).leads
t.scripted(t.SECOND if lead else {{e: [(1.0, -e)] for e in range(1, 5)}})  # they do not agree
family, chosen = t.problem(), t.config(**t.CONSTANT)
model = chosen.build(family)
sn.Trainer(chosen, {str(tmp_path / "two")!r}, quiet=True).fit(model, family)
if not lead: save_file(model.state_dict(), {str(tmp_path / "other.safetensors")!r})
torch.distributed.barrier()
import os; os._exit(0)  # as below
""")
        torchrun(script)
        run = sn.Run.open(tmp_path / "two")
        assert run.kept() == Kept(2, 4, Score(0, 1.0, 2, 10))
        other = load_file(tmp_path / "other.safetensors")
        assert all(torch.equal(tensor, other[name]) for name, tensor in weights(run).items())
        short = fit(tmp_path / "short", epochs=2, keep="last", **CONSTANT)
        for name, tensor in weights(short).items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)  # Muon magnifies rounding

    def test_it_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """At the end of training, in the evaluation, and on the page."""
        scripted(SECOND, monkeypatch)
        family, chosen = problem(), config(**CONSTANT)
        model = chosen.build(family)
        run = sn.Trainer(chosen, tmp_path).fit(model, family)
        sentence = (
            "The weights are those of epoch 2 of 4, the best on the validation instances (none of 10 misses the "
            "tolerance, mean objective 1); the checkpoint also has the last."
        )
        told = capsys.readouterr().err.splitlines()
        assert told[-1] == f"nclp · SnareNet · seed 0: {sentence}"
        assert "best in epoch 2" in told[-2]
        run.save_evaluation(*sn.evaluate(model, family, timed=False))
        summary = run.summary()
        assert summary is not None
        assert summary["weights"] == {
            "epoch": 2,
            "last": 4,
            "best": {"missed": 0, "objective": 1.0, "epoch": 2, "instances": 10},
        }
        assert sentence in write_report(run.path).read_text()

    @pytest.mark.parametrize(
        ("kept", "words"),
        [
            (Kept(4, 4, None), "of the last epoch, 4, as no validation found a feasible output."),
            (
                Kept(4, 4, Score(1, 2.5, 4, 10)),
                "epoch 4 of 4, the last, and the best .* (1 of 10 miss the tolerance, mean",
            ),
            (
                Kept(4, 4, Score(0, 2.5, 2, 10)),
                "epoch 4 of 4, the last; those of epoch 2 were better on the validation",
            ),
        ],
    )
    def test_sentences(self, kept: Kept, words: str) -> None:
        assert re.search(words.replace("(1", r"\(1"), kept.sentence())
        assert Kept.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept


RESUMED = [
    {},
    {"dropout": 0.3, "batch_norm": True},
    {"relaxation": "adarel", "relax_epochs": 5, "fresh": True},
    {"average": 0.8, "precision": "float64"},
]


class TestResume:
    @pytest.mark.parametrize("changes", RESUMED, ids=lambda changes: "-".join(changes) or "plain")
    def test_after_a_kill_training_continues_bit_for_bit(self, tmp_path: Path, changes: dict) -> None:
        whole = fit(tmp_path / "whole", epochs=6, **changes)
        code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
import snarenet as sn, test_training as t
def kill(line):
    if line["epoch"] == 4: os.kill(os.getpid(), signal.SIGKILL)
family, chosen = t.problem(), t.config(epochs=6, **{changes!r})
sn.Trainer(chosen, {str(tmp_path / "cut")!r}, callbacks=[kill], quiet=True).fit(chosen.build(family), family)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        cut = sn.Run.open(tmp_path / "cut")
        assert cut.read_tensors("checkpoint.safetensors")[1]["epoch"] == 3
        assert len(cut.metrics()) == 4  # the fourth epoch was logged, but not saved
        with open(cut.path / "metrics.jsonl", "a") as file:
            file.write('{"epoch": 5, "los')  # a line that the kill cut off
        resumed = fit(tmp_path / "ignored", resume=tmp_path / "cut", epochs=6, **changes)
        assert_same_weights(whole, resumed)
        assert [line["loss"] for line in resumed.metrics()] == [line["loss"] for line in whole.metrics()]

    def test_an_unfinished_run_can_be_loaded(self, tmp_path: Path) -> None:
        run = fit(tmp_path, average=0.5)
        x = problem().split("test")
        finished = sn.load_model(tmp_path)(x)
        (run.path / "model.safetensors").unlink()
        assert torch.equal(sn.load_model(tmp_path)(x), finished)

    def test_more_epochs_of_a_constant_learning_rate(self, tmp_path: Path) -> None:
        constant = {"schedule": "constant", "warmup": 0.0}
        whole = fit(tmp_path / "whole", epochs=5, **constant)
        fit(tmp_path / "part", epochs=2, **constant)
        longer = fit(tmp_path / "part", resume=tmp_path / "part", epochs=5, **constant)
        assert_same_weights(whole, longer)
        assert sn.Run.open(tmp_path / "part").config.epochs == 5
        fit(tmp_path / "cosine", epochs=2)
        with pytest.raises(sn.RunError, match="another configuration: epochs was 2, not 5"):
            fit(tmp_path / "cosine", resume=tmp_path / "cosine", epochs=5)

    def test_a_finished_run_has_nothing_left_to_do(self, tmp_path: Path) -> None:
        first = fit(tmp_path)
        before = weights(first)
        again = fit(tmp_path, resume=tmp_path)
        assert all(torch.equal(before[name], tensor) for name, tensor in weights(again).items())


class TestMishaps:
    def test_a_folder_that_holds_a_run(self, tmp_path: Path) -> None:
        fit(tmp_path, epochs=1)
        with pytest.raises(sn.RunError, match="already holds a run; resume it"):
            fit(tmp_path, epochs=1)

    def test_another_problem(self, tmp_path: Path) -> None:
        fit(tmp_path)
        with pytest.raises(sn.RunError, match=r"a run of another problem \(nclp\)"):
            fit(tmp_path, problem(seed=1), resume=tmp_path)

    def test_another_configuration(self, tmp_path: Path) -> None:
        fit(tmp_path)
        with pytest.raises(sn.RunError, match=r"another configuration: lr was 0\.005, not 0\.02"):
            fit(tmp_path, resume=tmp_path, lr=0.02)

    def test_how_nothing_is_measured_does_not_matter(self, tmp_path: Path) -> None:
        fit(tmp_path / "exact", epochs=1)
        assert fit(tmp_path / "exact", resume=tmp_path / "exact", epochs=1, relax_mode="train").metrics()
        fit(tmp_path / "relaxed", epochs=1, relaxation="adarel")
        with pytest.raises(sn.RunError, match="another configuration: relax_mode was 'eval', not 'train'"):
            fit(tmp_path / "relaxed", resume=tmp_path / "relaxed", epochs=1, relaxation="adarel", relax_mode="train")

    def test_no_run_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(sn.RunError, match=r"holds no run: it has no config\.json"):
            sn.load_model(tmp_path)

    def test_a_config_of_another_version(self, tmp_path: Path) -> None:
        run = fit(tmp_path, epochs=1)
        saved = json.loads((run.path / "config.json").read_text())
        saved["config"]["colour"] = "green"
        run.write_json("config.json", saved)
        with pytest.raises(sn.RunError, match="not written by this version of snarenet: 'colour'"):
            sn.Run.open(tmp_path)

    def test_a_truncated_checkpoint(self, tmp_path: Path) -> None:
        run = fit(tmp_path)
        file = run.path / "checkpoint.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(sn.RunError, match="is damaged or not a checkpoint"):
            fit(tmp_path, resume=tmp_path)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else entirely"])
    def test_a_file_of_something_else(self, tmp_path: Path, content: bytes) -> None:
        run = fit(tmp_path)
        (run.path / "checkpoint.safetensors").write_bytes(content)
        with pytest.raises(sn.RunError, match="is damaged or not a checkpoint"):
            fit(tmp_path, resume=tmp_path)

    def test_a_checkpoint_of_another_run(self, tmp_path: Path) -> None:
        mine, other = fit(tmp_path / "mine"), fit(tmp_path / "other", problem(seed=1))
        (mine.path / "checkpoint.safetensors").write_bytes((other.path / "checkpoint.safetensors").read_bytes())
        with pytest.raises(sn.RunError, match="belongs to another run"):
            fit(mine.path, resume=mine.path)

    def test_a_run_without_a_checkpoint(self, tmp_path: Path) -> None:
        run = fit(tmp_path)
        (run.path / "checkpoint.safetensors").unlink()
        with pytest.raises(sn.RunError, match=r"a finished model, but no checkpoint\.safetensors to go on from"):
            fit(tmp_path, resume=tmp_path)
        assert weights(run)  # is still there

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
    def test_a_full_or_read_only_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        """The failed write leaves the last good checkpoint and no debris, and the run can be resumed."""
        whole = fit(tmp_path / "whole")
        saved = 0

        def replace(source: str, target: str) -> None:
            nonlocal saved
            if Path(target).name == "checkpoint.safetensors":
                saved += 1  # the first is that of the untrained model
                if saved == 4:
                    raise OSError(code, os.strerror(code))
            real(source, target)

        real = os.replace
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(sn.RunError, match=f"{os.strerror(code)}; what was saved before is intact"):
            fit(tmp_path / "cut")
        monkeypatch.undo()
        assert not [file for file in (tmp_path / "cut").iterdir() if file.name.endswith(".new")]
        assert sn.Run.open(tmp_path / "cut").read_tensors("checkpoint.safetensors")[1]["epoch"] == 2
        assert_same_weights(whole, fit(tmp_path / "cut", resume=tmp_path / "cut"))

    def test_metrics_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").mkdir()
        with pytest.raises(sn.RunError, match=r"cannot write .*metrics\.jsonl"):
            fit(tmp_path)

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(sn.RunError, match="cannot make the folder"):
            fit(tmp_path / "file" / "run")

    def test_training_that_breaks_down_keeps_the_last_checkpoint(self, tmp_path: Path) -> None:
        """Weights that are not numbers end the training, and are not saved over those that were."""
        family, chosen, steps = problem(), config(), count()
        model = chosen.build(family)
        per_epoch = -(-len(family.split("train")) // chosen.batch)
        spoiled = 2 * per_epoch + 1  # in the third epoch
        model.net[0].weight.register_hook(lambda gradient: gradient * torch.nan if next(steps) == spoiled else gradient)
        with pytest.raises(FloatingPointError, match="seed 0 broke down in epoch 3: its weights are no longer numbers"):
            sn.Trainer(chosen, tmp_path, quiet=True).fit(model, family)
        run = sn.Run.open(tmp_path)
        tensors, state = run.read_tensors("checkpoint.safetensors")
        assert state["epoch"] == 2
        assert all(tensor.isfinite().all() for name, tensor in tensors.items() if name.startswith("model.net."))
        assert len(run.metrics()) == 2

    def test_an_objective_without_a_derivative_is_refused(self, tmp_path: Path) -> None:
        class Detached(Own):
            def objective(self, y: Tensor, x: Tensor) -> Tensor:
                return super().objective(y.detach(), x)

        with pytest.raises(ValueError, match=r"`objective\(y, x\)` has no derivative in `y`.* detached\?"):
            fit(tmp_path, Detached())

    def test_an_objective_outside_its_domain_is_said_once(self, tmp_path: Path) -> None:
        """Its value is no number there, its gradient may be one."""

        class Outside(Own):
            def objective(self, y: Tensor, x: Tensor) -> Tensor:
                return (y - 100).log().sum(1)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = fit(tmp_path, Outside())
        said = [str(one.message) for one in caught if "the objective of some outputs" in str(one.message)]
        assert len(said) == 1
        assert "was no number in epoch 1" in said[0]
        assert len(run.metrics()) == 4

    def test_an_interrupt_keeps_the_last_checkpoint(self, tmp_path: Path) -> None:
        def interrupt(line: dict) -> None:
            if line["epoch"] == 3:
                raise KeyboardInterrupt

        family, chosen = problem(), config()
        with pytest.raises(KeyboardInterrupt):
            sn.Trainer(chosen, tmp_path, callbacks=[interrupt], quiet=True).fit(chosen.build(family), family)
        assert sn.Run.open(tmp_path).read_tensors("checkpoint.safetensors")[1]["epoch"] == 2


def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """torchrun with two gloo processes: the loss curve of one process at the same global batch."""
    changes = {"epochs": 3, "relaxation": "adarel", "relax_epochs": 2, "precision": "float64"}
    alone = fit(tmp_path / "one", **changes)
    script = tmp_path / "train.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
import test_training as t
t.fit({str(tmp_path / "two")!r}, **{changes!r})
torch.distributed.barrier()
import os; os._exit(0)  # gloo leaves threads behind that now and then abort a process which ends as usual
""")
    torchrun(script)
    together = sn.Run.open(tmp_path / "two")
    for one, two in zip(alone.metrics(), together.metrics(), strict=True):
        for name in ("loss", "objective", "violation", "relax"):
            assert two[name] == pytest.approx(one[name], rel=1e-6, abs=1e-9), name
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(together)[name], tensor, rtol=1e-6, atol=1e-8)


class TestEvaluate:
    def test_any_tolerance_on_one_model(self, tmp_path: Path) -> None:
        family = problem()
        model = fit(tmp_path, family).load_model(family).train()
        for tol in (1e-4, 1e-8, 1e-12):
            found = sn.evaluate(model, family, tol=tol)
            assert found.summary["violation"] <= tol
            assert found.summary["tol"] == tol
        assert model.layer.tol == 1e-8  # as before
        assert model.training
        assert found.summary["seconds"]["model"] > 0
        assert found.arrays["objective"].shape == (10,)
        assert bool(torch.from_numpy(found.arrays["gap"]).isnan().all())

    def test_gaps_instance_by_instance(self, tmp_path: Path) -> None:
        family = problem()
        model = config().build(family)
        x = family.split("valid")
        best = family.objective(model(x), x).detach() - 0.25
        found = sn.evaluate(model, family, "valid", reference=best, reference_seconds=0.02, engine="ipopt")
        assert found.arrays["gap"] == pytest.approx(0.25)
        assert found.summary["gap"]["gmean"] == pytest.approx(0.25)
        assert found.summary["seconds"]["engine"] == "ipopt"


class TestProgress:
    LINE = {"epoch": 2, "loss": 1.5, "violation": 1e-6, "steps": 12.0, "relax": 0.3}  # noqa: RUF012

    def test_lines_where_there_is_no_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        with progress(2, 0, "nclp") as show:
            show(self.LINE)
        assert "nclp: epoch 2/2 · loss 1.5000 · violation 1e-06 · steps 12 · ε 3.0e-01" in capsys.readouterr().err

    def test_a_line_is_written_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the lines of processes that train side by side run into each other."""
        written: list[str] = []
        monkeypatch.setattr(sys.stderr, "write", written.append)
        with progress(2, 0, "nclp") as show:
            show(self.LINE)
        assert len(written) == 1
        assert written[0].endswith("\n")

    def test_a_bar_in_a_terminal(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "200")
        with progress(2, 0, "nclp") as show:
            show(self.LINE)
        printed = capsys.readouterr().err
        assert "2/2" in printed
        assert "loss 1.5000" in printed

    def test_gaps_are_shown_with_their_largest(self) -> None:
        valid = {"gap": {"gmean": 1e-3, "max": 0.1}, "violation": 1e-9}
        assert "gap 1.0e-03 (max 1.0e-01) · violation 1e-09" in describe(self.LINE | {"valid": valid})
        assert "objective 2.0000" in describe(self.LINE | {"valid": {"objective": {"mean": 2.0}, "violation": 0.0}})

    def test_flat_names(self) -> None:
        assert dict(flatten({"a": 1, "b": {"c": 2.5, "d": "text", "e": True}})) == {"a": 1.0, "b/c": 2.5}

    def test_tensorboard_gets_every_number(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written = []

        class Writer:
            def __init__(self, folder: str) -> None:
                written.append(folder)

            def add_scalar(self, *scalar: object) -> None:
                written.append(scalar)

            def flush(self) -> None:
                written.append("flushed")

        module = types.ModuleType("tensorboard")
        module.SummaryWriter = Writer  # pyright: ignore
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
        tensorboard(tmp_path)({"epoch": 3, "valid": {"gap": 0.5}})
        assert written == [str(tmp_path), ("epoch", 3.0, 3), ("valid/gap", 0.5, 3), "flushed"]

    def test_tensorboard_is_an_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(ImportError, match=r"snarenet\[tensorboard\]"):
            tensorboard(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nclp", "qcqp"])
def test_a_recorded_step_is_the_step(tmp_path: Path, name: str) -> None:
    """Training with CUDA graphs ends where training without them does."""
    ends = []
    for record in (0, 60):
        family = sn.problems.load(name, **SIZES).cuda()
        changes = {"batch": 20, "record": record, "precision": "float64", "relaxation": "adarel", "relax_epochs": 1}
        ends.append(fit(tmp_path / str(record), family, **changes).load_model(family)(family.split("test")))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_recorded_steps_keep_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph goes on writing to the weights after the best of them were copied."""
    scripted(SECOND, monkeypatch)
    ends, changes = [], {"batch": 20, "precision": "float64", **CONSTANT}
    for record in (0, 60):
        family = sn.problems.load("nclp", **SIZES).cuda()
        run = fit(tmp_path / str(record), family, record=record, **changes)
        assert run.kept() == Kept(2, 4, Score(0, 1.0, 2, 10))
        ends.append([run.load_model(family, keep=keep)(family.split("test")) for keep in ("best", "last")])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ends[1][0], ends[1][1], rtol=1e-2)
