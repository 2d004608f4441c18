"""Which engine suits which constraints: linear algebra chosen by structure, kernels where they can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints import Constraints, Instance, Linear
from snarenet.constraints.maps import IdentityMap, LinearMap, Map, SparseMap, StackedMap
from snarenet.damping import schedule
from snarenet.linalg import Spectrum, Systems, sparse_normal
from snarenet.memo import Memo
from snarenet.repair.engine import Engine
from snarenet.repair.gpu import launching
from snarenet.repair.gpu import rows as packing
from snarenet.repair.gpu.curved import CurvedKernels
from snarenet.repair.gpu.linear import LinearKernels
from snarenet.repair.gpu.sparse import kernel_systems
from snarenet.repair.gpu.stepping import KernelLoop, KernelSpace
from snarenet.repair.loop import BoundedSpace, Budget, ConstraintSpace, Loop, OutputSpace
from snarenet.repair.metric import Metric
from snarenet.repair.options import Options
from snarenet.repair.scale import positive
from snarenet.tracing import tracing, without_grad

_ENOUGH = 0.6  # rows a variable, beside constant ones, from which the kernels' primal system is cheaper
_LOSS = 1 / 3  # share of the digits that it may cost
_CONDITION = 1e-3  # least singular value, in row lengths, at which `rows="auto"` freezes satisfied constant rows
_STIFF = 0.02  # singular value, in row lengths, below which 35 iterations of ADMM end a fifth too far, or farther


class Choice(NamedTuple):
    """An engine, and the bounds in its order of rows."""

    engine: Engine
    lower: Tensor
    upper: Tensor


def choose(options: Options, memo: Memo, instance: Instance, y: Tensor, units: Tensor | None = None) -> Choice:
    """The engine for these constraints; `memo` keeps what is computed once, `units` (n,) are those of the variables."""
    on_all_rows = _in_constraint_space(options, memo, instance, y)
    return on_all_rows or _in_output_space(options, memo, instance, y, units)


def _in_constraint_space(options: Options, memo: Memo, instance: Instance, y: Tensor) -> Choice | None:
    """An engine on z = A y, if all rows are constant and may all be used."""
    parts, damping = instance.map.parts, options.rule
    if hindrance(options, memo, parts) is not None:
        return None
    space = ConstraintSpace(_spectrum(memo, parts, list(range(len(parts))), damping.relative))
    kernels = launching.supported(y) and instance.map.rows > 0 and not damping.searches
    kind = LinearKernels if kernels else Loop
    return Choice(kind(space, damping, options.tol, options.max_steps), instance.lower, instance.upper)


def hindrance(options: Options, memo: Memo, parts: Sequence[Map]) -> str | None:
    """What keeps the repair from one spectrum for all samples; None if nothing does."""
    if options.rows == "active":
        return "rows='active' was asked for"
    if options.krylov is not None:
        return "a solver without matrices was asked for"
    if not all(_is_matrix(part) for part in parts):
        box = all(part.constant for part in parts)
        return "a box is eliminated" if box else "not all rows are linear with one matrix for all samples"
    spectrum = _spectrum(memo, parts, list(range(len(parts))), options.rule.relative)
    dependent = options.rows == "auto" and spectrum.least < _CONDITION
    return "constant rows are dependent, or nearly so" if dependent else None


def stiff(memo: Memo, parts: Sequence[Map]) -> bool:
    """Are constant rows nearly dependent, so that whatever has one matrix for all samples needs many iterations?"""
    matrices = [i for i, part in enumerate(parts) if _is_matrix(part)]
    return bool(matrices) and _spectrum(memo, parts, matrices, relative=True).faintest < _STIFF


def _in_output_space(options: Options, memo: Memo, instance: Instance, y: Tensor, units: Tensor | None) -> Choice:
    """An engine on y, with a box or constant rows eliminated."""
    parts, damping, krylov = instance.map.parts, options.rule, options.krylov
    everything, active = list(range(len(parts))), options.rows != "all"
    first = _eliminable(instance, parts, active, sparse=krylov is None)
    on_pattern = sparse_systems(instance) if krylov is None else None
    if on_pattern is not None:  # constant rows that are eliminated would couple all variables
        first = [i for i in first if isinstance(parts[i], IdentityMap)]
    rest = [i for i in everything if i not in first]
    dense = krylov is None and on_pattern is None
    many = dense and sum(parts[i].rows for i in rest) > y.shape[1]  # so many that the system is primal
    boxed = bool(first) and isinstance(parts[first[0]], IdentityMap)
    if many and boxed:
        first, rest, boxed = [], everything, False
    kernels = _kernels(options, memo, parts, first, rest, y) if dense and not boxed else None
    if many and kernels is None:
        first, rest = [], everything  # the plain loop's takes them all
    lower, upper = instance.lower, instance.upper
    if first + rest != everything:
        order = memo.get(
            ("order", *first, *rest, *(part.rows for part in parts), y.device),
            (),
            lambda: _order(parts, first + rest, y.device),
        )
        lower, upper = lower[:, order], upper[:, order]
    if kernels is not None:
        return Choice(kernels, lower, upper)
    spectrum = _spectrum(memo, parts, first, damping.relative) if first and not boxed else None
    others = StackedMap([parts[i] for i in rest])
    eliminated = StackedMap([parts[i] for i in first]) if first else None
    scale, scale_fn = y.new_ones(y.shape[0], others.rows), None
    if damping.relative:
        norms = (lambda map, y: map.row_norms(y)) if krylov is None else krylov.row_norms
        scale_fn = None if others.linear and not others.tensors(y) else lambda map, y: positive(norms(map, y))
        with without_grad():
            scale = positive(norms(others, y.detach()))
    # the kernels of a step know no metric without relative damping
    stepping = on_pattern is kernel_systems and not damping.searches and (units is None or damping.relative)
    kind, loop = (KernelSpace, KernelLoop) if stepping else (OutputSpace, Loop)
    space = kind(
        eliminated, spectrum, others, scale, scale_fn, active, krylov, Budget(options.room(y.device)), on_pattern,
        damping.relative, units,
    )  # fmt: skip
    return Choice(loop(space, damping, options.tol, options.max_steps), lower, upper)


def _kernels(
    options: Options, memo: Memo, parts: Sequence[Map], first: list[int], rest: list[int], y: Tensor
) -> CurvedKernels | None:
    """Kernels on y, where they can run and these rows suit them and fit; the `first` parts are constant."""
    damping, others = options.rule, StackedMap([parts[i] for i in rest])
    if damping.searches or not launching.supported(y) or not packing.suits(others):
        return None
    spectrum = _spectrum(memo, parts, first, damping.relative) if first else None
    key = (*first, "then", *rest, damping.relative, y.dtype, y.device)
    sources = packing.tensors(others) + (() if spectrum is None else (spectrum.A,))
    least = schedule(damping, options.max_steps)[-1]
    if not damping.relative:
        least /= memo.get(("longest", *key), sources, lambda: packing.longest(others, spectrum, y)) or 1.0
    for primal in _forms(options, others.rows, bool(first), least, y):
        packed = memo.get(
            ("packed", *key, primal),
            sources,
            lambda primal=primal: packing.pack("curved", others, spectrum, y, others.rows, primal),
        )
        if packed is not None:
            room = options.room(y.device)
            return CurvedKernels(packed, options.rows != "all", damping, options.tol, options.max_steps, room)
    return None


def _forms(options: Options, kept: int, constant: bool, damping: float, y: Tensor) -> tuple[bool, ...]:
    r"""Shall the kernels solve primal systems (True), of the n variables, or dual ones (False), of the rows in use?

    Primal ones if more rows are kept than there are variables, and where they are cheaper: if all rows are always in
    use, many of them beside constant ones, by which a dual system is rotated at every step. But where the rows in use
    leave some direction free, the least eigenvalue of a primal system is the damping alone, and rounding errors grow by
    its condition, $\|D^{-1/2} J\|^2 / \lambda$; those of a dual system of independent rows do not. So there must be
    some damping: enough of it where there is a choice, and else so much that a matrix is not singular to working
    precision, for which the plain loop has better means.

    Args:
        options: what was asked for.
        kept: how many rows are not constant.
        constant: are there constant rows beside them?
        damping: the least one, in squared lengths of rows.
        y: (B, n) the positions; the first form that fits into the memory of their device is taken.
    """
    size, eps, everything = y.shape[1], torch.finfo(y.dtype).eps, options.rows == "all"
    if kept > size:
        return (True,) if everything or damping >= 4 * eps * size else ()
    cheaper = everything and constant and kept >= _ENOUGH * size
    return (True, False) if cheaper and damping >= eps**_LOSS else (False,)


def sparse_systems(instance: Instance, of_rows: bool = False) -> Systems | None:
    """The systems on the pattern of the rows beside a box; None where dense ones are faster, `of_rows` or any."""
    if _density(instance, of_rows) is not None:
        return None
    return kernel_systems if launching.supported(instance.lower) else sparse_normal


def sparse_suits(instance: Instance) -> bool:
    """Are systems on the pattern of the rows beside a box faster than dense ones?"""
    return _density(instance) is None


def _density(instance: Instance, of_rows: bool = False) -> str | None:
    """Why systems are dense; None where those on the pattern of the rows beside a box are faster.

    A dense system of a repair is as large as there are rows or variables, whichever are fewer; one `of_rows` has them
    all, as those of interior-point steps do.
    """
    parts = instance.map.parts
    rows = _beside_a_box(parts)
    if torch.compiler.is_compiling():
        return "a compiled repair has dense systems"
    if not of_rows and len(rows.parts) == len(parts) and all(part.constant for part in parts) and all(instance.equal):
        return "constant equalities are eliminated"
    pattern = rows.pattern
    if pattern is None:
        return "some rows have no known pattern"
    normal = sparse_normal(pattern)
    if not (normal.estimate.worthwhile_for_rows if of_rows else normal.estimate.worthwhile):
        return "a sparse factor would take longer"
    if normal.gram.rank and launching.supported(instance.lower):
        return "the kernels for sparse factors cannot set rows or columns apart that touch nearly everything"
    return None


def _beside_a_box(parts: Sequence[Map]) -> StackedMap:
    """The rows without those of the first box."""
    box = next((i for i, part in enumerate(parts) if isinstance(part, IdentityMap)), None)
    return StackedMap([part for i, part in enumerate(parts) if i != box])


def why(options: Options, memo: Memo, instance: Instance) -> tuple[str, ...]:
    """The reasons of `choose`, for `explain`."""
    parts = instance.map.parts
    first = hindrance(options, memo, parts)
    if first is None:
        return ("all rows are linear with one matrix for all samples",)
    if options.krylov is not None:
        return (first,)
    density = _density(instance)
    if density is not None:
        return first, density
    pattern = _beside_a_box(parts).pattern
    assert pattern is not None
    found = sparse_normal(pattern).estimate
    return first, f"a sparse factor takes about {found.sparse:.3g} us a sample, a dense one {found.dense:.3g}"


def choose_bounded(options: Options, instance: Instance, y: Tensor, scaled: bool) -> tuple[Choice, Tensor]:
    """The rescue's engine, which never leaves the first box, and y moved into that box."""
    parts = instance.map.parts
    first = next((i for i, part in enumerate(parts) if isinstance(part, IdentityMap)), None)
    sequence = sorted(range(len(parts)), key=lambda i: i != first)
    order = _order(parts, sequence, y.device)
    lower, upper = instance.lower[:, order], instance.upper[:, order]
    box = None if first is None else parts[first]
    scale = box.scale if isinstance(box, IdentityMap) else None
    if first is None:
        rows, least, most = 0, torch.full_like(y, -torch.inf), torch.full_like(y, torch.inf)
    else:
        rows = y.shape[1]
        least, most = lower[:, :rows], upper[:, :rows]
        if scale is not None:
            least, most = least / scale, most / scale
        y = torch.minimum(torch.maximum(y, least), most)
    others = StackedMap([parts[i] for i in sequence if i != first])
    room, systems = Budget(options.room(y.device)), sparse_systems(instance)
    space = BoundedSpace(others, least.detach(), most.detach(), rows, scaled, room, systems, scale)
    return Choice(Loop(space, options.rule, options.tol, options.max_steps), lower, upper), y


def _order(parts: Sequence[Map], sequence: list[int], device: torch.device) -> Tensor:
    """Where the rows of the parts, taken in another sequence, stand in the given one."""
    offsets = [sum(part.rows for part in parts[:i]) for i in range(len(parts))]
    return torch.tensor([offsets[i] + j for i in sequence for j in range(parts[i].rows)], device=device)


def _is_matrix(part: Map) -> bool:
    """Is this one matrix for all samples and all training steps?"""
    return isinstance(part, LinearMap) and part.constant


def _eliminable(instance: Instance, parts: Sequence[Map], active: bool, sparse: bool) -> list[int]:
    """Parts to eliminate: a box, or else the constant rows; where rows may be inactive, only constant equalities.

    Sparse rows are eliminated only if asked for: it makes them dense.
    """
    boxes = [i for i, part in enumerate(parts) if isinstance(part, IdentityMap)]
    if boxes:
        return boxes[:1]
    constant = [i for i, part in enumerate(parts) if _is_matrix(part) and (sparse or not isinstance(part, SparseMap))]
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


def prepare(options: Options, constraints: Constraints, metric: Metric | None) -> None:
    """Compute beforehand what does not depend on y and x, so that a compiled repair finds it."""
    maps = [part.constant_map(options.dtype) if isinstance(part, Linear) else None for part in constraints.parts]
    if all(map is not None for map in maps):
        memo, known = constraints.memo, StackedMap([map for map in maps if map is not None])
        if metric is not None:
            memo, known = metric.memo, metric.map(known)
        _spectrum(memo, known.parts, list(range(len(known.parts))), options.rule.relative)
