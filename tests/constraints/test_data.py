"""Bad input gets an error that names the argument, what was expected and what came."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.testing import draw

A = draw(2, 3)
y = draw(4, 3, seed=1)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: sn.Linear(A), ValueError, "at least one of `lower`, `upper` and `equals`"),
        (lambda: sn.Linear(A, upper=1.0, equals=1.0), ValueError, "either `equals` or"),
        (lambda: sn.Linear(A[0], upper=1.0), ValueError, r"`A` must have shape \(m, n\) or \(B, m, n\).*\(3,\)"),
        (lambda: sn.Linear(A * math.nan, upper=1.0), ValueError, "`A` must be finite"),
        (lambda: sn.Linear(A * math.inf, upper=1.0), ValueError, "`A` must be finite"),
        (lambda: sn.Linear(A.to(torch.complex128), upper=1.0), TypeError, "`A` must be real"),
        (lambda: sn.Linear("A", upper=1.0), TypeError, "`A` must be a number or a tensor, but got str"),
        (lambda: sn.Linear(A, upper=draw(3)), ValueError, "expected bounds with 2 entries.*got 3"),
        (lambda: sn.Linear(A, lower=1.0, upper=0.0), ValueError, "`lower` <= `upper`.*by up to 1"),
        (lambda: sn.Linear(A, lower=draw(2), upper=draw(3)), ValueError, "must agree in size"),
        (lambda: sn.Linear(A, upper=math.nan), ValueError, "`upper` must not be NaN"),
        (lambda: sn.Linear(A, lower=math.inf), ValueError, "`lower` must not be NaN or inf"),
        (lambda: sn.Linear(A, equals=math.inf), ValueError, "`equals` must be finite"),
        (lambda: sn.Box(1.0, 0.0), ValueError, "`lower` <= `upper`"),
        (lambda: sn.Box(None, None), ValueError, "at least one"),
        (lambda: sn.Quadratic(A, A[:, :2], upper=1.0), ValueError, r"`H` must have shape \(2, 2\)"),
        (lambda: sn.Quadratic(draw(3, 4, 5), A, upper=1.0), ValueError, "`H` must have shape"),
        (lambda: sn.Quadratic(A * math.nan, A, upper=1.0), ValueError, "`H` must be finite"),
        (lambda: sn.Quadratic(A, A * math.nan, upper=1.0), ValueError, "`G` must be finite"),
        (lambda: sn.Quadratic(A, factor=A.T, upper=1.0), ValueError, "either `H`, or a `factor` and `diagonal`"),
        (lambda: sn.Quadratic(factor=A[0], upper=1.0), ValueError, r"`factor` must have shape \(n, k\) or \(m, n, k\)"),
        (
            lambda: sn.Quadratic(factor=A.T, diagonal=A[0, :2], upper=1.0),
            ValueError,
            r"`diagonal` .* \(3\) or \(m, 3\)",
        ),
        (
            lambda: sn.Quadratic(factor=draw(2, 3, 1), diagonal=draw(4, 3), upper=1.0),
            ValueError,
            r"`diagonal` .* \(2, 3\)",
        ),
        (lambda: sn.Quadratic(factor=draw(2, 3, 1), upper=draw(4)), ValueError, r"`factor` .* \(4, n, k\)"),
        (lambda: sn.Quadratic(factor=A.T / 0, upper=1.0), ValueError, "`factor` must be finite"),
        (lambda: sn.L1Ball(A[0], -1.0), ValueError, "`radius` must be at least 0, but its least entry is -1"),
        (lambda: sn.L1Ball(A[0], math.inf), ValueError, "`radius` must be finite"),
        (lambda: sn.L1Ball(A[0], [1.0, 2.0]), ValueError, r"`radius` must have shape \(\) or \(B, 1\)"),
        (lambda: sn.L1Ball(draw(2, 2, 2), 1.0), ValueError, r"`center` must have shape \(\) or \(n\) or \(B, n\)"),
        (lambda: sn.L1Ball(0.0, 1.0, A[0]), ValueError, r"`matrix` must have shape \(k, n\) or \(B, k, n\)"),
        (lambda: sn.L1Ball(draw(5), 1.0, A), ValueError, r"`matrix` must have shape \(5, n\) or \(B, 5, n\)"),
        (lambda: sn.L1Ball(0.0, 1.0, A / 0), ValueError, "`matrix` must be finite"),
        (lambda: sn.Nonlinear(3, rows=1, upper=1.0), TypeError, "`fn` must be a function"),
        (lambda: sn.Nonlinear(lambda y, x: y, rows=1.5, upper=1.0), ValueError, "`rows` must be a whole number"),
        (lambda: sn.Nonlinear(lambda y, x: y, rows=2, upper=draw(3)), ValueError, "expected bounds with 2"),
        (lambda: sn.Linear(A, upper=1.0) & sn.Linear(draw(2, 5), upper=1.0), ValueError, r"sizes n = \[3, 5\]"),
        (lambda: sn.Linear(A, upper=1.0) & 3, TypeError, "unsupported operand"),
        (lambda: sn.SnareLayer("set"), TypeError, "`constraints` must be a set"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), on_failure="shout"), ValueError, "`on_failure` must be"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), rows="some"), ValueError, "`rows` must be 'auto'"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), tol=-1.0), ValueError, "`tol` must be a finite number"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), tol=math.nan), ValueError, "`tol` must be a finite number"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), tol=1e-8, dtype=torch.float32), ValueError, "`tol` = 1e-08 is finer"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), dtype=torch.float16), ValueError, "`dtype` must be"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), max_steps=1.5), ValueError, "`max_steps` must be"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), solver="magic"), ValueError, "`solver` must be"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), store_factors="no"), ValueError, "`store_factors` must be"),
        (lambda: sn.SnareLayer(sn.Box(0.0, 1.0), damping="fast"), TypeError, "`damping` must be 'auto', a number"),
        (lambda: sn.MLP(0, 3), ValueError, "`inputs` must be at least 1"),
        (lambda: sn.problems.load("nlcp"), ValueError, "did you mean 'nclp'"),
        (lambda: sn.problems.load("zzz"), ValueError, "must be one of nclp, qcqp"),
    ],
)
def test_at_construction(build, error, message) -> None:
    with pytest.raises(error, match=message):
        build()


def subclass_without_rows() -> sn.Constraints:
    class Forgetful(sn.Constraints):
        def value(self, y, x=None):
            return y

        def bounds(self, x=None):
            return torch.zeros(()), torch.ones(())

    return Forgetful()


@pytest.mark.parametrize(
    ("constraints", "y", "x", "error", "message"),
    [
        (
            sn.Linear(A, upper=1.0),
            draw(4, 2),
            None,
            ValueError,
            r"`y` must have shape \(B, 3\), but got shape \(4, 2\)",
        ),
        (sn.Linear(A, upper=1.0), draw(3), None, ValueError, r"`y` must have shape \(B, 3\)"),
        (sn.Box(0.0, 1.0), [1.0], None, ValueError, r"`y` must have shape \(B, n\), but got list"),
        (sn.Box(0.0, 1.0), torch.ones(2, 3, dtype=torch.long), None, TypeError, "`y` must be a floating-point"),
        (sn.Linear(A, equals=lambda x: x), y, None, ValueError, "`equals` is a function of x, but no x was given"),
        (sn.Linear(lambda x: x["a"], upper=1.0), y, None, ValueError, "`A` is a function of x, but no x was given"),
        (sn.Linear(A, equals=lambda x: x), y, draw(5, 2), ValueError, "expected 4 samples as in `y`, but got shape"),
        (sn.Linear(A, equals=lambda x: x), y, draw(4, 3), ValueError, r"`equals` must have shape \(2\) or \(4, 2\)"),
        (sn.Linear(A, equals=lambda x: x[:, 0]), y, draw(4, 2), ValueError, r"`equals\(x\)` must return \(B, rows\)"),
        (sn.Linear(A, lower=lambda x: x, upper=0.0), y, draw(4, 2).abs(), ValueError, "`lower` <= `upper`"),
        (sn.Linear(A, upper=lambda x: x * math.nan), y, draw(4, 2), ValueError, "`upper` must not be NaN"),
        (sn.Linear(A, equals=lambda x: x / 0), y, draw(4, 2), ValueError, "`equals` must be finite"),
        (sn.Linear(lambda x: x, upper=1.0), y, draw(4, 2), ValueError, r"`A` must have shape \(m, 3\) or \(4, m, 3\)"),
        (sn.Linear(lambda x: draw(4, 2, 3) / 0, upper=1.0), y, draw(4, 2), ValueError, "`A` must be finite"),
        (sn.Linear(draw(5, 2, 3), upper=1.0), y, None, ValueError, r"`A` must have shape \(4, 2, 3\)"),
        (sn.Linear(A, upper=draw(5, 2)), y, None, ValueError, r"`upper` must have shape \(2\) or \(4, 2\)"),
        (sn.Quadratic(draw(5, 2, 3), A, upper=1.0), y, None, ValueError, "`H` must have shape"),
        (sn.Quadratic(lambda x: draw(2, 3, 3), A, upper=1.0), y, draw(4, 1), ValueError, "`H` must have shape"),
        (sn.Quadratic(lambda x: draw(4, 2, 3) / 0, A, upper=1.0), y, draw(4, 1), ValueError, "`H` must be finite"),
        (
            sn.Quadratic(factor=lambda x: draw(2, 3, 1), upper=1.0),
            y,
            draw(4, 1),
            ValueError,
            r"`factor` .* \(4, 3, k\)",
        ),
        (
            sn.Quadratic(diagonal=lambda x: draw(4, 3) / 0, upper=1.0),
            y,
            draw(4, 1),
            ValueError,
            "`diagonal` must be fin",
        ),
        (sn.Quadratic(factor=draw(5, 1, 3, 2), upper=1.0), y, None, ValueError, r"`factor` .* \(4, 1, 3, k\)"),
        (sn.L1Ball(lambda x: x[0], 1.0), y, draw(4, 3), ValueError, r"`center\(x\)` must return \(B, n\) or a number"),
        (sn.L1Ball(0.0, lambda x: x[:, 0]), y, draw(4, 3), ValueError, r"`radius\(x\)` must return \(B, 1\)"),
        (sn.L1Ball(0.0, lambda x: -x), y, draw(4, 1).abs(), ValueError, "`radius` must be at least 0"),
        (sn.L1Ball(draw(5, 3), 1.0), y, None, ValueError, r"`center` must have shape \(3\) or \(4, 3\)"),
        (sn.L1Ball(lambda x: x[:, 0], 1.0, A), y, draw(4, 3), ValueError, r"`center\(x\)` must return \(B, k\)"),
        (sn.L1Ball(lambda x: x, 1.0, A), y, draw(4, 3), ValueError, r"`center` must have shape \(2\) or \(4, 2\)"),
        (sn.L1Ball(0.0, 1.0, lambda x: A.T), y, draw(4, 3), ValueError, r"`matrix` must have shape \(m, 3\) or"),
        (sn.L1Ball(0.0, 1.0, draw(5, 2, 3)), y, None, ValueError, r"`matrix` must have shape \(4, 2, 3\)"),
        (
            sn.Nonlinear(lambda y, x: y, rows=2, upper=1.0),
            y,
            None,
            ValueError,
            r"`fn\(y, x\)` must return shape \(4, 2\)",
        ),
        (sn.Nonlinear(lambda y, x: 3.0, rows=2, upper=1.0), y, None, ValueError, "but got float"),
        (
            sn.Nonlinear(lambda y, x: y, rows=3, upper=1.0, jacobian=lambda y, x: y),
            y,
            None,
            ValueError,
            r"`jacobian\(y, x\)` must return",
        ),
        (subclass_without_rows(), y, None, ValueError, "`Forgetful` must set `rows`"),
    ],
)
def test_at_the_call(constraints, y, x, error, message) -> None:
    with pytest.raises(error, match=message):
        sn.repair(constraints, y, x)


@pytest.mark.parametrize(
    "relax", [-1.0, torch.tensor(-1.0), torch.tensor([0.1, -0.1]), torch.ones(3), torch.ones(5, 2)]
)
def test_relaxations_that_make_no_sense(relax) -> None:
    with pytest.raises(ValueError, match="`relax` must"):
        sn.repair(sn.Linear(A, upper=1.0), y, relax=relax)


def test_an_error_of_the_users_function_is_not_hidden() -> None:
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        sn.repair(sn.Linear(A, upper=broken), y, draw(4, 2))


def test_numbers_arrays_and_integers_are_data_too() -> None:
    built = [
        sn.Linear(A, upper=1),
        sn.Linear(A.numpy(), upper=np.ones(2)),
        sn.Linear(A.tolist(), upper=[1.0, 1.0]),
        sn.Linear(A, upper=torch.ones(2, dtype=torch.int32)),
        sn.Linear(A, upper=lambda x: 1.0),
    ]
    for constraints in built[1:]:
        assert torch.equal(constraints.residual(y, None), built[0].residual(y))
    assert built[1].A.dtype == torch.float64


def test_a_matrix_of_m_by_n_by_n_is_whole() -> None:
    """The one shape that could be read in two ways, diagonals for a batch of m samples, is not."""
    H = draw(3, 3, 3)
    constraints = sn.Quadratic(H, torch.zeros(3, 3), upper=1.0)
    y = draw(3, 3, seed=1)
    torch.testing.assert_close(constraints.value(y), torch.einsum("bi,mij,bj->bm", y, H, y))
    per_sample = sn.Quadratic(lambda x: H, torch.zeros(3, 3), upper=1.0)
    torch.testing.assert_close(per_sample.value(y), torch.einsum("bmi,bi->bm", H, y.square()))


class TestQuadraticWithoutOneOfItsMatrices:
    @pytest.mark.parametrize(
        "H", [draw(2, 3), draw(2, 3, 3), draw(4, 2, 3), draw(4, 2, 3, 3)], ids=lambda H: str(H.ndim)
    )
    def test_no_linear_term(self, H: Tensor) -> None:
        found, spelled = sn.Quadratic(H, upper=0.1), sn.Quadratic(H, torch.zeros(2, 3), upper=0.1)
        assert (found.rows, found.size) == (2, 3)
        assert torch.equal(found.value(y), spelled.value(y))
        assert torch.equal(sn.repair(found, y).value, sn.repair(spelled, y).value)
        assert list(found.state_dict()) == ["H", "limit.lower", "limit.upper"]

    def test_functions_of_x(self) -> None:
        x, H = draw(4, 2, seed=1), draw(2, 3, seed=2)
        square = sn.Quadratic(lambda x: x.unsqueeze(2) * H, upper=0.1)
        torch.testing.assert_close(square.value(y, x), torch.einsum("bm,mn,bn->bm", x, H, y.square()))
        line = sn.Quadratic(G=lambda x: x.unsqueeze(2) * H, upper=0.1)
        torch.testing.assert_close(line.value(y, x), torch.einsum("bm,mn,bn->bm", x, H, y))
        with pytest.raises(ValueError, match=r"`H` must have shape \(m, 3\)"):
            sn.Quadratic(lambda x: x[0], upper=0.1).value(y, x)

    def test_no_quadratic_term(self) -> None:
        assert torch.equal(sn.Quadratic(G=A, upper=0.1).value(y), sn.Linear(A, upper=0.1).value(y))

    def test_forms_of_factor_and_diagonal(self) -> None:
        """What holds for all rows, or for all samples, may be written once."""
        F, D, G = draw(3, 2, seed=1), draw(3, seed=2), draw(2, 3, seed=3)
        spelled = sn.Quadratic((F @ F.T + D.diag()).expand(2, 3, 3), G, upper=0.1)
        built = [
            sn.Quadratic(G=G, factor=F, diagonal=D, upper=0.1),
            sn.Quadratic(G=G, factor=F.expand(2, 3, 2), diagonal=D.expand(4, 2, 3), upper=0.1),
            sn.Quadratic(G=G, factor=lambda x: F.expand(4, 3, 2), diagonal=lambda x: D.expand(4, 3), upper=0.1),
            sn.Quadratic(G=lambda x: G, factor=F.expand(4, 2, 3, 2), diagonal=lambda x: D, upper=0.1),
        ]
        for found in built:
            torch.testing.assert_close(found.value(y, y), spelled.value(y))
            torch.testing.assert_close(sn.repair(found, y, y).value, sn.repair(spelled, y).value, rtol=0, atol=1e-9)
        assert [found.rows for found in built] == [2, 2, 2, 2]
        assert sn.Quadratic(factor=F, upper=0.1).rows == 1

    def test_a_diagonal_alone_is_a_diagonal_matrix(self) -> None:
        found = sn.Quadratic(diagonal=A[0].clone(), upper=0.1)
        first, again = found.at(y).map, found.at(y).map
        assert first.diagonal_hessian
        assert first is again  # so that kernels know what they have packed
        assert torch.equal(sn.repair(found, y).value, sn.repair(sn.Quadratic(A[:1], upper=0.1), y).value)
        with torch.no_grad():
            found.diagonal.mul_(2)
        assert torch.equal(found.value(y), sn.Quadratic(2 * A[:1], upper=0.1).value(y))

    def test_neither(self) -> None:
        with pytest.raises(ValueError, match="at least one of `H` and `G`"):
            sn.Quadratic(upper=1.0)

    def test_bounds_must_fit(self) -> None:
        with pytest.raises(ValueError, match=r"`H` must have shape \(5, n\) .* but got shape \(2, 3\)"):
            sn.Quadratic(A, upper=torch.ones(5))


class TestMoreDimensions:
    """A prediction (B, H, n) is refused, with a word on how to flatten it."""

    def test_all_entries_together(self) -> None:
        with pytest.raises(
            ValueError, match=r"\(B, 30\), but got shape \(4, 10, 3\); flatten it: y.flatten\(1\) has shape \(4, 30\)"
        ):
            sn.SnareLayer(sn.Linear(torch.ones(1, 30), equals=1.0))(torch.zeros(4, 10, 3))
        with pytest.raises(
            ValueError, match=r"\(B, n\), .*y.flatten\(1\).*\.reshape\(4, 10, 3\) gives the result its shape"
        ):
            sn.Box(0.0, 1.0).violation(torch.zeros(4, 10, 3))

    def test_each_vector_by_itself(self) -> None:
        with pytest.raises(ValueError, match=r"y.flatten\(0, -2\) has shape \(40, 3\)"):
            sn.Linear(A, upper=1.0).violation(torch.zeros(4, 10, 3))


class TestBounds:
    def test_shapes(self) -> None:
        lower, upper = sn.Linear(A, upper=1.0).bounds()
        assert lower.item() == -math.inf
        assert upper.item() == 1
        stack = sn.Linear(A, upper=1.0) & sn.Box(torch.zeros(3), lambda x: x)
        lower, upper = stack.bounds(torch.ones(4, 3))
        assert lower.tolist() == [-math.inf] * 2 + [0.0] * 3
        assert upper.shape == (4, 5)
        assert stack.rows == 5
        assert stack.size == 3

    def test_a_box_of_numbers_learns_its_size_from_y(self) -> None:
        box = sn.Box(0.0, 1.0)
        assert box.rows is None
        assert box.at(y).map.rows == 3
        with pytest.raises(ValueError, match=r"rows of this `Box` are not known .* tensor \(rows,\)"):
            _ = box.constant_rows
        assert sn.Box(torch.zeros(3), 1.0).constant_rows.all()

    def test_a_box_of_numbers_learns_its_size_from_the_other_parts(self) -> None:
        stack = sn.Box(0.0, 1.0) & sn.Linear(A, upper=2.0)
        assert stack.rows == stack.known_rows() == 5
        assert stack.constant
        assert stack.constant_rows.tolist() == [True] * 5
        lower, upper = stack.bounds()
        assert lower.tolist() == [0.0] * 3 + [-math.inf] * 2
        assert upper.tolist() == [1.0] * 3 + [2.0] * 2
        mixed = sn.Box(0.0, lambda x: x) & sn.Quadratic(A, upper=1.0)
        assert mixed.constant_rows.tolist() == [True] * 3 + [False] * 2
        assert mixed.bounds(torch.ones(4, 3))[1].shape == (4, 5)
        lone = sn.Box(0.0, 1.0) & sn.Box(-1.0, 2.0)
        assert lone.rows is None
        assert lone.known_rows(4) == 8
        with pytest.raises(ValueError, match="not known before"):
            lone.bounds()

    def test_stacking_is_flat_and_keeps_order(self) -> None:
        stack = sn.Linear(A, upper=1.0) & (sn.Box(torch.zeros(3), 1.0) & sn.Linear(A * 2, upper=2.0))
        assert len(stack.parts) == 3
        assert torch.equal(stack.value(y), torch.cat([y @ A.T, y, y @ A.T * 2], 1))

    def test_calling_a_set_gives_its_violation(self) -> None:
        constraints = sn.Linear(A, upper=0.0)
        assert torch.equal(constraints(y), constraints.violation(y))


def test_data_move_and_save_with_the_module() -> None:
    weight = torch.nn.Linear(2, 2).double()
    constraints = sn.Linear(A, upper=weight) & sn.Box(torch.zeros(3), 1.0)
    assert {name.split(".", 2)[2] for name in constraints.state_dict()} == {
        "A", "limit.lower", "limit.upper.weight", "limit.upper.bias", "limit.upper",
    }  # fmt: skip
    assert constraints.float().parts[0].A.dtype == torch.float32
    x = draw(4, 2, seed=2).float()  # functions of x see it in the user's precision
    assert sn.repair(constraints, y, x).value.dtype == torch.float64


def test_a_float32_module_is_a_constraint_in_any_precision() -> None:
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(5, 2)

        def forward(self, y, x):
            return torch.tanh(self.inner(torch.cat([y, x], 1)))

    net = Net()
    solution = sn.repair(sn.Nonlinear(net, rows=2, upper=-0.2), y, draw(4, 2, seed=2).float(), tol=1e-10)
    assert solution.converged.all()
    solution.value.sum().backward()
    assert net.inner.weight.grad is not None
    assert net.inner.weight.grad.abs().max() > 0


def test_residuals_can_be_differentiated_in_the_bounds() -> None:
    """Also below an equality, where both bounds are the same number."""
    y, x = torch.tensor([[0.0], [2.0]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    sn.Linear([[1.0]], equals=lambda x: x).residual(y, x).sum().backward()
    assert x.grad.tolist() == [[-1.0], [-1.0]]


@pytest.mark.parametrize(
    "constraints",
    [
        sn.Linear(A.float(), upper=0.1),
        sn.Quadratic(draw(2, 3, 3, seed=1), upper=0.1),
        sn.Quadratic(factor=draw(3, 2, seed=1), diagonal=draw(3, seed=2).abs(), upper=0.1),
    ],
    ids=["cast", "symmetric", "factored"],
)
def test_what_is_kept_in_inference_mode_serves_training(constraints: sn.Constraints) -> None:
    with torch.inference_mode():
        expected = sn.repair(constraints, y.clone()).value
    leaf = y.clone().requires_grad_()
    found = sn.repair(constraints, leaf).value
    found.sum().backward()
    assert torch.equal(found, expected)
