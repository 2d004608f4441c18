"""`FunctionMap`: rows that a user's function computes, with derivatives by autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from snarenet.constraints.data import describe, select_inputs
from snarenet.constraints.maps.base import (
    ExplicitLinearization,
    Linearization,
    Map,
    Pairs,
    cut,
    gradients,
    times,
    transposed_times,
)
from snarenet.constraints.products import CHUNK, Products
from snarenet.constraints.sparsity import Pattern
from snarenet.constraints.structure import Given, Structure, transformed

_PROBES = 8  # random directions that estimate what rows too many for a Jacobian may change by
_SPREAD = 4.0  # times the mean square of those changes: more than rounding, which has random signs, ever makes of it


class FunctionMap(Map):
    """g(y) = fn(y, x) for a user's function of the whole batch.

    A `jacobian` of the user's takes the place of the passes through fn that form J, and of nothing else: products with
    J and pullbacks go through fn, which is cheaper than any J.

    Args:
        fn: the function.
        x: its second argument.
        rows: how many rows it returns.
        jacobian: its derivative in y, if there is one.
        structure: what is known of the pattern of the Jacobian; None for a dense one.
        point: (B, n) where to look for the pattern.
    """

    implicit = True

    def __init__(
        self,
        fn: Callable[[Tensor, Any], Tensor],
        x: Any,
        rows: int,
        jacobian: Callable[[Tensor, Any], Tensor] | None = None,
        structure: Structure | Given | None = None,
        point: Tensor | None = None,
    ) -> None:
        self.fn, self.x, self.rows, self.given_jacobian = fn, x, rows, jacobian
        self.structure, self.point = structure, point

    @property
    def pattern(self) -> Pattern | None:
        return None if self.structure is None or self.point is None else self.structure.find(self, self.point)

    def compressed(self, look: bool) -> bool:
        """Is J computed on its pattern? Traced graphs and transforms of torch.func have it dense.

        Who needs no J does not `look` for a pattern: there may be too many variables for that.
        """
        if self.structure is None or self.point is None or torch.compiler.is_compiling() or transformed():
            return False
        return self.structure.find(self, self.point, look) is not None

    def on_pattern(self, products: Products) -> tuple[Pattern, Tensor]:
        """The pattern, perhaps wider than it was, and the values (B, nnz) of J on it; where J is `compressed`."""
        assert self.structure is not None
        return self.structure.evaluate(self, products)

    def value(self, y: Tensor) -> Tensor:
        value = self.fn(y, self.x)
        if not isinstance(value, Tensor) or value.shape != (y.shape[0], self.rows):
            raise ValueError(f"`fn(y, x)` must return shape {(y.shape[0], self.rows)}, but got {describe(value)}")
        return value

    def jacobian(self, y: Tensor) -> Tensor:
        if self.compressed(look=True):
            pattern, values = self.on_pattern(Products(self.value, y))
            return pattern.dense(values)
        if self.given_jacobian is not None:
            return self.given(y).to_dense()
        batch, n = y.shape
        if self.rows == 0:
            return y.new_zeros(batch, 0, n)
        if torch.compiler.is_exporting():
            return self._exported_jacobian(y)
        compiling = torch.compiler.is_compiling()  # the size of a traced batch is not known
        chunk = None if compiling else max(1, CHUNK // max(1, batch * max(n, self.rows)))
        if self.rows <= n:  # one backward pass per row
            _, pull, *_ = torch.func.vjp(self.value, y)
            rows = torch.eye(self.rows, dtype=y.dtype, device=y.device).unsqueeze(1).expand(-1, batch, -1)
            return torch.func.vmap(lambda w: pull(w)[0], out_dims=1, chunk_size=chunk)(rows)
        columns = torch.eye(n, dtype=y.dtype, device=y.device).unsqueeze(1).expand(-1, batch, -1)
        push = lambda t: torch.func.jvp(self.value, (y,), (t,))[1]  # noqa: E731
        return torch.func.vmap(push, out_dims=2, chunk_size=chunk)(columns)

    def row_norms(self, y: Tensor) -> Tensor:
        if not self.compressed(look=True):
            return super().row_norms(y)
        pattern, values = self.on_pattern(Products(self.value, y))
        return pattern.row_sums(values.square())

    def magnitudes(self, y: Tensor) -> Tensor:
        if self.compressed(look=False):
            pattern, values = self.on_pattern(Products(self.value, y))
            return pattern.times(values.abs(), y.abs())
        if torch.compiler.is_compiling() or self.rows * y.shape[1] <= CHUNK:
            return super().magnitudes(y)
        signs = torch.randint(0, 2, (_PROBES, y.shape[1]), generator=torch.Generator().manual_seed(0)).to(y) * 2 - 1
        linear = self.linearize(y)
        return _SPREAD * torch.stack([linear.jvp(y * z).square() for z in signs]).mean(0).sqrt()

    def given(self, y: Tensor) -> Tensor:
        """What the user's `jacobian` returns, checked: dense or in a sparse layout."""
        assert self.given_jacobian is not None
        J = self.given_jacobian(y, self.x)
        shape = (y.shape[0], self.rows, y.shape[1])
        if not isinstance(J, Tensor) or tuple(J.shape) not in (shape, shape[1:]):
            raise ValueError(f"`jacobian(y, x)` must return shape {shape}, but got {describe(J)}")
        return J

    def _exported_jacobian(self, y: Tensor) -> Tensor:
        """The Jacobian row by row: an exported program can hold no torch.func transform, but plain autograd."""
        with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
            y = y.detach().requires_grad_()
            value = self.value(y)
            rows = [torch.autograd.grad(value[:, i].sum(), y, retain_graph=True)[0] for i in range(self.rows)]
        return torch.stack(rows, 1)

    def jvp(self, y: Tensor, direction: Tensor) -> Tensor:
        exporting = torch.compiler.is_exporting()
        return times(self.jacobian(y), direction) if exporting else super().jvp(y, direction)

    def vjp(self, y: Tensor, weights: Tensor) -> Tensor:
        exporting = torch.compiler.is_exporting()
        return transposed_times(self.jacobian(y), weights) if exporting else super().vjp(y, weights)

    def linearize(self, y: Tensor) -> Linearization:
        if torch.compiler.is_exporting():
            return ExplicitLinearization(self, y)
        return _Compressed(self, y) if self.compressed(look=False) else _ByAutograd(self, y)

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
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
        inside = FunctionMap(self.fn, tree_map(_detach, self.x), self.rows)
        with torch.enable_grad():
            point = y.detach().requires_grad_()
            value = inside.value(point)
        opaque = y.requires_grad and not value.requires_grad
        if opaque and self.given_jacobian is not None and bool(self.given(point).to_dense().any()):
            raise ValueError(
                "`fn` must be differentiable by autograd for the backward pass, also where `jacobian` is given, but "
                "its value has no derivative in `y` (was it computed outside torch, or detached?)"
            )
        reached = (leaf for leaf in _leaves(value) if leaf is not point)
        return (*(t for t in tree_leaves(self.x) if isinstance(t, Tensor) and t.requires_grad), *reached)

    def detached(self, leaves: dict[int, Tensor]) -> FunctionMap:
        x = tree_map(lambda leaf: cut(leaf, leaves) if isinstance(leaf, Tensor) else leaf, self.x)
        return FunctionMap(self.fn, x, self.rows, self.given_jacobian, self.structure, self.point)

    def select(self, index: Tensor) -> FunctionMap:
        point = None if self.point is None else self.point[index]
        return FunctionMap(self.fn, select_inputs(self.x, index), self.rows, self.given_jacobian, self.structure, point)


class _ByAutograd(Linearization):
    """Products by J once it is there; before that by plain autograd, which evaluates g once for all of them."""

    def __init__(self, map: FunctionMap, y: Tensor) -> None:
        super().__init__(map, y)
        self.products = Products(map.value, y)

    @property
    def pattern(self) -> Pattern | None:
        return None  # there was none when this was made

    def jvp(self, direction: Tensor) -> Tensor:
        if self._jacobian is not None:
            return times(self._jacobian, direction)
        if torch.compiler.is_compiling():  # which traces torch.func, but not a graph that is kept
            return super().jvp(direction)
        return self.products.jvp(direction)

    def vjp(self, weights: Tensor) -> Tensor:
        if self._jacobian is not None:
            return transposed_times(self._jacobian, weights)
        if torch.compiler.is_compiling():
            return super().vjp(weights)
        return self.products.vjp(weights)


class _Compressed(Linearization):
    """J on its pattern, evaluated when asked for, or for many products; the first few are by plain autograd."""

    def __init__(self, map: FunctionMap, y: Tensor) -> None:
        super().__init__(map, y)
        self.function, self.products = map, Products(map.value, y)
        self._left = 0 if map.structure is None else map.structure.worth(y.shape[1])  # products before J is cheaper
        self._found: tuple[Pattern, Tensor] | None = None

    def _evaluated(self) -> tuple[Pattern, Tensor]:
        if self._found is None:
            self._found = self.function.on_pattern(self.products)
        return self._found

    @property
    def pattern(self) -> Pattern | None:
        return self._evaluated()[0]

    @property
    def values(self) -> Tensor:
        return self._evaluated()[1]

    def _one_more(self) -> bool:
        """Is one more product by autograd cheaper than J?"""
        self._left -= 1
        return self._found is None and self._left >= 0

    def jvp(self, direction: Tensor) -> Tensor:
        if self._one_more():
            return self.products.jvp(direction)
        pattern, values = self._evaluated()
        return pattern.times(values, direction)

    def vjp(self, weights: Tensor) -> Tensor:
        if self._one_more():
            return self.products.vjp(weights)
        pattern, values = self._evaluated()
        return pattern.transposed_times(values, weights)

    def _evaluate(self) -> Tensor:
        pattern, values = self._evaluated()
        return pattern.dense(values)


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
