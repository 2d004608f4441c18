r"""Rows that are solved for beforehand: a box, or constant equalities.

Their Gram matrix is diagonal in a known basis. They turn into a metric
$P = (I + J_e^\top \mathrm{diag}(\delta_e)^{-1} J_e)^{-1}$ for the other rows, whose system is then
$J P J^\top + \mathrm{diag}(\delta)$.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from snarenet.linalg.spectrum import Spectrum, column
from snarenet.tracing import tracing

_MATRIX_SIZE = 256  # variables up to which eliminated rows are kept as matrices, some 60 dampings of four each


class Eliminated(ABC):
    """Rows that were solved for beforehand, at one step's damping; P is their metric on the other rows."""

    @abstractmethod
    def step(self, residual: Tensor) -> Tensor:
        """d (B, n) of these rows alone."""

    @abstractmethod
    def shrink(self, v: Tensor) -> Tensor:
        """P v for v (B, n)."""

    @abstractmethod
    def root(self, J: Tensor) -> Tensor:
        """J P^(1/2) for J (m, n) or (B, m, n)."""

    @abstractmethod
    def multipliers(self, u: Tensor) -> Tensor:
        """p (B, rows) of these rows, from u = v - J'p of the others."""


class EliminatedBox(Eliminated):
    """The rows of a box: unit vectors, so P is diagonal.

    Args:
        active: (B, n) marks the rows in use.
        damping: a number or (B,).
        scale: (n,) the lengths of the rows; 1 unless given.
        relative: is the damping one in squares of these lengths?
    """

    def __init__(
        self, active: Tensor, damping: float | Tensor, scale: Tensor | None = None, relative: bool = True
    ) -> None:
        damping = column(damping)
        if scale is not None and not relative:
            damping = damping / scale.square()
        self.inverse = active / (1 + damping)
        self.weights = damping * self.inverse + (1 - active)
        if scale is not None:
            self.inverse = self.inverse / scale

    def step(self, residual: Tensor) -> Tensor:
        return residual * self.inverse

    def shrink(self, v: Tensor) -> Tensor:
        return v * self.weights

    def root(self, J: Tensor) -> Tensor:
        return J * self.weights.sqrt().unsqueeze(1)

    def multipliers(self, u: Tensor) -> Tensor:
        return u * self.inverse


class EliminatedSpectrum(Eliminated):
    r"""Constant rows: $P = I - V \frac{S^2}{S^2 + \lambda} V^\top$; for a damping per sample, or many variables."""

    def __init__(self, spectrum: Spectrum, damping: float | Tensor) -> None:
        self.spectrum = spectrum
        squares = spectrum.squares
        denominator = squares + column(damping)
        self.inverse = spectrum.values / denominator
        self.shrinkage = squares / denominator

    def step(self, residual: Tensor) -> Tensor:
        s = self.spectrum
        return (residual / s.root @ s.left * self.inverse) @ s.right.T

    def shrink(self, v: Tensor) -> Tensor:
        right = self.spectrum.right
        return v - (v @ right * self.shrinkage) @ right.T

    def root(self, J: Tensor) -> Tensor:
        right = self.spectrum.right
        weights = 1 - (1 - self.shrinkage).clamp(min=0).sqrt()
        if weights.ndim == 2:  # a damping per sample
            return J - (J @ right * weights.unsqueeze(1)) @ right.T
        eye = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device)
        return J @ (eye - (right * weights) @ right.T)

    def multipliers(self, u: Tensor) -> Tensor:
        s = self.spectrum
        return (u @ s.right * self.inverse) @ s.left.T / s.root


class EliminatedMatrices(Eliminated):
    """The same as matrices, computed once for each damping: one product where the formulas have four operations."""

    def __init__(self, spectrum: Spectrum, damping: float) -> None:
        formulas = EliminatedSpectrum(spectrum, damping)
        rows, size = spectrum.A.shape
        eye = torch.eye(size, dtype=spectrum.A.dtype, device=spectrum.A.device)
        self._shrink, self._root, self._multipliers = (
            formulas.shrink(eye),
            formulas.root(eye),
            formulas.multipliers(eye),
        )
        self._step = formulas.step(torch.eye(rows, dtype=eye.dtype, device=eye.device))

    def step(self, residual: Tensor) -> Tensor:
        return residual @ self._step

    def shrink(self, v: Tensor) -> Tensor:
        return v @ self._shrink

    def root(self, J: Tensor) -> Tensor:
        return J @ self._root

    def multipliers(self, u: Tensor) -> Tensor:
        return u @ self._multipliers


def eliminate(spectrum: Spectrum, damping: float | Tensor) -> Eliminated:
    """The rows of a spectrum, eliminated at a damping."""
    if isinstance(damping, Tensor) or spectrum.A.shape[1] > _MATRIX_SIZE:
        return EliminatedSpectrum(spectrum, damping)
    known = spectrum.memo.get(damping)
    if known is None and tracing():  # what is made while a graph is recorded belongs to the graph
        return EliminatedSpectrum(spectrum, damping)
    return known or spectrum.memo.setdefault(damping, EliminatedMatrices(spectrum, damping))
