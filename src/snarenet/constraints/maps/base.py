r"""The function g of one batch: x is fixed, every datum is a tensor, and only y varies.

A constraint set (the module that users build) makes a map for each call; the repair works on maps alone. Besides its
value and Jacobian, a map gives products with the Jacobian and the *pullback*

$$ \nabla \Big( \sum_j \langle a_j, \partial g(y)\, t_j \rangle + \langle q, g(y) \rangle \Big), $$

the gradient, in y and in every tensor inside g, that one step of the adjoint needs (see docs/mathematics.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from snarenet.constraints.products import CHUNK
from snarenet.constraints.sparsity import Pattern

Pairs = Sequence[tuple[Tensor, Tensor]]


def times(matrix: Tensor, v: Tensor) -> Tensor:
    """matrix @ v for every sample: (m, n) or (B, m, n) times (B, n) gives (B, m)."""
    # a row times matrices is several times faster than matrices times a column on a CPU
    return v @ matrix.T if matrix.ndim == 2 else (v.unsqueeze(-2) @ matrix.mT).squeeze(-2)


def transposed_times(matrix: Tensor, w: Tensor) -> Tensor:
    """matrix.T @ w for every sample: (m, n) or (B, m, n) times (B, m) gives (B, n)."""
    return w @ matrix if matrix.ndim == 2 else (w.unsqueeze(-2) @ matrix).squeeze(-2)


class Map(ABC):
    """g for one batch of x."""

    rows: int
    linear: bool = False  # the same Jacobian at every y
    diagonal_hessian: bool = False  # the Hessian of every row is diagonal and constant; `hessian_diagonal` has it
    implicit: bool = False  # a row of the Jacobian, or its length, takes a pass through a function

    @property
    def constant(self) -> bool:
        """Is it linear, with the same matrix for all samples and all training steps?"""
        return False

    @property
    def convex(self) -> bool:
        """Is every row a convex function, and does `convex_hessian` know it?"""
        return self.linear

    @property
    def parts(self) -> tuple[Map, ...]:
        """The maps whose rows stand one below the other in this one: itself, unless it is a `StackedMap`."""
        return (self,)

    @property
    def pattern(self) -> Pattern | None:
        """Where J may be nonzero, for all samples; None where it is dense, or nobody looked."""
        return None

    @abstractmethod
    def value(self, y: Tensor) -> Tensor:
        """g(y): (B, rows)."""

    @abstractmethod
    def jacobian(self, y: Tensor) -> Tensor:
        """The derivative of g at y: (B, rows, n), or (rows, n) where all samples share it."""

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        """J(y) @ direction: (B, rows)."""
        return torch.func.jvp(self.value, (y,), (direction,))[1]

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        """J(y).T @ weights: (B, n)."""
        return torch.func.vjp(self.value, y)[1](weights)[0]

    def entries(self, y: Tensor, pattern: Pattern) -> Tensor:
        """(B, nnz) the entries of J(y) on a pattern that has them all."""
        return pattern.gather(self.jacobian(y)).expand(len(y), pattern.nnz)

    def linearize(self, y: Tensor) -> Linearization:
        """g to first order at y, for many uses: what it costs to evaluate there is spent once."""
        return Linearization(self, y)

    def row_norms(self, y: Tensor) -> Tensor:
        """Squared lengths of the rows of J(y): (B, rows)."""
        return self.jacobian(y).square().sum(-1).expand(y.shape[0], self.rows)

    def magnitudes(self, y: Tensor) -> Tensor:
        """(B, rows) sum_j |J_ij(y) y_j|: what row i may change by if each entry of y changes by its own size."""
        if torch.compiler.is_compiling():  # the size of a traced batch is not known
            return times(self.jacobian(y).abs(), y.abs())
        few = torch.arange(len(y), device=y.device).split(max(1, CHUNK // max(1, self.rows * y.shape[1])))
        return torch.cat([times(self.select(some).jacobian(y[some]).abs(), y[some].abs()) for some in few])

    def hessian_diagonal(self, weights: Tensor) -> Tensor:
        """(B, n) the diagonal of the Hessian of <weights, g>, for maps with `diagonal_hessian`."""
        raise ValueError(f"the Hessians of this `{type(self).__name__}` are not constant diagonals")

    def convex_hessian(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """d (B, n) and G (B, k, n): the Hessian of <weights, g>, weights >= 0, is diag(d) + G'G; for convex rows."""
        raise ValueError(f"the rows of this `{type(self).__name__}` are not known to be convex")

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """The tensors inside g that need a gradient."""
        return ()

    def select(self, index: Tensor) -> Map:
        """The map of the samples `index` only."""
        return self

    def detached(self, leaves: dict[int, Tensor]) -> Map:
        """The same map on tensors without a history, so that a pullback does not walk it; see `cut`."""
        return self

    def of_y_alone(self) -> Map:
        """The same map for derivatives in y and in nothing else, if these are cheaper."""
        return self

    def curvature(self, y: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Products of the Hessian of <weights, g> at y with vectors (B, n); None where there is no curvature.

        By a second pass through the gradient, which is kept for all of them.
        """
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            total = (weights * self.value(y)).sum()
            (slope,) = gradients(total, (y,), again=True)
        if slope is None or not slope.requires_grad:
            return None

        def product(v: Tensor) -> Tensor:
            (found,) = torch.autograd.grad(slope, y, v, retain_graph=True, allow_unused=True)
            return torch.zeros_like(v) if found is None else found

        return product

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Gradient of sum_j <a_j, J(y) t_j> + <weights, g(y)> in y and in `wanted`; pairs are (a_j, t_j)."""
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            total = (weights * self.value(y)).sum()
            for a, t in pairs:
                total = total + (a * self.jvp(y, t)).sum()
        return gradients(total, (y, *wanted))


class Linearization:
    """A map to first order at one y: J(y), evaluated when first asked for and then kept, and products with it."""

    def __init__(self, map: Map, y: Tensor) -> None:
        self.map, self.y = map, y
        self._jacobian: Tensor | None = None

    @property
    def jacobian(self) -> Tensor:
        """J(y): (B, rows, n), or (rows, n) where all samples share it."""
        if self._jacobian is None:
            self._jacobian = self._evaluate()
        return self._jacobian

    @property
    def pattern(self) -> Pattern | None:
        """The pattern of `values`; None where the map has none. Evaluating J may widen that of the map."""
        return self.map.pattern

    @property
    def values(self) -> Tensor:
        """(B, nnz) the entries of J(y) on `pattern`, where there is one."""
        pattern = self.pattern
        if pattern is None:
            raise ValueError(f"this `{type(self.map).__name__}` has no pattern: ask for the `jacobian`")
        return self.map.entries(self.y, pattern)

    def jvp(self, direction: Tensor) -> Tensor:
        """J(y) @ direction: (B, rows)."""
        return self.map.jvp(self.y, direction)

    def vjp(self, weights: Tensor) -> Tensor:
        """J(y).T @ weights: (B, n)."""
        return self.map.vjp(self.y, weights)

    def _evaluate(self) -> Tensor:
        return self.map.jacobian(self.y)


class ExplicitLinearization(Linearization):
    """Products by J itself, for maps that have none cheaper."""

    def jvp(self, direction: Tensor) -> Tensor:
        return times(self.jacobian, direction)

    def vjp(self, weights: Tensor) -> Tensor:
        return transposed_times(self.jacobian, weights)


def gradients(total: Tensor, inputs: tuple[Tensor, ...], again: bool = False) -> list[Tensor | None]:
    """The gradient of a scalar in each input, to be differentiated `again` or not; None where it depends on none."""
    if not total.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True, create_graph=again))


def summed(y: Tensor, pairs: Pairs, weights: Tensor) -> Tensor:
    """(B, rows, n) sum_j a_ij t_j + weights_i y: what rows that are quadratic in y make a pullback of."""
    a, t = torch.stack([weights, *(a for a, _ in pairs)], 2), torch.stack([y, *(t for _, t in pairs)], 1)
    return a @ t


def chained(found: list[tuple[Tensor, Tensor]], wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The gradients in `wanted`, from those of tensors that were computed from them, or are among them."""
    if not found or not wanted:
        return [None] * len(wanted)
    tensors, gradients = zip(*found, strict=True)
    return list(torch.autograd.grad(tensors, wanted, gradients, allow_unused=True, retain_graph=True))


def cut(tensor: Tensor, leaves: dict[int, Tensor]) -> Tensor:
    """The tensor itself, or, if it needs a gradient, a leaf in its place: `leaves` has one for every id."""
    if not tensor.requires_grad:
        return tensor
    return leaves.setdefault(id(tensor), tensor.detach().requires_grad_())


def needing_grad(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Those of the tensors that need a gradient."""
    return tuple(t for t in tensors if t.requires_grad)


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, where None stands for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
