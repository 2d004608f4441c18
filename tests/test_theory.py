"""The paper's theorems, as bounds that random instances must keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import snarenet as sn
from snarenet.testing import draw

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)
SEEDS = st.integers(0, 10_000)


def merit(constraints: sn.Constraints, y: Tensor) -> Tensor:
    """F = half the squared violation, per sample."""
    return 0.5 * constraints.residual(y).square().sum(1)


def after(constraints: sn.Constraints, y: Tensor, steps: int, damping: float) -> Tensor:
    return sn.repair(constraints, y, start=None, damping=damping, rows="all", tol=0, max_steps=steps).value


@SETTINGS
@given(seed=SEEDS, n=st.integers(1, 8), rows=st.integers(1, 8))
def test_no_damping_and_full_row_rank_is_hardnet(seed: int, n: int, rows: int) -> None:
    """One step of Newton's method is HardNet's closed form y + A^+ (relu(l - Ay) - relu(Ay - u))."""
    rows = min(rows, n)
    A, y = draw(rows, n, seed=seed), draw(4, n, seed=seed + 1, scale=3)
    lower = draw(4, rows, seed=seed + 2)
    upper = lower + draw(4, rows, seed=seed + 3).abs()
    closed = y + (torch.relu(lower - y @ A.T) - torch.relu(y @ A.T - upper)) @ torch.linalg.pinv(A).T
    constraints = sn.Linear(A, lower=lower, upper=upper)
    solution = sn.repair(constraints, y, start=None, damping=0.0, rows="all", tol=1e-9)
    assert solution.steps.max() <= 1
    torch.testing.assert_close(solution.value, closed, rtol=1e-8, atol=1e-8)
    nonlinear = sn.Nonlinear(lambda y, x: y @ A.T, rows=rows, lower=lower, upper=upper)  # the same without the spectrum
    solution = sn.repair(nonlinear, y, start=None, damping=0.0, rows="all", tol=1e-9)
    torch.testing.assert_close(solution.value, closed, rtol=1e-6, atol=1e-6)


@SETTINGS
@given(seed=SEEDS, n=st.integers(2, 8), rows=st.integers(1, 8), damping=st.floats(1e-4, 1e2))
def test_theorem_1_linear_rate(seed: int, n: int, rows: int, damping: float) -> None:
    """F(y_k) <= (1 - s^2 / (s^2 + damping))^k F(y_0), s the least singular value of A."""
    rows = min(rows, n)
    A, y = draw(rows, n, seed=seed), draw(3, n, seed=seed + 1, scale=5)
    constraints = sn.Linear(A, lower=-0.5, upper=0.5)
    square = torch.linalg.svdvals(A)[-1].item() ** 2
    start = merit(constraints, y)
    for k in (1, 2, 5, 10):
        bound = (1 - square / (square + damping)) ** k * start
        assert (merit(constraints, after(constraints, y, k, damping)) <= bound * (1 + 1e-9) + 1e-25).all()


SAFE = 1 + math.sqrt(17) / 4  # damping >= SAFE * L * M: the condition under which the theorem's proof holds


@SETTINGS
@given(seed=SEEDS, n=st.integers(1, 6), radius=st.floats(1.5, 20))
def test_theorem_2_ball(seed: int, n: int, radius: float) -> None:
    """F(y_k) <= F(y_0) / (1 + F(y_0) k / (2 D^2 (sigma^2 + damping))) for the unit ball, all constants known."""
    constraints = sn.Quadratic(torch.ones(1, n), torch.zeros(1, n), upper=1.0)
    y = torch.nn.functional.normalize(draw(1, n, seed=seed)) * radius
    start = merit(constraints, y)
    lipschitz, distance, sigma2 = 2.0, radius - 1, 4 * radius**2
    damping = SAFE * lipschitz * math.sqrt(2 * start.item())
    for k in (1, 3, 10, 30):
        bound = start / (1 + start * k / (2 * distance**2 * (sigma2 + damping)))
        assert (merit(constraints, after(constraints, y, k, damping)) <= bound * (1 + 1e-9)).all()


@SETTINGS
@given(seed=SEEDS, n=st.integers(2, 6), rows=st.integers(1, 4))
def test_theorem_2_ellipsoids_and_equalities(seed: int, n: int, rows: int) -> None:
    """The same for random convex quadratics with a linear equality, with bounds on the constants."""
    H = 0.2 + draw(rows, n, seed=seed).abs()
    G, a = draw(rows, n, seed=seed + 1), draw(1, n, seed=seed + 2)
    constraints = sn.Quadratic(H, G, upper=1.0) & sn.Linear(a, equals=0.0)  # the origin is feasible
    y = draw(1, n, seed=seed + 3, scale=3)
    start = merit(constraints, y)
    size = math.sqrt(2 * start.item())
    # where F <= F(y_0), the first row keeps H_1 |y|^2 - |G_1| |y| <= 1 + size, so |y| is at most
    h, g = H[0].min().item(), G[0].norm().item()
    radius = (g + math.sqrt(g**2 + 4 * h * (1 + size))) / (2 * h)
    lipschitz = 2 * H.square().sum(0).max().sqrt().item()  # of J: row i of J(y) - J(z) is 2 H_i (y - z)
    steepest = sum((2 * H[i].max().item() * radius + G[i].norm().item()) ** 2 for i in range(rows))
    sigma2 = steepest + a.norm().item() ** 2
    damping = SAFE * lipschitz * size
    for k in (1, 3, 10, 30):
        bound = start / (1 + start * k / (2 * radius**2 * (sigma2 + damping)))
        assert (merit(constraints, after(constraints, y, k, damping)) <= bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("kind", ["one matrix", "a function"])
def test_more_damping_stays_closer(kind: str) -> None:
    """Damping is what keeps a repair near its prediction: the displacement of all-row steps falls with it."""
    A, y = draw(5, 8, seed=1), draw(20, 8, seed=2, scale=2)
    constraints = (
        sn.Linear(A, upper=0.0) if kind == "one matrix" else sn.Nonlinear(lambda y, x: y @ A.T, rows=5, upper=0.0)
    )
    moved = []
    for damping in (0.0, 1.0, 10.0, 100.0):
        solution = sn.repair(constraints, y, start=None, damping=damping, rows="all", tol=1e-6, max_steps=5000)
        assert solution.converged.all()
        moved.append((solution.value - y).norm(dim=1).mean().item())
    assert moved == sorted(moved, reverse=True)
