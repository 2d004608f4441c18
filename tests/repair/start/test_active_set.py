"""The nearest point of a curved set: optimality conditions, a second implementation, differences, and what fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers import PiNetLayer
from snarenet.repair.start import active_set
from snarenet.testing import assert_equal, draw

FINISH = sn.Annealed(1e-3, 0.1)
N = 8
Y, X = draw(30, N, seed=1), draw(30, 2, seed=2, scale=0.3)
WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 2.0, 1.0, 0.5, 8.0, 3.0], dtype=torch.float64)


def ellipsoids() -> sn.Constraints:
    """Ellipsoids about the origin, a plane for every x, and a box."""
    H, G = 0.2 + draw(4, N, seed=3).abs(), draw(4, N, seed=4)
    plane = sn.Linear(draw(2, N, seed=5), equals=lambda x: x)
    return sn.Quadratic(H, G, upper=2.0) & plane & sn.Box(-0.8, 0.9)


def shells() -> sn.Constraints:
    """Bounds from both sides, and rows with negative Hessians."""
    H = torch.stack([torch.ones(N), torch.cat([torch.ones(4), -0.2 * torch.ones(4)])]).double()
    return sn.Quadratic(H, 0.1 * draw(2, N, seed=6), [1.0, -1.0], [4.0, 2.0]) & sn.Linear(draw(2, N, seed=5), -0.5, 0.5)


SETS = pytest.mark.parametrize("constraints", [ellipsoids(), shells()], ids=["ellipsoids", "shells"])
METRICS = pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])


def project(
    constraints: sn.Constraints, y: Tensor, x: Tensor, weights: Tensor | None = None, count: int = 60
) -> Tensor:
    return active_set.project(constraints.at(y, x), y, count, weights, active_set.search)


@SETS
@METRICS
class TestOptimality:
    def test_first_order_conditions(self, constraints: sn.Constraints, weights: Tensor | None) -> None:
        """Feasible, and the way back is a combination of normals of rows at their bounds, with the right signs."""
        z = project(constraints, Y, X, weights)
        moved = (z != Y).any(1) | (constraints.violation(Y, X) == 0)
        assert moved.double().mean() > 0.9
        instance = constraints.at(z, X)
        value, J = instance.map.value(z), instance.map.jacobian(z)
        for i in moved.nonzero().squeeze(1).tolist():
            high, low = value[i] > instance.upper[i] - 1e-9, value[i] < instance.lower[i] + 1e-9
            force = (Y[i] - z[i]) * (1 if weights is None else weights)
            normals = J[i][high | low]
            multipliers = torch.linalg.lstsq(normals.T, force.unsqueeze(1)).solution.squeeze(1)
            assert_equal(normals.T @ multipliers, force, 1e-8)
            if len(normals) < N:  # else multipliers are not unique
                equal = (instance.lower[i] == instance.upper[i])[high | low]
                assert (multipliers[high[high | low] & ~equal] > -1e-8).all()
                assert (multipliers[low[high | low] & ~equal] < 1e-8).all()
        assert constraints.violation(z, X)[moved].max() < 1e-9

    def test_gradients(self, constraints: sn.Constraints, weights: Tensor | None) -> None:
        found = (project(constraints, Y, X, weights) != Y).any(1).nonzero().squeeze(1)[:6]
        y, x = Y[found].clone().requires_grad_(), X[found].clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda y, x: project(constraints, y, x, weights), (y, x), atol=1e-6)

    def test_a_traced_search_finds_the_same(
        self, constraints: sn.Constraints, weights: Tensor | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = project(constraints, Y, X, weights)
        monkeypatch.setattr(active_set, "tracing", lambda: True)
        monkeypatch.setattr("snarenet.linalg.dense.tracing", lambda: True)
        assert_equal(project(constraints, Y, X, weights), expected, 1e-9)

    def test_samples_do_not_know_each_other(self, constraints: sn.Constraints, weights: Tensor | None) -> None:
        together = project(constraints, Y, X, weights)
        assert_equal(project(constraints, Y[4:5], X[4:5], weights), together[4:5], 1e-9)


def test_polyhedra_that_depend_on_x() -> None:
    """Against Pi-net's splitting, which takes a matrix per sample as well."""
    A = draw(5, N, seed=7)
    flexible = sn.Linear(lambda x: A.expand(len(x), -1, -1), -0.3, 0.4)
    fixed = PiNetLayer(sn.Linear(A, -0.3, 0.4), tol=1e-11)
    solution = sn.repair(flexible, Y, X, start=sn.Nearest(60), damping=FINISH, tol=1e-9)
    assert_equal(solution.value, fixed(Y, X), 1e-7)


def test_it_moves_no_two_points_of_a_convex_set_apart() -> None:
    other = Y + 0.3 * draw(30, N, seed=8)
    a, b = (project(ellipsoids(), y, X) for y in (Y, other))
    both = (a != Y).any(1) & (b != other).any(1)
    assert both.sum() > 20
    assert ((a - b).norm(dim=1) <= (Y - other).norm(dim=1) * (1 + 1e-9))[both].all()


def test_weights_are_a_change_of_units() -> None:
    H, G, root = 0.2 + draw(4, N, seed=3).abs(), draw(4, N, seed=4), WEIGHTS.sqrt()
    plain, scaled = sn.Quadratic(H, G, upper=2.0), sn.Quadratic(H / WEIGHTS, G / root, upper=2.0)
    assert_equal(project(plain, Y, X, WEIGHTS) * root, project(scaled, Y * root, X), 1e-9)


def test_scaling_rows_changes_nothing() -> None:
    H, G, f = 0.2 + draw(4, N, seed=3).abs(), draw(4, N, seed=4), torch.tensor([[1.0], [1e4], [1e-3], [7.0]]).double()
    plain, scaled = sn.Quadratic(H, G, upper=2.0), sn.Quadratic(H * f, G * f, upper=2.0 * f.squeeze(1))
    assert_equal(project(scaled, Y, X), project(plain, Y, X), 1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_empty_set_has_no_nearest_point(dtype: torch.dtype) -> None:
    """y >= 16.7 and y <= 2: the least share of the system lets the search settle at a point that obeys neither."""
    nothing = sn.Linear(torch.tensor([[0.3], [2.0]]).double().repeat(3, 1, 1), [5.0, -torch.inf], [6.0, 4.0])
    y = torch.tensor([[1.0], [-3.0], [10.0]], dtype=dtype)
    assert torch.equal(project(nothing, y, y), y)


def test_gradients_with_weights_of_ten_orders_of_magnitude() -> None:
    """Rows that are nearly parallel in this metric: P = I - W^-1 A' (A W^-1 A')^-1 A by its null space instead."""
    A = torch.tensor([[-0.969, 0.0735, -1.05, 1.45], [-0.878, 0.0742, -0.322, 0.547]], dtype=torch.float64)
    weights = torch.tensor([342250.09, 2864.599, 29987.59, 2.066e-05], dtype=torch.float64)
    y = torch.tensor([[0.05, -0.3, 0.2, 2.0]], dtype=torch.float64, requires_grad=True)
    rows = sn.Linear(A.unsqueeze(0), equals=torch.tensor([2.0, 0.7]).double())
    (found,) = torch.autograd.grad(project(rows, y, y, weights).sum(), y)
    free = torch.linalg.qr(A.T, mode="complete").Q[:, 2:]
    expected = torch.linalg.solve(free.T @ (weights.unsqueeze(1) * free), free.T * weights).T @ free.sum(0)
    assert_equal(found[0] / expected, torch.ones(4).double(), 1e-4)


def test_gradients_of_learned_rows() -> None:
    H, G = (0.2 + draw(2, 4, seed=3).abs()).requires_grad_(), draw(2, 4, seed=4).requires_grad_()
    A, y = draw(1, 4, seed=5).requires_grad_(), draw(5, 4, seed=6, scale=2)
    upper = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)

    def outcome(H: Tensor, G: Tensor, A: Tensor, upper: Tensor) -> Tensor:
        rows = sn.Quadratic(*(lambda _, t=t: t.expand(5, -1, -1) for t in (H, G)), upper=lambda _: upper.expand(5, -1))
        return project(rows & sn.Linear(lambda _: A.expand(5, -1, -1), equals=torch.tensor([0.3]).double()), y, y)

    assert torch.autograd.gradcheck(outcome, (H, G, A, upper), atol=1e-6)


class TestInRepair:
    def test_nothing_is_left_to_repair(self) -> None:
        solution = sn.repair(ellipsoids(), Y, X, start=sn.Nearest(60), tol=1e-9)
        assert solution.converged.all()
        assert (solution.steps == 0).double().mean() > 0.9
        assert torch.equal(solution.raw, Y)

    def test_too_few_iterations_leave_it_to_the_repair(self) -> None:
        constraints = ellipsoids()
        y = Y.clone().requires_grad_()
        solution = sn.repair(constraints, y, X, start=sn.Nearest(1), tol=1e-9)
        plain = sn.repair(constraints, Y, X, start=None, tol=1e-9)
        assert solution.converged.all()
        assert_equal(solution.value, plain.value, 1e-12)
        solution.value.square().sum().backward()
        assert y.grad is not None
        assert y.grad.isfinite().all()

    def test_an_empty_set(self) -> None:
        nothing = sn.Quadratic(torch.ones(1, N), torch.zeros(1, N), upper=1.0) & sn.Linear(torch.eye(1, N), 3.0)
        solution = sn.repair(nothing, Y, start=sn.Nearest(30))
        assert (solution.status == sn.Status.STALLED).all() | (solution.status == sn.Status.MAX_STEPS).all()
        assert solution.value.isfinite().all()

    @pytest.mark.parametrize("count", [1, 5, 40])
    def test_gradients_are_numbers_where_nothing_is_found(self, count: int) -> None:
        """Rows that repeat and contradict each other, and predictions so far away that nothing is finite for long."""
        row = draw(1, N, seed=9).expand(3, -1)
        nothing = sn.Linear(row, equals=torch.tensor([0.0, 1.0, 0.0]).double()) & sn.Quadratic(
            torch.ones(1, N), torch.zeros(1, N), upper=1.0
        )
        y = (Y * torch.logspace(0, 160, len(Y), dtype=torch.float64).unsqueeze(1)).requires_grad_()
        z = active_set.project(nothing.at(y), y, count, None, active_set.search)
        assert z.isfinite().all()
        (gradient,) = torch.autograd.grad(z.sum(), y)
        assert gradient.isfinite().all()

    def test_no_samples_and_no_numbers(self) -> None:
        constraints = ellipsoids()
        assert sn.repair(constraints, Y[:0], X[:0], start=sn.Nearest(20)).value.shape == (0, N)
        y = Y.clone()
        y[3] = torch.nan
        found = sn.repair(constraints, y, X, start=sn.Nearest(60))
        assert found.status[3] == sn.Status.NONFINITE
        others = torch.arange(30) != 3
        assert_equal(found.value[others], sn.repair(constraints, Y, X, start=sn.Nearest(60)).value[others], 1e-9)

    def test_single_precision(self) -> None:
        layer = sn.SnareLayer(ellipsoids(), start=sn.Nearest(30), tol=1e-4, dtype=torch.float32).float()
        y = layer(Y.float(), X.float())
        assert layer.constraints.violation(y, X.float()).max() <= 1e-4
        near = (y.double() - project(ellipsoids(), Y, X)).abs().amax(1) < 1e-3
        assert near.sum() >= 28  # some do not settle in so few digits, and are repaired

    def test_bad_weights_are_refused(self) -> None:
        with pytest.raises(ValueError, match="`weights` must be positive"):
            sn.repair(ellipsoids(), Y, X, start=sn.Nearest(5), weights=-WEIGHTS)
