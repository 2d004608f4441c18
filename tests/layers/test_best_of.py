"""`BestOfLayer`: all predictions are repaired, the best is returned, with its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers import BestOfLayer

PLAIN = {"dtype": torch.float64}


def outside() -> sn.Constraints:
    """Of the disk with radius |x|."""
    return sn.Nonlinear(
        lambda y, x: y.square().sum(1, keepdim=True), 1, lower=lambda x: x.square().sum(1, keepdim=True)
    )


def cost(y: Tensor, x: Tensor) -> Tensor:
    return (y - x).square().sum(1)


def candidates(seed: int = 0) -> tuple[Tensor, Tensor]:
    """(B, 3 n) predictions, (B, 2) inputs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(9, 6, generator=generator, **PLAIN), torch.randn(9, 2, generator=generator, **PLAIN)


def test_the_best_of_all_is_returned() -> None:
    y, x = candidates()
    layer = BestOfLayer(outside(), cost, 3)
    plain = sn.SnareLayer(outside())
    each = torch.stack([plain(part, x) for part in y.chunk(3, 1)])
    values = torch.stack([cost(part, x) for part in each])
    found = layer.solve(y, x)
    assert layer.predictions(2) == 6
    assert found.converged.all()
    assert len(set(values.argmin(0).tolist())) > 1
    torch.testing.assert_close(cost(found.value, x), values.amin(0))
    torch.testing.assert_close(found.raw, torch.stack(y.chunk(3, 1))[values.argmin(0), torch.arange(9)])


def test_a_point_of_the_set_is_better_than_any_outside() -> None:
    fall = sn.Nonlinear(lambda y, x: y.square() * (y.square() - 4), 1, lower=1.0)  # from near 0 it may stall
    layer = BestOfLayer(
        fall, lambda y, x: y.square().sum(1), 2, rescue=False, start=None, max_steps=3, on_failure="ignore"
    )
    y = torch.tensor([[0.0, 3.0], [3.0, 0.0]], **PLAIN)
    found = layer.solve(y)
    assert found.converged.all()
    torch.testing.assert_close(found.raw, torch.full((2, 1), 3.0, **PLAIN))


def test_gradients_go_to_the_chosen_one() -> None:
    y, x = candidates()
    layer = BestOfLayer(outside(), cost, 3)
    y.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(y, x).sum(), y)
    moved = gradient.unflatten(1, (3, 2)).abs().sum(2) > 0
    assert (moved.sum(1) == 1).all()
    assert torch.autograd.gradcheck(lambda y: layer(y, x[:3]), y[:3].detach().requires_grad_())


def test_failures_are_those_of_what_is_returned() -> None:
    layer = BestOfLayer(sn.Box(0.0, 1.0), lambda y, x: y.sum(1), 2, on_failure="raise")
    y = torch.tensor([[torch.nan, 2.0]], **PLAIN)
    torch.testing.assert_close(layer(y), torch.ones(1, 1, **PLAIN))
    with pytest.raises(sn.RepairError):
        layer(torch.full((1, 2), torch.nan, **PLAIN))


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`count`"):
        BestOfLayer(outside(), cost, 0)
    with pytest.raises(ValueError, match="`record`"):
        BestOfLayer(outside(), cost, 2, record=5)
    with pytest.raises(ValueError, match=r"`y` must have shape \(B, 2 n\)"):
        BestOfLayer(outside(), cost, 2)(torch.zeros(4, 3), torch.zeros(4, 2))
