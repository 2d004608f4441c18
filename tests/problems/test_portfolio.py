"""Portfolios: every instance is feasible, limits are what they say, and the solver's optimum obeys them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import snarenet as sn
from snarenet.reference import solve

SMALL = {"assets": 12, "factors": 3, "groups": 3, "instances": 60}


@pytest.mark.parametrize("form", ["trades", "weights"])
@pytest.mark.parametrize("risk", ["factor", "full"])
def test_what_is_held_is_feasible(risk: str, form: str) -> None:
    problem = sn.problems.load("portfolio", risk=risk, form=form, instances=500)
    assert problem.inputs.shape == (500, 50 + (10 if risk == "factor" else 5))
    for x in (problem.inputs, problem.sample(300, torch.Generator().manual_seed(1))):
        held = problem.held(x)
        y = held if form == "weights" else torch.zeros(len(x), 100, dtype=torch.float64)
        assert problem.constraints.violation(y, x).max() < 1e-14
        assert (held.std(1) > 1e-3).all()  # and is not always equal weights


@pytest.mark.parametrize("risk", ["factor", "full"])
def test_rows_and_objective_are_the_formulas(risk: str) -> None:
    problem = sn.problems.load("portfolio", risk=risk, form="weights", turnover=0.3, **SMALL)
    x = problem.inputs[:5]
    y = torch.softmax(torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 1)
    held, loadings = problem.held(x), problem.loadings(x)
    covariance = loadings @ loadings.mT + problem.own.diag()
    variance = torch.einsum("bi,bij,bj->b", y, covariance, y)
    torch.testing.assert_close(problem.variance(y, x), variance)
    ball, risk_rows, groups, budget, box = problem.constraints.parts
    torch.testing.assert_close(risk_rows.value(y, x)[:, 0], variance)
    equal = torch.full_like(y, 1 / 12)
    bounds = risk_rows.at(y, x).upper[:, 0]
    torch.testing.assert_close(bounds, 1.1 * torch.einsum("bi,bij,bj->b", equal, covariance, equal))
    outside = (y - held).abs().sum(1) > 0.3
    assert outside.any()
    assert torch.equal(ball.value(y, x)[:, 0] > 0, outside)
    torch.testing.assert_close(groups.value(y, x), torch.stack([y[:, k::3].sum(1) for k in range(3)], 1))
    torch.testing.assert_close(budget.value(y, x), y.sum(1, keepdim=True))
    assert box.at(y, x).lower.eq(0).all()
    returns = problem.alpha + (problem.premia + problem.spreads * x[:, :3]) @ problem.exposures.T
    cost = (problem.impact * (y - held).square() / 2).sum(1)
    torch.testing.assert_close(problem.objective(y, x), cost - (returns * y).sum(1))


@pytest.mark.parametrize("risk", ["factor", "full"])
def test_trades_and_weights_are_one_problem(risk: str) -> None:
    """Buys and sells of different assets have the rows and the objective of the weights that they lead to."""
    trades, weights = (sn.problems.load("portfolio", risk=risk, form=form, **SMALL) for form in ("trades", "weights"))
    x, draw = trades.inputs, torch.Generator().manual_seed(0)
    assert torch.equal(x, weights.inputs)
    d = 0.05 * torch.randn(60, 12, generator=draw, dtype=torch.float64)
    d = d - d.mean(1, keepdim=True)
    y = torch.cat([d.clamp(min=0), (-d).clamp(min=0)], 1)
    w = trades.weights_of(y, x)
    torch.testing.assert_close(w, weights.held(x) + d)
    torch.testing.assert_close(trades.objective(y, x), weights.objective(w, x))
    feasible = [p.constraints.violation(z, x) <= 1e-12 for p, z in ((trades, y), (weights, w))]
    assert torch.equal(*feasible)
    assert 0 < feasible[0].double().mean() < 1
    risks = [
        (p.constraints.residual(z, x)[:, k], p.constraints.parts[k]) for p, z, k in ((trades, y, 0), (weights, w, 1))
    ]
    torch.testing.assert_close(risks[0][0], risks[1][0])


@pytest.mark.parametrize(("risk", "form"), [("factor", "trades"), ("full", "trades"), ("factor", "weights")])
def test_optima(risk: str, form: str) -> None:
    """Two solvers agree, all kinds of limits bind somewhere, and trades are the projection of returns over costs."""
    pytest.importorskip("clarabel")
    pytest.importorskip("casadi")
    problem = sn.problems.load("portfolio", risk=risk, form=form, **SMALL)
    x = problem.inputs[:20]
    cone, interior = (solve(problem, x, engine, workers=1, cache=False) for engine in ("clarabel", "ipopt"))
    assert cone.ok.all()
    torch.testing.assert_close(cone.objective, interior.objective, rtol=0, atol=1e-8)
    w = problem.weights_of(cone.value, x)
    assert (problem.variance(w, x) > problem.limit(x) - 1e-7).any()
    assert ((w - problem.held(x)).abs().sum(1) > problem.turnover - 1e-7).any()
    assert (w @ problem.members.T > problem.caps - 1e-7).any()
    assert (w < 1e-7).any()
    other = sn.problems.load("portfolio", risk=risk, form="weights", **SMALL)
    assert other.constraints.violation(w, x).max() < 1e-8
    if form == "trades":
        ideal = problem.returns(x) / problem.impact
        y = sn.repair(
            problem.constraints, torch.cat([ideal, -ideal], 1), x, start=sn.Nearest(), weights=problem.impact.repeat(2)
        ).value
        torch.testing.assert_close(problem.objective(y, x), cone.objective, rtol=0, atol=1e-9)


def test_a_step_down_the_objective_is_all_it_takes() -> None:
    """The objective has no second derivatives but the weights: any prediction is repaired to the optimum."""
    pytest.importorskip("clarabel")
    for risk in ("factor", "full"):
        problem = sn.problems.load("portfolio", **SMALL | {"assets": 8, "instances": 240, "risk": risk})
        best = solve(problem, engine="clarabel", workers=1, cache=False).objective
        found = sn.evaluate(sn.TrainConfig(width=32).build(problem), problem, reference=best).summary
        assert found["converged"] == 1
        assert abs(found["gap"]["relative"]) < 1e-6


def test_training_gets_closer_to_the_optimum(tmp_path: Path) -> None:
    pytest.importorskip("clarabel")
    problem = sn.problems.load("portfolio", **SMALL | {"assets": 8, "instances": 240})
    best = solve(problem, engine="clarabel", workers=1, cache=False).objective
    config = sn.TrainConfig(epochs=10, width=32, batch=40, validate_every=10, head=0.1, descent="none")
    model = config.build(problem)
    before = sn.evaluate(model, problem, reference=best).summary
    sn.Trainer(config, tmp_path / "run", quiet=True).fit(model, problem)
    after = sn.evaluate(model, problem, reference=best).summary
    assert after["converged"] == 1
    assert after["gap"]["negative"] == 0
    assert after["gap"]["mean"] < 0.8 * before["gap"]["mean"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"risk": "fulll"}, "`risk` must be one of factor, full, but got 'fulll'"),
        ({"form": "trade"}, "`form` must be one of trades, weights, but got 'trade'"),
        ({"turnover": 3.0}, r"`turnover` must be in \[0, 2\], but got 3.0"),
        ({"groups": 60}, "`groups` must be at most `assets` = 50, but got 60"),
        ({"assets": 0}, "`assets` must be a whole number, at least 1"),
    ],
)
def test_wrong_sizes(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sn.problems.load("portfolio", **sizes)
