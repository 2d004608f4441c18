"""Conjugate gradients instead of factors."""

from __future__ import annotations

import pytest
import torch

import snarenet as sn
from snarenet.linalg import Dual
from snarenet.testing import draw


def spd(batch: int, m: int, condition: float) -> torch.Tensor:
    Q = torch.linalg.qr(draw(batch, m, m)).Q
    return Q @ torch.diag_embed(torch.logspace(0, condition, m, dtype=torch.float64).expand(batch, m)) @ Q.mT


def test_conjugate_gradients_solve_each_sample() -> None:
    matrix, rhs = spd(4, 30, 3), draw(4, 30, seed=1) * torch.tensor([[1.0], [1e-8], [1e6], [0.0]])
    solver = sn.ConjugateGradients(tol=1e-12, max_iterations=200)
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    w = solver.solve(lambda w: (matrix @ w.unsqueeze(2)).squeeze(2), rhs, diagonal)
    expected = torch.linalg.solve(matrix, rhs)
    for i in range(4):
        torch.testing.assert_close(w[i], expected[i], rtol=0, atol=1e-9 * max(expected[i].abs().max().item(), 1e-30))


def test_they_stop_at_the_limit() -> None:
    matrix, rhs = spd(1, 30, 6), draw(1, 30, seed=1)
    calls = []
    solver = sn.ConjugateGradients(tol=1e-14, max_iterations=5)
    solver.solve(lambda w: calls.append(1) or (matrix @ w.unsqueeze(2)).squeeze(2), rhs, torch.ones_like(rhs))
    assert len(calls) == 5


def test_rows_of_different_lengths() -> None:
    """The diagonal of the system preconditions it: 60 iterations do where the rows span six decades."""
    lengths = torch.logspace(-3, 3, 40, dtype=torch.float64)
    A, y, rhs = draw(40, 100) / 10 * lengths.unsqueeze(1), draw(3, 100, seed=1), draw(3, 40, seed=2) * lengths
    system = Dual(
        sn.Linear(A, upper=1.0).at(y).map.linearize(y), None, rhs.new_full((3, 40), 1e-18), 1e-18,
        krylov=sn.ConjugateGradients(tol=1e-12, max_iterations=60),
    )  # fmt: skip
    _, w = system.step(rhs, None)
    expected = torch.linalg.solve(A / lengths.unsqueeze(1) @ (A / lengths.unsqueeze(1)).T, (rhs / lengths).T).T
    torch.testing.assert_close(w * lengths, expected, rtol=0, atol=1e-8)


def rows_of(A: torch.Tensor, probes: int) -> torch.Tensor:
    """Estimated over true squared lengths of the rows of A, for a function whose Jacobian is A."""
    y = draw(2, A.shape[1], seed=1)
    map = sn.Nonlinear(lambda y, x: y @ A.T, rows=len(A), upper=1.0).at(y).map
    return sn.ConjugateGradients(probes=probes).row_norms(map, y) / A.square().sum(1)


def test_estimated_row_lengths() -> None:
    equal = draw(50, 200)
    equal = equal / equal.norm(dim=1, keepdim=True)
    unequal = equal * torch.logspace(-3, 3, 50, dtype=torch.float64).unsqueeze(1)
    ratio = rows_of(unequal, probes=64)
    assert ((ratio > 0.4) & (ratio < 2.5)).all()
    assert torch.equal(ratio, rows_of(unequal, probes=64))  # no draw from the global generator
    ratio = rows_of(equal, probes=8)  # 8 probes alone would be off by a factor of 2 somewhere in 100 rows
    assert ((ratio > 0.7) & (ratio < 1.4)).all()
    assert torch.equal(rows_of(torch.zeros(3, 10, dtype=torch.float64), probes=4).isfinite(), torch.zeros(2, 3) > 0)


def test_known_row_lengths_are_exact() -> None:
    """So that a relative damping means the same as in the direct route."""
    H, G, A = draw(3, 8, seed=1, scale=0.3), draw(3, 8, seed=2), draw(4, 8, seed=3)
    whole = draw(2, 8, 8, seed=4, scale=0.2)
    constraints = sn.Quadratic(H, G, upper=0.1) & sn.Linear(A, upper=-0.5) & sn.Quadratic(whole, G[:2], upper=3.0)
    y = draw(5, 8, seed=5, scale=2)
    options = {"rows": "active", "tol": 0, "max_steps": 6}
    direct = sn.repair(constraints, y, start=None, **options).value
    free = sn.repair(constraints, y, solver=sn.ConjugateGradients(tol=1e-14), **options).value
    torch.testing.assert_close(free, direct, rtol=0, atol=1e-9)


def test_gradients_with_a_relative_damping() -> None:
    H, G = draw(3, 6, seed=1, scale=0.3), draw(3, 6, seed=2)
    y = draw(4, 6, seed=3, scale=2).requires_grad_()
    constraints = sn.Quadratic(H, G, upper=0.2) & sn.Box(-3.0, 3.0)
    solver = sn.ConjugateGradients(tol=1e-14)
    run = lambda y: sn.repair(constraints, y, solver=solver, max_steps=8).value  # noqa: E731
    assert torch.autograd.gradcheck(run, y, atol=1e-5)


def test_gradients_of_estimated_lengths() -> None:
    A, y = draw(3, 6, seed=1), draw(4, 6, seed=3, scale=2).requires_grad_()
    scale = draw(3, seed=4).exp().requires_grad_()
    constraints = sn.Nonlinear(lambda y, x: scale * (y @ A.T + 0.2 * (y @ A.T).sin()), rows=3, upper=-0.4)
    solver = sn.ConjugateGradients(tol=1e-14)
    run = lambda y, _: sn.repair(constraints, y, solver=solver, max_steps=8).value  # noqa: E731
    assert torch.autograd.gradcheck(run, (y, scale), atol=1e-5)


@pytest.mark.parametrize("rows", ["all", "active"])
def test_a_layer_may_choose_it(rows: str) -> None:
    A = draw(40, 100)
    constraints = sn.Nonlinear(lambda y, x: torch.nn.functional.softplus(y @ A.T / 10), rows=40, upper=0.5)
    layer = sn.SnareLayer(constraints, rows=rows, solver=sn.ConjugateGradients())
    y = draw(5, 100, seed=1, scale=2)
    assert constraints.violation(layer(y)).max() <= 1e-8
