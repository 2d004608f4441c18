"""Soft penalty, HardNet and HardNet++: against closed forms, the repair and the textbook."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.layers.hardnet import HardNetLayer, HardNetPlusPlusLayer, hardnet_plus_plus
from snarenet.layers.soft import SoftLayer
from snarenet.testing import assert_equal, autograd_jacobian, draw, gradients, textbook_repair
from snarenet.training.recipes import settings

A, C = draw(3, 6, seed=1), draw(2, 6, seed=2)
Y, X = draw(7, 6, seed=3, scale=2), draw(7, 2, seed=4)


def constraints() -> sn.Constraints:
    return sn.Linear(A.clone(), lower=-0.4, upper=0.5) & sn.Linear(C.clone(), equals=lambda x: x)


def disk() -> sn.Constraints:
    return sn.Quadratic(torch.ones(1, 6, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.float64), upper=1.0)


def matrix(x: Tensor) -> Tensor:
    """(B, 2, 6) rows that depend on x (B, 2)."""
    return C + torch.sin(x).unsqueeze(-1) * C.roll(1, 1)


def moving() -> sn.Constraints:
    return sn.Linear(matrix, lower=lambda x: -x.square() - 0.1, upper=lambda x: 0.2 + x.square())


class TestSoft:
    def test_predictions_are_left_alone(self) -> None:
        y = Y.clone().requires_grad_()
        solution = SoftLayer(constraints()).solve(y, X)  # a warning would be an error here
        assert solution.value is y
        assert_equal(solution.violation, constraints().violation(Y, X), 1e-14)
        assert (solution.status == sn.Status.MAX_STEPS).all()
        assert not solution.steps.any()

    def test_a_feasible_prediction_counts_as_converged(self) -> None:
        feasible = sn.repair(constraints(), Y, X, tol=1e-10).value
        assert SoftLayer(constraints()).solve(feasible, X).converged.all()

    def test_projection_in_eval_mode_only(self) -> None:
        layer = SoftLayer(constraints(), project=True, tol=1e-9)
        assert torch.equal(layer(Y, X), Y)
        projected = layer.eval().solve(Y, X)
        assert torch.equal(projected.value, sn.repair(constraints(), Y, X, start=None, tol=1e-9, rescue=True).value)
        assert projected.violation.max() <= 1e-9

    def test_a_projection_that_fails_is_reported(self) -> None:
        layer = SoftLayer(sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 2), equals=5.0), project=True)
        layer(draw(3, 2))
        with pytest.warns(sn.RepairWarning, match="3 of 3 samples"):
            layer.eval()(draw(3, 2))

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="`max_steps` must be a whole number"):
            SoftLayer(constraints(), max_steps=-1)


class TestHardNet:
    def test_closed_form(self) -> None:
        rows = torch.cat([A, C])
        lower = torch.cat([torch.full((7, 3), -0.4, dtype=torch.float64), X], 1)
        upper = torch.cat([torch.full((7, 3), 0.5, dtype=torch.float64), X], 1)
        z = Y @ rows.T
        expected = Y + (torch.relu(lower - z) - torch.relu(z - upper)) @ torch.linalg.pinv(rows).T
        solution = HardNetLayer(constraints()).solve(Y, X)
        assert_equal(solution.value, expected, 1e-12)
        assert solution.violation.max() < 1e-12
        assert torch.equal(solution.steps, torch.ones(7, dtype=torch.long))

    def test_one_undamped_step_of_the_repair(self) -> None:
        y, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
        ours = HardNetLayer(constraints())(y, x)
        step = sn.repair(constraints(), y, x, start=None, damping=0, rows="all").value
        assert_equal(ours, step, 1e-11)
        for actual, expected in zip(gradients(ours, [y, x]), gradients(step, [y, x]), strict=True):
            assert_equal(actual, expected, 1e-11)

    def test_a_matrix_per_sample(self) -> None:
        value = HardNetLayer(moving())(Y, X)
        for i in range(7):
            fixed = sn.Linear(matrix(X)[i], lower=-X[i].square() - 0.1, upper=0.2 + X[i].square())
            assert_equal(value[[i]], HardNetLayer(fixed)(Y[[i]]), 1e-11)
        assert moving().violation(value, X).max() < 1e-12

    def test_gradcheck(self) -> None:
        """In y, in x behind matrix and bounds, and in a learned matrix and its bound."""
        y, x = Y[:3].clone().requires_grad_(), X[:3].clone().requires_grad_()
        assert torch.autograd.gradcheck(HardNetLayer(moving()), (y, x))

        def learned(y: Tensor, matrix: Tensor, bound: Tensor) -> Tensor:
            return HardNetLayer(sn.Linear(matrix, upper=bound))(y)

        inputs = (y, A.clone().requires_grad_(), torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True))
        assert torch.autograd.gradcheck(learned, inputs)

    def test_a_feasible_sample_is_not_moved(self) -> None:
        layer = HardNetLayer(sn.Linear(A, upper=0.5))
        y = layer(Y) - 0.1 * torch.linalg.pinv(A).sum(1)  # A y = ... - 0.1
        solution = layer.solve(y)
        assert torch.equal(solution.value, y)
        assert not solution.steps.any()

    def test_a_box(self) -> None:
        assert_equal(HardNetLayer(sn.Box(-0.5, 1.0))(Y), Y.clamp(-0.5, 1.0), 1e-14)

    def test_a_constant_matrix_is_factored_once_and_again_when_it_changes(self, monkeypatch) -> None:
        calls, qr = [], torch.linalg.qr
        monkeypatch.setattr(torch.linalg, "qr", lambda *args: calls.append(1) or qr(*args))
        family = sn.Linear(A.clone(), upper=0.5)
        layer = HardNetLayer(family)
        layer(Y)
        calls.clear()
        layer(Y)
        assert not calls
        layer.load_state_dict({**layer.state_dict(), "constraints.A": 2 * A.flip(1)})
        assert_equal(layer(Y), HardNetLayer(sn.Linear(2 * A.flip(1), upper=0.5))(Y), 1e-14)
        assert calls

    def test_a_learned_matrix_is_followed(self) -> None:
        family = sn.Linear(nn.Parameter(A.clone()), upper=0.5)
        layer = HardNetLayer(family)
        layer(Y).square().sum().backward()
        torch.optim.SGD(family.parameters(), lr=0.01).step()
        assert not torch.equal(family.A, A)
        assert family.violation(layer(Y)).max() < 1e-12

    @pytest.mark.parametrize(
        ("family", "message"),
        [
            (lambda: disk(), "HardNet repairs linear constraints only, but got Quadratic"),
            (
                lambda: constraints() & sn.Nonlinear(lambda y, x: y[:, :1], rows=1, upper=0.0),
                "linear constraints only, but got Nonlinear",
            ),
            (lambda: sn.Linear(draw(7, 6), upper=0.0), "independent rows, but got 7 rows for 6 outputs"),
            (lambda: constraints() & sn.Box(0.0, 1.0), "independent rows, but got 11 rows for 6 outputs"),
            (lambda: sn.Linear(A, upper=0.0) & sn.Linear(A[1:2] - 2 * A[:1], upper=0.0), "but row 3 depends on others"),
            (lambda: sn.Linear(0 * A[:1], upper=0.0), "but row 0 depends on others"),
        ],
    )
    def test_what_it_cannot_do(self, family, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HardNetLayer(family())

    def test_dependent_rows_of_some_samples(self) -> None:
        layer = HardNetLayer(sn.Linear(lambda x: torch.stack([x, x.flip(1)], 1), upper=lambda x: x))
        x = torch.tensor([[1.0, 2.0], [1.0, 1.0], [3.0, -3.0]], dtype=torch.float64)
        assert layer.solve(x[:1], x[:1]).converged.all()
        with pytest.raises(ValueError, match="row 1 depends on others in 2 of 3 samples"):
            layer(x, x)


class TestHardNetPlusPlus:
    def test_it_is_the_repair(self) -> None:
        for family in (constraints(), moving(), disk()):
            options = {"damping": 0.3, "rows": "all", "tol": 1e-8, "max_steps": 500}
            assert torch.equal(hardnet_plus_plus(family)(Y, X), sn.repair(family, Y, X, start=None, **options).value)

    def test_formula(self) -> None:
        """Fixed steps y <- y - J'(JJ' + 0.3 I)^-1 v, written out, and their gradient."""
        y, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
        ours = hardnet_plus_plus(constraints(), tol=0.0, max_steps=5, on_failure="ignore")(y, x)
        lower = torch.cat([torch.full((7, 3), -0.4, dtype=torch.float64), x], 1)
        upper = torch.cat([torch.full((7, 3), 0.5, dtype=torch.float64), x], 1)
        J = torch.cat([A, C])
        expected = y
        for _ in range(5):
            v = torch.relu(expected @ J.T - upper) - torch.relu(lower - expected @ J.T)
            expected = expected - torch.linalg.solve(J @ J.T + 0.3 * torch.eye(5, dtype=torch.float64), v.T).T @ J
        assert_equal(ours, expected, 1e-11)
        for actual, wanted in zip(gradients(ours, [y, x]), gradients(expected, [y, x]), strict=True):
            assert_equal(actual, wanted, 1e-10)

    def test_quadratic_rows(self) -> None:
        value = lambda y: y.square().sum(1, keepdim=True)  # noqa: E731
        lower, upper = torch.full((7, 1), -torch.inf, dtype=torch.float64), torch.ones(7, 1, dtype=torch.float64)
        expected, _ = textbook_repair(
            value, autograd_jacobian(value), lower, upper, Y, damping=lambda k: 0.3, tol=1e-8, max_steps=500
        )
        assert_equal(hardnet_plus_plus(disk())(Y), expected.detach(), 1e-8)

    def test_the_authors_setting(self) -> None:
        """Float32 and 500 steps; that reaches what float32 can hold."""
        layer = HardNetPlusPlusLayer(constraints(), **settings("hardnet++", "paper"))
        solution = layer.solve(Y.float(), X.float())
        assert solution.violation.dtype == torch.float64
        assert solution.violation.max() < 1e-5
