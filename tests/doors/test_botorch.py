"""Feasible starts for BoTorch's `optimize_acqf`, on sets that random points almost never meet."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import snarenet as sn

pytest.importorskip("botorch", reason="the extra botorch is not installed")

from botorch.acquisition import AcquisitionFunction, qUpperConfidenceBound
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize
from botorch.optim import optimize_acqf
from botorch.optim.initializers import gen_batch_initial_conditions
from botorch.optim.parameter_constraints import evaluate_feasibility
from botorch.utils.transforms import t_batch_mode_transform

from snarenet.doors.botorch import feasible_set, feasible_starts

BOUNDS = torch.tensor([[-2.0, -2.0, -2.0], [2.0, 2.0, 2.0]], dtype=torch.float64)


def wave(x: Tensor) -> Tensor:
    return x[1] - torch.sin(3 * x[0]) * torch.cos(x[2])


# a sheet 0.002 thick in a cube of edge 4
SHEET = [(lambda x: 1e-3 - wave(x), True), (lambda x: 1e-3 + wave(x), True)]


class Near(AcquisitionFunction):
    """Minus the squared distance to a point, summed over q; a point of the sheet is its optimum on the sheet."""

    def __init__(self, point: Tensor) -> None:
        super().__init__(model=None)
        self.point = point

    @t_batch_mode_transform()
    def forward(self, X: Tensor) -> Tensor:
        return -(X - self.point).square().sum((-1, -2))


@pytest.fixture
def near() -> Near:
    return Near(torch.tensor([0.5, torch.tensor(1.5).sin().item(), 0.0], dtype=torch.float64))


def feasible(X: Tensor, functions: list, **rest) -> Tensor:
    return evaluate_feasibility(X, nonlinear_inequality_constraints=functions, **rest)


def test_optimize_acqf_starts_and_ends_on_a_thin_sheet(near: Near) -> None:
    random = torch.rand(2000, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4 - 2
    assert feasible(random, SHEET).sum() <= 5  # of 2,000
    arguments = {"q": 1, "num_restarts": 4, "raw_samples": 32, "nonlinear_inequality_constraints": SHEET}
    with pytest.raises(ValueError, match="must satisfy the non-linear inequality"):
        optimize_acqf(near, BOUNDS, **arguments, ic_generator=gen_batch_initial_conditions, options={"seed": 0})
    starts = partial(feasible_starts, nonlinear_inequality_constraints=SHEET)
    candidate, value = optimize_acqf(near, BOUNDS, **arguments, ic_generator=starts, options={"seed": 0})
    assert feasible(candidate, SHEET).all()
    assert value > -1e-4
    torch.testing.assert_close(candidate[0], near.point, rtol=0, atol=1e-2)


def test_a_gaussian_process_and_batches_of_two() -> None:
    """The points lie on the sheet, at least 1 apart: an inter-point constraint. Where SLSQP stops outside, a repair."""
    torch.manual_seed(0)
    X = torch.rand(8, 3, dtype=torch.float64) * 4 - 2
    model = SingleTaskGP(X, X.sin().sum(1, keepdim=True), input_transform=Normalize(3, bounds=BOUNDS))
    acquisition = qUpperConfidenceBound(model, beta=2.0)
    rows = [*SHEET, (lambda x: (x[0] - x[1]).square().sum() - 1, False)]
    starts = partial(feasible_starts, nonlinear_inequality_constraints=rows)
    allowed = feasible_set(BOUNDS, 2, rows)
    candidate, _ = optimize_acqf(
        acquisition, BOUNDS, q=2, num_restarts=2, raw_samples=16, nonlinear_inequality_constraints=rows,
        ic_generator=starts, options={"seed": 0, "maxiter": 20},
        post_processing_func=lambda X: sn.repair(allowed, X.flatten(1)).value.view_as(X),
    )  # fmt: skip
    assert candidate.shape == (2, 3)
    assert feasible(candidate.unsqueeze(0), rows).all()


def test_starts_obey_everything_and_are_weighed(near: Near) -> None:
    linear = [(torch.tensor([0, 2]), torch.ones(2, dtype=torch.float64), -0.5)]
    equal = [(torch.tensor([[0, 0], [1, 0]]), torch.tensor([1.0, -1.0], dtype=torch.float64), 0.25)]
    X = feasible_starts(
        near, BOUNDS, 2, 5, 64, {2: 0.75}, {"seed": 3, "topn": True}, linear, equal,
        nonlinear_inequality_constraints=SHEET,
    )  # fmt: skip
    assert X.shape == (5, 2, 3)
    assert feasible(X, SHEET, inequality_constraints=linear, equality_constraints=equal, tolerance=1e-8).all()
    assert (X[..., 2] - 0.75).abs().max() <= 1e-8
    assert (X[:, 0, 0] - X[:, 1, 0] - 0.25).abs().max() <= 1e-8
    more = feasible_starts(
        near, BOUNDS, 2, 64, 64, {2: 0.75}, {"seed": 3}, linear, equal, nonlinear_inequality_constraints=SHEET
    )
    assert near(X).min() >= near(more).sort(descending=True).values[4]  # the five best


def test_nonlinear_equalities_by_a_repair_afterwards(near: Near) -> None:
    """BoTorch has none: its optimiser leaves the surface, `post_processing_func` comes back to it."""
    surface = feasible_set(BOUNDS, nonlinear_equality_constraints=[(wave, True)])
    starts = partial(feasible_starts, nonlinear_equality_constraints=[(wave, True)])
    X = starts(near, BOUNDS, 1, 4, 16)
    assert torch.vmap(wave)(X[:, 0]).abs().max() <= 1e-8
    candidate, _ = optimize_acqf(
        near, BOUNDS, q=1, num_restarts=4, raw_samples=16, ic_generator=starts,
        post_processing_func=lambda X: sn.repair(surface, X.flatten(1)).value.view_as(X),
    )  # fmt: skip
    assert wave(candidate[0]).abs() <= 1e-8
    torch.testing.assert_close(candidate[0], near.point, rtol=0, atol=1e-4)


def test_an_empty_set_is_named(near: Near) -> None:
    rows = [(lambda x: -1 - x.square().sum(), True)]
    with pytest.raises(RuntimeError, match=r"of 8 Sobol points 0 could be moved.* but 2 starts are needed"):
        feasible_starts(near, BOUNDS, 1, 2, 8, nonlinear_inequality_constraints=rows)


def test_float32(near: Near) -> None:
    X = feasible_starts(near, BOUNDS.float(), 1, 4, 16, nonlinear_inequality_constraints=SHEET)
    assert X.dtype == torch.float32
    assert feasible(X, SHEET).all()
