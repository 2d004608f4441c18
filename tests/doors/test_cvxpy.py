"""CVXPY's models as sets: the same numbers as CVXPY has, the sets that one expects, and what is not taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

import snarenet as sn
from snarenet.testing import Case, ConstraintsSuite

cp = pytest.importorskip("cvxpy", reason='needs cvxpy: pip install "snarenet[cvxpy]"')

from snarenet.doors import cvxpy as door  # noqa: E402
from snarenet.doors.coefficients import Coefficient  # noqa: E402
from snarenet.doors.expressions import Model, Rows  # noqa: E402

N = 4
RNG = np.random.default_rng(0)
A, SQUARE = RNG.standard_normal((2, N)), RNG.standard_normal((N, N))
POSITIVE = SQUARE @ SQUARE.T + np.eye(N)
OLD = tuple(map(int, cp.__version__.split(".")[:2])) < (1, 8)  # Python 3.10: less exact with Clarabel


def expressions() -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Variables y (4,) and Y (2, 3), parameters p (4,), P (2, 3) and r, and one expression for every rule."""
    y, Y = cp.Variable(N, name="y"), cp.Variable((2, 3), name="Y")
    p, P, r = cp.Parameter(N, name="p"), cp.Parameter((2, 3), name="P"), cp.Parameter(name="r")
    z = y[:3]
    return (
        [y, Y],
        [p, P, r],
        {
            "add": y + p + 1,
            "negative": -Y,
            "product": cp.multiply(Y, P),
            "quotient": Y / r,
            "matmul": A @ y,
            "matmul of matrices": Y @ P.T,
            "matmul of a row": p[:2] @ Y,
            "matmul of a matrix of parameters": P @ y[:3],
            "inner product": p @ y,
            "broadcast": Y + z,
            "index": Y[1, ::-1],
            "indices": y[[0, 2, 2]],
            "mask": Y[:, np.array([True, False, True])],
            "reshape by columns": cp.reshape(Y, (3, 2), order="F"),
            "reshape by rows": cp.reshape(Y, (3, 2), order="C"),
            "transpose": Y.T,
            "diagonal matrix": cp.diag(y),
            "diagonal": cp.diag(Y @ Y.T),
            "upper triangle": cp.upper_tri(Y @ Y.T),
            "stacks": cp.vstack([cp.hstack([Y, Y]), cp.hstack([Y, P])]),
            "block matrix": cp.bmat([[Y, P], [P, Y]]),
            "sum": cp.sum(Y),
            "sum of columns": cp.sum(Y, axis=0),
            "sum of rows": cp.sum(Y, axis=1, keepdims=True),
            "mean": cp.mean(y),
            "variance": cp.var(y),
            "trace": cp.trace(Y @ Y.T),
            "kron": cp.kron(P, Y),
            "convolution": cp.convolve(np.array([1.0, 2.0, -1.0]), y),
            "cumulative sum": cp.cumsum(Y, axis=0),
            "differences": cp.diff(y),
            "total variation": cp.tv(y),
            "abs": cp.abs(y - p),
            "exp": cp.exp(y),
            "log": cp.log(y),
            "log1p": cp.log1p(y),
            "logistic": cp.logistic(30 * y),
            "entropy": cp.entr(y),
            "relative entropy": cp.rel_entr(y, p),
            "Kullback-Leibler": cp.kl_div(y, p),
            "t exp t": cp.xexp(y),
            "square": cp.square(y - p),
            "cube": y**3,
            "power": cp.power(y, 1.7),
            "root": cp.sqrt(y),
            "inverse": cp.inv_pos(y),
            "huber": cp.huber(3 * y - 2, 0.7),
            "maximum": cp.maximum(y, p, 0.5),
            "minimum": cp.minimum(y, p, 0.5),
            "positive part": cp.pos(y - p),
            "max": cp.max(Y, axis=1),
            "min": cp.min(Y),
            "norm 1": cp.norm1(y - p),
            "norm 2": cp.norm(y - p),
            "norms of columns": cp.norm(Y, 2, axis=0),
            "norm 3": cp.pnorm(y, 3),
            "norm inf": cp.norm_inf(y - p),
            "norm of a matrix": cp.norm(Y, "fro"),
            "harmonic mean": cp.harmonic_mean(y),
            "geometric mean": cp.geo_mean(y, [1, 2, 0, 1]),
            "sum of squares": cp.sum_squares(Y - P),
            "squares over linear": cp.quad_over_lin(y, r),
            "quadratic form": cp.quad_form(y - p, POSITIVE),
            "matrix fraction": cp.matrix_frac(y, POSITIVE),
            "log-sum-exp": cp.log_sum_exp(Y, axis=0),
            "sum of the largest": cp.sum_largest(y, 2),
            "product of all": cp.prod(y),
            "sparse matrix": sparse.csc_matrix(A) @ y,
        },
    )


VARIABLES, PARAMETERS, EXPRESSIONS = expressions()


def draw(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """y (B, 10) and x (B, 11), all positive."""
    both = 0.1 + 2 * torch.rand(count, 21, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return both[:, :10], both[:, 10:]


def assign(leaves: list[Any], vector: Tensor) -> None:
    """Give CVXPY the values of one sample."""
    for leaf, value in zip(leaves, door.split(vector.detach().unsqueeze(0), leaves), strict=True):
        leaf.value = value[0].numpy()


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_atoms(name: str) -> None:
    """Every rule has the value that CVXPY has, column by column."""
    expression = EXPRESSIONS[name]
    rows, (y, x) = Rows([expression], Model(VARIABLES, PARAMETERS)), draw(3)
    found = rows(y, x)
    for k in range(3):
        assign(VARIABLES, y[k])
        assign(PARAMETERS, x[k])
        np.testing.assert_allclose(found[k], np.ravel(expression.value, order="F"), rtol=1e-12, atol=1e-12)


def models() -> dict[str, tuple[Callable[[Any, Any, Any], list[Any]], tuple[str, ...]]]:
    """Constraints on y (4,) with parameters p (4,) and r, and the sets that they become."""
    return {
        "a box": (lambda y, p, r: [y >= 0, y <= p, y[1:3] <= r], ("Box",)),
        "a box that was declared": (lambda y, p, r: [cp.abs(y) <= r, cp.max(y) <= 0.7, cp.min(y) >= -0.3], ("Box",)),
        "linear rows": (lambda y, p, r: [A @ y <= 1, A @ y >= -r, cp.sum(y) == r], ("Linear", "Linear")),
        "linear rows in parameters": (lambda y, p, r: [p @ y <= r, y[0] * r == y[1] - p[2]], ("Linear", "Linear")),
        "quadratic rows": (
            lambda y, p, r: [cp.sum_squares(y - p) <= r + 1, cp.quad_form(y, POSITIVE) <= 20],
            ("Quadratic",),
        ),
        "a quadratic in parameters": (lambda y, p, r: [cp.quad_over_lin(y, r) <= 3], ("Quadratic",)),
        "norms": (lambda y, p, r: [cp.norm(A @ y - p[:2]) <= r, cp.norm(y) <= cp.sum(p)], ("Nonlinear",)),
        "logarithms": (lambda y, p, r: [cp.sum(cp.log(y)) >= -r, cp.exp(y) <= 4 * r], ("Box", "Nonlinear")),
        "means": (lambda y, p, r: [cp.geo_mean(y) >= 0.3, cp.log_sum_exp(y) <= 2 + r], ("Box", "Nonlinear")),
        "not convex": (lambda y, p, r: [y[0] * y[1] == r, cp.norm(y) >= 1], ("Quadratic", "Nonlinear")),
    }


def build(name: str) -> tuple[Any, list[Any], list[Any], sn.Constraints]:
    """The model of this name: variable, parameters, constraints and the set."""
    y, p, r = cp.Variable(N, name="y"), cp.Parameter(N, name="p"), cp.Parameter(name="r", pos=True)
    constraints = models()[name][0](y, p, r)
    return y, [p, r], constraints, sn.Constraints.from_cvxpy(constraints, y, [p, r])


def inputs(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Predictions y (B, 4), and x (B, 5) for which all models have a feasible point."""
    g = torch.Generator().manual_seed(seed)
    y = 3 * torch.randn(count, N, generator=g, dtype=torch.float64)
    return y, 0.5 + torch.rand(count, N + 1, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("name", models())
def test_sets(name: str) -> None:
    """The rows go to the simplest sets, which know their sizes."""
    *_, found = build(name)
    assert tuple(type(part).__name__ for part in found.parts) == models()[name][1]
    assert all(part.size == N and part.rows is not None for part in found.parts)


@pytest.mark.parametrize("name", models())
def test_violations_are_those_of_cvxpy(name: str) -> None:
    """At random points, where these are in the domain."""
    variable, parameters, constraints, found = build(name)
    y, x = inputs(10)
    y = 0.1 + y.abs() if name in ("logarithms", "means") else y
    mine = found.violation(y, x)
    for k in range(len(y)):
        assign([variable], y[k])
        assign(parameters, x[k])
        theirs = max(np.max(constraint.violation()) for constraint in constraints)
        assert mine[k].item() == pytest.approx(theirs, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("name", models())
def test_repairs_are_feasible_for_cvxpy(name: str) -> None:
    variable, parameters, constraints, found = build(name)
    y, x = inputs(10)
    solution = sn.repair(found, y, x)
    assert bool(solution.converged.all())
    for k in range(len(y)):
        assign([variable], solution.value[k])
        assign(parameters, x[k])
        assert max(np.max(constraint.violation()) for constraint in constraints) <= 2e-8


@pytest.mark.filterwarnings("ignore:Solution may be inaccurate", "ignore:You are solving a parameterized problem")
@pytest.mark.parametrize("name", [name for name in models() if name != "not convex"])
def test_projections_are_those_of_clarabel(name: str) -> None:
    """The nearest point of a convex set is the one that CVXPY finds."""
    variable, parameters, constraints, found = build(name)
    y, x = inputs(3)
    solution = sn.repair(found, y, x, start=sn.Nearest())
    target = cp.Parameter(N)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(variable - target)), constraints)
    for k in range(len(y)):
        assign(parameters, x[k])
        target.value = y[k].numpy()
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        assert np.abs(solution.value[k].numpy() - variable.value).max() <= (5e-6 if OLD else 1e-6)


@pytest.mark.parametrize("name", models())
def test_gradients_to_parameters(name: str) -> None:
    """Of repaired points, against central differences."""
    *_, found = build(name)
    y, x = inputs(4, seed=1)
    weights = torch.linspace(0.5, 2.0, N, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return (sn.repair(found, y, x, tol=1e-12).value * weights).sum()

    (gradient,) = torch.autograd.grad(loss(x.requires_grad_()), x)
    step, direction = 1e-6, torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        difference = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert gradient.abs().max() > 0
    assert (gradient * direction).sum().item() == pytest.approx(difference.item(), rel=1e-4, abs=1e-5)


def test_only_what_depends_on_parameters_is_a_function() -> None:
    """Of A y + b, and of y'Hy + Gy + b."""
    y, p, P = cp.Variable(N), cp.Parameter(N), cp.Parameter((2, N))

    def functions(constraint: Any) -> set[str]:
        (part,) = sn.Constraints.from_cvxpy([constraint]).parts
        data = {name: getattr(part, name) for name in ("A", "H", "G") if hasattr(part, name)}
        data |= {name: getattr(part.limit, name) for name in part.limit.names}
        return {name for name, datum in data.items() if not isinstance(datum, Tensor)}

    assert functions(A @ y <= 1) == set()
    assert functions(A @ (y - 2 * p) / 3 == 1) == {"equals"}
    assert functions(cp.hstack([A @ y, p @ p]) == 1) == {"equals"}
    assert functions(P @ y <= 1) == {"A", "upper"}
    assert functions(cp.sum_squares(y) <= cp.sum(p)) == {"upper"}
    assert functions(2 * cp.sum_squares(A @ y - p[:2]) <= 1) == {"G", "upper"}
    assert functions(cp.sum_squares(P @ y) <= 1) == {"H", "G", "upper"}


def test_differences_are_derivatives() -> None:
    """What an exported graph computes in place of derivatives."""
    y, p = cp.Variable(N), cp.Parameter(N)
    rows = Rows([p @ y - cp.sum(p), cp.sum_squares(y - p), y[::-1] * 2], Model([y], [p]))
    x = inputs(3)[1][:, :N]
    slopes = Coefficient(rows, N, 1)
    torch.testing.assert_close(slopes._differences(x), slopes(x), rtol=1e-13, atol=1e-13)


class TestSuite(ConstraintsSuite):
    """All that sets promise, of a box, of linear and of quadratic rows that depend on x."""

    def case(self) -> Case:
        y, p, r = cp.Variable(N, name="y"), cp.Parameter(N, name="p"), cp.Parameter(name="r", pos=True)
        rows = [y <= r, p @ y == r, cp.sum_squares(y - p) <= 4, y[0] * y[1] <= 3 * r]
        found = sn.Constraints.from_cvxpy(rows, y, [p, r])
        guess, x = inputs(3, seed=3)

        def formula(y: Tensor, x: Tensor) -> Tensor:
            p = x[:, :N]
            squares = (y - p).square().sum(1, keepdim=True) - p.square().sum(1, keepdim=True)
            products = (y[:, 0] * y[:, 1]).unsqueeze(1)
            return torch.cat([y, (p * y).sum(1, keepdim=True), squares, products], 1)

        return Case(found, guess, x, formula)


@pytest.mark.parametrize(
    ("norm", "rows"),
    [
        (lambda y, c: cp.norm1(c - y), 1),
        (lambda y, c: cp.sum(cp.abs(y - c)), 1),
        (lambda y, c: cp.norm1(SQUARE @ y - c), N),
        (lambda y, c: cp.tv(y), N - 1),
        (lambda y, c: cp.norm1(cp.multiply(1 + cp.square(c), y)), N),
        (lambda y, c: cp.norm1(cp.hstack([y, y[0] - c[1]])), N + 1),
    ],
    ids=["as it is", "sum of sizes", "a matrix", "total variation", "a matrix of x", "an entry twice"],
)
def test_a_ball_in_the_first_norm(norm: Any, rows: int) -> None:
    """It is an `L1Ball`, whose repair is the projection."""
    y, c, r = cp.Variable(N), cp.Parameter(N), cp.Parameter(nonneg=True)
    found = sn.Constraints.from_cvxpy([norm(y, c) <= r], [y], [c, r])
    assert isinstance(found, sn.L1Ball)
    assert (found.rows, found.matrix is None) == (rows, rows == 1)
    guess, x = inputs(3)
    x = torch.cat([x[:, :-1], x[:, -1:].abs() + 0.5], 1)
    value = sn.repair(found, guess, x).value
    target = cp.Parameter(N)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(y - target)), [norm(y, c) <= r])
    for k in range(3):
        assign([c, r], x[k])
        target.value = guess[k].numpy()
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        assert np.abs(value[k].numpy() - y.value).max() <= (1e-6 if rows == 1 else 1e-2)
        away = [np.linalg.norm(target.value - point) for point in (value[k].numpy(), y.value)]
        assert away[0] == pytest.approx(away[1], rel=1e-5)


def test_matrices_and_names() -> None:
    """Variables are joined column by column in the order asked for; x may be a dictionary."""
    X, t = cp.Variable((2, 3), name="X"), cp.Variable(name="t")
    P, q = cp.Parameter((2, 3), name="P"), cp.Parameter(name="q")
    constraints = [X[0, 2] <= q, cp.multiply(P, X)[1, 1] + t == 1]
    found = sn.Constraints.from_cvxpy(constraints, [t, X], [q, P])
    arrays = torch.ones(1, dtype=torch.float64), torch.arange(6.0, dtype=torch.float64).reshape(1, 2, 3)
    y = door.join(arrays, [t, X])
    assert y.tolist() == [[1.0, 0.0, 3.0, 1.0, 4.0, 2.0, 5.0]]
    assert all(torch.equal(a, b) for a, b in zip(door.split(y, [t, X]), arrays, strict=True))
    named = {"q": torch.tensor([0.5]).double(), "P": 1 + torch.arange(6.0, dtype=torch.float64).reshape(1, 2, 3)}
    x = door.join([named["q"], named["P"]], [q, P])
    assert found.violation(y, x).item() == 1 + 5 * 4 - 1  # P[1, 1] X[1, 1] + t - 1
    torch.testing.assert_close(found.residual(y, named), found.residual(y, x))
    solutions = [sn.repair(found, y, either).value for either in (x, named)]
    torch.testing.assert_close(*solutions)


def test_attributes_of_variables_are_bounds() -> None:
    y = cp.Variable(2, nonneg=True)
    z = cp.Variable(2, bounds=[np.array([-1.0, -np.inf]), 3.0])
    found = sn.Constraints.from_cvxpy([cp.sum(y) + cp.sum(z) <= 100], [y, z])
    lower, upper = found.parts[0].bounds()
    assert lower.tolist() == [0.0, 0.0, -1.0, -np.inf]
    assert upper.tolist() == [np.inf, np.inf, 3.0, 3.0]


def test_cones_become_norms_and_entropies() -> None:
    t, X = cp.Variable(2), cp.Variable((3, 2))
    found = sn.Constraints.from_cvxpy([cp.SOC(t, X, axis=0)])
    value = door.join([torch.ones(1, 2).double(), 2 * torch.ones(1, 3, 2).double()], [t, X])
    assert found.residual(value).tolist() == [pytest.approx([12**0.5 - 1] * 2)]
    a, b, c = (cp.Variable() for _ in range(3))
    cone = sn.Constraints.from_cvxpy([cp.ExpCone(a, b, c)], [a, b, c])
    y = torch.tensor([[1.0, 1.0, 0.5], [2.0, 0.5, 1.0]], dtype=torch.float64)
    first, second, third = sn.repair(cone, y).value.T
    assert bool((second > 0).all())
    assert bool((second * (first / second).exp() <= third + 1e-7).all())


def test_predictions_outside_of_a_domain_come_back() -> None:
    y = cp.Variable(2)
    found = sn.Constraints.from_cvxpy([cp.sum(cp.sqrt(y)) >= 1, cp.inv_pos(y[0]) <= 2, cp.entr(y[1]) >= 0.1])
    solution = sn.repair(found, torch.tensor([[-3.0, -4.0], [-0.1, 5.0]], dtype=torch.float64))
    assert bool(solution.converged.all())
    assert solution.value.min() > 0


def test_objectives() -> None:
    y, p = cp.Variable(3), cp.Parameter(3)
    value, x = torch.tensor([[1.0, 2.0, 3.0]]).double(), torch.tensor([[1.0, 0.0, 2.0]]).double()
    least = door.objective(cp.Problem(cp.Minimize(cp.sum_squares(y - p) + p @ y), [y >= 0]))
    most = door.objective(cp.Problem(cp.Maximize(p @ y), [y >= 0]))
    assert least(value, x).tolist() == [5.0 + 7.0]
    assert most(value, x).tolist() == [-7.0]


def test_sets_move_and_copy() -> None:
    """In float32, and as a copy, a set says the same."""
    *_, found = build("logarithms")
    y, x = inputs(4)
    want = sn.repair(found, y, x).value
    torch.testing.assert_close(sn.repair(copy.deepcopy(found), y, x).value, want)
    single = sn.repair(found.float(), y.float(), x.float(), tol=1e-5)
    torch.testing.assert_close(single.value.double(), want, atol=1e-4, rtol=1e-4)


def test_what_is_not_taken_is_said() -> None:
    y, Y, p = cp.Variable(2, name="y"), cp.Variable((2, 2), name="Y"), cp.Parameter(name="p")
    with pytest.raises(NotImplementedError, match="`lambda_max`"):
        sn.Constraints.from_cvxpy([cp.lambda_max(Y) <= 1])
    with pytest.raises(NotImplementedError, match="`PSD` is not taken"):
        sn.Constraints.from_cvxpy([Y >> 0])
    with pytest.raises(NotImplementedError, match="z is declared with `integer`"):
        sn.Constraints.from_cvxpy([cp.Variable(2, name="z", integer=True) >= 0])
    with pytest.raises(ValueError, match="`variables` must hold all variables of the model, but it lacks Y"):
        sn.Constraints.from_cvxpy([y >= 0, Y >= 0], y)
    with pytest.raises(TypeError, match="but it holds Variable"):
        sn.Constraints.from_cvxpy([y])
    with pytest.raises(ValueError, match="at least one constraint on a variable"):
        sn.Constraints.from_cvxpy([p >= 0])
    found = sn.Constraints.from_cvxpy([cp.exp(y) <= p])
    with pytest.raises(ValueError, match=r"p \(\), but no x was given"):
        found.violation(torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"`x` must have shape \(B, 1\): p \(\), but got shape \(1, 2\)"):
        found.violation(torch.zeros(1, 2), torch.zeros(1, 2))
