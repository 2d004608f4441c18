"""`FunctionMap`: rows that a user's function computes, with derivatives by autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from snarenet.constraints.compiled import Compiled, CompiledProducts
from snarenet.constraints.data import describe, select_inputs
from snarenet.constraints.maps.base import (
    ExplicitLinearization,
    Linearization,
    Map,
    Pairs,
    chained,
    cut,
    gradients,
    times,
    transposed_times,
)
from snarenet.constraints.products import CHUNK, Products
from snarenet.constraints.recorded import Recorded
from snarenet.constraints.sparsity import Pattern
from snarenet.constraints.structure import Given, Structure, transformed
from snarenet.solution import warn

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
        compiled: fn, its products and its pullback as programs; None for plain autograd.
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
        compiled: Compiled | None = None,
    ) -> None:
        self.fn, self.x, self.rows, self.given_jacobian = fn, x, rows, jacobian
        self.structure, self.point, self.compiled = structure, point, compiled
        self._leaves: dict[int, Tensor] = {}  # what stands for tensors that need a gradient, in all maps of a set

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

    def products(self, y: Tensor) -> Products:
        """Products with J(y), compiled where they may be."""
        if self.compiled is None or torch.compiler.is_compiling():
            return Products(self.value, y)
        return CompiledProducts(self.value, y, self.compiled, self.fn, self.x)

    def value(self, y: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not len(y):  # reshaped to (B, -1, k), nobody is an error
            return y.new_zeros(0, self.rows) + 0 * y.sum()
        value = None if self.compiled is None else self.compiled.value(self.fn, y, self.x)
        value = self._evaluate(y) if value is None else value
        if not isinstance(value, Tensor) or value.shape != (y.shape[0], self.rows):
            raise ValueError(f"`fn(y, x)` must return shape {(y.shape[0], self.rows)}, but got {describe(value)}")
        return value

    def _evaluate(self, y: Tensor) -> Tensor:
        """g(y), with NaN for samples that fn cannot take: torch.linalg has an error for all if one matrix is bad."""
        try:
            return self.fn(y, self.x)
        except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
            if torch.compiler.is_compiling():
                raise
            if len(y) == 1:
                if bool(y.isfinite().all()):
                    warn(f"`fn` raised an error at some y, where it counts as NaN: {error}", RuntimeWarning)
                return y.new_full((1, self.rows), torch.nan)
            halves = torch.arange(len(y), device=y.device).chunk(2)
            return torch.cat([self.select(half).value(y[half]) for half in halves])

    def jacobian(self, y: Tensor) -> Tensor:
        if self.compressed(look=True):
            pattern, values = self.on_pattern(self.products(y))
            return pattern.dense(values)
        if self.given_jacobian is not None:
            return self.given(y).to_dense()
        batch, n = y.shape
        if self.rows == 0:
            return y.new_zeros(batch, 0, n)
        if torch.compiler.is_exporting():
            return self._exported_jacobian(y)
        if (found := self._compiled_jacobian(y)) is not None:
            return found
        compiling = torch.compiler.is_compiling()  # the size of a traced batch is not known
        chunk = None if compiling else max(1, CHUNK // max(1, batch * max(n, self.rows)))
        if self.rows <= n:  # one backward pass per row
            _, pull, *_ = torch.func.vjp(self.value, y)
            rows = torch.eye(self.rows, dtype=y.dtype, device=y.device).unsqueeze(1).expand(-1, batch, -1)
            return torch.func.vmap(lambda w: pull(w)[0], chunk_size=chunk)(rows).transpose(0, 1)
        columns = torch.eye(n, dtype=y.dtype, device=y.device).unsqueeze(1).expand(-1, batch, -1)
        push = lambda t: torch.func.jvp(self.value, (y,), (t,))[1]  # noqa: E731
        return torch.func.vmap(push, chunk_size=chunk)(columns).permute(1, 2, 0)

    def _compiled_jacobian(self, y: Tensor) -> Tensor | None:
        by_rows, n = self.rows <= y.shape[1], y.shape[1]
        if self.compiled is None or torch.compiler.is_compiling():
            return None
        seeds = torch.eye(self.rows if by_rows else n, dtype=y.dtype, device=y.device)
        found = self.compiled.products(self.fn, y, self.x, seeds, by_rows)
        return None if found is None else found.transpose(0, 1) if by_rows else found.permute(1, 2, 0)

    def row_norms(self, y: Tensor, scale: Tensor | None = None) -> Tensor:
        """Squared lengths of the rows of J(y), or of J(y) diag(scale) for a scale (n,): (B, rows)."""
        if not self.compressed(look=True):
            J = self.jacobian(y) if scale is None else self.jacobian(y) * scale
            return J.square().sum(-1).expand(y.shape[0], self.rows)
        pattern, values = self.on_pattern(self.products(y))
        return pattern.row_sums((values if scale is None else values * pattern.of_columns(scale)).square())

    def of_y_alone(self) -> Map:
        return _OfYAlone(self.fn, self.x, self.rows, self.given_jacobian, self.structure, self.point, self.compiled)

    def magnitudes(self, y: Tensor) -> Tensor:
        if self.compressed(look=False):
            pattern, values = self.on_pattern(self.products(y))
            return pattern.times(values.abs(), y.abs())
        if torch.compiler.is_compiling() or self.rows * y.shape[1] <= CHUNK:
            return super().magnitudes(y)
        signs = torch.randint(0, 2, (_PROBES, y.shape[1]), generator=torch.Generator().manual_seed(0)).to(y) * 2 - 1
        linear = self.linearize(y)
        return _SPREAD * torch.stack([linear.jvp(y * z).square() for z in signs]).mean(0).sqrt()

    def given(self, y: Tensor) -> Tensor:
        """What the user's `jacobian` returns, checked: dense or in a sparse layout."""
        assert self.given_jacobian is not None
        shape = (y.shape[0], self.rows, y.shape[1])
        if not torch.compiler.is_compiling() and not len(y):
            return y.new_zeros(shape)
        J = self.given_jacobian(y, self.x)
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

    def curvature(self, y: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor] | None:
        compiled = self.compiled is not None and self.compiled.meant_for(y)
        if not len(y) or not (compiled or (self.compressed(look=False) and self._recorded(y) is not None)):
            return super().curvature(y, weights)
        nothing = torch.zeros_like(weights)

        def product(v: Tensor) -> Tensor:
            found = self.pullback(y, [(weights, v)], nothing, ())[0]
            return torch.zeros_like(v) if found is None else found

        return product

    def pullback(self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]) -> list[Tensor | None]:
        found = self._compiled_pullback(y, pairs, weights, wanted)
        if found is not None:
            return found
        if pairs and self.compressed(look=False):
            recorded = self._recorded(y) if not wanted else None
            found = None if recorded is None else recorded.pullback(self, y, pairs, weights)
            return self._pullback_at_once(y, pairs, weights, wanted) if found is None else [found]
        with torch.enable_grad():  # <a, J t> as <J'a, t>: g is evaluated once, and forward mode is slow
            y = y.detach().requires_grad_()
            value = self.value(y)
            total = (weights * value).sum()
            for a, t in pairs if value.requires_grad else ():
                pulled = torch.autograd.grad(value, y, a, create_graph=True, allow_unused=True)[0]
                total = total if pulled is None else total + (pulled * t).sum()
        return gradients(total, (y, *wanted))

    def _compiled_pullback(
        self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]
    ) -> list[Tensor | None] | None:
        """The same by a program, unless fn may have tensors of its own that need a gradient."""
        known = {id(leaf) for leaf in self._leaves.values()}
        if self.compiled is None or not all(id(t) in known for t in wanted):
            return None
        leaves = tree_leaves(self.x)
        inside = tuple(i for i, t in enumerate(leaves) if wanted and isinstance(t, Tensor) and t.requires_grad)
        found = self.compiled.pullback(self.fn, y, self.x, pairs, weights, inside)
        if found is None:
            return None
        return [found[0], *chained([(leaves[i], g) for i, g in zip(inside, found[1], strict=True)], wanted)]

    def _recorded(self, y: Tensor) -> Recorded | None:
        """The programs of the derivatives, where J is `compressed` and there are any."""
        return self.structure.recorded(self, y) if isinstance(self.structure, Structure) else None

    def _pullback_at_once(
        self, y: Tensor, pairs: Pairs, weights: Tensor, wanted: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        """The same with a larger batch, a part for each pair: a few samples take as long as many."""
        everybody = torch.arange(len(y), device=y.device)
        a, t = (torch.cat(one) for one in zip(*pairs, strict=True))
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            at = y.repeat(len(pairs), 1)
            value = self.select(everybody.repeat(len(pairs))).value(at)
            outputs, cotangents = [value[: len(y)]], [weights]
            if value.requires_grad:
                pulled = torch.autograd.grad(value, at, a, create_graph=True, allow_unused=True)[0]
                if pulled is not None and pulled.requires_grad:
                    outputs, cotangents = [*outputs, pulled], [*cotangents, t]
        if not value.requires_grad:
            return [None] * (1 + len(wanted))
        inputs = (y, *wanted)
        return list(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, retain_graph=True))

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

    def with_x(self, x: Any) -> FunctionMap:
        """The same function of another x."""
        found = copy(self)
        found.x = x
        return found

    def detached(self, leaves: dict[int, Tensor]) -> FunctionMap:
        found = self.with_x(tree_map(lambda leaf: cut(leaf, leaves) if isinstance(leaf, Tensor) else leaf, self.x))
        found._leaves = leaves
        return found

    def select(self, index: Tensor) -> FunctionMap:
        found = copy(self)
        found.x = select_inputs(self.x, index)
        found.point = None if self.point is None else self.point[index]
        return found


class _OfYAlone(FunctionMap):
    """The same where nothing but y needs a derivative: that of the lengths of rows is by a program, if there is one."""

    def row_norms(self, y: Tensor, scale: Tensor | None = None) -> Tensor:
        known = self.compressed(look=True)
        return _RowNorms.apply(y, self, scale) if known else super().row_norms(y, scale)  # pyright: ignore

    def pull_norms(self, y: Tensor, weights: Tensor, scale: Tensor | None) -> Tensor | None:
        """The gradient in y of <weights, row norms>."""
        recorded = self._recorded(y)
        found = None if recorded is None else recorded.pull_norms(self, y, weights, scale)
        found = self._compiled_norms(y, weights, scale) if found is None else found
        if found is not None:
            return found
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            return gradients((weights * super().row_norms(y, scale)).sum(), (y,))[0]

    def _compiled_norms(self, y: Tensor, weights: Tensor, scale: Tensor | None) -> Tensor | None:
        """The same by the compiled pullback, on a batch that holds each sample once for every colour.

        A product with a colour has one entry of J in each place, so what is differentiated is sum <w (J s), J s>.
        """
        if self.compiled is None or not isinstance(self.structure, Structure):
            return None
        colouring = self.structure.colouring(y.shape[1])
        seeds, by_rows = colouring.seeds(y)[0], colouring.by_rows
        if scale is not None and not by_rows:
            seeds = seeds * scale
        products, seeds = self.products(y).many(seeds, by_rows), seeds.unsqueeze(1)
        if scale is not None and by_rows:
            products = products * scale.square()
        a, t = (weights * seeds, 2 * products) if by_rows else (2 * weights * products, seeds)
        a, t = (v.expand(len(seeds), len(y), -1).flatten(0, 1) for v in (a, t))
        many = self.select(torch.arange(len(y), device=y.device).repeat(len(seeds)))
        found = self.compiled.pullback(self.fn, y.repeat(len(seeds), 1), many.x, [(a, t)], torch.zeros_like(a), ())
        return None if found is None else found[0].unflatten(0, (len(seeds), len(y))).sum(0)


class _RowNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, map: _OfYAlone, scale: Tensor | None) -> Tensor:
        ctx.map = map
        ctx.save_for_backward(y, scale)
        return super(_OfYAlone, map).row_norms(y, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        y, scale = ctx.saved_tensors
        return ctx.map.pull_norms(y, gradients[0], scale), None, None


class _ByAutograd(Linearization):
    """Products by J once it is there; before that by plain autograd, which evaluates g once for all of them."""

    def __init__(self, map: FunctionMap, y: Tensor) -> None:
        super().__init__(map, y)
        self.products = map.products(y)

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
        self.function, self.products = map, map.products(y)
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
