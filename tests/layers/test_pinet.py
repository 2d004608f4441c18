"""Pi-net: the projection against a conic solver and closed forms, its gradient against three others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.layers.pinet import PiNetLayer
from snarenet.reference.engines import Clarabel
from snarenet.reference.program import QuadraticRows, Structured
from snarenet.testing import draw, gradients
from snarenet.training.recipes import settings

N, BATCH = 6, 7
A, C = draw(4, N, seed=1), draw(2, N, seed=2)
Y, X = draw(BATCH, N, seed=3, scale=2), draw(BATCH, 2, seed=4, scale=0.1)
TOP = torch.tensor([0.5, 0.3, torch.inf, 0.2], dtype=torch.float64)
BOTTOM = torch.tensor([-torch.inf, -0.4, -0.1, -0.6], dtype=torch.float64)


def constraints() -> sn.Constraints:
    """Two-sided rows, equalities, and a box whose bounds depend on x."""
    rows = sn.Linear(A.clone(), lower=BOTTOM.clone(), upper=TOP.clone())
    return rows & sn.Linear(C.clone(), equals=lambda x: x) & sn.Box(-1.0, lambda x: 0.6 + 0.1 * x[:, :1].expand(-1, N))


def empty_set() -> sn.Constraints:
    return sn.Box(torch.zeros(2), torch.ones(2)) & sn.Linear(torch.ones(1, 2), equals=5.0)


def oracle(y: Tensor, J: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The nearest points by Clarabel, one by one."""
    found = []
    for point, low, high in zip(y.numpy(), lower.numpy(), upper.numpy(), strict=True):
        program = Structured(np.ones(len(point)), -point, np.zeros(len(point)), (QuadraticRows(J.numpy()),))
        found.append(Clarabel(program)(point, low, high))
    return torch.from_numpy(np.stack(found))


def bounds() -> tuple[Tensor, Tensor]:
    instance = constraints().at(Y, X)
    return instance.lower, instance.upper


def unrolled(y: Tensor, x: Tensor, steps: int = 800) -> Tensor:
    """The splitting as in the textbook: no scaling, every inequality lifted, a new linear system in every step."""
    J = torch.cat([A, torch.eye(N, dtype=torch.float64)])
    high = torch.cat([TOP.expand(len(y), -1), (0.6 + 0.1 * x[:, :1]).expand(-1, N)], 1)
    low = torch.cat([BOTTOM.expand(len(y), -1), torch.full_like(y, -1.0)], 1)
    M = torch.cat([torch.cat([J, -torch.eye(10, dtype=torch.float64)], 1), torch.cat([C, torch.zeros(2, 10)], 1)])
    right = torch.cat([torch.zeros(len(y), 10), x], 1)
    s = torch.cat([y, y @ J.T], 1)
    v = s
    for _ in range(steps):
        v = s - torch.linalg.solve(M @ M.T, (s @ M.T - right).T).T @ M
        p = 2 * v - s
        t = torch.cat([(p[:, :N] + y) / 2, p[:, N:].clamp(low, high)], 1)
        s = s + 1.5 * (t - v)
    return v[:, :N]


class TestProjection:
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_a_conic_solver(self, seed: int) -> None:
        y = draw(BATCH, N, seed=10 + seed, scale=2)
        solution = PiNetLayer(constraints(), tol=1e-10).solve(y, X)
        assert solution.converged.all()
        assert (solution.steps > 0).all()
        expected = oracle(y, constraints().jacobian(y, X), *bounds())
        torch.testing.assert_close(solution.value, expected, rtol=0, atol=1e-6)

    def test_closed_forms(self) -> None:
        box = PiNetLayer(sn.Box(-0.5, 0.7))
        torch.testing.assert_close(box(Y), Y.clamp(-0.5, 0.7), rtol=0, atol=1e-7)
        plane = PiNetLayer(sn.Linear(C, equals=lambda x: x))
        expected = Y - (Y @ C.T - X) @ torch.linalg.pinv(C).T
        torch.testing.assert_close(plane(Y, X), expected, rtol=0, atol=1e-7)
        half = PiNetLayer(sn.Linear(A[:1], upper=0.5))
        torch.testing.assert_close(
            half(Y), Y - torch.relu(Y @ A[:1].T - 0.5) / A[0].square().sum() * A[0], rtol=0, atol=1e-7
        )

    def test_long_rows_do_not_matter(self) -> None:
        factors = torch.tensor([[1e3], [1.0], [1e-3], [30.0]], dtype=torch.float64)
        plain = PiNetLayer(sn.Linear(A, upper=0.1), tol=1e-9).solve(Y)
        scaled = PiNetLayer(sn.Linear(A * factors, upper=0.1 * factors[:, 0]), tol=1e-9).solve(Y)
        torch.testing.assert_close(scaled.value, plain.value, rtol=0, atol=1e-6)
        assert scaled.steps.max() < 3 * plain.steps.max()

    def test_two_boxes_are_their_intersection(self) -> None:
        layer = PiNetLayer(sn.Box(-0.5, 2.0) & sn.Box(-2.0, 0.7))
        torch.testing.assert_close(layer(Y), Y.clamp(-0.5, 0.7), rtol=0, atol=1e-7)

    def test_feasible_points_stay(self) -> None:
        layer = PiNetLayer(constraints())
        first = layer(Y, X)
        again = layer.solve(first, X)
        assert not again.steps.any()
        torch.testing.assert_close(again.value, first, rtol=0, atol=1e-12)

    def test_a_relaxed_set(self) -> None:
        """Widened bounds in training: the projection onto the wider set, equalities included."""
        layer = PiNetLayer(constraints(), tol=1e-10)
        lower, upper = bounds()
        expected = oracle(Y, constraints().jacobian(Y, X), lower - 0.2, upper + 0.2)
        torch.testing.assert_close(layer(Y, X, 0.2), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(layer(Y, X, torch.tensor(0.0)), layer(Y, X), rtol=0, atol=1e-7)
        assert layer.eval().solve(Y, X, 0.2).violation.max() <= 1e-10

    def test_settings(self) -> None:
        paper = PiNetLayer(constraints(), **settings("pinet", "paper"), tol=1e-12, on_failure="ignore").solve(Y, X)
        assert paper.steps.max() == 50
        assert (paper.status[paper.steps == 50] == sn.Status.MAX_STEPS).any()
        assert paper.violation.max() < 0.1
        fair = PiNetLayer(constraints(), **settings("pinet", "fair"), on_failure="raise").solve(Y, X)
        assert fair.violation.max() <= 1e-8


class TestGradient:
    def test_finite_differences(self) -> None:
        layer = PiNetLayer(constraints(), tol=1e-12)
        y, x = Y[:3].clone().requires_grad_(), X[:3].clone().requires_grad_()
        assert torch.autograd.gradcheck(layer, (y, x), eps=1e-6, atol=1e-5, rtol=1e-4)

    def test_finite_differences_in_every_bound(self) -> None:
        """Bounds of rows and box, and right-hand sides, as tensors; both sides of both are active somewhere."""
        low, high = (torch.cat([b[:3, :4], b[:3, 6:]], 1).clamp(-10, 10).requires_grad_() for b in bounds())
        right = X[:3].clone().requires_grad_()

        def run(low: Tensor, high: Tensor, right: Tensor) -> Tensor:
            sets = sn.Linear(A, low[:, :4], high[:, :4]) & sn.Linear(C, equals=right) & sn.Box(low[:, 4:], high[:, 4:])
            return PiNetLayer(sets, tol=1e-12)(Y[:3])

        y = run(low, high, right)
        rows = torch.cat([y @ A.T, y], 1)
        for side in (low, high):
            active = (rows - side).abs() < 1e-9
            assert active[:, :4].any()
            assert active[:, 4:].any()
        assert torch.autograd.gradcheck(run, (low, high, right), eps=1e-6, atol=1e-5, rtol=1e-4)

    def test_equals_the_unrolled_loop(self) -> None:
        y, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
        value, expected = PiNetLayer(constraints(), tol=1e-12)(y, x), unrolled(y, x)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-9)
        for actual, want in zip(gradients(value, [y, x]), gradients(expected, [y, x]), strict=True):
            torch.testing.assert_close(actual, want, rtol=0, atol=1e-7)

    def test_dependent_active_rows(self) -> None:
        """The same half-space twice: the gradient in y is that of one."""
        y = Y.clone().requires_grad_()
        value = PiNetLayer(sn.Linear(A[[0, 0]], upper=-2.0), tol=1e-12)(y)
        normal = A[0] / A[0].norm()
        active = (Y @ A[0] > -2).double().unsqueeze(1)
        assert 0 < active.sum() < BATCH
        weights = draw(*Y.shape, seed=99)
        expected = weights - active * (weights @ normal).unsqueeze(1) * normal
        torch.testing.assert_close(gradients(value, [y])[0], expected, rtol=0, atol=1e-8)

    def test_equal_bounds_are_active_even_where_they_do_not_push(self) -> None:
        y = torch.tensor([[0.0, 0.5]], dtype=torch.float64, requires_grad=True)
        PiNetLayer(sn.Box([0.0, -1.0], [0.0, 1.0]))(y).sum().backward()
        assert y.grad is not None
        assert y.grad.tolist() == [[0.0, 1.0]]


class TestLayer:
    def test_an_empty_set_is_reported(self) -> None:
        with pytest.warns(sn.RepairWarning, match="3 of 3 samples"):
            solution = PiNetLayer(empty_set(), max_steps=200).solve(draw(3, 2))
        assert solution.value.isfinite().all()
        assert (solution.violation >= 1).all()

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: sn.Quadratic(A, A, upper=1.0), "Pi-net repairs linear constraints only, but got Quadratic"),
            (lambda: sn.Linear(lambda x: x, upper=1.0), "Pi-net needs a constant matrix"),
            (lambda: sn.Linear(nn.Parameter(A.clone()), upper=1.0), "Pi-net needs a constant matrix"),
            (lambda: sn.Linear(A.expand(3, 4, N), upper=1.0) & sn.Box(0, 1), "Pi-net needs a constant matrix"),
        ],
    )
    def test_sets_it_cannot_do(self, make, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PiNetLayer(make())

    def test_wrong_options(self) -> None:
        for option, value in (("omega", 2.0), ("sigma", 0.0)):
            with pytest.raises(ValueError, match=f"`{option}` must be"):
                PiNetLayer(constraints(), **{option: value})  # pyright: ignore
