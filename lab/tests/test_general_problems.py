"""AC-OPF, the unicycle, the portfolio and the arm of the general benchmark."""

from __future__ import annotations

import pytest
import torch
from casadi import DM

import snarenet as sn
from snarenet.problems.arithmetic import Casadi
from snarenet_lab.bench.general_problems import FORMS, General, Ipopt, acopf, arm, portfolio, unicycle

PROBLEMS = [acopf("14_ieee"), unicycle(20), arm(), *(portfolio(20, form, 3) for form in FORMS)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_the_repair_and_ipopt_agree_on_the_set(problem: General) -> None:
    y, x = problem.start(3, offset=0.2)
    solution = sn.repair(problem.constraints, y, x, rescue=True)
    assert solution.converged.all(), solution.describe()
    solver = Ipopt(problem)
    found = [solver(one) for one in x]
    assert all(one.success for one in found)
    assert problem.constraints.violation(torch.stack([one.y for one in found]), x).max() < 1e-6


def test_ipopt_finds_a_cheaper_point_than_the_repair() -> None:
    problem = acopf("14_ieee").repaired()
    _, x = problem.start(1)
    feasible = sn.repair(problem.constraints, problem.typical.unsqueeze(0), x)
    assert feasible.converged.all()
    cost = problem.objective(DM(feasible.value[0].numpy()), None, Casadi())
    assert Ipopt(problem)(x[0]).objective < float(sum(cost.full().flatten())) - 1.0


def test_the_forms_of_a_portfolio_are_one_set() -> None:
    problems = {form: portfolio(20, form) for form in FORMS}
    y, x = problems["matrix"].start(5, offset=3.0)
    matrix, *others = (problems[form].constraints.violation(y, x) for form in ("matrix", "factored", "function"))
    for violation in others:
        torch.testing.assert_close(violation, matrix)
    for problem in problems.values():
        y, x = problem.start(5, offset=3.0)
        solution = sn.repair(problem.constraints, y, x)
        assert solution.converged.all(), solution.describe()
        assert problems["matrix"].constraints.violation(solution.value[:, :20], x).max() < 1e-7
    with pytest.raises(ValueError, match="one of factored, matrix, function, lifted"):
        portfolio(20, "round")


def test_the_hand_of_the_arm() -> None:
    """Stretched, it is above the base; bent by a right angle at one joint, what is beyond lies along an axis."""
    problem = arm()
    angles = torch.zeros(2, 7, dtype=torch.float64)
    angles[1, 1] = torch.pi / 2
    base = torch.zeros(2, 3, dtype=torch.float64)
    x = torch.cat([base, torch.eye(3, dtype=torch.float64).flatten().expand(2, -1)], 1)
    rows = problem.constraints.value(angles, x)
    torch.testing.assert_close(rows[0, :6], torch.tensor([0.0, 0.0, 1.266, 0.0, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(rows[1, :3], torch.tensor([0.926, 0.0, 0.34], dtype=torch.float64))
    assert rows[1, 3:6].norm() > 0.5
