"""Every method behind one interface: what a `Layer` promises, for each method on each family that it claims.

What a method computes is checked in its own file, against solvers, closed forms and loops written out.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import snarenet as sn
from snarenet.layers import METHODS, HProjLayer, Layer, build
from snarenet.problems.cbf import decode, encode
from snarenet.testing import assert_equal, draw, gradients
from snarenet.training import recipes
from snarenet.training.distributed import Group
from snarenet.training.recipes import Setting
from snarenet.training.step import Totals

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
# what each method can do; the others refuse
CLAIMS = {
    "nclp": set(METHODS),
    "qcqp": set(METHODS) - {"hardnet", "pinet"},
    "ncqcqp": set(METHODS) - {"hardnet", "pinet", "optnet"},
    "cbf": {"snare", "soft", "dc3", "hardnet++", "fsnet"},
}
# that never leave a violation behind, at these sizes
EXACT = {"snare", "soft", "hardnet", "hardnet++", "optnet", "pinet"}
COMPLETING = {"dc3", "hproj"}  # whose equalities hold to rounding
MOODY = {"soft", "dc3", "hproj"}  # that do other things in eval mode than in training
BITWISE = {"dc3", "hardnet", "optnet"}  # no sample leaves the batch before the others: not even rounding changes
DIFFERENCES = {"optnet": (1e-3, 5e-3)}  # step and tolerance of differences; the solver's y is within 1e-5
CASES = [(name, method) for name, methods in CLAIMS.items() for method in METHODS if method in methods]
PRETRAINING = 30  # steps of HProj's
MAX_STEPS = 50  # enough for all but HardNet++ on cbf, whose slow way need not be gone to the end
BATCH, BAD, GOOD = 6, [1, 4], [0, 2, 3, 5]

pytestmark = [
    pytest.mark.filterwarnings("ignore::snarenet.solution.RepairWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of cvxpylayers
]


@pytest.fixture(autouse=True)
def short_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.SETTINGS["hproj", "fair"], "pretrain_steps", PRETRAINING)


def family(name: str, **changes: int) -> sn.problems.Problem:
    sizes = {"instances": 60, "horizon": 0.06} if name == "cbf" else SIZES
    return sn.problems.load(name, **sizes | changes)


known = cache(family)  # for tests that change nothing in it


def available(method: str) -> bool:
    return method != "optnet" or importlib.util.find_spec("cvxpylayers") is not None


class Case(NamedTuple):
    """A layer that is ready for use, and predictions that violate the constraints at the inputs."""

    name: str
    method: str
    layer: Layer
    y: Tensor
    x: Tensor

    def leaves(self, samples: slice | list[int] = slice(None)) -> tuple[Tensor, Tensor]:
        """Predictions and inputs of some samples that need gradients."""
        return self.y[samples].clone().requires_grad_(), self.x[samples].clone().requires_grad_()


def new_layer(problem: sn.problems.Problem, method: str, setting: Setting = "fair") -> Layer:
    chosen = recipes.settings(method, setting, problem.name)
    layer = build(method, problem.constraints, problem.inputs.shape[1], problem.size, **chosen)
    layer.on_failure, layer.max_steps = "ignore", min(layer.max_steps, MAX_STEPS)
    return layer


@cache
def pretrained(name: str, method: str) -> dict[str, Tensor]:
    layer = new_layer(known(name), method)
    layer.pretrain(known(name).split("train"))
    return layer.state_dict()


def new_case(name: str, method: str, setting: Setting = "fair") -> Case:
    problem = known(name)
    layer = new_layer(problem, method, setting)
    if setting == "fair":
        layer.load_state_dict(pretrained(name, method))
    x = problem.inputs[:BATCH]
    if name == "cbf":  # closer to an ellipse, and moving, so that a barrier matters
        x = encode(decode(x) + torch.tensor([0.0, -1.1, 0.0, 4.0, 1.0], dtype=x.dtype))
    return Case(name, method, layer, draw(BATCH, layer.predictions(problem.size), seed=5, scale=2), x)


every_method = pytest.mark.parametrize(("name", "method"), CASES, ids=["-".join(case) for case in CASES])
MODES = [
    (*case, mode == "train") for case in CASES for mode in ("train", "eval") if mode == "train" or case[1] in MOODY
]
in_each_mode = pytest.mark.parametrize(
    ("name", "method", "training"), MODES, ids=[f"{n}-{m}-{'train' if t else 'eval'}" for n, m, t in MODES]
)


@pytest.fixture
def case(name: str, method: str) -> Case:
    if not available(method):
        pytest.skip("cvxpylayers is not installed")
    return new_case(name, method)


@in_each_mode
class TestSolve:
    def test_gradients_are_those_of_central_differences(self, case: Case, training: bool) -> None:
        """In predictions and inputs at once, sample by sample; no sample takes a step that is not differentiated."""
        case.layer.train(training)
        (y, x), blind = case.leaves(), case.method == "soft" and training
        solution = case.layer.solve(y, x)
        assert (known(case.name).constraints.violation(solution.raw, x) > 0.1).sum() > BATCH / 2
        weights = draw(*solution.value.shape, seed=99)
        to_y, to_x = torch.autograd.grad((weights * solution.value).sum(), [y, x], allow_unused=True)
        assert to_y.isfinite().all()
        assert (to_y.abs().amax(1) > 0).all()
        assert (to_x is None) == blind
        towards_y, towards_x = draw(*y.shape, seed=21), draw(*x.shape, seed=22)
        slope = (to_y * towards_y).sum(1)
        if not blind:
            assert to_x.isfinite().all()
            assert (to_x.abs().amax(1) > 0).sum() > BATCH / 2
            slope = slope + (to_x * towards_x).sum(1)
        h, tolerance = DIFFERENCES.get(case.method, (1e-6, 1e-4))
        with torch.no_grad():
            after, before = (case.layer(y + step * towards_y, x + step * towards_x) for step in (h, -h))
        assert_equal(slope, (weights * (after - before)).sum(1) / (2 * h), tolerance)

    def test_empty_batch(self, case: Case, training: bool) -> None:
        y, x = case.leaves([])
        solution = case.layer.train(training).solve(y, x)
        assert solution.value.shape == solution.raw.shape == (0, known(case.name).size)
        assert solution.status.shape == solution.steps.shape == solution.violation.shape == (0,)
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.shape == y.shape

    def test_float32_in_float32_out(self, case: Case, training: bool) -> None:
        """The result is that of float64, rounded, and is judged as it is."""
        y, x = (tensor.float().requires_grad_() for tensor in (case.y, case.x))
        solution = case.layer.train(training).solve(y, x)
        assert solution.value.dtype == solution.raw.dtype == torch.float32
        precise = case.layer.solve(y.double(), x.double())
        assert_equal(solution.value.double(), precise.value, 1e-6)
        assert torch.equal(solution.status, precise.status)
        expected = known(case.name).constraints.violation(solution.value.double(), x.double())
        torch.testing.assert_close(solution.violation, expected, rtol=1e-6, atol=1e-12, check_dtype=False)
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.dtype == torch.float32
        assert y.grad.isfinite().all()

    def test_predictions_that_are_not_finite_spoil_no_other(self, case: Case, training: bool) -> None:
        clean = case.layer.train(training).solve(case.y, case.x)
        y, x = case.leaves()
        with torch.no_grad():
            y[BAD[0], 0], y[BAD[1], -1] = torch.nan, torch.inf
        solution = case.layer.solve(y, x)
        assert (solution.status[BAD] == sn.Status.NONFINITE).all()
        assert (solution.violation[BAD] == torch.inf).all()
        for found, expected in zip(solution, clean, strict=True):
            close = 0.0 if case.method in BITWISE or not found.is_floating_point() else 1e-12
            torch.testing.assert_close(found[GOOD], expected[GOOD], rtol=0, atol=close)
        solution.value[GOOD].sum().backward()
        assert y.grad is not None
        assert y.grad.isfinite().all()

    def test_the_same_answer_in_any_batch(self, case: Case, training: bool) -> None:
        (y, x), layer = case.leaves(), case.layer.train(training)
        whole = layer.solve(y, x)
        slopes = gradients(whole.value, [y, x])
        alone = [layer.solve(y[[i]], x[[i]]) for i in range(BATCH)]
        for found, expected in zip(map(torch.cat, zip(*alone, strict=True)), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
        together = torch.cat([one.value for one in alone])
        for found, expected in zip(gradients(together, [y, x]), slopes, strict=True):
            assert_equal(found, expected, 1e-6)


@every_method
class TestLayer:
    def test_relaxation_counts_in_training_only(self, case: Case) -> None:
        """Outputs are judged, and made, by the widened bounds in training, and by the true ones in eval mode."""
        relaxed = case.layer.solve(case.y, case.x, relax=0.3)
        violation = known(case.name).constraints.violation(relaxed.value, case.x)
        torch.testing.assert_close(relaxed.violation, (violation - 0.3).clamp(min=0), rtol=0, atol=1e-12)
        same = torch.equal(relaxed.value, case.layer(case.y, case.x))
        assert same == (case.method in ("soft", "hproj"))  # which repair nothing in training
        case.layer.eval()
        assert torch.equal(case.layer(case.y, case.x, relax=0.3), case.layer(case.y, case.x))

    def test_copies_and_states(self, case: Case) -> None:
        """A copy is equal and independent; a state makes a copy, or a layer for other data, what the layer was."""
        layer = case.layer.eval()
        expected = layer(case.y, case.x)
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(case.y, case.x), expected)
        for tensor in twin.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.5).add_(0.1)
        assert not torch.equal(twin(case.y, case.x), expected)
        assert torch.equal(layer(case.y, case.x), expected)
        fresh = new_layer(family(case.name, seed=1), case.method).eval()
        for other in (twin, fresh):
            other.load_state_dict(layer.state_dict())
            assert torch.equal(other(case.y, case.x), expected)

    def test_behind_a_network(self, case: Case) -> None:
        """A float32 network, float64 inputs and outputs; its weights learn through the layer."""
        net = sn.TrainConfig(width=8).build_net(case.x.shape[1], case.y.shape[1])
        model = sn.ConstrainedModel(net, case.layer).train()
        value = model(case.x)
        assert torch.equal(value, case.layer(model.raw(case.x), case.x))
        assert value.dtype == model.solve(case.x).value.dtype == torch.float64
        value.square().sum().backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            assert parameter.grad.abs().max() > 0

    def test_failures_are_reported_as_asked(self, case: Case) -> None:
        y, layer = case.y.clone(), case.layer.eval()
        y[BAD[0], 0] = torch.nan
        layer.on_failure = "raise"
        with pytest.raises(sn.RepairError, match="NONFINITE") as caught:
            layer(y, case.x)
        assert caught.value.solution.status[BAD[0]] == sn.Status.NONFINITE
        layer.on_failure = "warn"
        with pytest.warns(sn.RepairWarning, match=rf"of {BATCH} samples.*max_steps={layer.max_steps}") as warned:
            layer(y, case.x)
        ours = [warning for warning in warned if warning.category is sn.RepairWarning]
        assert [warning.filename for warning in ours] == [__file__]  # points at the caller

    def test_wrong_arguments(self, case: Case) -> None:
        kind, constraints = METHODS[case.method], known(case.name).constraints
        needed = {"inputs": case.x.shape[1]} if kind is HProjLayer else {}
        with pytest.raises(ValueError, match="`on_failure` must be 'warn', 'raise' or 'ignore', but got 'shout'"):
            kind(constraints, **needed, on_failure="shout")
        with pytest.raises(TypeError, match="`constraints` must be a set of constraints, but got int"):
            kind(3, **needed)
        k = case.y.shape[1]
        with pytest.raises(ValueError, match=rf"`y` must have shape \(\w+, {k}\).* but got shape \({BATCH}, {k + 1}\)"):
            case.layer(draw(BATCH, k + 1), case.x)
        with pytest.raises(TypeError, match=r"`y` must be a floating-point tensor, but got torch\.int64"):
            case.layer(case.y.long(), case.x)

    def test_the_papers_setting(self, case: Case) -> None:
        """As in the paper's experiments: other options, which must at least run and let gradients through."""
        case = new_case(case.name, case.method, "paper")
        y, x = case.leaves()
        value = case.layer.train()(y, x)
        assert value.isfinite().all()
        slope = gradients(value, [y])[0]
        assert slope.isfinite().all()
        assert slope.abs().max() > 0


@every_method
def test_trains_evaluates_and_loads(tmp_path: Path, case: Case, name: str, method: str) -> None:
    problem = family(name)
    config = sn.TrainConfig.recipe("best", name, method=method, epochs=1, width=8, batch=25, optimizer="adamw", lr=3e-3)
    model = config.build(problem)
    sample = problem.split("train")[:20]

    def loss() -> float:
        outcome = problem.run(model.train(), sample)
        weight = 0.0 if config.proximity == "auto" else config.proximity
        return (outcome.cost + config.penalty * outcome.penalty + weight * outcome.distance).mean().item()

    before = loss()
    run = sn.Trainer(config, tmp_path, quiet=True).fit(model, problem)
    assert not model.training
    assert loss() < before
    x = problem.split("test")
    value = model.eval()(x)
    assert value.shape == (len(x), problem.size)
    assert value.isfinite().all()
    assert torch.equal(sn.load_model(tmp_path)(x), value)
    found = sn.evaluate(model, problem, timed=False)
    assert found.arrays["violation"].shape == (len(x),)
    if method in EXACT and name != "cbf":
        assert found.summary["converged"] == 1.0
        assert found.summary["violation"] <= max(model.layer.tol, 1e-6)
    if method in COMPLETING and name != "cbf":
        assert problem.run(model, x).errors[:, problem.equalities(x)].max() < 1e-12
    assert run.config.method == method


def train_together(out: Path, method: str) -> sn.ConstrainedModel:
    """A model trained on nclp, by this process or by the group that it belongs to."""
    problem = family("nclp")
    config = sn.TrainConfig.recipe("best", "nclp", method=method, epochs=1, width=8, batch=30, precision="float64")
    model = config.build(problem)
    sn.Trainer(config, out, quiet=True).fit(model, problem)
    return model


def work(out: str, methods: list[str]) -> None:
    """What each of two processes does: train by every method, then differentiate a half of a batch with torch's DDP."""
    recipes.SETTINGS["hproj", "fair"]["pretrain_steps"] = PRETRAINING
    for method in methods:
        model = train_together(Path(out, method), method)
        parallel, rank = DistributedDataParallel(model.train()), torch.distributed.get_rank()
        model.zero_grad()  # what training left
        parallel(known("nclp").inputs[:8][rank::2]).square().mean().backward()
        if rank == 0:
            save_file({n: p.grad for n, p in model.net.named_parameters()}, Path(out, method, "gradients.safetensors"))
        del parallel
    torch.distributed.barrier()
    # torch's DDP leaves threads behind that now and then abort a process which ends as usual; all work is done here
    os._exit(0)


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Under torchrun, one launch for all methods: the trainer's own group, and torch's DDP around the models."""
    methods = list(filter(available, METHODS))
    script = tmp_path / "work.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch; torch.set_num_threads(1)
import test_methods
test_methods.work({str(tmp_path)!r}, {methods!r})
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    for method in methods:
        alone, together = train_together(tmp_path / f"{method}-alone", method), sn.load_model(tmp_path / method)
        for name, tensor in alone.state_dict().items():
            found = together.state_dict()[name]
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=1e-6, msg=lambda text, m=method: f"{m}: {text}")
        together.train()(known("nclp").inputs[:8]).square().mean().backward()
        expected = load_file(tmp_path / method / "gradients.safetensors")
        for name, parameter in together.net.named_parameters():
            assert parameter.grad is not None
            assert_equal(expected[name], parameter.grad, 1e-8)


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("qcqp", "hardnet", "HardNet repairs linear constraints only, but got Quadratic"),
        ("qcqp", "pinet", "only, but got Quadratic"),
        ("ncqcqp", "optnet", "OptNet needs H >= 0"),
    ],
)
def test_what_a_method_cannot_do_it_refuses(name: str, method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sn.TrainConfig(method=method).build(family(name))


def test_names_and_settings() -> None:
    constraints = family("nclp").constraints
    with pytest.raises(ValueError, match="did you mean 'hardnet'"):
        build("hardnett", constraints, 2, 8)
    for problem, setting, step in (("qcqp", "paper", 1e-13), ("nclp", "paper", 1e-7), ("qcqp", "fair", "auto")):
        layer = sn.TrainConfig(method="dc3", setting=setting).build_layer(family(problem))
        assert layer.step == step
    assert recipes.settings("dc3", "paper", "qcqp")["partial"] == "random"
    assert sn.TrainConfig.recipe("best", "nclp", method="dc3").penalty == 100.0
    paper = sn.TrainConfig.recipe("paper", "nclp", method="hardnet")
    assert (paper.relaxation, paper.relax_epochs, paper.setting) == ("soft", 100, "paper")
    assert sn.TrainConfig.recipe("best", "nclp", method="hardnet", epochs=10).relaxed_epochs == 4  # a third
    assert sn.TrainConfig(relaxation="soft", relax_epochs=2).relaxed_epochs == 2
    assert sn.TrainConfig(relax_epochs=2).relaxed_epochs == 0
    assert all(kind.title for kind in METHODS.values())


def test_the_seed_of_a_run_draws_the_partial_variables() -> None:
    problem = family("nclp", size=12)
    splits = {
        tuple(sn.TrainConfig(method="dc3", setting="paper", seed=seed).build_layer(problem).completion.order.tolist())
        for seed in (0, 0, 1, 2)
    }
    assert len(splits) == 3


def test_pretraining_is_as_long_as_asked_and_counts_as_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int | None] = []
    real = HProjLayer.pretrain

    def pretrain(layer: HProjLayer, inputs: Tensor, *, steps: int | None, seed: int, progress: object) -> None:
        told.append(steps)
        time.sleep(0.3)
        real(layer, inputs, steps=2, seed=seed)

    monkeypatch.setattr(HProjLayer, "pretrain", pretrain)
    for asked, name in ((7, "a"), (0, "b")):
        config = sn.TrainConfig(method="hproj", pretrain=asked, epochs=1, width=8)
        run = sn.Trainer(config, tmp_path / name, quiet=True).fit(config.build(known("nclp")), known("nclp"))
        assert run.metrics()[0]["seconds"] > 0.3
    assert told == [7, None]


def test_a_process_may_have_nothing_to_do() -> None:
    """Its share of a small batch is empty; what it counts is nothing."""
    totals, problem = Totals(torch.device("cpu")), known("nclp")
    model = sn.TrainConfig(width=8).build(problem)
    for count in (0, 3):
        outcome = problem.run(model, problem.inputs[:count])
        totals.add(outcome.cost, outcome)
    assert totals.line(Group())["objective"] == pytest.approx(outcome.objective.mean().item())


def test_a_relaxation_needs_predictions_in_the_set_of_outputs(tmp_path: Path) -> None:
    problem, config = family("nclp"), sn.TrainConfig(method="dc3", relaxation="soft", relax_epochs=1, epochs=1)
    with pytest.raises(ValueError, match="`relaxation` must be 'none' for DC3"):
        sn.Trainer(config, tmp_path, quiet=True).fit(config.build(problem), problem)
