r"""The function g of one batch: x is fixed, every datum is a tensor, and only y varies.

A constraint set (the module that users build) makes a map for each call; the repair works on maps alone. Besides its
value and Jacobian, a map gives products with the Jacobian and the *pullback*

$$ \nabla \Big( \sum_j \langle a_j, \partial g(y)\, t_j \rangle + \langle q, g(y) \rangle \Big), $$

the gradient, in y and in every tensor inside g, that one step of the adjoint needs (see docs/mathematics.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from snarenet.constraints.data import describe, select_inputs

Pairs = Sequence[tuple[Tensor, Tensor]]
Product = Callable[[Tensor], Tensor]

_JACOBIAN_CHUNK = 2**24  # numbers that one vectorised pass for the Jacobian may hold (128 MiB in float64)


def times(matrix: Tensor, v: Tensor) -> Tensor:
    """matrix @ v for every sample: (m, n) or (B, m, n) times (B, n) gives (B, m)."""
    return v @ matrix.T if matrix.ndim == 2 else (matrix @ v.unsqueeze(-1)).squeeze(-1)


def transposed_times(matrix: Tensor, w: Tensor) -> Tensor:
    """matrix.T @ w for every sample: (m, n) or (B, m, n) times (B, m) gives (B, n)."""
    return w @ matrix if matrix.ndim == 2 else (w.unsqueeze(-2) @ matrix).squeeze(-2)


class Map(ABC):
    """g for one batch of x."""

    rows: int
    linear: bool = False  # the same Jacobian at every y
    separable: bool = False  # the second derivatives of every row are a diagonal, which `bend` knows

    @property
    def constant(self) -> bool:
        """Is it linear, with the same matrix for all samples and all training steps?"""
        return False

    @property
    def parts(self) -> tuple[Map, ...]:
        """The maps whose rows stand one below the other in this one: itself, unless it is a `StackedMap`."""
        return (self,)

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
        return _vjp(self.value, y)[1](weights)

    def linearize(self, y: Tensor) -> tuple[Product, Product]:
        """The products t -> J(y) t and w -> J(y)' w, for many uses at one y."""
        return partial(self.jvp, y), partial(self.vjp, y)

    def row_norms(self, y: Tensor) -> Tensor:
        """Squared lengths of the rows of J(y): (B, rows)."""
        return self.jacobian(y).square().sum(-1).expand(y.shape[0], self.rows)

    def bend(self, weights: Tensor) -> Tensor:
        """(B, n) the diagonal of the second derivative of <weights, g>, where it is one and the same at every y."""
        raise ValueError("the second derivatives of this map are no constant diagonals")

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """The tensors inside g that need a gradient."""
        return ()

    def select(self, index: Tensor) -> Map:
        """The map of the samples `index` only."""
        return self

    def detached(self, leaves: dict[int, Tensor]) -> Map:
        """The same map on tensors without a history, so that a pullback does not walk it; see `cut`."""
        return self

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Gradient of sum_j <a_j, J(y) t_j> + <weights, g(y)> in y and in `wanted`; pairs are (a_j, t_j)."""
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            total = (weights * self.value(y)).sum()
            for a, t in pairs:
                total = total + (a * self.jvp(y, t)).sum()
        return gradients(total, (y, *wanted))


def _vjp(function: Product, y: Tensor) -> tuple[Tensor, Product]:
    """The value of a function at y, and its product w -> J'w."""
    value, pull, *_ = torch.func.vjp(function, y)
    return value, lambda w: pull(w)[0]


def gradients(total: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The gradient of a scalar in each input, None where it does not depend on it."""
    if not total.requires_grad:
        return [None] * len(inputs)
    return list(torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True))


def cut(tensor: Tensor, leaves: dict[int, Tensor]) -> Tensor:
    """The tensor itself, or, if it needs a gradient, a leaf in its place: `leaves` has one for every id."""
    if not tensor.requires_grad:
        return tensor
    return leaves.setdefault(id(tensor), tensor.detach().requires_grad_())


def _needing_grad(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t.requires_grad)


class LinearMap(Map):
    """g(y) = A y, with A (rows, n), or (B, rows, n) for a matrix per sample."""

    linear = separable = True

    def __init__(self, A: Tensor) -> None:
        self.A = A
        self.rows = A.shape[-2]

    @property
    def constant(self) -> bool:
        return self.A.ndim == 2 and not self.A.requires_grad

    def value(self, y: Tensor) -> Tensor:
        return times(self.A, y)

    def jacobian(self, y: Tensor) -> Tensor:
        return self.A

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return times(self.A, direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return transposed_times(self.A, weights)

    def bend(self, weights: Tensor) -> Tensor:
        return weights.new_zeros(len(weights), self.A.shape[-1])

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return _needing_grad(self.A)

    def detached(self, leaves: dict[int, Tensor]) -> LinearMap:
        return LinearMap(cut(self.A, leaves))

    def select(self, index: Tensor) -> LinearMap:
        return self if self.A.ndim == 2 else LinearMap(self.A[index])

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        if self.A.requires_grad:
            return super().pullback(y, pairs, weights, wanted)
        return [transposed_times(self.A, weights), *(None for _ in wanted)]


class IdentityMap(Map):
    """g(y) = y: the rows of a box."""

    linear = separable = True

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @property
    def constant(self) -> bool:
        return True

    def value(self, y: Tensor) -> Tensor:
        return y

    def jacobian(self, y: Tensor) -> Tensor:
        return torch.eye(self.rows, dtype=y.dtype, device=y.device)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return direction

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return weights

    def row_norms(self, y: Tensor) -> Tensor:
        return torch.ones_like(y)

    def bend(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        return [weights, *(None for _ in wanted)]


class QuadraticMap(Map):
    r"""g_i(y) = y'H_i y + G_i y.

    H holds diagonals, (rows, n), or whole matrices, (rows, n, n); a leading batch dimension makes it one per sample.
    The Jacobian is $y'(H_i + H_i') + G_i$, so a pair (a, t) pulls back to $\sum_i a_i (H_i + H_i') t$.
    """

    def __init__(self, H: Tensor, G: Tensor, diagonal: bool) -> None:
        self.H, self.G, self.diagonal = H, G, diagonal
        self.rows, self.separable = G.shape[-2], diagonal

    def _bend(self, t: Tensor) -> Tensor:
        """(H_i + H_i') t for every row i: (B, rows, n)."""
        if self.diagonal:
            return 2 * self.H * t.unsqueeze(-2)
        symmetric = self.H + self.H.mT
        return torch.einsum("mij,bj->bmi" if self.H.ndim == 3 else "bmij,bj->bmi", symmetric, t)

    def _form(self, s: Tensor, t: Tensor) -> Tensor:
        """s'(H_i + H_i') t for every row i: (B, rows)."""
        return 2 * times(self.H, s * t) if self.diagonal else times(self._bend(t), s)

    def _combine(self, a: Tensor, t: Tensor) -> Tensor:
        """sum_i a_i (H_i + H_i') t: (B, n)."""
        return 2 * transposed_times(self.H, a) * t if self.diagonal else transposed_times(self._bend(t), a)

    def value(self, y: Tensor) -> Tensor:
        return self._form(y, y) / 2 + times(self.G, y)

    def jacobian(self, y: Tensor) -> Tensor:
        if self.diagonal:  # one pass over the result
            return torch.addcmul(self.G, self.H, y.unsqueeze(-2), value=2)
        return self._bend(y) + self.G

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return self._form(y, direction) + times(self.G, direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return self._combine(weights, y) + transposed_times(self.G, weights)

    def row_norms(self, y: Tensor) -> Tensor:
        if not self.diagonal:
            return super().row_norms(y)
        squares = 4 * times(self.H.square(), y.square()) + 4 * times(self.H * self.G, y)  # without a Jacobian
        return (squares + self.G.square().sum(-1)).clamp(min=0)

    def bend(self, weights: Tensor) -> Tensor:
        return 2 * transposed_times(self.H, weights) if self.diagonal else super().bend(weights)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return _needing_grad(self.H, self.G)

    def detached(self, leaves: dict[int, Tensor]) -> QuadraticMap:
        return QuadraticMap(cut(self.H, leaves), cut(self.G, leaves), self.diagonal)

    def select(self, index: Tensor) -> QuadraticMap:
        shared = 2 if self.diagonal else 3
        H = self.H if self.H.ndim == shared else self.H[index]
        G = self.G if self.G.ndim == 2 else self.G[index]
        return QuadraticMap(H, G, self.diagonal)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        if self.H.requires_grad or self.G.requires_grad:
            return super().pullback(y, pairs, weights, wanted)
        total = self.vjp(y, weights)
        for a, t in pairs:
            total = total + self._combine(a, t)
        return [total, *(None for _ in wanted)]


class FunctionMap(Map):
    """g(y) = fn(y, x) for a user's function of the whole batch; derivatives come from torch.func."""

    def __init__(
        self,
        fn: Callable[[Tensor, Any], Tensor],
        x: Any,
        rows: int,
        jacobian: Callable[[Tensor, Any], Tensor] | None = None,
    ) -> None:
        self.fn, self.x, self.rows, self.given_jacobian = fn, x, rows, jacobian

    def value(self, y: Tensor) -> Tensor:
        value = self.fn(y, self.x)
        if not isinstance(value, Tensor) or value.shape != (y.shape[0], self.rows):
            raise ValueError(f"`fn(y, x)` must return shape {(y.shape[0], self.rows)}, but got {describe(value)}")
        return value

    def jacobian(self, y: Tensor) -> Tensor:
        if self.given_jacobian is not None:
            J = self.given_jacobian(y, self.x)
            if J.shape[-2:] != (self.rows, y.shape[1]):
                raise ValueError(f"`jacobian(y, x)` must return (B, {self.rows}, {y.shape[1]}), but got {describe(J)}")
            return J
        batch, n = y.shape
        if self.rows == 0:
            return y.new_zeros(batch, 0, n)
        if torch.compiler.is_exporting():
            return self._exported_jacobian(y)
        compiling = torch.compiler.is_compiling()  # the size of a traced batch is not known
        chunk = None if compiling else max(1, _JACOBIAN_CHUNK // max(1, batch * max(n, self.rows)))
        if self.rows <= n:  # one backward pass per row
            _, pull = _vjp(self.value, y)
            rows = torch.eye(self.rows, dtype=y.dtype, device=y.device).unsqueeze(1).expand(-1, batch, -1)
            return torch.func.vmap(pull, out_dims=1, chunk_size=chunk)(rows)
        columns = torch.eye(n, dtype=y.dtype, device=y.device).unsqueeze(1).expand(-1, batch, -1)
        return torch.func.vmap(lambda t: torch.func.jvp(self.value, (y,), (t,))[1], out_dims=2, chunk_size=chunk)(
            columns
        )

    def _exported_jacobian(self, y: Tensor) -> Tensor:
        """The Jacobian row by row: an exported program can hold no torch.func transform, but plain autograd."""
        with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            y = y.detach().requires_grad_()
            value = self.value(y)
            rows = [torch.autograd.grad(value[:, i].sum(), y, retain_graph=True)[0] for i in range(self.rows)]
        return torch.stack(rows, 1)

    @property
    def explicit(self) -> bool:
        """Are products with J to be made from J itself?"""
        return self.given_jacobian is not None or torch.compiler.is_exporting()

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return times(self.jacobian(y), direction) if self.explicit else super().jvp(y, direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        return transposed_times(self.jacobian(y), weights) if self.explicit else super().vjp(y, weights)

    def linearize(self, y: Tensor) -> tuple[Product, Product]:
        if self.explicit:
            J = self.jacobian(y)
            return partial(times, J), partial(transposed_times, J)
        value, pull = _vjp(self.value, y)  # evaluates g once; the transpose of w -> J'w, linear as it is, is J itself
        _, push = _vjp(pull, torch.zeros_like(value))
        return push, pull

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        if self.explicit:
            return super().pullback(y, pairs, weights, wanted)
        with torch.enable_grad():  # <a, J t> as <J'a, t>: g is evaluated once, and forward mode is slow
            y = y.detach().requires_grad_()
            value = self.value(y)
            total = (weights * value).sum()
            for a, t in pairs if value.requires_grad else ():
                pulled = torch.autograd.grad(value, y, a, create_graph=True, allow_unused=True)[0]
                total = total if pulled is None else total + (pulled * t).sum()
        return gradients(total, (y, *wanted))

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """The tensors of x, and every leaf that fn reaches by itself: its parameters, or what a closure captured."""
        inside = FunctionMap(self.fn, tree_map(_detach, self.x), self.rows, self.given_jacobian)
        with torch.enable_grad():
            reached = list(_leaves(inside.value(y.detach())))
            if self.given_jacobian is not None:
                reached += [t for t in _leaves(inside.jacobian(y.detach())) if all(t is not s for s in reached)]
        return (*(t for t in tree_leaves(self.x) if isinstance(t, Tensor) and t.requires_grad), *reached)

    def detached(self, leaves: dict[int, Tensor]) -> FunctionMap:
        x = tree_map(lambda leaf: cut(leaf, leaves) if isinstance(leaf, Tensor) else leaf, self.x)
        return FunctionMap(self.fn, x, self.rows, self.given_jacobian)

    def select(self, index: Tensor) -> FunctionMap:
        return FunctionMap(self.fn, select_inputs(self.x, index), self.rows, self.given_jacobian)


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _leaves(output: Tensor) -> list[Tensor]:
    """The leaf tensors that need a gradient in the graph of `output`."""
    found, seen, stack = [], set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a node that accumulates into a leaf
        if variable is not None:
            found.append(variable)
        stack.extend(next_node for next_node, _ in node.next_functions)
    return found


def _join(blocks: list[Tensor], empty: Tensor, dim: int = 1) -> Tensor:
    """The blocks side by side; one block is not copied, and no block at all is `empty`."""
    if len(blocks) > 1:
        return torch.cat(blocks, dim)
    return blocks[0] if blocks else empty


class StackedMap(Map):
    """The rows of several maps, one below the other."""

    def __init__(self, parts: Sequence[Map]) -> None:
        self._parts = tuple(parts)
        self.sizes = [part.rows for part in self.parts]
        self.rows = sum(self.sizes)
        self.linear = all(part.linear for part in self.parts)
        self.separable = all(part.separable for part in self.parts)

    @property
    def parts(self) -> tuple[Map, ...]:
        return self._parts

    def value(self, y: Tensor) -> Tensor:
        return _join([part.value(y) for part in self.parts], y.new_empty(y.shape[0], 0))

    def jacobian(self, y: Tensor) -> Tensor:
        blocks = [part.jacobian(y) for part in self.parts]
        if any(block.ndim == 3 for block in blocks):
            blocks = [block.expand(y.shape[0], -1, -1) for block in blocks]
        return _join(blocks, y.new_empty(0, y.shape[1]), -2)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        return _join([part.jvp(y, direction) for part in self.parts], y.new_empty(y.shape[0], 0))

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        pieces = zip(self.parts, weights.split(self.sizes, 1), strict=True)
        return sum((part.vjp(y, w) for part, w in pieces), torch.zeros_like(y))

    def linearize(self, y: Tensor) -> tuple[Product, Product]:
        products = [part.linearize(y) for part in self.parts]
        if len(products) == 1:
            return products[0]

        def push(t: Tensor) -> Tensor:
            return _join([product(t) for product, _ in products], y.new_empty(y.shape[0], 0))

        def pull(w: Tensor) -> Tensor:
            pieces = zip(products, w.split(self.sizes, 1), strict=True)
            return sum((product(piece) for (_, product), piece in pieces), torch.zeros_like(y))

        return push, pull

    def row_norms(self, y: Tensor) -> Tensor:
        return _join([part.row_norms(y) for part in self.parts], y.new_empty(y.shape[0], 0))

    def bend(self, weights: Tensor) -> Tensor:
        pieces = zip(self.parts, weights.split(self.sizes, 1), strict=True)
        return torch.stack([part.bend(own) for part, own in pieces]).sum(0)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        found = {id(t): t for part in self.parts for t in part.tensors(y)}  # parts may share one
        return tuple(found.values())

    def detached(self, leaves: dict[int, Tensor]) -> StackedMap:
        return StackedMap([part.detached(leaves) for part in self.parts])

    def select(self, index: Tensor) -> StackedMap:
        return StackedMap([part.select(index) for part in self.parts])

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        total: list[Tensor | None] = [None] * (1 + len(wanted))
        start = 0
        for part in self.parts:
            rows = slice(start, start + part.rows)
            start += part.rows
            own = [(a[:, rows], t) for a, t in pairs]
            for i, gradient in enumerate(part.pullback(y, own, weights[:, rows], wanted)):
                total[i] = add(total[i], gradient)
        return total


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, where None stands for zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
