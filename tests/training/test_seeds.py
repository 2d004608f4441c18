"""Several seeds trained as one: each must end where it would have ended alone."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.training import seeds as stacking
from snarenet.training import session as training
from snarenet.training.distributed import Group
from snarenet.training.muon import Muon, orthogonalize
from snarenet.training.step import Stepper, Totals

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
SEEDS = [3, 0, 7]


def problem(name: str = "nclp", **changes) -> sn.problems.Problem:
    return sn.problems.load(name, **SIZES | changes)


def config(**changes) -> sn.TrainConfig:
    tiny = {"epochs": 4, "batch": 30, "width": 16, "validate_every": 2, "checkpoint_seconds": 0.0}
    return sn.TrainConfig(**tiny | {"precision": "float64", "optimizer": "adamw", "lr": 1e-3} | changes)


def alone(out: Path, family: sn.problems.Problem, chosen: sn.TrainConfig, seeds=SEEDS) -> list[sn.Run]:
    configs = [chosen.replace(seed=seed) for seed in seeds]
    return [sn.Trainer(c, out / f"seed{c.seed}", quiet=True).fit(c.build(family), family) for c in configs]


def together(out: Path, family: sn.problems.Problem, chosen: sn.TrainConfig, **options) -> list[sn.Run]:
    return sn.Trainer(chosen, out, quiet=True).fit_seeds(SEEDS, family, **options)


def tensors(run: sn.Run, file: str = "model.safetensors") -> dict[str, Tensor]:
    return run.read_tensors(file)[0]


def assert_same(one: sn.Run, other: sn.Run, rtol: float = 1e-8, atol: float = 1e-9) -> None:
    """All that both runs wrote is the same, up to rounding, and times."""
    assert {file.name for file in one.path.iterdir()} == {file.name for file in other.path.iterdir()}
    assert one.config == other.config == sn.Run.open(other.path).config
    for file in ("model.safetensors", "checkpoint.safetensors"):
        mine, theirs = tensors(one, file), tensors(other, file)
        assert list(mine) == list(theirs)
        for name in mine.keys() - {"random"}:  # the global numbers, for dropout
            assert mine[name].dtype == theirs[name].dtype
            torch.testing.assert_close(mine[name], theirs[name], rtol=rtol, atol=atol)
    lines, others = one.metrics(), other.metrics()
    assert len(lines) == len(others) == one.config.epochs
    for line, twin in zip(lines, others, strict=True):
        assert list(line) == list(twin)
        numbers = ("epoch", "step", "loss", "objective", "failed", "steps", "relax", "lr")
        assert [line[name] for name in numbers] == pytest.approx([twin[name] for name in numbers], rel=rtol)
        assert line["violation"] == pytest.approx(twin["violation"], rel=rtol, abs=1e-8)
        if "valid" in line:
            assert line["valid"]["objective"] == pytest.approx(twin["valid"]["objective"], rel=rtol)


CASES = {
    "plain": ("nclp", {}),
    "nearest": ("nclp", {"start": 5, "damping_start": 1e-3, "damping_ratio": 0.1, "reduction": "sum"}),
    "relaxed": ("nclp", {"relaxation": "adarel", "relax_epochs": 3, "damping": 0.1, "penalty": 1.0, "start": "none"}),
    "soft": ("nclp", {"relaxation": "soft", "relax_epochs": 2, "penalty": 10.0}),
    "clipped": ("nclp", {"clip": 1e-2, "weight_decay": 0.5}),
    "averaged": ("nclp", {"average": 0.8}),
    "fresh": ("nclp", {"fresh": True}),
    "normed": ("nclp", {"batch_norm": True, "activation": "tanh"}),
    "curved": ("qcqp", {"proximity": 1e-3, "batch": 45}),
    "bare": ("nclp", {"start": "none", "weights": "none", "standardise": False}),
    "hardnet": ("nclp", {"method": "hardnet"}),  # relaxed, it starts on a kink, where rounding decides
}


class TestTraining:
    @pytest.mark.parametrize("case", CASES)
    def test_each_seed_ends_where_it_would_alone(self, tmp_path: Path, case: str) -> None:
        name, changes = CASES[case]
        family, chosen = problem(name), config(**changes)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none about seeds that cannot be stacked
            stacked = together(tmp_path / "b", family, chosen)
        for one, other in zip(alone(tmp_path / "a", family, chosen), stacked, strict=True):
            assert_same(one, other)

    def test_muon(self, tmp_path: Path) -> None:
        """Its updates are computed in bfloat16, so that weights agree to that share of the learning rate."""
        family, chosen = problem(), config(optimizer="muon", epochs=2, precision="float32")
        moved = 2 * 3 * chosen.lr  # steps times the size of one
        for one, other in zip(
            alone(tmp_path / "a", family, chosen), together(tmp_path / "b", family, chosen), strict=True
        ):
            assert_same(one, other, rtol=1e-3, atol=0.05 * moved)

    def test_the_models_are_used_and_stay_apart(self, tmp_path: Path) -> None:
        family = problem()
        runs = together(tmp_path, family, config())
        assert [run.path for run in runs] == [tmp_path / f"seed{seed}" for seed in SEEDS]
        outputs = [sn.load_model(run.path)(family.split("test")) for run in runs]
        assert min((outputs[a] - outputs[b]).abs().max() for a, b in ((0, 1), (1, 2), (2, 0))) > 1e-3
        assert [run.config.seed for run in runs] == SEEDS

    def test_dropout_draws_for_each_seed(self, tmp_path: Path) -> None:
        family, chosen = problem(), config(dropout=0.5, width=32)
        state = torch.get_rng_state()
        runs = together(tmp_path, family, chosen)
        assert torch.equal(torch.get_rng_state(), state)  # the user's random numbers are left alone
        assert all(run.metrics()[-1]["loss"] < run.metrics()[0]["loss"] for run in runs)
        nets = [chosen.build_net(2, 8) for _ in range(2)]  # the same weights
        x = family.inputs[:5].repeat(2, 1)
        first, second = stacking.StackedNet(nets)(x).split(5)
        assert not torch.allclose(first, second)
        first, second = stacking.StackedNet(nets).eval()(x).split(5)
        torch.testing.assert_close(first, second)

    def test_callbacks_see_the_line_of_every_seed(self, tmp_path: Path) -> None:
        seen = []
        runs = sn.Trainer(config(epochs=2), tmp_path, callbacks=[seen.append], quiet=True).fit_seeds(SEEDS, problem())
        assert seen == [line for pair in zip(*(run.metrics() for run in runs), strict=True) for line in pair]

    @pytest.mark.parametrize(
        ("name", "changes", "reason"),
        [
            ("nclp", {"method": "dc3", "penalty": 10.0}, "DC3 makes random choices of its own"),
            ("cbf", {"head": 0.01}, "`CBF` has a `run` of its own"),
        ],
    )
    def test_one_after_the_other(self, tmp_path: Path, name: str, changes: dict, reason: str) -> None:
        sizes = {"instances": 24, "horizon": 0.1} if name == "cbf" else SIZES
        family, chosen = sn.problems.load(name, **sizes), config(epochs=1, **changes)
        with pytest.warns(UserWarning, match=f"one after the other, since {reason}"):
            runs = together(tmp_path / "b", family, chosen)
        for one, other in zip(alone(tmp_path / "a", family, chosen), runs, strict=True):
            assert_same(one, other, rtol=0, atol=0)

    def test_trained_constraints(self) -> None:
        family = problem()
        bound = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        learned = sn.Linear(torch.ones(1, 8, dtype=torch.float64), upper=bound)
        model = sn.ConstrainedModel(torch.nn.Linear(2, 8), sn.SnareLayer(learned))
        assert stacking.cannot_stack(model, family) == "the constraints are trained, too"

    @pytest.mark.filterwarnings("ignore::snarenet.solution.RepairWarning")  # its validation
    def test_a_seed_that_breaks_down_leaves_the_others_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        family, chosen, update = problem(), config(), Stepper.update
        expected = together(tmp_path / "expected", family, chosen)

        def spoiled(stepper: Stepper) -> None:
            stepper.parameters[0].grad[1] = torch.nan  # pyright: ignore
            update(stepper)

        monkeypatch.setattr(Stepper, "update", spoiled)
        with pytest.warns(UserWarning, match="the training of seed 0 broke down in epoch 1"):
            runs = together(tmp_path / "spoiled", family, chosen)
        assert tensors(runs[1])["net.0.weight"].isnan().all()
        for k in (0, 2):
            assert_same(runs[k], expected[k])
        with pytest.raises(FloatingPointError, match="the training of seed 0 broke down in epoch 1"):
            sn.Trainer(chosen.replace(seed=0), tmp_path / "all", quiet=True).fit_seeds([0], family)

    def test_wrong_arguments(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        trainer, family = sn.Trainer(config(), tmp_path, quiet=True), problem()
        for wrong in ([], [1, 1]):
            with pytest.raises(ValueError, match="`seeds` must be one or more different numbers, but got"):
                trainer.fit_seeds(wrong, family)
        with pytest.raises(ValueError, match="a folder for each of 2 seeds, but got 1"):
            trainer.fit_seeds([1, 2], family, [tmp_path])
        monkeypatch.setattr(Group, "join", lambda device: Group(0, 2))
        with pytest.raises(ValueError, match="in one process: under torchrun use `fit`"):
            trainer.fit_seeds([1], family)
        assert not list(tmp_path.iterdir())


class StopError(Exception):
    """Ends a training in a test."""


def stop_at(epoch: int, seen: int):
    """A callback that ends training with the line number `seen` of an epoch."""
    lines = []

    def stop(line: dict) -> None:
        lines.append(line)
        if sum(past["epoch"] == epoch for past in lines) == seen:
            raise StopError

    return stop


class TestResume:
    @pytest.mark.parametrize(
        "changes", [{"optimizer": "muon"}, {"average": 0.5, "relaxation": "adarel"}, {"dropout": 0.3}], ids=str
    )
    def test_together(self, tmp_path: Path, changes: dict) -> None:
        """Stopped between the lines of epoch 3, after the checkpoints of epoch 2; then bit for bit."""
        family, chosen = problem(), config(**changes)
        whole = together(tmp_path / "whole", family, chosen)
        with pytest.raises(StopError):
            sn.Trainer(chosen, tmp_path / "cut", callbacks=[stop_at(3, 2)], quiet=True).fit_seeds(SEEDS, family)
        with pytest.raises(sn.RunError, match="already holds a run"):
            together(tmp_path / "cut", family, chosen)
        for one, other in zip(whole, together(tmp_path / "cut", family, chosen, resume=True), strict=True):
            assert_same(one, other, rtol=0, atol=0)

    @pytest.mark.parametrize(("optimizer", "atol"), [("adamw", 1e-9), ("muon", 2e-5)])
    def test_a_seed_by_itself(self, tmp_path: Path, optimizer: str, atol: float) -> None:
        family, chosen = problem(), config(optimizer=optimizer)
        whole = together(tmp_path / "whole", family, chosen)
        with pytest.raises(StopError):
            sn.Trainer(chosen, tmp_path / "cut", callbacks=[stop_at(3, 1)], quiet=True).fit_seeds(SEEDS, family)
        own, folder = chosen.replace(seed=0), tmp_path / "cut" / "seed0"
        run = sn.Trainer(own, quiet=True).fit(own.build(family), family, resume=folder)
        assert_same(whole[1], run, rtol=10 * atol, atol=atol)

    def test_cut_off_between_two_checkpoints(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Seed 3 is an epoch ahead of 0 and 5, and 7 has no checkpoint: those that can go on together do."""
        family, chosen, seeds = problem(), config(), [3, 0, 7, 5]
        for seed, epoch in ((3, 3), (0, 2), (5, 2)):
            trainer = sn.Trainer(chosen, tmp_path / "cut", callbacks=[stop_at(epoch, 1)], quiet=True)
            with pytest.raises(StopError):
                trainer.fit_seeds([seed], family)
        sn.Run.create(tmp_path / "cut" / "seed7", chosen.replace(seed=7), family).log({"epoch": 9})
        sizes, real = [], training.stack

        def watched(models):
            sizes.append(len(models))
            return real(models)

        monkeypatch.setattr(training, "stack", watched)
        runs = sn.Trainer(chosen, tmp_path / "cut", quiet=True).fit_seeds(seeds, family, resume=True)
        assert sizes == [1, 2, 1]
        for one, other in zip(alone(tmp_path / "whole", family, chosen, seeds), runs, strict=True):
            assert_same(one, other)


class TestStack:
    def test_windows_are_the_stack(self) -> None:
        nets = [config(seed=seed, batch_norm=True).build_net(2, 8) for seed in SEEDS]
        layer = config().build_layer(problem())
        model = stacking.stack([sn.ConstrainedModel(net, layer) for net in nets])
        found = stacking.windows(model)
        x = problem().inputs[:12]
        torch.testing.assert_close(model.raw(x), torch.cat([n(part) for n, part in zip(nets, x.split(4), strict=True)]))
        for window, net in zip(found, nets, strict=True):  # batch norm noted the same, in the stack and its windows
            assert window.net.state_dict().keys() == net.state_dict().keys()
            for name, tensor in net.state_dict().items():
                torch.testing.assert_close(window.net.state_dict()[name], tensor)
        found[1].load_state_dict(found[2].state_dict())
        model.eval()
        _, second, third = model.raw(x[:4].repeat(3, 1)).split(4)
        torch.testing.assert_close(second, third)

    def test_one_model_stays_as_it_is(self) -> None:
        model = config().build(problem())
        assert stacking.stack([model]) is model
        assert stacking.windows(model) == [model]

    def test_totals_are_those_of_each_seed(self) -> None:
        family, chosen = problem(), config()
        x = family.inputs[:9]
        models = [chosen.replace(seed=seed).build(family) for seed in SEEDS]
        both = Totals(torch.device("cpu"), 3)
        outcome = family.run(stacking.stack(models), x)
        both.add(outcome.cost, outcome)
        for k, (model, part) in enumerate(zip(models, x.split(3), strict=True)):
            own = Totals(torch.device("cpu"))
            outcome = family.run(model, part)
            own.add(outcome.cost, outcome)
            assert both.line(Group(), k) == pytest.approx(own.line(Group()), abs=1e-8)

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_gradients_are_those_of_each_seed(self, reduction: str, rng: torch.Generator) -> None:
        family, chosen = problem(), config(reduction=reduction, penalty=1.0, damping=1.0)
        x, relax = family.inputs[:12], torch.rand(3, 5, generator=rng, dtype=torch.float64)
        models = [chosen.replace(seed=seed).build(family) for seed in SEEDS]
        stacked = Stepper(stacking.stack(models), family, chosen, Group(), 3)
        stacked.differentiate(x, relax, False)
        for k, (model, part) in enumerate(zip(models, x.split(4), strict=True)):
            single = Stepper(model, family, chosen, Group())
            single.differentiate(part, relax[k], False)
            for mine, theirs in zip(stacked.parameters, single.parameters, strict=True):
                assert mine.grad is not None
                torch.testing.assert_close(mine.grad[k], theirs.grad)

    def test_gradients_are_clipped_seed_by_seed(self) -> None:
        family, chosen = problem(), config(clip=1e-3)
        models = [chosen.replace(seed=seed).build(family) for seed in SEEDS]
        stepper = Stepper(stacking.stack(models), family, chosen, Group(), len(models))
        stepper(family.inputs[:9], 0.0, False, 0.0, 0.0)
        norms = torch.stack([p.grad.flatten(1).norm(dim=1) for p in stepper.parameters if p.grad is not None])
        torch.testing.assert_close(norms.norm(dim=0), torch.full((3,), 1e-3, dtype=torch.float64), rtol=1e-2, atol=0.0)


class TestMuon:
    @pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
    def test_each_slice_moves_as_with_pytorch(self, shape: tuple[int, int], rng: torch.Generator) -> None:
        start, *gradients = torch.randn(4, 3, *shape, generator=rng)
        stacked = torch.nn.Parameter(start.clone())
        optimizer = Muon([stacked], lr=0.1, weight_decay=0.3)
        single = [torch.nn.Parameter(matrix.clone()) for matrix in start]
        options = {"lr": 0.1, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
        theirs = [torch.optim.Muon([matrix], **options) for matrix in single]
        gradients[1][0] *= 1e-12  # a seed with next to no gradient does not feel the others
        for gradient in gradients:
            stacked.grad = gradient.clone()
            optimizer.step()
            for matrix, own, slice_ in zip(single, theirs, gradient, strict=True):
                matrix.grad = slice_.clone()
                own.step()
            update = 0.1 * 0.2 * max(shape) ** 0.5  # times entries below one, of eight bits
            torch.testing.assert_close(stacked.detach(), torch.stack(single).detach(), rtol=0.0, atol=0.02 * update)
        buffers = torch.stack([own.state[m]["momentum_buffer"] for own, m in zip(theirs, single, strict=True)])
        torch.testing.assert_close(optimizer.state[stacked]["momentum_buffer"], buffers)

    def test_a_single_matrix_and_a_rate_in_a_tensor(self, rng: torch.Generator) -> None:
        start, gradient = torch.randn(2, 5, 7, generator=rng)
        mine, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        Muon([mine], lr=torch.tensor(0.1), weight_decay=0.3).step()
        torch.optim.Muon([theirs], lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw").step()
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-4)

    def test_singular_values_near_one(self, rng: torch.Generator) -> None:
        matrices = torch.randn(4, 30, 12, generator=rng) * torch.tensor([1e-3, 1.0, 5.0, 1e3]).view(-1, 1, 1)
        values = torch.linalg.svdvals(orthogonalize(matrices).float())
        assert values.min() > 0.5
        assert values.max() < 1.3

    def test_a_parameter_without_a_gradient_stays(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2, 3, 3))
        Muon([weight], lr=0.1, weight_decay=0.3).step()
        assert torch.equal(weight.detach(), torch.ones(2, 3, 3))
