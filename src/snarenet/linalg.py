r"""Linear algebra of one step: factor once, solve many.

A step from y with residual r, rows J, row damping $\delta = \lambda s > 0$ and multipliers w is

$$ d = J^\top w, \qquad (J J^\top + \mathrm{diag}(\delta))\, w = r, $$

and its adjoint asks, for a cotangent v, for $p = (J J^\top + \mathrm{diag}(\delta))^{-1} J v$ and $e = v - J^\top p$.
Rows whose Gram matrix is diagonal in a known basis (a box, constant equalities) are *eliminated*: they turn into a
metric $P = (I + J_e^\top \mathrm{diag}(\delta_e)^{-1} J_e)^{-1}$ for the others, whose system is
$J P J^\top + \mathrm{diag}(\delta)$. Each class says which of these systems it solves; docs/mathematics.md derives
them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from snarenet.constraints.data import tracing
from snarenet.constraints.maps import FunctionMap, Map, StackedMap

_TRANSFER_BYTES = 2**28  # memory for the cached transfer matrices of one spectrum
_MATRIX_SIZE = 256  # variables up to which eliminated rows are kept as matrices, some 60 dampings of four each
_INVERSE_SIZE = 64  # rows up to which a GPU inverts a factor rather than solving with it: two products for two solves
_FEW = 0.75  # share of the rows up to which the active ones get a system of their own
_LOOK = 4  # iterations of conjugate gradients between two looks at who is still going: a look waits for the GPU


def column(damping: float | Tensor) -> float | Tensor:
    """A damping per sample as a column, a shared one as it is."""
    return damping.unsqueeze(-1) if isinstance(damping, Tensor) else damping


class Spectrum:
    """Singular values of constant rows A (m, n), each divided by the root of its scale: A = diag(s)^(1/2) U S V'."""

    def __init__(self, A: Tensor, scale: Tensor) -> None:
        self.A = A
        self.root = scale.sqrt()
        U, values, Vh = torch.linalg.svd(A / self.root.unsqueeze(1), full_matrices=False)
        cutoff = torch.finfo(A.dtype).eps * max(A.shape) * (values[0] if len(values) else 0)
        rank = int((values > cutoff).sum())
        self.left, self.values, self.right = U[:, :rank], values[:rank], Vh[:rank].T
        self.squares = self.values.square()
        self.pseudo_inverse = (self.right / self.values) @ self.left.T / self.root
        typical = (A / self.root.unsqueeze(1)).square().sum(1).mean().sqrt() if rank else 1
        # the least singular value, in typical row lengths: 0 without full row rank
        self.least = float(values[-1] / typical) if rank == A.shape[0] > 0 else float(rank == A.shape[0])
        self._transfers: dict[float, Tensor] = {}
        self._stacks: dict[tuple[tuple[float, ...], bool], Tensor] = {}
        self._eliminated: dict[float, Eliminated] = {}

    def transfer(self, r: Tensor, damping: float | Tensor, transpose: bool = False) -> Tensor:
        r"""r T, or r T', for r (B, m), with $T = D^{-1/2} U \frac{S^2}{S^2+\lambda} U^\top D^{1/2}$.

        T' = A A' (A A' + damping D)^-1 takes the residual of all rows to the change of A y in one step.
        """
        matrix = None
        if not isinstance(damping, Tensor) and not torch.compiler.is_compiling():
            matrix = self._transfers.get(damping)
            size = self.root.numel() ** 2 * self.root.element_size()
            if matrix is None and (len(self._transfers) + 1) * size <= _TRANSFER_BYTES:
                matrix = self._matrix(damping)
                if not tracing():  # what is made while a graph is recorded belongs to the graph
                    self._transfers[damping] = matrix
        if matrix is not None:
            return r @ (matrix.T if transpose else matrix)
        weights = self.squares / (self.squares + column(damping))
        r = r * self.root if transpose else r / self.root
        r = (r @ self.left * weights) @ self.left.T
        return r / self.root if transpose else r * self.root

    def _matrix(self, damping: float) -> Tensor:
        matrix = (self.left * (self.squares / (self.squares + damping))) @ self.left.T
        return matrix * self.root / self.root.unsqueeze(1)

    def eliminated(self, damping: float | Tensor) -> Eliminated:
        """These rows, eliminated at a damping."""
        if isinstance(damping, Tensor) or self.A.shape[1] > _MATRIX_SIZE:
            return EliminatedSpectrum(self, damping)
        known = self._eliminated.get(damping)
        if known is None and tracing():  # what is made while a graph is recorded belongs to the graph
            return EliminatedSpectrum(self, damping)
        return known or self._eliminated.setdefault(damping, EliminatedMatrices(self, damping))

    def transfers(self, dampings: tuple[float, ...], transpose: bool = False) -> Tensor:
        """(count, m, m) the T, or T', of several dampings; kept, since a recorded graph knows where they are."""
        known = self._stacks.get((dampings, transpose))
        if known is None:
            matrices = (self._matrix(damping) for damping in dampings)
            known = torch.stack([matrix.T if transpose else matrix for matrix in matrices])
            if not tracing():
                self._stacks[dampings, transpose] = known
        return known


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
    """The rows of a box: unit vectors, so P is diagonal; `active` (B, n) marks the rows in use."""

    def __init__(self, active: Tensor, damping: float | Tensor) -> None:
        damping = column(damping)
        self.inverse = active / (1 + damping)
        self.weights = damping * self.inverse + (1 - active)

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


@dataclass(frozen=True)
class ConjugateGradients:
    """Solve each step by conjugate gradients on products with J and its transpose; J itself is never formed.

    The preconditioner is the diagonal of the system: the squared row lengths of J at the step's y, and the damping.

    Attributes:
        tol: relative residual, in the norm of the preconditioner, at which a sample's solve stops; the adjoint is exact
            to about this.
        max_iterations: limit for one solve.
        probes: random directions that estimate the row lengths of a nonlinear function.
    """

    tol: float = 1e-8
    max_iterations: int = 500
    probes: int = 8

    def solve(self, operator: Callable[[Tensor], Tensor], rhs: Tensor, diagonal: Tensor) -> Tensor:
        """w with operator(w) = rhs, both (B, m), preconditioned by the diagonal (B, m)."""
        w, r = torch.zeros_like(rhs), rhs
        z = r / diagonal
        direction, rho = z, (r * z).sum(1, keepdim=True)
        target = self.tol * rho.sqrt()  # in this norm the scale of a row does not matter
        look = _LOOK if rhs.is_cuda else 1
        for k in range(self.max_iterations):
            going = rho.sqrt() > target  # the others stay as they are
            if k % look == 0 and not bool(going.any()):
                break
            image = operator(direction)
            curvature = (direction * image).sum(1, keepdim=True)
            alpha = torch.where(going & (curvature > 0), rho / curvature, 0.0)
            w, r = torch.addcmul(w, alpha, direction), torch.addcmul(r, alpha, image, value=-1)
            z = r / diagonal
            previous, rho = rho, torch.where(going, (r * z).sum(1, keepdim=True), rho)
            direction = torch.where(going, torch.addcmul(z, direction, rho / previous), direction)
        return w

    def row_norms(self, map: Map, y: Tensor) -> Tensor:
        """Squared row lengths of J(y), (B, rows): exact where the map knows them, else estimated; differentiable."""
        if isinstance(map, StackedMap):
            return torch.cat([y.new_empty(y.shape[0], 0), *(self.row_norms(part, y) for part in map.parts)], 1)
        return self._estimate(map, y) if isinstance(map, FunctionMap) and not map.explicit else map.row_norms(y)

    def _estimate(self, map: Map, y: Tensor) -> Tensor:
        r"""The mean of $(J z)^2$ over fixed random signs z, drawn towards the mean of all rows.

        The logarithm of a row's own estimate has a variance of about $2/p + 2/p^2$ for p probes. Where the rows of a
        sample differ by no more than that, they are taken to be equal; the more they differ, the more they are trusted.
        """
        signs = torch.randint(0, 2, (self.probes, y.shape[1]), generator=torch.Generator().manual_seed(0)).to(y) * 2 - 1
        push, _ = map.linearize(y)
        squares = torch.stack([push(z.expand_as(y)).square() for z in signs]).mean(0)
        squares = squares.clamp(min=torch.finfo(y.dtype).tiny)
        own, mean = squares.log(), squares.mean(1, keepdim=True).log()
        noise = 2 / self.probes + 2 / self.probes**2
        trust = 1 - noise / own.var(1, keepdim=True, correction=0).clamp(min=noise)
        return (mean + trust * (own - mean)).exp()


class System(ABC):
    """The linear system of one step, at one y.

    `weight` times p times w is the cotangent of the row scales: w and e are fixed only up to a common factor, which
    each class chooses so that nothing is divided by a small damping.
    """

    weight: float | Tensor
    factor: Tensor | None

    @abstractmethod
    def step(self, residual: Tensor, eliminated: Tensor | None) -> tuple[Tensor, Tensor]:
        """(d, w) for the residual (B, m) of these rows and that of the eliminated ones."""

    @abstractmethod
    def adjoint(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(p, e, p of the eliminated rows) for the cotangent v (B, n) of y - d."""


class Dual(System):
    """J P J' + diag(delta), m by m. With P = I, w and e are those of the module's formulas.

    Args:
        map: the rows that were not eliminated, linearised at y.
        y: (B, n).
        active: (B, m), 1 for rows in use and 0 for the others, or None for all.
        delta: (B, m) damping of each row, `damping` times its scale.
        damping: the scalar damping, a number or (B,).
        eliminated: rows solved for beforehand, if any.
        factor: the Cholesky factor, if it was kept.
        krylov: solve by conjugate gradients instead of a factor.
    """

    def __init__(
        self,
        map: Map,
        y: Tensor,
        active: Tensor | None,
        delta: Tensor,
        damping: float | Tensor,
        eliminated: Eliminated | None = None,
        factor: Tensor | None = None,
        krylov: ConjugateGradients | None = None,
    ) -> None:
        self.map, self.y, self.active, self.eliminated = map, y, active, eliminated
        self._jvp, self._vjp = map.linearize(y)
        self.weight = column(damping)
        self.diagonal = delta if active is None else delta * active + (1 - active)
        self.krylov = krylov
        self.places = None if active is None or krylov else places_of(active, factor)
        self.factor = None if krylov else (self._factor() if factor is None else factor)

    def _factor(self) -> Tensor:
        J, active, diagonal, places = self.map.jacobian(self.y), self.active, self.diagonal, self.places
        if places is not None and active is not None:
            active, diagonal = active.gather(1, places), diagonal.gather(1, places)
        if places is not None and J.ndim == 3:
            J, places = rows_at(J, places), None
        W = J if self.eliminated is None else self.eliminated.root(J)
        if places is not None and W.ndim == 3:  # what was eliminated differs from sample to sample
            W, places = rows_at(W, places), None
        gram = W @ W.mT
        if gram.ndim == 2:
            gram = gram.repeat(len(self.y), 1, 1) if places is None else gram[places.unsqueeze(2), places.unsqueeze(1)]
        if active is not None:
            gram = (gram * active.unsqueeze(1)).mul_(active.unsqueeze(2))
        gram.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        return cholesky(gram)

    def _mask(self, w: Tensor) -> Tensor:
        return w if self.active is None else w * self.active

    def _shrink(self, v: Tensor) -> Tensor:
        return v if self.eliminated is None else self.eliminated.shrink(v)

    def _push(self, v: Tensor) -> Tensor:
        return self._mask(self._jvp(v))

    def _pull(self, w: Tensor) -> Tensor:
        return self._vjp(self._mask(w))

    def _solve(self, rhs: Tensor) -> Tensor:
        if self.factor is not None and self.places is not None:
            found = cholesky_solve(self.factor, rhs.gather(1, self.places))
            return torch.zeros_like(rhs).scatter(1, self.places, found)
        if self.factor is not None:
            return cholesky_solve(self.factor, rhs)
        assert self.krylov is not None
        lengths = self._mask(self.krylov.row_norms(self.map, self.y))  # an eliminated P would make them little shorter
        return self.krylov.solve(
            lambda w: self._push(self._shrink(self._pull(w))) + self.diagonal * w, rhs, self.diagonal + lengths
        )

    def step(self, residual: Tensor, eliminated: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.eliminated is None:
            w = self._solve(residual)
            return self._pull(w), w
        assert eliminated is not None
        d = self.eliminated.step(eliminated)
        w = self._solve(self._mask(residual) - self._push(d))
        return d + self._shrink(self._pull(w)), w

    def adjoint(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        p = self._solve(self._push(self._shrink(v)))
        u = v - self._pull(p)
        return p, self._shrink(u), None if self.eliminated is None else self.eliminated.multipliers(u)


def rows_at(matrices: Tensor, places: Tensor) -> Tensor:
    """The rows (B, k, n) of matrices (B, m, n) at places (B, k)."""
    return matrices.gather(1, places.unsqueeze(2).expand(-1, -1, matrices.shape[2]))


def places_of(active: Tensor, factor: Tensor | None) -> Tensor | None:
    """(B, k) the places of each sample's active rows, filled up with others; None if most rows are active anyway.

    A factor that was kept says how many there are.
    """
    rows = active.shape[1]
    if factor is None:
        count = rows if tracing() or not active.numel() else max(1, int(active.sum(1).max()))
        if count > _FEW * rows:
            return None
    else:
        count = factor.shape[-1]
        if count == rows:
            return None
    return active.sort(dim=1, descending=True, stable=True).indices[:, :count]


class Primal(System):
    """J'diag(s)^(-1) J + damping I, n by n, for more rows than variables.

    Here w stands for damping times w of the formulas above, and e for their e over the damping.
    """

    def __init__(
        self,
        map: Map,
        y: Tensor,
        active: Tensor | None,
        scale: Tensor,
        damping: float | Tensor,
        factor: Tensor | None = None,
    ) -> None:
        self.map, self.y = map, y
        self.inverse = 1 / scale if active is None else active / scale
        self.weight = 1.0
        if factor is None:
            J = map.jacobian(y)
            gram = (J.mT * self.inverse.unsqueeze(1)) @ J
            gram.diagonal(dim1=-2, dim2=-1).add_(column(damping))
            factor = cholesky(gram)
        self.factor = factor

    def _solve(self, v: Tensor) -> Tensor:
        assert self.factor is not None
        return cholesky_solve(self.factor, v)

    def step(self, residual: Tensor, eliminated: Tensor | None) -> tuple[Tensor, Tensor]:
        d = self._solve(self.map.vjp(self.y, residual * self.inverse))
        return d, (residual - self.map.jvp(self.y, d)) * self.inverse

    def adjoint(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        e = self._solve(v)
        return self.map.jvp(self.y, e) * self.inverse, e, None


def cholesky(matrix: Tensor) -> Tensor:
    """The factor for `cholesky_solve`; a matrix singular to working precision gets the smallest shift it needs."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    shift = 4 * torch.finfo(matrix.dtype).eps * matrix.shape[-1]
    while not tracing() and bool((info > 0).any()) and shift < 1:
        diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True) * (info > 0).unsqueeze(-1)
        factor, info = torch.linalg.cholesky_ex(matrix + torch.diag_embed((shift * diagonal).expand(matrix.shape[:-1])))
        shift *= 100
    if _inverted(factor):
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        return torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False)
    return factor


def cholesky_solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """The solution (B, m) of M w = rhs for the factor that `cholesky` made of M (B, m, m)."""
    if _inverted(factor):
        return (factor.mT @ (factor @ rhs.unsqueeze(-1))).squeeze(-1)
    return triangular_solve(factor, rhs)


def triangular_solve(factor: Tensor, rhs: Tensor) -> Tensor:
    """The solution (B, m) of L L' w = rhs for lower triangles L (B, m, m)."""
    column = rhs.unsqueeze(-1)
    if factor.is_cuda:  # torch.cholesky_solve waits for the device there, and cannot be recorded
        column = torch.linalg.solve_triangular(factor, column, upper=False)
        return torch.linalg.solve_triangular(factor.mT, column, upper=True).squeeze(-1)
    return torch.cholesky_solve(column, factor).squeeze(-1)


def _inverted(factor: Tensor) -> bool:
    """Is this the inverse of a Cholesky factor, and not the factor?"""
    return factor.is_cuda and factor.shape[-1] <= _INVERSE_SIZE
