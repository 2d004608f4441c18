"""The nearest point of a set with an L1 ball: against Clarabel, buys and sells written by hand, and differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.constraints.maps import FunctionMap, LiftedMap, LinearMap, Map, WidenedMap
from snarenet.problems.separable import Separable
from snarenet.reference import solve
from snarenet.repair.start.lifting import balls_of
from snarenet.testing import assert_equal, draw

N = 5
WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 2.0, 0.5], dtype=torch.float64)
Y, X = draw(12, N, seed=2), 0.2 * draw(12, N, seed=3)
ONES = torch.ones(1, N, dtype=torch.float64)
F, A = draw(N, 2, seed=6), draw(2, N, seed=7)
D = torch.full((N,), 0.3, dtype=torch.float64)
DIFFERENCES = torch.eye(N, dtype=torch.float64).diff(dim=0)


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


def several() -> sn.Constraints:
    """Three balls, two of them with a matrix, one of these for each sample, beside a bowl, a plane and a box."""
    own = sn.L1Ball(lambda x: x[:, :2], lambda x: 0.7 + x[:, :1].abs(), lambda x: A * (2 + x[:, :1]).unsqueeze(2))
    bowls = sn.Quadratic(torch.ones(1, N), upper=0.5) & sn.Quadratic(factor=F, diagonal=D, upper=0.6)
    return (
        own
        & sn.L1Ball(lambda x: x, 1.5)
        & bowls
        & sn.L1Ball(0.0, 0.6, DIFFERENCES)
        & sn.Linear(ONES, equals=0.1)
        & sn.Box(-0.5, 0.6)
    )


def bent() -> sn.Constraints:
    return sn.Nonlinear(waves, 2, -0.1, 0.1) & sn.L1Ball(0.0, 0.5, DIFFERENCES) & sn.Box(-1.0, 1.0)


KINDS = pytest.mark.parametrize("kind", [bowl, curved])
WITH_MATRICES = pytest.mark.parametrize("kind", [several, bent])


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


class Projection(Separable):
    """The nearest point as a problem of its own, for a solver."""

    convex = True

    def __init__(self, constraints: sn.Constraints, weights: Tensor, y: Tensor, x: Tensor) -> None:
        super().__init__()
        self.constraints, self.size, self.features = constraints, y.shape[1], x.shape[1]
        self.store(torch.cat([x, y], 1).numpy(), square=weights.numpy())

    def slope(self, x: Tensor) -> Tensor:
        return -self.square * x[:, -self.size :]


def variations() -> dict[str, tuple[sn.Constraints, Tensor]]:
    """Sets, and predictions, all without x."""
    n, walk = 40, 0.3 * draw(6, 40, seed=20).cumsum(1)
    once = torch.eye(n, dtype=torch.float64).diff(dim=0)
    wide, tall = draw(8, 40, seed=21), draw(30, 12, seed=22)
    total = sn.Linear(torch.ones(1, n), equals=8.0)
    return {
        "variation": (sn.L1Ball(0.0, 2.0, once), walk),
        "little variation": (sn.L1Ball(0.0, 1e-3, once), walk),
        "none": (sn.L1Ball(0.0, 0.0, once), walk),
        "second differences": (sn.L1Ball(0.1, 0.5, once.diff(dim=0)), walk),
        "battery": (sn.L1Ball(0.0, 2.0, once) & sn.Box(0.0, 1.0) & total, walk),
        "wide": (sn.L1Ball(0.0, 1.0, wide), walk),
        "tall": (sn.L1Ball(0.2, 8.0, tall), draw(6, 12, seed=23)),
        "two plain ones": (sn.L1Ball(0.0, 3.0) & sn.L1Ball(0.3, 12.0) & sn.Linear(torch.ones(1, n), equals=2.0), walk),
        "plain and variation": (sn.L1Ball(0.0, 3.0) & sn.L1Ball(0.0, 1.0, once), walk),
    }


@pytest.mark.parametrize("name", variations())
@pytest.mark.parametrize("weighed", [False, True])
def test_variations_are_those_of_the_solver(name: str, weighed: bool) -> None:
    """All of them are found at the start, to the last digits, and the distance is the least."""
    pytest.importorskip("clarabel")
    constraints, y = variations()[name]
    x, weights = torch.zeros(len(y), 1), torch.ones(y.shape[1]).double()
    if weighed:
        weights = torch.logspace(-1, 1, y.shape[1], dtype=torch.float64)
    solution = sn.repair(constraints, y, x.double(), weights=weights if weighed else None)
    assert solution.converged.all()
    assert solution.steps.max() <= 1
    problem = Projection(constraints, weights, y, x.double())
    best = solve(problem, problem.inputs, "clarabel", workers=1, cache=False)
    assert best.ok.all()

    def away(z: Tensor) -> Tensor:
        return (weights * (z - y).square()).sum(1).sqrt()

    assert_equal(away(solution.value) / away(best.value), torch.ones(len(y)).double(), 1e-4 if weighed else 3e-5)


@WITH_MATRICES
def test_matrices_beside_other_rows(kind: Any) -> None:
    """In the set, at the start, and nearer than the repair alone."""
    constraints = kind()
    solution, plain = nearest(constraints, Y, X), sn.repair(constraints, Y, X, start=None, rescue=True, weights=WEIGHTS)
    assert solution.converged.all()
    assert plain.converged.all()
    assert (solution.steps == 0).double().mean() > 0.9
    far, near = ((WEIGHTS * (found.value - Y).square()).sum(1) for found in (plain, solution))
    assert (near <= far * (1 + 1e-6)).all()
    assert (near < 0.999 * far).any()
    alone = torch.cat([nearest(constraints, Y[[i]], X[[i]]).value for i in range(len(Y))])
    assert_equal(alone, solution.value, 1e-9)


@WITH_MATRICES
def test_gradients_with_matrices(kind: Any) -> None:
    constraints = kind()
    some = (nearest(constraints, Y, X).steps == 0).nonzero().squeeze(1)[:2]
    y, x = Y[some].clone().requires_grad_(), X[some].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y, x: nearest(constraints, y, x).value, (y, x), atol=1e-5)


def test_gradients_of_a_matrix() -> None:
    inputs = [t.clone().requires_grad_() for t in (Y[:3], A, X[0, :2], torch.tensor(0.3, dtype=torch.float64))]

    def outcome(y: Tensor, matrix: Tensor, center: Tensor, radius: Tensor) -> Tensor:
        ball = sn.L1Ball(lambda _: center.expand(3, -1), lambda _: radius.expand(3, 1), lambda _: matrix)
        solution = nearest(ball & sn.Box(-0.5, 0.5), y, X[:3])
        assert (solution.steps == 0).all()
        return solution.value

    assert torch.autograd.gradcheck(outcome, inputs, atol=1e-5)


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


def test_relaxed_balls_are_left_to_the_repair() -> None:
    instance = bowl().at(Y, X)
    assert balls_of(instance) == [0]
    assert balls_of(instance.relaxed(0.1)) == []
    assert balls_of(several().at(Y, X)) == [0, 1, 4]
    assert balls_of(several().at(Y, X).relaxed(0.1)) == []
    relaxed = sn.SnareLayer(several(), weights=WEIGHTS).train().solve(Y, X, relax=0.1)
    assert relaxed.converged.all()


def test_single_precision_and_nothing_to_do() -> None:
    assert nearest(bowl(), Y[:0], X[:0]).value.shape == (0, N)
    inside = nearest(bowl(), Y, X).value
    again = nearest(bowl(), inside, X)
    assert_equal(again.value, inside, 1e-8)
    layer = sn.SnareLayer(bowl(), start=sn.Nearest(), tol=1e-4, dtype=torch.float32, weights=WEIGHTS).float()
    assert_equal(layer(Y.float(), X.float()).double(), inside, 5e-3)


def test_products_of_a_lifted_map() -> None:
    """Value, Jacobian, products and pullback of a function in buys and sells, against autograd."""
    center = X.clone().requires_grad_()
    check(LiftedMap(FunctionMap(waves, X, 2), center), center)


def test_products_of_a_widened_map() -> None:
    matrix = A.clone().requires_grad_()
    check(WidenedMap(LinearMap(matrix), N), matrix)


def check(map: Map, tensor: Tensor) -> None:
    """Of a map on 2n variables, with a tensor inside."""
    v, t, w = draw(12, 2 * N, seed=11), draw(12, 2 * N, seed=12), draw(12, 2, seed=13)
    J = torch.stack(
        [torch.func.jacrev(lambda u, i=i: map.select(torch.tensor([i])).value(u[None])[0])(v[i]) for i in range(12)]
    )
    assert_equal(map.jacobian(v).expand_as(J), J, 1e-12)
    assert_equal(map.jvp(v, t), (J @ t.unsqueeze(2)).squeeze(2), 1e-12)
    assert_equal(map.vjp(v, w), (w.unsqueeze(1) @ J).squeeze(1), 1e-12)
    in_v, inside = map.pullback(v, [(w, t)], w, (tensor,))
    leaf = v.clone().requires_grad_()
    total = (w * map.jvp(leaf, t)).sum() + (w * map.value(leaf)).sum()
    expected = torch.autograd.grad(total, (leaf, tensor))
    assert_equal(in_v, expected[0], 1e-12)
    assert_equal(inside, expected[1], 1e-12)
