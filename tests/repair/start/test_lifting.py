"""The nearest point of a set with an L1 ball: against Clarabel, buys and sells written by hand, and differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.constraints.maps import FunctionMap, LiftedMap
from snarenet.reference import solve
from snarenet.repair.start.lifting import ball_of
from snarenet.testing import assert_equal, draw

N = 5
WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 2.0, 0.5], dtype=torch.float64)
Y, X = draw(12, N, seed=2), 0.2 * draw(12, N, seed=3)
ONES = torch.ones(1, N, dtype=torch.float64)
F, A = draw(N, 2, seed=6), draw(2, N, seed=7)
D = torch.full((N,), 0.3, dtype=torch.float64)


def waves(y: Tensor, x: Tensor) -> Tensor:
    return y.sin() @ A.T + y[:, :1] * y[:, 1:2]


def bowl() -> sn.Constraints:
    """Convex, with a center that is outside of the box for some."""
    risk = sn.Quadratic(factor=lambda x: F * (1 + x[:, :1]).unsqueeze(2), diagonal=D, upper=0.4)
    round_ = sn.Quadratic(torch.ones(1, N), upper=0.5)
    return sn.L1Ball(lambda x: x, 1.2) & risk & round_ & sn.Linear(ONES, equals=0.1) & sn.Box(-0.3, 0.4)


def curved() -> sn.Constraints:
    return (
        sn.Box(-1.0, 1.0) & sn.Nonlinear(waves, 2, -0.1, 0.1) & sn.L1Ball(lambda x: x, lambda x: 0.8 + x[:, :1].abs())
    )


KINDS = pytest.mark.parametrize("kind", [bowl, curved])


def nearest(constraints: sn.Constraints, y: Tensor, x: Any, weights: Tensor | None = WEIGHTS) -> sn.Solution:
    return sn.repair(constraints, y, x, start=sn.Nearest(), weights=weights)


@pytest.mark.parametrize("risk", ["factor", "full"])
def test_portfolios_are_those_of_the_solver(risk: str) -> None:
    pytest.importorskip("clarabel")
    problem = sn.problems.load("portfolio", risk=risk, form="weights", assets=20, factors=3, instances=40)
    x = problem.inputs
    solution = nearest(problem.constraints, problem.held(x) + problem.returns(x) / problem.impact, x, problem.impact)
    assert (solution.steps == 0).all()
    best = solve(problem, x, "clarabel", workers=1, cache=False)
    assert best.ok.all()
    assert_equal(problem.objective(solution.value, x), best.objective, 1e-9)


@KINDS
def test_buys_and_sells_by_hand(kind: Any) -> None:
    """The same points as in 2n variables, where the ball is a row."""
    solution, radius = nearest(kind(), Y, X), 1.2 if kind is bowl else 0.8 + X[:, :1].abs()
    others = [part for part in kind().parts if not isinstance(part, sn.L1Ball)]

    def rows(v: Tensor, x: Tensor) -> Tensor:
        y = x[:, :N] + v[:, :N] - v[:, N:]
        return torch.cat([*(part.value(y, x) for part in others), v.sum(1, keepdim=True) - x[:, N:]], 1)

    def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = [part.at(Y, X) for part in others]
        return tuple(torch.cat([getattr(pair, side) for pair in pairs], 1) for side in ("lower", "upper"))  # pyright: ignore

    both, end = torch.cat([X, torch.as_tensor(radius).expand(len(Y), 1)], 1), torch.zeros(len(Y), 1)
    lower, upper = (torch.cat([b, e], 1) for b, e in zip(bounds(X), (end - torch.inf, end), strict=True))
    hand = sn.Nonlinear(rows, lower.shape[1], lambda _: lower, lambda _: upper, sparsity=None) & sn.Box(0.0, None)
    found = nearest(hand, torch.cat([Y - X, X - Y], 1), both, WEIGHTS.repeat(2))
    ok = (found.steps == 0) & found.converged
    assert ok.all()
    assert (solution.steps == 0).all()
    bought, sold = found.value.chunk(2, 1)
    assert_equal(solution.value[ok], (X + bought - sold)[ok], 1e-7)
    assert kind().violation(solution.value, X).max() < 1e-8


@KINDS
def test_gradients(kind: Any) -> None:
    constraints = kind()
    some = (nearest(constraints, Y, X).steps == 0).nonzero().squeeze(1)[:2]
    y, x = Y[some].clone().requires_grad_(), X[some].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y, x: nearest(constraints, y, x).value, (y, x), atol=1e-5)


def test_gradients_of_tensors_of_the_set() -> None:
    x, inputs = X[:4], [t.clone().requires_grad_() for t in (X[0], torch.tensor(0.6), F, D, A, torch.tensor(0.4))]
    inputs = [t.detach().double().requires_grad_() for t in inputs]

    def outcome(center: Tensor, radius: Tensor, F: Tensor, D: Tensor, A: Tensor, high: Tensor) -> Tensor:
        rows = sn.Quadratic(factor=lambda _: F.expand(4, -1, -1), diagonal=lambda _: D.expand(4, -1), upper=0.4)
        bent = sn.Nonlinear(lambda y, x: (y @ A.T).tanh(), rows=2, upper=0.1)
        ball = sn.L1Ball(lambda _: center.expand(4, -1), lambda _: radius.expand(4, 1))
        solution = nearest(ball & rows & bent & sn.Box(-0.5, lambda _: high.expand(4, N)), Y[:4], x)
        assert (solution.steps == 0).all()
        return solution.value

    assert torch.autograd.gradcheck(outcome, inputs, atol=1e-5)


def test_relaxed_and_double_balls_are_left_to_the_repair() -> None:
    instance = bowl().at(Y, X)
    assert ball_of(instance) == 0
    assert ball_of(instance.relaxed(0.1)) is None
    assert ball_of((bowl() & sn.L1Ball(0.0, 2.0)).at(Y, X)) is None
    two = nearest(bowl() & sn.L1Ball(0.0, 2.0), Y, X)
    assert two.converged.all()


def test_single_precision_and_nothing_to_do() -> None:
    assert nearest(bowl(), Y[:0], X[:0]).value.shape == (0, N)
    inside = nearest(bowl(), Y, X).value
    again = nearest(bowl(), inside, X)
    assert_equal(again.value, inside, 1e-8)
    layer = sn.SnareLayer(bowl(), start=sn.Nearest(), tol=1e-4, dtype=torch.float32, weights=WEIGHTS).float()
    assert_equal(layer(Y.float(), X.float()).double(), inside, 5e-3)


def test_products_of_a_lifted_map() -> None:
    """Value, Jacobian, products and pullback of a function in buys and sells, against autograd."""
    map = LiftedMap(FunctionMap(waves, X, 2), X.clone().requires_grad_())
    v, t, w = draw(12, 2 * N, seed=11), draw(12, 2 * N, seed=12), draw(12, 2, seed=13)
    J = torch.stack(
        [torch.func.jacrev(lambda u, i=i: map.select(torch.tensor([i])).value(u[None])[0])(v[i]) for i in range(12)]
    )
    assert_equal(map.jacobian(v), J, 1e-12)
    assert_equal(map.jvp(v, t), (J @ t.unsqueeze(2)).squeeze(2), 1e-12)
    assert_equal(map.vjp(v, w), (w.unsqueeze(1) @ J).squeeze(1), 1e-12)
    in_v, in_center = map.pullback(v, [(w, t)], w, (map.center,))
    leaf = v.clone().requires_grad_()
    total = (w * map.jvp(leaf, t)).sum() + (w * map.value(leaf)).sum()
    expected = torch.autograd.grad(total, (leaf, map.center))
    assert_equal(in_v, expected[0], 1e-12)
    assert_equal(in_center, expected[1], 1e-12)
