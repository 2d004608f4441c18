"""Conjugate gradients instead of factors."""

from __future__ import annotations

import pytest
import torch
from conformance import draw

import snarenet as sn


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


def test_estimated_row_lengths() -> None:
    A = draw(50, 200) * torch.logspace(-3, 3, 50, dtype=torch.float64).unsqueeze(1)
    map = sn.Linear(A, upper=1.0).at(draw(2, 200, seed=1)).map
    ratio = sn.ConjugateGradients(probes=64).row_norms(map, draw(2, 200, seed=1)) / A.square().sum(1)
    assert ((ratio > 0.4) & (ratio < 2.5)).all()
    again = sn.ConjugateGradients(probes=64).row_norms(map, draw(2, 200, seed=1)) / A.square().sum(1)
    assert torch.equal(ratio, again)  # no draw from the global generator


def test_gradients_with_a_relative_damping() -> None:
    """The scale is an estimate, but its derivative is exact."""
    H, G = draw(3, 6, seed=1, scale=0.3), draw(3, 6, seed=2)
    y = draw(4, 6, seed=3, scale=2).requires_grad_()
    constraints = sn.Quadratic(H, G, upper=0.2) & sn.Box(-3.0, 3.0)
    solver = sn.ConjugateGradients(tol=1e-14)
    run = lambda y: sn.repair(constraints, y, solver=solver, max_steps=8).value  # noqa: E731
    assert torch.autograd.gradcheck(run, y, atol=1e-5)


@pytest.mark.parametrize("rows", ["all", "active"])
def test_a_layer_may_choose_it(rows: str) -> None:
    A = draw(40, 100)
    constraints = sn.Nonlinear(lambda y, x: torch.nn.functional.softplus(y @ A.T / 10), rows=40, upper=0.5)
    layer = sn.SnareLayer(constraints, rows=rows, solver=sn.ConjugateGradients())
    y = draw(5, 100, seed=1, scale=2)
    assert constraints.violation(layer(y)).max() <= 1e-8


@pytest.mark.slow
def test_five_thousand_variables() -> None:
    """n = 5,000 and m = 2,000 nonlinear rows, in less memory than one Jacobian of the batch."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from common import peak_growth_mib
    from matrix_free import build

    constraints = build(5000, 2000)
    y = draw(4, 5000, scale=2)
    solutions = []
    memory = peak_growth_mib(lambda: solutions.append(sn.repair(constraints, y, solver=sn.ConjugateGradients())))
    assert solutions[0].converged.all()
    assert memory < 8 * 4 * 2000 * 5000 / 2**20
