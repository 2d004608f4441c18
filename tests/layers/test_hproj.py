"""Homeomorphic projection: the flow is invertible and knows its volume, the bisection is what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers import hproj
from snarenet.layers.flow import ActNorm, Autoregressive, Flow, LUMatrix
from snarenet.layers.hproj import HProjLayer
from snarenet.repair.gpu.graphs import Replayed
from snarenet.testing import assert_equal, draw
from snarenet.training.recipes import settings

INPUTS = 2


def latent(count: int, size: int, seed: int = 1) -> Tensor:
    """Latent points around the centre."""
    return 0.5 + draw(count, size, seed=seed, scale=0.3)


def trained_like(flow: Flow, scale: float = 0.2) -> Flow:
    """A flow with weights as after training: nothing zero, and initialised on points around the centre."""
    with torch.no_grad():
        for i, parameter in enumerate(flow.parameters()):
            parameter += draw(*parameter.shape, seed=10 + i, scale=scale)
        flow.train()(latent(64, len(flow.steps[0].shift)), draw(64, INPUTS, seed=2))
    return flow.eval()


def disk() -> sn.Constraints:
    """A disk of radius 1 around (x_1, 0) / 2."""

    def distance(y: Tensor, x: Tensor) -> Tensor:
        return ((y[:, :1] - x[:, :1] / 2).square() + y[:, 1:].square()).reshape(-1, 1)

    return sn.Nonlinear(distance, rows=1, upper=1.0)


def polytope() -> sn.Constraints:
    """|y_i + y_j| <= 1.5 for all pairs, and y_1 + y_2 + y_3 + y_4 = x_1 / 3: three partial variables."""
    pairs = torch.tensor([[1.0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]])
    return sn.Linear(pairs.double(), lower=-1.5, upper=1.5) & sn.Linear(
        torch.ones(1, 4, dtype=torch.float64), equals=lambda x: x[:, :1] / 3
    )


def inputs(count: int, seed: int = 3) -> Tensor:
    return draw(count, INPUTS, seed=seed).clamp(-0.9, 0.9)


def ready(constraints: sn.Constraints, size: int, **options: Any) -> HProjLayer:
    """A layer in eval mode whose flow is initialised but not trained: quick, and its centre's image is near 0."""
    layer = HProjLayer(constraints, INPUTS, size, box=3.0, **options)
    trained_like(layer.flow, 0.07)
    return layer.eval()


def centre(layer: HProjLayer, x: Tensor) -> Tensor:
    return image(layer, torch.full((len(x), layer.predictions(layer.size)), 0.5, dtype=torch.float64), x)


def image(layer: HProjLayer, z: Tensor, x: Tensor) -> Tensor:
    """The output of latent points, written out for both sets."""
    y = 3 * (2 * layer.flow(z, x)[0] - 1)
    if layer.completion.rows:
        full = torch.empty(len(y), 4, dtype=y.dtype)
        full[:, layer.completion.order[:3]] = y
        full[:, layer.completion.order[3]] = x[:, 0] / 3 - y.sum(1)
        return full
    return y


SETS = {"disk": (disk, 2), "polytope": (polytope, 4)}


@pytest.fixture(params=SETS)
def case(request: pytest.FixtureRequest) -> tuple[sn.Constraints, int]:
    build, size = SETS[request.param]
    return build(), size


class TestFlow:
    @pytest.mark.parametrize("size", [1, 2, 7])
    def test_inverse(self, size: int) -> None:
        flow, z, x = trained_like(Flow(size, INPUTS)), latent(20, size, seed=4), draw(20, INPUTS, seed=5)
        y, _ = flow(z, x)
        assert y.min() > -0.1
        assert y.max() < 1.1
        torch.testing.assert_close(flow.inverse(y, x), z, rtol=0, atol=1e-6)
        corners = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64).unsqueeze(1).expand(3, size)
        torch.testing.assert_close(flow(flow.inverse(corners, x[:3]), x[:3])[0], corners, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("size", [1, 3])
    def test_log_determinant_is_that_of_autograd(self, size: int) -> None:
        flow, z, x = trained_like(Flow(size, INPUTS)), latent(4, size, seed=4), draw(4, INPUTS, seed=5)
        _, logdet = flow(z, x)
        for i in range(4):
            J = torch.autograd.functional.jacobian(lambda p, i=i: flow(p, x[i : i + 1])[0][0], z[i : i + 1])[:, 0]
            assert logdet[i].item() == pytest.approx(torch.linalg.slogdet(J)[1].item(), abs=1e-9)

    def test_all_of_it_learns_from_x_and_z(self) -> None:
        flow, z, x = trained_like(Flow(3, INPUTS)), latent(8, 3, seed=4), draw(8, INPUTS, seed=5).requires_grad_()
        y, logdet = flow(z, x)
        (y.square().sum() + logdet.sum()).backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in flow.parameters())
        assert (x.grad.abs().amax(1) > 0).all()

    def test_the_first_batch_sets_an_act_norm(self) -> None:
        norm, first, second = ActNorm(3).double(), 5 + 2 * draw(50, 3, seed=1), draw(50, 3, seed=2)
        assert torch.equal(norm.eval()(first, first)[0], first)  # not while it is in use
        assert not norm.initialised
        y, _ = norm.train()(first, first)
        torch.testing.assert_close(y.mean(0), torch.zeros(3, dtype=y.dtype), rtol=0, atol=1e-12)
        torch.testing.assert_close(y.std(0, correction=0), torch.ones(3, dtype=y.dtype), rtol=0, atol=1e-12)
        expected = (second - first.mean(0)) / first.std(0, correction=0)
        torch.testing.assert_close(norm(second, second)[0], expected)  # the second changes nothing
        assert torch.isfinite(ActNorm(3).double()(first[:1], first)[0]).all()  # a batch without spread

    def test_a_matrix_starts_orthogonal(self) -> None:
        step, z = LUMatrix(5), draw(9, 5, seed=1)
        y, scale = step(z, z)
        torch.testing.assert_close(y.norm(dim=1), z.norm(dim=1))
        assert scale.sum().item() == pytest.approx(0, abs=1e-12)

    def test_an_entry_depends_on_the_entries_before(self) -> None:
        flow = trained_like(Flow(5, INPUTS, hidden=9))
        step = next(step for step in flow.steps if isinstance(step, Autoregressive))
        z, x = draw(20, 5, seed=1), draw(20, INPUTS)
        J = torch.autograd.functional.jacobian(lambda z: step(z, x)[0].sum(0), z)  # (entry, sample, entry)
        assert torch.equal(J.transpose(0, 1).triu(1), torch.zeros(20, 5, 5).double())
        assert (J.diagonal(dim1=0, dim2=2) > 0).all()
        assert (J.abs().amax(1).tril() > 0).sum() == 15

    def test_no_entry_is_stretched_beyond_what_can_be_undone(self) -> None:
        step, z, x = Autoregressive(4, INPUTS, 8).double(), latent(9, 4), draw(9, INPUTS)
        with torch.no_grad():
            step.last.bias += 100.0  # of log-scales and shifts
        y, scale = step(z, x)
        torch.testing.assert_close(scale, torch.full_like(z, 2.0))
        torch.testing.assert_close(step.inverse(y, x), z, rtol=0, atol=1e-12)

    def test_seeds_and_global_numbers(self) -> None:
        state = torch.get_rng_state()
        first, same, other = (Flow(3, INPUTS, seed=seed).state_dict() for seed in (1, 1, 2))
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert not torch.equal(first["steps.1.lower"], other["steps.1.lower"])
        assert torch.equal(torch.get_rng_state(), state)

    def test_state_dict(self) -> None:
        flow, twin, z, x = trained_like(Flow(3, INPUTS)), Flow(3, INPUTS, seed=5), draw(8, 3), draw(8, INPUTS, seed=1)
        twin.load_state_dict(flow.state_dict())
        assert twin.initialised
        assert torch.equal(twin(z, x)[0], flow(z, x)[0])

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="`inputs` must be at least 1, but got 0"):
            Flow(3, 0)


class TestBisection:
    def test_feasible_where_the_centre_is(self, case: tuple[sn.Constraints, int]) -> None:
        layer, x = ready(*case), inputs(60)
        y = draw(60, layer.predictions(case[1]), seed=6, scale=3)
        assert (case[0].violation(centre(layer, x), x) <= 1e-5).all()
        solution = layer.solve(y, x)
        assert (case[0].violation(solution.raw, x) > 1e-5).sum() > 20
        assert solution.converged.all()
        assert case[0].violation(solution.value, x).max() <= 1e-5

    def test_equalities_are_exact(self) -> None:
        layer, x = ready(polytope(), 4), inputs(60)
        solution = layer.solve(draw(60, 3, seed=6, scale=3), x)
        for y in (solution.value, solution.raw):
            torch.testing.assert_close(y.sum(1), x[:, 0] / 3, rtol=0, atol=1e-12)

    def test_feasible_samples_are_not_touched(self, case: tuple[sn.Constraints, int]) -> None:
        layer, x = ready(*case), inputs(60)
        solution = layer.solve(draw(60, layer.predictions(case[1]), seed=6), x)
        fine = case[0].violation(solution.raw, x) <= 1e-5
        assert 5 < fine.sum() < 55
        assert torch.equal(solution.value[fine], solution.raw[fine])
        assert (solution.steps[fine] == 0).all()
        assert (solution.steps[~fine] > 0).all()
        assert (solution.value[~fine] != solution.raw[~fine]).any(1).all()

    def test_it_stops_near_the_last_feasible_point_of_the_segment(self, case: tuple[sn.Constraints, int]) -> None:
        """The value lies on the latent segment, and a step of `width` further out is infeasible."""
        layer, x = ready(*case, width=1e-3), inputs(40)
        solution = layer.solve(draw(40, layer.predictions(case[1]), seed=6, scale=3), x)
        moved = solution.steps > 0
        x, free = x[moved], layer.completion.order[:3] if layer.completion.rows else torch.arange(2)
        arms, ends = (layer.flow.inverse((y[moved][:, free] / 3 + 1) / 2, x) - 0.5 for y in solution[:2])
        alpha = (arms * ends).sum(1) / ends.square().sum(1)
        torch.testing.assert_close(arms, alpha.unsqueeze(1) * ends, rtol=0, atol=1e-8)
        further = (alpha + 1.01e-3).clamp(max=1).unsqueeze(1)
        assert (case[0].violation(image(layer, 0.5 + further * ends, x), x) > 1e-5).all()

    def test_all_shrinks_feasible_samples_too(self) -> None:
        """As in the paper's code: 0.9, 0.99, and 0.999, since 1 - 0.99 is not below 0.01."""
        layer, x = ready(disk(), 2, bisect="all"), inputs(30)
        y = draw(30, 2, seed=6, scale=0.1)
        solution = layer.solve(y, x)
        fine = disk().violation(solution.raw, x) == 0
        assert fine.sum() > 20
        assert (solution.steps[fine] == 3).all()
        z = layer.flow.inverse(torch.sigmoid(y), x)
        torch.testing.assert_close(solution.value[fine], image(layer, 0.5 + 0.999 * (z - 0.5), x)[fine])

    def test_an_infeasible_centre_is_reported(self) -> None:
        far = sn.Quadratic(torch.ones(1, 2), torch.tensor([[-40.0, 0.0]]), upper=-399.0)  # a disk around (20, 0)
        layer, x = ready(far, 2, on_failure="ignore"), inputs(5)
        solution = layer.solve(draw(5, 2, seed=6), x)
        assert (solution.status == sn.Status.STALLED).all()
        assert (solution.steps == 44).all()  # 0.9^44 < 0.01
        torch.testing.assert_close(solution.value, centre(layer, x))
        layer.max_steps = 5
        assert (layer.solve(draw(5, 2, seed=6), x).status == sn.Status.MAX_STEPS).all()
        layer.on_failure = "warn"
        with pytest.warns(sn.RepairWarning, match="5 of 5 samples"):
            layer(draw(5, 2, seed=6), x)

    @pytest.mark.parametrize("training", [True, False])
    def test_gradcheck(self, case: tuple[sn.Constraints, int], training: bool) -> None:
        layer, x = ready(*case, on_failure="ignore").train(training), inputs(3).requires_grad_()
        y = draw(3, layer.predictions(case[1]), seed=6, scale=2).requires_grad_()
        assert training or (layer.solve(y, x).steps > 0).sum() >= 2
        assert torch.autograd.gradcheck(layer, (y, x), eps=1e-7, atol=1e-5, rtol=1e-4)

    def test_training_mode_only_completes(self) -> None:
        layer, x, y = ready(polytope(), 4, on_failure="ignore").train(), inputs(20), draw(20, 3, seed=6, scale=2)
        solution = layer.solve(y, x)
        assert torch.equal(solution.value, solution.raw)
        torch.testing.assert_close(solution.raw[:, layer.completion.order[:3]], 3 * torch.tanh(y / 2))
        violation = polytope().violation(solution.value, x)
        torch.testing.assert_close(solution.violation, violation)
        assert torch.equal(solution.converged, violation <= 1e-5)
        assert layer.solve(y, x, relax=10.0).converged.all()

    def test_a_layer_in_float32(self) -> None:
        """What is feasible is still checked in float64."""
        layer, x, y = ready(polytope(), 4).float(), inputs(20).float(), draw(20, 3, seed=6, scale=2).float()
        assert layer.solve(y, x).converged.all()


class TestPretraining:
    def test_it_fills_the_set(self) -> None:
        """The image of the cube is feasible, and a good part of the disk."""
        layer, told = HProjLayer(disk(), INPUTS, 2, lr=1e-2), []
        before = torch.get_rng_state()
        layer.pretrain(inputs(100), steps=250, progress=lambda done, total: told.append((done, total)))
        assert torch.equal(torch.get_rng_state(), before)
        assert told == [(100, 250), (200, 250), (250, 250)]
        assert not any(parameter.requires_grad for parameter in layer.flow.parameters())
        z, x = torch.rand(400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64), inputs(400, 8)
        share, logdet = layer.flow(z, x)
        assert (disk().violation(5 * (2 * share - 1), x) < 0.1).double().mean() > 0.9
        area = 100 * logdet.exp().mean().item()
        assert 0.3 * torch.pi < area < 1.1 * torch.pi
        assert layer.eval().solve(draw(200, 2, seed=6, scale=3), inputs(200, 9)).converged.all()

    def test_the_loss_is_the_formula(self) -> None:
        layer, z, x = HProjLayer(disk(), INPUTS, 2), latent(6, 2), inputs(6)
        flow = trained_like(Flow(2, INPUTS))
        terms = layer._terms(flow, z, x)
        share, logdet = flow(z, x)
        y = 5 * (2 * share - 1)
        violation = torch.relu((y[:, 0] - x[:, 0] / 2).square() + y[:, 1].square() - 1)
        assert terms["volume"].item() == pytest.approx(-logdet.mean().item() / 2)
        assert terms["violation"].item() == pytest.approx(10 * violation.mean().item())
        spread = sum((s[:, 0] - s[:, 1]).abs() for s in flow.trace(z, x)[1])
        assert terms["distortion"].item() == pytest.approx(spread.mean().item())

    def test_seeds(self) -> None:
        def weights(seed: int, **options: Any) -> Tensor:
            layer = HProjLayer(disk(), INPUTS, 2, **options)
            layer.pretrain(inputs(20), steps=2, seed=seed)
            return torch.cat([p.flatten() for p in layer.flow.parameters()])

        assert torch.equal(weights(0), weights(0))
        assert not torch.equal(weights(0), weights(1))
        assert not torch.equal(weights(0), weights(0, widen=0.1))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_recorded_it_learns_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recorded: list[Replayed] = []

        def record(function: Callable[..., None]) -> Replayed:
            recorded.append(Replayed(function))
            return recorded[-1]

        def weights() -> list[Tensor]:
            layer = HProjLayer(polytope(), INPUTS).cuda()
            layer.pretrain(inputs(20).cuda(), steps=30)
            return list(layer.flow.parameters())

        monkeypatch.setattr(hproj, "Replayed", lambda function: function)
        plain = weights()
        monkeypatch.setattr(hproj, "Replayed", record)
        found = weights()
        assert recorded[0].graph is not None
        for mine, other in zip(found, plain, strict=True):
            assert_equal(mine, other, 1e-9)

    def test_learned_constraints_get_no_gradient(self) -> None:
        bound = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        layer = HProjLayer(sn.Linear(draw(1, 2), upper=bound), INPUTS)
        layer.pretrain(inputs(20), steps=2)
        assert bound.grad is None

    def test_with_the_trainer(self, tmp_path: Path) -> None:
        problem = sn.problems.load("nclp", size=8, inequalities=3, equalities=2, instances=120)
        layer = HProjLayer(problem.constraints, 2, problem.size, lr=1e-2, pretrain_steps=150)
        assert layer.predictions(problem.size) == 6
        config = sn.TrainConfig(epochs=1, batch=25, width=16, penalty=10.0)
        model = sn.ConstrainedModel(config.build_net(2, 6), layer)
        before = copy.deepcopy(model.net.state_dict())
        run = sn.Trainer(config, tmp_path / "run", quiet=True).fit(model, problem)
        layer.pretrain(problem.split("train"))
        saved = run.read_tensors("model.safetensors")[0]
        for name, tensor in layer.flow.state_dict().items():  # training the network left the flow alone
            assert torch.equal(saved[f"layer.flow.{name}"], tensor)
        assert not any(torch.equal(before[name], saved[f"net.{name}"]) for name in before)
        x = problem.split("test")
        assert problem.constraints.violation(model(x), x).max() <= 1e-5


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"bisect": "some"}, "`bisect` must be 'infeasible' or 'all', but got 'some'"),
            ({"box": 0.0}, "`box` must be > 0, but got 0.0"),
            ({"size": None}, "give `size`"),
            ({"partial": "best"}, "`partial` must be"),
            ({"inputs": 0}, "`inputs` must be at least 1"),
        ],
    )
    def test_wrong_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HProjLayer(disk(), **{"inputs": INPUTS, "size": 2} | options)

    def test_wrong_sets(self) -> None:
        circle = sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), equals=1.0)
        with pytest.raises(ValueError, match=r"HProj needs linear equalities .* but got Quadratic equalities"):
            HProjLayer(circle & sn.Box(-1.0, 1.0), INPUTS)
        with pytest.raises(ValueError, match=r"HProj needs linear equalities .* but got Linear equalities"):
            HProjLayer(sn.Linear(lambda x: x.unsqueeze(1), equals=1.0), INPUTS, 2)
        with pytest.raises(ValueError, match="`size` must be 4, as the constraints have it, but got 3"):
            HProjLayer(polytope(), INPUTS, 3)

    def test_wrong_tensors(self) -> None:
        layer = ready(polytope(), 4)
        with pytest.raises(ValueError, match=r"`x` must have shape \(B, 2\), but got NoneType"):
            layer(draw(3, 3))
        with pytest.raises(ValueError, match=r"`inputs` must have shape \(N, 2\), but got shape \(5, 3\)"):
            layer.pretrain(draw(5, 3))
        with pytest.raises(ValueError, match="`inputs` must hold at least one input"):
            layer.pretrain(inputs(0))

    def test_it_must_be_pretrained(self) -> None:
        layer = HProjLayer(disk(), INPUTS, 2).eval()
        with pytest.raises(RuntimeError, match=r"call `pretrain\(inputs\)`"):
            layer(draw(5, 2, scale=3), inputs(5))

    @pytest.mark.parametrize("name", ["paper", "fair"])
    def test_settings(self, name: str) -> None:
        layer = HProjLayer(polytope(), INPUTS, **settings("hproj", name))
        assert (layer.box, layer.bisect) == {"paper": (100.0, "all"), "fair": (5.0, "infeasible")}[name]
