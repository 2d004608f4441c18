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
    CHUNK,
    ExplicitLinearization,
    Linearization,
    Map,
    Pairs,
    cut,
    gradients,
    times,
    transposed_times,
)

_PROBES = 8  # random directions that estimate what rows too many for a Jacobian may change by
_SPREAD = 4.0  # times the mean square of those changes: more than rounding, which has random signs, ever makes of it


class FunctionMap(Map):
    """g(y) = fn(y, x) for a user's function of the whole batch.

    A `jacobian` of the user's takes the place of the passes through fn that form J, and of nothing else: products with
    J and pullbacks go through fn, which is cheaper than any J.
    """

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
            return self._given(y, self.given_jacobian)
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

    def magnitudes(self, y: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or self.rows * y.shape[1] <= CHUNK:
            return super().magnitudes(y)
        signs = torch.randint(0, 2, (_PROBES, y.shape[1]), generator=torch.Generator().manual_seed(0)).to(y) * 2 - 1
        linear = self.linearize(y)
        return _SPREAD * torch.stack([linear.jvp(y * z).square() for z in signs]).mean(0).sqrt()

    def _given(self, y: Tensor, jacobian: Callable[[Tensor, Any], Tensor]) -> Tensor:
        J = jacobian(y, self.x)
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
        return ExplicitLinearization(self, y) if torch.compiler.is_exporting() else _ByAutograd(self, y)

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
        if opaque and self.given_jacobian is not None and bool(self.jacobian(point).any()):
            raise ValueError(
                "`fn` must be differentiable by autograd for the backward pass, also where `jacobian` is given, but "
                "its value has no derivative in `y` (was it computed outside torch, or detached?)"
            )
        reached = (leaf for leaf in _leaves(value) if leaf is not point)
        return (*(t for t in tree_leaves(self.x) if isinstance(t, Tensor) and t.requires_grad), *reached)

    def detached(self, leaves: dict[int, Tensor]) -> FunctionMap:
        x = tree_map(lambda leaf: cut(leaf, leaves) if isinstance(leaf, Tensor) else leaf, self.x)
        return FunctionMap(self.fn, x, self.rows, self.given_jacobian)

    def select(self, index: Tensor) -> FunctionMap:
        return FunctionMap(self.fn, select_inputs(self.x, index), self.rows, self.given_jacobian)


class _ByAutograd(Linearization):
    """Products by J once it is there; before that by plain autograd, which evaluates g once for all of them."""

    def __init__(self, map: FunctionMap, y: Tensor) -> None:
        super().__init__(map, y)
        self._graph: tuple[Tensor, ...] | None = None

    def jvp(self, direction: Tensor) -> Tensor:
        if self._jacobian is not None:
            return times(self._jacobian, direction)
        if torch.compiler.is_compiling():  # which traces torch.func, but not a graph that is kept
            return super().jvp(direction)
        _, _, weights, pulled = self._linear()  # J is the transpose of w -> J'w, linear as it is
        return self._grad(pulled, weights, direction)

    def vjp(self, weights: Tensor) -> Tensor:
        if self._jacobian is not None:
            return transposed_times(self._jacobian, weights)
        if torch.compiler.is_compiling():
            return super().vjp(weights)
        y, value, *_ = self._linear()
        return self._grad(value, y, weights)

    def _linear(self) -> tuple[Tensor, ...]:
        """(y, g(y), w, J'w) at w = 0, with their graph."""
        if self._graph is None:
            y = self.y if torch.is_grad_enabled() and self.y.requires_grad else self.y.detach().requires_grad_()
            with torch.enable_grad():
                value = self.map.value(y)
                weights = torch.zeros_like(value).requires_grad_()
                self._graph = y, value, weights, self._grad(value, y, weights, graph=True)
        return self._graph

    @staticmethod
    def _grad(output: Tensor, source: Tensor, cotangent: Tensor, graph: bool | None = None) -> Tensor:
        if not output.requires_grad:
            return torch.zeros_like(source)
        graph = torch.is_grad_enabled() if graph is None else graph
        (found,) = torch.autograd.grad(
            output, source, cotangent, retain_graph=True, create_graph=graph, allow_unused=True
        )
        return torch.zeros_like(source) if found is None else found


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
