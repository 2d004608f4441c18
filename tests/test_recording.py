"""`Recorder` without a GPU: what it keeps, refuses and copies, with the plain function in the place of a graph."""

from __future__ import annotations

import copy

import pytest
import torch
from conformance import draw
from torch import Tensor

from snarenet.repair.recording import Recorder


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
