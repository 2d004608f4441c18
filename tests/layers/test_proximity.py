"""The pull on stuck outputs: what it is, that no scale matters to it, and that others feel nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers.proximity import REACH, proximity

WEIGHTS = torch.tensor([1.0, 4.0, 0.5], dtype=torch.float64)


def batch(generator: torch.Generator, size: int = 6, *more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of which the first is stuck, their predictions and a loss; with `more` predictions than these."""
    raw = torch.randn(size, 3, generator=generator, dtype=torch.float64) - torch.tensor([9.0, 0.0, 0.0])
    raw = torch.cat([raw, *more]).requires_grad_()
    value = torch.stack([raw[:, 0].clamp(min=0.5), raw[:, 1] + 0.1, 2 * raw[:, 2]], 1)
    return value, raw, (value - 3).square().sum(1)


def test_by_hand(rng: torch.Generator) -> None:
    value, raw, loss = batch(rng)
    slope, d = 2 * (value - 3).detach(), (value - raw).detach()
    deviation = value.detach().std(0, correction=0)
    steep = (slope.square() / WEIGHTS).sum(1).mean().sqrt()
    typical = ((d.square() * WEIGHTS).sum(1).mean() + (deviation.square() * WEIGHTS).sum()).sqrt()
    excess = (d.abs() - REACH * deviation).clamp(min=0)
    expected = 0.3 * steep / typical * (excess.square() * WEIGHTS).sum(1)
    torch.testing.assert_close(proximity(value, raw, loss, WEIGHTS, 0.3), expected)
    assert (expected > 0).all()


def test_only_a_stuck_output_feels_it(rng: torch.Generator) -> None:
    value, raw, loss = batch(rng)
    (pull,) = torch.autograd.grad(proximity(value, raw, loss).sum(), raw)
    assert (pull[:, 0] < 0).all()  # a step against it increases the prediction
    assert torch.equal(pull[:, 1:], torch.zeros_like(pull[:, 1:]))


@pytest.mark.parametrize("scales", [(1e6, 1.0, 1.0), (1.0, 1e-4, 1.0), (1.0, 1.0, 1e5)], ids=["loss", "y", "weights"])
def test_no_scale_matters(rng: torch.Generator, scales: tuple[float, float, float]) -> None:
    value, raw, loss = batch(rng)
    plain = proximity(value, raw, loss, WEIGHTS)
    by_loss, by_y, by_weights = scales
    longer = by_y * value
    again = by_loss * (longer / by_y - 3).square().sum(1)
    torch.testing.assert_close(proximity(longer, by_y * raw, again, by_weights * WEIGHTS), by_loss * plain)


def test_seeds_and_processes(rng: torch.Generator) -> None:
    parts = [batch(rng) for _ in range(2)]
    value, raw, loss = batch(rng, 0, *(part[1].detach() for part in parts))
    each = torch.cat([proximity(*part, WEIGHTS) for part in parts])
    torch.testing.assert_close(proximity(value, raw, loss, WEIGHTS, seeds=2), each)
    whole = proximity(value, raw, loss, WEIGHTS)
    sums: list[Tensor] = []
    for part in parts:
        proximity(*part, WEIGHTS, total=lambda own: sums.append(own) or own)
    halves = [proximity(*part, WEIGHTS, total=lambda _: sums[0] + sums[1]) for part in parts]
    torch.testing.assert_close(torch.cat(halves), whole)


def test_samples_that_are_no_numbers_do_not_count(rng: torch.Generator) -> None:
    plain = batch(rng)
    spoilt = batch(rng, 0, plain[1].detach(), torch.full((1, 3), torch.nan, dtype=torch.float64))
    found = proximity(*spoilt, WEIGHTS)
    assert found[-1] == 0
    torch.testing.assert_close(found[:-1], proximity(*plain, WEIGHTS))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_an_empty_share_of_a_batch(rng: torch.Generator, weights: Tensor | None) -> None:
    assert proximity(*batch(rng, 0), weights).shape == (0,)


class TestLayer:
    def solved(self, weights: Tensor | None = None) -> tuple[sn.SnareLayer, sn.Solution, Tensor]:
        raw = torch.tensor([[-3.0, 1.0, 0.2], [-4.0, 2.0, 0.3]], dtype=torch.float64, requires_grad=True)
        layer = sn.SnareLayer(sn.Box(0.0, 9.0), weights=weights)
        return layer, layer.solve(raw), raw

    @pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
    def test_shape_and_gradient(self, weights: Tensor | None) -> None:
        layer, solution, raw = self.solved(weights)
        loss = (solution.value - 5).square().sum(1)
        term = layer.proximity(solution, loss)
        torch.testing.assert_close(term, proximity(solution.value, raw, loss, weights))
        torch.testing.assert_close(layer.proximity(solution, loss.sum()), term.sum())
        torch.testing.assert_close(layer.proximity(solution, loss.mean()), term.mean())
        (loss.mean() + layer.proximity(solution, loss.mean())).backward()
        assert raw.grad is not None
        assert (raw.grad[:, 0] < 0).all()

    def test_outputs_come_back(self) -> None:
        """A loss without a gradient leaves them where they are; with the term they reach the optimum."""
        layer, ended = sn.SnareLayer(sn.Box(0.0, 9.0)), []
        for pulled in (False, True):
            raw = torch.tensor([[-3.0, 1.0], [-3.0, 2.0]], dtype=torch.float64, requires_grad=True)
            optimizer = torch.optim.Adam([raw], lr=0.05)
            for _ in range(400):
                solution = layer.solve(raw)
                loss = (solution.value - 5).square().mean()
                optimizer.zero_grad()
                (loss + layer.proximity(solution, loss) if pulled else loss).backward()
                optimizer.step()
            ended.append(layer(raw).detach())
        torch.testing.assert_close(ended[0][:, 0], torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-7)
        torch.testing.assert_close(ended[1], torch.full((2, 2), 5.0, dtype=torch.float64), rtol=0, atol=0.3)

    def test_wrong_losses(self) -> None:
        layer, solution, raw = self.solved()
        with pytest.raises(ValueError, match=r"`loss` must be a number or have shape \(2,\), but got shape \(2, 3\)"):
            layer.proximity(solution, solution.value)
        with pytest.raises(ValueError, match=r"`loss` must be computed from `solution\.value`"):
            layer.proximity(solution, raw.sum())


def test_without_a_reach_every_distance_counts(rng: torch.Generator) -> None:
    """Like its square where it is small, and with no more than the share of the loss's gradient where it is large."""
    value, raw, _ = batch(rng)
    near = value.detach() + 1e-4 * (raw - value).detach()
    value = value.detach().requires_grad_()
    near.requires_grad_()
    term = proximity(value, near, (value - 3).square().sum(1), WEIGHTS, reach=0.0)
    squares = ((value - near).square() * WEIGHTS).sum(1)
    slope = 2 * (value.detach() - 3)
    steep = (slope.square() / WEIGHTS).sum(1).mean().sqrt()
    typical = (squares.mean() + (value.detach().var(0, correction=0) * WEIGHTS).sum()).sqrt()
    torch.testing.assert_close(term, steep / typical * squares, rtol=1e-4, atol=0)
    far = near.detach() - 1e3
    far[1:] = near[1:].detach()
    far.requires_grad_()
    term = proximity(value, far, (value - 3).square().sum(1), WEIGHTS, reach=0.0)
    (pull,) = torch.autograd.grad(term.sum(), far)
    assert (pull.square() / WEIGHTS).sum(1).sqrt().max() <= 2 * steep


def test_a_prediction_in_the_set_feels_nothing() -> None:
    raw = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    value = raw * 1.0
    term = proximity(value, raw, value.square().sum(1), WEIGHTS, reach=0.0)
    (pull,) = torch.autograd.grad(term.sum(), raw)
    assert torch.equal(pull, torch.zeros_like(pull))
