"""The kernels of the loop in constraint space, and recorded layers, against the plain loop.

On a GPU, or with Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu tests/test_fused.py
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from conformance import assert_equal, draw
from torch import Tensor

import snarenet as sn
from snarenet.repair import fused

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1"),
]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BATCH = 21  # not a multiple of a program's samples


def polytope(rows: int = 10, size: int = 16) -> sn.Constraints:
    """Inequalities from both sides, one of them without bounds, and equalities in x."""
    A = draw(rows, size, seed=1)
    lower = torch.linspace(-2, -0.2, rows, dtype=A.dtype)
    lower[0] = -torch.inf
    upper = lower + 1.5
    upper[0] = torch.inf if rows > 1 else 1.0
    return (sn.Linear(A, lower, upper) & sn.Linear(draw(4, size, seed=2), equals=lambda x: x)).to(DEVICE)


def spread(bound: Tensor) -> Callable[[Tensor], Tensor]:
    """The same bound for every sample, as a function of x."""
    return lambda x: bound.expand(len(x), -1)


def repaired(monkeypatch: pytest.MonkeyPatch, kernels: bool, bad: bool = False, rows: int = 10, **options: object):
    """Solution and gradients, by the kernels or by the plain loop."""
    with monkeypatch.context() as patch:
        if not kernels:
            patch.setattr(fused, "available", lambda *_: False)
        y = draw(BATCH, 2 * rows, seed=3, scale=3).to(DEVICE)
        if bad:
            y[3, 2], y[17, 0] = torch.nan, torch.inf
        x = draw(BATCH, 4, seed=4).to(DEVICE)
        y.requires_grad_()
        x.requires_grad_()
        solution = sn.repair(polytope(rows, 2 * rows), y, x, rows="all", **options)
        value = torch.where(solution.value.isfinite(), solution.value, 0.0)
        weights = draw(*value.shape, seed=9).to(DEVICE)
        return solution, torch.autograd.grad((weights * value).sum(), [y, x])


def assert_same(a: tuple[sn.Solution, tuple[Tensor, ...]], b: tuple[sn.Solution, tuple[Tensor, ...]]) -> None:
    (mine, my_gradients), (theirs, their_gradients) = a, b
    assert torch.equal(mine.status, theirs.status)
    assert torch.equal(mine.steps, theirs.steps)
    good = theirs.value.isfinite().all(1)
    assert_equal(mine.value[good], theirs.value[good], 1e-10)
    for g, h in zip(my_gradients, their_gradients, strict=True):
        assert_equal(g, h, 1e-9)


@pytest.mark.parametrize("most_rows", [fused.MOST_ROWS, 0], ids=["at once", "step by step"])
class TestKernels:
    @pytest.mark.parametrize("damping", [0.01, 0.0, sn.Annealed(), sn.Annealed(floor=0.1)], ids=str)
    @pytest.mark.parametrize("bad", [False, True])
    def test_equal_to_the_loop(
        self, monkeypatch: pytest.MonkeyPatch, most_rows: int, damping: float | sn.Annealed, bad: bool
    ) -> None:
        monkeypatch.setattr(fused, "MOST_ROWS", most_rows)
        options = {"damping": damping, "tol": 1e-9, "bad": bad}
        assert_same(*(repaired(monkeypatch, kernels, **options) for kernels in (True, False)))

    def test_too_few_steps(self, monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
        monkeypatch.setattr(fused, "MOST_ROWS", most_rows)
        mine, theirs = (repaired(monkeypatch, kernels, damping=0.1, max_steps=3) for kernels in (True, False))
        assert (mine[0].status == int(sn.Status.MAX_STEPS)).any()
        assert_same(mine, theirs)

    def test_bounds_get_their_gradients(self, monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
        monkeypatch.setattr(fused, "MOST_ROWS", most_rows)
        found = []
        for kernels in (True, False):
            with monkeypatch.context() as patch:
                if not kernels:
                    patch.setattr(fused, "available", lambda *_: False)
                low, high = ((draw(6, seed=5).abs() * s).to(DEVICE).requires_grad_() for s in (-0.3, 0.3))
                box = sn.Linear(draw(6, 9, seed=6).to(DEVICE), lower=spread(low), upper=spread(high))
                y = draw(BATCH, 9, seed=7, scale=2).to(DEVICE)
                value = sn.repair(box, y, y[:, :1]).value
                found.append(torch.autograd.grad((draw(*y.shape, seed=8).to(DEVICE) * value).sum(), [low, high]))
        for a, b in zip(*found, strict=True):
            assert a.abs().max() > 0
            assert_equal(a, b, 1e-9)

    def test_no_gradient_no_record(self, monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
        monkeypatch.setattr(fused, "MOST_ROWS", most_rows)
        y, x = draw(BATCH, 20, seed=3, scale=3).to(DEVICE), draw(BATCH, 4, seed=4).to(DEVICE)
        with torch.no_grad():
            plain = sn.repair(polytope(10, 20), y, x)
        assert_equal(plain.value, sn.repair(polytope(10, 20), y.requires_grad_(), x).value, 1e-12)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 124, 140])
def test_any_number_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    if INTERPRETED and rows > 40:
        pytest.skip("slow in the interpreter")
    assert_same(*(repaired(monkeypatch, kernels, rows=max(rows, 2)) for kernels in (True, False)))


@on_a_gpu
class TestRecorded:
    def layers(self, record: int = 40, **options: object) -> tuple[sn.SnareLayer, sn.SnareLayer]:
        constraints = polytope().to("cuda")
        return sn.SnareLayer(constraints, record=record, **options), sn.SnareLayer(constraints, **options)

    @pytest.mark.parametrize("quadratic", [False, True])
    def test_equal_to_the_layer(self, quadratic: bool) -> None:
        constraints = polytope().to("cuda")
        if quadratic:
            H, G = draw(3, 16, seed=11).abs(), draw(3, 16, seed=12)
            constraints = constraints & sn.Quadratic(H, G, upper=20.0).to("cuda")
        mine, plain = sn.SnareLayer(constraints, record=40), sn.SnareLayer(constraints)
        for seed in range(3):  # the second and third are replays
            y, x = draw(BATCH, 16, seed=seed, scale=2).cuda(), draw(BATCH, 4, seed=seed + 9).cuda()
            y.requires_grad_()
            x.requires_grad_()
            results = []
            for layer in (mine, plain):
                value = layer(y, x)
                results.append([value, *torch.autograd.grad(value.square().sum(), [y, x])])
            for a, b in zip(*results, strict=True):
                assert_equal(a, b, 1e-9)
            with torch.no_grad():
                assert_equal(mine(y, x), results[1][0], 1e-9)

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
