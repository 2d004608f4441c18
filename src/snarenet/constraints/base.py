"""`Constraints`: what every set of constraints l(x) <= g(y, x) <= u(x) offers, and the residual that measures it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from snarenet.constraints.bounds import Bounds
from snarenet.constraints.data import cast, check_inputs, check_shape, describe
from snarenet.constraints.maps import FunctionMap, Map
from snarenet.constraints.structure import check as check_pattern
from snarenet.memo import Memo
from snarenet.tracing import tracing

if TYPE_CHECKING:
    from snarenet.constraints.stack import Stack


def residual(value: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """relu(value - upper) - relu(lower - value): what each row is above or below its bounds, zero between them."""
    if torch.is_grad_enabled() and (lower.requires_grad or upper.requires_grad):
        return torch.relu(value - upper) - torch.relu(lower - value)  # a clamp is constant in bounds that are equal
    return value - torch.clamp(value, lower, upper)


def largest(r: Tensor) -> Tensor:
    """(B,) the largest entry of each row of |r|."""
    return r.abs().amax(1) if r.shape[1] else r.new_zeros(r.shape[0])


class Instance(NamedTuple):
    """The constraints of one batch: g with x filled in, the bounds, both (B, rows), and which parts are equalities.

    `equal` has an entry for each part of a stack, true where the set was given as equalities: known without a look at
    the bounds.
    """

    map: Map
    lower: Tensor
    upper: Tensor
    equal: tuple[bool, ...] = (False,)

    def select(self, index: Tensor) -> Instance:
        """The constraints of some of the samples."""
        return Instance(self.map.select(index), self.lower[index], self.upper[index], self.equal)

    def relaxed(self, relax: float | Tensor) -> Instance:
        """The constraints with every bound widened by `relax`, a number, (rows,) or (B, rows), all >= 0."""
        if not isinstance(relax, Tensor):
            if not relax >= 0:
                raise ValueError(f"`relax` must be >= 0, but got {relax!r}")
            if relax == 0:
                return self
        else:
            if relax.ndim:
                check_shape("relax", relax, tuple(self.lower.shape[1:]), tuple(self.lower.shape))
            if not tracing() and not bool((relax >= 0).all()):
                raise ValueError("`relax` must be >= 0 everywhere")
            relax = relax.to(self.lower)
        equal = (False,) * len(self.equal)  # a widened equality is none
        return Instance(self.map, self.lower - relax, self.upper + relax, equal)


class Prepared(NamedTuple):
    """Predictions and the constraints of their batch, ready to be repaired.

    Attributes:
        y: (B, n) the predictions, in the precision of the repair.
        finite: (B,) true where all their entries are.
        start: (B, n) where to begin: y, and 0 where it is not finite.
        instance: the constraints, relaxed if asked for.
    """

    y: Tensor
    finite: Tensor
    start: Tensor
    instance: Instance


class Constraints(nn.Module, ABC):
    """A set {y : l(x) <= g(y, x) <= u(x)}, one for every x.

    Subclass it for a set of your own: define `value` and `bounds`, and set `rows`; `torch.func` gives the Jacobian.
    Two sets joined by `&` hold together.

    Attributes:
        rows: how many constraints there are; None where only a call tells (a `Box` with scalar bounds).
        size: the n of y (B, n); None where the set does not fix it.
    """

    rows: int | None = None
    size: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.memo = Memo()

    @abstractmethod
    def value(self, y: Tensor, x: Any = None) -> Tensor:
        """g(y, x): (B, rows)."""

    @abstractmethod
    def bounds(self, x: Any = None) -> tuple[Tensor, Tensor]:
        """(l, u), each a number, (rows,) or (B, rows); infinite where there is no bound."""

    def at(self, y: Tensor, x: Any = None) -> Instance:
        """The constraints of the batch x, in the dtype of y: every function of x evaluated once."""
        if self.rows is None:
            raise ValueError(f"`{type(self).__name__}` must set `rows`, the number of its constraints")
        check_inputs(y, x)
        return self._instance(y, FunctionMap(self.value, cast(x, y.dtype), self.rows), x)

    def prepare(
        self, y: Tensor, x: Any = None, relax: float | Tensor = 0.0, dtype: torch.dtype = torch.float64
    ) -> Prepared:
        """What every method begins with: predictions checked and cast, x filled in, bounds widened by `relax`."""
        work = self.check(y).to(dtype)
        finite = work.isfinite().all(1)
        start = torch.where(finite.unsqueeze(1), work, 0.0)
        return Prepared(work, finite, start, self.at(start, x).relaxed(relax))

    def jacobian(self, y: Tensor, x: Any = None) -> Tensor:
        """The derivative of g in y: (B, rows, n), or (rows, n) where all samples share it."""
        return self.at(self.check(y), x).map.jacobian(y)

    def check_sparsity(self, y: Tensor, x: Any = None) -> None:
        """Raise if a Jacobian at y (B, n), or near it, has an entry outside the pattern of its function.

        For tests of patterns that you declare, and of those that were detected: the whole Jacobian is formed.
        """
        for part in self.at(self.check(y), x).map.parts:
            if isinstance(part, FunctionMap) and (pattern := part.pattern) is not None:
                check_pattern(pattern, part, y)

    def residual(self, y: Tensor, x: Any = None, relax: float | Tensor = 0.0) -> Tensor:
        """(B, rows) violations of the bounds widened by `relax`: positive above, negative below, else zero."""
        instance = self.at(self.check(y), x)
        return residual(instance.map.value(y), instance.lower - relax, instance.upper + relax)

    def violation(self, y: Tensor, x: Any = None) -> Tensor:
        """(B,) the largest violation of each sample."""
        return largest(self.residual(y, x))

    def forward(self, y: Tensor, x: Any = None) -> Tensor:
        """The violation: a set that is called says how far y is from obeying it."""
        return self.violation(y, x)

    @property
    def parts(self) -> Sequence[Constraints]:
        """The sets that this one joins: itself, unless it is a `Stack`."""
        return (self,)

    @property
    def constant(self) -> bool:
        """Are all rows linear, with one matrix for all samples that is not learned, so that J never changes?"""
        return False

    @property
    def constant_rows(self) -> Tensor:
        """(rows,) true for rows that are linear with one matrix for all samples: their Jacobian never changes."""
        return torch.full((self.known_rows(),), self.constant)

    def rows_for(self, size: int | None) -> int | None:
        """How many rows there are for a y of `size` entries, None where only a call can tell."""
        return self.rows

    def known_rows(self, size: int | None = None) -> int:
        """The same, or an error where only a call can tell."""
        rows = self.rows_for(size)
        if rows is None:
            raise ValueError(
                f"the rows of this `{type(self).__name__}` are not known before y and x: give a bound as a tensor "
                "(rows,), or ask `at(y, x)`"
            )
        return rows

    def check(self, y: Tensor) -> Tensor:
        """y, if it is a batch of vectors of this set's size."""
        if not isinstance(y, Tensor) or y.ndim != 2 or self.size not in (None, y.shape[1]):
            hint = _how_to_flatten(y, self.size) if isinstance(y, Tensor) and y.ndim > 2 else ""
            raise ValueError(f"`y` must have shape (B, {self.size or 'n'}), but got {describe(y)}{hint}")
        if not y.is_floating_point():
            raise TypeError(f"`y` must be a floating-point tensor, but got {y.dtype}")
        return y

    @staticmethod
    def from_cvxpy(constraints: Any, variables: Any = None, parameters: Any = None) -> Constraints:
        """The set of a CVXPY model: its variables become y, its parameters become x.

        Args:
            constraints: a `cvxpy.Problem`, or a constraint or a list of them.
            variables: what y (B, n) is made of, one after the other, each column by column; None for all variables of
                the model, in the order that they appear in.
            parameters: what x (B, d) is made of, likewise. An x may also be a dictionary from the names of the
                parameters to tensors (B, *shape).
        """
        from snarenet.doors.cvxpy import constraints as read

        return read(constraints, variables, parameters)

    @staticmethod
    def from_casadi(
        g: Any, lower: Any = None, upper: Any = None, variables: Any = None, parameters: Any = None
    ) -> Constraints:
        """lower <= g(y, p) <= upper with a function of CasADi; p becomes x.

        Args:
            g: a `casadi.Function` of y, or of (y, p), whose first output is g; an expression in the symbols `variables`
                and `parameters`; what `nlpsol` takes, a dictionary with "x", "g" and perhaps "p"; or an `Opti`, which
                has bounds of its own.
            lower: lower bounds, a number or (rows,), infinite where there is none; None for none. Rows whose bounds are
                equal are equalities. What depends on p belongs into g.
            upper: upper bounds, likewise.
            variables: the symbols that are y, where g is an expression: SX or MX.
            parameters: the symbols that are x; None for none.
        """
        from snarenet.doors.casadi import constraints as read

        return read(g, lower, upper, variables, parameters)

    @staticmethod
    def from_nl(path: Any) -> Constraints:
        """The constraints and bounds of an AMPL .nl file, as Pyomo and JuMP write it; its variables are y."""
        from snarenet.doors.nl import read

        return read(path).constraints

    def __and__(self, other: Constraints) -> Stack:
        from snarenet.constraints.stack import Stack

        return Stack(self, other) if isinstance(other, Constraints) else NotImplemented

    def _apply(self, fn: Any, recurse: bool = True) -> Constraints:
        self.memo.clear()
        return super()._apply(fn, recurse)

    def _instance(self, y: Tensor, map: Map, x: Any) -> Instance:
        lower, upper = self.bounds(x)
        shape = (y.shape[0], map.rows)
        limit = getattr(self, "limit", None)
        equal = isinstance(limit, Bounds) and limit.equal
        names = ("equals", "equals") if equal else ("lower", "upper")
        lower, upper = (_expand(name, bound, shape, y) for name, bound in zip(names, (lower, upper), strict=True))
        return Instance(map, lower, upper, (equal,))


class LimitedRows(Constraints):
    """A set that says in `at` what its rows are, and in `limit` what bounds them."""

    limit: Bounds

    def value(self, y: Tensor, x: Any = None) -> Tensor:
        return self.at(self.check(y), x).map.value(y)

    def bounds(self, x: Any = None) -> tuple[Tensor, Tensor]:
        return self.limit.at(x)

    @abstractmethod
    def at(self, y: Tensor, x: Any = None) -> Instance: ...


def _expand(name: str, bound: Tensor, shape: tuple[int, int], y: Tensor) -> Tensor:
    if bound.device != y.device:
        raise ValueError(f"the constraints are on {bound.device}, but `y` is on {y.device}: move them with .to()")
    if bound.ndim:
        check_shape(name, bound, shape[1:], shape)
    return bound.to(y.dtype).expand(shape)


def _how_to_flatten(y: Tensor, size: int | None) -> str:
    """How a y of more dimensions becomes a batch of vectors, and the result gets its shape back."""
    shape = tuple(y.shape)
    if size == shape[-1]:
        flat, way = (math.prod(shape[:-1]), size), "y.flatten(0, -2)"
        what = "the set holds for each vector of the last dimension"
    else:
        flat, way = (shape[0], math.prod(shape[1:])), "y.flatten(1)"
        what = "the set holds for all entries of a sample together"
    return f"; flatten it: {way} has shape {flat}, if {what}, and .reshape{shape} gives the result its shape back"
