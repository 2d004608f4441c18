"""Patterns, colours, detection, and repairs through compressed Jacobians."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import snarenet as sn
from snarenet.constraints import products, structure
from snarenet.constraints.maps import StackedMap
from snarenet.constraints.sparsity import Colouring, Pattern, SparsityWarning, identity
from snarenet.testing import Case, ConstraintsSuite, assert_equal, draw

SIZE = 64  # variables, enough for detection


def entries(seed: int, rows: int, columns: int, count: int) -> Tensor:
    """A random boolean matrix."""
    places = torch.randint(0, rows * columns, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.zeros(rows * columns, dtype=torch.bool).index_fill(0, places, True).view(rows, columns)


def sparse_function(mask: Tensor) -> Callable[[Tensor, Any], Tensor]:
    """Sums and sines of the variables that the mask names, in every row."""
    row, col = mask.nonzero(as_tuple=True)
    weight = draw(len(row), seed=7)

    def g(y: Tensor, x: Any) -> Tensor:
        terms = weight.to(y) * (y[:, col] + 0.5 * y[:, col].sin()) + y[:, col] * (0 if x is None else x[:, :1])
        sums = y.new_zeros(len(y), len(mask)).index_add(1, row, terms)
        return sums + 0.5 * sums.sin()

    return g


def chain(y: Tensor, x: Any = None) -> Tensor:
    """Each row has two neighbours."""
    return y[:, 1:] * y[:, :-1].sin() + y[:, 1:]


def pair(fn: Callable[[Tensor, Any], Tensor], rows: int, **options: Any) -> tuple[sn.Nonlinear, sn.Nonlinear]:
    """The same rows, sparse and dense."""
    return sn.Nonlinear(fn, rows, **options), sn.Nonlinear(fn, rows, sparsity=None, **options)


masks = st.builds(
    entries, st.integers(0, 10**6), rows=st.integers(1, 70), columns=st.integers(64, 90), count=st.integers(0, 200)
)


class TestPattern:
    def test_of_every_kind_of_matrix(self) -> None:
        mask = entries(0, 4, 6, 9)
        dense = mask.double() * 3
        scipy = pytest.importorskip("scipy.sparse")
        for matrix in (mask, dense, mask.numpy(), mask.tolist(), dense.to_sparse(), scipy.csr_array(mask.numpy())):
            pattern = Pattern.of(matrix)
            assert pattern == Pattern.of(mask)
            assert pattern.shape == (4, 6)
            row, col = mask.nonzero(as_tuple=True)
            assert torch.equal(pattern.row, row)
            assert torch.equal(pattern.col, col)

    def test_a_stored_zero_counts(self) -> None:
        stored = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.zeros(1), (2, 3), check_invariants=True)
        assert Pattern.of(stored).nnz == 1

    def test_more_than_a_matrix_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be a matrix"):
            Pattern.of(torch.ones(2, 3, 4))

    def test_union_and_what_is_missing(self) -> None:
        a, b = entries(1, 5, 7, 9), entries(2, 5, 7, 9)
        one, other = Pattern.of(a), Pattern.of(b)
        assert one | other == Pattern.of(a | b)
        assert one.missing(other) == Pattern.of(b & ~a)
        assert (one | one.missing(other)) | one is not one
        assert one | Pattern.of(a & b) is one

    @given(masks)
    @settings(max_examples=30, deadline=None)
    def test_products_and_transpose(self, mask: Tensor) -> None:
        pattern = Pattern.of(mask)
        values = draw(3, pattern.nnz, seed=1)
        J = pattern.dense(values)
        v, w = draw(3, mask.shape[1], seed=2), draw(3, mask.shape[0], seed=3)
        assert_equal(pattern.times(values, v), torch.einsum("bmn,bn->bm", J, v), 1e-13)
        assert_equal(pattern.transposed_times(values, w), torch.einsum("bmn,bm->bn", J, w), 1e-13)
        assert_equal(pattern.row_sums(values), J.sum(2), 1e-13)
        assert torch.equal(pattern.gather(J), values)
        transposed, order = pattern.transposed
        assert torch.equal(transposed.dense(values[:, order]), J.mT)
        assert torch.equal(pattern.starts.diff(), mask.sum(1))

    @given(masks)
    @settings(max_examples=30, deadline=None)
    def test_no_two_neighbours_have_a_colour(self, mask: Tensor) -> None:
        colouring = Colouring.of(Pattern.of(mask))
        lines = mask if colouring.by_rows else mask.T
        for colour in range(colouring.count):
            assert (lines[colouring.colours == colour].sum(0) <= 1).all()
        assert colouring.count <= max(1, min(mask.shape))

    def test_stacked(self) -> None:
        parts = [Pattern.of(entries(seed, 3, 5, 6)) for seed in range(3)]
        whole = torch.cat([part.dense(torch.ones(1, part.nnz))[0] for part in parts])
        assert Pattern.stack(parts) == Pattern.of(whole)
        assert Pattern.stack(parts) is Pattern.stack(parts)
        assert identity(4) == Pattern.of(torch.eye(4))


class TestDetection:
    @given(masks)
    @settings(max_examples=40, deadline=None)
    def test_finds_the_truth(self, mask: Tensor) -> None:
        sparse, dense = pair(sparse_function(mask), len(mask), upper=0.0)
        y, x = draw(3, mask.shape[1], seed=1), draw(3, 2, seed=2)
        map = sparse.at(y, x).map
        if Pattern.of(mask).density > 0.25:
            assert map.pattern is None
            return
        assert map.pattern == Pattern.of(mask)
        J, linear = dense.jacobian(y, x), map.linearize(y)
        assert_equal(linear.values, Pattern.of(mask).gather(J), 1e-12)
        assert_equal(linear.jacobian, J, 1e-12)
        assert_equal(map.row_norms(y), J.square().sum(2), 1e-12)
        sparse.check_sparsity(y, x)

    def test_few_variables_stay_dense_to_the_last_bit(self) -> None:
        sparse, dense = pair(chain, 14, upper=0.0)
        y = draw(4, 15, seed=1)
        assert sparse.at(y).map.pattern is None
        assert torch.equal(sparse.jacobian(y), dense.jacobian(y))
        assert torch.equal(sn.repair(sparse, y).value, sn.repair(dense, y).value)

    def test_a_dense_function_stays_dense(self) -> None:
        W = draw(30, SIZE, seed=1)
        sparse, dense = pair(lambda y, x: (y @ W.T).sin(), 30, upper=0.0)
        y = draw(2, SIZE, seed=2)
        assert sparse.at(y).map.pattern is None
        assert torch.equal(sparse.jacobian(y), dense.jacobian(y))

    def test_zeros_of_a_prediction_are_no_zeros_of_the_pattern(self) -> None:
        constraints = sn.Nonlinear(lambda y, x: y[:, 1:] * y[:, :-1], SIZE - 1, upper=0.0)
        pattern = constraints.at(torch.zeros(1, SIZE, dtype=torch.float64)).map.pattern
        assert pattern is not None
        assert pattern.nnz == 2 * (SIZE - 1)

    def test_points_where_the_function_is_no_number_say_nothing(self) -> None:
        constraints = sn.Nonlinear(lambda y, x: y[:, 1:].sqrt() + y[:, :-1].log(), SIZE - 1, upper=0.0)
        pattern = constraints.at(0.1 + draw(5, SIZE, seed=1).abs()).map.pattern
        assert pattern is not None
        assert pattern.nnz == 2 * (SIZE - 1)

    def test_a_row_that_never_is_a_number_is_full(self) -> None:
        def g(y: Tensor, x: Any) -> Tensor:
            return torch.cat([chain(y), (-1 - y.square()).sqrt()[:, :1] * y.sum(1, keepdim=True)], 1)

        pattern = sn.Nonlinear(g, SIZE, upper=0.0).at(draw(3, SIZE, seed=1)).map.pattern
        assert pattern is not None
        assert int((pattern.row == SIZE - 1).sum()) == SIZE

    @pytest.mark.parametrize("first", [0.0, 1.0])
    def test_points_without_a_derivative_say_nothing(self, first: float) -> None:
        """That of q |q|^0.852 is NaN at zero, in backward passes for neighbours as well."""

        def pipes(y: Tensor, x: Any) -> Tensor:
            q, a, b = y.chunk(3, 1)
            return torch.cat([q * q.abs().pow(0.852) + a - b, q[:, 1:] - q[:, :-1]], 1)

        constraints, y = sn.Nonlinear(pipes, 2 * SIZE - 1, upper=0.5), first * draw(4, 3 * SIZE)
        with warnings.catch_warnings():
            warnings.simplefilter("error", SparsityWarning)
            for point in (y, 0 * y, y):
                constraints.jacobian(point)
        pattern = constraints.at(y).map.pattern
        assert pattern is not None
        assert Colouring.of(pattern).by_rows
        assert pattern.nnz == 3 * SIZE + 2 * (SIZE - 1)

    def test_a_branch_that_one_sample_of_the_batch_takes(self) -> None:
        def g(y: Tensor, x: Tensor) -> Tensor:
            return chain(y) + torch.where(x > 0, y[:, :1] ** 2, 0.0)

        sparse, dense = pair(g, SIZE - 1, upper=0.0)
        y, x = draw(40, SIZE, seed=1), -torch.ones(40, 1, dtype=torch.float64)
        x[17] = 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_equal(sparse.jacobian(y, x), dense.jacobian(y, x), 1e-12)

    def test_a_branch_that_comes_later_is_found_and_said(self) -> None:
        def g(y: Tensor, x: Tensor) -> Tensor:
            return chain(y) + torch.where(x > 0, y[:, :1] ** 2, 0.0)

        sparse, dense = pair(g, SIZE - 1, upper=0.0)
        y, x = draw(5, SIZE, seed=1), torch.ones(5, 1, dtype=torch.float64)
        sparse.jacobian(y, -x)
        with pytest.warns(SparsityWarning, match=r"62 entries .*\(1, 0\)"):
            found = sparse.jacobian(y, x)  # the second call
        assert_equal(found, dense.jacobian(y, x), 1e-12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_equal(sparse.jacobian(y, x), dense.jacobian(y, x), 1e-12)

    def test_an_index_that_depends_on_y(self) -> None:
        """Every sample has a pattern of its own; the union of all is dense."""

        def g(y: Tensor, x: Any) -> Tensor:
            return y.gather(1, y.detach().argsort(1)[:, :20]) ** 2

        sparse, dense = pair(g, 20, upper=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SparsityWarning)
            for seed in range(2):
                y = draw(200, SIZE, seed=seed)
                assert_equal(sparse.jacobian(y), dense.jacobian(y), 1e-12)

    def test_no_sample_no_pattern(self) -> None:
        constraints = sn.Nonlinear(chain, SIZE - 1, upper=0.0)
        assert constraints.at(torch.zeros(0, SIZE, dtype=torch.float64)).map.pattern is None
        assert constraints.jacobian(torch.zeros(0, SIZE, dtype=torch.float64)).shape == (0, SIZE - 1, SIZE)
        assert constraints.at(draw(1, SIZE)).map.pattern is not None
        assert constraints.jacobian(torch.zeros(0, SIZE, dtype=torch.float64)).shape == (0, SIZE - 1, SIZE)

    def test_a_function_of_any_number_of_variables(self) -> None:
        constraints = sn.Nonlinear(lambda y, x: y[:, 1:15] * y[:, :14], 14, upper=0.0)
        for n in (SIZE, SIZE + 5, 15, SIZE):
            map = constraints.at(draw(2, n)).map
            assert map.jacobian(draw(2, n)).shape == (2, 14, n)
            assert (map.pattern is None) == (n == 15)

    def test_many_products_are_those_of_the_matrix(self) -> None:
        sparse, dense = pair(chain, SIZE - 1, upper=0.0)
        y, t, w = draw(3, SIZE), draw(3, SIZE, seed=1), draw(3, SIZE - 1, seed=2)
        sparse.jacobian(y)
        linear, J = sparse.at(y).map.linearize(y), dense.jacobian(y)
        for _ in range(4):  # the first by autograd, the others by the matrix
            assert_equal(linear.jvp(t), torch.einsum("bmn,bn->bm", J, t), 1e-13)
            assert_equal(linear.vjp(w), torch.einsum("bmn,bm->bn", J, w), 1e-13)

    @pytest.mark.parametrize("by_rows", [False, True])
    def test_products_a_few_at_a_time(self, by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """The batch is large against the caches: seeds are split, and no number changes."""
        y, calls = draw(3, SIZE), []
        seeds = draw(5, SIZE - 1 if by_rows else SIZE, seed=1)
        whole = products.Products(lambda y: chain(y, None), y).many(seeds, by_rows)
        monkeypatch.setattr(products, "_CACHED", 2 * 3 * SIZE)
        few = products.Products(lambda y: chain(y, None), y)
        grad = few._grad
        monkeypatch.setattr(few, "_grad", lambda *a, **k: calls.append(len(a[2])) or grad(*a, **k))
        assert torch.equal(few.many(seeds, by_rows), whole)
        assert calls[-3:] == [2, 2, 1]

    def test_random_numbers_of_the_user_are_left_alone(self) -> None:
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        sn.Nonlinear(chain, SIZE - 1, upper=0.0).jacobian(draw(1, SIZE))
        assert torch.equal(torch.rand(2), expected)

    def test_copies_and_pickles(self) -> None:
        constraints = sn.Nonlinear(chain, SIZE - 1, upper=0.0)
        y = draw(2, SIZE)
        expected = constraints.jacobian(y)
        for twin in (copy.deepcopy(constraints), pickle.loads(pickle.dumps(constraints))):
            assert torch.equal(twin.jacobian(y), expected)
        assert not constraints.state_dict().keys() - {"limit.lower", "limit.upper"}

    def test_inside_transforms(self) -> None:
        constraints = sn.Nonlinear(chain, SIZE - 1, upper=0.0)
        y = draw(3, 2, SIZE)
        expected = torch.stack([constraints.jacobian(one) for one in y])
        assert_equal(torch.func.vmap(constraints.jacobian)(y), expected, 1e-12)


class TestDeclared:
    def test_is_believed_and_checked_on_demand(self) -> None:
        mask = sn.Nonlinear(chain, SIZE - 1, upper=0.0).at(draw(1, SIZE)).map.pattern
        assert mask is not None
        right = mask.dense(torch.ones(1, mask.nnz))[0].bool()
        wrong = right.clone()
        wrong[3, 4] = False
        y = draw(2, SIZE)
        good, bad = (sn.Nonlinear(chain, SIZE - 1, upper=0.0, sparsity=p) for p in (right, wrong.numpy()))
        good.check_sparsity(y)
        assert good.at(y).map.pattern == mask
        with pytest.raises(ValueError, match=r"lacks 1 entries of the Jacobian: \(3, 4\)"):
            (bad & sn.Box(-1.0, 1.0)).check_sparsity(y)

    @given(masks, st.integers(0, 10**6))
    @settings(max_examples=25, deadline=None)
    def test_one_entry_too_few_is_caught(self, mask: Tensor, which: int) -> None:
        places = mask.nonzero()
        if not len(places):
            return
        i, j = places[which % len(places)].tolist()
        wrong = mask.clone()
        wrong[i, j] = False
        constraints = sn.Nonlinear(sparse_function(mask), len(mask), upper=0.0, sparsity=wrong)
        with pytest.raises(ValueError, match=rf"lacks 1 entries of the Jacobian: \({i}, {j}\)"):
            constraints.check_sparsity(draw(2, mask.shape[1]), draw(2, 1))

    def test_small_sets_may_have_one(self) -> None:
        mask = torch.tensor([[True, True, False], [False, True, True]])
        sparse, dense = pair(chain, 2, upper=0.0)
        sparse = sn.Nonlinear(chain, 2, upper=0.0, sparsity=mask)
        y = draw(4, 3, seed=1)
        assert sparse.at(y).map.pattern == Pattern.of(mask)
        assert_equal(sparse.jacobian(y), dense.jacobian(y), 1e-13)

    @pytest.mark.parametrize(
        ("sparsity", "message"),
        [("some", '"auto", None or a matrix'), (np.ones((3, 4)), r"shape \(2, n\)"), (np.ones(3), "must be a matrix")],
    )
    def test_what_is_no_pattern_is_refused(self, sparsity: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            sn.Nonlinear(chain, 2, upper=0.0, sparsity=sparsity)

    def test_of_another_size_than_y(self) -> None:
        with pytest.raises(ValueError, match=r"shape \(2, 3\) for this `y`, but got shape \(2, 4\)"):
            sn.Nonlinear(chain, 2, upper=0.0, sparsity=np.ones((2, 4))).jacobian(draw(1, 3))


class TestGivenJacobian:
    @staticmethod
    def chain_jacobian(y: Tensor) -> Tensor:
        J = torch.zeros(len(y), y.shape[1] - 1, y.shape[1], dtype=y.dtype)
        i = torch.arange(y.shape[1] - 1)
        J[:, i, i] = y[:, 1:] * y[:, :-1].cos()
        J[:, i, i + 1] = y[:, :-1].sin() + 1
        return J

    @pytest.mark.parametrize("layout", ["coo", "csr"])
    def test_in_a_sparse_layout_stays_sparse(self, layout: str) -> None:
        def jacobian(y: Tensor, x: Any) -> Tensor:
            J = self.chain_jacobian(y)
            return J.to_sparse() if layout == "coo" else J.to_sparse_csr()

        sparse = sn.Nonlinear(chain, SIZE - 1, upper=0.5, jacobian=jacobian)
        y = draw(3, SIZE, seed=1)
        map = sparse.at(y).map
        assert map.pattern is not None
        assert map.pattern.nnz == 2 * (SIZE - 1)
        assert_equal(map.linearize(y).jacobian, self.chain_jacobian(y), 1e-13)
        dense = sn.Nonlinear(chain, SIZE - 1, upper=0.5, sparsity=None)
        _assert_alike(sparse, dense, y, None, [])

    def test_new_entries_widen_it(self) -> None:
        def jacobian(y: Tensor, x: Any) -> Tensor:
            return self.chain_jacobian(y).to_sparse()

        constraints = sn.Nonlinear(chain, SIZE - 1, upper=0.0, jacobian=jacobian)
        zero, y = torch.zeros(1, SIZE, dtype=torch.float64), draw(2, SIZE)
        for point in (zero, y, zero):  # at zero half of the entries are
            assert_equal(constraints.jacobian(point), self.chain_jacobian(point), 1e-13)

    def test_beside_a_pattern_is_refused(self) -> None:
        with pytest.raises(ValueError, match="not both"):
            sn.Nonlinear(chain, 2, upper=0.0, jacobian=lambda y, x: y, sparsity=np.ones((2, 3)))


class TestParts:
    def test_a_stack_has_the_pattern_of_its_parts(self) -> None:
        A, H = entries(1, 5, SIZE, 20).double(), torch.zeros(2, SIZE, SIZE, dtype=torch.float64)
        H[0, 3, 4] = H[1, 7, 7] = 1.0
        diagonal, B = entries(2, 4, SIZE, 9).double(), entries(3, 3, SIZE, 12).double()
        stack = (
            sn.Nonlinear(chain, SIZE - 1, upper=0.0)
            & sn.Linear(A, upper=0.0)
            & sn.Linear(A.to_sparse(), upper=0.0)
            & sn.Linear(lambda x: B * x.unsqueeze(2), upper=torch.zeros(3))
            & sn.Quadratic(H, upper=0.0)
            & sn.Quadratic(diagonal, G=entries(4, 4, SIZE, 9).double(), upper=0.0)
            & sn.Box(-1.0, 1.0)
        )
        y, x = draw(3, SIZE, seed=5), draw(3, 1, seed=6)
        map = stack.at(y, x).map
        J = map.jacobian(y)
        linear = map.linearize(y)
        assert linear.pattern is not None
        assert linear.pattern == map.pattern
        assert_equal(linear.pattern.dense(linear.values), J, 1e-13)
        assert linear.pattern.nnz == int((J != 0).any(0).sum())
        assert map.select(torch.tensor([0, 2])).pattern == map.pattern

    def test_one_dense_part_makes_it_dense(self) -> None:
        W = draw(2, SIZE)
        dense = sn.Nonlinear(lambda y, x: y @ W.T, 2, upper=0.0)
        y = draw(2, SIZE)
        assert (sn.Box(-1.0, 1.0) & dense).at(y).map.pattern is None
        assert StackedMap([]).pattern is None

    def test_matrices_of_x_may_get_new_entries(self) -> None:
        constraints = sn.Linear(lambda x: torch.diag_embed(x), upper=torch.zeros(4))
        x = torch.eye(4, dtype=torch.float64)
        for count in range(1, 5):
            pattern = constraints.at(draw(1, 4), x[count - 1 : count]).map.pattern
            assert pattern is not None
            assert pattern.nnz == count


def _assert_alike(
    sparse: sn.Constraints, dense: sn.Constraints, y: Tensor, x: Tensor | None, leaves: list[Tensor]
) -> None:
    """Values and gradients of repairs under both."""
    for options in ({}, {"rows": "all", "damping": 0.1, "max_steps": 5, "tol": 0}, {"damping": sn.Adaptive()}):
        found = []
        for constraints in (sparse, dense):
            inputs = [t.detach().clone().requires_grad_() for t in (y, x) if t is not None]
            solution = sn.repair(constraints, *inputs, **options)
            assert "tol" in options or solution.converged.all(), solution.describe()  # else rounding decides the end
            value = solution.value
            weights = draw(*value.shape, seed=9)
            gradients = torch.autograd.grad((weights * value).sum(), [*inputs, *leaves], allow_unused=True)
            found.append([value, *gradients])
        searched = "damping" in options and "tol" not in options  # many steps amplify rounding
        for a, b in zip(*found, strict=True):
            assert_equal(a, b, 1e-8 if searched else 1e-10)


class TestRepair:
    def test_values_and_gradients_are_those_of_the_dense_one(self) -> None:
        mask = entries(4, 25, SIZE, 75)
        factor = nn.Parameter(draw(25, seed=8).abs() + 0.5)
        inner = sparse_function(mask)
        sparse, dense = pair(
            lambda y, x: factor.to(y) * inner(y, x), 25, lower=-1.0, upper=lambda x: 0.5 + x[:, 1:].expand(-1, 25) ** 2
        )
        y, x = draw(6, SIZE, seed=1), draw(6, 2, seed=2)
        assert sparse.at(y, x).map.pattern is not None
        _assert_alike(sparse, dense, y, x, [factor])
        _assert_alike(sparse & sn.Box(-1.5, 1.5), dense & sn.Box(-1.5, 1.5), y, x, [factor])

    def test_more_rows_than_variables(self) -> None:
        sparse, dense = pair(sparse_function(entries(4, 90, SIZE, 180)), 90, lower=-3.0, upper=3.0)
        _assert_alike(sparse, dense, draw(4, SIZE, seed=1, scale=2), None, [])

    def test_conjugate_gradients(self) -> None:
        sparse, dense = pair(chain, SIZE - 1, upper=0.5)
        y, solver = draw(3, SIZE, seed=1), sn.ConjugateGradients(tol=1e-12)
        sn.repair(sparse, y.float(), solver=solver, tol=1e-4)
        assert not sparse.structure.known  # a pattern is looked for by those who need a Jacobian
        assert_equal(sn.repair(sparse, y, solver=solver).value, sn.repair(dense, y, solver=solver).value, 1e-9)

    def test_float32(self) -> None:
        sparse, dense = pair(chain, SIZE - 1, upper=0.5)
        y = draw(3, SIZE, seed=1).float()
        for dtype in (torch.float32, torch.float64):
            a, b = (sn.repair(c, y, dtype=dtype, tol=1e-4) for c in (sparse, dense))
            assert a.converged.all()
            assert_equal(a.value, b.value, 1e-5)

    def test_compiled_before_and_after_detection(self) -> None:
        constraints = sn.Nonlinear(chain, SIZE - 1, upper=0.5)
        y = draw(3, SIZE, seed=1)
        layer = sn.SnareLayer(constraints)
        expected = sn.SnareLayer(sn.Nonlinear(chain, SIZE - 1, upper=0.5, sparsity=None))(y)
        compiled = torch.compile(layer, backend="eager")
        assert_equal(compiled(y), expected, 1e-10)
        assert_equal(layer(y), expected, 1e-10)  # which detects
        assert constraints.at(y).map.pattern is not None
        assert_equal(compiled(y), expected, 1e-10)


class TestUnicycle(ConstraintsSuite):
    """Three steps of a vehicle around a disk, with detection for its few variables too."""

    @pytest.fixture(autouse=True)
    def _small_sets_are_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(structure, "_LEAST", 1)

    def case(self) -> Case:
        steps = 3
        scale = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))

        def g(y: Tensor, x: Tensor) -> Tensor:
            states, controls = y[:, : 3 * steps].unflatten(1, (steps, 3)), y[:, 3 * steps :].unflatten(1, (steps, 2))
            before = torch.cat([x.unsqueeze(1), states[:, :-1]], 1)
            px, py, angle = before.unbind(2)
            step = scale.to(y)
            moved = torch.stack(
                [
                    px + step * controls[..., 0] * angle.cos(),
                    py + step * controls[..., 0] * angle.sin(),
                    angle + step * controls[..., 1],
                ],
                2,
            )
            return torch.cat([(states - moved).flatten(1), states[..., :2].square().sum(2)], 1)

        zeros, ones = torch.zeros(3 * steps, dtype=torch.float64), torch.ones(steps, dtype=torch.float64)
        lower, upper = torch.cat([zeros, ones]), torch.cat([zeros, 400 * ones])
        return Case(
            sn.Nonlinear(g, 4 * steps, lower, upper),
            draw(3, 5 * steps, seed=1, scale=0.5),
            torch.tensor([-3.0, 0.5, 0.1], dtype=torch.float64) + draw(3, 3, seed=2, scale=0.1),
            formula=g,
            lower=lower,
            upper=upper,
            tensors=[scale],
        )

    def test_it_is_sparse(self) -> None:
        case = self.case()
        pattern = case.constraints.at(case.y, case.x).map.pattern
        assert pattern is not None
        assert pattern.nnz == 34
