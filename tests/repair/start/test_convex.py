"""Projections onto convex sets: the solver's optima, without a repair, also where a bound hardly matters."""

from __future__ import annotations

import pytest
import torch

import snarenet as sn
from snarenet.constraints.maps import FactoredMap, LinearMap, QuadraticMap
from snarenet.problems import Portfolio
from snarenet.reference import solve
from snarenet.repair.start import smooth
from snarenet.repair.start.rows import RowsAt, System
from snarenet.testing import assert_equal, draw


def projected(problem: Portfolio, x: torch.Tensor) -> sn.Solution:
    ideal = problem.returns(x) / problem.impact
    weights = problem.impact.repeat(2)
    return sn.repair(problem.constraints, torch.cat([ideal, -ideal], 1), x, start=sn.Nearest(), weights=weights)


@pytest.mark.parametrize("seed", [2025, 1, 2])
def test_many_portfolios_without_a_repair(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smooth, "_from_repaired", None)
    problem = Portfolio(assets=30, factors=4, instances=150, seed=seed)
    solution = projected(problem, problem.inputs)
    assert solution.converged.all()
    assert (solution.steps == 0).all()


def test_portfolios_are_those_of_the_solver() -> None:
    pytest.importorskip("clarabel")
    problem = Portfolio(assets=30, factors=4, instances=40, seed=3)
    best = solve(problem, problem.inputs, "clarabel", workers=1, cache=False)
    assert_equal(problem.objective(projected(problem, problem.inputs).value, problem.inputs), best.objective, 1e-9)


def test_a_limit_that_hardly_matters() -> None:
    """Its slack is 1e-4 of its size: the active set alternates between two until the interior point knows better."""
    pytest.importorskip("clarabel")
    problem = Portfolio(assets=200, factors=10, instances=2400)
    x = problem.split("test")[34:35]
    solution = projected(problem, x)
    assert solution.steps.item() == 0
    room = problem.limit(x) - problem.variance(problem.weights_of(solution.value, x), x)
    assert 0 < room.item() < 1e-3 * problem.limit(x).item()
    best = solve(problem, x, "clarabel", workers=1, cache=False)
    assert_equal(problem.objective(solution.value, x), best.objective, 1e-9)


def test_pieces_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Portfolio(assets=12, factors=3, instances=60)
    whole = projected(problem, problem.inputs).value
    monkeypatch.setattr(smooth, "_FEWEST", 7)
    monkeypatch.setattr(smooth, "_ENTRIES", 1)
    assert_equal(projected(problem, problem.inputs).value, whole, 1e-12)


def test_a_set_without_interior_is_left_to_the_repair() -> None:
    """Two half-spaces that touch: no interior point, and yet a nearest point."""
    A = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    flat = sn.Linear(A, upper=torch.tensor([1.0, -1.0])) & sn.Quadratic(factor=torch.eye(2).double(), upper=9.0)
    solution = sn.repair(flat, torch.tensor([[2.0, 1.0], [0.0, -1.0]], dtype=torch.float64), start=sn.Nearest())
    assert solution.converged.all()
    assert_equal(solution.value, torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64), 1e-6)


F, D, G = draw(5, 2, 6, 3, seed=1), draw(2, 6, seed=2).abs(), draw(2, 6, seed=3)
BOWLS = {
    "factored": FactoredMap(F, D, G),
    "shared": FactoredMap(F[0], D, G),
    "diagonal": QuadraticMap(D, G, diagonal=True),
}


@pytest.mark.parametrize("kind", BOWLS)
def test_hessians_by_factors(kind: str) -> None:
    map, z, weights = BOWLS[kind], draw(5, 6, seed=4), draw(5, 2, seed=5).abs()
    assert map.convex
    d, rows = map.convex_hessian(weights)
    hessian = torch.autograd.functional.hessian(lambda z: (weights * map.value(z)).sum(), z)
    own = torch.stack([hessian[i, :, i] for i in range(5)])
    assert_equal(torch.diag_embed(d) + rows.mT @ rows, own, 1e-12)


def test_convex_rows_are_told_from_others() -> None:
    assert LinearMap(G).convex
    assert not FactoredMap(F, -D, G).convex
    assert not QuadraticMap(-D, G, diagonal=True).convex
    assert not QuadraticMap(torch.eye(6).expand(2, -1, -1), G, diagonal=False).convex
    with pytest.raises(ValueError, match="`QuadraticMap` are not"):
        QuadraticMap(torch.eye(6).expand(2, -1, -1), G, diagonal=False).convex_hessian(draw(5, 2))


def test_systems_with_bowls_are_those_with_products() -> None:
    """The Hessian in the factor gives what conjugate gradients give with products."""
    map, z = BOWLS["factored"], draw(5, 6, seed=6)
    system = System(
        1 + draw(5, 6, seed=7).abs(), torch.arange(6) == draw(5, 1).long() % 6, draw(5, 2, seed=8).abs(),
        torch.tensor([[True, False]] * 5), draw(5, 2, seed=9).abs() * torch.tensor([1.0, 0.0]),
    )  # fmt: skip
    found = []
    for bowls in ((True,), (False,)):
        saddle = RowsAt(map, z, torch.ones(6, dtype=torch.float64), None, bowls).saddle(system, exact=True)
        move = torch.where(system.held, 0.1, z * saddle.inverse)
        found.append(saddle.bent(saddle.move(move, torch.where(system.active, 0.3, 0.0)), 50, 1e-28))
    assert_equal(found[0].d, found[1].d, 1e-10)
    assert_equal(found[0].multipliers[:, :2], found[1].multipliers[:, :2], 1e-10)
