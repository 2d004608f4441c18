"""Coherent forecasts in a loop of one's own: 25 series of a hierarchy, none negative, by an LSTM after 800 steps.

Bottom-up sums of non-negative leaves are exact and free: the method to beat. Without units and the pull on stuck
outputs, most outputs of a repaired network end at zero, with no gradient.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import snarenet as sn

LEAVES, HISTORY, TRAIN = 20, 24, 500
SUMS = torch.cat([torch.ones(1, LEAVES), torch.eye(4).repeat_interleave(5, 1), torch.eye(LEAVES)]).double()


def series(times: int = 700) -> Tensor:
    """(times, 25) the total, four groups of five leaves, and the leaves, with trend, season and noise."""
    draw = torch.Generator().manual_seed(0)

    def random(kind, *shape: int) -> Tensor:
        return kind(*shape, generator=draw, dtype=torch.float64)

    level, trend, size = 3 * random(torch.rand, LEAVES), 0.002 * random(torch.randn, LEAVES), random(torch.rand, LEAVES)
    t, phase = torch.arange(times, dtype=torch.float64).unsqueeze(1), random(torch.rand, LEAVES)
    season = 2 * size * torch.sin(2 * math.pi * (t / 12 + phase))
    leaves = level + trend * t + season + 0.3 * random(torch.randn, times, LEAVES)
    return leaves.clamp(min=0) @ SUMS.T


class Forecaster(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.memory, self.head = nn.LSTM(25, 32, batch_first=True), nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0][:, -1])


def trained(repaired: bool, units: bool) -> float:
    """The mean squared error on the last series, after training on the first."""
    y = series()
    x = y.unfold(0, HISTORY, 1)[:-1].mT
    y = y[HISTORY:]
    torch.manual_seed(0)
    net = Forecaster(25 if repaired else LEAVES).double()
    coherent = sn.Box(0.0, None) & sn.Linear(torch.cat([torch.eye(5).double(), -SUMS[:5]], 1), equals=0.0)
    layer = sn.SnareLayer(coherent, tol=1e-6)
    model = sn.ConstrainedModel(net, layer, sn.Units.of(x[:TRAIN], y[:TRAIN]) if units else None)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(800):
        some = torch.randint(0, TRAIN, (32,))
        if repaired:
            solution = model.solve(x[some])
            loss = (solution.value - y[some]).square().mean()
            loss = loss + layer.proximity(solution, loss)
        else:
            loss = (nn.functional.softplus(net(x[some])) @ SUMS.T - y[some]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        found = model(x[TRAIN:]) if repaired else nn.functional.softplus(net(x[TRAIN:])) @ SUMS.T
    return (found - y[TRAIN:]).square().mean().item()


@pytest.mark.slow
def test_as_good_as_bottom_up() -> None:
    assert trained(repaired=True, units=True) <= trained(repaired=False, units=False)


@pytest.mark.slow
def test_no_output_dies_without_units() -> None:
    """Sums as large as these take long to learn in units of 1, but no output is lost on the way."""
    assert trained(repaired=True, units=False) < 3
