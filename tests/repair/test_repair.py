"""The loop: stopping, structure, failures and what happens around them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import snarenet as sn
from snarenet.linalg import (
    Dual,
    EliminatedBox,
    EliminatedMatrices,
    Primal,
    cholesky,
    dense,
    systems,
)
from snarenet.memo import Memo
from snarenet.repair import options
from snarenet.repair.choose import choose
from snarenet.repair.loop import ConstraintSpace, Loop, OutputSpace
from snarenet.repair.options import Options
from snarenet.repair.repair import repair_with
from snarenet.repair.start import nearest
from snarenet.testing import assert_equal, draw, gradients

repair = partial(sn.repair, start=None)  # the steps by themselves; where else they begin is tested in start/


def space_of(constraints: sn.Constraints, y: Tensor, x=None, rows="auto", krylov=None):
    engine = choose(Options(rows=rows, solver=krylov or "auto"), Memo(), constraints.at(y, x), y).engine
    assert isinstance(engine, Loop)
    return engine.space


def two_disks() -> sn.Nonlinear:
    """Example 1 of the paper."""
    return sn.Nonlinear(
        lambda y, x: torch.stack([(y[:, 0] + 1) ** 2 + y[:, 1] ** 2, (y[:, 0] - 1) ** 2 + y[:, 1] ** 2], 1),
        rows=2,
        upper=2.25,
    )


class TestExample1:
    def test_from_the_papers_prediction(self) -> None:
        """(-1, 0) breaks one disk, and the projection of g onto its bounds has no preimage."""
        solution = repair(two_disks(), torch.tensor([[-1.0, 0.0]], dtype=torch.float64))
        assert solution.converged.all()
        torch.testing.assert_close(solution.value, torch.tensor([[-0.5, 0.0]], dtype=torch.float64), rtol=0, atol=1e-8)

    def test_from_everywhere(self) -> None:
        grid = torch.cartesian_prod(*[torch.linspace(-5, 5, 41, dtype=torch.float64)] * 2)
        solution = repair(two_disks(), grid, tol=1e-10)
        assert solution.converged.all()
        assert two_disks().violation(solution.value).max() <= 1e-10


class TestStructure:
    """Linear algebra is chosen by structure."""

    A, C = draw(3, 8, seed=1), draw(2, 8, seed=2)
    y, x = draw(4, 8, seed=3), draw(4, 2, seed=4)

    def test_constant_rows_iterate_in_constraint_space(self) -> None:
        constraints = sn.Linear(self.A, upper=1.0) & sn.Linear(self.C, equals=lambda x: x)
        assert isinstance(space_of(constraints, self.y, self.x), ConstraintSpace)
        assert isinstance(space_of(constraints, self.y, self.x, rows="active"), OutputSpace)
        assert constraints.constant_rows.all()

    def test_rank_deficient_constant_rows_do_not(self) -> None:
        twice = sn.Linear(torch.cat([self.A, self.A]), upper=1.0)
        assert isinstance(space_of(twice, self.y), OutputSpace)
        assert isinstance(space_of(twice, self.y, rows="all"), ConstraintSpace)

    def test_learned_rows_do_not(self) -> None:
        constraints = sn.Linear(torch.nn.Parameter(self.A), upper=1.0)
        assert isinstance(space_of(constraints, self.y), OutputSpace)
        assert not constraints.constant_rows.any()

    def test_constant_equalities_are_eliminated(self) -> None:
        quadratic = sn.Quadratic(self.A * 0.1, self.A, upper=1.0)
        constraints = quadratic & sn.Linear(self.C, equals=lambda x: x)
        assert constraints.constant_rows.tolist() == [False] * 3 + [True] * 2
        space = space_of(constraints, self.y, self.x)
        assert isinstance(space, OutputSpace)
        system = space.system(self.y, torch.ones(4, 5, dtype=torch.bool), 1.0)
        assert isinstance(system, Dual)
        assert isinstance(system.eliminated, EliminatedMatrices)
        inequalities = quadratic & sn.Linear(self.C, upper=1.0)
        assert space_of(inequalities, self.y).eliminated is None
        assert space_of(inequalities, self.y, rows="all").eliminated is not None

    def test_a_box_is_eliminated(self) -> None:
        space = space_of(sn.Linear(self.A, upper=1.0) & sn.Box(-1.0, 1.0), self.y)
        system = space.system(self.y, torch.ones(4, 11, dtype=torch.bool), 1.0)
        assert isinstance(system.eliminated, EliminatedBox)
        assert system.factor.shape == (4, 3, 3)

    def test_more_rows_than_variables_solve_for_the_variables(self) -> None:
        space = space_of(sn.Nonlinear(lambda y, x: (y @ self.A) ** 2, rows=8, upper=1.0), self.y[:, :3])
        system = space.system(self.y[:, :3], torch.ones(4, 8, dtype=torch.bool), 1.0)
        assert isinstance(system, Primal)
        assert system.factor.shape == (4, 3, 3)

    def test_matrix_free_forms_no_factor(self) -> None:
        constraints = sn.Linear(self.A, upper=1.0)
        space = space_of(constraints, self.y, krylov=sn.ConjugateGradients())
        assert space.system(self.y, torch.ones(4, 3, dtype=torch.bool), 1.0).factor is None

    def test_the_spectrum_is_computed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        svd = torch.linalg.svd
        monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: calls.append(1) or svd(*a, **k))
        constraints = sn.Linear(self.A.float(), upper=1.0)  # even where A must be cast
        for _ in range(3):
            repair(constraints, self.y)
        assert len(calls) == 1
        constraints.A.copy_(constraints.A.clone())  # written to, but not changed
        repair(constraints, self.y)
        assert len(calls) == 1
        constraints.A.mul_(2)  # changed: computed again
        assert repair(constraints, self.y).converged.all()
        assert constraints.violation(repair(constraints, self.y).value).max() <= 1e-8
        assert len(calls) == 2


class TestScaling:
    """Multiplying a constraint by a number must not change what the defaults return."""

    @pytest.mark.parametrize("factor", [1e3, 1e-3])
    @pytest.mark.parametrize("row", [0, 1, 4])
    def test_linear(self, factor: float, row: int) -> None:
        A, b, y = draw(5, 8, seed=1), draw(5, seed=2), draw(50, 8, seed=3, scale=2)
        scale = torch.ones(5, dtype=torch.float64)
        scale[row] = factor
        self.expect_same(sn.Linear(A, upper=b), sn.Linear(A * scale.unsqueeze(1), upper=b * scale), y)

    @pytest.mark.parametrize("factor", [1e3, 1e-3])
    @pytest.mark.parametrize("row", [0, 1, 2])
    def test_nonlinear(self, factor: float, row: int) -> None:
        H, G, y = draw(3, 8, seed=1, scale=0.1), draw(3, 8, seed=2), draw(50, 8, seed=3, scale=2)
        scale = torch.ones(3, dtype=torch.float64)
        scale[row] = factor
        column = scale.unsqueeze(1)
        self.expect_same(sn.Quadratic(H, G, upper=0.3), sn.Quadratic(H * column, G * column, upper=0.3 * scale), y)
        shared = draw(2, 8, seed=4)
        self.expect_same(
            sn.Quadratic(H, G, upper=0.3) & sn.Linear(shared, equals=0.1),
            sn.Quadratic(H * column, G * column, upper=0.3 * scale) & sn.Linear(shared, equals=0.1),
            y,
        )

    @staticmethod
    def expect_same(plain: sn.Constraints, scaled: sn.Constraints, y: Tensor) -> None:
        tol = 1e-8
        for start in ("auto", None):
            a, b = (sn.SnareLayer(set, tol=tol, start=start).solve(y) for set in (plain, scaled))
            assert a.converged.all()
            assert b.converged.all()
            assert start == "auto" or a.steps.max() > 5
            torch.testing.assert_close(a.value, b.value, rtol=0, atol=tol if start is None else 1e-6)


class TestFailures:
    """Bad samples are reported, and the healthy ones beside them are untouched."""

    A, b = draw(3, 5, seed=1), torch.full((3,), 0.2, dtype=torch.float64)
    y, y6 = draw(6, 5, seed=2, scale=2), draw(4, 6, seed=2)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("kind", ["constant", "nonlinear"])
    def test_a_prediction_that_is_not_a_number(self, bad: float, kind: str) -> None:
        constraints = (
            sn.Linear(self.A, upper=self.b)
            if kind == "constant"
            else sn.Nonlinear(lambda y, x: (y @ self.A.T).sinh(), rows=3, upper=self.b)
        )
        y = self.y.clone()
        y[2, 3] = bad
        y.requires_grad_()
        solution = repair(constraints, y, rescue=True)
        assert solution.status.tolist() == [0, 0, sn.Status.NONFINITE, 0, 0, 0]
        assert solution.violation[2] == math.inf
        assert torch.equal(solution.value[2].isfinite(), y[2].isfinite())
        healthy = [0, 1, 3, 4, 5]
        torch.testing.assert_close(solution.value[healthy], repair(constraints, self.y).value[healthy])
        solution.value[healthy].sum().backward()
        assert y.grad is not None
        assert y.grad.isfinite().all()

    def test_a_constraint_that_is_not_a_number(self) -> None:
        """log(y) of a negative prediction: nothing to be done, and nothing else disturbed."""
        weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
        constraints = sn.Nonlinear(lambda y, x: (weight * y).log(), rows=2, lower=0.0)
        y = torch.tensor([[0.5, 0.2], [-1.0, 0.5], [2.0, 3.0]], dtype=torch.float64, requires_grad=True)
        solution = repair(constraints, y, rescue=True)
        assert solution.status.tolist() == [0, sn.Status.NONFINITE, 0]
        assert torch.equal(solution.value[1], y[1])
        assert solution.violation[1] == math.inf
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.isfinite().all()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()

    def test_a_step_that_leaves_the_domain_is_not_taken(self) -> None:
        """Newton's step for sqrt(y) <= 0.1 from 1 lands at a negative y; the search shortens it."""
        constraints = sn.Nonlinear(lambda y, x: y.sqrt(), rows=1, upper=0.1)
        y = torch.tensor([[1.0], [0.005]], dtype=torch.float64, requires_grad=True)
        newton = repair(constraints, y, damping=0.0)
        assert newton.status.tolist() == [sn.Status.NONFINITE, 0]
        assert newton.value[0].item() == 1.0
        rescued = repair(constraints, y, damping=0.0, rescue=True, tol=1e-6)
        assert rescued.converged.all()
        (gradient,) = torch.autograd.grad(rescued.value.sum(), y)
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("damping", [sn.Annealed(), sn.Constant(0.1), sn.Adaptive()], ids=str)
    def test_an_empty_set_gives_the_least_violation(self, damping) -> None:
        """y <= -1 and y >= 1, each with weight 1: the least squares of the violation is at 0."""
        A = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
        upper = torch.tensor([[-1.0, torch.inf], [2.0, torch.inf]], dtype=torch.float64)
        lower = torch.tensor([[-torch.inf, 1.0], [-torch.inf, 1.0]], dtype=torch.float64)
        constraints = sn.Linear(A, lower=lower, upper=upper)
        y = torch.tensor([[3.0, 5.0], [3.0, 5.0]], dtype=torch.float64, requires_grad=True)
        solution = repair(constraints, y, damping=damping, rescue=True, max_steps=400)
        assert solution.status.tolist() == [sn.Status.STALLED, 0]
        torch.testing.assert_close(solution.value[0], torch.tensor([0.0, 5.0], dtype=torch.float64), rtol=0, atol=1e-6)
        assert solution.violation[0].item() == pytest.approx(1, abs=1e-6)
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.isfinite().all()

    @pytest.mark.parametrize("given", [False, True])
    def test_a_function_never_sees_an_empty_batch(self, given: bool) -> None:
        """Which cannot be reshaped to (B, -1, 2); nobody comes, nobody takes a step, or some do."""

        def pairs(y: Tensor, x: None) -> Tensor:
            return y.reshape(len(y), -1, 2).square().sum(2)

        def jacobian(y: Tensor, x: None) -> Tensor:
            own = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]], dtype=y.dtype)
            return 2 * y.reshape(len(y), 1, -1) * own

        disks = sn.Nonlinear(pairs, 2, upper=1.0, jacobian=jacobian if given else None)
        for sizes in ([], [0.1, 0.2], [0.1, 2.0, 3.0]):
            y = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1).repeat(1, 4).requires_grad_()
            solution = sn.repair(disks, y, start=None)
            solution.value.sum().backward()
            assert solution.converged.all()
            assert y.grad is not None
            assert y.grad.shape == y.shape

    def test_an_empty_nonlinear_set(self) -> None:
        """|y|^2 <= -1 has its least violation at the origin, where its gradient vanishes."""
        constraints = sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), upper=-1.0)
        solution = repair(constraints, draw(3, 2), rescue=True)
        assert (solution.status != sn.Status.CONVERGED).all()
        assert solution.value.isfinite().all()
        assert solution.violation.max() < 1.01

    def test_a_prediction_without_a_gradient_stalls(self) -> None:
        """The centre of a disk that must be left: no direction is better than another."""
        constraints = sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), lower=1.0)
        y = torch.tensor([[0.0, 0.0], [0.1, 0.0]], dtype=torch.float64)
        assert repair(constraints, y).status.tolist() == [sn.Status.STALLED, sn.Status.CONVERGED]
        rescued = repair(constraints, y, rescue=True)  # which tries one at random
        assert rescued.converged.all()
        assert torch.equal(rescued.value, repair(constraints, y, rescue=True).value)

    def test_a_projection_that_fails_is_no_worse_than_the_prediction(self) -> None:
        """Rows so short that a nearest point, of an empty set, is far away."""
        row = torch.tensor([[6e-13, 2e-12, -8e-13]], dtype=torch.float64)
        low, high = (torch.tensor(b, dtype=torch.float64) for b in ([-0.01, -0.09, 0.3], [0.2, 0.1, 0.5]))
        constraints = sn.Linear(row, lower=3.0, upper=5.0) & sn.Box(low, high)
        y = torch.tensor([[0.2, -1.0, -1.0]], dtype=torch.float64)
        solution = sn.repair(constraints, y, start=sn.Nearest(10))
        assert (solution.violation <= constraints.violation(y)).all()
        assert_equal(constraints.violation(solution.value), solution.violation, 1e-12)

    def test_a_sample_that_took_no_step_has_a_gradient(self) -> None:
        """Its rows overflow, so that it is given up at once; beside one that is repaired."""
        constraints = sn.Nonlinear(lambda y, x: y.exp(), rows=1, lower=1.0)
        y = torch.tensor([[2e5], [-1.0]], dtype=torch.float64, requires_grad=True)
        solution = repair(constraints, y)
        assert solution.status.tolist() == [sn.Status.NONFINITE, sn.Status.CONVERGED]
        (gradient,) = torch.autograd.grad(solution.value.sum(), y)
        assert gradient[0] == 1
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("damping", [sn.Annealed(), sn.Adaptive()], ids=["annealed", "adaptive"])
    def test_a_limit_that_nobody_can_keep(self, damping: sn.Damping) -> None:
        """Portfolios whose risk must be below the least one: more steps would not help, and the status says so."""
        factors = draw(6, 6, seed=3)
        risk = factors @ factors.T / 6 + 0.1 * torch.eye(6, dtype=torch.float64)
        least = 1 / torch.linalg.inv(risk).sum()
        simplex = sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 6), equals=1.0)
        for share in (0.5, 0.9):
            solution = repair(simplex & sn.Quadratic(risk.unsqueeze(0), upper=share * least), self.y6, damping=damping)
            assert (solution.status == sn.Status.STALLED).all()
            assert (solution.steps < 100).all()
            assert (solution.violation < 0.5 * least + 0.01).all()
        generous = simplex & sn.Quadratic(risk.unsqueeze(0), upper=3 * risk.diagonal().min())
        assert repair(generous, self.y6, damping=damping).converged.all()

    @pytest.mark.parametrize(
        "damping", [sn.Constant(0.0), sn.Constant(0.01), sn.Annealed(), sn.Annealed(0.01)], ids=str
    )
    def test_a_repair_that_fails_ends_at_the_best_point_seen(self, damping: sn.Damping) -> None:
        """Newton's steps for atan(y) = 0 run away from beyond 1.39, or cycle."""
        constraints = sn.Nonlinear(lambda y, x: y.atan(), rows=1, equals=0.0)
        y = torch.linspace(-20, 20, 9, dtype=torch.float64).unsqueeze(1).requires_grad_()
        before, seen = constraints.violation(y), []
        for steps in (*range(1, 41), 100):
            solution = repair(constraints, y, damping=damping, max_steps=steps)
            seen.append(solution.violation)
            assert (solution.violation <= before).all()
        assert (torch.stack(seen).diff(dim=0) <= 1e-12).all()
        lost = solution.status == sn.Status.NONFINITE
        assert bool(lost.any()) == (damping == sn.Constant(0.0))
        (gradient,) = torch.autograd.grad(solution.value.sum(), y)
        assert gradient.isfinite().all()
        assert (gradient[solution.value.squeeze(1) == y.squeeze(1)] == 1).all()

    def test_the_gradient_is_that_of_the_best_point(self) -> None:
        """Steps after it are not on the tape: the same as a repair that had no more."""
        constraints = sn.Nonlinear(lambda y, x: y**3 - 2 * y + 2 + 0.1 * y.flip(1), rows=2, equals=0.0)  # Newton cycles
        y, damping = draw(5, 2, seed=4, scale=0.1).requires_grad_(), sn.Constant(0.01)
        runs = [repair(constraints, y, damping=damping, max_steps=k).violation for k in range(31)]
        best = torch.stack(runs).argmin(0)
        assert ((best > 0) & (best < 30)).all()
        whole = repair(constraints, y, damping=damping, max_steps=30)
        (gradient,) = torch.autograd.grad(whole.value.square().sum(), y)
        for i, k in enumerate(best.tolist()):
            short = repair(constraints, y, damping=damping, max_steps=k)
            assert_equal(short.value[i], whole.value[i], 1e-12)
            (own,) = torch.autograd.grad(short.value[i].square().sum(), y)
            assert_equal(own[i], gradient[i], 1e-9)

    def test_huge_is_not_stationary(self) -> None:
        """A step that is small beside the violation only because rows grew on the way."""
        constraints = sn.Nonlinear(lambda y, x: y**9, rows=1, equals=1.0)
        solution = repair(constraints, torch.tensor([[1e-3], [0.5]], dtype=torch.float64), damping=1e-30)
        assert (solution.status != sn.Status.STALLED).all()

    @pytest.mark.parametrize("rows", ["auto", "all", "active"])
    def test_duplicate_and_dependent_rows(self, rows: str) -> None:
        A = torch.cat([self.A, self.A, self.A.sum(0, keepdim=True)])
        constraints = sn.Linear(A, upper=torch.cat([self.b, self.b, self.b.sum(0, keepdim=True)]))
        solution = repair(constraints, self.y, rows=rows, max_steps=300)
        assert solution.converged.all()
        y = self.y.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda y: repair(constraints, y, rows=rows, max_steps=5).value, y, atol=1e-5)

    @pytest.mark.parametrize("rows", ["all", "active"])
    def test_no_damping_on_dependent_rows(self, rows: str) -> None:
        """A singular system gets the smallest shift that makes it regular."""
        quadratic = sn.Quadratic(torch.zeros(2, 5), self.A[[0, 0]], equals=0.3)
        solution = repair(quadratic, self.y, damping=0.0, rows=rows, max_steps=20)
        assert solution.converged.all()

    def test_a_singular_matrix_is_shifted_alone(self) -> None:
        regular = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
        factor = cholesky(torch.stack([torch.ones_like(regular), regular]))
        torch.testing.assert_close(factor[0] @ factor[0].T, torch.ones_like(regular))
        assert (factor[0].diagonal() > 0).all()
        assert torch.equal(factor[1], torch.linalg.cholesky(regular))

    def test_a_row_of_zeros(self) -> None:
        A = torch.cat([self.A, torch.zeros(1, 5, dtype=torch.float64)])
        assert repair(sn.Linear(A, upper=0.5), self.y).converged.all()
        impossible = sn.SnareLayer(sn.Linear(A, upper=torch.tensor([0.5, 0.5, 0.5, -1.0])), on_failure="ignore")
        solution = impossible.solve(self.y)
        assert (solution.status == sn.Status.STALLED).all()
        assert solution.value.isfinite().all()

    def test_no_rows_at_all(self) -> None:
        for constraints in (
            sn.Linear(torch.zeros(0, 5), upper=1.0),
            sn.Nonlinear(lambda y, x: y[:, :0], rows=0, upper=1.0),
        ):
            y = self.y.clone().requires_grad_()
            solution = sn.SnareLayer(constraints).solve(y)
            assert solution.converged.all()
            assert torch.equal(solution.value, y)
            solution.value.sum().backward()
            assert torch.equal(y.grad, torch.ones_like(y))

    def test_equal_bounds_are_equalities(self) -> None:
        kept = repair(sn.Linear(self.A, lower=self.b, upper=self.b), self.y).value
        assert_equal(kept, repair(sn.Linear(self.A, equals=self.b), self.y).value, 1e-14)
        quadratic = [sn.Quadratic(self.A * 0.1, self.A, lower=self.b, upper=self.b), sn.Linear(self.A, equals=self.b)]
        assert repair(quadratic[0], self.y).converged.all()

    def test_zero_steps(self) -> None:
        solution = repair(sn.Linear(self.A, upper=self.b), self.y, max_steps=0)
        assert torch.equal(solution.value, self.y)
        assert (solution.status[solution.violation > 1e-8] == sn.Status.MAX_STEPS).all()

    def test_the_tolerance_decides(self) -> None:
        for tol in (1e-2, 1e-6, 1e-12):
            solution = repair(sn.Linear(self.A, upper=self.b), self.y, tol=tol)
            assert solution.converged.all()
            assert solution.violation.max() <= tol


class TestRescue:
    constraints = sn.Quadratic(draw(3, 6, seed=1, scale=0.3), draw(3, 6, seed=2), upper=0.2)
    slow = sn.Annealed(100.0, 1.0)  # too slow for the few steps it gets

    def test_it_repairs_what_the_first_attempt_did_not(self) -> None:
        y = draw(8, 6, seed=3, scale=2)
        options = {"damping": self.slow, "max_steps": 20}
        first, second = (repair(self.constraints, y, rescue=rescue, **options) for rescue in (False, True))
        failed = ~first.converged
        assert failed.any()
        assert not failed.all()
        assert second.converged.all()
        assert torch.equal(first.value[~failed], second.value[~failed])
        assert (second.steps[failed] > 20).all()

    def test_gradients_are_exact(self) -> None:
        y = draw(8, 6, seed=3, scale=2).requires_grad_()
        H, G = (tensor.clone().requires_grad_() for tensor in (self.constraints.H, self.constraints.G))

        def run(y: Tensor, H: Tensor, G: Tensor) -> Tensor:
            constraints = sn.Quadratic(H, G, upper=0.2)
            return repair(constraints, y, damping=self.slow, max_steps=20, rescue=True).value

        assert torch.autograd.gradcheck(run, (y, H, G), atol=1e-5)

    def test_with_data_per_sample(self) -> None:
        A, b = draw(8, 3, 6, seed=4), draw(8, 3, seed=5)
        solution = repair(sn.Linear(A, upper=b), draw(8, 6, seed=3), damping=self.slow, max_steps=15, rescue=True)
        assert solution.converged.all()

    def test_a_diverging_first_attempt_leaves_no_trace_in_gradients(self) -> None:
        """The paper's step runs away from here; the rescued samples' gradients must not see it."""
        problem = sn.problems.load("ncqcqp-hard")
        quadratic, linear = problem.constraints.parts
        H = quadratic.H.clone().requires_grad_()
        constraints = sn.Quadratic(H, quadratic.G, upper=quadratic.limit.upper) & linear
        x = problem.split("test")[:8]
        y = x @ torch.linalg.pinv(linear.A).T + draw(8, 100, seed=1, scale=2)
        options = {"damping": sn.Constant(0.01), "rows": "all", "max_steps": 60}
        first = repair(constraints, y, x, **options)
        assert (first.status == sn.Status.NONFINITE).all()
        rescued = repair(constraints, y, x, rescue=True, **options)
        assert rescued.converged.all()
        (gradient,) = torch.autograd.grad(rescued.value.sum(), H)
        assert gradient.isfinite().all()

    def test_it_never_leaves_the_box(self) -> None:
        """A logarithm, defined inside the box alone: the step goes beyond it, and ends at a bound that depends on x."""
        constraints = sn.Nonlinear(lambda y, x: y.log(), 1, lower=-12.0, upper=lambda x: x)
        constraints = constraints & sn.Box(lambda x: x.exp() / 4, 5.0)
        y = torch.tensor([[3.0], [4.0]], dtype=torch.float64, requires_grad=True)
        x = torch.tensor([[-4.0], [-3.0]], dtype=torch.float64, requires_grad=True)
        options = {"damping": sn.Constant(0.0), "max_steps": 30}
        assert (repair(constraints, y, x, **options).status == sn.Status.NONFINITE).all()
        solution = repair(constraints, y, x, rescue=True, **options)
        assert solution.converged.all()
        assert_equal(solution.value, x.exp() / 4, 1e-12)
        slopes = torch.autograd.grad(solution.value.sum(), (y, x))
        assert_equal(slopes[0], torch.zeros_like(y), 1e-12)
        assert_equal(slopes[1], x.exp() / 4, 1e-12)

    def test_a_saddle_is_left_by_a_random_move(self) -> None:
        """The centre of a ring: gradients in its radius go through the move and the attempt after it."""
        y = torch.zeros(3, 4, dtype=torch.float64)
        radius = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64).unsqueeze(1).requires_grad_()
        H = draw(1, 4, seed=1).abs().requires_grad_()

        def run(radius: Tensor, H: Tensor) -> Tensor:
            solution = repair(sn.Quadratic(H, lower=radius, upper=2 * radius), y, rescue=True)
            assert solution.converged.all()
            return solution.value

        assert torch.autograd.gradcheck(run, (radius, H), atol=1e-5)
        alone = repair(sn.Quadratic(H, lower=radius[1:2], upper=2 * radius[1:2]), y[1:2], rescue=True).value
        assert_equal(run(radius, H)[1:2], alone, 1e-12)

    def test_linear_rows_that_contradict_each_other_are_tried_once(self) -> None:
        A = draw(1, 4, seed=1)
        constraints = sn.Linear(A, lower=1.0) & sn.Linear(A.clone(), upper=-1.0) & sn.Box(-3.0, 3.0)
        solution = repair(constraints, draw(3, 4), rescue=True)
        assert (solution.status == sn.Status.STALLED).all()
        assert_equal(solution.violation, torch.ones(3, dtype=torch.float64), 1e-6)
        assert (solution.steps <= 200).all()


class TestStraight:
    """Convex sequences: hundreds of rows that are nearly dependent; what mends one breaks its neighbours."""

    SIZE = 200
    SECOND = torch.eye(SIZE, dtype=torch.float64).diff(n=2, dim=0)

    def draw(self, seed: int) -> Tensor:
        return 0.3 * draw(8, self.SIZE, seed=seed).cumsum(1) + draw(8, self.SIZE, seed=seed + 100)

    def nearest(self, y: Tensor) -> Tensor:
        """The projection: y + A'w, where w >= 0 makes it shortest."""
        optimize = pytest.importorskip("scipy.optimize")
        A = self.SECOND.numpy()
        return torch.stack([sample + torch.from_numpy(A.T @ optimize.nnls(A.T, -sample.numpy())[0]) for sample in y])

    def test_linear_rows_never_fail(self) -> None:
        y = self.draw(0).requires_grad_()
        convex = sn.Linear(self.SECOND, lower=0.0)
        failed = ~repair(convex, y, start=None).converged
        assert failed.any()
        found = repair(convex, y, rescue=True)
        assert found.converged.all()
        assert_equal(found.value[failed], self.nearest(y.detach()[failed]), 1e-7)

        v, h = draw(*y.shape, seed=5), 1e-6
        (slope,) = torch.autograd.grad((found.value[failed] * v[failed]).sum(), y)
        d = draw(*y.shape, seed=6)
        there, back = (self.nearest((y.detach() + sign * h * d)[failed]) for sign in (1, -1))
        assert_equal((slope * d).sum(), ((there - back) * v[failed]).sum() / (2 * h), 1e-4)

    def test_functions_that_nobody_knows_to_be_linear(self) -> None:
        y = self.draw(5)[:1]
        convex = sn.Nonlinear(lambda y, x: y.diff(n=2, dim=1), self.SIZE - 2, lower=0.0)
        assert not repair(convex, y).converged.any()
        found = repair(convex, y, rescue=True)
        assert found.converged.all()
        assert_equal(found.value, self.nearest(y), 1e-7)

    def test_weights(self) -> None:
        y, weights = self.draw(0), 0.5 + draw(self.SIZE, seed=7).abs()
        failed = ~repair(sn.Linear(self.SECOND, lower=0.0), y, weights=weights).converged
        found = repair(sn.Linear(self.SECOND, lower=0.0), y, weights=weights, rescue=True).value[failed]
        assert failed.any()
        scaled = sn.Linear(self.SECOND / weights.sqrt(), lower=0.0)  # the same in units in which all weights are one
        assert_equal(found, repair(scaled, y * weights.sqrt(), rescue=True).value[failed] / weights.sqrt(), 1e-7)

    def test_a_few_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        y, convex = self.draw(0), sn.Linear(self.SECOND[:, :60][:58], lower=0.0)
        y = torch.cat([y[:, :60], -y[:, 60:120]])
        instance = convex.at(y)
        monkeypatch.setattr(nearest, "sparse_systems", lambda *_, **__: None)
        whole = nearest.seek(instance, y, None, 1e-8)
        monkeypatch.setattr(nearest, "_ROOM", 3 * 60 * 60)
        assert_equal(nearest.seek(instance, y, None, 1e-8), whole, 1e-9)
        assert convex.violation(whole).max() <= 1e-8


class TestFewActiveRows:
    """A system of the active rows alone has the solution of the masked system of all rows."""

    @staticmethod
    def linear() -> sn.Constraints:
        return sn.Linear(draw(12, 20, seed=1), upper=3.0)

    @pytest.mark.parametrize("extra", ["nothing", "equalities", "box", "curved"])
    @pytest.mark.parametrize("damping", [sn.Annealed(), sn.Adaptive()], ids=["annealed", "adaptive"])
    def test_equal_to_all(self, monkeypatch: pytest.MonkeyPatch, extra: str, damping: sn.Annealed) -> None:
        constraints = self.linear()
        if extra == "equalities":
            constraints = constraints & sn.Linear(draw(3, 20, seed=2), equals=0.2)
        if extra == "box":
            constraints = constraints & sn.Box(-1.0, 1.0)
        if extra == "curved":
            constraints = constraints & sn.Quadratic(draw(2, 20, seed=3).abs(), draw(2, 20, seed=4), upper=20.0)
        found, counts = [], []
        original = cholesky

        def noted(matrix: Tensor, *rest) -> Tensor:
            counts.append(matrix.shape[-1])
            return original(matrix, *rest)

        monkeypatch.setattr(systems, "cholesky", noted)
        for few in (0.75, 0.0):
            monkeypatch.setattr(dense, "_FEW", few)
            for store in (True, False):
                y = draw(9, 20, seed=5).requires_grad_()
                solution = repair(constraints, y, rows="active", damping=damping, store_factors=store)
                found.append((solution.value.detach(), torch.autograd.grad(solution.value.square().sum(), y)[0]))
            if few:
                assert min(counts) <= 8
        for value, gradient in found[1:]:
            assert_equal(value, found[0][0], 1e-9)
            assert_equal(gradient, found[0][1], 1e-8)


class TestAdjoint:
    def test_tensors_that_several_parts_share(self) -> None:
        """x, and a weight that closures capture, get one gradient, whichever parts use them."""
        y, x = draw(3, 4, seed=1), draw(3, 2, seed=2).requires_grad_()
        weight = draw(2, seed=3).abs().requires_grad_()

        def repaired(x: Tensor, weight: Tensor) -> Tensor:
            first = sn.Nonlinear(lambda y, x: (y[:, :2] ** 2 * weight).sum(1, True) + x[:, :1], rows=1, upper=0.5)
            second = sn.Nonlinear(lambda y, x: (y[:, 2:] ** 2 * weight).sum(1, True) + x.sum(1, True), 1, upper=0.5)
            return repair(first & second, y, x, tol=1e-12, max_steps=4).value

        assert torch.autograd.gradcheck(repaired, (x, weight))

    def test_no_unrolled_graph(self) -> None:
        """One node for the whole loop, and per step no more than B (2 n + 3 m) numbers beside the factors."""
        batch, n, m = 7, 6, 3
        y = draw(batch, n, scale=2).requires_grad_()
        solution = repair(TestRescue.constraints, y, store_factors=False)
        node = solution.value.grad_fn
        while node is not None and "Repair" not in node.name():
            node = node.next_functions[0][0] or node.next_functions[1][0]
        steps = node.tape.steps
        assert len(steps) == int(solution.steps.max()) > 5
        for step in steps:
            assert step.saved.factor is None
            kept = [t for t in (*step[1:5], *step.saved) if isinstance(t, Tensor)]
            assert sum(t.numel() for t in kept) <= batch * (2 * n + 3 * m)

    def test_factors_are_kept_within_the_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        y = draw(7, 6, scale=2).requires_grad_()
        monkeypatch.setattr(options, "_STORE_BYTES", 3 * 7 * 9 * 8)
        monkeypatch.setattr(dense, "_FEW", 0.0)  # so that all factors have one size
        value = repair(TestRescue.constraints, y).value
        node = value.grad_fn
        while "Repair" not in node.name():
            node = node.next_functions[0][0] or node.next_functions[1][0]
        assert [step.saved.factor is not None for step in node.tape.steps[:5]] == [True] * 3 + [False] * 2

    def test_a_tensor_that_was_overwritten_is_noticed(self) -> None:
        A = torch.nn.Parameter(draw(2, 5))
        value = repair(sn.Linear(A, upper=0.0), draw(3, 5, seed=1)).value
        with torch.no_grad():
            A.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()

    def test_a_second_derivative_is_refused(self) -> None:
        y = draw(3, 6, seed=1).requires_grad_()
        value = repair(TestRescue.constraints, y).value
        (gradient,) = torch.autograd.grad(value.square().sum(), y, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    def test_no_gradient_no_tape(self) -> None:
        with torch.no_grad():
            value = repair(TestRescue.constraints, draw(3, 6, seed=1).requires_grad_()).value
        assert not value.requires_grad
        assert not repair(TestRescue.constraints, draw(3, 6, seed=1)).value.requires_grad

    def test_relaxation_receives_a_gradient(self) -> None:
        y, relax = draw(4, 6, seed=1), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(
            lambda relax: repair(TestRescue.constraints, y, relax=relax, max_steps=8).value, relax, atol=1e-5
        )

    def test_an_equality_that_holds_already_still_passes_its_gradient(self) -> None:
        """r = 0 is a kink of relu, but not of an equality: the repair moves with its right-hand side."""
        C, A = draw(1, 4, seed=1), draw(1, 4, seed=2)
        y, x = draw(1, 4, seed=3), torch.zeros(1, 1, dtype=torch.float64)
        y = y - (y @ C.T) / C.square().sum() * C  # C y = 0 = x, up to rounding
        constraints = sn.Quadratic(A.square(), A, upper=-0.05) & sn.Linear(C, equals=lambda x: x)
        constraints.parts[1].A.copy_(C)
        x.copy_(y @ C.T)
        assert (constraints.residual(y, x)[:, 1] == 0).all()
        assert torch.autograd.gradcheck(
            lambda x: repair(constraints, y, x, max_steps=6).value, x.requires_grad_(), atol=1e-5
        )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 12),
    quadratic=st.integers(0, 4),
    equalities=st.integers(0, 3),
    box=st.booleans(),
    scale=st.floats(0.1, 10),
)
def test_the_defaults_repair_whatever_is_feasible(
    seed: int, n: int, quadratic: int, equalities: int, box: bool, scale: float
) -> None:
    """Random sets around a feasible point, convex quadratics, equalities and boxes together, from near and far."""
    centre = draw(3, n, seed=seed)
    equalities = min(equalities, n)
    sets: list[sn.Constraints] = []
    if quadratic:
        H, G = draw(quadratic, n, seed=seed + 1).abs(), draw(quadratic, n, seed=seed + 2)
        slack = draw(3, quadratic, seed=seed + 3).abs() + 0.05
        sets.append(sn.Quadratic(H, G, upper=centre.square() @ H.T + centre @ G.T + slack))
    if equalities:
        C = draw(equalities, n, seed=seed + 4)
        sets.append(sn.Linear(C, equals=centre @ C.T))
    if box:
        sets.append(sn.Box(centre - 0.5, centre + 0.5))
    if not sets:
        return
    constraints = sets[0] if len(sets) == 1 else sn.Stack(*sets)
    y = centre + scale * draw(3, n, seed=seed + 5)
    layer = sn.SnareLayer(constraints, tol=1e-9, on_failure="raise")
    assert constraints.violation(layer(y)).max() <= 1e-9


def test_gradients_of_the_two_disks_point_along_the_boundary() -> None:
    """Moving the prediction towards the lens does not move the repaired point off its arc."""
    y = torch.tensor([[3.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value = repair(two_disks(), y).value
    along, across = (gradients(value[:, [i]], [y])[0] for i in (1, 0))
    assert across.abs().max() < 1e-6
    assert along.abs().max() > 0.01


def test_inference_mode_with_a_sparse_jacobian() -> None:
    """Derivatives need graphs, which that mode does not make."""
    constraints = sn.Nonlinear(lambda y, x: y[:, 1:] * y[:, :-1].sin(), 79, upper=0.1)
    y = draw(3, 80, seed=1)
    expected = repair(constraints, y)
    with torch.inference_mode():
        found = repair(constraints, y.clone())
    assert found.converged.all()
    assert torch.equal(found.value, expected.value)


def test_only_samples_that_a_first_attempt_left_outside_are_attempted_again() -> None:
    sphere, asked = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), 1, equals=1.0), Options(start=None)
    y = torch.cat([0.3 * draw(2, 3, seed=1), 3 * draw(2, 3, seed=2)]).requires_grad_()
    whole = repair_with(asked, sphere, y)
    short = repair_with(replace(asked, max_steps=int(whole.steps.min())), sphere, y)
    assert 0 < int(short.converged.sum()) < 4
    again = repair_with(asked, sphere, y, first=short)
    assert again.converged.all()
    assert torch.equal(again.value, whole.value)
    assert torch.equal(again.steps, whole.steps + torch.where(short.converged, 0, short.steps))
    slopes = [torch.autograd.grad(solution.value.sin().sum(), y)[0] for solution in (again, whole)]
    assert_equal(*slopes, 1e-12)
