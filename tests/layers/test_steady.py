"""A gradient leaves a layer in training mode at most three times as long as it came; a shorter one as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers.steady import LONGEST
from snarenet.testing import assert_equal, draw

CIRCLE = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), 1, lower=1.0)  # its outside
Y = torch.tensor([[1e-3, 0.0], [0.0, -0.02], [0.9, 0.1], [3.0, 4.0]], dtype=torch.float64)
DOWN = torch.tensor([0.3, -1.0], dtype=torch.float64)


def gradient(layer: sn.SnareLayer, y: Tensor = Y, down: Tensor = DOWN) -> Tensor:
    y = y.clone().requires_grad_()
    solution = layer.solve(y)
    assert solution.raw.shape == solution.value.shape
    (found,) = torch.autograd.grad((solution.value * down).sum(), y)
    return found


def exact(layer: sn.SnareLayer, y: Tensor = Y) -> Tensor:
    return gradient(layer.eval(), y)


@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 9.0], dtype=torch.float64)])
def test_long_ones_are_shortened(weights: Tensor | None) -> None:
    layer = sn.SnareLayer(CIRCLE, start=None, weights=weights)
    found, true = gradient(layer), exact(layer)
    metric = torch.ones(2, dtype=torch.float64) if weights is None else weights
    length, came = ((g.square() / metric).sum(-1).sqrt() for g in (true, DOWN))
    long = length > LONGEST * came
    assert long.tolist() == [True, True, False, False]
    assert torch.equal(found[~long], true[~long])
    expected = true * (LONGEST * came / length).unsqueeze(1)
    assert_equal(found[long], expected[long], 1e-14)


def test_who_wants_them_long() -> None:
    layer = sn.SnareLayer(CIRCLE, start=None)
    layer.limits_gradients = False
    assert torch.equal(gradient(layer.train()), exact(layer))


def test_the_pull_is_not_part_of_it() -> None:
    """What a loss says of the predictions themselves is left alone."""
    layer, y = sn.SnareLayer(CIRCLE, start=None), Y.clone().requires_grad_()
    solution = layer.solve(y)
    assert solution.raw is y
    (solution.value * DOWN + 1e3 * solution.raw).sum().backward()
    assert y.grad is not None
    assert_equal(y.grad, gradient(layer) + 1e3, 1e-12)


def test_a_loss_of_predictions_alone() -> None:
    layer, y = sn.SnareLayer(CIRCLE, start=None), Y.clone().requires_grad_()
    solution = layer.solve(y)
    (found,) = torch.autograd.grad(solution.raw.sum() + 0 * solution.value.detach().sum(), y)
    assert torch.equal(found, torch.ones_like(Y))


def test_with_single_precision_and_several_backward_passes() -> None:
    layer, y = sn.SnareLayer(CIRCLE, start=None, tol=1e-5), Y.float().requires_grad_()
    value = layer(y)
    for factor in (1.0, 5.0):
        (found,) = torch.autograd.grad((factor * value * DOWN).sum(), y, retain_graph=True)
        assert found.dtype == torch.float32
        assert_equal(found.double(), factor * gradient(layer), 1e-3)


def test_of_several_candidates_the_chosen_one() -> None:
    layer = sn.BestOfLayer(CIRCLE, lambda y, x: y @ DOWN, 2, start=None)
    y = torch.tensor([[1e-3, 0.0, 0.0, 1e-3]], dtype=torch.float64, requires_grad=True)  # the second leads down
    (found,) = torch.autograd.grad((layer(y) @ DOWN).sum(), y)
    assert found[0, :2].abs().sum() == 0
    assert found.norm() == pytest.approx(LONGEST * DOWN.norm().item())


@pytest.mark.parametrize(("proximity", "limits"), [("auto", True), (0.0, False)])
def test_what_a_config_builds(proximity: Any, limits: bool) -> None:
    """By itself it does; with a loss that is asked for in numbers, the paper's for instance, nothing is changed."""
    problem = sn.problems.load("nclp", size=8, inequalities=3, equalities=2, instances=60)
    layer = sn.TrainConfig(width=8, proximity=proximity).build(problem).layer
    assert isinstance(layer, sn.SnareLayer)
    assert layer.limits_gradients == limits
    paper = sn.TrainConfig.recipe("paper", "nclp", width=8).build(problem).layer
    assert isinstance(paper, sn.SnareLayer)
    assert not paper.limits_gradients


def test_one_wild_sample_does_not_drown_the_others() -> None:
    """Of a batch, the mean gradient leads down for the others, as it does without the wild one."""
    layer, others = sn.SnareLayer(CIRCLE, start=None), 2 * draw(50, 2, seed=3)
    wild = torch.tensor([[0.0, 1e-7]], dtype=torch.float64)
    together, alone = gradient(layer, torch.cat([wild, others])).sum(0), gradient(layer, others).sum(0)
    assert torch.cosine_similarity(together, alone, 0) > 0.95
    drowned = exact(layer, torch.cat([wild, others])).sum(0)
    assert torch.cosine_similarity(drowned, alone, 0) < 0.5
