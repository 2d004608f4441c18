"""Which space suits which constraints: linear algebra chosen by structure, and what can be computed once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snarenet.constraints import Constraints, Instance, Linear
from snarenet.constraints.maps import IdentityMap, LinearMap, Map, SparseMap, StackedMap
from snarenet.damping import Damping
from snarenet.linalg import ConjugateGradients, Spectrum
from snarenet.memo import Memo
from snarenet.repair import curved, kernels
from snarenet.repair.curved import CurvedSpace
from snarenet.repair.options import Rows
from snarenet.repair.spaces import Budget, ConstraintSpace, OutputSpace, Space
from snarenet.tracing import tracing, without_grad

_CONDITION = 1e-3  # least singular value, in row lengths, at which `rows="auto"` freezes satisfied constant rows


def positive(norms: Tensor) -> Tensor:
    """Row scales from squared row lengths: a vanishing row gets a small share of the mean instead."""
    mean = norms.mean(-1, keepdim=True)
    return torch.maximum(norms, torch.where(mean > 0, kernels.VANISHING * mean, 1.0))


def choose_space(
    memo: Memo,
    instance: Instance,
    y: Tensor,
    damping: Damping,
    rows: Rows,
    krylov: ConjugateGradients | None,
    room: float,
) -> tuple[Space | CurvedSpace, Tensor, Tensor]:
    """The space for these constraints, chosen by their structure, and the bounds in its order of rows."""
    relative = damping.relative
    parts = instance.map.parts
    everything = list(range(len(parts)))
    if rows != "active" and krylov is None and all(is_constant(part) for part in parts):
        spectrum = _spectrum(memo, parts, everything, relative)
        if rows == "all" or spectrum.least >= _CONDITION:
            return ConstraintSpace(spectrum), instance.lower, instance.upper
    active = rows != "all"
    first = _eliminable(instance, parts, active, sparse=krylov is None)
    rest = [i for i in everything if i not in first]
    if krylov is None and sum(parts[i].rows for i in rest) > y.shape[1]:
        first, rest = [], everything  # more rows than variables: the primal system takes them all
    spectrum = _spectrum(memo, parts, first, relative) if first and is_constant(parts[first[0]]) else None
    eliminated = StackedMap([parts[i] for i in first]) if first else None
    others = StackedMap([parts[i] for i in rest])
    lower, upper = instance.lower, instance.upper
    if first + rest != everything:
        order = memo.get(
            ("order", *first, *rest, *(part.rows for part in parts), y.device),
            (),
            lambda: _order(parts, first + rest, y.device),
        )
        lower, upper = lower[:, order], upper[:, order]
    dual = spectrum is not None or (not first and others.rows <= y.shape[1])
    if dual and krylov is None and not damping.searches and kernels.supported(y) and curved.suits(others):
        constants = memo.get(
            ("curved", *first, "then", *rest, relative, y.dtype, y.device),
            curved.tensors(others),
            lambda: curved.describe(others, spectrum, y, others.rows),
        )
        if constants is not None:
            return CurvedSpace(constants, active, relative), lower, upper
    scale, scale_fn = y.new_ones(y.shape[0], others.rows), None
    if relative:
        norms = Map.row_norms if krylov is None else krylov.row_norms
        scale_fn = None if others.linear and not others.tensors(y) else lambda map, y: positive(norms(map, y))
        with without_grad():
            scale = positive(norms(others, y.detach()))
    space = OutputSpace(eliminated, spectrum, others, scale, scale_fn, active, krylov, Budget(room))
    return space, lower, upper


def _order(parts: Sequence[Map], sequence: list[int], device: torch.device) -> Tensor:
    """Where the rows of the parts, taken in another sequence, stand in the given one."""
    offsets = [sum(part.rows for part in parts[:i]) for i in range(len(parts))]
    return torch.tensor([offsets[i] + j for i in sequence for j in range(parts[i].rows)], device=device)


def is_constant(part: Map) -> bool:
    """Is this a linear map with one matrix for all samples and all training steps?"""
    return isinstance(part, LinearMap) and part.constant


def _eliminable(instance: Instance, parts: Sequence[Map], active: bool, sparse: bool) -> list[int]:
    """Parts to eliminate: a box, or else the constant rows; where rows may be inactive, only constant equalities.

    Sparse rows are eliminated only if asked for: it makes them dense.
    """
    boxes = [i for i, part in enumerate(parts) if isinstance(part, IdentityMap)]
    if boxes:
        return boxes[:1]
    constant = [i for i, part in enumerate(parts) if is_constant(part) and (sparse or not isinstance(part, SparseMap))]
    if not active:
        return constant
    if torch.compiler.is_compiling():  # a decomposition cannot be traced
        return []
    equal = [i for i in constant if instance.equal[i]]
    if tracing() or equal == constant:
        return equal
    pinned = (instance.lower == instance.upper).all(0).split([part.rows for part in parts])
    return [i for i in constant if bool(pinned[i].all())]


def _spectrum(memo: Memo, parts: Sequence[Map], chosen: list[int], relative: bool) -> Spectrum:
    """The spectrum of the chosen parts, all constant; computed once."""
    matrices = tuple(part.A for part in (parts[i] for i in chosen) if isinstance(part, LinearMap))

    def build() -> Spectrum:
        A = torch.cat(matrices)
        return Spectrum(A, positive(A.square().sum(1)) if relative else A.new_ones(len(A)))

    return memo.get(("spectrum", *chosen, relative, matrices[0].dtype), matrices, build)


def prepare(constraints: Constraints, relative: bool, dtype: torch.dtype) -> None:
    """Compute beforehand what does not depend on y and x, so that a compiled repair finds it."""
    parts = constraints.parts
    maps = [part.constant_map(dtype) for part in parts if isinstance(part, Linear)]
    if len(maps) == len(parts) and all(map is not None for map in maps):
        _spectrum(constraints.memo, [map for map in maps if map is not None], list(range(len(maps))), relative)
