"""Recorded layers on a GPU; and `Recorder` without one, with the plain function in the place of a graph."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from emulation import on_a_gpu
from torch import Tensor

import snarenet as sn
from snarenet.repair.gpu.graphs import Recorder
from snarenet.testing import assert_equal, draw


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arguments each recording had."""
    counts: list[int] = []

    def graph(function: object, samples: tuple[Tensor, ...]) -> object:
        counts.append(len(samples))
        return function

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graph)
    return counts


def square(y: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return y * y * x["scale"], (y > 0).sum(1)


def test_no_garbage_is_freed_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is freed while another is recorded would spoil that one."""

    class Old:
        """A graph in a cycle, which only the collector frees."""

        def __init__(self) -> None:
            self.me = self

    before, seen = weakref.ref(Old()), []

    def graph(function: object, samples: tuple[Tensor, ...]) -> object:
        meanwhile = weakref.ref(Old())
        for _ in range(10_000):  # enough to wake the collector
            Old()
        seen.append((before(), meanwhile() is not None))
        return function

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graph)
    Recorder()(square, draw(4, 3), {"scale": draw(4, 1)}, key=0)
    assert seen == [(None, True)]
    assert gc.isenabled()


def test_one_recording_for_each_kind_of_call(recorded: list[int]) -> None:
    recorder, x = Recorder(), {"scale": draw(4, 1, seed=1)}
    for seed in range(3):
        y = draw(4, 3, seed=seed)
        value, count = recorder(square, y, x, key=0)
        assert torch.equal(value, y * y * x["scale"])
        assert torch.equal(count, (y > 0).sum(1))
    recorder(square, draw(4, 3).requires_grad_(), x, key=0)
    with torch.no_grad():
        recorder(square, draw(4, 3).requires_grad_(), x, key=0)
    recorder(square, draw(4, 3), x, key=1)
    recorder(square, draw(2, 3), {"scale": draw(2, 1)}, key=0)
    assert recorded == [2, 2, 2, 2, 2]
    copy.deepcopy(recorder)(square, draw(4, 3), x, key=0)
    assert len(recorded) == 6


def test_gradients_of_the_last_call_only(recorded: list[int]) -> None:
    recorder, x, y = Recorder(), {"scale": draw(4, 1, seed=1)}, draw(4, 3).requires_grad_()
    first = recorder(square, y, x, key=0)[0]
    last = recorder(square, y, x, key=0)[0]
    (gradient,) = torch.autograd.grad(last.sum(), y)
    assert torch.equal(gradient, 2 * y * x["scale"])
    with pytest.raises(RuntimeError, match="called again before the backward pass"):
        first.sum().backward()


def test_a_function_with_tensors_of_its_own_is_not_recorded(recorded: list[int]) -> None:
    """Their gradients would be lost."""
    recorder, weight = Recorder(), draw(3, seed=2).requires_grad_()

    def weighted(y: Tensor) -> tuple[Tensor, ...]:
        return (y * weight,)

    for _ in range(2):
        assert recorder(weighted, draw(4, 3).requires_grad_(), key=0) is None
    assert recorded == []
    with torch.no_grad():
        assert recorder(weighted, draw(4, 3), key=0) is not None


BATCH = 21


def polytope() -> sn.Constraints:
    """Inequalities from both sides, and equalities in x."""
    lower = torch.linspace(-2, -0.2, 10, dtype=torch.float64)
    return sn.Linear(draw(10, 16, seed=1), lower, lower + 1.5) & sn.Linear(draw(4, 16, seed=2), equals=lambda x: x)


LINKS = 70


def chain() -> sn.Constraints:
    """Neighbours that are tied to each other, by as much as x says, and a box."""

    def ties(y: Tensor, x: Tensor) -> Tensor:
        return y[:, 1:].sin() + y[:, 1:] - 0.5 * y[:, :-1].square() - 0.1 * x

    return sn.Nonlinear(ties, LINKS - 1, equals=0.0) & sn.Box(-1.0, 1.0)


class TestRecorded:
    pytestmark = on_a_gpu

    def layers(self, record: int = 40, **options: object) -> tuple[sn.SnareLayer, sn.SnareLayer]:
        constraints = polytope().to("cuda")
        return sn.SnareLayer(constraints, record=record, **options), sn.SnareLayer(constraints, **options)

    def compare(self, mine: sn.SnareLayer, plain: sn.SnareLayer, y: Tensor, x: Tensor, close: float) -> None:
        """Values and gradients of both."""
        y.requires_grad_()
        x.requires_grad_()
        results = []
        for layer in (mine, plain):
            value = layer(y, x)
            results.append([value, *torch.autograd.grad(value.square().sum(), [y, x])])
        for a, b in zip(*results, strict=True):
            assert_equal(a, b, close)

    @pytest.mark.parametrize(
        ("quadratic", "start"),  # a recording has no thorough search, which "auto" is on curved rows
        [(False, None), (False, sn.Nearest(20)), (False, "auto"), (True, None), (True, sn.Nearest(20))],
    )
    def test_equal_to_the_layer(self, quadratic: bool, start: Any) -> None:
        constraints = polytope().to("cuda")
        if quadratic:
            H, G = draw(3, 16, seed=11).abs(), draw(3, 16, seed=12)
            constraints = constraints & sn.Quadratic(H, G, upper=20.0).to("cuda")
        weights = torch.linspace(1, 2, 16, dtype=torch.float64, device="cuda") if start else None
        options = {"start": start, "weights": weights}
        mine, plain = sn.SnareLayer(constraints, record=40, **options), sn.SnareLayer(constraints, **options)
        for seed in range(3):  # the second and third are replays
            y, x = draw(BATCH, 16, seed=seed, scale=2).cuda(), draw(BATCH, 4, seed=seed + 9).cuda()
            self.compare(mine, plain, y, x, 1e-9)
            with torch.no_grad():
                assert_equal(mine(y, x), plain(y, x), 1e-9)

    @pytest.mark.parametrize("steps", [60, 14], ids=["enough steps", "too few for some"])
    def test_a_function_with_a_sparse_jacobian(self, steps: int) -> None:
        constraints = chain().to("cuda")
        mine, plain = sn.SnareLayer(constraints, record=steps), sn.SnareLayer(constraints, start=None)
        for seed in range(3):
            y, x = draw(BATCH, LINKS, seed=seed).cuda(), draw(BATCH, 1, seed=seed + 9).cuda()
            y[0] *= 1e-3  # near the set
            self.compare(mine, plain, y, x, 1e-8)
            assert "sparse" in mine.explain(y, x).system

    def test_samples_that_need_more_steps_get_them(self) -> None:
        short, plain = self.layers(record=2)
        y, x = draw(BATCH, 16, seed=1, scale=3).cuda(), draw(BATCH, 4, seed=2).cuda()
        assert short.solve(y, x).converged.all()
        assert_equal(short(y, x), plain(y, x), 1e-12)

    def test_results_are_not_overwritten(self) -> None:
        layer, plain = self.layers()
        a, b, x = (draw(BATCH, n, seed=s, scale=2).cuda() for n, s in ((16, 1), (16, 2), (4, 3)))
        first = layer(a, x)
        layer(b, x)
        assert_equal(first, plain(a, x), 1e-9)

    def test_backward_of_an_earlier_call_is_refused(self) -> None:
        layer, _ = self.layers()
        y, x = draw(BATCH, 16, seed=1, scale=2).cuda().requires_grad_(), draw(BATCH, 4, seed=2).cuda()
        first = layer(y, x)
        layer(y, x)
        with pytest.raises(RuntimeError, match="called again before the backward pass"):
            first.sum().backward()

    def test_copies_and_other_settings(self) -> None:
        layer, plain = self.layers()
        y, x = draw(BATCH, 16, seed=1, scale=2).cuda(), draw(BATCH, 4, seed=2).cuda()
        layer(y, x)
        assert_equal(copy.deepcopy(layer)(y, x), plain(y, x), 1e-9)
        layer.tol = 1e-3
        assert layer.solve(y, x).violation.max() > 1e-8
        assert layer(y[:0], x[:0]).shape == (0, 16)
        assert_equal(layer.cpu()(y.cpu(), x.cpu()), plain.cpu()(y.cpu(), x.cpu()), 1e-2)


def test_record_must_be_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="`record` must be a whole number >= 0, but got -1"):
        sn.SnareLayer(sn.Box(0.0, 1.0), record=-1)
