"""Value, gradient and status of a sample do not depend on the others of its batch, whatever their rows do.

Satisfied rows may be so large that their squares overflow, others may vanish, and some samples fail.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import snarenet as sn
from snarenet.linalg import cholesky
from snarenet.testing import assert_equal, draw

BATCH, SIZE = 4, 3


def exponentials(scale: float, seed: int) -> sn.Constraints:
    """exp(a y) above, whose satisfied rows grow without a bound."""
    A = draw(SIZE, SIZE, seed=seed, scale=scale)
    return sn.Nonlinear(lambda y, x: (y @ A.T).exp(), rows=SIZE, lower=[2.0, 15.0, 0.5])


def scaled(scale: float, seed: int) -> sn.Constraints:
    """Curved rows of very different lengths, one of them zero, and one that no point obeys."""
    H, G = draw(4, SIZE, seed=seed, scale=0.3), draw(4, SIZE, seed=seed + 1)
    factors = torch.tensor([1.0, scale, 1 / scale, 0.0], dtype=torch.float64).unsqueeze(1)
    limit = torch.tensor([0.3, 0.2 * scale, 0.1 / scale, 1.0], dtype=torch.float64)
    return sn.Quadratic(H * factors, G * factors, upper=limit)


def crowded(scale: float, seed: int) -> sn.Constraints:
    """More rows than variables, and a box."""
    A = draw(2 * SIZE, SIZE, seed=seed)
    rows = sn.Nonlinear(lambda y, x: scale * (y @ A.T).sinh(), rows=2 * SIZE, upper=scale)
    return rows & sn.Box(torch.full((SIZE,), -2.0), torch.full((SIZE,), 2.0))


def dependent(scale: float, seed: int) -> sn.Constraints:
    """The same row several times, as an equality and as bounds, among others: systems singular but for the damping."""
    A = draw(2, SIZE + 2, seed=seed)
    A = torch.cat([A, A[:1] * scale, draw(3, SIZE + 2, seed=seed + 1)])[:, :SIZE]
    return sn.Linear(A, upper=[0.1, 5.0, 0.1 * scale, 4.0, 6.0, 0.2])


KINDS = {kind.__name__: kind for kind in (exponentials, scaled, crowded, dependent)}
DAMPINGS = [sn.Annealed(), sn.Adaptive(), sn.Constant(1e-3, relative=True)]


def solve(constraints: sn.Constraints, y: Tensor, **options) -> tuple[sn.Solution, Tensor]:
    y = y.clone().requires_grad_()
    solution = sn.repair(constraints, y, **options)
    return solution, torch.autograd.grad(solution.value.sum(), y)[0]


def assert_independent(constraints: sn.Constraints, y: Tensor, **options) -> None:
    together, gradient = solve(constraints, y, **options)
    for i in range(len(y)):
        alone, own = solve(constraints, y[i : i + 1], **options)
        assert alone.status[0] == together.status[i]
        if not together.converged[i]:  # a path that fails may amplify rounding
            continue
        assert gradient[i].isfinite().all()
        moved = 1 + y[i].abs().max() + alone.value[0].abs().max()
        assert (alone.value[0] - together.value[i]).abs().max() <= 1e-10 * moved
        assert (own[0] - gradient[i]).abs().max() <= 1e-8 * (1 + own[0].abs().max())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    exponent=st.sampled_from([-3, -1, 0, 0.5, 0.7, 1, 3]),
    spread=st.sampled_from([0.1, 1.0, 3.0]),
    seed=st.integers(0, 1000),
    damping=st.sampled_from(DAMPINGS),
    rescue=st.booleans(),
)
def test_any_set(kind: str, exponent: float, spread: float, seed: int, damping: sn.Damping, rescue: bool) -> None:
    constraints = KINDS[kind](10.0**exponent, seed)
    assert_independent(
        constraints, draw(BATCH, SIZE, seed=seed + 2, scale=spread), damping=damping, rescue=rescue, max_steps=40
    )


def test_squares_that_overflow() -> None:
    """A satisfied row of 1e174 beside a violated one: it enters neither the step nor the gradient."""
    constraints = sn.Nonlinear(lambda y, x: (5 * y).exp(), rows=2, lower=[11.7, 14.7])
    y = torch.tensor([[-0.4, -1.5], [-2.6, -0.8]], dtype=torch.float64)
    solution, gradient = solve(constraints, y, rescue=True)
    assert solution.converged.all()
    assert gradient.isfinite().all()
    assert_independent(constraints, y, rescue=True)


@pytest.mark.parametrize("damping", [sn.Annealed(), sn.Adaptive()], ids=["annealed", "adaptive"])
def test_a_huge_satisfied_row_does_not_set_the_scale_of_the_others(damping: sn.Damping) -> None:
    constraints = sn.Nonlinear(lambda y, x: y.exp(), rows=2, lower=1.0)
    y = torch.tensor([[400.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    solution, gradient = solve(constraints, y, damping=damping)
    assert solution.converged.all()
    assert solution.value[0, 0] == 400
    assert gradient[0, 0] == 1
    assert_independent(constraints, y, damping=damping)


def test_a_singular_matrix_is_shifted_as_if_it_were_alone() -> None:
    """Neither by idle rows that fill it up, nor by another that needs a larger shift."""
    row = draw(1, 3)
    singular = row.T @ row
    worse = torch.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    alone = cholesky(singular.unsqueeze(0))[0]
    assert torch.equal(cholesky(torch.stack([singular, worse]))[0], alone)
    filled = torch.eye(5, dtype=torch.float64)
    filled[:3, :3] = singular
    active = torch.tensor([[True, True, True, False, False]])
    assert_equal(cholesky(filled.unsqueeze(0), active, 3)[0, :3, :3], alone, 1e-12)
