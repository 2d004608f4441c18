"""On curved rows all predictions are pulled towards the set, by a share that grows; on others stuck outputs alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.training.distributed import Group
from snarenet.training.step import Stepper


class Near(sn.Problem):
    """The point of a set that is nearest to x."""

    def __init__(self, rows: sn.Constraints) -> None:
        super().__init__()
        self.size, self.constraints = 2, rows & sn.Box(-3.0, 3.0)
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("inputs", torch.randn(60, 2, generator=draw, dtype=torch.float64))

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return (y - x).square().sum(1)


RING = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), 1, equals=1.0)
LINE = sn.Linear(torch.ones(1, 2, dtype=torch.float64), equals=1.0)


@pytest.mark.parametrize("curved", [True, False])
def test_the_pull_grows(curved: bool) -> None:
    family, config = Near(RING if curved else LINE), sn.TrainConfig(width=8)
    stepper = Stepper(config.build(family), family, config, Group())
    extra = []
    for done in (0.0, 0.5, 1.0):
        stepper.totals.clear()
        stepper(family.inputs[:30], 0.0, False, 0.0, done)
        line = stepper.totals.line(Group())
        extra.append(line["loss"] - line["objective"])
    assert extra[0] == pytest.approx(0.0, abs=1e-12)
    assert extra[2] == pytest.approx(2 * extra[1], rel=1e-5)
    assert (extra[2] > 1e-4) == curved
