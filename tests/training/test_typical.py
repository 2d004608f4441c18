"""What training finds out about the solutions of a problem: weights, a typical point, scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.optimum import Slope
from snarenet.training import typical
from snarenet.training.rows import kind
from snarenet.training.typical import Found, find


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Share(sn.Problem):
    """min sum h (y - t x)^2 / 2 + c y, so that sum y = sum x."""

    convex = True

    def __init__(self, bends: list[float], cost: list[float]) -> None:
        super().__init__()
        self.size = len(bends)
        self.bends, self.cost = (torch.tensor(v, dtype=torch.float64) for v in (bends, cost))
        self.target = draw(self.size, 3, seed=1)
        self.register_buffer("inputs", 1 + 0.3 * draw(60, 3))
        ones = torch.ones(1, self.size, dtype=torch.float64)
        self.constraints = sn.Linear(ones, equals=lambda x: x.sum(1, keepdim=True)) & sn.Box(-9.0, 9.0)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return (self.bends * (y - x @ self.target.T).square() / 2 + self.cost * y).sum(1)


class Rough(torch.autograd.Function):
    """y^2 / 2, twice differentiable, but not for many directions at once."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.square() / 2

    @staticmethod
    def backward(ctx, v: Tensor) -> Tensor:  # pyright: ignore
        (y,) = ctx.saved_tensors
        assert y.data_ptr()  # which a batched tensor does not have
        return v * y


class TestWeights:
    def test_second_derivatives(self) -> None:
        problem = Share([1.0, 2.0, 1.2, 2.5], [0.0] * 4)
        weights = find(problem).weights
        torch.testing.assert_close(weights / weights[0], problem.bends, rtol=1e-9, atol=0)

    def test_variables_at_a_bound_are_no_dearer(self) -> None:
        """Two of four are at zero in nearly all samples."""
        problem = Share([1.0, 1.0, 1.0, 2.0], [0.0, 0.0, 20.0, 30.0])
        problem.constraints = problem.constraints & sn.Box(0.0, 4.0)
        weights = find(problem).weights
        torch.testing.assert_close(weights / weights[0], problem.bends, rtol=1e-6, atol=0)

    def test_a_floor(self) -> None:
        weights = find(Share([1.0, 1.0, 1.0, 0.0], [0.0] * 4)).weights
        assert 0.01 < weights[3] / weights[0] < 1

    def test_a_linear_objective(self) -> None:
        """One over the squared spread: what varies little is dear."""
        problem = Share([0.0] * 4, [1.0, 0.5, -0.2, 0.1])
        y, _ = typical._solutions(problem, torch.zeros(4, dtype=torch.float64))
        weights = find(problem).weights * typical._usual(y).square()
        torch.testing.assert_close(weights / weights[0], torch.ones_like(weights), rtol=1e-9, atol=0)

    @pytest.mark.parametrize("name", ["qcqp", "ncqcqp"])
    def test_second_derivatives_of_a_family(self, name: str) -> None:
        problem = sn.problems.load(name, size=30, inequalities=10, equalities=10, instances=300)
        weights = find(problem).weights
        assert torch.corrcoef(torch.stack([weights, problem.square]))[0, 1] > 0.95

    def test_a_function_for_one_direction_at_a_time(self) -> None:
        problem = Share([1.0] * 4, [0.0] * 4)
        problem.objective = lambda y, x: (problem.bends * Rough.apply(y)).sum(1)
        slope = Slope(problem.objective, draw(5, 4), problem.inputs[:5])
        torch.testing.assert_close(slope.diagonal(), problem.bends)


class TestStep:
    """The factor of a step down the objective."""

    def test_the_curvature_is_met(self) -> None:
        for bends in ([1.0, 2.0, 1.2, 2.5], [1.0, 1.0, 1.0, 0.01]):
            found = find(Share(bends, [0.0] * 4))
            torch.testing.assert_close((found.step * torch.tensor(bends) / found.weights).max().item(), 1.0)

    def test_none_down_a_linear_objective(self) -> None:
        assert find(Share([0.0] * 4, [1.0, 0.5, -0.2, 0.1])).step == 0

    def test_it_is_not_too_long(self) -> None:
        problem = Share([1e-5] * 4, [1.0, 0.5, -0.2, 0.1])
        found = find(problem)
        length = (found.step * problem.cost / found.weights).square() @ found.weights
        y, _ = typical._solutions(problem, torch.zeros(4, dtype=torch.float64))
        spread = y.var(0, correction=0) @ found.weights
        assert 30 < (length / spread).sqrt() <= 55

    @pytest.mark.parametrize("cost", [0.0, 1e3])
    def test_rows_of_any_kind(self, cost: float) -> None:
        """Onto them it pays to project where the objective is curved over what solutions differ by, not else."""
        problem = Share([1.0, 2.0, 1.2, 2.5], [cost, 0.0, -cost, 0.0])
        problem.convex = False
        problem.constraints = sn.Nonlinear(lambda y, x: y.square() + 0.1 * y.sin(), 4, upper=1.0)
        assert kind(problem) == "any"
        found, layer = find(problem), sn.TrainConfig().build(problem).layer
        assert isinstance(layer, sn.SnareLayer)
        curved = cost == 0.0
        assert (found.step > 0, layer.options.start, layer.descends) == (curved, "auto" if curved else None, curved)
        if curved:
            torch.testing.assert_close(found.weights / found.weights[0], problem.bends, rtol=1e-9, atol=0)
        else:  # by lengths that most solutions differ by
            y, x = typical._solutions(problem, torch.zeros(4, dtype=torch.float64))
            expected = typical._metric(y, typical.Slope(problem.objective, y, x), typical._usual(y), typical._FLOOR)
            torch.testing.assert_close(found.weights, expected)
            assert expected.max() > 1.1 * expected.min()

    def test_rows_of_the_hessian_count(self) -> None:
        """Of a full Hessian no step exceeds twice what its largest eigenvalue allows."""
        problem = Share([1.0] * 4, [0.0] * 4)
        problem.objective = lambda y, x: y.sum(1).square()
        found = find(problem)
        hessian = found.step * torch.full((4, 4), 2.0, dtype=torch.float64) / found.weights.sqrt()
        largest = torch.linalg.eigvalsh((hessian.T / found.weights.sqrt()).T).max()
        assert 0.3 < largest <= 1 + 1e-9


class TestTypical:
    def test_near_the_optima(self) -> None:
        problem = Share([1.0, 2.0, 0.8, 1.5], [0.3, 0.0, 0.0, -0.2])
        x = problem.split("train")
        x = x[torch.linspace(0, len(x) - 1, 32).round().long()]
        wanted = x @ problem.target.T - problem.cost / problem.bends
        over = wanted.sum(1) - x.sum(1)
        best = wanted - over.unsqueeze(1) / problem.bends / (1 / problem.bends).sum()
        found = find(problem)
        torch.testing.assert_close(found.centre, best.mean(0), rtol=0, atol=1e-3)
        torch.testing.assert_close(found.scale, best.std(0, correction=0), rtol=1e-2, atol=1e-3)

    def test_the_metric_is_that_of_most_samples(self) -> None:
        y = draw(32, 3)
        usual = y.std(0)
        y[:2] *= 30
        y[2:, 2] = 0.5  # leaves its bound in two samples alone
        found = typical._usual(y)
        torch.testing.assert_close(found[:2], usual[:2], rtol=0.3, atol=0)
        assert found[2] < 0.2 * usual[2]
        weights = typical._metric(y, Slope(lambda y, x: y.sum(1), y, y), torch.ones_like(found), 0.3)
        torch.testing.assert_close(weights / weights[0], (found[0] / found).square())

    def test_most_samples_at_a_bound_have_a_spread(self) -> None:
        """An interior point is near a bound, not on it."""
        y = draw(32, 3)
        y[4:, 2] = 1e-5 * draw(28)
        assert typical._usual(y)[2] > 0.05 * typical._usual(y)[0]

    def test_variables_at_bounds_have_a_spread(self) -> None:
        """At the vertices of a linear program they differ by rounding alone."""
        found = find(Share([0.0] * 4, [1.0, 0.5, -0.2, 0.1]))
        assert found.scale.min() > 0.05 * found.scale.max()
        assert found.weights.min() > 1e-4 * found.weights.max()

    def test_the_same_each_time(self) -> None:
        problem = sn.problems.load("nclp", size=12, inequalities=4, equalities=4, instances=60)
        state = torch.get_rng_state()
        for one, other in zip(find(problem), find(problem), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(torch.get_rng_state(), state)

    def test_what_a_problem_says_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The search begins at its typical point."""
        problem = Share([1.0] * 4, [0.0] * 4)
        monkeypatch.setattr(Share, "typical", torch.full((4,), 3.0))
        monkeypatch.setattr("snarenet.training.typical.polish", lambda objective, constraints, y, *others, **options: y)
        x = problem.split("train")
        count = len(x) if len(x) < 32 else 32
        x = x[torch.linspace(0, len(x) - 1, count).round().long()]
        torch.testing.assert_close(find(problem).centre, (x.sum(1) / 4).mean().expand(4), rtol=0, atol=1e-5)

    def test_a_linear_objective_between_bounds(self) -> None:
        """Its optima are at bounds, where a repaired point is not."""

        class Dear(Share):
            def __init__(self) -> None:
                super().__init__([0.0] * 4, [1.0, 2.0, 3.0, 4.0])
                self.constraints = self.constraints.parts[0] & sn.Box(0.0, 2.0)

        problem = Dear()
        x = problem.split("train")
        cheapest = x.sum(1).clamp(max=2.0) + 2 * (x.sum(1) - 2).clamp(0.0, 2.0) + 3 * (x.sum(1) - 4).clamp(min=0.0)
        spent = problem.objective(find(problem).centre.expand(len(x), -1), x).mean()
        torch.testing.assert_close(spent, cheapest.mean(), rtol=0.05, atol=0)

    def test_nothing_is_known_of_a_policy_or_an_empty_set(self) -> None:
        empty = Share([1.0] * 4, [0.0] * 4)
        empty.constraints = sn.Box(-1.0, 1.0) & sn.Linear(torch.ones(1, 4, dtype=torch.float64), equals=9.0)
        for problem in (sn.problems.load("cbf", instances=20), empty):
            for one, other in zip(find(problem), Found.blank(problem), strict=True):
                assert torch.equal(one, other)
        policy = sn.TrainConfig().build(sn.problems.load("cbf", instances=20))
        assert policy.units is None
        assert policy.layer.weights is None


class TestModel:
    def test_a_network_starts_there(self) -> None:
        problem = sn.problems.load("nclp", size=12, inequalities=4, equalities=4, instances=120)
        x, found = problem.split("train"), find(problem)
        bare = sn.TrainConfig(standardise=False).build(problem)
        model = sn.TrainConfig().build(problem)
        away = [(m.raw(x) - found.centre).square().mean().sqrt().item() for m in (model, bare)]
        assert away[0] < 6 * found.scale.square().mean().sqrt()
        assert bare.units is None
        assert problem.objective(model(x), x).mean() < problem.objective(bare(x), x).mean()

    def test_a_run_keeps_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        problem = Share([1.0, 2.0, 1.2, 2.5], [0.0] * 4)
        config = sn.TrainConfig(epochs=1, width=8, batch=20)
        model = config.build(problem)
        run = sn.Trainer(config, tmp_path / "run", quiet=True).fit(model, problem)
        monkeypatch.setattr("snarenet.training.config.find", None)  # whoever looks again fails
        again = run.load_model(problem)
        assert torch.equal(again.layer.state_dict()["weights"], find(problem).weights)
        assert torch.equal(again(problem.inputs), model(problem.inputs))

    @pytest.mark.parametrize("units", [True, False])
    def test_a_network_of_ones_own(self, tmp_path: Path, units: bool) -> None:
        problem, config = Share([1.0] * 4, [0.0] * 4), sn.TrainConfig(epochs=1, width=8, batch=20)
        net = torch.nn.Linear(3, 4)
        model = config.build(problem, net) if units else sn.ConstrainedModel(net, config.build_layer(problem))
        assert (model.units is not None) == units
        run = sn.Trainer(config, tmp_path / "run", quiet=True).fit(model, problem)
        again = run.load_model(problem, torch.nn.Linear(3, 4))
        assert torch.equal(again(problem.inputs), model(problem.inputs))
