r"""`advise`: what a set could be written as, so that its repair is faster or safer.

Rows are looked at where their Jacobians tell: at random points p, p + d, p - d, p + d on some of the variables, and on
the line through p and 0. A row is

- linear, if J is the same everywhere;
- quadratic, if $J(p + d) + J(p - d) = 2 J(p)$, with a diagonal Hessian if a column changes with its own variable alone;
- kinked at 0, if $J(t p) = J(p)$ and $J(-t p) = J(-p)$ for large and small t > 0 and it is not linear: no function of
  that kind has a derivative there.

What is said holds at all points that were looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints import Constraints, Instance
from snarenet.constraints.maps import FunctionMap, IdentityMap, LinearMap, Map, QuadraticMap
from snarenet.constraints.products import CHUNK, Products
from snarenet.constraints.structure import Given, Structure
from snarenet.repair.options import Options

_REPLICAS = 4  # of every point: a kink is overlooked by one of them in a hundred cases
_WORTHWHILE = 0.1  # share of a function's rows from which on it pays to write them as another set
_FAR = (1.0, 10.0)  # size of d, in those of p
_RAY = 100.0  # how far out, and in, a row must look the same to count as kinked at 0
_EQUAL = 0.6  # power of the precision that counts as no difference: 4e-10 in float64
_PASSES = 64  # through a function for one Jacobian, from which on they are worth a word
_SPAN = 1e8  # between the lengths of rows, from which on one tolerance hardly suits all
_PARALLEL = 2048  # rows up to which all pairs are compared


def advise(options: Options, constraints: Constraints, instance: Instance, y: Tensor, once: bool) -> Iterator[str]:
    """Sentences, the most useful first; `once` says that one spectrum serves all samples and steps already."""
    if options.krylov is not None:  # all of it needs matrices
        return
    parts = instance.map.parts
    boxes = sum(isinstance(part, IdentityMap) for part in parts)
    others = sum(part.rows for part in parts if not isinstance(part, IdentityMap))
    least = math.inf if once else max(1, others - y.shape[1])  # a box beside more rows than variables is not eliminated
    if boxes > 1:
        yield f"{boxes} boxes: only the first is eliminated; join their bounds in one."
    for k, (set, map) in enumerate(zip(constraints.parts, parts, strict=True)):
        name = type(set).__name__ if len(parts) == 1 else f"{type(set).__name__} (part {k})"
        yield from _on_part(name, map, y, least)
    yield from _on_parallel_rows(parts)
    yield from _on_lengths(instance.map, y)


def _on_part(name: str, map: Map, y: Tensor, least: float) -> Iterator[str]:
    """On one set; bounds on variables are worth a `Box` if there are at `least` so many."""
    if isinstance(map, FunctionMap):
        yield from _on_derivatives(name, map, y)
        yield from _on_pattern(name, map, y)
    if map.linear:
        yield from _on_linear(name, map, y, least)
    elif isinstance(map, FunctionMap | QuadraticMap) and not map.diagonal_hessian and map.rows:
        found = _look(map, y)
        if found is not None and isinstance(map, FunctionMap):
            yield from _on_function(name, found, least, dense=map.pattern is None)
        elif found is not None and bool((found.diagonal | found.linear).all()):
            yield f"{name}: all Hessians are diagonal: give H as diagonals, (m, n)."


def _on_derivatives(name: str, map: FunctionMap, y: Tensor) -> Iterator[str]:
    """Rows with a value and no derivative, at y or at zero, where predictions and other solvers begin."""
    for where, point in (("some of these y", y), ("y = 0", torch.zeros_like(y))):
        missing = map.value(point).isfinite() & ~Products(map.value, point).jvp(torch.ones_like(y)).isfinite()
        if bool(missing.any()):
            yield (
                f"{name}: {_count(missing.any(0))} without a finite derivative at {where}, where there is a value: a "
                "root or a power of zero? No step leads away from there: write sqrt(z + 1e-12), or |z|.clamp(min=1e-9)."
            )
            return


def _on_pattern(name: str, map: FunctionMap, y: Tensor) -> Iterator[str]:
    """A pattern that nobody looked for, or that there is none."""
    structure, n = map.structure, y.shape[1]
    passes = min(map.rows, n)
    if map.pattern is not None:
        return
    if not isinstance(structure, Structure):
        detected = Structure()
        pattern = detected.find(map, y)
        if pattern is not None:
            colours = detected.colouring(n).count
            share = f"{pattern.nnz:,} of the {map.rows * n:,} entries of J are nonzero"
            if isinstance(structure, Given):
                yield f"{name}: {share}: return your `jacobian` in a sparse layout, and systems may be sparse too."
            else:
                yield f"{name}: {share}: a Nonlinear with sparsity='auto' has them in {colours} passes, not {passes}."
    elif passes >= _PASSES:
        yield f"{name}: J is dense and takes {passes:,} passes through fn at every step; `jacobian=` saves them."


def _on_linear(name: str, map: Map, y: Tensor, least: float) -> Iterator[str]:
    if not map.constant and not map.tensors(y):
        J = map.jacobian(y)
        if J.ndim == 3 and len(J) > 1 and bool((J[:1] == J).all()):
            yield f"{name}: A is the same for all samples: give it once, (m, n)."
    if map.constant and not isinstance(map, IdentityMap) and (pattern := map.pattern) is not None:
        single = pattern.starts.diff() == 1
        if int(single.sum()) >= least:
            yield f"{name}: {_count(single)} one variable times a number: as a Box they are eliminated."


class _Found(NamedTuple):
    """(rows,) what rows turned out to be."""

    linear: Tensor
    shared: Tensor  # with the same entries for all samples
    single: Tensor  # linear and shared, with one entry
    diagonal: Tensor  # quadratic, with a diagonal Hessian
    kinked: Tensor
    flat: Tensor  # without a derivative anywhere


def _on_function(name: str, found: _Found, least: float, dense: bool) -> Iterator[str]:
    plain = found.linear
    if bool(found.flat.any()):
        yield (
            f"{name}: {_count(found.flat)} without a derivative in y wherever one looks, so no step changes "
            "what they violate: constant, saturated, detached, or computed outside torch?"
        )
    if int(found.single.sum()) >= least:
        plain = plain & ~found.single
        yield f"{name}: {_count(found.single)} one variable times a number: as a Box they are eliminated."
    if int(plain.sum()) > _WORTHWHILE * len(plain):
        how = "Linear" if bool(found.shared[plain].all()) else "Linear(lambda x: ...)"
        yield f"{name}: {_count(plain)} linear in y: as {how} they need no passes through fn."
    if dense and bool(found.diagonal.any()):  # on a pattern the passes are few
        yield f"{name}: {_count(found.diagonal)} quadratic with diagonal Hessians: as Quadratic(H) they need no passes."
    if bool(found.kinked.any()):
        yield (
            f"{name}: {_count(found.kinked)} kinked at y = 0, like a norm or |y|: squared, a norm is smooth, "
            "and may be a Quadratic; a sum of |A y - c| is an L1Ball."
        )


def _count(which: Tensor) -> str:
    count = int(which.sum())
    return f"{count:,} of {len(which):,} rows {'is' if count == 1 else 'are'}"


def _look(map: Map, y: Tensor) -> _Found | None:
    """What the rows are, by their Jacobians at some points; None if these are too many numbers."""
    samples = torch.arange(_REPLICAS, device=y.device) % len(y)
    draw = torch.Generator().manual_seed(0)
    p, d, far = (torch.randn(_REPLICAS, y.shape[1], generator=draw).to(y) for _ in range(3))
    some = torch.randint(0, 2, p.shape, generator=draw).to(y)
    p = y[samples] + (1 + y[samples].abs()) * p
    d, far = _FAR[0] * (1 + p.abs()) * d, _FAR[1] * (1 + p.abs()) * far
    rays = [sign * scale * p for sign in (1, -1) for scale in (1, _RAY, 1 / _RAY)]
    points = [p, p + d, p - d, p + far, p - far, p + some * d, 2 * p, p / 2, *rays[1:]]
    entries = _entries(map.select(samples.repeat(len(points))), torch.cat(points))
    if entries is None:
        return None
    values, row, col = entries
    return _judge(values.unflatten(0, (len(points), _REPLICAS)).cpu(), some[:, col.to(y.device)].cpu() == 0, row, map)


def _entries(map: Map, y: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """(B, nnz) entries of J(y), their rows and columns; None if there are too many."""
    n = y.shape[1]
    if isinstance(map, FunctionMap) and isinstance(map.structure, Structure) and map.pattern is not None:
        colouring = map.structure.colouring(n)  # far away a branch may have more entries, which are not to be learned
        return colouring.values(Products(map.value, y)), colouring.pattern.row, colouring.pattern.col
    if len(y) * map.rows * n > CHUNK:
        return None
    row, col = torch.arange(map.rows).repeat_interleave(n), torch.arange(n).repeat(map.rows)
    return map.jacobian(y).expand(len(y), -1, -1).flatten(1), row, col


def _judge(J: Tensor, still: Tensor, row: Tensor, map: Map) -> _Found:
    """From entries J (points, replicas, nnz), those whose variable stays where only some move, and their rows."""

    def nothing(difference: Tensor, *points: Tensor) -> Tensor:
        """(rows,) true where it is nothing beside J at these points; false where one of these is not finite."""
        size = torch.stack([p, *points]).abs().amax((0, 1))
        largest = size.new_zeros(map.rows).scatter_reduce(0, row, size, "amax")[row]
        slack = torch.where(largest < math.inf, torch.finfo(J.dtype).eps ** _EQUAL * largest, -1.0)
        wrong = ~(difference.abs() <= slack).all(0)
        return torch.ones(map.rows, dtype=torch.bool).index_fill(0, row[wrong], False)

    p, plus, minus, far_plus, far_minus, some, twice, half, *rays = J
    linear = torch.stack([nothing(other - p, other) for other in J[1:8]]).all(0)
    used = torch.zeros(map.rows, dtype=torch.int64).index_add(0, row, (J != 0).any(0).any(0).long())
    bent = nothing(plus + minus - 2 * p, plus, minus) & nothing(far_plus + far_minus - 2 * p, far_plus, far_minus)
    quadratic = bent & nothing(twice - 3 * p + 2 * half, twice, half) & ~linear
    own = nothing(torch.where(still, some - p, 0.0), some)
    up, down, back, back_up, back_down = rays
    forth = nothing(up - p, up) & nothing(down - p, down)
    kinked = forth & nothing(back_up - back, back, back_up) & nothing(back_down - back, back, back_down) & ~linear
    shared = nothing(p - p[0])
    single = linear & shared & (used == 1)
    return _Found(linear & (used > 0), shared, single, quadratic & own, kinked, flat=used == 0)


def _on_parallel_rows(parts: tuple[Map, ...]) -> Iterator[str]:
    """A lower and an upper bound that are written as two rows."""
    matrices = [part.A for part in parts if isinstance(part, LinearMap) and part.constant]
    if not 1 < (count := sum(len(A) for A in matrices)) <= _PARALLEL:
        return
    A = torch.nn.functional.normalize(torch.cat(matrices), dim=1)
    twins = int(((A @ A.T).abs() > 1 - torch.finfo(A.dtype).eps ** _EQUAL).triu(1).any(0).sum())
    if twins:
        yield (
            f"{twins:,} of {count:,} constant rows are multiples of others: a lower and an upper bound of one row, "
            "written as one, make systems smaller and regular."
        )


def _on_lengths(map: Map, y: Tensor) -> Iterator[str]:
    lengths = map.row_norms(y).sqrt()
    lengths = lengths[(lengths > 0) & lengths.isfinite()]
    if len(lengths) and bool((span := lengths.aminmax()).max > _SPAN * span.min):
        yield (
            f"rows of J have lengths from {span.min:.1e} to {span.max:.1e}, and `tol` counts in each row's own units: "
            "scale rows so that it suits all."
        )
