"""CVXPY's atoms in torch: for each a rule that reads its settings and returns a function of its arguments.

Arguments and results have the batch first, (B, *shape), or (1, *shape) where all samples share them. An atom that only
moves entries about (an index, a transpose, a stack) is asked where it puts them, once, by CVXPY's own `numeric`.
Functions with a domain, such as log for t > 0, go on along a line below it: so that a prediction from outside has a way
back. The line is gentle, as a step along it should lead well into the domain, not just to its edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snarenet.doors.layout import flatten, samples

Rule = Callable[[Any], Callable[..., Tensor]]
_EDGE = 1e-9  # below which a function goes on along a line
_SLOPE = 10.0  # of that line
_STEEPEST = 1e6  # the slope where a negative power goes on along its tangent: it is infinite at the edge
_SPECK = 1e-30  # under the root of a norm, which has a derivative at 0 with it


def rule_of(atom: Any) -> Callable[..., Tensor]:
    """The function of an atom, or an error that names it."""
    for kind in type(atom).__mro__:
        if (rule := RULES.get(kind.__name__.lower().replace("_", ""))) is not None:
            return rule(atom)
    raise NotImplementedError(f"there is no translation to torch of CVXPY's `{type(atom).__name__}`, in: {atom}")


def aligned(*values: Tensor) -> list[Tensor]:
    """Values with as many dimensions each, new ones after the batch."""
    most = max(value.ndim for value in values)
    return [value.reshape(len(value), *(1,) * (most - value.ndim), *value.shape[1:]) for value in values]


def elementwise(fn: Callable[..., Tensor]) -> Rule:
    """The rule of a function that needs no settings."""
    return lambda atom: lambda *values: fn(*aligned(*values))


def axes(atom: Any) -> tuple[tuple[int, ...], bool]:
    """The dimensions that an atom reduces, with the batch before them, and whether they stay as 1."""
    count, axis = len(atom.args[0].shape), getattr(atom, "axis", None)  # older atoms have none
    chosen = range(count) if axis is None else [axis] if isinstance(axis, int) else axis
    return tuple(1 + a % count for a in chosen), bool(getattr(atom, "keepdims", False))


def reduction(fn: Callable[[Tensor, tuple[int, ...], bool], Tensor]) -> Rule:
    """The rule of a function over dimensions; a number is reduced as a vector of one."""

    def rule(atom: Any) -> Callable[..., Tensor]:
        dims, keep = axes(atom) if atom.args[0].shape else ((1,), False)
        scalar = not atom.args[0].shape
        return lambda value: fn(value.unsqueeze(1) if scalar else value, dims, keep)

    return rule


class Rearrangement(nn.Module):
    """The rule of an atom whose every entry is one of its arguments', or 0."""

    index: Tensor

    def __init__(self, atom: Any) -> None:
        super().__init__()
        begin, places = 1, []
        for arg in atom.args:
            places.append(np.arange(begin, begin + arg.size, dtype=float).reshape(arg.shape, order="F"))
            begin += arg.size
        found = np.asarray(atom.numeric(places)).astype(np.int64)
        self.shape = tuple(atom.shape)
        self.register_buffer("index", torch.from_numpy(found.ravel()), persistent=False)

    def forward(self, *values: Tensor) -> Tensor:
        batch = samples(*values)
        zero = values[0].new_zeros(batch, 1)
        entries = torch.cat([zero, *(flatten(value).expand(batch, -1) for value in values)], 1)
        return entries.index_select(1, self.index).reshape(batch, *self.shape)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of vectors and matrices; a matrix that all samples share is not copied for each."""
    if len(a) == 1 and a.ndim == 3 and b.ndim == 2:
        return b @ a[0].mT
    if len(b) == 1 and b.ndim == 3 and a.ndim == 2:
        return a @ b[0]
    row, column = a.ndim == 2, b.ndim == 2
    product = (a.unsqueeze(1) if row else a) @ (b.unsqueeze(-1) if column else b)
    product = product.squeeze(-1) if column else product
    return product.squeeze(-1 if column else -2) if row else product


def quadratic_form(t: Tensor, P: Tensor) -> Tensor:
    """t'P t."""
    t = flatten(t)
    return (t * matmul(P, t)).sum(1)


def matrix_fraction(X: Tensor, P: Tensor) -> Tensor:
    """tr X'P^-1 X."""
    X = X.unsqueeze(2) if X.ndim == 2 else X
    return (X * torch.linalg.solve(P, X)).sum((1, 2))


def kron(a: Tensor, b: Tensor) -> Tensor:
    """The Kronecker product."""
    blocks = a[:, :, None, :, None] * b[:, None, :, None, :]
    return blocks.flatten(3, 4).flatten(1, 2)


def convolve(a: Tensor, b: Tensor) -> Tensor:
    """The whole convolution of two vectors, or columns."""
    products = a.flatten(1).unsqueeze(2) * b.flatten(1).unsqueeze(1)
    i, j = (torch.arange(size, device=a.device) for size in products.shape[1:])
    place = (i.unsqueeze(1) + j).flatten()
    result = products.new_zeros(len(products), len(i) + len(j) - 1).index_add(1, place, products.flatten(1))
    return result if a.ndim == b.ndim == 2 else result.unsqueeze(2)


def extended(fn: Callable[[Tensor], Tensor], t: Tensor, slope: float = _SLOPE, edge: float = _EDGE) -> Tensor:
    """fn(t), and a line below the edge."""
    inside = t.clamp(min=edge)
    return fn(inside) + slope * (t - inside)


def log(t: Tensor) -> Tensor:
    """The logarithm of t."""
    return extended(torch.log, t)


def entropy(t: Tensor) -> Tensor:
    """-t log(t)."""
    return extended(lambda s: -s * s.log(), t)


def relative_entropy(t: Tensor, s: Tensor) -> Tensor:
    """t log(t / s)."""
    return -entropy(t) - t * log(s)


def power(t: Tensor, p: float) -> Tensor:
    """t^p; whole p >= 0 for every t, others for t >= 0."""
    if p == 2:
        return t.square()
    if p >= 0 and p == int(p):
        return t.pow(int(p))
    if p > 1:
        return t.clamp(min=0).pow(p)
    if p > 0:
        return extended(lambda s: s.pow(p), t)
    return extended(lambda s: s.pow(p), t, -_STEEPEST, edge=(_STEEPEST / -p) ** (1 / (p - 1)))


def _power(atom: Any) -> Callable[..., Tensor]:
    p = getattr(atom.p, "value", atom.p)
    if p is None or getattr(atom.p, "parameters", list)():
        raise NotImplementedError(f"an exponent must be a number, but it is a parameter in: {atom}")
    return lambda t: power(t, float(p))


def norm(value: Tensor, p: float, dims: tuple[int, ...], keep: bool) -> Tensor:
    """(sum |t|^p)^(1/p), for p < 1 of t > 0."""
    if p == 2:
        return (value.square().sum(dims, keep) + _SPECK).sqrt()
    if p > 1:
        return (value.abs().pow(p).sum(dims, keep) + _SPECK).pow(1 / p)
    inside = value.clamp(min=_EDGE)
    return inside.pow(p).sum(dims, keep).pow(1 / p) + _SLOPE * (value - inside).sum(dims, keep)


def _norm(atom: Any) -> Callable[..., Tensor]:
    p = float(getattr(atom, "original_p", atom.p))
    return reduction(lambda value, dims, keep: norm(value, p, dims, keep))(atom)


def _geometric_mean(atom: Any) -> Callable[..., Tensor]:
    """prod t_i^w_i."""
    if getattr(atom, "axis", None) is not None:
        raise NotImplementedError(f"`geo_mean` is translated over all entries, but `axis` is {atom.axis} in: {atom}")
    weights, shape = [float(w) for w in atom.w], tuple(atom.shape)
    kept = torch.from_numpy(np.flatnonzero(getattr(atom, "_keep", np.ones(len(weights)))))  # not those of weight 0

    def mean(value: Tensor) -> Tensor:
        w, t = value.new_tensor(weights), flatten(value).index_select(1, kept.to(value.device))
        inside = t.clamp(min=_EDGE)
        found = (w * inside.log()).sum(1).exp() + _SLOPE * (t - inside).sum(1)
        return found.reshape(len(value), *shape)

    return mean


def _quadratic_over_linear(atom: Any) -> Callable[..., Tensor]:
    """sum t_i^2 / s."""
    squares = reduction(lambda value, dims, keep: value.square().sum(dims, keep))(atom)
    return lambda t, s: torch.div(*aligned(squares(t), flatten(s)[:, 0]))


def _huber(atom: Any) -> Callable[..., Tensor]:
    """t^2 for |t| <= M, and 2 M |t| - M^2 beyond."""
    if atom.M.parameters():
        raise NotImplementedError(f"the threshold of `huber` must be a number, but it is a parameter in: {atom}")
    limit = float(atom.M.value)

    def huber(t: Tensor) -> Tensor:
        inner = t.abs().clamp(max=limit)
        return inner * (2 * t.abs() - inner)

    return huber


def _sum_largest(atom: Any) -> Callable[..., Tensor]:
    if atom.k != int(atom.k) or getattr(atom, "axis", None) is not None:
        raise NotImplementedError(f"`sum_largest` needs a whole k and no axis, but got: {atom}")
    return lambda value: value.flatten(1).topk(int(atom.k), 1).values.sum(1)


def _cumulative_sum(atom: Any) -> Callable[..., Tensor]:
    if atom.axis is None:
        return lambda value: value.flatten(1).cumsum(1)
    (dim,), _ = axes(atom)
    return lambda value: value.cumsum(dim)


def _product(value: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
    for dim in sorted(dims, reverse=True):
        value = value.prod(dim, keep)
    return value


def _total(*values: Tensor) -> Tensor:
    first, *others = values
    for other in others:
        first = first + other
    return first


def _extreme(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def of_all(*values: Tensor) -> Tensor:
        first, *others = values
        for other in others:
            first = fn(first, other)
        return first

    return of_all


def _same(atom: Any) -> Callable[..., Tensor]:
    return lambda value: value


_MOVING = (
    *("index", "specialindex", "reshape", "transpose", "diagvec", "diagmat", "uppertri", "promote", "broadcastto"),
    *("squeeze", "hstack", "vstack", "stack", "concatenate"),
)
_PLAIN = {
    **{name: getattr(torch, name) for name in ("exp", "sin", "cos", "tan", "sinh", "tanh", "asinh", "atanh", "abs")},
    "addexpression": _total,
    "negexpression": torch.neg,
    "multiply": torch.mul,
    "divexpression": torch.div,
    "log": log,
    "log1p": lambda t: log(1 + t),
    "logistic": lambda t: torch.nn.functional.softplus(t, threshold=40.0),
    "entr": entropy,
    "relentr": relative_entropy,
    "kldiv": lambda t, s: relative_entropy(t, s) - t + s,
    "xexp": lambda t: t * t.exp(),
    "normcdf": torch.special.ndtr,
    "maximum": _extreme(torch.maximum),
    "minimum": _extreme(torch.minimum),
}
_REDUCED = {
    "sum": lambda value, dims, keep: value.sum(dims, keep),
    "max": lambda value, dims, keep: value.amax(dims, keep),
    "min": lambda value, dims, keep: value.amin(dims, keep),
    "norm1": lambda value, dims, keep: value.abs().sum(dims, keep),
    "norminf": lambda value, dims, keep: value.abs().amax(dims, keep),
    "logsumexp": lambda value, dims, keep: value.logsumexp(dims, keep),
    "prod": _product,
}
# by the names of the classes, in lower case and without underscores: releases of CVXPY differ in these
RULES: dict[str, Rule] = {
    **dict.fromkeys(_MOVING, Rearrangement),
    **{name: elementwise(fn) for name, fn in _PLAIN.items()},
    **{name: reduction(fn) for name, fn in _REDUCED.items()},
    **dict.fromkeys(("wrap", "conj", "real"), _same),
    "mulexpression": lambda atom: matmul,
    "kron": lambda atom: kron,
    "conv": lambda atom: convolve,
    "convolve": lambda atom: convolve,
    "cumsum": _cumulative_sum,
    "trace": lambda atom: lambda value: value.diagonal(0, 1, 2).sum(1),
    "power": _power,
    "pnorm": _norm,
    "geomean": _geometric_mean,
    "quadoverlin": _quadratic_over_linear,
    "quadform": lambda atom: quadratic_form,
    "matrixfrac": lambda atom: matrix_fraction,
    "huber": _huber,
    "sumlargest": _sum_largest,
}
