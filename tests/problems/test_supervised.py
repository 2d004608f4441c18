"""Labelled data: what a model and its set see of them, losses, training, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems import Supervised
from snarenet.reference import solve

ONES = torch.ones(1, 4, dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts() -> sn.Constraints:
    """Parts of a total: the last entry of x, counted from the end."""
    return sn.Box(0.0, None) & sn.Linear(ONES, equals=lambda x: 1 + x[:, -1:])


def data(count: int = 240) -> Supervised:
    x = draw(count, 3)
    shares = torch.softmax(2 * x @ draw(3, 4, seed=1), 1)
    noise = 0.02 * torch.randn(count, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return Supervised(parts(), x, (1 + x[:, 2:]) * shares + noise)


def trained(problem: Supervised, out: Path, **fields: object) -> sn.ConstrainedModel:
    config = sn.TrainConfig(**{"epochs": 20, "width": 16, "batch": 25} | fields)  # pyright: ignore[reportArgumentType]
    model = config.build(problem)
    sn.Trainer(config, out, quiet=True).fit(model, problem)
    return model


def test_the_loss_is_one_for_who_says_the_mean() -> None:
    problem = data()
    targets = problem.targets(problem.inputs)
    mean = targets.mean(0).expand_as(targets)
    assert problem.objective(mean, problem.inputs).mean().item() == pytest.approx(1, abs=1e-12)
    expected = ((mean - targets) / targets.std(0, correction=0)).square().mean(1)
    torch.testing.assert_close(problem.objective(mean, problem.inputs), expected)


def test_a_target_that_never_changes() -> None:
    problem = Supervised(sn.Box(0.0, 1.0), draw(20, 2), torch.full((20, 3), 0.5))
    assert problem.objective(torch.zeros(20, 3, dtype=torch.float64), problem.inputs).tolist() == [0.25] * 20


def test_missing_targets_are_not_scored(tmp_path: Path) -> None:
    whole = data()
    x, targets = whole.seen(whole.inputs), whole.targets(whole.inputs).clone()
    missing = draw(*targets.shape, seed=5) < 0.3
    missing[7] = True  # nothing is known of this one
    targets[missing] = torch.nan
    problem = Supervised(parts(), x, targets)
    y = draw(len(x), 4, seed=6)
    kept = [targets[~missing[:, j], j] for j in range(4)]
    assert problem.deviation.tolist() == pytest.approx([one.std(correction=0).item() for one in kept], rel=1e-12)
    errors = ((y - whole.targets(whole.inputs)) / problem.deviation).square()
    for i in range(20):
        known = errors[i, ~missing[i]]
        expected = known.mean().item() if len(known) else 0.0
        assert problem.objective(y, problem.inputs)[i].item() == pytest.approx(expected, rel=1e-12)
    y.requires_grad_()
    problem.objective(y, problem.inputs).sum().backward()
    assert y.grad is not None
    assert bool((y.grad[missing] == 0).all())
    model = trained(problem, tmp_path / "run")
    summary = sn.evaluate(model, problem).summary
    assert summary["objective"]["mean"] < 0.3
    assert summary["violation"] <= 1e-8


def test_training_learns_and_obeys(tmp_path: Path) -> None:
    problem = data()
    model = trained(problem, tmp_path / "run")
    summary = sn.evaluate(model, problem, closeups=3).summary
    assert summary["objective"]["mean"] < 0.25
    assert summary["violation"] <= 1e-8
    x = problem.seen(problem.split("test"))
    y = model(x)
    torch.testing.assert_close(y.sum(1), 1 + x[:, 2], rtol=0, atol=1e-8)
    assert y.min().item() >= -1e-8


@pytest.mark.parametrize("method", ["hardnet++", "soft", "dc3", "fsnet", "pinet"])
def test_other_methods(method: str, tmp_path: Path) -> None:
    problem = data(120)
    model = trained(problem, tmp_path / "run", method=method, epochs=1)
    assert sn.evaluate(model, problem).summary["feasible"]["1e-04"] == 1


def test_targets_are_not_seen(tmp_path: Path) -> None:
    problem, other = data(), data()
    model = trained(problem, tmp_path / "run", epochs=1)
    other.inputs[:, 3:] += 5 * draw(len(other.inputs), 4, seed=3)
    assert problem.solvable is False
    values = [problem.seen(one.split("test")) for one in (problem, other)]
    torch.testing.assert_close(model(values[0]), model(values[1]), rtol=0, atol=0)
    before, after = (sn.evaluate(model, one).summary for one in (problem, other))
    assert after["violation"] == before["violation"]
    assert after["objective"]["mean"] > before["objective"]["mean"] + 1


def test_the_set_sees_what_the_model_sees() -> None:
    """Its functions may count entries of x from the end, or take x as it is."""
    problem = data(30)
    y, x = draw(30, 4, seed=4), problem.inputs
    expected = parts().residual(y, problem.seen(x))
    torch.testing.assert_close(problem.feasible_set.residual(y, x), expected)
    torch.testing.assert_close(problem.feasible_set.value(y, x), parts().value(y, problem.seen(x)))
    assert problem.equalities(x).tolist() == [False] * 4 + [True]
    for of_whole, of_seen in zip(problem.feasible_set.bounds(x), parts().bounds(problem.seen(x)), strict=True):
        torch.testing.assert_close(of_whole, of_seen)
    whole = Supervised(sn.Box(lambda x: -x, lambda x: x), draw(30, 2), draw(30, 2, seed=1))
    assert whole.feasible_set.violation(whole.inputs[:, :2], whole.inputs).max().item() == 0


def test_the_solver_projects_targets() -> None:
    """In the metric of the loss: what nobody could do better, were the targets known."""
    problem = data(30)
    x = problem.split("test")
    best = solve(problem, x)
    weights = problem.deviation.pow(-2)
    near = sn.repair(parts(), problem.targets(x), problem.seen(x), start=sn.Nearest(), weights=weights, tol=1e-10)
    torch.testing.assert_close(best.value, near.value, rtol=0, atol=1e-6)


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """Of outputs and classes: probabilities with a floor."""
    x = draw(200, 2)
    classes = (x[:, :1] > x[:, 1:]).long() + 2 * (x[:, :1] > 0.8).long()

    def likelihood(y: Tensor, t: Tensor) -> Tensor:
        return -y.gather(1, t.long()).squeeze(1).log()

    floor = sn.Box(0.05, 1.0) & sn.Linear(ONES, equals=1.0)
    problem = Supervised(floor, x, classes, likelihood, size=4)
    model = trained(problem, tmp_path / "run", epochs=30)
    summary = sn.evaluate(model, problem).summary
    y = model(problem.seen(problem.split("test")))
    assert y.min().item() >= 0.05 - 1e-8
    assert summary["violation"] <= 1e-8
    assert summary["objective"]["mean"] < 0.8  # who knows nothing: log 4 = 1.39


def test_inputs_without_a_point_are_left_out() -> None:
    problem = Supervised(sn.Box(0.0, 1.0) & sn.Linear(ONES, equals=lambda x: x), 6 * draw(100, 1), draw(100, 4, seed=1))
    problem.always_feasible = False
    kept = problem.split("train")
    assert 0 < len(kept) < 84
    assert kept[:, 0].max().item() <= 4 + 1e-6
    assert len(kept) + len(problem.infeasible("train")) == int(100 * (1 - 2 * 0.0833))


def test_what_is_refused() -> None:
    x, targets = draw(20, 3), draw(20, 4)
    with pytest.raises(ValueError, match=r"`x` must have shape \(N, d\), but got shape \(20,\)"):
        Supervised(parts(), x[:, 0], targets)
    with pytest.raises(ValueError, match=r"`targets` must have shape \(N, k\)"):
        Supervised(parts(), x, targets[:, 0])
    with pytest.raises(ValueError, match="`targets` must be as many as x, 20, but got 19"):
        Supervised(parts(), x, targets[1:])
    with pytest.raises(ValueError, match="`targets` must be finite, but it holds infinity"):
        Supervised(parts(), x, targets / 0)
    with pytest.raises(ValueError, match="`x` must be finite, but it holds NaN"):
        Supervised(parts(), x / 0 * 0, targets)
    with pytest.raises(ValueError, match="`constraints` are on 4 outputs, but there are 2 of them"):
        Supervised(parts(), x, targets[:, :2])
    with pytest.raises(ValueError, match=r"`targets` must have 4 columns, but got shape \(20, 2\); or give a `loss`"):
        Supervised(parts(), x, targets[:, :2], size=4)
    with pytest.raises(ValueError, match="`candidates` must be 1 where the objective needs"):
        sn.TrainConfig(candidates=3).build(Supervised(parts(), x, targets))
