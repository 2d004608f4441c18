"""Maps: how often a user's function and its Jacobian are evaluated, and diagonal Hessians."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.constraints.maps import FunctionMap, Linearization, LinearMap, Map, QuadraticMap, StackedMap
from snarenet.testing import draw


def chain(y: Tensor, x: None = None) -> Tensor:
    return y[:, :-1] * y[:, 1:] + y[:, 1:].sin()


class Counted:
    """The Jacobian of `chain`, and how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: Tensor, x: None = None) -> Tensor:
        self.calls += 1
        left, right = y[:, 1:], y[:, :-1] + y[:, 1:].cos()
        return torch.nn.functional.pad(left.diag_embed(), (0, 1)) + torch.nn.functional.pad(right.diag_embed(), (1, 0))


@pytest.mark.parametrize("damping", [sn.Annealed(), sn.Adaptive()], ids=["annealed", "adaptive"])
@pytest.mark.parametrize("size", [6, 1], ids=["dual", "primal"])
def test_a_given_jacobian_is_evaluated_once_a_step(damping: sn.Annealed | sn.Adaptive, size: int) -> None:
    """And once more for the row scales, forward and backward; the steps of the backward pass do without."""
    counted = Counted()
    constraints = sn.Nonlinear(lambda y, x: chain(y).repeat(1, size), 4 * size, upper=0.1,
                               jacobian=lambda y, x: counted(y).repeat(1, size, 1))  # fmt: skip
    y = draw(1, 5, seed=1, scale=2).requires_grad_()
    solution = sn.repair(constraints, y, start=None, damping=damping)
    steps = int(solution.steps)
    assert solution.converged.all()
    assert steps > 3
    assert counted.calls == steps + 1
    solution.value.sum().backward()
    assert counted.calls == steps + 2


def test_conjugate_gradients_need_no_jacobian() -> None:
    counted = Counted()
    constraints = sn.Nonlinear(chain, 4, upper=0.1, jacobian=counted)
    y = draw(3, 5, seed=1, scale=2).requires_grad_()
    value = sn.repair(constraints, y, solver=sn.ConjugateGradients()).value
    value.sum().backward()
    assert counted.calls == 0


def test_a_given_jacobian_changes_no_gradient() -> None:
    y = draw(3, 5, seed=1, scale=2).requires_grad_()
    found = []
    for jacobian in (None, Counted()):
        value = sn.repair(sn.Nonlinear(chain, 4, upper=0.1, jacobian=jacobian), y).value
        found.append((value.detach(), torch.autograd.grad(value.square().sum(), y)[0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_function_outside_torch_has_no_gradient_and_says_so() -> None:
    constraints = sn.Nonlinear(lambda y, x: chain(y.detach()), 4, upper=0.1, jacobian=Counted())
    y = draw(3, 5, seed=1)
    assert constraints.violation(sn.repair(constraints, y).value).max() <= 1e-8
    with pytest.raises(ValueError, match=r"`fn` must be differentiable by autograd .* no derivative in `y`"):
        sn.repair(constraints, y.requires_grad_())


def log_volume(y: Tensor, x: Tensor) -> Tensor:
    """log det of the matrix with entries y, where it is positive definite: elsewhere `cholesky` raises an error."""
    factor = torch.linalg.cholesky(y.unflatten(1, (2, 2)) + x.unsqueeze(2))
    return 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1, keepdim=True)


class TestErrorsOfOneSample:
    Y = torch.tensor([[2.0, 0, 0, 2], [1, 0, 0, -1], [3, 1, 1, 3], [-1, 0, 0, 1]], dtype=torch.float64)
    X = torch.zeros(4, 1, dtype=torch.float64)
    CONSTRAINTS = sn.Nonlinear(log_volume, 1, lower=2.5)

    def test_others_are_evaluated(self) -> None:
        y = self.Y.clone().requires_grad_()
        with pytest.warns(RuntimeWarning, match="`fn` raised an error at some y, where it counts as NaN: linalg.chol"):
            value = self.CONSTRAINTS.value(y, self.X).squeeze(1)
        assert value.isnan().tolist() == [False, True, False, True]
        torch.testing.assert_close(value[::2], self.Y[::2].unflatten(1, (2, 2)).logdet())
        value[::2].sum().backward()
        assert y.grad is not None
        torch.testing.assert_close(y.grad[::2].unflatten(1, (2, 2)), self.Y[::2].unflatten(1, (2, 2)).inverse().mT)

    @pytest.mark.filterwarnings("ignore:.*counts as NaN:RuntimeWarning")
    @pytest.mark.parametrize("copies", [1, 6], ids=["by rows", "by columns"])
    def test_jacobians_of_others(self, copies: int) -> None:
        constraints = sn.Nonlinear(lambda y, x: log_volume(y, x).expand(-1, copies), copies, lower=2.5)
        J = constraints.jacobian(self.Y, self.X)[::2]
        expected = self.Y[::2].unflatten(1, (2, 2)).inverse().mT.flatten(1)
        torch.testing.assert_close(J, expected.unsqueeze(1).expand(-1, copies, -1))

    @pytest.mark.filterwarnings("ignore:.*counts as NaN:RuntimeWarning")
    def test_others_are_repaired(self) -> None:
        found = sn.repair(self.CONSTRAINTS, self.Y, self.X)
        assert found.status.tolist() == [sn.Status.CONVERGED, sn.Status.NONFINITE] * 2
        assert self.CONSTRAINTS.violation(found.value[::2], self.X[::2]).max() <= 1e-8

    def test_predictions_that_are_no_numbers_are_not_worth_a_word(self) -> None:
        y = self.Y[::2].clone()
        y[0, 0] = torch.nan
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = self.CONSTRAINTS.value(y, self.X[:2])
        assert value.isnan().squeeze(1).tolist() == [True, False]

    def test_other_errors_are_raised(self) -> None:
        with pytest.raises(RuntimeError, match="shape"):
            sn.Nonlinear(lambda y, x: y.view(-1, 3), 3, upper=0.0).value(self.Y[:1])


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("size", [5, 40])
def test_a_function_that_does_not_depend_on_y(rows: int, size: int) -> None:
    """Its Jacobian is zero, by rows, by columns and on a pattern."""
    constraints = sn.Nonlinear(lambda y, x: torch.ones(len(y), rows, dtype=y.dtype), rows, upper=0.5)
    y = draw(3, size)
    assert torch.equal(constraints.jacobian(y), torch.zeros(3, rows, size, dtype=y.dtype))
    found = sn.repair(constraints, y)
    assert not found.converged.any()
    assert torch.equal(found.value, y)


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (3, 4)], ids=str)
def test_a_jacobian_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    constraints = sn.Nonlinear(chain, 4, upper=0.1, jacobian=lambda y, x: draw(*shape))
    if shape == (4, 5):  # one for all samples
        assert torch.equal(constraints.jacobian(draw(3, 5)), draw(4, 5))
        return
    with pytest.raises(ValueError, match=r"`jacobian\(y, x\)` must return shape \(3, 4, 5\), but got shape"):
        constraints.jacobian(draw(3, 5))


def test_a_linearization_keeps_its_jacobian() -> None:
    """Products of a function go through fn until J is there, and take J from then on."""
    counted, y, t = Counted(), draw(3, 5), draw(3, 5, seed=1)
    linear: Linearization = StackedMap([FunctionMap(chain, None, 4, counted), LinearMap(draw(2, 5))]).linearize(y)
    before = linear.jvp(t)
    assert counted.calls == 0
    assert linear.jacobian is linear.jacobian
    torch.testing.assert_close(linear.jvp(t), before, rtol=0, atol=1e-14)
    assert counted.calls == 1


def test_diagonal_hessians() -> None:
    H, G, A, w = draw(2, 5), draw(2, 5, seed=1), draw(3, 5, seed=2), draw(4, 5, seed=3)
    map = StackedMap([LinearMap(A), QuadraticMap(H, G, diagonal=True)])
    assert map.diagonal_hessian
    hessian = torch.func.hessian(lambda y: (w[0] * map.value(y.unsqueeze(0))[0]).sum())(draw(5, seed=4))
    torch.testing.assert_close(torch.diag(map.hessian_diagonal(w)[0]), hessian)
    whole = QuadraticMap(draw(2, 5, 5), G, diagonal=False)
    assert not whole.diagonal_hessian
    with pytest.raises(ValueError, match="Hessians of this `QuadraticMap` are not constant diagonals"):
        whole.hessian_diagonal(w[:, :2])


def test_a_factored_row_forms_no_matrix() -> None:
    """Nothing that a repair of 20 samples and its gradients make has n by n entries for each of them."""
    n, batch = 400, 20
    F, D = draw(n, 3, seed=1).requires_grad_(), draw(n, seed=2).abs().requires_grad_()
    risk = sn.Quadratic(factor=lambda x: F * (1 + x).unsqueeze(2), diagonal=D, upper=1.0)
    constraints = risk & sn.Linear(torch.ones(1, n), equals=1.0) & sn.Box(0.0, 1.0)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                largest = max(largest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return result

    with Watch():
        y = sn.repair(constraints, draw(batch, n, seed=3), draw(batch, 1, seed=4)).value
        y.square().sum().backward()
    assert F.grad is not None
    assert largest < batch * n * 10 < batch * n * n


class TestCurvature:
    """Products with the Hessian of <weights, g>, against a Hessian by torch."""

    @staticmethod
    def check(map: Map, y: Tensor, alone: Callable[[Tensor, int], Tensor]) -> None:
        weights, v = draw(len(y), map.rows, seed=3), draw(*y.shape, seed=4)
        product = map.curvature(y, weights)
        assert product is not None
        for k, found in enumerate(product(v)):
            hessian = torch.func.hessian(lambda one, k=k: weights[k] @ alone(one, k))(y[k])
            torch.testing.assert_close(found, hessian @ v[k], rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("sparsity", ["auto", None], ids=["a program", "autograd"])
    def test_of_functions(self, sparsity: Literal["auto"] | None) -> None:
        """On a pattern, with a compiler, by the program of the backward pass; else through a gradient that is kept."""
        y, x = draw(5, 40), draw(5, 1, seed=1)

        def fn(y: Tensor, x: Tensor) -> Tensor:
            return y[:, 1:].sin() * y[:, :-1] + x * y[:, 1:].square()

        instance = sn.Nonlinear(fn, 39, upper=1.0, sparsity=sparsity).at(y, x)
        self.check(instance.map.parts[0], y, lambda one, k: fn(one.unsqueeze(0), x[k : k + 1])[0])

    def test_of_quadratics(self) -> None:
        y, H = draw(3, 4), draw(2, 4, 4, seed=2)
        set = sn.Quadratic(H + H.mT, draw(2, 4, seed=5), upper=1.0)
        self.check(set.at(y, None).map.parts[0], y, lambda one, k: torch.einsum("i,mij,j->m", one, H + H.mT, one))

    def test_there_may_be_none(self) -> None:
        y = draw(3, 20)
        flat = sn.Nonlinear(lambda y, x: y[:, :2] + 1, 2, sparsity=None, upper=1.0).at(y, None).map.parts[0]
        assert flat.curvature(y, draw(3, 2)) is None
        nobody = sn.Nonlinear(lambda y, x: y.sin(), 20, upper=1.0).at(y[:0], None).map.parts[0]
        product = nobody.curvature(y[:0], y[:0])
        assert product is None or product(y[:0]).shape == (0, 20)
