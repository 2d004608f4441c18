"""Sparse systems against dense ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from snarenet import native
from snarenet.constraints.maps import LinearMap
from snarenet.linalg import Dual, EliminatedBox, SparseDual, SparseFactor, SparseNormal
from snarenet.linalg.simplicial import SimplicialFactor
from snarenet.testing import assert_equal, draw

FORMS = ("dual", "primal")


@pytest.fixture(params=["compiled", "torch"], autouse=True, scope="module")
def _arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test with compiled factors, where there is a compiler, and with those of torch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "library", lambda source: None)
        yield


def normal(pattern: Tensor | np.ndarray, form: str = "auto") -> SparseNormal:
    """Systems on the true places of a matrix."""
    row, col = torch.as_tensor(pattern).nonzero(as_tuple=True)
    return SparseNormal(row, col, tuple(pattern.shape), form)  # pyright: ignore[reportArgumentType]


def random_pattern(rows: int, columns: int, density: float, seed: int) -> Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density


def matrix(of: SparseNormal, values: Tensor, damping: Tensor, inverse_weights: Tensor, active: Tensor) -> Tensor:
    """J W^-1 J' + diag(damping), with a row of the identity where one is not in use."""
    J = values.new_zeros(len(values), *of.shape)
    J[:, of.row, of.col] = values
    J = torch.where(active.unsqueeze(2), J, 0.0)
    return J * inverse_weights.unsqueeze(1) @ J.mT + torch.diag_embed(torch.where(active, damping, 1.0))


def data(of: SparseNormal, batch: int, damping: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Nonzeros, dampings, inverse weights with some fixed variables, rows in use."""
    (m, n), generator = of.shape, torch.Generator().manual_seed(seed)
    uniform = [torch.rand(batch, k, generator=generator, dtype=torch.float64) for k in (m, n, n, m)]
    inverse_weights = torch.where(uniform[2] < 0.2, 0.0, 0.1 + uniform[1])
    return draw(batch, len(of.row), seed=seed), damping * (0.5 + uniform[0]), inverse_weights, uniform[3] < 0.7


def chain(steps: int) -> SparseNormal:
    """Defects of two states and an input: x_{k+1} - f(x_k, u_k)."""
    entries = set()
    for k in range(steps):
        for i in range(2):
            entries |= {
                (2 * k + i, 3 * (k + 1) + i),
                (2 * k + i, 3 * k),
                (2 * k + i, 3 * k + 1),
                (2 * k + i, 3 * k + 2),
            }
    row, col = (torch.tensor(index) for index in zip(*sorted(entries), strict=True))
    return SparseNormal(row, col, (2 * steps, 3 * steps + 2))


def grid(side: int) -> SparseNormal:
    """Rows of a five-point stencil on a square."""
    entries = set()
    for i in range(side):
        for j in range(side):
            for a, b in ((i, j), (i + 1, j), (i, j + 1)):
                if a < side and b < side:
                    entries |= {(i * side + j, a * side + b)}
    row, col = (torch.tensor(index) for index in zip(*sorted(entries), strict=True))
    return SparseNormal(row, col, (side**2, side**2))


def arrow(size: int) -> SparseNormal:
    """A sum over all variables beside one row for each."""
    pattern = torch.eye(size, dtype=torch.bool)
    return normal(torch.cat([torch.ones(1, size, dtype=torch.bool), pattern]))


class TestSolve:
    @pytest.mark.parametrize("form", FORMS)
    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(1, 25),
        st.integers(1, 25),
        st.sampled_from([0.05, 0.2, 0.6]),
        st.integers(0, 999),
        st.integers(-2, 8),
    )
    def test_random_patterns(self, form: str, m: int, n: int, density: float, seed: int, power: int) -> None:
        """Down to a hundredth of the rows' size dense and sparse agree to rounding, with masks and fixed variables."""
        system = normal(random_pattern(m, n, density, seed), form)
        given = data(system, 3, 10.0**power, seed)
        rhs = draw(3, m, seed=seed + 1)
        expected = torch.linalg.solve(matrix(system, *given), rhs)
        found = system.factor(*given).solve(rhs)
        assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("power", [-8, -6, -4, 0, 4, 8])
    def test_every_damping(self, form: str, power: int) -> None:
        """The residual is no worse than that of a dense factor, which grows with the condition of the matrix."""
        system = normal(random_pattern(60, 80, 0.05, 1), form)
        given = data(system, 4, 10.0**power)
        A, rhs = matrix(system, *given), draw(4, 60, seed=3)
        residual = (A @ system.factor(*given).solve(rhs).unsqueeze(2)).squeeze(2) - rhs
        dense = (A @ torch.cholesky_solve(rhs.unsqueeze(2), torch.linalg.cholesky(A))).squeeze(2) - rhs
        assert residual.norm() <= 10 * dense.norm() + 1e-14 * rhs.norm()

    @pytest.mark.parametrize("form", FORMS)
    def test_several_right_hand_sides(self, form: str) -> None:
        system = normal(random_pattern(20, 30, 0.1, 2), form)
        given = data(system, 3)
        factor, rhs = system.factor(*given), draw(3, 20, 4, seed=5)
        assert_equal(factor.solve(rhs), torch.linalg.solve(matrix(system, *given), rhs), 1e-12)
        assert_equal(factor.solve(rhs)[:, :, 2], factor.solve(rhs[:, :, 2].contiguous()), 1e-13)

    @pytest.mark.parametrize("form", FORMS)
    def test_weights_and_masks_may_be_left_out(self, form: str) -> None:
        system = normal(random_pattern(9, 14, 0.3, 3), form)
        values, damping, weights, active = data(system, 2)
        plain = matrix(system, values, damping, torch.ones_like(weights), torch.ones_like(active))
        rhs = draw(2, 9, seed=4)
        assert_equal(system.factor(values, damping).solve(rhs), torch.linalg.solve(plain, rhs), 1e-12)

    @pytest.mark.parametrize("form", FORMS)
    def test_single_precision(self, form: str) -> None:
        system = normal(random_pattern(40, 50, 0.08, 4), form)
        values, damping, weights, active = data(system, 3)
        expected = torch.linalg.solve(matrix(system, values, damping, weights, active), draw(3, 40, seed=1))
        found = system.factor(values.float(), damping.float(), weights.float(), active).solve(
            draw(3, 40, seed=1).float()
        )
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(("batch", "m", "n"), [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)])
    def test_nothing(self, form: str, batch: int, m: int, n: int) -> None:
        """No samples, no rows, no variables: what is left is the damping."""
        system = normal(random_pattern(m, n, 0.5, 5), form)
        values, damping, weights, active = data(system, batch)
        rhs = draw(batch, m, seed=6)
        factor = system.factor(values, damping, weights, active)
        assert factor.info.shape == (batch,)
        if n:
            assert factor.solve(rhs).shape == (batch, m)
        else:
            assert_equal(factor.solve(rhs), rhs / torch.where(active, damping, 1.0), 1e-15)

    @pytest.mark.parametrize("form", FORMS)
    def test_parts_that_do_not_meet(self, form: str) -> None:
        """Blocks, an empty row, an empty column, and two rows on the same places."""
        pattern = torch.zeros(12, 13, dtype=torch.bool)
        pattern[:4, :5] = pattern[4:8, 5:9] = pattern[9:11, 10:12] = True
        system = normal(pattern, form)
        given = data(system, 2)
        rhs = draw(2, 12, seed=7)
        assert_equal(system.factor(*given).solve(rhs), torch.linalg.solve(matrix(system, *given), rhs), 1e-11)

    @pytest.mark.parametrize("form", FORMS)
    def test_idle_rows_may_be_infinite(self, form: str) -> None:
        system = normal(random_pattern(10, 12, 0.3, 8), form)
        values, damping, weights, active = data(system, 2)
        wild = torch.where(active[:, system.row], values, math.inf)
        rhs = draw(2, 10, seed=8)
        expected = system.factor(values, damping, weights, active).solve(rhs)
        assert_equal(system.factor(wild, damping, weights, active).solve(rhs), expected, 0.0)

    def test_the_dual_form_needs_no_damping(self) -> None:
        system = normal(random_pattern(10, 40, 0.3, 9), "dual")
        values, _, weights, active = data(system, 2)
        rhs, none = draw(2, 10, seed=9), torch.zeros(2, 10, dtype=torch.float64)
        expected = torch.linalg.solve(matrix(system, values, none, weights, active), rhs)
        assert_equal(system.factor(values, none, weights, active).solve(rhs), expected, 1e-10)


class TestSystem:
    """`SparseDual` beside `Dual`."""

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("boxed", [False, True])
    def test_step_and_adjoint(self, form: str, boxed: bool) -> None:
        system = normal(random_pattern(14, 18, 0.2, 13), form)
        values, damping, _, active = data(system, 3)
        A, y, v = values.new_zeros(3, 14, 18), draw(3, 18, seed=1), draw(3, 18, seed=2)
        A[:, system.row, system.col] = values
        delta, scalar = damping * 0.3, torch.full((3,), 0.3, dtype=torch.float64)
        box = EliminatedBox((y > 0.5).to(y), scalar) if boxed else None
        residual = torch.where(active, draw(3, 14, seed=3), 0.0)
        outside = torch.where(y > 0.5, y - 0.5, 0.0) if boxed else None
        dense = Dual(LinearMap(A).linearize(y), active, delta, scalar, box)
        sparse = SparseDual(system.factor(values, delta, box.weights if box else None, active), scalar, box)
        assert torch.equal(torch.as_tensor(sparse.weight), torch.as_tensor(dense.weight))
        for found, expected in zip(sparse.step(residual, outside), dense.step(residual, outside), strict=True):
            assert_equal(found, expected, 1e-12)
        for found, expected in zip(sparse.adjoint(v), dense.adjoint(v), strict=True):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert_equal(found, expected, 1e-12)


class TestSamples:
    """No sample knows of another."""

    @pytest.mark.parametrize("system", [chain(30), grid(7), arrow(150)], ids=["chain", "grid", "arrow"])
    def test_a_batch_is_its_samples(self, system: SparseNormal) -> None:
        """To rounding, for LAPACK's sums depend on where a matrix begins; bit for bit if it is done twice."""
        given, rhs = data(system, 9, 1e-3), draw(9, system.shape[0], seed=1)
        together = system.factor(*given).solve(rhs)
        assert torch.equal(together, system.factor(*given).solve(rhs))
        for size in (1, 4):
            parts = [slice(k, k + size) for k in range(0, 9, size)]
            apart = torch.cat([system.factor(*(t[part] for t in given)).solve(rhs[part]) for part in parts])
            assert_equal(apart, together, 1e-13)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("keep", [[3, 1], [2], []])
    def test_some_samples_of_a_factor(self, form: str, keep: list[int]) -> None:
        pattern = torch.eye(120, dtype=torch.bool)
        pattern[:, 5], pattern[7] = True, True
        system, places = normal(pattern, form), torch.tensor(keep, dtype=torch.int64)
        assert system.estimate.heavy == 1
        factor, rhs = system.factor(*data(system, 4)), draw(4, 120, seed=1)
        assert_equal(factor[places].solve(rhs[places]), factor.solve(rhs)[places], 1e-13)
        assert_equal(factor[places].push(rhs[places]), factor.push(rhs)[places], 0.0)
        assert torch.equal(factor[places].info, factor.info[places])

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("heavy", [False, True])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_some_factors_in_place_of_others(
        self, monkeypatch: pytest.MonkeyPatch, form: str, heavy: bool, compiled: bool
    ) -> None:
        if not compiled:
            monkeypatch.setattr(native, "library", lambda source: None)
        pattern = torch.eye(120, dtype=torch.bool)
        pattern[:, 5] = pattern[7] = heavy
        pattern[7, 5] = True
        system, places, rhs = normal(pattern, form), torch.tensor([3, 1]), draw(11, 120, seed=1)
        one, other = data(system, 11), data(system, 2, 0.1, 5)
        found = system.factor(*one).replaced(places, system.factor(*other))
        both = system.factor(*(a.index_copy(0, places, b) for a, b in zip(one, other, strict=True)))
        for name in ("solve", "push", "pull"):
            assert_equal(getattr(found, name)(rhs), getattr(both, name)(rhs), 1e-12)
        assert torch.equal(found.info, both.info)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_broken_sample_stays_alone(self, form: str) -> None:
        system = normal(random_pattern(15, 20, 0.2, 11), form)
        values, damping, weights, active = data(system, 4)
        rhs = draw(4, 15, seed=2)
        expected = system.factor(values, damping, weights, torch.ones_like(active)).solve(rhs)
        values[2, 3] = math.nan
        factor = system.factor(values, damping, weights, torch.ones_like(active))
        assert (factor.info != 0).tolist() == [False, False, True, False]
        good = torch.tensor([0, 1, 3])
        assert torch.equal(factor.solve(rhs)[good], expected[good])

    def test_a_singular_sample_is_shifted_alone(self) -> None:
        """Two equal rows without damping: the others keep their bits, this one gets a solution all the same."""
        pattern = random_pattern(12, 30, 0.3, 12)
        pattern[5] = pattern[4]
        system = normal(pattern, "dual")
        values, damping, weights, active = data(system, 3)
        damping, active, rhs = torch.zeros_like(damping), torch.ones_like(active), draw(3, 12, seed=3)
        expected = system.factor(values, damping, weights, active).solve(rhs)
        values[1, system.row == 5] = values[1, system.row == 4]
        rhs[1, 5] = rhs[1, 4]
        factor = system.factor(values, damping, weights, active)
        assert factor.info.tolist() == [0, 0, 0]
        found = factor.solve(rhs)
        assert torch.equal(found[::2], expected[::2])
        residual = matrix(system, values, damping, weights, active)[1] @ found[1] - rhs[1]
        assert residual.norm() <= 1e-6 * rhs[1].norm()


class TestHeavyColumns:
    """A variable in all rows, or a row with all variables, must not fill the factor."""

    @pytest.mark.parametrize(("form", "power"), [("dual", -6), ("dual", 6), ("primal", -3), ("primal", 6)])
    def test_low_rank(self, form: str, power: int) -> None:
        size = 150
        pattern = torch.eye(size, dtype=torch.bool) | torch.eye(size, dtype=torch.bool).roll(1, 0)
        pattern[0], pattern[:, 3] = True, True
        system = normal(pattern, form)
        assert system.estimate.heavy == 1
        assert system.estimate.entries <= size**2 / 4
        given = data(system, 3, 10.0**power)
        A, rhs = matrix(system, *given), draw(3, size, seed=4)
        factor = system.factor(*given)
        assert factor.info.tolist() == [0, 0, 0]
        residual = (A @ factor.solve(rhs).unsqueeze(2)).squeeze(2) - rhs
        dense = (A @ torch.cholesky_solve(rhs.unsqueeze(2), torch.linalg.cholesky(A))).squeeze(2) - rhs
        assert residual.norm() <= 10 * dense.norm() + 1e-13 * rhs.norm()

    def test_a_sum_over_all_is_a_row_of_the_dual_form(self) -> None:
        assert arrow(200).estimate.form == "dual"
        assert arrow(200).estimate.heavy == 0
        assert arrow(200).estimate.entries <= 200**2 / 4

    def test_many_of_them_are_dense(self) -> None:
        estimate = normal(random_pattern(300, 300, 0.9, 1)).estimate
        assert (estimate.sparse, estimate.worthwhile) == (math.inf, False)


class TestEstimate:
    def test_more_rows_than_variables(self) -> None:
        """Rows on the same few variables: the primal form has them for nothing."""
        pattern = torch.eye(100, dtype=torch.bool).repeat(6, 1) | torch.eye(100, dtype=torch.bool).roll(1, 1).repeat(
            6, 1
        )
        assert normal(pattern).form == "primal"
        assert normal(pattern.T).form == "dual"

    def test_small_systems_are_dense(self) -> None:
        assert not normal(random_pattern(8, 10, 0.3, 1)).estimate.worthwhile
        tall = normal(random_pattern(90, 20, 0.1, 1)).estimate
        assert (tall.worthwhile, tall.worthwhile_for_rows) == (False, True)
        assert chain(100).estimate.worthwhile

    def test_a_chain_is_linear_in_its_length(self) -> None:
        """In entries and in time, with a number of levels that grows with the logarithm."""
        short, long = chain(100).estimate, chain(800).estimate
        assert long.entries <= 9 * short.entries
        assert long.sparse <= 9 * short.sparse
        assert long.levels <= 2 * math.log2(800)

    def test_a_factor_says_what_keeping_it_takes(self) -> None:
        system = chain(20)
        factor: SparseFactor = system.factor(*data(system, 5))
        core = factor.gram.core
        entries = core.pattern.entries if isinstance(core, SimplicialFactor) else system.estimate.entries
        assert factor.nbytes >= 5 * 8 * (entries + len(system.row))


def test_wrong_places() -> None:
    row, col = torch.tensor([0, 1]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="vectors of one length"):
        SparseNormal(row, col[:1], (2, 2))
    with pytest.raises(ValueError, match="`col` must be from 0 to 0, got 0 to 1"):
        SparseNormal(row, col, (2, 1))
    with pytest.raises(ValueError, match="each place once"):
        SparseNormal(torch.tensor([0, 0]), torch.tensor([1, 1]), (2, 2))
