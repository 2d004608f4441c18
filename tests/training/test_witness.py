"""What a failed sample does to the gradients of a training step: nothing, where it is no number."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from snarenet.solution import Solution, Status
from snarenet.training.witness import Witness


def test_a_sample_that_ran_away_teaches_nothing() -> None:
    weight = torch.ones(1, requires_grad=True)

    def solve(raw: Tensor, x: Tensor, relax: None) -> Solution:
        status = torch.where(x[:, 0] < 0, int(Status.NONFINITE), int(Status.CONVERGED))
        value = torch.where(x < 0, torch.nan, 1.0) * raw
        zero = torch.zeros(len(x))
        return Solution(value, raw, status, zero, zero, zero)

    model = SimpleNamespace(raw=lambda x: weight * x, layer=SimpleNamespace(solve=solve))
    witness = Witness(model)  # pyright: ignore
    x = torch.tensor([[2.0], [-1.0], [3.0]])
    found = witness.solve(x)
    loss = torch.where(found.converged, found.value.square().sum(1), 0.0).sum()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 2 * (4 + 9)
    assert witness.only is found
