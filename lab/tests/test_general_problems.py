"""AC-OPF, the unicycle, the portfolio and the arm of the general benchmark."""

from __future__ import annotations

import pytest
import torch

import snarenet as sn
from snarenet_lab.bench.general_problems import FORMS, General, Grid, Ipopt, arm, grid_problem, portfolio, unicycle
from snarenet_lab.bench.general_problems.arithmetic import Casadi

# three buses in a triangle, two generators, one line without a rating and one transformer
TRIANGLE = """
mpc.baseMVA = 100.0;
mpc.bus = [
 1 3  0.0  0.0 0.0 0.0 1 1.0 0.0 230.0 1 1.1 0.9;
 2 2 60.0 20.0 0.0 0.0 1 1.0 0.0 230.0 1 1.1 0.9;
 7 1 80.0 30.0 2.0 5.0 1 1.0 0.0 230.0 1 1.1 0.9;
];
mpc.gen = [
 1 50.0 0.0 100.0 -100.0 1.0 100.0 1 200.0 0.0; % on
 2 50.0 0.0 100.0 -100.0 1.0 100.0 1 100.0 0.0;
 2 50.0 0.0 100.0 -100.0 1.0 100.0 0 100.0 0.0; % off
];
mpc.gencost = [
 2 0 0 3 0.01 10.0 0.0;
 2 0 0 3 0.02 30.0 0.0;
 2 0 0 3 0.02  1.0 0.0;
];
mpc.branch = [
 1 2 0.01 0.10 0.02 120.0 0 0 0.0 0.0 1 -30.0 30.0;
 1 7 0.02 0.15 0.03  90.0 0 0 0.98 0.0 1 -30.0 30.0;
 2 7 0.01 0.12 0.02   0.0 0 0 0.0 0.0 1 -30.0 30.0;
];
"""


def triangle() -> General:
    return grid_problem("triangle", Grid(TRIANGLE))


def test_powers_balance() -> None:
    """What is generated is consumed, but for losses: the balances of all buses add up to them, by another formula."""
    grid = Grid(TRIANGLE)
    y, x = triangle().start(4, offset=1.0)
    assert y.shape == (4, 2 * 3 + 2 * 2)
    rows = triangle().constraints.value(y, x)[:, : 2 * 3 + 2 * 2 + 3]
    volts = torch.polar(y[:, 3:6], y[:, :3])
    admittance = torch.zeros(3, 3, dtype=torch.complex128)
    for f, t, ff, ft, tf, tt in zip(grid.f, grid.t, grid.ff, grid.ft, grid.tf, grid.tt, strict=True):
        admittance[f, f] += ff
        admittance[f, t] += ft
        admittance[t, f] += tf
        admittance[t, t] += tt
    shunt = torch.from_numpy(grid.gs + 1j * grid.bs)
    power = volts * (volts @ admittance.T + shunt * volts).conj()
    power = power + torch.complex(x[:, :3], x[:, 3:])
    generated = torch.zeros_like(power)
    generated[:, :2] = torch.complex(y[:, 6:8], y[:, 8:10])
    expected = generated - power
    torch.testing.assert_close(rows[:, :3], expected.real)
    torch.testing.assert_close(rows[:, 3:6], expected.imag)


PROBLEMS = [triangle(), unicycle(20), arm(), *(portfolio(20, form, 3) for form in FORMS)]


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
    problem = triangle().repaired()
    _, x = problem.start(1)
    feasible = sn.repair(problem.constraints, problem.typical.unsqueeze(0), x)
    assert feasible.converged.all()
    cost = problem.objective(feasible.value[0].numpy(), None, Casadi())
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


def test_a_file_without_its_tables_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mpc\.branch"):
        Grid(TRIANGLE.replace("mpc.branch", "mpc.lines"))
