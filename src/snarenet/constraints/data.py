"""Reading what users pass in: numbers, tensors and functions of x, checked once and named in every error.

A *datum* (a matrix, a bound) is a number, a tensor shared by all samples, a tensor with a leading batch dimension, or a
function of x. An *input* x is None, a tensor or any pytree of tensors, each with the batch as its first dimension
(or a single number).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map  # public only after the oldest torch we support

from snarenet.tracing import tracing

Datum = float | Sequence[Any] | np.ndarray[Any, Any] | Tensor | Callable[[Any], Any]


def describe(value: object) -> str:
    """What came, for an error message: the shape of a tensor, else the type."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def as_tensor(name: str, value: object) -> Tensor:
    """A float tensor from a number, a sequence, an array or a tensor; numbers and integers become float64."""
    if isinstance(value, Tensor):
        tensor = value
    else:
        try:
            array = np.asarray(value)
            tensor = torch.from_numpy(array.copy())
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"`{name}` must be a number or a tensor, but got {type(value).__name__}") from error
    if tensor.layout != torch.strided:
        raise TypeError(
            f"`{name}` must be dense, but got {tensor.layout}: only a constant `A` of `Linear` may be sparse"
        )
    if tensor.is_complex():
        raise TypeError(f"`{name}` must be real, but got {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.to(torch.float64)


def check_shape(name: str, value: Tensor, *shapes: tuple[int | str, ...]) -> None:
    """Raise unless `value` has one of the shapes, in which a word stands for any size."""

    def fits(shape: tuple[int | str, ...]) -> bool:
        return value.ndim == len(shape) and all(
            isinstance(want, str) or want == have for want, have in zip(shape, value.shape, strict=True)
        )

    if not any(fits(shape) for shape in shapes):
        expected = " or ".join(f"({', '.join(map(str, shape))})" for shape in shapes)
        raise ValueError(f"`{name}` must have shape {expected}, but got {describe(value)}")


def check_finite(name: str, value: Tensor) -> Tensor:
    """`value`, unless it holds NaN or infinity."""
    if not tracing() and not bool(value.isfinite().all()):
        raise ValueError(f"`{name}` must be finite, but it holds NaN or infinity")
    return value


def check_ordered(lower: Tensor, upper: Tensor) -> None:
    """Raise unless `lower` <= `upper` everywhere, both numbers, with lower < inf and upper > -inf."""
    if tracing():
        return
    for name, bound, wrong in (("lower", lower, torch.inf), ("upper", upper, -torch.inf)):
        if bool((bound.isnan() | (bound == wrong)).any()):
            raise ValueError(f"`{name}` must not be NaN or {wrong}")
    crossed = lower > upper
    if bool(crossed.any()):
        worst = float((lower - upper)[crossed].max())
        raise ValueError(
            f"expected `lower` <= `upper`, but {int(crossed.sum())} entries are crossed, by up to {worst:.3g}"
        )


def check_objective(value: object, y: Tensor) -> Tensor:
    """`value`, unless it is not what an objective f(y, x) of the batch y must return."""
    if not isinstance(value, Tensor) or value.shape != y.shape[:1]:
        raise ValueError(
            f"`objective(y, x)` must return shape ({len(y)},), a number for every sample, but got {describe(value)}"
        )
    return value


def is_function(value: object) -> bool:
    """Is this datum a function of x (a module counts as one)?"""
    return callable(value) and not isinstance(value, Tensor)


def store(module: nn.Module, name: str, value: Datum) -> None:
    """Keep a datum on `module`: tensors as buffers or parameters, so that they move and save with it."""
    if is_function(value):
        setattr(module, name, value)
    elif isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, as_tensor(name, value))


def recall(module: nn.Module, name: str, x: Any) -> Tensor:
    """The datum kept under `name`, at x."""
    datum = getattr(module, name)
    if isinstance(datum, Tensor):
        return datum
    try:
        value = datum(x)
        return as_tensor(f"{name}(x)", value)
    except Exception as error:
        if x is None:
            raise ValueError(f"`{name}` is a function of x, but no x was given") from error
        raise


def recall_matrix(module: nn.Module, name: str, rows: int | None, y: Tensor, x: Any) -> Tensor:
    """The matrix kept under `name`, at x: (rows, n) or (B, rows, n) for y (B, n), with any number of rows if None."""
    matrix = recall(module, name, x)
    if is_function(getattr(module, name)):
        check_shape(name, matrix, (rows or "m", y.shape[1]), (y.shape[0], rows or "m", y.shape[1]))
        check_finite(name, matrix)
    elif matrix.ndim == 3:
        check_shape(name, matrix, (y.shape[0], *matrix.shape[1:]))
    return matrix


def check_inputs(y: Tensor, x: Any) -> None:
    """Raise unless every tensor of x has the samples of y as its first dimension, and is on its device."""
    for leaf in tree_leaves(x):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.ndim and leaf.shape[0] != y.shape[0]:
            raise ValueError(
                f"every tensor of `x` must have the batch as its first dimension: expected {y.shape[0]} samples as in "
                f"`y`, but got {describe(leaf)}"
            )
        if leaf.device != y.device:
            raise ValueError(f"`x` is on {leaf.device}, but `y` is on {y.device}")


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """The tree with its floating-point tensors in another precision."""
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )


def select_inputs(x: Any, index: Tensor) -> Any:
    """x of the samples `index`."""
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) and leaf.ndim else leaf, x)
