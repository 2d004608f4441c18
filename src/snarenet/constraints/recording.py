r"""`Recorder`: what torch does with numbers, written down as arithmetic on each of them.

A dispatch mode sees every operation that a function, or autograd on its way back, makes of one sample. It keeps a
second memory beside torch's: for every place of a storage the *node* of the number there, a constant, an input or an
operation on two other nodes. Views and writes in place need no rule, as they see the same memory. Products with zero
and one are left out, so a derivative in the direction of a few variables has only what belongs to them.

Whatever has no rule raises `UnrecordableError`: all that looks at values (`where`, comparisons, `item`, maxima), so
what is recorded holds at every point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

OPERATIONS = ("add", "sub", "mul", "div", "neg", "sin", "cos", "exp", "log", "sqrt", "tanh")
_ADD, _SUB, _MUL, _DIV, _NEG, *_FUNCTIONS = range(len(OPERATIONS))
_EXP = OPERATIONS.index("exp")
CONSTANT, INPUT = -1, -2  # kinds of nodes that are no operations
MOST = 2**20  # nodes, before a function is taken to be too large: some seconds to record
Array = np.ndarray[Any, Any]


class UnrecordableError(Exception):
    """The function does what no straight-line arithmetic can do, or too much."""


class Nodes:
    """All nodes so far: kind, arguments and, of constants, the value."""

    def __init__(self) -> None:
        self.count = 0
        self.kind, self.first, self.second = (np.empty(1024, np.int32) for _ in range(3))
        self.value = np.empty(1024)
        self.zero, self.one = self.constants(np.array([0.0, 1.0]))

    def constants(self, values: Array) -> Array:
        """Nodes of numbers, one for each number."""
        unique, inverse = np.unique(values, return_inverse=True)
        made = self._new(CONSTANT, np.zeros(len(unique), np.int32), np.zeros(len(unique), np.int32))
        self.value[made] = unique
        if self.count > 2:  # these two are known by their nodes
            made = np.where(unique == 0, self.zero, np.where(unique == 1, self.one, made))
        return made[inverse.reshape(values.shape)]

    def inputs(self, shape: tuple[int, ...]) -> Array:
        """New inputs."""
        none = np.zeros(int(np.prod(shape)), np.int32)
        return self._new(INPUT, none, none).reshape(shape)

    def unary(self, kind: int, a: Array) -> Array:
        """An operation on one node."""
        return self._operation(kind, a, np.full_like(a, self.zero))

    def binary(self, kind: int, a: Array, b: Array) -> Array:
        """An operation on two, simplified where one of them is 0 or 1."""
        a, b = np.broadcast_arrays(a, b)
        zero_a, zero_b, one_a, one_b = a == self.zero, b == self.zero, a == self.one, b == self.one
        if kind in (_ADD, _SUB):
            known = np.where(zero_b, a, b)
            simple = zero_b | (zero_a if kind == _ADD else zero_b)
        elif kind == _MUL:
            known = np.where(zero_a | zero_b, self.zero, np.where(one_a, b, a))
            simple = zero_a | zero_b | one_a | one_b
        else:
            known, simple = a, one_b
        found = known.copy()
        found[~simple] = self._operation(kind, a[~simple], b[~simple])
        return found

    def _operation(self, kind: int, a: Array, b: Array) -> Array:
        """The nodes of new operations; the same operation on the same nodes is made once."""
        if kind in (_ADD, _MUL):
            a, b = np.minimum(a, b), np.maximum(a, b)
        codes, inverse = np.unique(a.ravel().astype(np.int64) * 2**31 + b.ravel(), return_inverse=True)
        first, second = (part.astype(np.int32) for part in np.divmod(codes, 2**31))
        return self._new(kind, first, second)[inverse].reshape(a.shape)

    def _new(self, kind: int, first: Array, second: Array) -> Array:
        begin, self.count = self.count, self.count + len(first)
        if self.count > MOST:
            raise UnrecordableError(f"more than {MOST:,} operations")
        if self.count > len(self.kind):
            self.kind, self.first, self.second, self.value = (
                np.resize(array, 2 * self.count) for array in (self.kind, self.first, self.second, self.value)
            )
        new = slice(begin, self.count)
        self.kind[new], self.first[new], self.second[new] = kind, first, second
        return np.arange(begin, self.count, dtype=np.int32)


class Recorder(TorchDispatchMode):
    """Records what happens to the tensors that were given to it by `track`."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = Nodes()
        self._memory: dict[int, Array] = {}  # storage -> node of every place
        self._kept: list[Any] = []  # so that no storage is freed, and its place used again

    def track(self, tensor: Tensor, nodes: Array) -> Tensor:
        """The tensor, whose numbers are these nodes."""
        self._memory[tensor.untyped_storage().data_ptr()] = np.zeros(
            tensor.untyped_storage().nbytes() // tensor.element_size(), np.int32
        )
        self._kept.append(tensor)
        self._view(tensor)[...] = nodes
        return tensor

    def read(self, tensor: Tensor) -> Array:
        """The nodes of a tensor's numbers; constants if it was never written to by what is recorded."""
        if tensor.untyped_storage().data_ptr() in self._memory:
            return self._view(tensor)
        with _disable_current_modes():
            numbers = tensor.detach().to(torch.float64).numpy()
        return self.nodes.constants(numbers)

    def _view(self, tensor: Tensor) -> Array:
        memory = self._memory[tensor.untyped_storage().data_ptr()]
        strides = tuple(memory.itemsize * stride for stride in tensor.stride())
        return np.lib.stride_tricks.as_strided(memory[tensor.storage_offset() :], tuple(tensor.shape), strides)

    def _tracked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(self._tracked(leaf) for leaf in leaves):
            out = func(*args, **kwargs)
            self._kept.append(out)
            return out
        name = func._schema.name.removeprefix("aten::")
        writes = func._schema.is_mutable
        rule = _RULES.get(name.rstrip("_") if writes else name)
        if rule is None and (writes or name in _LOOKING):
            raise UnrecordableError(f"`{name}`")
        if writes and not self._tracked(args[0]):
            self.track(args[0], self.read(args[0]))
        read = tree_map(
            lambda leaf: self.read(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, args
        )
        made = None if rule is None else rule(self.nodes, *read, **kwargs)
        out = func(*args, **kwargs)
        self._kept.append(out)
        if made is not None:
            self._write(out, made)
        elif not all(self._tracked(leaf) for leaf in tree_leaves(out)) and name not in _CONSTANT:  # no view either
            raise UnrecordableError(f"`{name}`")
        return out

    def _write(self, out: Tensor, made: Array) -> None:
        if self._tracked(out):
            self._view(out)[...] = made
        else:
            self.track(out, made)


def _numbers(index: Any) -> Any:
    return index.numpy() if isinstance(index, Tensor) else index


def _scalar(nodes: Nodes, value: Any) -> Array:
    return value if isinstance(value, np.ndarray) else nodes.constants(np.asarray(float(value)))


def _binary(kind: int) -> Callable[..., Array]:
    def rule(nodes: Nodes, a: Any, b: Any, alpha: float = 1, rounding_mode: Any = None) -> Array:
        if rounding_mode is not None:
            raise UnrecordableError("a division that rounds")
        a, b = _scalar(nodes, a), _scalar(nodes, b)
        return nodes.binary(kind, a, b if alpha == 1 else nodes.binary(_MUL, b, _scalar(nodes, alpha)))

    return rule


def _power(nodes: Nodes, a: Any, exponent: Any) -> Array:
    if not isinstance(exponent, int | float) or not float(exponent).is_integer() or abs(exponent) > 8:
        raise UnrecordableError(f"a power of {exponent}")
    found = np.full_like(a, nodes.one)
    for _ in range(abs(int(exponent))):
        found = nodes.binary(_MUL, found, a)
    return found if exponent >= 0 else nodes.binary(_DIV, np.full_like(a, nodes.one), found)


def _sum(nodes: Nodes, a: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    axes = range(a.ndim) if dim is None or dim == [] else [d % a.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    found = a
    for axis in axes:
        parts = np.moveaxis(found, axis, 0)
        total = np.full(parts.shape[1:], nodes.zero, np.int32)
        for part in parts:
            total = nodes.binary(_ADD, total, part)
        found = np.expand_dims(total, axis)
    return found if keepdim else np.squeeze(found, tuple(axes))


def _add_at(nodes: Nodes, base: Array, place: Array, values: Array) -> Array:
    """Values added to flat places of the base, of which some come more than once."""
    found, place, values = base.ravel().copy(), place.ravel(), values.ravel()
    order = np.argsort(place, kind="stable")
    ordered = place[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.int64)
    rank = np.arange(len(ordered)) - np.repeat(starts, np.diff(np.r_[starts, len(ordered)]))
    for turn in range(int(rank.max(initial=-1)) + 1):
        now = order[rank == turn]
        found[place[now]] = nodes.binary(_ADD, found[place[now]], values[now])
    return found.reshape(base.shape)


def _places(shape: tuple[int, ...]) -> Array:
    return np.arange(int(np.prod(shape))).reshape(shape)


def _index(nodes: Nodes, a: Array, indices: Sequence[Any]) -> Array:
    return a[tuple(slice(None) if index is None else _numbers(index) for index in indices)]


def _index_put(
    nodes: Nodes, a: Array, indices: Sequence[Any], values: Array, accumulate: bool = False, unsafe: bool = False
) -> Array:
    place = _index(nodes, _places(a.shape), indices)
    values = np.broadcast_to(values, place.shape)
    if accumulate:
        return _add_at(nodes, a, place, values)
    found = a.ravel().copy()
    found[place.ravel()] = values.ravel()
    return found.reshape(a.shape)


def _index_add(nodes: Nodes, a: Array, dim: int, index: Tensor, source: Array, alpha: float = 1) -> Array:
    place = np.take(_places(a.shape), _numbers(index), dim)
    return _add_at(nodes, a, place, nodes.binary(_MUL, source, _scalar(nodes, alpha)))


def _scatter_add(nodes: Nodes, a: Array, dim: int, index: Tensor, source: Array) -> Array:
    place = np.take_along_axis(_places(a.shape), _numbers(index), dim)
    return _add_at(nodes, a, place, source[tuple(slice(size) for size in index.shape)])


def _within(sizes: Sequence[int], nodes: Nodes, place: Array, gradient: Array) -> Array:
    found = np.full(int(np.prod(sizes)), nodes.zero, np.int32)
    found[place.ravel()] = gradient.ravel()
    return found.reshape(tuple(sizes))


def _slice_backward(nodes: Nodes, gradient: Array, sizes: Any, dim: int, start: int, end: int, step: int) -> Array:
    index = [slice(None)] * len(sizes)
    index[dim] = slice(start, end, step)
    return _within(sizes, nodes, _places(tuple(sizes))[tuple(index)], gradient)


def _select_backward(nodes: Nodes, gradient: Array, sizes: Any, dim: int, index: int) -> Array:
    return _within(sizes, nodes, np.take(_places(tuple(sizes)), index, dim), gradient)


def _mm(nodes: Nodes, a: Array, b: Array) -> Array:
    return _sum(nodes, nodes.binary(_MUL, a[..., :, :, None], b[..., None, :, :]), -2)


def _mean(nodes: Nodes, a: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    total = _sum(nodes, a, dim, keepdim)
    return nodes.binary(_DIV, total, _scalar(nodes, a.size // max(1, total.size)))


def _sigmoid(nodes: Nodes, a: Array) -> Array:
    return nodes.binary(_DIV, nodes.one, nodes.binary(_ADD, nodes.one, nodes.unary(_EXP, nodes.unary(_NEG, a))))


def _sigmoid_backward(nodes: Nodes, gradient: Array, result: Array) -> Array:
    slope = nodes.binary(_MUL, result, nodes.binary(_SUB, nodes.one, result))
    return nodes.binary(_MUL, gradient, slope)


def _tanh_backward(nodes: Nodes, gradient: Array, result: Array) -> Array:
    slope = nodes.binary(_SUB, nodes.one, nodes.binary(_MUL, result, result))
    return nodes.binary(_MUL, gradient, slope)


def _copy(nodes: Nodes, a: Array, *_: Any, **__: Any) -> Array:
    return a.copy()


_RULES: dict[str, Callable[..., Array]] = {
    "add": _binary(_ADD),
    "sub": _binary(_SUB),
    "mul": _binary(_MUL),
    "div": _binary(_DIV),
    "rsub": lambda nodes, a, b, alpha=1: _binary(_SUB)(nodes, b, a, alpha),
    "neg": lambda nodes, a: nodes.unary(_NEG, a),
    **{OPERATIONS[kind]: lambda nodes, a, kind=kind: nodes.unary(kind, a) for kind in _FUNCTIONS},
    "reciprocal": lambda nodes, a: nodes.binary(_DIV, np.full_like(a, nodes.one), a),
    "square": lambda nodes, a: nodes.binary(_MUL, a, a),
    "pow": _power,
    "sigmoid": _sigmoid,
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
    "sum": _sum,
    "mean": _mean,
    "clone": _copy,
    "_to_copy": _copy,
    "copy": lambda nodes, a, source, *_: np.broadcast_to(source, a.shape).copy(),
    "fill": lambda nodes, a, value: np.broadcast_to(_scalar(nodes, value), a.shape).copy(),
    "zero": lambda nodes, a: np.full_like(a, nodes.zero),
    "cat": lambda nodes, parts, dim=0: np.concatenate(parts, dim),
    "stack": lambda nodes, parts, dim=0: np.stack(parts, dim),
    "index": _index,
    "index_select": lambda nodes, a, dim, index: np.take(a, _numbers(index), dim),
    "gather": lambda nodes, a, dim, index: np.take_along_axis(a, _numbers(index), dim),
    "index_put": _index_put,
    "_index_put_impl": _index_put,
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "mm": _mm,
    "bmm": _mm,
}
_CONSTANT = {
    *("zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
}
_LOOKING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}
