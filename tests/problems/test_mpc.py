"""The unicycle's plan: its equations against a simulation, its starts and its arcs."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems import MPC
from snarenet.problems.arithmetic import Casadi
from snarenet.problems.mpc import Shooting, arc, clearance

F64 = torch.float64


def mpc(horizon: int = 20, instances: int = 30) -> MPC:
    problem = sn.problems.load("mpc", horizon=horizon, instances=instances)
    assert isinstance(problem, MPC)
    return problem


def driven(x: Tensor, controls: Tensor) -> Tensor:
    """(B, 5 T) the plan of controls (B, T, 2), by a loop over time."""
    state, states = x.clone(), []
    for k in range(controls.shape[1]):
        speed, turn = controls[:, k].unbind(1)
        angle = state[:, 2]
        state = state + 0.2 * torch.stack([speed * angle.cos(), speed * angle.sin(), turn], 1)
        states.append(state)
    return torch.cat([torch.stack(states, 1).flatten(1), controls.flatten(1)], 1)


def test_rows_are_the_dynamics_and_the_ellipse() -> None:
    problem = mpc(7)
    x = problem.inputs[:5]
    controls = torch.rand(5, 7, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = driven(x, controls)
    rows = problem.constraints.value(y, x)
    assert rows.shape == (5, 7 * 4 + 35)
    assert rows[:, :21].abs().max() < 1e-12
    p = y[:, :21].view(5, 7, 3)
    torch.testing.assert_close(rows[:, 21:28], (p[..., 0] / 1.4).square() + (p[..., 1] / 1.05).square())
    torch.testing.assert_close(rows[:, 21:28] - 1, clearance(p))
    assert problem.equalities(x).tolist() == [True] * 21 + [False] * (7 + 35)
    y[:, 4] += 0.1  # py of the second step: its own row, and the one of the next
    moved = problem.constraints.value(y, x) - rows
    assert (moved[:, :21].abs() > 1e-12).nonzero()[:, 1].unique().tolist() == [8, 9]


def test_limits() -> None:
    problem = mpc(2)
    instance = problem.constraints.at(torch.zeros(1, 10, dtype=F64), problem.inputs[:1])
    inf = math.inf
    expected = [0.0] * 6 + [1.0] * 2 + [-inf] * 6 + [0.0, -1.5] * 2
    assert instance.lower[0].tolist() == expected
    assert instance.upper[0].tolist() == [0.0] * 6 + [inf] * 2 + [inf] * 6 + [2.0, 1.5] * 2


def test_the_objective_by_hand() -> None:
    problem = mpc(2)
    y = torch.tensor([[3.0, 1.0, 0.5, 3.5, -1.0, 2 * math.pi - 0.2, 1.0, 0.5, 2.0, -1.0]], dtype=F64)
    states = 0.25 + 1.0 + 0.25 + 0.0 + 1.0 + 0.04  # the last angle is -0.2
    assert problem.objective(y, y[:, :3]).item() == pytest.approx(states + 10 + 0.04 + 0.1 * (1 + 0.25 + 4 + 1))


def test_casadi_has_the_same_numbers() -> None:
    ca = pytest.importorskip("casadi")
    problem = mpc(5)
    y = torch.randn(3, 25, generator=torch.Generator().manual_seed(0), dtype=F64) * 3
    points = ca.SX.sym("y", 25), ca.SX.sym("x", 3)
    function = ca.Function("both", points, problem.expressions(*points, Casadi()))
    for k in range(3):
        f, g = function(y[k].numpy(), problem.inputs[k].numpy())
        assert float(f) == pytest.approx(problem.objective(y, problem.inputs[:3])[k].item(), rel=1e-13)
        expected = problem.constraints.value(y, problem.inputs[:3])[k, :20]
        torch.testing.assert_close(torch.from_numpy(g.full().ravel()), expected)


def test_starts() -> None:
    x = mpc(instances=20_000).inputs
    low, high = x.amin(0), x.amax(0)
    torch.testing.assert_close(low, torch.tensor([-4.0, -2.4, -0.45], dtype=F64), rtol=0, atol=1e-3)
    torch.testing.assert_close(high, torch.tensor([-2.2, 2.4, 0.45], dtype=F64), rtol=0, atol=1e-3)
    assert clearance(x).min() > 0.2


@pytest.mark.parametrize("horizon", [5, 20, 50])
def test_the_typical_point_is_near_the_set(horizon: int) -> None:
    problem = mpc(horizon)
    x = torch.tensor([[-3.0, 0.0, 0.0]], dtype=F64)
    solution = sn.repair(problem.constraints, problem.typical[None], x, rescue=True)
    assert solution.converged.all()


def test_arcs_pass_on_their_sides() -> None:
    above, below, straight = (arc(20, side)[:60].view(20, 3)[:, 1] for side in (1.0, -1.0, 0.0))
    assert above.max() > 1.5
    torch.testing.assert_close(below, -above)
    assert straight.abs().max() == 0


def test_it_pickles() -> None:
    problem = mpc(4)
    other = pickle.loads(pickle.dumps(problem))
    y = problem.typical[None]
    assert torch.equal(other.constraints.value(y, problem.inputs[:1]), problem.constraints.value(y, problem.inputs[:1]))


def test_a_closed_loop_of_one_plan_is_the_plan() -> None:
    """Who plans optimally, and goes on with the rest of the first plan, drives it: cost and states are its own."""
    problem = mpc(6)
    x = problem.inputs[:3]
    y = driven(x, 0.5 * torch.rand(3, 6, 2, generator=torch.Generator().manual_seed(0), dtype=F64))
    controls, asked = y[:, 18:].view(3, 6, 2), []

    def plan(state: Tensor) -> Tensor:
        asked.append(state)
        return torch.cat([torch.zeros(3, 18, dtype=F64), controls.roll(1 - len(asked), 1).flatten(1)], 1)

    drive = problem.drive(plan, x)
    torch.testing.assert_close(drive.states, problem.paths(y, x))
    torch.testing.assert_close(drive.controls, controls)
    torch.testing.assert_close(drive.cost, problem.objective(y, x))
    torch.testing.assert_close(drive.margin, clearance(problem.paths(y, x)).amin(1))
    assert len(asked) == 6
    torch.testing.assert_close(asked[3], drive.states[:, 3])
    assert problem.drive(lambda x: y, x, steps=9).states.shape == (3, 10, 3)


def test_a_repaired_controller_stays_out() -> None:
    """Its plans obey the dynamics, so what it drives is what it planned, and off the ellipse."""
    problem = mpc(12)
    layer = sn.SnareLayer(problem.constraints)
    start = torch.tensor([[-3.0, 0.2, 0.0], [-2.5, -0.4, 0.1]], dtype=F64)
    drive = problem.drive(lambda x: layer(problem.typical.expand(len(x), -1), x), start, steps=15)
    assert drive.margin.min() >= -1e-8
    assert drive.controls[..., 0].min() >= -1e-8
    assert drive.controls.abs().amax((0, 1)).tolist() <= [2 + 1e-8, 1.5 + 1e-8]
    assert drive.states[0, -1, 0] > drive.states[0, 0, 0]


def test_regions() -> None:
    x = sn.problems.load("mpc", region="wide", instances=5000).inputs
    assert x[:, 0].max() > 3.9
    assert 0 < clearance(x).min() < 0.05
    with pytest.raises(ValueError, match="`region` must be one of paper, wide, but got 'all'"):
        sn.problems.load("mpc", region="all")


def test_the_obstacle_is_the_ellipse() -> None:
    centre, axes = mpc(2).obstacles[0].split(2)
    points = torch.stack([centre + torch.stack([axes[0], axes.new_tensor(0.0)]), centre - axes * torch.tensor([0, 1])])
    torch.testing.assert_close(clearance(points), torch.zeros(2, dtype=F64), rtol=0, atol=1e-12)


def test_a_shooting_network_obeys_the_dynamics() -> None:
    problem = mpc(6)
    torch.manual_seed(0)
    net = Shooting(torch.nn.Linear(3, 12)).double()
    x = problem.inputs[:4]
    y = net(x)
    rows = problem.constraints.value(y, x)
    assert rows[:, :18].abs().max() < 1e-12
    controls = y[:, 18:].unflatten(1, (6, 2))
    assert (controls > torch.tensor([0.0, -1.5])).all()
    assert (controls < torch.tensor([2.0, 1.5])).all()
    torch.testing.assert_close(y, driven(x, controls))
    model = sn.ConstrainedModel(net, sn.SnareLayer(problem.constraints))
    assert problem.constraints.violation(model(x), x).max() <= 1e-8


def test_a_plan_a_side() -> None:
    """An untrained network of several plans passes the ellipse on the sides of the first guesses."""
    problem = mpc(20)
    model = sn.TrainConfig.recipe("best", problem, width=8).build(problem)
    x = problem.inputs[:6].float()
    above, below = model.net(x).unflatten(1, (2, -1)).unbind(1)
    assert isinstance(model.layer, sn.BestOfLayer)
    beside = 3 * 10 + 1  # py halfway
    assert (above[:, beside] > below[:, beside] + 0.5).all()
    rows = problem.constraints.value(torch.cat([above, below]).double(), problem.inputs[:6].repeat(2, 1))
    assert rows[:, :60].abs().max() < 1e-5  # both are driven
    found = model.solve(problem.inputs[:6])
    assert found.converged.all()
    assert found.value.shape == (6, 100)


def test_training_builds_a_shooting_network() -> None:
    problem = mpc(6)
    net = sn.TrainConfig(width=8).build(problem).net
    assert isinstance(net, Shooting)
    net(problem.inputs[:4].float()).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    seen: list[Tensor] = []
    net.net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net(torch.stack([problem.low, problem.high]).float())
    torch.testing.assert_close(seen[0], torch.stack([-torch.ones(3), torch.ones(3)]))
    partial = sn.TrainConfig.recipe("best", "mpc", method="dc3", width=8).build(problem).net
    assert isinstance(partial, sn.MLP)
