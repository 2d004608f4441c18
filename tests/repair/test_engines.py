"""What every engine must do. An engine's test class says which sets it is chosen for, and inherits every test.

The reference is the textbook's unrolled loop. On a CPU the kernels are emulated; with `-m gpu` they run on a GPU.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation import on_devices, use_kernels
from torch import Tensor

import snarenet as sn
from snarenet.constraints import Instance
from snarenet.linalg import Estimate, sparse_normal
from snarenet.repair.autograd import differentiable
from snarenet.repair.choose import Choice, choose, choose_bounded
from snarenet.repair.engine import Batch, Engine
from snarenet.repair.gpu import blocks
from snarenet.repair.gpu.curved import CurvedKernels
from snarenet.repair.gpu.linear import LinearKernels
from snarenet.repair.gpu.sparse import kernel_systems
from snarenet.repair.loop import BoundedSpace, ConstraintSpace, Loop, OutputSpace
from snarenet.repair.metric import Metric
from snarenet.repair.options import Options
from snarenet.repair.repair import repair_with
from snarenet.repair.stopping import CONVERGED, GOING, NONFINITE, STALLED
from snarenet.testing import assert_equal, draw, textbook_repair

BATCH, SIZE = 5, 6
WEIGHTS = torch.tensor([2.0, 0.5, 9.0, 0.25, 4.0, 1.0], dtype=torch.float64)


def polytope() -> sn.Constraints:
    """Independent constant rows, one of them without a bound, and equalities that depend on x."""
    lower = torch.tensor([-torch.inf, -0.5, 0.1], dtype=torch.float64)
    upper = torch.tensor([torch.inf, 0.5, 0.4], dtype=torch.float64)
    return sn.Linear(draw(3, SIZE, seed=1), lower, upper) & sn.Linear(draw(2, SIZE, seed=2), equals=lambda x: x)


def ellipsoids(count: int = 3) -> sn.Constraints:
    """Rows with diagonal Hessians, and equalities that depend on x."""
    H, G = draw(count, SIZE, seed=3).abs() / 4, draw(count, SIZE, seed=4)
    curved = sn.Quadratic(H, G, upper=lambda x: 1 + x[:, :1].expand(-1, count))
    return curved & sn.Linear(draw(2, SIZE, seed=2), equals=lambda x: x)


def contradiction() -> sn.Constraints:
    """The same row above 1 and below -1, and a bound that depends on x."""
    row = draw(1, SIZE, seed=5)
    return sn.Linear(row, lower=1.0) & sn.Linear(row.clone(), upper=-1.0)


class EngineConformance:
    """Inherit, and say which engine it is about."""

    options = Options()
    final: sn.Damping = sn.Annealed(1.0, 0.3)  # one that converges to the last digits
    active = False  # are only active rows used?
    reproducible = True  # to the last bit, on a GPU too?

    @abstractmethod
    def constraints(self) -> sn.Constraints: ...

    @abstractmethod
    def check(self, engine: Engine) -> None:
        """Is this the engine that the class is about?"""

    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        """Whatever makes it the one that is chosen; no kernels."""
        use_kernels(monkeypatch, device, on=False)

    @pytest.fixture(autouse=True, params=[None, WEIGHTS], ids=["plain", "weighted"])
    def _prepare(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        self.device = device
        self.weights = None if request.param is None else request.param.to(device)
        self.patch(monkeypatch, device)

    def into(self, y: Tensor) -> Tensor:
        """y in the variables of the engine."""
        return y if self.weights is None else Metric(self.weights, y.dtype).into(y)

    def back(self, z: Tensor, y: Tensor) -> Tensor:
        """What the engine made of y."""
        return z if self.weights is None else Metric(self.weights, y.dtype).back(z, y)

    @property
    def normed(self) -> Tensor:
        """The weights as the textbook has them: ones without any."""
        weights = torch.ones_like(WEIGHTS).to(self.device) if self.weights is None else self.weights
        return weights / weights.max()

    def inputs(self) -> tuple[Tensor, Tensor]:
        y, x = draw(BATCH, SIZE, seed=6, scale=2).to(self.device), draw(BATCH, 2, seed=7, scale=0.3).to(self.device)
        return y.requires_grad_(), x.requires_grad_()

    def choose(self, y: Tensor, x: Tensor, options: Options | None = None) -> Choice:
        constraints, options, units = self.constraints().to(self.device), options or self.options, None
        instance = constraints.at(y, x)
        if self.weights is not None:
            metric = Metric(self.weights, y.dtype)
            instance, units = instance._replace(map=metric.map(instance.map)), metric.units
            options = metric.stricter(options)
        choice = self.pick(options, constraints, instance, self.into(y), units)
        self.check(choice.engine)
        return choice

    def pick(
        self, options: Options, constraints: sn.Constraints, instance: Instance, z: Tensor, units: Tensor | None
    ) -> Choice:
        return choose(options, constraints.memo, instance, z, units)

    def run(self, y: Tensor, x: Tensor, options: Options | None = None) -> tuple[Tensor, Tensor, Tensor]:
        engine, lower, upper = self.choose(y, x, options)
        value, status, steps = differentiable(engine, Batch(self.into(y), lower, upper, y.isfinite().all(1)))
        return self.back(value, y), status, steps

    @pytest.mark.parametrize("damping", [sn.Annealed(10.0, 0.5, 1e-6), sn.Constant(0.05)], ids=["annealed", "constant"])
    def test_equal_to_the_textbook(self, damping: sn.Damping) -> None:
        self.assert_textbook(damping)

    def assert_textbook(self, damping: sn.Damping) -> None:
        """Value and gradients in y and x after a few steps are those of an unrolled loop."""
        found = []
        options = replace(self.options, damping=damping, max_steps=6)
        for textbook in (False, True):
            y, x = self.inputs()
            value = self.textbook(y, x, damping, options) if textbook else self.run(y, x, options)[0]
            weights = draw(*value.shape, seed=9).to(self.device)
            found.append((value.detach(), *torch.autograd.grad((weights * value).sum(), [y, x])))
        assert_equal(found[0][0], found[1][0], 1e-9)
        for mine, theirs in zip(found[0][1:], found[1][1:], strict=True):
            assert theirs.abs().max() > 1e-3
            assert_equal(mine, theirs, 1e-7)

    def textbook(self, y: Tensor, x: Tensor, damping: sn.Damping, options: Options) -> Tensor:
        constraints = self.constraints().to(self.device)
        map, lower, upper, _ = constraints.at(y, x)
        level = damping.at if isinstance(damping, sn.Annealed) else lambda k: float(damping.first(y))
        return textbook_repair(
            map.value,
            lambda y: map.jacobian(y).expand(BATCH, -1, -1),
            lower,
            upper,
            y,
            damping=level,
            relative=damping.relative,
            active=self.active,
            max_steps=options.max_steps,
            weights=self.weights,
        )[0]

    def test_converges(self) -> None:
        y, x = self.inputs()
        value, status, steps = self.run(y, x)
        assert (status == CONVERGED).all()
        assert (steps > 2).all()
        assert self.constraints().to(self.device).violation(value, x).max() <= self.options.tol

    def test_differences(self) -> None:
        """Central differences of the converged value in y and in the bounds."""
        y, x = (tensor.detach() for tensor in self.inputs())
        options = replace(self.options, damping=self.final)

        def value(y: Tensor, x: Tensor) -> Tensor:
            return self.run(y, x, options)[0]

        leaves = [y.clone().requires_grad_(), x.clone().requires_grad_()]
        weights = draw(BATCH, SIZE, seed=9).to(self.device)
        found = torch.autograd.grad((weights * value(*leaves)).sum(), leaves)
        for k, leaf in enumerate((y, x)):
            direction = draw(*leaf.shape, seed=10 + k).to(self.device)
            step = 1e-5 * direction
            ends = [value(*(t + s * step if i == k else t for i, t in enumerate((y, x)))) for s in (1.0, -1.0)]
            difference = (weights * (ends[0] - ends[1])).sum() / 2e-5
            assert_equal((found[k] * direction).sum(), difference, 1e-5)

    def test_a_tape_changes_nothing(self) -> None:
        y, x = self.inputs()
        engine, lower, upper = self.choose(y, x)
        batch = Batch(y.detach(), lower.detach(), upper.detach(), torch.ones(BATCH, dtype=torch.bool, device=y.device))
        with torch.no_grad():
            (plain, none), (taped, tape) = (engine.run(batch, taped=taped) for taped in (False, True))
        assert none is None
        assert tape is not None
        for a, b in zip(plain, taped, strict=True):
            if self.reproducible or not a.is_cuda:
                assert torch.equal(a, b)
            else:
                assert_equal(a.double(), b.double(), 1e-12)

    def test_bounds_without_gradients_get_none(self) -> None:
        y, x = self.inputs()
        engine, lower, upper = self.choose(y, x.detach())
        with torch.no_grad():
            batch = Batch(y, lower, upper, torch.ones(BATCH, dtype=torch.bool, device=y.device))
            _, tape = engine.run(batch, taped=True)
            assert tape is not None
            found = tape.pull_back(y, torch.ones_like(y), ())
        assert found.lower is None
        assert found.upper is None
        assert found.y.abs().max() > 0

    def test_a_sample_does_not_depend_on_its_batch(self) -> None:
        y, x = self.inputs()
        value, status, steps = self.run(y, x)
        gradient = torch.autograd.grad(value.square().sum(), y)[0]
        for i in range(BATCH):
            mine, alone = y[i : i + 1].detach().requires_grad_(), x[i : i + 1]
            again, own_status, own_steps = self.run(mine, alone)
            assert_equal(again[0], value[i], 1e-11)
            assert_equal(torch.autograd.grad(again.square().sum(), mine)[0][0], gradient[i], 1e-9)
            assert (own_status[0], own_steps[0]) == (status[i], steps[i])

    def test_samples_that_are_not_finite(self) -> None:
        y, x = self.inputs()
        expected = self.run(y, x)[0]
        bad = y.detach().clone()
        bad[1, 2] = torch.nan
        engine, lower, upper = self.choose(y, x)  # a repair puts zeros in their place, and says so
        finite = bad.isfinite().all(1)
        begin = self.into(torch.where(finite.unsqueeze(1), bad, 0.0)).requires_grad_()
        value, status, _ = differentiable(engine, Batch(begin, lower, upper, finite))
        assert status[1] == NONFINITE
        assert_equal(self.back(value, bad)[[0, 2, 3, 4]], expected[[0, 2, 3, 4]], 1e-11)

    def test_too_few_steps(self) -> None:
        y, x = self.inputs()
        _, status, steps = self.run(y, x, replace(self.options, max_steps=2))
        assert (status == GOING).all()
        assert (steps == 2).all()

    def test_a_feasible_point_stays(self) -> None:
        y, x = self.inputs()
        inside = self.run(y, x)[0].detach().requires_grad_()
        value, status, steps = self.run(inside, x)
        assert (status == CONVERGED).all()
        assert (steps == 0).all()
        assert_equal(value, inside, 1e-12)
        assert_equal(torch.autograd.grad(value.sum(), inside)[0], torch.ones_like(inside), 1e-12)

    def test_single_precision(self) -> None:
        y, x = (tensor.detach().float() for tensor in self.inputs())
        options = replace(self.options, dtype=torch.float32, tol=1e-4)
        value, status, _ = self.run(y, x, options)
        assert value.dtype == torch.float32
        assert (status == CONVERGED).all()


class CurvedConformance(EngineConformance):
    """Rows are curved, and a step may overshoot."""

    active = True

    def constraints(self) -> sn.Constraints:
        return ellipsoids()

    def test_a_repair_that_fails_is_no_worse_than_it_began(self) -> None:
        """From near the centre of a sphere Newton's step leads far beyond it; one step later nobody is back."""
        sphere = sn.Quadratic(torch.ones(1, SIZE), equals=1.0).to(self.device)
        size = torch.tensor([1e-6, 1e-3, 1e-2, 0.3, 3.0], dtype=torch.float64, device=self.device)
        y = (self.inputs()[0].detach() * size.unsqueeze(1)).requires_grad_()
        options = replace(self.options, start=None, damping=sn.Constant(1e-15), max_steps=2)
        before = sphere.violation(y)
        self.check(choose(options, sphere.memo, sphere.at(y), y).engine)
        solution = repair_with(options, sphere, y, weights=self.weights)
        assert (solution.violation <= before).all()
        assert_equal(sphere.violation(solution.value), solution.violation, 1e-12)
        stayed = (solution.value == y).all(1)
        assert stayed.tolist() == [True, True, True, False, False]
        assert solution.status[0] == NONFINITE  # its violation grew from 1 to more than 1e8
        (gradient,) = torch.autograd.grad(solution.value.sum(), y)
        assert (gradient[stayed] == 1).all()
        assert gradient.isfinite().all()


@on_devices
class TestLoopInConstraintSpace(EngineConformance):
    def constraints(self) -> sn.Constraints:
        return polytope()

    def check(self, engine: Engine) -> None:
        assert isinstance(engine, Loop)
        assert isinstance(engine.space, ConstraintSpace)


@on_devices
class TestLoopInOutputSpace(CurvedConformance):
    def check(self, engine: Engine) -> None:
        assert isinstance(engine, Loop)
        assert isinstance(engine.space, OutputSpace)


def _better(best: tuple[float | Tensor, Tensor], r: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The least violation so far and where it was; r is that at y."""
    worst = r.detach().abs().amax(1)
    wins = worst < best[0]
    return torch.where(wins, worst, best[0]), torch.where(wins.unsqueeze(1), y, best[1])


def begun(damping: sn.Damping, distance: Tensor) -> Tensor:
    """The damping of a start at this distance."""
    if not isinstance(damping, sn.Annealed):
        return torch.full_like(distance, float(damping.first(distance)))
    jumps = (2 * distance.clamp(max=1).log() / torch.tensor(damping.ratio).log()).ceil()
    return damping.start * damping.ratio**jumps


@on_devices
class TestLoopAtItsOwnPace(EngineConformance):
    """Rows of a function, under which the damping follows gain and distance; the first ones are linear in y."""

    active = True

    def constraints(self) -> sn.Constraints:
        def g(y: Tensor, x: Tensor) -> Tensor:
            bent = y.sin() + 0.3 * y.square() + x.sum(1, keepdim=True) * y
            return torch.cat([bent[:, :4] * y[:, 2:], y[:, :2] - 0.5 * y[:, 4:] + x], 1)

        return sn.Nonlinear(g, 6, lower=-0.1, upper=lambda x: 0.2 + x[:, :1].square().expand(-1, 6)) & sn.Box(-1.5, 1.5)

    def check(self, engine: Engine) -> None:
        assert isinstance(engine, Loop)
        assert isinstance(engine.space, OutputSpace)
        assert engine.space.curved
        assert not engine.space.sparse

    def textbook(self, y: Tensor, x: Tensor, damping: sn.Damping, options: Options) -> Tensor:
        """The step, its pace and the rows that it foresees written out; what decides these has no derivative."""
        map, lower, upper, _ = self.constraints().to(self.device).at(y, x)
        W = self.normed
        scale = (map.jacobian(y).square() / W).sum(-1) if damping.relative else torch.ones_like(lower)
        paces, level, best = isinstance(damping, sn.Annealed), None, (torch.inf, y)

        def violation(y: Tensor) -> Tensor:
            g = map.value(y)
            return torch.relu(g - upper) - torch.relu(lower - g)

        def step(J: Tensor, r: Tensor, used: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
            """d, and the residual that the linear model foresees."""
            J = J * used.unsqueeze(-1)
            weighted = J.mT / scale.unsqueeze(1)
            matrix = weighted @ J + level.view(-1, 1, 1) * W.diag()
            d = torch.linalg.solve(matrix, weighted @ r.unsqueeze(-1)).squeeze(-1)
            return d, r - (J @ d.unsqueeze(-1)).squeeze(-1)

        for _ in range(options.max_steps):
            r = violation(y)
            best, going = _better(best, r, y), (r.abs() > options.tol).any(1, keepdim=True)
            away = (r.abs() / scale.sqrt()).amax(1, keepdim=True)
            length = (1 / W).mean().sqrt()  # of a variable, in units of the metric
            if level is None:
                level = begun(damping, away.squeeze(1) * length / y.square().mean(1).sqrt()).detach()
            J, used = map.jacobian(y), r != 0
            d, left = step(J, r, used, level)
            if paces:
                g = map.value(y)
                ahead = g - (J @ d.unsqueeze(-1)).squeeze(-1)
                touch = 0.01 * scale.sqrt() * (d.square() * W).sum(1, keepdim=True).sqrt()
                above, below = ~used & (ahead > upper + touch), ~used & (ahead < lower - touch)
                beyond = torch.where(above, ahead - upper, torch.where(below, lower - ahead, 0.0)) / scale.sqrt()
                again = beyond.amax(1, keepdim=True) > 0.2 * away
                kept = used & (left * r > 0)
                used = torch.where(again, kept | above | below, used)
                slack = torch.where(above, g - upper, torch.where(below, g - lower, torch.where(kept, r, 0.0)))
                r = torch.where(again, slack, r)
                d, left = step(J, r, used, level)
            distance = ((r.abs() / scale.sqrt()).amax(1) * length / y.square().mean(1).sqrt()).detach()
            before, after, predicted = ((v.square() / scale).sum(1) for v in (r, violation(y - d), left * used))
            gain = (before - after) / (before - predicted)
            y = torch.where(going, y - d, y)
            if paces:
                right = ((distance < 0.01) & (gain > 0.75)) | ((distance < 1) & ((gain - 1).abs() < 0.02))
                quick = torch.where(right, (0.03 * level).clamp(min=1e-10), torch.inf)
                least = (1e-3 * begun(damping, distance)).clamp(min=damping.floor)
                level = quick.minimum(damping.ratio * level).maximum(least)
        return _better(best, violation(y), y)[1]

    def test_far_away_the_damping_stays(self) -> None:
        """Of a schedule that falls faster than the distance."""
        self.assert_textbook(sn.Annealed(10.0, 0.01, 1e-12))

    def test_one_that_is_near_needs_few_steps(self) -> None:
        y, x = (tensor.detach() for tensor in self.inputs())
        solved = self.run(y, x)[0]
        near = solved + 1e-2 * solved.square().mean().sqrt() * draw(BATCH, SIZE, seed=11).to(y)
        steps = [
            self.run(near, x, replace(self.options, damping=d))[2] for d in (sn.Annealed(), sn.Annealed(own_pace=False))
        ]
        assert (steps[0] <= 4).all()
        assert (steps[1] >= 3 * steps[0]).all()
        assert (steps[1] > 0).sum() >= BATCH - 1


class TestLoopOnAPattern(TestLoopAtItsOwnPace):
    """The same rows with a pattern, and systems on it, which so few variables would not get by themselves."""

    reproducible = False  # torch adds in any order there, so the library has kernels
    systems: Any = staticmethod(sparse_normal)

    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        super().patch(monkeypatch, device)
        monkeypatch.setattr(Estimate, "worthwhile", True)

    def constraints(self) -> sn.Constraints:
        function, box = super().constraints().parts
        assert isinstance(function, sn.Nonlinear)
        i = torch.arange(6)
        pattern = torch.zeros(6, SIZE, dtype=torch.bool)
        pattern[i[:4], i[:4]] = pattern[i[:4], i[:4] + 2] = pattern[i[4:], i[:2]] = pattern[i[4:], i[4:]] = True
        limit = function.limit
        return sn.Nonlinear(function.fn, 6, limit.lower, limit.upper, sparsity=pattern) & box

    def check(self, engine: Engine) -> None:
        assert isinstance(engine, Loop)
        assert isinstance(engine.space, OutputSpace)
        assert engine.space.sparse is self.systems


class TestLoopOnAPatternByKernels(TestLoopOnAPattern):
    reproducible = True
    systems = staticmethod(kernel_systems)

    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        monkeypatch.setattr(Estimate, "worthwhile", True)
        use_kernels(monkeypatch, device)


class TestLoopWithASearch(TestLoopInOutputSpace):
    """A damping that may reject steps; it has no textbook."""

    options = Options(damping=sn.Adaptive())
    test_equal_to_the_textbook = test_differences = test_too_few_steps = None
    test_a_repair_that_fails_is_no_worse_than_it_began = None  # it takes no step that is


@on_devices
class TestLoopInABox(EngineConformance):
    """The rescue's space; the box depends on x, and predictions begin inside it."""

    options = Options(max_steps=200)
    scaled = True

    def constraints(self) -> sn.Constraints:
        box = sn.Box(
            lambda x: -0.4 - x[:, :1].abs().expand(-1, SIZE), lambda x: 0.4 + x[:, 1:].expand(-1, SIZE).square()
        )
        H, G = draw(3, SIZE, seed=3).abs() / 4, draw(3, SIZE, seed=4)
        curved = sn.Quadratic(H, G, lower=-0.3, upper=lambda x: 0.2 + x[:, :1].expand(-1, 3))
        return curved & box & sn.Nonlinear(lambda y, x: (y.sin() * (1 + x[:, :1])).sum(1, keepdim=True), 1, equals=0.3)

    def inputs(self) -> tuple[Tensor, Tensor]:
        y, x = (tensor.detach() for tensor in super().inputs())
        lower, upper = self.constraints().parts[1].to(self.device).bounds(x)
        return y.clamp(0.9 * lower, 0.9 * upper).requires_grad_(), x.requires_grad_()

    def pick(
        self, options: Options, constraints: sn.Constraints, instance: Instance, z: Tensor, units: Tensor | None
    ) -> Choice:
        choice, moved = choose_bounded(options, instance, z, self.scaled)
        assert_equal(moved, z, 1e-8)  # what converged may be outside by the tolerance
        return choice

    def check(self, engine: Engine) -> None:
        assert isinstance(engine, Loop)
        assert isinstance(engine.space, BoundedSpace)

    def textbook(self, y: Tensor, x: Tensor, damping: sn.Damping, options: Options) -> Tensor:
        """The same step written out: rows weighed at y, columns of variables that would leave struck out, a clip."""
        constraints = self.constraints().to(self.device)
        curved, box, function = (part.at(y, x) for part in constraints.parts)
        level, W, clipped = damping.first(y), self.normed, 0
        for k in range(options.max_steps):
            g = torch.cat([part.map.value(y) for part in (curved, function)], 1)
            J = torch.cat([part.map.jacobian(y).expand(BATCH, -1, -1) for part in (curved, function)], 1)
            low, high = (torch.cat(pair, 1) for pair in zip(curved[1:3], function[1:3], strict=True))
            r = torch.relu(g - high) - torch.relu(low - g)
            scale = (J.square() / W).sum(-1) if self.scaled else torch.ones_like(r)
            J = J * ((r != 0) | (low == high)).unsqueeze(-1)
            slope = (J.mT @ (r / scale).unsqueeze(-1)).squeeze(-1)
            leaving = ((y <= box.lower) & (slope > 0)) | ((y >= box.upper) & (slope < 0))
            J = J * ~leaving.unsqueeze(1)
            weighted = J.mT / scale.unsqueeze(1)
            d = torch.linalg.solve(weighted @ J + level * W.diag(), weighted @ r.unsqueeze(-1)).squeeze(-1)
            after = torch.minimum(torch.maximum(y - d, box.lower), box.upper)
            y = torch.where((r.abs() > options.tol).any(1, keepdim=True), after, y)
            clipped += int(((y == box.lower) | (y == box.upper)).sum())
            level = damping.following(k, level, None)
        assert clipped > 3
        return y


class TestLoopInABoxUnscaled(TestLoopInABox):
    scaled = False


class TestLoopInABoxOnAPattern(TestLoopInABox):
    """Systems on a pattern; that of these few variables is full."""

    reproducible = False  # torch adds in any order there, so the library has kernels
    systems: Any = staticmethod(sparse_normal)

    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        super().patch(monkeypatch, device)
        monkeypatch.setattr(Estimate, "worthwhile", True)

    def constraints(self) -> sn.Constraints:
        _, box, function = super().constraints().parts
        H, G = draw(3, SIZE, seed=3).abs() / 4, draw(3, SIZE, seed=4)
        curved = sn.Nonlinear(
            lambda y, x: y.square() @ H.T.to(y) + y @ G.T.to(y),
            3,
            lower=-0.3,
            upper=lambda x: 0.2 + x[:, :1].expand(-1, 3),
            sparsity=torch.ones(3, SIZE, dtype=torch.bool),
        )
        assert isinstance(function, sn.Nonlinear)
        return curved & box & sn.Nonlinear(function.fn, 1, equals=0.3, sparsity=torch.ones(1, SIZE, dtype=torch.bool))

    def check(self, engine: Engine) -> None:
        super().check(engine)
        assert engine.space.sparse is self.systems


class TestLoopInABoxOnAPatternByKernels(TestLoopInABoxOnAPattern):
    reproducible = True
    systems = staticmethod(kernel_systems)

    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        monkeypatch.setattr(Estimate, "worthwhile", True)
        use_kernels(monkeypatch, device)


class TestLoopInABoxWithASearch(TestLoopInABox):
    options = Options(damping=sn.Adaptive(), max_steps=200)
    test_equal_to_the_textbook = test_differences = test_too_few_steps = None


@on_devices
class TestLinearKernels(EngineConformance):
    def constraints(self) -> sn.Constraints:
        return polytope()

    def check(self, engine: Engine) -> None:
        assert isinstance(engine, LinearKernels)

    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        use_kernels(monkeypatch, device)


class TestLinearKernelsStepByStep(TestLinearKernels):
    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        super().patch(monkeypatch, device)
        monkeypatch.setattr(blocks, "MOST_ROWS", 0)


@on_devices
class TestCurvedKernels(CurvedConformance):
    primal = False  # do they solve the primal system?

    def check(self, engine: Engine) -> None:
        assert isinstance(engine, CurvedKernels)
        assert engine.rows.primal is self.primal

    def patch(self, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
        use_kernels(monkeypatch, device)


class TestPrimalKernels(TestCurvedKernels):
    """More rows than variables, beside constant equalities."""

    options = Options(damping=sn.Annealed(floor=1e-5))
    primal = True
    test_a_repair_that_fails_is_no_worse_than_it_began = None  # of a single row

    def constraints(self) -> sn.Constraints:
        return ellipsoids(8)


class TestPrimalKernelsOnAllRows(TestPrimalKernels):
    """Fewer rows than variables, all of them in use, and constant ones with inequalities; the damping is not tiny."""

    final = sn.Constant(0.1, relative=True)
    options = Options(rows="all", damping=final, max_steps=1000)
    active = False

    def constraints(self) -> sn.Constraints:
        return ellipsoids(4) & sn.Linear(draw(1, SIZE, seed=12), upper=0.1)


def test_every_engine_has_a_suite() -> None:
    """A new engine that nobody tests is noticed."""
    tested = {TestLoopInConstraintSpace: Loop, TestLinearKernels: LinearKernels, TestCurvedKernels: CurvedKernels}
    assert set(Engine.__subclasses__()) == set(tested.values())


def test_an_empty_set_stalls() -> None:
    constraints = contradiction()
    y = draw(BATCH, SIZE, seed=6)
    engine, lower, upper = choose(Options(), constraints.memo, constraints.at(y), y)
    value, status, _ = differentiable(engine, Batch(y, lower, upper, torch.ones(BATCH, dtype=torch.bool)))
    assert (status == STALLED).all()
    assert value.isfinite().all()


@pytest.mark.parametrize("form", ["dense", "sparse", "of x"])
def test_rows_of_two_entries_beside_a_box_are_solved_on_their_pattern(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Differences y[i+1] - y[i], constant or not: as a dense system they take twenty times as long."""
    n = 200
    A = torch.diff(torch.eye(n, dtype=torch.float64), dim=0)
    forms = {"dense": A, "sparse": A.to_sparse(), "of x": lambda x: A * (1 + x).unsqueeze(2)}
    constraints = sn.Linear(forms[form], -0.1, 0.1) & sn.Box(-1.0, 1.0)
    y, x = draw(3, n, seed=1).requires_grad_(), draw(3, 1, seed=2, scale=0.1)
    engine = choose(Options(), constraints.memo, constraints.at(y, x), y).engine
    assert isinstance(engine, Loop)
    assert isinstance(engine.space, OutputSpace)
    assert engine.space.sparse
    results = []
    for _ in range(2):
        value = sn.repair(constraints, y, x).value
        results.append((value, torch.autograd.grad((value * draw(3, n, seed=3)).sum(), y)[0]))
        monkeypatch.setattr(Estimate, "worthwhile", False)
    for actual, expected in zip(*results, strict=True):
        assert_equal(actual, expected, 1e-9)
