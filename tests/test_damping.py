"""Damping rules."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import snarenet as sn
from snarenet.damping import as_damping
from snarenet.testing import draw


def test_schedules() -> None:
    like = torch.zeros(3, 2)
    annealed = sn.Annealed(8.0, 0.5, 1.0)
    assert [annealed.first(like)] + [annealed.following(k, 0.0, None) for k in range(5)] == [8, 4, 2, 1, 1, 1]
    constant = sn.Constant(0.01)
    assert constant.first(like) == constant.following(3, 0.0, None) == 0.01
    assert not constant.relative
    assert annealed.relative


def test_far_away_the_damping_stays() -> None:
    """At its own pace: a thousandth of what a start at that distance would have, whatever the gain."""
    rule, far = sn.Annealed(), torch.tensor([1.0, 0.1, 1e-4], dtype=torch.float64)
    levels = rule.following(9, torch.full_like(far, 1e-11), torch.ones_like(far), far)
    least = 1e-3 * rule.first(far, far)
    assert levels[:2].tolist() == least[:2].tolist()
    assert (levels[2] < 1e-10) & (levels[2] >= least[2])
    assert 0.6 * 1e-2 < least[0] <= 1e-2
    assert 0.6 * 1e-4 < least[1] <= 1e-4


def test_adaptive_follows_the_gain() -> None:
    rule = sn.Adaptive(start=1.0, up=4.0, down=0.2, floor=0.1, ceiling=10.0)
    level = rule.first(torch.zeros(5, 2, dtype=torch.float64))
    gain = torch.tensor([0.9, 0.5, 0.1, -1.0, math.nan], dtype=torch.float64)
    level = rule.following(0, level, gain)
    assert level.tolist() == [0.2, 1.0, 4.0, 4.0, 4.0]
    assert rule.following(1, level, gain).tolist() == [0.1, 1.0, 10.0, 10.0, 10.0]


def test_a_number_is_a_constant() -> None:
    assert as_damping(0.5) == sn.Constant(0.5)
    assert as_damping(sn.Annealed()) == sn.Annealed()


@pytest.mark.parametrize(
    "build",
    [
        lambda: sn.Constant(-1.0),
        lambda: sn.Constant(math.nan),
        lambda: sn.Annealed(start=math.inf),
        lambda: sn.Annealed(ratio=1.5),
        lambda: sn.Adaptive(up=0.5),
        lambda: sn.Adaptive(down=2.0),
        lambda: as_damping(-0.1),
    ],
)
def test_bad_values(build) -> None:
    with pytest.raises(ValueError, match=r"`\w+` must be|expected `down`"):
        build()


def test_adaptive_never_raises_the_violation() -> None:
    """Rejection: whatever the number of steps, the scaled violation is not above that of fewer steps."""
    H, G = draw(4, 6, seed=1, scale=0.5), draw(4, 6, seed=2)
    constraints, y = sn.Quadratic(H, G, upper=0.1), draw(30, 6, seed=3, scale=4)
    scale = constraints.jacobian(y).square().sum(-1)
    merits = []
    for steps in range(0, 15):
        value = sn.repair(constraints, y, damping=sn.Adaptive(), rows="active", max_steps=steps, tol=1e-12).value
        merits.append((constraints.residual(value).square() / scale).sum(1))
    for earlier, later in pairwise(merits):
        assert (later <= earlier * (1 + 1e-12) + 1e-25).all()


def test_each_sample_has_its_own_adaptive_damping() -> None:
    """A sample's path does not depend on a hard neighbour."""
    constraints = sn.Quadratic(draw(3, 5, seed=1), draw(3, 5, seed=2), upper=0.1)
    y = draw(2, 5, seed=3) * torch.tensor([[1.0], [5e4]])
    both = sn.repair(constraints, y, damping=sn.Adaptive())
    alone = sn.repair(constraints, y[:1], damping=sn.Adaptive())
    torch.testing.assert_close(both.value[:1], alone.value, rtol=0, atol=1e-12)
    assert both.steps[0] == alone.steps[0] != both.steps[1]
