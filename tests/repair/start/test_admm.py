"""ADMM's way back, and what becomes of samples for which so few iterations are not enough."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.memo import Memo
from snarenet.repair.options import Options
from snarenet.repair.start import admm
from snarenet.repair.start.nearest import plan, seek
from snarenet.testing import assert_equal, draw

TIMES = 30
WEIGHTS = 0.5 + draw(TIMES, seed=3).abs()


def cart() -> sn.Constraints:
    """Forces on a cart that keep its speed and its position within limits: rows that are whole and nearly dependent."""
    dt = 5.0 / TIMES
    speed = dt * torch.ones(TIMES, TIMES, dtype=torch.float64).tril()
    times = dt * torch.arange(1, TIMES + 1, dtype=torch.float64)

    def faster(x: Tensor) -> Tensor:
        return x[:, 1:].expand(-1, TIMES)

    def farther(x: Tensor) -> Tensor:
        return x[:, :1] + x[:, 1:] * times

    return (
        sn.Linear(speed, lambda x: -1 - faster(x), lambda x: 1 - faster(x))
        & sn.Linear(speed @ speed, lambda x: -1 - farther(x), lambda x: 1 - farther(x))
        & sn.Box(-2.0, 2.0)
    )


def forces(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return draw(count, TIMES, seed=seed), 0.2 * draw(count, 2, seed=seed + 1)


def length(move: Tensor, weights: Tensor | None) -> Tensor:
    return (move.square() if weights is None else weights * move.square()).sum(1).sqrt()


@pytest.mark.parametrize("iterations", [1, 7, 40])
def test_the_way_back_is_that_of_the_iterations(iterations: int) -> None:
    A = draw(12, 9, seed=1)
    K = torch.linalg.inv(torch.eye(12, dtype=torch.float64) + 3 * A @ A.T)
    image, lower, v = 2 * draw(8, 12, seed=2), -draw(8, 12, seed=3).abs(), draw(8, 12, seed=4)
    given = image, torch.where(lower < -1, -torch.inf, lower), draw(8, 12, seed=5).abs()
    found = []
    for iterate in (admm.multipliers, admm._iterate):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        s = iterate(*leaves, K, iterations)
        found.append((s, *torch.autograd.grad((v * s).sum(), leaves)))
    for one, two in zip(*found, strict=True):
        assert_equal(one, two, 1e-12)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weights"])
class TestSettled:
    def test_to_a_thousandth(self, weights: Tensor | None) -> None:
        """Those that count as settled are as far as the nearest point; others come back as they were."""
        constraints, (y, x) = cart(), forces(200)
        instance = constraints.at(y, x)
        outside = (constraints.violation(y, x) > 0).nonzero().squeeze(1)
        instance, y = instance.select(outside), y[outside]
        best = length(seek(instance, y, weights, 0.0) - y, weights)
        several = []
        for iterations in (35, 200, 1000):
            found = admm.approach(Memo(), instance, y, iterations, weights, admm.multipliers, strict=True)
            settled = (found != y).any(1)
            ratio = length(found - y, weights)[settled] / best[settled]
            assert_equal(ratio, torch.ones_like(ratio), 1e-3)
            several.append(int(settled.sum()))
        assert 0 < several[0] < several[1] < several[2] == len(y)

    def test_by_default_all_are_near(self, weights: Tensor | None) -> None:
        constraints, (y, x) = cart(), forces(100)
        found = sn.repair(constraints, y, x, weights=weights)
        few = sn.repair(constraints, y, x, weights=weights, start=sn.Nearest(35))
        assert found.converged.all()
        best = length(seek(constraints.at(y, x), y, weights, 0.0) - y, weights)
        assert (length(found.value - y, weights) <= 1.0015 * best + 1e-9).all()
        assert (length(few.value - y, weights) > 2 * best).double().mean() > 0.1

    def test_gradients(self, weights: Tensor | None) -> None:
        constraints, (y, x) = cart(), forces(20)
        y.requires_grad_(), x.requires_grad_()
        v, d, e, h = draw(20, TIMES, seed=5), draw(20, TIMES, seed=6), draw(20, 2, seed=7), 1e-6
        value = sn.repair(constraints, y, x, weights=weights, tol=1e-12).value
        slopes = torch.autograd.grad((v * value).sum(), (y, x))
        slope = sum((g * move).sum(1) for g, move in zip(slopes, (d, e), strict=True))
        there, back = (
            sn.repair(constraints, (y + s * h * d).detach(), (x + s * h * e).detach(), weights=weights, tol=1e-12)
            for s in (1, -1)
        )
        difference = (v * (there.value - back.value)).sum(1) / (2 * h)
        near = (slope - difference).abs() <= 1e-4 * (1 + difference.abs())
        assert near.double().mean() >= 0.9  # where a row comes or goes there is no derivative


def test_an_asked_number_of_iterations_is_what_it_is() -> None:
    constraints, (y, x) = cart(), forces(4)
    instance = constraints.at(y, x)
    assert plan(Memo(), Options(), instance).thorough
    assert plan(Memo(), Options(start=sn.Nearest()), instance).thorough
    assert not plan(Memo(), Options(start=sn.Nearest(35)), instance).thorough
    assert not plan(Memo(), Options(), instance, recorded=True).thorough
    assert not plan(Memo(), Options(dtype=torch.float32, tol=1e-4), instance).thorough


def test_an_empty_set_has_its_least_violation() -> None:
    """Its samples never settle, and are none the worse for it; the others do not notice."""
    A = draw(6, 5, seed=1)
    bound = torch.tensor([[1.0], [-9.0]], dtype=torch.float64)  # A y <= b and -A y <= b
    both = sn.Linear(A, upper=lambda x: x.expand(-1, 6)) & sn.Linear(-A, upper=lambda x: x.expand(-1, 6))
    y, x = draw(10, 5, seed=2, scale=3), bound[torch.arange(10) % 2]
    found, alone = sn.repair(both, y, x), sn.repair(both, y[::2], x[::2])
    assert found.converged[::2].all()
    assert_equal(found.value[::2], alone.value, 1e-12)
    assert [sn.Status(int(k)) for k in found.status[1::2]] == [sn.Status.STALLED] * 5
    assert_equal(found.violation[1::2], torch.full_like(found.violation[1::2], 9.0), 1e-6)  # in the middle
