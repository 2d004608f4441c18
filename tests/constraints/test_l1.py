"""`L1Ball`: projections, and starts from which the sum itself is not repaired."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.testing import draw

N = 60
HELD = torch.softmax(draw(N), 0)
LOADINGS, VARIANCES = 0.3 * draw(N, 4, seed=1), 0.05 + 0.1 * draw(N, seed=2).abs()


def starts() -> dict[str, Tensor]:
    noise = draw(8, N, seed=3)
    trade = torch.nn.functional.one_hot(torch.arange(8) * 7, N)
    return {
        "near": HELD + noise / N,
        "far": HELD + 100 * noise,
        "one trade": HELD + trade + 1e-6 * noise,
        "another portfolio": torch.softmax(3 * noise, 1),
    }


@pytest.mark.parametrize("radius", [0.2, 1e-3, 0.0])
@pytest.mark.parametrize("beside", ["nothing", "simplex", "risk"])
@pytest.mark.parametrize("start", starts())
def test_every_start_is_repaired(start: str, beside: str, radius: float) -> None:
    constraints = ball = sn.L1Ball(HELD, radius)
    if beside != "nothing":
        constraints = ball & sn.Linear(torch.ones(1, N), equals=1.0) & sn.Box(0.0, 1.0)
    if beside == "risk":
        risk = float((HELD @ LOADINGS).square().sum() + HELD.square() @ VARIANCES)
        constraints = constraints & sn.Quadratic(factor=LOADINGS, diagonal=VARIANCES, upper=1.01 * risk)
    y = starts()[start]
    solution = sn.repair(constraints, y)
    assert solution.converged.all(), solution.describe()
    assert ((solution.value - HELD).abs().sum(1) <= radius + 1e-8).all()


def test_alone_it_is_the_projection() -> None:
    """Its condition: what moved is a multiple of a subgradient of the sum, on the boundary."""
    y, radius = HELD + draw(8, N, seed=3), 0.7
    d = sn.repair(sn.L1Ball(HELD, radius), y, tol=1e-12).value - HELD
    moved = y - HELD - d
    level = moved.abs().amax(1, keepdim=True)
    kept = d.abs() > 1e-9
    torch.testing.assert_close(d.abs().sum(1), torch.full((8,), radius, dtype=y.dtype), rtol=0, atol=1e-11)
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(
        (moved - level * d.sign())[kept], torch.zeros(int(kept.sum())).double(), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("radius", [0.2, 1e-3, 0.0])
@pytest.mark.parametrize("start", starts())
def test_every_start_is_repaired_to_a_small_variation(start: str, radius: float) -> None:
    """Also without the projection: what an export does, and who asks for the steps alone."""
    once = torch.eye(N, dtype=torch.float64).diff(dim=0)
    y, ball = starts()[start], sn.L1Ball(0.0, radius, once)
    near = sn.repair(ball, y)
    for solution in (near, sn.repair(ball, y, start=None, rescue=True)):
        assert solution.converged.all(), solution.describe()
        assert (solution.value.diff(dim=1).abs().sum(1) <= radius + 1e-8).all()
        assert ((near.value - y).norm(dim=1) <= (solution.value - y).norm(dim=1) * (1 + 1e-5)).all()


def test_rows_with_a_matrix_are_slack_inside_and_at_least_the_excess_outside() -> None:
    matrix = draw(7, 5, seed=4)
    ball, y = sn.L1Ball(0.3, 4.0, matrix), torch.cat([0.1 * draw(20, 5), 2 * draw(20, 5, seed=1)])
    value, excess = ball.value(y), (y @ matrix.T - 0.3).abs().sum(1, keepdim=True) - 4
    assert ball.rows == 7
    assert 5 < int((excess <= 0).sum()) < 35
    assert torch.equal(value <= 0, (excess <= 0).expand_as(value))
    torch.testing.assert_close(value[:20].amax(1), excess[:20, 0])
    assert (value[20:].amax(1) >= excess[20:, 0]).all()


def test_the_row_is_slack_inside_and_at_least_the_excess_outside() -> None:
    ball, y = sn.L1Ball(0.0, 1.0), torch.cat([0.01 * draw(20, 30), draw(20, 30, seed=1)])
    value, excess = ball.value(y), y.abs().sum(1, keepdim=True) - 1
    assert torch.equal(value <= 0, excess <= 0)
    torch.testing.assert_close(value[:20], excess[:20])
    assert (value[20:] >= excess[20:]).all()
    nearly = y[20:] / y[20:].abs().sum(1, keepdim=True)
    torch.testing.assert_close(ball.value(nearly), torch.zeros(20, 1).double(), rtol=0, atol=1e-14)
