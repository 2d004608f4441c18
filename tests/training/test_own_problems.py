"""Every set that README, docs and docstrings show, in a problem of one's own: training, evaluation, page, reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems.separable import Separable
from snarenet.reference import solve
from snarenet.report.page import write_report


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Speed(sn.Constraints):
    """A class of one's own, as in docs/choosing.md."""

    rows = 1

    def value(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        return y.square().sum(1, keepdim=True)

    def bounds(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert x is not None
        return torch.tensor(-torch.inf), x.square()


def disks(y: Tensor, x: Tensor) -> Tensor:
    return torch.stack([(y[:, 0] + 1) ** 2 + y[:, 1] ** 2, (y[:, 0] - 1) ** 2 + y[:, 1] ** 2], 1)


ONES = torch.ones(1, 3, dtype=torch.float64)


class Set(NamedTuple):
    """A set, the n of y, which of its rows are equalities, and the part that IPOPT cannot be told, if any."""

    build: Callable[[], sn.Constraints]
    size: int
    equal: list[bool]
    unread: str = ""


SETS = {
    "box": Set(lambda: sn.Box(0.0, 1.0), 3, [False] * 3),
    "box-listed": Set(lambda: sn.Box([-0.5, -3.0], [0.5, 3.0]), 2, [False] * 2),
    "box-from-below": Set(lambda: sn.Box(0.0, None), 3, [False] * 3),
    "box-of-x": Set(lambda: sn.Box(lambda x: -x, lambda x: x), 1, [False]),
    "simplex": Set(lambda: sn.Box(0.0, 1.0) & sn.Linear(ONES, equals=1.0), 3, [False] * 3 + [True]),
    "simplex-of-tensors": Set(
        lambda: sn.Box(torch.zeros(3), torch.ones(3)) & sn.Linear(ONES, equals=1.0), 3, [False] * 3 + [True]
    ),
    "portfolio": Set(
        lambda: sn.Box(0.0, 1.0) & sn.Linear(ONES, equals=1.0) & sn.Linear(0.5 * ONES, upper=lambda x: x),
        3,
        [False] * 3 + [True, False],
    ),
    "dispatch": Set(
        lambda: sn.Box(torch.zeros(3), torch.ones(3)) & sn.Linear(ONES, equals=lambda x: x), 3, [False] * 3 + [True]
    ),
    "linear": Set(
        lambda: sn.Linear(rows(2, 5), upper=1.0) & sn.Linear(rows(1, 5), equals=lambda x: x), 5, [False] * 2 + [True]
    ),
    "linear-from-below": Set(lambda: sn.Linear(torch.ones(1, 2), lower=1.0), 2, [False]),
    "linear-sparse": Set(lambda: sn.Linear(rows(2, 5).to_sparse(), upper=1.0), 5, [False] * 2),
    "linear-learned": Set(lambda: sn.Linear(torch.nn.Parameter(rows(2, 5)), upper=1.0), 5, [False] * 2),
    "linear-of-x": Set(lambda: sn.Linear(lambda x: x.unsqueeze(2) * ONES, upper=torch.ones(1)), 3, [False]),
    "disk": Set(lambda: sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), upper=1.0), 2, [False]),
    "ellipse": Set(lambda: sn.Quadratic(torch.eye(2).unsqueeze(0), torch.ones(1, 2), upper=1.0), 2, [False]),
    "ring-and-slab": Set(
        lambda: (
            sn.Nonlinear(lambda y, x: y.norm(dim=1, keepdim=True), rows=1, lower=1.0, upper=2.0)
            & sn.Box([-0.5, -3.0], [0.5, 3.0])
        ),
        2,
        [False] * 3,
        unread="Nonlinear",
    ),
    "two-disks": Set(lambda: sn.Nonlinear(disks, rows=2, upper=2.25), 2, [False] * 2, unread="Nonlinear"),
    "wave": Set(
        lambda: sn.Nonlinear(lambda y, x: y[:, :-1] * y[:, 1:] + y[:, 1:].sin(), rows=4, upper=0.5),
        5,
        [False] * 4,
        unread="Nonlinear",
    ),
    "class": Set(Speed, 3, [False], unread="Speed"),
}


class Own(Separable):
    """min 1/2 |y|^2 - sum y over a set; x in [0.5, 1]."""

    def __init__(self, chosen: Set) -> None:
        super().__init__()
        self.size, self.constraints = chosen.size, chosen.build()
        inputs = 0.5 + 0.5 * np.random.default_rng(0).random((48, 1))
        self.store(inputs, square=np.ones(self.size), linear=-np.ones(self.size))


@pytest.mark.parametrize("name", SETS)
def test_trainer_evaluation_report_and_reference(tmp_path: Path, name: str) -> None:
    chosen = SETS[name]
    problem = Own(chosen)
    assert problem.equalities(problem.split("test")).tolist() == chosen.equal
    if chosen.unread:
        with pytest.raises(ValueError, match=rf"cannot read the problem 'Own': its set `{chosen.unread}` .*ipopt"):
            solve(problem, engine="clarabel", cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one that says that some have no solution
        best = solve(problem, starts=3, workers=1, cache=False)
    config = sn.TrainConfig(epochs=2, batch=16, width=8, validate_every=1)
    model = config.build(problem)
    run = sn.Trainer(config, tmp_path, quiet=True).fit(model, problem)
    found = sn.evaluate(model, problem, reference=best.objective, timed=False, closeups=3)
    assert found.summary["converged"] == 1.0
    assert np.isfinite(found.arrays["closeup_multiplier"]).all()
    assert found.summary["violation"] <= 1e-8
    assert found.summary["gap"]["instances"] == len(problem.split("test")) == 4
    assert found.arrays["gap"].min() > -1e-6  # nothing is better than the reference
    run.save_evaluation(*found)
    assert "a problem of your own" in write_report(tmp_path).read_text()
    again = run.load_model(problem)
    assert torch.equal(again(problem.split("test")), model(problem.split("test")))


class Chain(sn.Problem):
    """Neighbours that may not differ by much, by a function; min |y - a (1 + x)|^2."""

    size = 8

    def __init__(self) -> None:
        super().__init__()
        inputs = np.random.default_rng(1).random((120, 2))
        self.register_buffer("inputs", torch.from_numpy(inputs))
        self.constraints = sn.Nonlinear(
            lambda y, x: (y[:, 1:] - y[:, :-1]).square() + 0.1 * y[:, 1:].sin(),
            7,
            upper=lambda x: (0.05 + 0.1 * x[:, :1]).expand(-1, 7),
        ) & sn.Box(lambda x: -x[:, 1:].expand(-1, 8), 2.0)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return (y - torch.linspace(-1, 2, 8, dtype=y.dtype) * (1 + x[:, :1])).square().sum(1)


@pytest.mark.parametrize("candidates", [1, 2])
def test_rows_of_any_kind_under_a_curved_objective(tmp_path: Path, candidates: int) -> None:
    problem = Chain()
    best = solve(problem, workers=1, cache=False)
    config = sn.TrainConfig(epochs=1, batch=50, width=8, candidates=candidates)
    model = config.build(problem)
    run = sn.Trainer(config, tmp_path, quiet=True).fit(model, problem)
    found = sn.evaluate(model, problem, reference=best.objective, timed=False)
    assert found.summary["converged"] == 1.0
    assert np.abs(found.arrays["gap"]).max() < 1e-6
    again = run.load_model(problem)
    assert torch.equal(again(problem.split("test")), model(problem.split("test")))
