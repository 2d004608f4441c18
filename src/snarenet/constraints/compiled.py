r"""`Compiled`: a user's function, its products and its pullback as programs of torch.compile.

Plain autograd launches a kernel for each operation of the function, of its derivative and of the derivative of that;
compiled, they are a few. Products with J are written without forward mode and without vmap, which do not compile for a
batch of any size: J is the transpose of $w \mapsto J^\top w$, and many products are one with a batch that holds every
sample once for each of them, since the rows of a sample depend on that sample alone.

A program holds for every number of samples. What a new one computes is compared with the same computed by torch.func;
where it differs, or cannot be compiled, plain autograd goes on in its place, and `why` says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from snarenet.constraints.products import Products
from snarenet.constraints.structure import transformed
from snarenet.tracing import capturing

Ask = bool | Literal["auto"]
Fn = Callable[[Tensor, Any], Tensor]
Pairs = Sequence[tuple[Tensor, Tensor]]

_PATIENCE = 100  # calls by autograd before "auto" compiles: a few repairs, which take less time than a compiler
_ROOM = 2**26  # numbers that products which are computed together may have on a GPU (512 MiB in float64)
_CACHED = 2**20  # the same on a CPU: what its caches hold
_BACKEND = "inductor"  # which compiler
_REASON = 120  # characters of an error that are told


class Compiled:
    """The programs of one function, made when they are first called; never saved or copied.

    Args:
        ask: True, or "auto" for True on a GPU that triton compiles for, after some calls.
        rows: of the function.
    """

    def __init__(self, ask: Ask, rows: int) -> None:
        self.ask: Ask = ask
        self.rows = rows
        self._programs: dict[Callable[..., Any], _Program] = {}
        self._calls = 0

    def __deepcopy__(self, memo: Any) -> Compiled:
        return Compiled(self.ask, self.rows)

    def __reduce__(self) -> Any:
        return Compiled, (self.ask, self.rows)

    def __str__(self) -> str:
        """What `explain` says of it; nothing where nobody asked."""
        made = sum(bool(program.versions) and not program.why for program in self._programs.values())
        why = next((program.why for program in self._programs.values() if program.why), "")
        if not made and not why:
            return "to be compiled" if self.ask is True or self._calls else ""
        return f"{'partly' if made else 'not'} compiled: {why}" if why else "compiled"

    def meant_for(self, y: Tensor) -> bool:
        """Are programs to be made for tensors like y, if not now, then after some calls?"""
        return self.ask is True or (y.is_cuda and _has_triton())

    def value(self, fn: Fn, y: Tensor, x: Any) -> Tensor | None:
        """g(y): (B, rows). None, as from the other methods, where plain autograd is to compute it."""
        return self._run(_value, fn, (y, x))

    def product(self, fn: Fn, y: Tensor, x: Any, v: Tensor, by_rows: bool) -> Tensor | None:
        """J(y) v (B, rows) for v (B, n), or by rows its transpose's (B, n) for (B, rows)."""
        return self._run(_product, fn, (y, x, v), by_rows)

    def products(self, fn: Fn, y: Tensor, x: Any, seeds: Tensor, by_rows: bool) -> Tensor | None:
        """(k, B, rows) the products of J(y) with seeds (k, n), or by rows (k, B, n) its transpose's with (k, rows)."""
        if not len(y):
            return None
        room = _CACHED if y.device.type == "cpu" else _ROOM
        some = max(2, room // max(1, len(seeds) * max(self.rows, y.shape[1])))
        found = []
        for start in range(0, len(y), some):
            part = y, x
            if len(y) > some:
                part = tree_map(lambda t, start=start: t[start : start + some] if _batched(t) else t, part)
            found.append(self._run(_products, fn, part, seeds, by_rows))
            if found[-1] is None:
                return None
        together = found[0] if len(found) == 1 else torch.cat(found)
        return together.transpose(0, 1)

    def pullback(
        self, fn: Fn, y: Tensor, x: Any, pairs: Pairs, weights: Tensor, wanted: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The gradients of sum_j <a_j, J(y) t_j> + <weights, g(y)> in y and in some leaves of x, by their numbers."""
        if not all(_batched(leaf) for leaf in [tree_leaves(x)[i] for i in wanted]):
            return None  # one number for all samples: its gradient is a sum, which samples that fill up a batch are in
        return self._run(_pullback, fn, (y, x, [tuple(pair) for pair in pairs], weights), wanted)

    def _run(self, function: Callable[..., Any], fn: Fn, batched: Any, *shared: Any) -> Any:
        """What the program of a function returns for tensors that have the batch first; None where it must not run."""
        if not self._may(batched):
            return None
        program = self._programs.get(function)
        if program is None:
            program = self._programs[function] = _Program(function)
        if program.why:
            return None
        if capturing():  # into a CUDA graph, where nothing can be compiled
            return program.again(fn, batched, *shared)
        try:
            return program(fn, batched, *shared)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler, or of the function, which plain autograd will raise again
            lines = str(error).strip().splitlines() or [""]
            program.why = f"{type(error).__name__}: {lines[0]}"[:_REASON]
            return None

    def _may(self, batched: Any) -> bool:
        """May a program run here, and is it worth it?"""
        if torch.compiler.is_compiling():  # first: most of what follows cannot be traced
            return False
        y: Tensor = batched[0]
        if not len(y) or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False  # a result has no graph
        if transformed() or is_in_torch_dispatch_mode():
            return False
        if not self.meant_for(y):
            return False
        if self.ask == "auto":
            self._calls += 1
            if self._calls <= _PATIENCE and not _at_once:
                return False
        return True


class CompiledProducts(Products):
    """Products by programs, or by plain autograd.

    Args:
        function: g, for plain autograd.
        y: where.
        compiled: the programs.
        fn: the user's function.
        x: its second argument.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], y: Tensor, compiled: Compiled, fn: Fn, x: Any) -> None:
        super().__init__(function, y)
        self.compiled, self.fn, self.x = compiled, fn, x

    def jvp(self, direction: Tensor) -> Tensor:
        found = self.compiled.product(self.fn, self.y, self.x, direction, by_rows=False)
        return super().jvp(direction) if found is None else found

    def vjp(self, weights: Tensor) -> Tensor:
        found = self.compiled.product(self.fn, self.y, self.x, weights, by_rows=True)
        return super().vjp(weights) if found is None else found

    def many(self, seeds: Tensor, by_rows: bool) -> Tensor:
        found = self.compiled.products(self.fn, self.y, self.x, seeds, by_rows) if len(seeds) else None
        return super().many(seeds, by_rows) if found is None else found


class _Program:
    """A function compiled for a batch of any size.

    Attributes:
        versions: how often it was compiled: for other devices and precisions, or for what changed in the function.
        why: why it must not be used (any more); "" if nothing speaks against it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # with code of its own: the compiler allows every code a few versions, and each set needs some
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        self.function = function
        self.versions, self.why = 0, ""
        self.compiled = torch.compile(own, fullgraph=True, backend=self._count)

    def _count(self, graph: Any, inputs: Any) -> Any:
        """The compiler, which says that it was called."""
        self.versions += 1
        return torch._dynamo.lookup_backend(_BACKEND)(graph, inputs)

    def __call__(self, fn: Fn, batched: Any, *shared: Any) -> Any:
        """The result, that of the function itself where the program is new; an error if they differ."""
        before = self.versions
        with torch.no_grad(), nullcontext() if before else _quietly():
            found = self._result(fn, batched, *shared)
            if self.versions == before:
                return found
            exact = _EXACT.get(self.function, self.function)(fn, batched, *shared)
        for a, b in zip(tree_leaves(found), tree_leaves(exact), strict=True):
            if not _agree(a, b):
                raise ArithmeticError(f"compiled, it differs from what it was by {float((a - b).abs().max()):.2g}")
        return exact

    def again(self, fn: Fn, batched: Any, *shared: Any) -> Any:
        """The result, if there is a version for it; None if there is none."""
        try:
            with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
                return self._result(fn, batched, *shared)
        except RuntimeError:
            return None

    def _result(self, fn: Fn, batched: Any, *shared: Any) -> Any:
        single = len(batched[0]) == 1  # which the compiler takes for a constant
        found = self.compiled(fn, tree_map(_doubled if single else _ready, batched), *shared)
        return tree_map(lambda t: t[:1], found) if single else found


def _value(fn: Fn, batched: tuple[Tensor, Any]) -> Tensor:
    return fn(*batched)


def _product(fn: Fn, batched: tuple[Tensor, Any, Tensor], by_rows: bool) -> Tensor:
    y, x, v = batched
    value, pull = torch.func.vjp(lambda y: fn(y, x), y)[:2]
    if by_rows:
        return pull(v)[0]
    push = torch.func.vjp(lambda w: pull(w)[0], torch.zeros_like(value))[1]
    return push(v)[0]


def _products(fn: Fn, batched: tuple[Tensor, Any], seeds: Tensor, by_rows: bool) -> Tensor:
    """(B, k, rows or n): one product with k copies of each sample."""
    count = len(seeds)
    y, x = tree_map(
        lambda t: t.unsqueeze(1).expand(-1, count, *t.shape[1:]).flatten(0, 1) if _batched(t) else t, batched
    )
    v = seeds.unsqueeze(0).expand(len(batched[0]), -1, -1).flatten(0, 1)
    return _product(fn, (y, x, v), by_rows).unflatten(0, (-1, count))


def _products_by_autograd(fn: Fn, batched: tuple[Tensor, Any], seeds: Tensor, by_rows: bool) -> Tensor:
    y, x = batched
    return Products(lambda y: fn(y, x), y).many(seeds, by_rows).transpose(0, 1)


def _pullback(
    fn: Fn, batched: tuple[Tensor, Any, Pairs, Tensor], wanted: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    y, x, pairs, weights = batched
    leaves, structure = tree_flatten(x)

    def total(y: Tensor, chosen: list[Tensor]) -> Tensor:
        mine = list(leaves)
        for i, leaf in zip(wanted, chosen, strict=True):
            mine[i] = leaf
        value, pull = torch.func.vjp(lambda y: fn(y, tree_unflatten(mine, structure)), y)[:2]
        found = (weights * value).sum()
        for a, t in pairs:  # <a, J t> as <J'a, t>
            found = found + (pull(a)[0] * t).sum()
        return found

    return torch.func.grad(total, argnums=(0, 1))(y, [leaves[i] for i in wanted])


_EXACT = {_products: _products_by_autograd}  # what a program is compared with, if not with its own function


def _batched(leaf: Any) -> bool:
    """Is this a tensor with the batch as its first dimension?"""
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _ready(leaf: Any) -> Any:
    """A tensor as the programs know it: without a history, in the usual order, of any number of samples."""
    if leaf is not None and not isinstance(leaf, Tensor):
        raise TypeError(f"`x` must be made of tensors alone, but it holds a {type(leaf).__name__}")
    if leaf is None or not leaf.ndim:
        return leaf
    leaf = leaf.detach().contiguous()  # a new tensor: the mark is not the user's
    torch._dynamo.mark_dynamic(leaf, 0)
    return leaf


def _doubled(leaf: Any) -> Any:
    return _ready(torch.cat([leaf, leaf]) if _batched(leaf) else leaf)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Are these (B, ...) the same but for rounding?

    In sizes of each entry over the batch, and of the sample's largest: near a solution equalities are nothing but the
    rounding of what cancels in them.
    """
    eps, size = torch.finfo(b.dtype).eps, b.abs().nan_to_num(0.0, 0.0)
    largest = size.flatten(1).amax(1).view(-1, *[1] * (b.ndim - 1)) if b.numel() else 0.0
    close = (a - b).abs() <= eps**0.5 * (size + size.amax(0)) + eps**0.75 * largest
    return bool((close | (a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def _quietly() -> Iterator[None]:
    """The compiler says in an error what it cannot do, and need not print it as well."""
    log = logging.getLogger("torch._guards")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


_at_once: list[None] = []  # as many as there are calls that cannot wait, in any thread


@contextmanager
def at_once() -> Iterator[None]:
    """For calls before a recording: "auto" compiles at the first one, as nothing can be compiled in a recording."""
    _at_once.append(None)
    try:
        yield
    finally:
        _at_once.pop()
