"""OptNet: the projection against a solver and closed forms, its gradient against finite differences."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.layers.optnet import OptNetLayer
from snarenet.reference.engines import Clarabel
from snarenet.reference.program import QuadraticRows, Structured
from snarenet.testing import draw

pytest.importorskip("cvxpylayers")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of cvxpylayers

N, BATCH = 4, 5
A, C, G = draw(2, N, seed=1), draw(1, N, seed=2), draw(2, N, seed=5)
DIAGONALS = draw(2, N, seed=6).square() + 0.1
ROOTS = draw(2, N, N, seed=7)
WHOLE = ROOTS.mT @ ROOTS / 4
Y, X = draw(BATCH, N, seed=3, scale=2), draw(BATCH, 1, seed=4, scale=0.1)
TOP, BOTTOM = torch.tensor([0.5, torch.inf], dtype=torch.float64), torch.tensor([-0.4, -0.6], dtype=torch.float64)


def constraints(H: Tensor = DIAGONALS) -> sn.Constraints:
    """Two-sided rows, curved rows, an equality and a box; x decides on two of them."""
    curved = sn.Quadratic(H.clone(), G.clone(), upper=lambda x: 1 + x.expand(-1, 2))
    return sn.Linear(A.clone(), BOTTOM, TOP) & curved & sn.Linear(C.clone(), equals=lambda x: x) & sn.Box(-1.0, 0.8)


def oracle(H: Tensor) -> Tensor:
    """The nearest points by Clarabel, called directly, and a Newton step."""
    instance = constraints(H).at(Y, X)
    blocks = (
        QuadraticRows(A.numpy()),
        QuadraticRows(G.numpy(), H.numpy()),
        QuadraticRows(C.numpy()),
        QuadraticRows(np.eye(N)),
    )
    found = []
    for y, low, high in zip(Y.numpy(), instance.lower.numpy(), instance.upper.numpy(), strict=True):
        program = Structured(np.ones(N), -y, np.zeros(N), blocks)
        found.append(Clarabel(program)(y, low, high))
        assert program.kkt_residual(found[-1], low, high) < 1e-6
    return torch.from_numpy(np.stack(found))


class TestProjection:
    @pytest.mark.parametrize("H", [DIAGONALS, WHOLE], ids=["diagonal", "whole"])
    def test_equals_a_solver(self, H: Tensor) -> None:
        solution = OptNetLayer(constraints(H), tol=1e-8).solve(Y, X)
        assert solution.converged.all()
        assert (solution.steps == 1).all()
        torch.testing.assert_close(solution.value, oracle(H), rtol=0, atol=2e-5)

    def test_low_rank_plus_a_diagonal(self) -> None:
        factor, diagonal = draw(2, N, 2, seed=8), DIAGONALS[0]
        bounded = {"G": G, "upper": lambda x: 1 + x.expand(-1, 2)}
        whole = sn.Quadratic(factor @ factor.mT + diagonal.diag(), **bounded)
        for given, same in (
            (sn.Quadratic(factor=factor, diagonal=diagonal, **bounded), whole),
            (sn.Quadratic(diagonal=diagonal, **bounded), sn.Quadratic(diagonal.expand(2, N), **bounded)),
        ):
            expected = OptNetLayer(same)(Y, X)
            torch.testing.assert_close(OptNetLayer(given)(Y, X), expected, rtol=0, atol=2e-5)

    def test_closed_forms(self) -> None:
        disk = OptNetLayer(sn.Quadratic(torch.ones(1, N), torch.zeros(1, N), upper=1.0))
        expected = Y / Y.norm(dim=1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(disk(Y), expected, rtol=0, atol=2e-5)
        plane = OptNetLayer(sn.Linear(C, equals=lambda x: x))
        expected = Y - (Y @ C.T - X) @ torch.linalg.pinv(C).T
        torch.testing.assert_close(plane(Y, X), expected, rtol=0, atol=2e-5)

    def test_bounds_of_different_kinds_in_one_batch(self) -> None:
        """Upper bound, lower bound, both, none, and an equality, all for the same row."""
        inf = torch.inf
        low, high = torch.tensor([[-inf, 0.3], [0.1, inf], [-0.2, 0.2], [-inf, inf], [0.4, 0.4]]).double().T[..., None]
        y = OptNetLayer(sn.Linear(A[:1], low, high))(Y)
        value = Y @ A[0]
        expected = Y + (value.clamp(low[:, 0], high[:, 0]) - value)[:, None] * A[0] / A[0].square().sum()
        torch.testing.assert_close(y, expected, rtol=0, atol=2e-5)

    def test_a_relaxed_set(self) -> None:
        layer = OptNetLayer(sn.Linear(C, equals=lambda x: x))
        wide = layer(Y, X, 0.5)
        error = Y @ C.T - X
        expected = Y - error.sign() * torch.relu(error.abs() - 0.5) @ torch.linalg.pinv(C).T
        torch.testing.assert_close(wide, expected, rtol=0, atol=2e-5)
        assert layer.eval().solve(Y, X, 0.5).violation.max() <= 1e-6


class TestGradient:
    @pytest.mark.parametrize("H", [DIAGONALS, WHOLE], ids=["diagonal", "whole"])
    @pytest.mark.parametrize("mode", ["dense", "lsmr"])
    def test_finite_differences(self, H: Tensor, mode) -> None:
        """In predictions and, through x, in the bounds of curved rows and equalities; differences of 1e-3."""
        layer = OptNetLayer(constraints(H), mode)
        y, x = Y[:2].clone().requires_grad_(), X[:2].clone().requires_grad_()
        assert torch.autograd.gradcheck(layer, (y, x), eps=1e-3, atol=5e-3, rtol=5e-3)

    def test_closed_form(self) -> None:
        """Onto a half-space with active bound: dy = (I - aa'/a'a) dy_hat + a/a'a db."""
        a, bound = A[0], torch.tensor([[-5.0]], dtype=torch.float64, requires_grad=True)
        y = Y[:1].clone().requires_grad_()
        weights = draw(N, seed=9)
        (OptNetLayer(sn.Linear(A[:1], upper=lambda x: x))(y, bound) @ weights).sum().backward()
        assert y.grad is not None
        assert bound.grad is not None
        torch.testing.assert_close(y.grad[0], weights - (a @ weights) / (a @ a) * a, rtol=0, atol=1e-5)
        torch.testing.assert_close(bound.grad[0, 0], (a @ weights) / (a @ a), rtol=0, atol=1e-5)


class TestLayer:
    def test_failed_samples_are_marked_and_leave_others_alone(self) -> None:
        """An empty set for sample 1, a prediction that is not a number for sample 3."""
        layer = OptNetLayer(sn.Box(torch.zeros(N), 1.0) & sn.Linear(torch.ones(1, N), equals=lambda x: x))
        x = torch.full((BATCH, 1), 1.0, dtype=torch.float64)
        expected = layer(Y, x)
        x[1], y = 9.0, Y.clone()
        y[3, 0] = torch.nan
        y.requires_grad_()
        with pytest.warns(sn.RepairWarning, match="2 of 5 samples"):
            solution = layer.solve(y, x)
        assert solution.status.tolist() == [0, int(sn.Status.STALLED), 0, int(sn.Status.NONFINITE), 0]
        assert torch.equal(solution.value[1], Y[1])
        assert solution.violation[1] > 1
        good = [0, 2, 4]
        torch.testing.assert_close(solution.value[good], expected[good], rtol=0, atol=1e-12)
        solution.value[good].sum().backward()
        assert y.grad is not None
        assert y.grad.isfinite().all()

    def test_a_call_that_raises_is_repeated_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import diffcp

        layer = OptNetLayer(constraints())
        expected, solve = layer(Y, X), diffcp.solve_only_batch

        def fail(matrices, *arguments, **options):
            if len(matrices) > 1:
                raise diffcp.SolverError("on purpose")
            return solve(matrices, *arguments, **options)

        monkeypatch.setattr(diffcp, "solve_only_batch", fail)
        torch.testing.assert_close(layer(Y, X), expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: sn.Nonlinear(lambda y, x: y, N, upper=1.0),
                "convex quadratic constraints only, but got Nonlinear",
            ),
            (lambda: sn.Quadratic(-DIAGONALS, G, upper=1.0), "needs H >= 0, but row . of `H` has the eigenvalue -"),
            (lambda: sn.Quadratic(WHOLE - torch.eye(N), G, upper=1.0), "needs H >= 0"),
            (lambda: sn.Quadratic(DIAGONALS, G, lower=-1.0), "upper bounds only, but got `lower` or `equals`"),
            (lambda: sn.Quadratic(DIAGONALS, G, equals=1.0), "upper bounds only, but got `lower` or `equals`"),
            (lambda: sn.Quadratic(DIAGONALS, nn.Parameter(G.clone()), upper=1.0), "constant matrices, but `G`"),
            (lambda: sn.Quadratic(lambda x: x, G, upper=1.0), "constant matrices, but `H` is"),
            (lambda: sn.Quadratic(factor=lambda x: x, upper=1.0), "constant matrices, but `factor` is"),
            (lambda: sn.Quadratic(diagonal=-DIAGONALS, upper=1.0), "needs H >= 0"),
            (lambda: sn.Linear(A.expand(3, 2, N), upper=1.0) & sn.Box(0, 1), "constant matrices, but `A` is"),
        ],
    )
    def test_sets_it_cannot_do(self, make, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            OptNetLayer(make())

    def test_bounds_that_only_a_call_shows(self) -> None:
        layer = OptNetLayer(sn.Box(0, 1) & sn.Quadratic(DIAGONALS, G, lower=lambda x: x.expand(-1, 2) - 9, upper=9.0))
        with pytest.raises(ValueError, match="upper bounds only, but row 4 has a lower one"):
            layer(Y, X)

    def test_matrices_that_change_are_checked_again(self) -> None:
        layer = OptNetLayer(sn.Quadratic(DIAGONALS.clone(), G, upper=1.0))
        layer(Y)
        layer.load_state_dict(layer.state_dict() | {"constraints.H": -DIAGONALS})
        with pytest.raises(ValueError, match="needs H >= 0"):
            layer(Y)

    def test_wrong_mode(self) -> None:
        with pytest.raises(ValueError, match="`mode` must be"):
            OptNetLayer(constraints(), "sparse")  # pyright: ignore

    def test_a_missing_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cvxpylayers.torch", None)
        with pytest.raises(ImportError, match=r'OptNet needs cvxpylayers: pip install "snarenet\[baselines\]"'):
            OptNetLayer(constraints())
