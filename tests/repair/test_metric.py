"""`weights`: the repair's own steps in a metric, on every kind of set, and what must not change with it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.linalg import Spectrum
from snarenet.repair.choose import choose
from snarenet.repair.engine import Batch
from snarenet.repair.loop import Loop
from snarenet.repair.metric import Metric
from snarenet.repair.options import Options
from snarenet.repair.rescue import Attempt, attempts
from snarenet.testing import assert_equal, draw

SIZE = 6
W = torch.tensor([1.0, 4.0, 0.5, 9.0, 0.7, 2.0], dtype=torch.float64)
A, C, Y, X = draw(3, SIZE, seed=1), draw(2, SIZE, seed=2), draw(5, SIZE, seed=3), draw(5, 2, seed=4, scale=0.3)


def function(y: Tensor, x: Tensor) -> Tensor:
    return y.sin() @ A.T.to(y) + x[:, :1]


def sparse() -> Tensor:
    return torch.where(A.abs() > 0.5, A, 0.0).to_sparse()


SETS = {
    "constant": lambda: sn.Linear(A, -0.5, 0.5) & sn.Linear(C, equals=lambda x: x),
    "a matrix a sample": lambda: sn.Linear(lambda x: A * (1 + x[:, :1, None].abs()), upper=0.2),
    "sparse": lambda: sn.Linear(sparse(), -0.5, 0.5) & sn.Box(-1.0, 1.0),
    "box": lambda: sn.Box(-1.0, 1.0) & sn.Linear(C, equals=lambda x: 0.1 * x),
    "diagonal": lambda: sn.Quadratic(A.abs(), A, upper=0.5) & sn.Linear(C, equals=lambda x: 0.1 * x),
    "whole": lambda: sn.Quadratic(0.1 * draw(2, SIZE, SIZE, seed=7), C, upper=0.3) & sn.Box(-2.0, 2.0),
    "factored": lambda: sn.Quadratic(factor=0.3 * C.T, diagonal=A[:1] ** 2, upper=0.5) & sn.Box(-1.0, 1.0),
    "l1 ball": lambda: sn.L1Ball(0.1, lambda x: 0.5 + x[:, :1].abs()) & sn.Linear(C, equals=0.1),
    "variation": lambda: sn.L1Ball(0.1, lambda x: 0.5 + x[:, :1].abs(), A) & sn.Box(-1.0, 1.0),
    "function": lambda: sn.Nonlinear(function, rows=3, lower=-0.5, upper=0.5) & sn.Box(-2.0, 2.0),
    "many rows": lambda: sn.Nonlinear(lambda y, x: torch.cat([y**2, y**3], 1) + x[:, :1], 12, upper=2.0),
}
on_every_set = pytest.mark.parametrize("kind", SETS)


@on_every_set
def test_equal_weights_change_nothing(kind: str) -> None:
    for damping in (sn.Annealed(), sn.Constant(0.05), sn.Adaptive()):
        plain, equal = (sn.repair(SETS[kind](), Y, X, damping=damping, weights=w) for w in (None, 3.7 * torch.ones(6)))
        assert_equal(equal.value, plain.value, 1e-12)
        assert torch.equal(equal.status, plain.status)
        assert torch.equal(equal.steps, plain.steps)


@on_every_set
def test_their_scale_does_not_matter(kind: str) -> None:
    one, other = (sn.repair(SETS[kind](), Y, X, weights=factor * W).value for factor in (1.0, 1e9))
    assert_equal(other, one, 1e-10)


@on_every_set
def test_samples_reach_the_set_and_stay_there(kind: str) -> None:
    constraints = SETS[kind]()
    solution = sn.repair(constraints, Y, X, weights=W, tol=1e-10, rescue=True)
    assert solution.converged.all()
    assert constraints.violation(solution.value, X).max() <= 1e-10
    again = sn.repair(constraints, solution.value, X, weights=W, tol=2e-10)
    assert torch.equal(again.value, solution.value)  # to the last bit
    assert (again.steps == 0).all()


@on_every_set
def test_gradients_are_exact(kind: str) -> None:
    """Central differences of the converged value, in y and x."""
    constraints, direction = SETS[kind](), (draw(5, SIZE, seed=8), draw(5, 2, seed=9))

    def run(y: Tensor, x: Tensor) -> Tensor:
        return (sn.repair(constraints, y, x, weights=W, tol=1e-12).value * draw(5, SIZE, seed=10)).sum()

    y, x = Y.clone().requires_grad_(), X.clone().requires_grad_()
    found = torch.autograd.grad(run(y, x), (y, x), allow_unused=True)
    for k, step in enumerate((1e-6 * direction[0], 1e-6 * direction[1])):
        ends = [run(*(t + s * step if i == k else t for i, t in enumerate((Y, X)))) for s in (1.0, -1.0)]
        slope = torch.zeros(()) if found[k] is None else (found[k] * direction[k]).sum()
        assert_equal(slope.double(), (ends[0] - ends[1]) / 2e-6, 1e-4)


def test_gradients_of_what_is_learned() -> None:
    """Matrices and bounds, also where the rescue took over, by gradcheck."""
    leaves = [0.3 * A.abs(), A, 0.1 * draw(2, SIZE, SIZE, seed=7), C, 0.3 * C[:1, :, None], torch.tensor(0.4).double()]

    def run(y: Tensor, H: Tensor, G: Tensor, whole: Tensor, C: Tensor, F: Tensor, bound: Tensor) -> Tensor:
        sets = sn.Quadratic(H, G, upper=bound) & sn.Quadratic(whole, upper=1.0) & sn.Linear(C, upper=bound)
        sets = sets & sn.Quadratic(factor=F, upper=2 * bound) & sn.Box(-1 - bound, 1 + bound)
        found = sn.repair(sets, y, start=None, weights=W, damping=sn.Annealed(30.0, 0.9), max_steps=7, rescue=True)
        assert (found.steps > 7).any()
        assert (found.steps < 7).any()
        assert found.converged.all()
        return found.value

    inputs = [tensor.clone().requires_grad_() for tensor in (Y, *leaves)]
    assert torch.autograd.gradcheck(run, inputs, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_newtons_step_is_the_projection() -> None:
    """Onto equalities: y - W^-1 C'(C W^-1 C')^-1 (C y - b), the nearest point in the metric."""
    b = draw(2, seed=5)
    expected = Y - (Y @ C.T - b) @ torch.linalg.inv(C / W @ C.T) @ (C / W)
    for constraints in (sn.Linear(C, equals=b), sn.Nonlinear(lambda y, x: y @ C.T.to(y), 2, equals=b)):
        assert_equal(sn.repair(constraints, Y, damping=0.0, weights=W).value, expected, 1e-9)


def test_an_l1_ball_gives_its_nearest_point() -> None:
    """In the metric: what is not at the center has one multiplier, and the rest less."""
    weights, ball = torch.tensor([1.0, 100.0, 0.04, 9.0, 0.5, 2.0], dtype=torch.float64), sn.L1Ball(0.1, 0.7)
    value = sn.repair(ball, 2 * Y, weights=weights, tol=1e-12).value
    force, away = (weights * (value - 2 * Y)).abs(), (value - 0.1).abs() > 1e-9
    level = torch.where(away, force, 0.0).amax(1, keepdim=True)
    assert_equal(torch.where(away, force - level, 0.0), torch.zeros_like(force), 1e-7)
    assert (force <= level * (1 + 1e-9)).all()
    assert (away.sum(1) >= 1).all()
    assert (away.sum(1) < SIZE).all()
    assert ball.violation(value).max() <= 1e-12


def test_a_box_holds_whatever_its_weights() -> None:
    """Weights of sixteen orders of magnitude: bounds and the tolerance are in the user's units."""
    weights = torch.logspace(-8, 8, SIZE, dtype=torch.float64)
    constraints = sn.Box(-0.3, 0.4) & sn.Linear(torch.ones(1, SIZE), equals=0.5)
    solution = sn.repair(constraints, Y, weights=weights, rescue=True)
    assert solution.converged.all()
    assert (solution.value >= -0.3 - 1e-8).all()
    assert (solution.value <= 0.4 + 1e-8).all()


def test_statuses() -> None:
    y = Y.clone()
    y[1, 2] = torch.nan
    empty = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64).unsqueeze(1)
    row = A[:1].clone()
    constraints = (
        sn.Linear(row, lower=empty) & sn.Linear(row.clone(), upper=lambda x: 1 - 2 * empty) & sn.Box(-9.0, 9.0)
    )
    solution = sn.repair(constraints, y, X, weights=W, rescue=True)
    ok, stalled, broken = sn.Status.CONVERGED, sn.Status.STALLED, sn.Status.NONFINITE
    assert solution.status.tolist() == [ok, broken, stalled, ok, ok]
    assert_equal(solution.violation[2], torch.tensor(1.0).double(), 1e-6)  # the least that there is
    few = sn.repair(SETS["diagonal"](), Y, X, start=None, weights=W, max_steps=1)
    assert (few.status == sn.Status.MAX_STEPS).all()


@pytest.mark.parametrize("scaled", [True, False])
def test_the_rescue_has_the_same_metric(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first attempt takes no step: what is dear hardly moves."""
    module, weights = sys.modules["snarenet.repair.repair"], torch.tensor([1.0] * 5 + [1e8], dtype=torch.float64)
    first = module.choose  # whose attempt fails
    monkeypatch.setattr(module, "choose", lambda options, *rest: first(replace(options, max_steps=0), *rest))
    monkeypatch.setattr(module, "attempts", lambda *_: (Attempt(scaled=scaled),))
    constraints = sn.Nonlinear(function, 3, lower=-0.5, upper=0.5) & sn.Box(-4.0, 4.0)
    plain, weighed = (sn.repair(constraints, Y, X, start=None, weights=w, rescue=True) for w in (None, weights))
    for solution in (plain, weighed):
        assert solution.converged.all()
        assert (solution.steps > 0).any()
    assert (plain.value - Y)[:, 5].abs().max() > 1e-2
    assert (weighed.value - Y)[:, 5].abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["constant", "diagonal", "whole", "function", "sparse"])
def test_without_matrices(kind: str) -> None:
    options: dict[str, Any] = {
        "damping": sn.Annealed(floor=1e-3, relative=False), "rows": "active", "tol": 0, "max_steps": 5, "weights": W,
        "start": None,
    }  # fmt: skip
    free, direct = (
        sn.repair(SETS[kind](), Y, X, solver=solver, **options).value
        for solver in (sn.ConjugateGradients(tol=1e-14), "auto")
    )
    assert_equal(free, direct, 1e-8)


def test_constant_rows_are_decomposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    init = Spectrum.__init__

    def counted(self: Spectrum, *arguments: Any) -> None:
        built.append(arguments)
        init(self, *arguments)

    monkeypatch.setattr(Spectrum, "__init__", counted)
    layer, weights = sn.SnareLayer(SETS["constant"](), weights=W.clone()), W.clone()
    for _ in range(3):
        layer(Y, X)
    assert len(built) == 1
    value = layer(Y, X)
    layer.weights.copy_(weights.flip(0))  # noticed
    assert (layer(Y, X) - value).abs().max() > 1e-3
    assert len(built) == 2


def test_single_precision() -> None:
    for dtype in (None, torch.float32):
        solution = sn.repair(SETS["box"](), Y.float(), X.float(), weights=W.float(), dtype=dtype, tol=1e-5)
        assert solution.value.dtype == torch.float32
        assert solution.converged.all()
        assert solution.violation.max() <= 1e-5


def test_a_distance_is_compared_with_the_size_of_y() -> None:
    """A variable that is dear is large in the variables of the steps; it must not make the set seem near."""
    rows = sn.Nonlinear(lambda y, x: y[:, :2].sin() + y[:, 1:3].square(), 2, equals=0.5)
    y, levels = draw(64, 4, seed=6, scale=0.3), []
    for dear in (1.0, 1e6):
        metric, instance = Metric(torch.tensor([1.0, 1.0, 1.0, dear]), torch.float64), rows.at(y)
        instance = instance._replace(map=metric.map(instance.map))
        engine, lower, upper = choose(Options(), metric.memo, instance, metric.into(y), metric.units)
        assert isinstance(engine, Loop)
        levels.append(engine._begin(Batch(metric.into(y), lower, upper, torch.ones(64) > 0), eager=True).level)
    ratio = levels[1] / levels[0]
    assert (ratio > 0.5).all()  # at most one step of the schedule; by the size of z it would be 1e-6
    assert (ratio <= 1).all()


def test_explained() -> None:
    told = sn.explain(SETS["box"](), Y, X, weights=W)
    assert told.metric == "by `weights`, the largest 18 times the least"
    assert "metric: by `weights`" in str(told)
    assert sn.SnareLayer(SETS["box"](), weights=W).explain(Y, X) == sn.explain(
        SETS["box"](), Y, X, weights=W, rescue=True
    )
    assert sn.explain(SETS["box"](), Y, X).metric == ""


def test_a_layer_has_them() -> None:
    layer = sn.SnareLayer(SETS["function"](), weights=W)
    assert torch.equal(layer(Y, X), sn.repair(SETS["function"](), Y, X, weights=W, rescue=True).value)
    other = sn.SnareLayer(SETS["function"](), weights=torch.ones_like(W))
    assert (other(Y, X) - layer(Y, X)).abs().max() > 1e-3
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(Y, X), layer(Y, X))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (W[:3], r"`weights` must have shape \(6\), but got .*3"),
        (-W, "`weights` must be positive"),
        (W * 0, "`weights` must be positive"),
        (W.clone().requires_grad_(), "`weights` must be a constant tensor"),
        ([1.0] * 6, "`weights` must be a constant tensor"),
    ],
)
def test_bad_ones_are_refused(weights: Any, words: str) -> None:
    for call in (
        lambda: sn.SnareLayer(SETS["constant"](), weights=weights),
        lambda: sn.repair(SETS["constant"](), Y, X, weights=weights),
        lambda: sn.explain(SETS["constant"](), Y, X, weights=weights),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_rescue_tries_equal_weights_first() -> None:
    """The metric asks for a detour around a variable that is dear; whoever gets lost there goes straight."""
    wave = sn.Nonlinear(lambda y, x: y[:, :1] + 1e-3 * y[:, 1:].sin(), 1, equals=1.0)
    y = torch.tensor([[-0.5, 0.3], [0.2, -1.0]], dtype=torch.float64, requires_grad=True)
    options = {"weights": torch.tensor([1e8, 1.0], dtype=torch.float64), "start": None, "max_steps": 30}
    assert not sn.repair(wave, y, **options).converged.any()
    solution = sn.repair(wave, y, **options, rescue="first")
    assert solution.converged.all()
    assert torch.equal(solution.value, sn.repair(wave, y, **options, rescue=True).value)
    assert ((solution.value - y)[:, 1].abs() < 0.01).all()
    (found,) = torch.autograd.grad(solution.value.sum(), y)
    straight = sn.repair(wave, y, start=None)
    assert_equal(solution.value, straight.value, 1e-12)
    assert_equal(found, torch.autograd.grad(straight.value.sum(), y)[0], 1e-12)


def test_the_rescue_without_weights_is_as_it_was() -> None:
    wave = sn.Nonlinear(lambda y, x: y.sin(), 2, equals=0.5)
    instance = wave.at(torch.zeros(1, 2, dtype=torch.float64))
    options = sn.SnareLayer(wave).options
    plain, weighted = (attempts(options, instance, given) for given in (False, True))
    assert all(attempt.power == 1 for attempt in plain)
    assert [attempt.power for attempt in weighted if attempt not in plain] == [0, 0, -0.25]
    assert weighted[3:] == plain


def test_other_metrics_go_on_from_the_best_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt takes two steps; the next begins where these led."""
    module, weights = sys.modules["snarenet.repair.repair"], torch.tensor([1.0] * 5 + [1e8], dtype=torch.float64)
    constraints = sn.Nonlinear(function, 3, lower=-0.5, upper=0.5)
    for kick, power in ((None, 0), (0, 0), (0, -0.25)):
        attempt = Attempt(damping=None, kick=kick, power=power)
        monkeypatch.setattr(module, "attempts", lambda *_, attempt=attempt: (attempt,))
        first = sn.repair(constraints, Y, X, start=None, tol=1e-6, weights=weights, max_steps=2)
        assert not first.converged.any()
        begun = Y if kick is None else first.value
        other = weights.pow(power) if power else None
        expected = sn.repair(constraints, begun, X, start=None, tol=1e-6, weights=other, max_steps=20)
        choose = module.choose
        limits = iter((2, 20))
        with monkeypatch.context() as m:
            m.setattr(module, "choose", lambda o, *rest: choose(replace(o, max_steps=next(limits)), *rest))  # noqa: B023
            solution = sn.repair(constraints, Y, X, start=None, tol=1e-6, weights=weights, rescue=True)
        assert_equal(solution.value, expected.value, 1e-12)
        assert solution.converged.all()
