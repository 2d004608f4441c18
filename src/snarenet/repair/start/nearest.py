"""`plan` chooses where a repair begins and the damping after that; `approach` goes there.

The repair finds *a* feasible point; with satisfied rows frozen it may lie far from the prediction, and the map from one
to the other may stretch distances, and with them the errors of a network. The orthogonal projection does not: it never
moves two points apart.

| rows | method | what it leads to |
|---|---|---|
| a box alone | clipping | the projection |
| linear, one matrix for all samples | ADMM (`admm.py`), more of it, interior-point steps | the projection, to 0.1 % |
| diagonal Hessians, or linear with a matrix a sample | active set (`active_set.py`), then the next | the same |
| any others; sparse ones, many or nearly dependent | repair, interior-point steps, Newton (`smooth.py`) | the same |
| beside L1 balls | the same in buys and sells (`lifting.py`) | the same |

Each method in a row of this table is for samples that the one before did not bring there. Whoever asks for a number of
iterations gets that many of ADMM or the active set, and what they lead to as it is. So do recordings and exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints import Box, Constraints, Linear
from snarenet.constraints.base import Instance, largest, residual
from snarenet.constraints.maps import IdentityMap, Map
from snarenet.damping import Annealed, Damping
from snarenet.linalg import Systems
from snarenet.memo import Memo
from snarenet.repair import choose as engines
from snarenet.repair.choose import choose, sparse_suits, sparse_systems
from snarenet.repair.engine import Batch
from snarenet.repair.gpu import admm as admm_kernels
from snarenet.repair.gpu import search as search_kernel
from snarenet.repair.metric import Metric, metric_of
from snarenet.repair.options import Nearest, Options
from snarenet.repair.start import active_set, admm, smooth
from snarenet.repair.start.apart import apart
from snarenet.repair.start.lifting import balls_of, flat, lift
from snarenet.repair.stopping import CONVERGED
from snarenet.solution import RepairWarning, warn
from snarenet.tracing import capturing, tracing, without_grad

Method = Literal["none", "clipping", "admm", "active set", "smooth"]

# iterations that "auto" stands for: of ADMM, where more change trained models no more; of the active set, where nearly
# all samples that settle at all have settled; interior-point steps, of which five to ten are usual
_ITERATIONS: dict[Method, int] = {"none": 0, "clipping": 0, "admm": 35, "active set": 26, "smooth": 20}
_SOUGHT = 40  # interior-point steps where all faces are flat, whose rows may be nearly dependent, and in the rescue
_ROOM = 2**26  # entries of dense matrices at once there
_CLOSE = 20  # iterations of ADMM from which on little is left to repair
_FINISH = Annealed(1e-3, 0.1)  # the damping after that: nearly Newton's steps
_MORE = 200  # iterations of ADMM where those have not settled, which take as long as a few interior-point steps
_LARGE = 1000  # constant rows, from which on sparse systems are faster than ADMM with its dense matrix

_UNTRACED = (
    "the projection onto rows with other than diagonal Hessians is a search that cannot be exported: the exported "
    "program begins {0}, and what it returns is feasible, but not the point that this layer returns; with `start=None` "
    "the two agree"
)


class Plan(NamedTuple):
    """Where a repair begins.

    Attributes:
        method: what leads there; "none" for the prediction itself.
        iterations: of the method.
        damping: of the repair after that.
        thorough: search for what the method did not find, exactly, by the one for rows of any kind.
        why: the reason, for `explain`.
    """

    method: Method
    iterations: int
    damping: Damping
    thorough: bool
    why: str

    @property
    def looks(self) -> bool:
        """Does it search for the nearest point, looking at values?"""
        return self.method == "smooth" or self.thorough


def plan(
    memo: Memo, options: Options, instance: Instance, metric: Metric | None = None, recorded: bool = False
) -> Plan:
    """What suits these constraints; `recorded`: what a CUDA graph can hold, even if none is recorded at the moment."""
    method, why = _method(memo, options, instance, metric, recorded)
    iterations = _ITERATIONS[method]
    asked = options.start.iterations if isinstance(options.start, Nearest) else "auto"
    if method == "smooth" and flat(instance.map):
        iterations = _SOUGHT
    if asked != "auto" and iterations:
        iterations = asked
    on_all_rows = method == "admm" and all(part.constant for part in instance.map.parts)
    told = on_all_rows and not tracing() and options.dtype == torch.float64  # whether it settled, but for rounding
    searched = method == "active set" or told
    thorough = searched and asked == "auto" and options.krylov is None and not recorded
    close = on_all_rows and iterations >= _CLOSE and options.damping == "auto"
    return Plan(method, iterations, _FINISH if close else options.rule, thorough, why)


def _method(
    memo: Memo, options: Options, instance: Instance, metric: Metric | None, recorded: bool
) -> tuple[Method, str]:
    """The method, and why."""
    map = instance.map
    insists = isinstance(options.start, Nearest)
    if options.start is None:
        return "none", "as asked"
    if all(isinstance(part, IdentityMap) for part in map.parts):
        return "clipping", "there are bounds on each variable alone"
    if options.krylov is not None and not insists:
        return "none", "a projection needs matrices"
    constant = all(part.constant for part in map.parts)
    sparse = not tracing() and options.krylov is None and not recorded
    if constant:
        reason = _why_not_admm(memo, instance, metric) if sparse else None
        return ("smooth", reason) if reason else ("admm", "all rows are linear with one matrix for all samples")
    if map.diagonal_hessian and not (sparse and sparse_suits(instance)):
        return "active set", "all Hessians are diagonal"
    if options.krylov is None and not (recorded or capturing() or torch.compiler.is_exporting()):
        kinked = "an L1 ball has kinks" if flat(map) else "some rows are curved"
        return "smooth", "rows are large and sparse" if map.diagonal_hessian else kinked
    known: Method = "admm" if insists and any(part.constant for part in map.parts) else "none"
    if torch.compiler.is_exporting():
        there = "at the projection onto the constant linear rows alone" if known == "admm" else "at the prediction"
        warn(_UNTRACED.format(there), RepairWarning)
    if options.krylov is not None:
        return known, "without matrices there is a projection onto constant rows alone"
    return known, "the search for the projection onto all rows can be neither exported nor recorded"


def _why_not_admm(memo: Memo, instance: Instance, metric: Metric | None) -> str | None:
    """Why interior-point steps on the pattern of constant rows are better than iterations with their dense matrix."""
    if instance.map.rows > _LARGE:
        return "rows are large and sparse" if sparse_suits(instance) else None
    if _systems(instance) is None:
        return None
    memo, map = (memo, instance.map) if metric is None else (metric.memo, metric.map(instance.map))
    if engines.stiff(memo, map.parts):
        return "rows are sparse and nearly dependent"
    return None


def _systems(instance: Instance) -> Systems | None:
    """The systems of interior-point steps."""
    return sparse_systems(instance, of_rows=all(part.constant for part in instance.map.parts))


def approach(
    memo: Memo,
    instance: Instance,
    y: Tensor,
    chosen: Plan,
    weights: Tensor | None = None,
    metric: Metric | None = None,
    tol: float = 0.0,
    near: Tensor | None = None,
) -> Tensor:
    """Points (B, n) at the projections of y, or near them; y itself where it is in the set, or nothing was found.

    Args:
        memo: keeps what is computed once.
        instance: the constraints.
        y: (B, n) predictions.
        chosen: how.
        weights: (n,) those of the squared distance, equal unless given.
        metric: that of a repair's steps.
        tol: the violation up to which a sample is in the set.
        near: (B, n) points in whose valley a projection onto rows of any kind is sought; y unless given.
    """
    if chosen.method == "none":
        return y
    if chosen.looks and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        from snarenet.repair.start.eager import approach_eagerly  # here, as it imports the whole compiler

        return approach_eagerly(memo, instance, y, chosen, weights, metric, tol, near)  # pyright: ignore
    if chosen.method == "smooth":
        options = {"weights": weights, "metric": metric, "iterations": chosen.iterations}
        return _project(memo, instance, y, **options, tol=tol, near=near)
    with without_grad():
        outside = ~(largest(residual(instance.map.value(y), instance.lower, instance.upper)) <= tol)
    if tracing() or (y.is_cuda and not chosen.thorough):  # which must not, or had better not, look at values
        return torch.where(outside.unsqueeze(1), _towards(memo, chosen, weights, instance, y), y)
    found, left = y, outside.nonzero().squeeze(1)
    for search in _searches(memo, chosen, weights, metric, tol):
        if not len(left):
            break
        everybody = len(left) == len(y)
        part, predicted = (instance, y) if everybody else (instance.select(left), y[left])
        there = search(part, predicted)
        found = there if everybody else found.index_copy(0, left, there)
        left = left[(there == predicted).all(1)]
    return found


def _searches(
    memo: Memo, chosen: Plan, weights: Tensor | None, metric: Metric | None, tol: float
) -> Iterator[Callable[[Instance, Tensor], Tensor]]:
    """What leads samples that are all outside to their projections, each for those that the one before did not."""
    yield partial(_apart, memo, chosen, weights)
    if chosen.thorough and chosen.method == "admm":
        yield partial(_apart, memo, chosen._replace(iterations=_MORE), weights)
        yield partial(seek, weights=weights, tol=tol)
    elif chosen.thorough:
        steps = _ITERATIONS["smooth"]
        yield partial(_project, memo, weights=weights, metric=metric, iterations=steps, tol=tol)


def _apart(memo: Memo, chosen: Plan, weights: Tensor | None, instance: Instance, y: Tensor) -> Tensor:
    """`_towards`, out of reach of autocast."""
    towards = partial(_towards, memo, chosen, weights)
    return apart(towards, instance, y) if y.dtype == torch.float32 else towards(instance, y)


def _towards(memo: Memo, chosen: Plan, weights: Tensor | None, instance: Instance, y: Tensor) -> Tensor:
    """The same for samples that are all outside, without a search that looks at values."""
    map = instance.map
    if chosen.method == "clipping":
        for lower, upper in zip(*(b.split(y.shape[1], 1) for b in (instance.lower, instance.upper)), strict=True):
            y = torch.minimum(torch.maximum(y, lower), upper)
        return y
    if chosen.method == "active set":
        packed = search_kernel.pack(memo, map, y)
        search = active_set.search if packed is None else partial(search_kernel.search, packed)
        return active_set.project(instance, y, chosen.iterations, weights, search, strict=chosen.thorough)
    rows = sum(part.rows for part in map.parts if part.constant)
    iterate = admm_kernels.multipliers if admm_kernels.suits(y, rows) else admm.multipliers
    return admm.approach(memo, instance, y, chosen.iterations, weights, iterate, strict=chosen.thorough)


def _project(
    memo: Memo,
    instance: Instance,
    y: Tensor,
    *,
    weights: Tensor | None,
    metric: Metric | None,
    iterations: int,
    tol: float,
    near: Tensor | None = None,
) -> Tensor:
    """The projections of y onto rows of any kind, by `smooth`; it looks at values, so it is never traced."""
    balls = balls_of(instance)
    if not balls:
        restore = partial(_restored, memo, metric)
        return smooth.project(instance, y, iterations, weights, restore, _systems(instance), tol, near)
    left = smooth.outside(instance, y, tol)
    if not len(left):
        return y
    towards = partial(_project_lifted, memo, balls, weights, iterations)
    part, predicted = instance.select(left), y[left]
    found = apart(towards, part, predicted) if y.dtype == torch.float32 else towards(part, predicted)
    return y.index_copy(0, left, found)


def _project_lifted(
    memo: Memo, balls: list[int], weights: Tensor | None, iterations: int, instance: Instance, y: Tensor
) -> Tensor:
    """The projections of y, all outside, onto a set with L1 balls, its parts of these numbers."""
    known = memo.get("lifted", (), Memo)
    lifted = lift(known, instance, balls, y, weights)
    metric = metric_of(_plain(y.dtype), known, lifted.metric, lifted.y.shape[1])
    restore, systems = partial(_restored, known, metric), _systems(lifted.instance)
    found = smooth.project(lifted.instance, lifted.y, iterations, lifted.weights, restore, systems)
    return lifted.back(found, y)


def slide(instance: Instance, y: Tensor, start: Tensor, reached: Tensor, weights: Tensor | None) -> Tensor:
    """The nearest points to y (B, n), all outside, sought from where some reached the set; y where none was found."""
    some = reached.nonzero().squeeze(1)
    if balls_of(instance):  # the points are not ones of buys and sells
        return y
    known = start.detach()[some], torch.ones_like(some, dtype=torch.bool)
    steps, systems = _ITERATIONS["smooth"], sparse_systems(instance)
    found = smooth.project(instance.select(some), y[some], steps, weights, lambda *_: known, systems)
    return y.index_copy(0, some, found)


def seek(instance: Instance, y: Tensor, weights: Tensor | None, tol: float) -> Tensor:
    """The nearest points to y (B, n), by interior-point steps from y itself; y where none was found.

    That is certain where all rows are linear and the set is not empty, and often leads there where some are curved.
    """
    if balls_of(instance):
        return y
    rows, systems = instance.map.rows, sparse_systems(instance, of_rows=True)
    some = max(1, _ROOM // (rows * max(rows, y.shape[1]))) if systems is None else len(y)
    parts = torch.arange(len(y), device=y.device).split(some)
    return torch.cat(
        [smooth.project(instance.select(part), y[part], _SOUGHT, weights, None, systems, tol) for part in parts]
    )


def _plain(dtype: torch.dtype) -> Options:
    """Those of a repair that leads to a point of the set, in a precision."""
    return Options(tol=max(Options.tol, torch.finfo(dtype).eps ** 0.75), dtype=dtype)


def _restored(memo: Memo, metric: Metric | None, instance: Instance, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where a plain repair leads, by steps in the metric, and (B,) whether it reached the set."""
    options, units, first = _plain(y.dtype), None, y
    if metric is not None:
        memo, units, first = metric.memo, metric.units, metric.into(y)
        instance, options = instance._replace(map=metric.map(instance.map)), metric.stricter(options)
    engine, lower, upper = choose(options, memo, instance, first, units)
    (value, status, _), _ = engine.run(Batch(first, lower, upper, y.isfinite().all(1)), taped=False)
    return value if metric is None else metric.back(value, y), status == CONVERGED


def prepare(options: Options, constraints: Constraints, weights: Tensor | None = None) -> None:
    """Compute beforehand what does not depend on y and x, so that a compiled repair finds it."""
    metric = metric_of(options, constraints.memo, weights, None if weights is None else len(weights))
    if options.krylov is not None:  # the matrix-free route needs no decomposition
        return
    engines.prepare(options, constraints, metric)
    if options.start is None or constraints.size is None:
        return
    parts = [_constant(part, constraints.size, options.dtype) for part in constraints.parts]
    rows = [part for part in parts if part is not None]
    if len(rows) == len(parts) and sum(part.rows for part in rows) <= _LARGE:
        admm.prepare(constraints.memo, rows, weights, constraints.size)


def _constant(part: Constraints, size: int, dtype: torch.dtype) -> Map | None:
    """The rows of a set that are the same for all x."""
    if isinstance(part, Box):
        return IdentityMap(size)
    return part.constant_map(dtype) if isinstance(part, Linear) else None


def describe(chosen: Plan, map: Map) -> str:
    """Where a repair begins, in words."""
    if chosen.method == "none":
        return "at the prediction" if chosen.why == "as asked" else f"at the prediction: {chosen.why}"
    if chosen.method == "clipping":
        return f"at the prediction, clipped: {chosen.why}"
    if chosen.method == "active set":
        return (
            f"at the projection onto all rows, by up to {chosen.iterations} iterations of an active-set method: "
            f"{chosen.why}"
        )
    if chosen.method == "smooth":
        return (
            f"at the projection onto all rows, by up to {chosen.iterations} interior-point steps, from a repaired "
            f"point unless the set is known to be convex: {chosen.why}"
        )
    rows = sum(part.rows for part in map.parts if part.constant)
    which = "all rows" if rows == map.rows else f"{rows:,} constant rows of {map.rows:,}"
    more = ", more where these do not settle" if chosen.thorough else ""
    return f"near the projection onto {which}, by {chosen.iterations} iterations of ADMM{more}: {chosen.why}"
