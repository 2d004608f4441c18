"""`Nonlinear`: rows given by any differentiable function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from snarenet.constraints.base import Instance, LimitedRows
from snarenet.constraints.bounds import Bounds
from snarenet.constraints.compiled import Ask, Compiled
from snarenet.constraints.data import Datum, cast, check_inputs
from snarenet.constraints.maps import FunctionMap
from snarenet.constraints.sparsity import read
from snarenet.constraints.structure import Given, Structure


class Nonlinear(LimitedRows):
    """lower <= fn(y, x) <= upper, or fn(y, x) = equals.

    Args:
        fn: function of the whole batch, y (B, n) and x to (B, rows), whose row b depends on sample b alone. It is
            called in the precision of the repair. A module works too, in any precision; its parameters, like tensors
            that a closure captures, receive gradients.
        rows: how many constraints fn returns.
        lower: lower bounds: a number, (rows,), (B, rows), or a function of x; None for none.
        upper: upper bounds, likewise.
        equals: right-hand side of equalities, instead of `lower` and `upper`.
        jacobian: function of (y, x) that returns (B, rows, n), where you have a faster one than `torch.func`. It must
            be the derivative of fn in y, made of the same tensors. It is called once a step, where J is needed as a
            matrix; products with J and the backward pass differentiate fn. In a sparse layout it stays sparse.
        sparsity: where the Jacobian may be nonzero. "auto" looks for it at random points around the first predictions,
            if there are many variables, and now and then checks what it found; the Jacobian is then computed by as many
            passes as there are colours (columns without a common row share one), not by one for each variable. None
            is dense. A matrix (rows, n), of booleans or sparse, is believed: see `check_sparsity`.
        compile: compile fn, its products and its backward pass with `torch.compile`, once for batches of all sizes: a
            few kernels in place of hundreds. It takes some seconds to a minute when a function is first repaired; what
            cannot be compiled is computed as before (`explain` says why). "auto" does so on a GPU, after the first few
            repairs. The rows of a sample must not depend on its place in the batch.

    Example:
        >>> import torch, snarenet as sn
        >>> ring = sn.Nonlinear(lambda y, x: y.norm(dim=1, keepdim=True), rows=1, lower=1.0, upper=2.0)
        >>> ring.violation(torch.tensor([[3.0, 4.0]])).item()
        3.0
    """

    def __init__(
        self,
        fn: Callable[[Tensor, Any], Tensor],
        rows: int,
        lower: Datum | None = None,
        upper: Datum | None = None,
        equals: Datum | None = None,
        jacobian: Callable[[Tensor, Any], Tensor] | None = None,
        sparsity: Any = "auto",
        compile: Ask = "auto",
    ) -> None:
        super().__init__()
        if not callable(fn):
            raise TypeError(f"`fn` must be a function of (y, x), but got {type(fn).__name__}")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise ValueError(f"`rows` must be a whole number of constraints, but got {rows!r}")
        if not isinstance(compile, bool) and compile != "auto":
            raise ValueError(f'`compile` must be True, False or "auto", but got {compile!r}')
        self.fn, self.rows, self.given_jacobian = fn, rows, jacobian
        self.structure = _structure(sparsity, rows, jacobian is not None)
        self.compiled = Compiled(compile, rows) if compile else None
        self.limit = Bounds(lower, upper, equals)
        self.limit.check_rows(rows, "rows")

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        fn, x_in_precision = _in_precision(self.fn, y), cast(x, y.dtype)
        known = self.structure, y.detach(), self.compiled
        map = FunctionMap(fn, x_in_precision, self.known_rows(), self.given_jacobian, *known)
        return self._instance(y, map, x)


def _structure(sparsity: Any, rows: int, given: bool) -> Structure | Given | None:
    """What is known of the pattern at first."""
    if sparsity is None:
        return None
    if isinstance(sparsity, str):
        if sparsity != "auto":
            raise ValueError(f'`sparsity` must be "auto", None or a matrix (rows, n), but got {sparsity!r}')
        return Given() if given else Structure()
    if given:
        raise ValueError("give `jacobian` or `sparsity`, not both: a `jacobian` in a sparse layout has its pattern")
    return Structure(read("sparsity", sparsity, rows))


def _in_precision(fn: Callable[[Tensor, Any], Tensor], y: Tensor) -> Callable[[Tensor, Any], Tensor]:
    """fn as it is, or, for a module of another precision than y, a call of it with its tensors cast."""
    if not isinstance(fn, nn.Module):
        return fn
    tensors = {**dict(fn.named_parameters()), **dict(fn.named_buffers())}
    other = {name: t for name, t in tensors.items() if t.is_floating_point() and t.dtype != y.dtype}
    if not other:
        return fn
    other = cast(other, y.dtype)
    return lambda y, x: torch.func.functional_call(fn, other, (y, x))
