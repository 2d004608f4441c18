"""Derivatives by recorded programs against autograd's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet import native
from snarenet.constraints import program, recording
from snarenet.constraints.maps import FunctionMap
from snarenet.constraints.products import Products
from snarenet.constraints.sparsity import Pattern
from snarenet.constraints.structure import Structure
from snarenet.testing import assert_equal, draw

N, BATCH = 12, 11  # two groups of samples, one of them with room left
A, HALF = draw(5, N, seed=3), torch.arange(0, N, 2)
needs_compiler = pytest.mark.skipif(native.library(program._SOURCE) is None, reason="needs a C++ compiler")


def powers(y: Tensor, x: Any) -> Tensor:
    return y[:, :6] ** 3 / (2 + y[:, 6:] ** 2) - y[:, :6].square() + 2**-1 * (1 - y[:, 6:]).pow(-1)


def functions(y: Tensor, x: Any) -> Tensor:
    a, b = y.chunk(2, 1)
    return torch.cat(
        [a.sin() * b.cos(), (a * b).exp(), (2 + a.tanh()).log(), (3 + b.square()).sqrt().reciprocal(), a.sigmoid()], 1
    )


def places(y: Tensor, x: Any) -> Tensor:
    sums = y.new_zeros(len(y), 4).index_add(1, torch.tensor([0, 1, 1, 3, 1, 0]), y[:, HALF].square())
    picked = y.gather(1, torch.tensor([[3, 1, 3]]).expand(len(y), -1))
    return torch.cat([sums, picked * y[..., torch.tensor([0, 5, 7])], y[:, 1:].diff(dim=1)], 1)


def in_place(y: Tensor, x: Any) -> Tensor:
    found = torch.zeros(len(y), 6, dtype=y.dtype)
    found[:, ::2] = y[:, :3] * y[:, 3:6]
    found[:, 1] += y[:, 6].sin()
    found[:, torch.tensor([3, 5])] = y[:, 7:9] * found[:, :2].clone()
    return found.mul_(2).sub_(y[:, -6:])


def products(y: Tensor, x: Any) -> Tensor:
    inner = torch.stack([y @ A.T.to(y), (y.square() @ A.T.to(y)).sin()], 2)
    return torch.cat([inner.sum(2), inner.transpose(1, 2).flatten(1) * y[:, :1], 1 - y.mean(1, keepdim=True)], 1)


def with_inputs(y: Tensor, x: Any) -> Tensor:
    return y[:, :6] * x["a"].sin() + x["pair"][0][:, 1] * (y[:, 6:] - x["number"]) ** 2


RECORDED: tuple[Callable[[Tensor, Any], Tensor], ...] = (powers, functions, places, in_place, products, with_inputs)


def where(y: Tensor, x: Any) -> Tensor:
    return torch.where(y > 0, y, y.square())


def kinks(y: Tensor, x: Any) -> Tensor:
    return y.relu() * y.abs()


def branch(y: Tensor, x: Any) -> Tensor:
    return y * (2.0 if y[0, 0].item() > -100 else 3.0) + y.sin()


def inputs(batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Any:
    a, pair = draw(batch, 6, seed=5).to(dtype), draw(batch, 2, 6, seed=6).to(dtype)
    return {"a": a, "pair": (pair, None), "number": 0.25}


def map_of(fn: Callable[[Tensor, Any], Tensor], y: Tensor, x: Any) -> FunctionMap:
    """A function on its pattern, whatever its size."""
    rows = fn(y, x).shape[1]
    dense = FunctionMap(fn, x, rows).jacobian(draw(*y.shape, seed=9).to(y))
    structure = Structure(Pattern.of((dense != 0).any(0)))
    return FunctionMap(fn, x, rows, structure=structure, point=y)


def used(map: FunctionMap, y: Tensor) -> bool:
    """Does a program say what J is?"""
    recorded = map._recorded(y)
    return recorded is not None and recorded.values(map, y) is not None


def derivatives(map: FunctionMap, y: Tensor) -> list[Tensor]:
    """All that may be recorded."""
    (batch, n), m = y.shape, map.rows
    with torch.no_grad():
        J = map.linearize(y).jacobian
    pairs = [(draw(batch, m, seed=k).to(y), draw(batch, n, seed=k + 1).to(y)) for k in (20, 30)]
    (found,) = map.pullback(y, pairs, draw(batch, m, seed=40).to(y), ())
    at = y.clone().requires_grad_()
    (draw(batch, m, seed=50).to(y) * map.of_y_alone().row_norms(at)).sum().backward()
    return [J, *(torch.zeros_like(y) if part is None else part for part in (found, at.grad))]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("fn", RECORDED)
def test_the_same_as_autograd(fn: Callable[[Tensor, Any], Tensor], dtype: torch.dtype) -> None:
    y, x = draw(BATCH, N, seed=1).to(dtype), inputs(dtype=dtype)
    map = map_of(fn, y, x)
    assert used(map, y)
    for found, expected in zip(derivatives(map, y), derivatives(FunctionMap(fn, x, map.rows), y), strict=True):
        assert_equal(found, expected, 1e-12 if dtype == torch.float64 else 1e-4)


@needs_compiler
def test_a_sample_does_not_depend_on_its_batch() -> None:
    y, x = draw(BATCH, N, seed=1), inputs()
    map = map_of(with_inputs, y, x)
    together = derivatives(map, y)
    assert used(map, y)
    for i in range(BATCH):
        one = map.select(torch.tensor([i]))
        with torch.no_grad():
            assert torch.equal(one.linearize(y[i : i + 1]).jacobian, together[0][i : i + 1])


@pytest.mark.parametrize("fn", [where, kinks, branch])
def test_what_looks_at_values_is_left_to_autograd(fn: Callable[[Tensor, Any], Tensor]) -> None:
    y = draw(BATCH, N, seed=1)
    map = map_of(fn, y, None)
    assert not used(map, y)
    for found, expected in zip(derivatives(map, y), derivatives(FunctionMap(fn, None, map.rows), y), strict=True):
        assert_equal(found, expected, 1e-12)


def test_whole_numbers_in_x_are_left_to_autograd() -> None:
    y, x = draw(BATCH, N, seed=1), torch.arange(BATCH).unsqueeze(1) % 3
    map = map_of(lambda y, x: y.square() * y.gather(1, x).sin(), y, x)
    map.structure = Structure(Pattern.full(N, N))
    assert not used(map, y)


def test_too_large_a_function_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST", 20)
    y = draw(BATCH, N, seed=1)
    assert not used(map_of(powers, y, None), y)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda source: None)
    y = draw(BATCH, N, seed=1)
    map = map_of(functions, y, None)
    for found, expected in zip(
        derivatives(map, y), derivatives(FunctionMap(functions, None, map.rows), y), strict=True
    ):
        assert_equal(found, expected, 1e-12)


@needs_compiler
@pytest.mark.parametrize("small", [1.0, 1e-6])
def test_weights_that_change_are_noticed(small: float) -> None:
    """Also in a row that is small beside the others."""
    weights = torch.ones(N, dtype=torch.float64)
    weights[0], weights[1] = small, 1e6
    y = draw(BATCH, N, seed=1)
    map = map_of(lambda y, x: weights * y.sin(), y, None)
    assert used(map, y)
    with torch.no_grad():
        weights[0] *= 1.5
        assert_equal(map.linearize(y).jacobian, torch.diag_embed(weights * y.cos()), 1e-14)
    assert not used(map, y)


class _Opaque(torch.autograd.Function):
    """The sine, whose backward pass no mode of torch can see."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * torch.from_numpy(np.cos(ctx.saved_tensors[0].detach().numpy()))


@needs_compiler
def test_a_backward_pass_that_cannot_be_seen_is_noticed() -> None:
    y, identity = draw(1, N, seed=1), Pattern.of(torch.eye(6, N))
    map = FunctionMap(lambda y, x: _Opaque.apply(y[:, :6]), None, 6, structure=Structure(identity), point=y)
    assert used(map, y)
    with torch.no_grad():
        for k in range(2):
            at = y + k
            expected = torch.nn.functional.pad(torch.diag_embed(at[:, :6].cos()), (0, 6))
            assert_equal(map.linearize(at).jacobian, expected, 1e-14)


@needs_compiler
def test_a_number_in_x_that_changes_is_noticed() -> None:
    y = draw(BATCH, N, seed=1)
    map = map_of(lambda y, x: y.sin() * x, y, 2.0)
    assert used(map, y)
    with torch.no_grad():
        assert_equal(map.with_x(3.0).linearize(y).jacobian, torch.diag_embed(3 * y.cos()), 1e-14)


def test_gradients_reach_what_the_function_holds() -> None:
    """Those go through autograd, beside programs that were used on the way."""
    weight, n = torch.tensor(1.5, dtype=torch.float64, requires_grad=True), 70
    rows = sn.Nonlinear(lambda y, x: weight * y.square() + 0.1 * y.roll(1, 1) * x, n, upper=1.0)
    y, x = 2 + 0.1 * draw(3, n, seed=1), draw(3, 1, seed=2).requires_grad_()
    found = [
        torch.autograd.grad(sn.repair(set, y.requires_grad_(), x).value.square().sum(), (y, x, weight))
        for set in (rows, sn.Nonlinear(rows.fn, n, upper=1.0, sparsity=None))
    ]
    for one, other in zip(*found, strict=True):
        assert_equal(one, other, 1e-9)


def test_a_set_that_was_used_can_be_copied_and_kept() -> None:
    rows = sn.Nonlinear(_chain, 69, 0.0, 0.5)
    y = draw(3, 70, seed=1)
    value = sn.repair(rows, y).value
    for again in (deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert torch.equal(sn.repair(again, y).value, value)


def _chain(y: Tensor, x: Any) -> Tensor:
    return y[:, 1:] - y[:, :-1].sin()


def test_the_products_of_a_jacobian_are_not_changed() -> None:
    """The check of a pattern compares with autograd, never with the program."""
    y = draw(BATCH, N, seed=1)
    map = map_of(functions, y, None)
    v = draw(BATCH, N, seed=2)
    with torch.no_grad():
        assert_equal(map.linearize(y).jvp(v), Products(map.value, y).jvp(v), 1e-12)
