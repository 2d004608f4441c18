"""CasADi's functions as sets: values and Jacobians to the last digits, the sets that one expects, what is not taken."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, vmap

import snarenet as sn
from snarenet.testing import Case, ConstraintsSuite

ca = pytest.importorskip("casadi", reason='needs casadi: pip install "snarenet[casadi]"')

from snarenet.doors import casadi as door  # noqa: E402


def functions() -> tuple[Any, dict[str, Any]]:
    """Expressions in x (2,), one for every instruction."""
    x = ca.SX.sym("x", 2)
    a, b = x[0], x[1]
    return x, {
        "if_else": ca.if_else(a > 0, b, 2 * a),
        "if_else of a range": ca.if_else(ca.logic_and(a > -1, b <= 1), a * b, ca.sin(a)),
        "or, not": ca.if_else(ca.logic_or(a > 1, ca.logic_not(b > 0)), a, b**2),
        "equal, unequal": ca.if_else(a == b, a, b) + ca.if_else(a != b, a, b),
        "fmin": ca.fmin(a, b),
        "fmax with a number": ca.fmax(a, 0.3),
        "atan2": ca.atan2(a, b),
        "hypot": ca.hypot(a, b),
        "cube": a**3,
        "negative power": a**-3,
        "real power": ca.fabs(a) ** 2.5,
        "power of a variable": ca.fabs(a) ** b,
        "power of a number": 2**a,
        "square, twice, inverse": a**2 + 2 * b + 1 / a,
        "quotient": a / b / 3 - b / 7,
        "sqrt, exp": ca.sqrt(ca.exp(a)),
        "log, log1p, expm1": ca.log(a**2) + ca.log1p(b**2) + ca.expm1(a),
        "sin, cos, tan": ca.sin(a) + ca.cos(b) + ca.tan(a),
        "asin, acos, atan": ca.asin(a / 10) + ca.acos(b / 10) + ca.atan(a),
        "sinh, cosh, tanh": ca.sinh(a) + ca.cosh(b) + ca.tanh(a),
        "asinh, acosh, atanh": ca.asinh(a) + ca.acosh(2 + b**2) + ca.atanh(a / 10),
        "floor, ceil": ca.floor(a) * b + ca.ceil(b) * a,
        "sign, abs, copysign": ca.sign(a) * b + ca.fabs(a) + ca.copysign(a, b),
        "fmod, remainder": ca.fmod(a, b) + ca.remainder(a, b),
        "erf, erfinv": ca.erf(a) + ca.erfinv(a / 10),
        "a number": ca.SX(5) + 0 * a,
        "a sum that is used twice": ca.sin(a + b + 1) * (a + b + 1) - (a + b + 1),
    }


X, FUNCTIONS = functions()


def points(count: int, size: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_jacobians(name: str) -> None:
    """Forward and backward, as CasADi has them."""
    expression = FUNCTIONS[name]
    value, slope = (ca.Function("f", [X], [e]) for e in (expression, ca.jacobian(expression, X)))
    translated, y = door.function(value), points(20, 2)
    want = np.array([[float(value(sample.numpy()))] for sample in y])
    slopes = np.array([ca.densify(slope(sample.numpy())).full() for sample in y])
    np.testing.assert_allclose(translated(y).numpy(), want, rtol=1e-12, atol=1e-12)
    for jacobian in (jacfwd, jacrev):
        found = vmap(jacobian(lambda sample: translated(sample.unsqueeze(0))[0]))(y).numpy()
        np.testing.assert_allclose(found, slopes, rtol=1e-12, atol=1e-12)


def test_matrices_are_read_column_by_column() -> None:
    """Also of MX, which is expanded; a sparse result has its zeros."""
    Y, P = ca.MX.sym("Y", 2, 3), ca.MX.sym("P", 3, 3)
    g = ca.Function("g", [Y, P], [ca.mtimes(Y, P)])
    y, x = points(4, 6), points(4, 9, seed=1)
    pairs = zip(y.numpy(), x.numpy(), strict=True)
    want = [g(ca.reshape(ca.DM(b), 2, 3), ca.reshape(ca.DM(c), 3, 3)).full().ravel(order="F") for b, c in pairs]
    np.testing.assert_allclose(door.function(g)(y, x).numpy(), want, rtol=1e-13)
    sparse = ca.Function("d", [Y], [ca.diag(Y[:, 0])])
    assert door.function(sparse)(y)[0].tolist() == [y[0, 0], 0.0, 0.0, y[0, 1]]


def test_long_sums_are_one_operation() -> None:
    y = ca.SX.sym("y", 500)
    program = door.function(ca.Function("f", [y], [ca.sum1(ca.sin(y)) - 3 * ca.sum1(y) + 2]))
    assert len(program.levels) == 2
    values = points(3, 500)
    torch.testing.assert_close(program(values)[:, 0], values.sin().sum(1) - 3 * values.sum(1) + 2)


def model() -> sn.Constraints:
    """Rows of every kind on y (3,), with p (2,)."""
    y, p = ca.MX.sym("y", 3), ca.MX.sym("p", 2)
    g = ca.vertcat(y[0] + p[0], y[0] - 2 * y[1], ca.dot(p, y[:2]), ca.sumsqr(y) - p[1], y[2] * y[1], ca.sum1(y))
    return sn.Constraints.from_casadi(g, [0, -1, -np.inf, -np.inf, 0.2, 1], [3, np.inf, 2, 4, 0.2, 1], y, p)


def test_sets() -> None:
    """Affine rows are affine sets, constant where they are; equal bounds are equalities."""
    found = model()
    kinds = ["Box", "Linear", "Linear", "Linear", "Nonlinear", "Nonlinear"]
    assert [type(part).__name__ for part in found.parts] == kinds
    assert [part.constant for part in found.parts] == [True, True, True, False, False, False]
    assert [part.rows for part in found.parts] == [3, 1, 1, 1, 1, 1]
    y, x = points(5, 3).abs(), 1 + 0.1 * points(5, 2, seed=1)
    solution = sn.repair(found, y, x)
    assert bool(solution.converged.all())
    (a, b, c), (p, q) = solution.value.T, x.T
    rows = torch.stack([a + p, a - 2 * b, p * a + q * b, a**2 + b**2 + c**2 - q, b * c, a + b + c], 1)
    lower, upper = torch.tensor([[0, -1, -np.inf, -np.inf, 0.2, 1], [3, np.inf, 2, 4, 0.2, 1]], dtype=torch.float64)
    assert bool(((rows >= lower - 2e-8) & (rows <= upper + 2e-8)).all())


class TestSuite(ConstraintsSuite):
    """All that sets promise, of a box, of linear rows and of functions that depend on x."""

    def case(self) -> Case:
        y, p = ca.MX.sym("y", 3), ca.MX.sym("p", 2)
        g = ca.vertcat(y[0] + p[0], y[0] - 2 * y[1], ca.sumsqr(y) - p[1], y[2] * y[1] * p[0])
        found = sn.Constraints.from_casadi(g, [0, -1, -np.inf, 0.2], [3, np.inf, 4, 0.2], y, p)

        def formula(y: Tensor, x: Tensor) -> Tensor:
            (a, b, c), (p, q) = y.T, x.T
            return torch.stack([a, b, c, a - 2 * b, a**2 + b**2 + c**2 - q, c * b * p], 1)

        return Case(found, points(3, 3).abs(), 1 + 0.1 * points(3, 2, seed=1), formula)


def test_rows_with_steps_are_not_affine() -> None:
    """Their slopes are constant: CasADi takes them for affine."""
    y = ca.SX.sym("y", 2)
    found = sn.Constraints.from_casadi(ca.vertcat(ca.floor(y[0]) + y[1], y[0] + y[1], ca.fmod(y[1], 2.0)), 0.0, 1.0, y)
    assert [(type(part).__name__, part.rows) for part in found.parts] == [("Linear", 1), ("Nonlinear", 2)]
    assert found.value(torch.tensor([[2.5, 3.0]])).tolist() == [[5.5, 5.0, 1.0]]


def test_gradients_to_parameters() -> None:
    found, y, x = model(), points(4, 3), 1 + 0.1 * points(4, 2, seed=1)
    some = sn.repair(found, y, x).converged  # one has an empty set
    y, x, direction = y[some], x[some].requires_grad_(), points(4, 2, seed=2)[some]
    assert len(y) == 3

    def loss(x: Tensor) -> Tensor:
        return sn.repair(found, y, x, tol=1e-12).value.square().sum()

    (gradient,) = torch.autograd.grad(loss(x), x)
    step = 1e-6
    with torch.no_grad():
        difference = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert (gradient * direction).sum().item() == pytest.approx(difference.item(), rel=1e-5)


def test_the_pattern_is_that_of_casadi() -> None:
    """Beside a function in torch, with the same results."""
    y = ca.SX.sym("y", 40)
    found = sn.Constraints.from_casadi(y[1:] * y[:-1], 0.5, 2.0, y)
    plain = sn.Nonlinear(lambda y, x: y[:, 1:] * y[:, :-1], rows=39, lower=0.5, upper=2.0)
    values = points(5, 40).abs()
    pattern = found.at(values).map.pattern
    assert pattern is not None
    assert pattern.nnz == 78
    found.check_sparsity(values)
    torch.testing.assert_close(sn.repair(found, values).value, sn.repair(plain, values).value, atol=1e-7, rtol=0)


def test_models_of_nlpsol_and_copies() -> None:
    y, p = ca.SX.sym("y", 2), ca.SX.sym("p")
    program = {"x": y, "p": p, "f": ca.sumsqr(y), "g": y[0] * y[1] - p}
    found = sn.Constraints.from_casadi(program, lower=0.0)
    guess, x = points(3, 2).abs(), torch.ones(3, 1, dtype=torch.float64)
    value = sn.repair(found, guess, x).value
    assert bool((value.prod(1) >= 1 - 1e-8).all())
    torch.testing.assert_close(sn.repair(copy.deepcopy(found), guess, x).value, value)
    single = sn.repair(found.float(), guess.float(), x.float(), tol=1e-5).value
    torch.testing.assert_close(single.double(), value, atol=1e-4, rtol=1e-4)


def test_opti() -> None:
    """Bounds that depend on parameters are moved into the rows."""
    opti = ca.Opti()
    y, p = opti.variable(2), opti.parameter(2)
    opti.subject_to(y[0] * y[1] >= p[0])
    opti.subject_to(opti.bounded(0, y, 3))
    opti.subject_to(opti.bounded(p[0], y[0] - y[1], p[1]))
    opti.subject_to(y[0] + y[1] == 2 * p[1])
    opti.subject_to(ca.sumsqr(y) <= 9)
    found = sn.Constraints.from_casadi(opti)
    kinds = [("Box", 2), ("Linear", 1), ("Linear", 1), ("Nonlinear", 2)]
    assert [(type(part).__name__, part.rows) for part in found.parts] == kinds
    x = torch.tensor([[0.5, 1.5], [0.1, 1.2]], dtype=torch.float64)
    a, b = sn.repair(found, points(2, 2), x).value.T
    torch.testing.assert_close(a + b, 2 * x[:, 1])
    inside = (a * b - x[:, 0], a - b - x[:, 0], x[:, 1] - a + b, a, b, 3 - a, 3 - b, 9 - a**2 - b**2)
    assert min(slack.min().item() for slack in inside) >= -1e-7


def test_what_is_not_taken_is_said() -> None:
    y, p = ca.SX.sym("y", 2), ca.SX.sym("p")
    with pytest.raises(ValueError, match="give `variables`"):
        sn.Constraints.from_casadi(y[0], 0.0)
    with pytest.raises(ValueError, match="but they lack p"):
        sn.Constraints.from_casadi(y[0] * p, 0.0, variables=y)
    with pytest.raises(ValueError, match="`lower` must be a number or have 2 entries"):
        sn.Constraints.from_casadi(y, [0.0, 1.0, 2.0], variables=y)
    with pytest.raises(ValueError, match="must have a row with a bound"):
        sn.Constraints.from_casadi(y, variables=y)
    with pytest.raises(ValueError, match="it has 3 inputs"):
        sn.Constraints.from_casadi(ca.Function("g", [y, p, ca.SX.sym("q")], [y]), 0.0)
    spline, z = ca.interpolant("spline", "bspline", [[0, 1, 2, 3]], [0, 1, 4, 9]), ca.MX.sym("z")
    with pytest.raises(NotImplementedError, match="no translation to torch of CasADi's `OP_CALL`"):
        sn.Constraints.from_casadi(spline(z), 0.0, 1.0, z)
    found = sn.Constraints.from_casadi(y[0] * y[1] * p, 0.0, 1.0, y, p)
    with pytest.raises(ValueError, match=r"`x`, the parameters, must have shape \(B, 1\), but got NoneType"):
        found.violation(torch.ones(1, 2))
