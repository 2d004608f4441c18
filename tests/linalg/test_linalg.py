"""Eliminated rows and factors against the formulas and against torch."""

from __future__ import annotations

import pytest
import torch

from snarenet.linalg import (
    EliminatedMatrices,
    EliminatedSpectrum,
    Spectrum,
    cholesky,
    cholesky_solve,
    dense,
    eliminate,
)
from snarenet.testing import assert_equal, draw


class TestEliminated:
    def test_matrices_are_the_formulas(self) -> None:
        spectrum = Spectrum(draw(3, 7, seed=1), draw(3, seed=2).square() + 0.1)
        mine, formulas = eliminate(spectrum, 0.3), EliminatedSpectrum(spectrum, 0.3)
        assert isinstance(mine, EliminatedMatrices)
        assert eliminate(spectrum, 0.3) is mine
        v, r, J = draw(5, 7, seed=3), draw(5, 3, seed=4), draw(5, 2, 7, seed=5)
        for name, argument in (("step", r), ("shrink", v), ("root", J), ("multipliers", v)):
            assert_equal(getattr(mine, name)(argument), getattr(formulas, name)(argument), 1e-12)

    def test_the_metric_is_the_inverse(self) -> None:
        """P = (I + A' diag(damping scale)^-1 A)^-1, and root is its symmetric root."""
        A, scale = draw(3, 7, seed=1), draw(3, seed=2).square() + 0.1
        inverse = torch.linalg.inv(torch.eye(7, dtype=A.dtype) + A.T @ torch.diag(1 / (0.3 * scale)) @ A)
        eliminated, eye = eliminate(Spectrum(A, scale), 0.3), torch.eye(7, dtype=A.dtype)
        assert_equal(eliminated.shrink(eye), inverse, 1e-12)
        assert_equal(eliminated.root(eye) @ eliminated.root(eye), inverse, 1e-12)

    def test_nothing_is_kept_that_a_graph_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spectrum = Spectrum(draw(3, 7, seed=1), torch.ones(3, dtype=torch.float64))
        before = spectrum.transfer(draw(2, 3), 0.5)
        for module in ("spectrum", "eliminated"):
            monkeypatch.setattr(f"snarenet.linalg.{module}.tracing", lambda: True)
        assert isinstance(eliminate(spectrum, 0.3), EliminatedSpectrum)
        assert_equal(spectrum.transfers((0.5,))[0], spectrum.transfer(torch.eye(3, dtype=torch.float64), 0.5), 1e-14)
        assert_equal(spectrum.transfer(draw(2, 3), 0.7), spectrum.transfer(draw(2, 3), 0.7), 0.0)
        assert (list(spectrum._transfers), spectrum._stacks, spectrum.memo) == ([0.5], {}, {})
        assert_equal(spectrum.transfer(draw(2, 3), 0.5), before, 0.0)


@pytest.mark.parametrize("inverted", [False, True])
def test_a_factor_solves_its_system(monkeypatch: pytest.MonkeyPatch, inverted: bool) -> None:
    """As a triangle, or, as on a GPU, inverted."""
    monkeypatch.setattr(dense, "_inverted", lambda factor: inverted)
    root, rhs = draw(4, 6, 9, seed=1), draw(4, 6, seed=2)
    matrix = root @ root.mT
    expected = torch.linalg.solve(matrix, rhs.unsqueeze(2)).squeeze(2)
    assert_equal(cholesky_solve(cholesky(matrix), rhs), expected, 1e-10)
