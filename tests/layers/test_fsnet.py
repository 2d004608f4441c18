"""FSNet and its L-BFGS: against dense BFGS, a textbook loop with plain autograd, and scipy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers.fsnet import FSNetLayer
from snarenet.layers.lbfgs import InverseHessian
from snarenet.testing import assert_equal, draw, gradients
from snarenet.training.recipes import settings

A, C = draw(3, 6, seed=1), draw(2, 6, seed=2)
H, G = draw(2, 6, seed=5).abs(), draw(2, 6, seed=6)
Y, X = draw(7, 6, seed=3, scale=2), draw(7, 2, seed=4)
EXACT = {"stop": None, "gradient_tol": 0.0, "tol": 1e-9, "max_steps": 100}


def linear() -> sn.Constraints:
    return sn.Linear(A.clone(), upper=0.5) & sn.Linear(C.clone(), equals=lambda x: x)


def convex() -> sn.Constraints:
    return sn.Quadratic(H, G, upper=1.0) & sn.Linear(C.clone(), equals=lambda x: 0.1 * x)


def moving() -> sn.Constraints:
    """A matrix per sample and a function: both have data that must go with their sample."""
    rows = sn.Linear(lambda x: C + x.sin().unsqueeze(-1) * C.roll(1, 1), lower=-0.1, upper=lambda x: x.square())
    return rows & sn.Nonlinear(lambda y, x: (y * y.cos()).sum(1, keepdim=True) - x[:, :1], rows=1, upper=0.2)


def empty_set() -> sn.Constraints:
    return sn.Box(torch.zeros(2), torch.ones(2)) & sn.Linear(torch.ones(1, 2), equals=5.0)


FAMILIES = {"linear": linear, "convex": convex, "moving": moving}


def squares(family: sn.Constraints, y: Tensor, x: Tensor) -> Tensor:
    return family.residual(y, x).square().sum(1)


class TestInverseHessian:
    def test_equals_dense_bfgs(self) -> None:
        """H <- (I - rho s t') H (I - rho t s') + rho s s', from gamma I of the newest pair, by whole matrices."""
        hessian = InverseHessian(torch.full((4, 1), 0.1, dtype=torch.float64), memory=3)
        g = draw(4, 6, seed=9)
        assert_equal(hessian.times(g), 0.1 * g, 1e-14)
        pairs = [(draw(4, 6, seed=20 + k), draw(4, 6, seed=30 + k)) for k in range(5)]
        pairs = [(s, t + 2 * s) for s, t in pairs]
        for s, t in pairs:
            hessian = hessian.updated(s, t)
        eye = torch.eye(6, dtype=torch.float64)
        for i in range(4):
            s, t = (pair[i] for pair in pairs[-1])
            assert min(s[i] @ t[i] for s, t in pairs[-3:]) > 0
            dense = (s @ t) / (t @ t) * eye
            for s, t in ((s[i], t[i]) for s, t in pairs[-3:]):
                left = eye - torch.outer(s, t) / (s @ t)
                dense = left @ dense @ left.T + torch.outer(s, s) / (s @ t)
            assert_equal(hessian.times(g)[i], dense @ g[i], 1e-11)

    def test_a_pair_without_curvature_is_left_out(self) -> None:
        s = draw(2, 6, seed=1)
        t = torch.stack([-s[0], 2 * s[1]])
        hessian = InverseHessian(torch.full((2, 1), 0.1, dtype=torch.float64), memory=3).updated(s, t)
        g = draw(2, 6, seed=2)
        assert_equal(hessian.times(g), torch.stack([0.1 * g[0], 0.5 * g[1]]), 1e-12)
        assert_equal(hessian.select(torch.tensor([1])).times(g[1:]), 0.5 * g[1:], 1e-12)


def textbook(violation: Callable[[Tensor], Tensor], y: Tensor, steps: int) -> Tensor:
    """The iterations for one y (n,), with the recursion in full, autograd for the gradient, and an unrolled graph."""

    def phi(y: Tensor) -> Tensor:
        return violation(y).square().sum()

    def slope(y: Tensor) -> Tensor:
        return torch.autograd.grad(phi(y), y, create_graph=True)[0]

    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        if violation(y).abs().max() <= 1e-9:
            break
        g = slope(y)
        q, weights = g, []
        for s, t in pairs[::-1]:
            weights.append(s @ q / (s @ t))
            q = q - weights[-1] * t
        z = 0.1 * q if not pairs else (pairs[-1][0] @ pairs[-1][1]) / (pairs[-1][1] @ pairs[-1][1]) * q
        for (s, t), weight in zip(pairs, weights[::-1], strict=True):
            z = z + s * (weight - t @ z / (s @ t))
        length = 1.0
        while phi(y - length * z) > phi(y) - 1e-4 * length * (g @ z):
            length /= 2
        new = y - length * z
        pairs.append((new - y, slope(new) - g))
        assert pairs[-1][0] @ pairs[-1][1] > 0  # a case where no pair is left out
        y = new
    return y


class TestMethod:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_it_reaches_the_set(self, family: str) -> None:
        solution = FSNetLayer(FAMILIES[family](), **EXACT).solve(Y, X)
        assert solution.converged.all()
        assert FAMILIES[family]().violation(solution.value, X).max() <= 1e-9
        assert (solution.steps > 2).any()
        again = FSNetLayer(FAMILIES[family](), **EXACT).solve(solution.value, X)
        assert torch.equal(again.value, solution.value)
        assert not again.steps.any()

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_violation_falls_monotonically(self, family: str) -> None:
        path = []
        for k in range(12):
            layer = FSNetLayer(FAMILIES[family](), **EXACT | {"max_steps": k}, on_failure="ignore")
            path.append(squares(layer.constraints, layer(Y, X), X))
        falls = torch.stack(path).diff(dim=0)
        assert (falls <= 0).all()
        assert (falls[0] < 0).all()

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("steps", [1, 4])
    def test_values_and_gradients_of_the_textbook(self, family: str, steps: int) -> None:
        layer = FSNetLayer(FAMILIES[family](), **EXACT | {"max_steps": steps}, on_failure="ignore")
        y, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
        ours = layer(y, x)

        def violation(i: int) -> Callable[[Tensor], Tensor]:
            def value(point: Tensor) -> Tensor:
                instance = layer.constraints.at(point.unsqueeze(0), x[i : i + 1])
                g = instance.map.value(point.unsqueeze(0))
                return torch.relu(g - instance.upper) - torch.relu(instance.lower - g)

            return value

        expected = torch.stack([textbook(violation(i), y[i], steps) for i in range(7)])
        assert_equal(ours, expected, 1e-9)
        for actual, wanted in zip(gradients(ours, [y, x]), gradients(expected, [y, x]), strict=True):
            assert_equal(actual, wanted, 1e-8)

    def test_gradcheck(self) -> None:
        """In y, x and a learned matrix, through iterations at which samples leave."""
        family = moving()
        layer = FSNetLayer(family, **EXACT | {"max_steps": 5, "unroll": 5, "tol": 0.05}, on_failure="ignore")
        y, x = Y[:3].clone().requires_grad_(), X[:3].clone().requires_grad_()
        steps = layer.solve(y, x).steps
        assert steps.min() < steps.max()
        assert torch.autograd.gradcheck(layer, (y, x))

        def learned(matrix: Tensor) -> Tensor:
            options = EXACT | {"max_steps": 4}
            return FSNetLayer(sn.Linear(matrix, upper=0.5), **options, on_failure="ignore")(Y[:2])

        assert torch.autograd.gradcheck(learned, (A.clone().requires_grad_(),))

    def test_later_iterations_are_a_constant_shift(self) -> None:
        y, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
        truncated = FSNetLayer(convex(), **EXACT, unroll=3)(y, x)
        assert_equal(truncated, FSNetLayer(convex(), **EXACT)(Y, X), 1e-14)
        short = FSNetLayer(convex(), **EXACT | {"max_steps": 3}, on_failure="ignore")(y, x)
        assert (truncated - short).abs().max() > 1e-3
        for actual, wanted in zip(gradients(truncated, [y, x]), gradients(short, [y, x]), strict=True):
            assert_equal(actual, wanted, 1e-12)
        nothing = FSNetLayer(convex(), **EXACT, unroll=0)(y, x)
        assert_equal(gradients(nothing, [y])[0], draw(7, 6, seed=99), 1e-14)

    def test_agrees_with_scipy_on_a_convex_set(self) -> None:
        """Both solvers reach a violation of zero; where the set is empty, both reach the same least one."""
        optimize = pytest.importorskip("scipy.optimize")
        crossed = sn.Linear(C, equals=lambda x: x) & sn.Linear(C[:1], equals=lambda x: x[:, :1] + 1)
        layer = FSNetLayer(crossed, **EXACT | {"gradient_tol": 1e-9}, on_failure="ignore")
        stalled = layer.solve(Y, X)
        reached = FSNetLayer(convex(), **EXACT).solve(Y, X)
        assert (stalled.status == sn.Status.STALLED).all()
        for family, solution in ((crossed, stalled), (convex(), reached)):
            for i in range(7):

                def phi(y: np.ndarray, i: int = i, family: sn.Constraints = family) -> tuple[float, np.ndarray]:
                    point = torch.from_numpy(y[None]).requires_grad_()
                    total = squares(family, point, X[i : i + 1]).sum()
                    return total.item(), torch.autograd.grad(total, point)[0][0].numpy()

                found = optimize.minimize(
                    phi, Y[i].numpy(), jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-10}
                )
                ours = squares(family, solution.value[[i]], X[[i]]).item()
                assert ours == pytest.approx(found.fun, abs=1e-12)
        assert squares(crossed, stalled.value, X).min() > 0.1

    def test_stopping_rules(self) -> None:
        layer = FSNetLayer(convex(), stop=(1e-2, 1e-6), gradient_tol=0.0, tol=1.0)
        for value, stop in ((layer(Y, X), 1e-2), (layer.eval()(Y, X), 1e-6)):
            reached = squares(convex(), value, X)
            assert (reached < stop).all()
            assert reached.max() > stop / 1e4  # no further than asked
        flat = FSNetLayer(convex(), stop=(0.0, 0.0), gradient_tol=0.3, tol=1e-9, on_failure="ignore").solve(Y, X)
        y = flat.value.clone().requires_grad_()
        slope = torch.autograd.grad(squares(convex(), y, X).sum(), y)[0].norm(dim=1)
        assert (slope < 0.3).all()
        assert slope.max() > 1e-3
        assert (flat.status[slope > 1e-3] == sn.Status.STALLED).all()

    def test_no_step_length_serves(self) -> None:
        """Rows so long that ten halvings of the first step are too few: the sample stays, and says so."""
        family = sn.Linear(1e4 * torch.ones(1, 2, dtype=torch.float64), upper=0.0)
        y = torch.ones(1, 2, dtype=torch.float64)
        stuck = FSNetLayer(family, on_failure="ignore").solve(y)
        assert torch.equal(stuck.value, y)
        assert stuck.status.item() == sn.Status.STALLED
        assert FSNetLayer(family, **settings("fsnet", "fair")).solve(y).converged.all()


class TestLayer:
    def test_a_constraint_that_is_not_a_number(self) -> None:
        family = sn.Nonlinear(lambda y, x: y.log().sum(1, keepdim=True), rows=1, upper=0.0)
        y = torch.tensor([[2.0, 3.0], [-1.0, 1.0]], dtype=torch.float64)
        solution = FSNetLayer(family, **EXACT, on_failure="ignore").solve(y)
        assert solution.status.tolist() == [sn.Status.CONVERGED, sn.Status.NONFINITE]

    def test_an_empty_set_is_reported(self) -> None:
        with pytest.warns(sn.RepairWarning, match="3 of 3 samples.*STALLED"):
            solution = FSNetLayer(empty_set()).solve(draw(3, 2))
        least = torch.full((3, 2), 2.0, dtype=torch.float64)  # of 2 (y - 1)^2 + (2 y - 5)^2
        torch.testing.assert_close(solution.value, least, rtol=0, atol=1e-6)

    def test_relaxation_counts_in_training_only(self) -> None:
        layer = FSNetLayer(linear(), **EXACT)
        violation = layer.constraints.violation(layer(Y, X, relax=0.3), X)
        assert 0.29 < violation.max() <= 0.3 + 1e-9
        assert layer.constraints.violation(layer.eval()(Y, X, relax=0.3), X).max() <= 1e-9

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"memory": 0}, "`memory` must be a whole number >= 1, but got 0"),
            ({"unroll": -1}, "`unroll` must be a whole number >= 0, but got -1"),
            ({"halvings": 1.5}, "`halvings` must be a whole number >= 0, but got 1.5"),
            ({"stop": (1e-7, -1.0)}, "`stop` must be None or two numbers >= 0"),
            ({"gradient_tol": -1.0}, "`gradient_tol` must be >= 0"),
            ({"tol": -1.0}, "`tol` must be a finite number >= 0"),
        ],
    )
    def test_wrong_arguments(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            FSNetLayer(linear(), **options)
