"""`Solution.conflict`: it names the rows that fight, proves what it calls certified, and certifies nothing else."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map

import snarenet as sn
from snarenet.repair.conflict import SampleConflict
from snarenet.repair.conflict.farkas import nonnegative_least_squares
from snarenet.testing import assert_equal, draw

D = torch.float64


def check(found: SampleConflict, constraints: sn.Constraints, y: Tensor, x: Tensor | None = None) -> None:
    """The certificate of linear rows, by Farkas' conditions, with numbers of our own."""
    proof = found.certificate
    assert found.certified
    assert proof is not None
    assert proof.exact
    instance = constraints.at(y.to(D), x)
    A = instance.map.jacobian(y.to(D)).expand(len(y), instance.map.rows, y.shape[1])[found.sample]
    lower, upper = instance.lower[found.sample], instance.upper[found.sample]
    assert (proof.lower >= 0).all()
    assert (proof.upper >= 0).all()
    balance = (proof.upper - proof.lower) @ A
    assert balance.norm() <= 1e-12 * ((proof.upper + proof.lower) @ A.abs()).norm() + 1e-300
    above, below = proof.upper > 0, proof.lower > 0
    gap = float(proof.lower[below] @ lower[below] - proof.upper[above] @ upper[above])
    assert gap > 0
    assert gap == pytest.approx(proof.gap, rel=1e-6)
    assert [row.row for row in found.rows] == (above | below).nonzero().squeeze(1).tolist()
    assert sum(row.weight for row in found.rows) == pytest.approx(1)


def contradiction(seed: int, size: int, fighting: int, harmless: int, scale: float) -> tuple[sn.Linear, list[int]]:
    """Rows of which `fighting` cannot hold together, and others, far from all of this; where the first ones stand.

    With positive weights the first sum to zero, while their bounds sum to -1. All but one hold at a point nearby.
    """
    own = torch.linalg.qr(draw(size, fighting - 1, seed=seed))[0].mT
    weights = draw(fighting - 1, seed=seed + 1).abs() + 0.2
    A = torch.cat([own, -(weights @ own).unsqueeze(0), draw(harmless, size, seed=seed + 2)])
    center = draw(size, seed=seed + 3, scale=3.0)
    slack = torch.cat([torch.zeros(fighting - 1), -torch.ones(1), 1e3 + draw(harmless, seed=seed + 4).abs()])
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(A), generator=generator)
    factors = scale ** (2 * torch.rand(len(A), generator=generator, dtype=D) - 1)
    factors[::2] *= -1  # every other row as a lower bound
    A, bound = A * factors.unsqueeze(1), (A @ center + slack) * factors
    lower, upper = torch.where(factors < 0, bound, -math.inf), torch.where(factors > 0, bound, math.inf)
    places = order.argsort()[:fighting]
    return sn.Linear(A[order], lower=lower[order], upper=upper[order]), sorted(places.tolist())


class TestLinear:
    @given(
        seed=st.integers(0, 10_000),
        size=st.integers(2, 8),
        fighting=st.integers(2, 6),
        harmless=st.integers(0, 20),
        scale=st.sampled_from([1.0, 1e3]),
    )
    @settings(max_examples=15, deadline=None)
    def test_names_the_rows_that_fight(self, seed: int, size: int, fighting: int, harmless: int, scale: float) -> None:
        """Row scales spread over 1e-3 to 1e3, and the rows that conflict are known."""
        fighting = min(fighting, size + 1)
        constraints, rows = contradiction(seed, size, fighting, harmless, scale)
        y = draw(2, size, seed=seed + 9)
        solution = sn.repair(constraints, y)
        assert (solution.status == sn.Status.STALLED).all()
        for found in solution.conflict():
            check(found, constraints, y)
            assert [row.row for row in found.rows] == rows

    @pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
    @pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
    def test_units_do_not_matter(self, unit: float, scale: float) -> None:
        """Variables in other units, and one of the rows multiplied by a number."""
        A = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0], [1.0, 3.0, 1.0], [1.0, 0.0, 0.0]], dtype=D)
        factors = torch.tensor([1.0, 1.0, scale, 1.0], dtype=D)
        bounds = torch.tensor([1.0, 1.0, 3.0, 9.0], dtype=D) * factors * unit
        lower = torch.tensor([-math.inf, -math.inf, 1.0, -math.inf], dtype=D) * bounds
        upper = torch.tensor([1.0, 1.0, math.inf, 1.0], dtype=D) * bounds
        constraints, y = sn.Linear(A * factors.unsqueeze(1), lower=lower, upper=upper), torch.zeros(1, 3, dtype=D)
        found = sn.repair(constraints, y, tol=max(1e-14, 1e-8 * min(1.0, unit * scale))).conflict().samples[0]
        check(found, constraints, y)
        lengths = A[:3].norm(dim=1) / A[:3].norm(dim=1).sum()
        assert [row.row for row in found.rows] == [0, 1, 2]
        np.testing.assert_allclose([row.weight for row in found.rows], lengths, rtol=1e-9)

    def test_parallel_rows_equalities_and_boxes(self) -> None:
        parallel = sn.Linear(torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, -1.0]]), equals=[1.0, 3.0, 0.0])
        text = str(sn.repair(parallel, torch.zeros(1, 2, dtype=D)).conflict())
        assert text == (
            "sample 0: Linear row 0 (= 1) and Linear row 1 (= 3) conflict: weights 0.5 and 0.5; "
            "certified: no y satisfies both."
        )
        boxed = sn.Box(0.0, 1.0) & sn.Linear(torch.eye(3), lower=[-1.0, 2.0, -1.0]) & sn.Linear(torch.eye(3), upper=9.0)
        found = sn.repair(boxed, torch.zeros(1, 3, dtype=D)).conflict().samples[0]
        assert [str(row) for row in found.rows] == ["Box y[1] (<= 1)", "parts[1] Linear row 1 (>= 2)"]
        assert [(row.row, row.side, row.bound, row.equality) for row in found.rows] == [
            (1, "upper", 1.0, False),
            (4, "lower", 2.0, False),
        ]
        assert [row.value for row in found.rows] == pytest.approx([1.5, 1.5])

    def test_a_row_of_zeros_conflicts_alone(self) -> None:
        constraints = sn.Linear(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), upper=[-2.0, 1.0])
        conflict = sn.repair(constraints, torch.ones(1, 2, dtype=D)).conflict()
        assert "Linear row 0 (<= -2) cannot hold; certified: no y satisfies it." in str(conflict)

    def test_two_conflicts_at_once(self) -> None:
        """One of them is proved, and the rows of the other are counted."""
        A = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        constraints = sn.Linear(A, lower=[1.0, -9.0, 5.0, -9.0], upper=[9.0, 0.0, 9.0, 0.0])
        found = sn.repair(constraints, torch.zeros(1, 2, dtype=D)).conflict().samples[0]
        assert [row.row for row in found.rows] in ([0, 1], [2, 3])
        assert str(found).endswith("2 more rows are violated.")
        assert {row.row for row in found.pulling} == {0, 1, 2, 3}
        assert found.pulling[0].row in (2, 3)

    def test_depends_on_the_sample(self) -> None:
        """Matrix and bounds are functions of x: some sets are empty, others are not."""
        x = torch.tensor([[0.0], [2.0], [-1.0], [3.0]], dtype=D)
        ones = torch.ones(2, dtype=D)
        rows = sn.Linear(
            lambda x: torch.stack([ones.expand(len(x), 2), ones * (1 + x.square())], 1),
            lower=lambda x: torch.cat([x, -9 + 0 * x], 1),
            upper=lambda x: torch.cat([9 + 0 * x, 1 + x.square()], 1),  # so that y1 + y2 <= 1
        )
        y = torch.zeros(4, 2, dtype=D)
        solution = sn.repair(rows, y, x)
        assert solution.converged.tolist() == [True, False, True, False]
        conflict = solution.conflict()
        assert [found.sample for found in conflict] == [1, 3]
        assert conflict.certified
        assert len(conflict) == 2
        for found in conflict:
            check(found, rows, y, x)
        assert [found.sample for found in solution.conflict([0, 3])] == [3]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_other_precisions(self, dtype: torch.dtype) -> None:
        constraints, rows = contradiction(3, 4, 3, 5, 1.0)
        y = draw(2, 4, seed=1).to(dtype)
        for precision in (torch.float32, D):
            conflict = sn.repair(constraints, y, tol=1e-4, dtype=precision).conflict()
            assert len(conflict) == 2
            assert all([row.row for row in found.rows] == rows for found in conflict)

    @pytest.mark.parametrize("slant", [1e-3, 1e-9, 1e-11])
    def test_nearly_parallel_rows_say_how_far(self, slant: float) -> None:
        """y1 <= 0 and y1 + slant y2 >= 1 hold together at y2 = 1 / slant, and no nearer."""
        A = torch.tensor([[1.0, 0.0], [1.0, slant]], dtype=D)
        far = sn.Linear(A, lower=[-math.inf, 1.0], upper=[0.0, math.inf])
        y = torch.zeros(1, 2, dtype=D)
        if slant == 1e-3:
            assert sn.repair(far, y, max_steps=1, start=None).conflict().samples[0].reached
            assert_equal(sn.repair(far, y).value, torch.tensor([[0.0, 1 / slant]], dtype=D), 1e-6)
            return
        found = sn.repair(far, y).conflict().samples[0]
        assert found.certificate is not None
        assert not found.certificate.exact
        assert 0.99 / slant < found.certificate.radius < 1 / slant
        assert f"no y within {1 / slant:.0g} of its point satisfies both" in str(found)

    @given(seed=st.integers(0, 10_000), size=st.integers(1, 8), rows=st.integers(1, 16), box=st.booleans())
    @settings(max_examples=15, deadline=None)
    def test_a_set_with_a_point_is_never_certified(self, seed: int, size: int, rows: int, box: bool) -> None:
        """However early the repair ended, and however thin the set."""
        A, inside = draw(rows, size, seed=seed), draw(size, seed=seed + 1)
        width = draw(rows, seed=seed + 2).abs() * (draw(rows, seed=seed + 3) > 0)
        constraints: sn.Constraints = sn.Linear(A, lower=A @ inside - width, upper=A @ inside)
        constraints = sn.Box(inside - 0.1, inside) & constraints if box else constraints
        y = draw(3, size, seed=seed + 4, scale=9.0)
        conflict = sn.repair(constraints, y, max_steps=1, start=None).conflict()
        assert not any(found.certified for found in conflict)
        assert all(found.reached and "no conflict" in str(found) for found in conflict)


class TestCurved:
    @pytest.mark.parametrize("form", ["diagonal", "whole", "factored"])
    def test_convex_rows_are_certified(self, form: str) -> None:
        """Two disks and a half-plane, of which only the disks are apart; flat directions are no obstacle."""
        H = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]], dtype=D)
        G = torch.tensor([[0.0, 0.0, 0.0], [-6.0, 0.0, 0.0]], dtype=D)
        forms = {
            "diagonal": {"H": H},
            "whole": {"H": torch.diag_embed(H)},
            "factored": {"factor": torch.eye(3, 2, dtype=D)},  # that of both
        }
        disks = sn.Quadratic(G=G, upper=torch.tensor([1.0, -8.0], dtype=D), **forms[form])
        constraints = disks & sn.Linear(torch.tensor([[0.0, 1.0, 0.0]]), upper=5.0)
        conflict = sn.repair(constraints, draw(3, 3, seed=0)).conflict()
        for found in conflict:
            assert [row.name for row in found.rows] == ["Quadratic row 0", "Quadratic row 1"]
            assert found.certified
            assert [row.weight for row in found.rows] == pytest.approx([0.5, 0.5], abs=1e-6)
        assert len(conflict) == 3

    def test_bad_conditioning(self) -> None:
        """Steps of the repair hardly move where rows stay violated: Newton's do."""
        thin = sn.Quadratic(torch.tensor([[1e-3, 10.0]], dtype=D), upper=1.0)
        constraints = thin & sn.Linear(torch.tensor([[1.0, 1.0]], dtype=D), lower=60.0)
        found = sn.repair(constraints, draw(1, 2, seed=0)).conflict().samples[0]
        assert found.stationary
        assert found.certified
        assert len(found.rows) == 2

    @given(seed=st.integers(0, 10_000), whole=st.booleans(), two_sided=st.booleans())
    @settings(max_examples=15, deadline=None)
    def test_a_set_with_a_point_is_never_certified(self, seed: int, whole: bool, two_sided: bool) -> None:
        """Not even where rows curve the wrong way, and the repair is at a local minimum."""
        n, m = 3, 4
        H, G = draw(m, n, n, seed=seed) if whole else draw(m, n, seed=seed), draw(m, n, seed=seed + 1)
        inside = draw(1, n, seed=seed + 2, scale=3.0)
        value = sn.Quadratic(H, G, upper=0.0).value(inside)[0]
        constraints = (
            sn.Quadratic(H, G, lower=value - 0.1, upper=value) if two_sided else sn.Quadratic(H, G, upper=value)
        )
        for steps in (1, 60):
            conflict = sn.repair(constraints, draw(2, n, seed=seed + 3, scale=5.0), max_steps=steps).conflict()
            assert not any(found.certified for found in conflict)

    def test_functions_are_weighed_but_not_certified(self) -> None:
        """exp(y1) >= 2 and exp(y1) <= 1, multiplied by 10."""
        exponentials = lambda y, x: torch.stack([y[:, 0].exp(), 10 * y[:, 0].exp(), y[:, 1]], 1)  # noqa: E731
        fn = sn.Nonlinear(exponentials, rows=3, lower=[2.0, -math.inf, 0.0], upper=[math.inf, 10.0, 1.0])
        found = sn.repair(fn, torch.zeros(1, 2, dtype=D)).conflict().samples[0]
        assert found.stationary
        assert not found.certified
        assert "not certified" in str(found)
        assert {row.row for row in found.rows} == {0, 1}
        assert [row.weight for row in found.rows] == pytest.approx([0.5, 0.5], abs=1e-6)

    def test_linear_rows_are_certified_beside_functions(self) -> None:
        empty = sn.Linear(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), lower=[1.0, -9.0], upper=[9.0, 0.0])
        constraints = sn.Nonlinear(lambda y, x: y.square(), rows=2, lower=2.0) & empty
        found = sn.repair(constraints, torch.ones(1, 2, dtype=D)).conflict().samples[0]
        assert [row.row for row in found.rows] == [2, 3]
        assert found.certified

    def test_matrix_free(self) -> None:
        lower, upper = [2.0] * 3 + [0.0] * 3, [9.0] * 3 + [1.0] * 3
        fn = sn.Nonlinear(lambda y, x: torch.cat([y.exp(), y.exp()], 1), rows=6, lower=lower, upper=upper)
        solution = sn.repair(fn, torch.zeros(1, 3, dtype=D), solver=sn.ConjugateGradients())
        assert {row.row for row in solution.conflict().samples[0].rows} == set(range(6))


class TestSolution:
    empty = sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 2), lower=3.0)

    def test_nothing_failed(self) -> None:
        for batch in (0, 3):
            conflict = sn.repair(sn.Box(0.0, 1.0), torch.full((batch, 2), 2.0)).conflict()
            assert len(conflict) == 0
            assert not conflict.certified
            assert str(conflict) == f"no conflict: of {batch} samples none failed."

    def test_not_finite(self) -> None:
        """Nothing is said of it, and it disturbs no other."""
        y = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
        first, second = sn.repair(self.empty, y).conflict()
        assert str(first) == "sample 0: inconclusive, as its status is NONFINITE."
        assert second.certified
        assert not first.stationary
        assert not first.certified

    def test_through_layers(self) -> None:
        x, y = torch.zeros(2, 1), torch.zeros(2, 2)
        layer = sn.SnareLayer(self.empty)
        with pytest.warns(sn.RepairWarning, match=r"solution\.conflict\(\)"):
            assert layer.solve(y, x).conflict().certified
        layer.on_failure = "raise"
        with pytest.raises(sn.RepairError) as error:
            layer(y, x)
        assert error.value.solution.conflict().certified
        soft = sn.layers.SoftLayer(self.empty)
        assert soft.solve(y).conflict().certified
        model = sn.ConstrainedModel(sn.MLP(1, 2), sn.SnareLayer(self.empty, on_failure="ignore"))
        assert model.solve(x).conflict().certified

    def test_relaxed_bounds(self) -> None:
        """The bounds that the repair was held to are those that conflict."""
        layer = sn.SnareLayer(self.empty, on_failure="ignore")
        found = layer.train().solve(torch.zeros(1, 2), relax=0.25).conflict().samples[0]
        assert sorted(row.bound for row in found.rows) == [1.25, 1.25, 2.75]
        assert found.certified
        assert layer.solve(torch.zeros(1, 2), relax=0.5).converged.all()

    def test_remains_a_tuple_of_tensors(self) -> None:
        """Copies know their set; what was put together, or saved, says that it does not."""
        solution = sn.repair(self.empty, torch.zeros(2, 2))
        assert len(solution) == 6
        assert all(isinstance(entry, Tensor) for entry in solution)
        assert copy.deepcopy(solution).conflict().certified
        parts = sn.Solution(*(entry[:1] for entry in solution))
        for other in (parts, tree_map(lambda entry: entry.clone(), solution), pickle.loads(pickle.dumps(solution))):
            assert isinstance(other, sn.Solution)
            with pytest.raises(ValueError, match="does not know its constraints"):
                other.conflict()

    def test_compiled(self) -> None:
        """A traced solution does not know its set: it would be part of the graph."""
        layer = sn.SnareLayer(sn.Box(0.0, 1.0), max_steps=2, rescue=False, on_failure="ignore")
        with torch.no_grad():
            solution = torch.compile(layer.solve, backend="eager", fullgraph=True)(torch.full((1, 2), 2.0))
        assert isinstance(solution, sn.Solution)
        with pytest.raises(ValueError, match="does not know its constraints"):
            solution.conflict()

    def test_keeps_no_history(self) -> None:
        """A graph behind x and `relax` is not held."""
        x = torch.zeros(2, 1, requires_grad=True)
        solution = sn.repair(
            sn.Linear(torch.ones(1, 2), equals=lambda x: x), torch.zeros(2, 2), x.sin(), relax=x.exp()[0]
        )
        assert solution.origin is not None
        assert not solution.origin.x.requires_grad
        assert isinstance(solution.origin.relax, Tensor)
        assert not solution.origin.relax.requires_grad

    def test_a_set_that_changed(self) -> None:
        bound = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
        constraints = sn.Linear(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), lower=bound, upper=torch.tensor([9.0, 0.0]))
        solution = sn.repair(constraints, torch.zeros(1, 2))
        assert solution.conflict().certified
        bound.data[0] = 3.0
        with pytest.raises(RuntimeError, match="have changed"):
            solution.conflict()

    @pytest.mark.parametrize("samples", [[2], [-1], [0.5], [[0]]])
    def test_wrong_samples(self, samples: list) -> None:
        with pytest.raises(ValueError, match="`samples` must be whole numbers from 0 to 1"):
            sn.repair(self.empty, torch.zeros(2, 2)).conflict(samples)


def test_nonnegative_least_squares() -> None:
    """The conditions of optimality: no column that is out pulls, none that is in leaves anything to be gained."""
    for seed in range(20):
        columns = draw(6, 15, seed=seed).numpy()
        columns[-1] = -np.abs(columns[-1]) if seed % 2 else columns[-1]
        columns /= np.linalg.norm(columns, axis=0)
        weights = nonnegative_least_squares(columns)
        pull = columns.T @ (np.eye(6)[-1] - columns @ weights)
        assert (weights >= 0).all()
        assert pull.max() <= 1e-13
        assert np.abs(pull[weights > 0]).max(initial=0.0) <= 1e-13
        if weights.any():  # older numpy has no rank of nothing
            assert np.linalg.matrix_rank(columns[:, weights > 0]) == (weights > 0).sum()
