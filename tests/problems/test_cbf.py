"""The unicycle: its data, its barriers against derivatives of h, and its rollout against closed forms."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems.cbf import decode, encode, nominal_control
from snarenet.testing import draw

OBSTACLES = torch.tensor([[-5, 5, 2, 1.41], [-1, 3, 0.25, 1.41], [-9, 2, 1, 1]], dtype=torch.float64)


class Plain:
    """A model without repair: any correction, as a function of the encoded state.

    It notes what it is asked, and claims one step less at every call, nine at the first.
    """

    def __init__(self, correction: Callable[[Tensor], Tensor]) -> None:
        self.correction = correction
        self.sizes: list[int] = []
        self.relaxed: list[float | Tensor | None] = []

    def solve(self, x: Tensor, relax: float | Tensor | None = None) -> sn.Solution:
        self.sizes.append(len(x))
        self.relaxed.append(relax)
        y = self.correction(x)
        zeros = x.new_zeros(len(x))
        return sn.Solution(y, y + 1, zeros.long(), zeros.long() + 10 - len(self.sizes), zeros, zeros)


def control(*rows: list[float]) -> Plain:
    """The model whose total control is constant, one row for every speed of turning: ω tells the samples apart."""
    table = torch.tensor(rows, dtype=torch.float64)
    return Plain(lambda x: table[x[:, 5].long()] - nominal_control(x))


def states(*rows: list[float]) -> Tensor:
    return encode(torch.tensor(rows, dtype=torch.float64))


def near(count: int) -> Tensor:
    """Encoded states on the nominal controller's way into the first obstacle, where its row is violated."""
    problem = sn.problems.load("cbf", horizon=0.4)
    return encode(problem.trajectory(problem.nominal(), problem.inputs[:count])[:, -1])


def slack(problem: sn.problems.CBF, y: Tensor, x: Tensor) -> Tensor:
    lower, upper = problem.constraints.bounds(x)
    assert (lower == -math.inf).all()
    return upper - problem.constraints.value(y, x)


def small_model(problem: sn.problems.CBF, bias: float = 0.0) -> sn.ConstrainedModel:
    net = sn.MLP(6, 2, width=8, depth=1).double()
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=i, scale=0.3))
        net[-1].bias[1] += bias  # of the turn: the barriers hardly limit it
    return sn.ConstrainedModel(net, sn.SnareLayer(problem.constraints, tol=1e-10, start=None))


@pytest.mark.parametrize(
    ("box", "seed", "low", "high"),
    [(1, 8, [-5.5, 7.5], [-5.0, 8.0]), (2, 9, [-8.5, 5.5], [-8.0, 6.0])],
)
def test_data(box: int, seed: int, low: list[float], high: list[float]) -> None:
    problem = sn.problems.load("cbf", box=box)
    lo, hi = np.array([*low, -np.pi / 4, 0, 0]), np.array([*high, -np.pi / 8, 0, 0])
    share = np.random.RandomState(seed).rand(1000, 5)
    s = share * lo + (1 - share) * hi
    expected = np.stack([s[:, 0], s[:, 1], np.cos(s[:, 2]), np.sin(s[:, 2]), s[:, 3], s[:, 4]], 1)
    torch.testing.assert_close(problem.inputs, torch.from_numpy(expected), rtol=0, atol=1e-15)
    assert [len(problem.split(name)) for name in ("train", "valid", "test")] == [833, 83, 84]
    torch.testing.assert_close(encode(decode(problem.inputs)), problem.inputs, rtol=0, atol=1e-15)


def test_arguments() -> None:
    problem = sn.problems.load("cbf", instances=12, horizon=2.2, dt=0.04, seed=3)
    assert (problem.name, problem.size, len(problem.inputs), problem.intervals) == ("cbf", 2, 12, 55)
    assert problem.constraints.rows == 3
    assert not problem.equalities(problem.inputs).any()
    with pytest.raises(ValueError, match="`box` must be 1 or 2, but got 3"):
        sn.problems.load("cbf", box=3)
    for sizes in ({"dt": 0.03}, {"dt": 0.0}, {"horizon": math.nan}, {"horizon": math.inf}):
        with pytest.raises(ValueError, match="`horizon` must be a whole number of `dt`"):
            sn.problems.load("cbf", **sizes)


@pytest.mark.parametrize(("box", "objective"), [(1, 6179), (2, 7278)])
def test_the_nominal_controller_is_the_papers_and_collides(box: int, objective: int) -> None:
    problem = sn.problems.load("cbf", box=box)
    x, model = problem.split("test"), problem.nominal()
    out = problem.run(model, x)
    assert round(out.objective.mean().item()) == objective
    assert not out.converged.any()
    assert not out.distance.any()
    assert problem.collisions(problem.trajectory(model, x)).all()


def test_the_repaired_controller_is_safe() -> None:
    problem = sn.problems.load("cbf", box=2)
    x, model = problem.split("test"), problem.nominal()
    model.layer = sn.SnareLayer(problem.constraints, tol=1e-6, start=None, on_failure="raise")
    with torch.no_grad():
        out = problem.run(model, x)
    assert out.converged.all()
    assert out.violation.max() <= 1e-6
    assert out.errors.max() <= 1e-6
    assert out.steps.min() > 0
    assert out.distance.min() > 1
    assert not problem.collisions(problem.trajectory(model, x)).any()


def test_barriers_are_derivatives_of_h() -> None:
    """bound - A y = dh/dt + 20 h, with h = de/dt + 10 e: e by hand, de/dt by autograd, dh/dt by finite differences."""

    def e(s: Tensor) -> Tensor:
        q = s[:, :2] + 0.1 * torch.stack([s[:, 2].cos(), s[:, 2].sin()], 1)
        return ((q.unsqueeze(1) - OBSTACLES[:, :2]) / OBSTACLES[:, 2:]).square().sum(2) - 1

    def motion(s: Tensor, u: Tensor) -> Tensor:
        return torch.stack([s[:, 3] * s[:, 2].cos(), s[:, 3] * s[:, 2].sin(), s[:, 4], u[:, 0], u[:, 1]], 1)

    def h(s: Tensor) -> Tensor:
        return torch.func.jvp(e, (s,), (motion(s, torch.zeros_like(s[:, :2])),))[1] + 10 * e(s)

    s, y = draw(20, 5, scale=3.0), draw(20, 2, seed=1, scale=5.0)
    x = encode(s)
    p, angle, d = s[:, :2], s[:, 2], s[:, :2].norm(dim=1)
    turn = 10 * (p[:, 0] * angle.sin() - p[:, 1] * angle.cos()) / (d + 1e-5)
    speed = (10 * d * (-p[:, 0] * angle.cos() - p[:, 1] * angle.sin())).clamp(-5, 5)
    u = torch.stack([5 * (speed - s[:, 3]), 5 * (turn - s[:, 4])], 1) + y
    step = 1e-5 * motion(s, u)
    expected = (h(s + step) - h(s - step)) / 2e-5 + 20 * h(s)
    found = slack(sn.problems.load("cbf", instances=1), y, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(nominal_control(x), u - y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("bias", "short_steps"), [(0.0, False), (-150.0, True)])
def test_gradient_of_the_rollout(bias: float, short_steps: bool) -> None:
    """Through integrator, repair, constraints and network, against finite differences in the weights."""
    problem = sn.problems.load("cbf", instances=10, horizon=0.1)
    model, x = small_model(problem, bias), near(2)
    calls: list[int] = []
    model.net.register_forward_hook(lambda net, inputs, output: calls.append(len(output)))
    weights = list(model.net.parameters())
    directions = [draw(*weight.shape, seed=i + 10) for i, weight in enumerate(weights)]

    def value(shift: float) -> Tensor:
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for weight, direction in zip(moved.net.parameters(), directions, strict=True):
                weight.add_(direction, alpha=shift)
        out = problem.run(moved if shift else model, x)
        assert out.converged.all()
        assert out.steps.min() > 0
        return torch.stack([out.objective.sum(), out.cost.sum(), 1e-3 * out.distance.sum()])

    found = value(0.0)
    assert (sum(calls) > 5 * 2) == short_steps
    numeric = (value(1e-6) - value(-1e-6)).detach() / 2e-6
    for i in range(3):
        gradients = torch.autograd.grad(found[i], weights, retain_graph=True)
        slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
        assert abs(slope) > 1e-3
        torch.testing.assert_close(slope, numeric[i], rtol=1e-5, atol=1e-4)


def test_straight_line() -> None:
    """From rest with θ = 0 and acceleration a, Euler's positions are x_k = x_0 + a dt^2 k (k - 1) / 2."""
    problem = sn.problems.load("cbf", instances=1, horizon=0.2)
    x, model = states([2.0, -1.0, 0.0, 0.0, 0.0]), control([50.0, 0.0])
    k = torch.arange(11, dtype=torch.float64)
    px, v = 2 + 50 * 0.02**2 * k * (k - 1) / 2, 50 * 0.02 * k
    path = problem.trajectory(model, x)[0]
    torch.testing.assert_close(path, torch.stack([px, 0 * k - 1, 0 * k, v, 0 * k], 1), rtol=1e-12, atol=1e-12)
    out = problem.run(model, x)
    stage = 0.02 * (100 * (px**2 + 1) + 0.1 * v**2 + 0.1 * 50**2)[:-1]
    torch.testing.assert_close(out.objective[0], stage.sum())
    torch.testing.assert_close(out.cost[0], stage.sum() + 1000 * (px[-1] ** 2 + 1))
    assert out.converged.all()


def test_large_controls_take_short_steps() -> None:
    """1000 takes ten steps per dt, 5 (told apart by ω = 1) takes one, and neither waits for the other."""
    problem = sn.problems.load("cbf", instances=1, horizon=0.04)
    x = states([0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0])
    model = control([1000.0, 0.0], [5.0, 0.0])
    fast, slow = problem.trajectory(model, x)
    assert model.sizes == [2, *[1] * 9] * 2
    k = torch.tensor([0.0, 10.0, 20.0], dtype=torch.float64)
    torch.testing.assert_close(fast[:, 3], 1000 * 0.002 * k)
    torch.testing.assert_close(fast[:, 0], 1000 * 0.002**2 * k * (k - 1) / 2)
    torch.testing.assert_close(slow[:, 3], torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64))
    torch.testing.assert_close(slow[:, 2], torch.tensor([0.0, 0.02, 0.04], dtype=torch.float64))
    j = torch.arange(20, dtype=torch.float64)  # the integral weighs every short step by its own length
    position, speed = 1000 * 0.002**2 * j * (j - 1) / 2, 1000 * 0.002 * j
    stage = 100 * position.square() + 0.1 * (speed.square() + 1000**2)
    torch.testing.assert_close(problem.run(model, x).objective[0], 0.002 * stage.sum())


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e200], ids=str)
def test_an_impossible_control_ends_its_trajectory_only(wrong: float) -> None:
    problem = sn.problems.load("cbf", instances=1, horizon=0.06)
    x = states([3.0, 1.0, 0.0, 0.5, 0.0], [3.0, 2.0, 0.0, 0.5, 0.0])
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def correction(x: Tensor) -> Tensor:
        late = (x[:, :1] > 3.005) & (x[:, 1:2] < 1.5)  # the first sample, after one step
        return torch.where(late, x.new_tensor(wrong), weight).expand(-1, 2)

    model = Plain(correction)
    out = problem.run(model, x)
    assert model.sizes == [2, 2, 1]
    assert out.converged.tolist() == [False, True]
    assert out.objective.isfinite().tolist() == [False, True]
    assert out.violation[0] == math.inf
    alone = problem.run(Plain(correction), x[1:])
    for ours, theirs in zip(out, alone, strict=True):
        assert torch.equal(ours[1:], theirs)
    (slope,) = torch.autograd.grad(out.cost.sum(), weight)
    assert slope.isfinite()
    path = problem.trajectory(model, x)[0]
    assert torch.equal(path[1:], path[1].expand(3, 5))


def test_errors_are_integrals_and_the_violation_is_the_peak() -> None:
    problem = sn.problems.load("cbf", instances=4, horizon=0.04)
    x = near(4)
    model = Plain(lambda x: x.new_tensor([[50.0, 0.0], [0.0, 0.0]][len(model.sizes) - 1]).expand(len(x), 2))
    out = problem.run(model, x)
    speed = x[:, 4:5]
    after = x.clone()  # one step of Euler's method by hand
    after[:, :2] += 0.02 * speed * x[:, 2:4]
    angle = torch.atan2(x[:, 3], x[:, 2]) + 0.02 * x[:, 5]
    after[:, 2], after[:, 3] = angle.cos(), angle.sin()
    after[:, 4:] += 0.02 * (nominal_control(x) + torch.tensor([50.0, 0.0]))
    first = slack(problem, x.new_tensor([50.0, 0.0]).expand(4, 2), x).neg().relu()
    second = slack(problem, x.new_zeros(4, 2), after).neg().relu()
    assert (first.amax(1) > second.amax(1)).all()
    assert (second.amax(1) > 1).all()
    torch.testing.assert_close(out.errors, 0.02 * (first + second))
    torch.testing.assert_close(out.penalty, 0.02 * (first.square() + second.square()).sum(1))
    torch.testing.assert_close(out.violation, first.amax(1))
    torch.testing.assert_close(out.distance, x.new_full((4,), 0.04 * 2))
    assert out.steps.tolist() == [9] * 4


def test_the_loss_of_a_bad_trajectory_stops_growing() -> None:
    """100 * 52^2 * dt = 5,408 per step: frozen after four; the objective and the terminal cost go on."""
    problem = sn.problems.load("cbf", instances=1, horizon=0.2)
    out = problem.run(control([0.0, 0.0]), states([0.0, 52.0, 0.0, 0.0, 0.0]))
    assert out.objective.item() == pytest.approx(54_080)
    assert out.cost.item() == pytest.approx(4 * 5408 + 1000 * 52**2)
    assert out.penalty.item() == 0


def test_collisions() -> None:
    problem = sn.problems.load("cbf", instances=1)
    away = [0.0, 0.0, 0.0, 0.0, 0.0]
    cases = {
        (-1.0, 3.0, 0.0): True,  # in the middle of an ellipse
        (-1.0, 4.42, 0.0): False,  # just above it
        (-1.0, 4.42, -math.pi / 2): True,  # facing it: the point ahead is inside
        (-1.0, 4.40, math.pi / 2): True,  # leaving it: the centre is inside
        (-8.0, 2.0, 0.0): False,  # on the edge, looking away
        (-2.9, 5.0, 0.0): False,
        (-3.1, 5.0, 0.0): True,
    }
    paths = torch.tensor([[away, [*pose, 0.0, 0.0], away] for pose in cases], dtype=torch.float64)
    assert problem.collisions(paths).tolist() == list(cases.values())


def test_sample() -> None:
    problem = sn.problems.load("cbf", box=2, instances=1)
    x = problem.sample(2000, torch.Generator().manual_seed(0))
    assert torch.equal(x, problem.sample(2000, torch.Generator().manual_seed(0)))
    s = decode(x)
    low = torch.tensor([-8.5, 5.5, -math.pi / 4, 0, 0], dtype=torch.float64)
    high = torch.tensor([-8.0, 6.0, -math.pi / 8, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(s.amin(0), low, rtol=0, atol=2e-3)
    torch.testing.assert_close(s.amax(0), high, rtol=0, atol=2e-3)
    torch.testing.assert_close(s.mean(0), (low + high) / 2, rtol=0, atol=2e-2)


def test_samples_that_take_short_steps_keep_their_own_relaxation() -> None:
    problem = sn.problems.load("cbf", instances=1, horizon=0.02)
    relax = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    for given, expected in ((relax, [relax, relax[:1], relax[:1]]), (relax[0], [relax[0]] * 3)):
        model = control([250.0, 0.0], [5.0, 0.0])
        problem.run(model, states([0.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]), given)
        assert model.sizes == [2, 1, 1]
        for found, want in zip(model.relaxed, expected, strict=True):
            assert torch.equal(found, want)


def test_copy_and_empty_batch() -> None:
    problem = sn.problems.load("cbf", instances=10, horizon=0.04)
    twin = copy.deepcopy(problem)
    twin.constraints.obstacles.add_(1.0)
    x, y = near(4), draw(4, 2)
    assert not torch.allclose(twin.constraints.value(y, x), problem.constraints.value(y, x))
    twin.load_state_dict(problem.state_dict())
    assert torch.equal(twin.constraints.value(y, x), problem.constraints.value(y, x))
    empty = problem.run(small_model(problem), problem.inputs[:0])
    assert [tuple(field.shape) for field in empty] == [(0,), (0,), (0,), (0,), (0, 3), (0,), (0,), (0,)]


@pytest.mark.filterwarnings("ignore::snarenet.solution.PrecisionWarning")
def test_float32_states() -> None:
    problem = sn.problems.load("cbf", instances=10, horizon=0.04)
    model, x = small_model(problem), near(4)
    model.net.float()
    double, single = problem.run(model, x), problem.run(model, x.float())
    assert single.objective.dtype == torch.float32
    assert single.converged.all()
    torch.testing.assert_close(single.objective.double(), double.objective, rtol=1e-4, atol=0)
