r"""`project`: the nearest point of any smooth set: repaired, then approached from inside, then settled by Newton.

$$ \min_z \tfrac12 \| z - y \|_W^2 \;\text{ so that }\; l \le g(z) \le u, \qquad
   W (z - y) + J(z)^\top \mu = 0. $$

1. A repair leads to a point of the set, from y or from another point whose valley is meant; not if the set is known to
   be convex, where nothing depends on the start.
2. Interior-point steps (`interior.py`) lead from there nearly to the nearest point.
3. Newton's method leads on to all digits. Rows and variables are held at their bounds by a primal-dual active set: an
   equality, a row with $\mu_i + (g_i - u_i) / J_i W^{-1} J_i^\top > 0$ (or < 0 with $l_i$), a variable that
   $y - W^{-1} J^\top \mu$ puts beyond its bound.

What comes back is a fixed point of the third, which obeys the conditions of optimality, in the set, without a direction
that was seen to lead to nearer points, and no farther from y than the repaired point; else y itself, from where the
caller's repair finds what it finds without any of this. So nothing is worse than the repair alone, by construction.
(The last point of a search that has not settled would be nearer, but nobody knows how it depends on y: its gradient is
not exact. Only where interior-point steps in a convex set have gone to the very end does their point count as it is:
rows that are nearly dependent come and go in Newton's method.)

The gradient is the implicit one. With a cotangent v of z, the rows A in use, the held variables F and
$H = W + \sum_i \mu_i \nabla^2 g_i(z)$,

$$ \begin{pmatrix} H & J_A^\top \\ J_A & 0 \end{pmatrix} \begin{pmatrix} p \\ \eta \end{pmatrix} =
   \begin{pmatrix} v \\ 0 \end{pmatrix}, \qquad p_F = 0, $$

y gets $W p$, the bounds of the rows $\eta$, those of held variables $(v - H p - J_A^\top \eta)_F$, and every tensor
inside g $-\nabla (\langle \mu, \partial g\, p \rangle + \langle \eta, g \rangle)$.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import Instance, largest, residual
from snarenet.constraints.maps import FunctionMap, IdentityMap, LiftedMap, Map
from snarenet.linalg import Systems
from snarenet.repair.precision import without_autocast
from snarenet.repair.start import interior
from snarenet.repair.start.interior import CAREFUL, QUICK, STRAIGHT, Course, Point, share_of
from snarenet.repair.start.rows import RowsAt, Saddle, Solved, System
from snarenet.repair.start.task import Task, box_of

_SETTLING = 14  # steps of Newton's method, of which one or two are needed where the third one is
# Where rows are nearly dependent steps shrink by a ratio between these; every third goes to the end of such a series.
_SLOW, _SLOWEST, _EVERY = 0.3, 0.99, 3
_PRODUCTS = 10  # with the curvature, in one of them
_ADJOINT = 100  # and in the backward pass, which must be exact; a few do where the set is near
_ENTRIES = 160_000  # of dense Jacobians that are on their way at once on a CPU: few enough for its cache
_FEWEST = 50  # samples, below which the calls themselves take their time
_LAST = 1e-12  # share of a squared distance that is left as complementarity at an end: a point to all digits
_ROUNDING = 1e-9  # share of a squared distance that is nothing
_EXCUSED = 4.0  # times the first-order change of half the squared distance that a tolerance makes

Restore = Callable[[Instance, Tensor], tuple[Tensor, Tensor]]


def project(
    instance: Instance,
    y: Tensor,
    iterations: int,
    weights: Tensor | None,
    restore: Restore | None,
    systems: Systems | None,
    tol: float = 0.0,
    near: Tensor | None = None,
) -> Tensor:
    """The nearest points (B, n) to y, y itself where they were not found; differentiable in y, bounds and data.

    Args:
        instance: the constraints.
        y: (B, n) the predictions, all of them finite.
        iterations: the most interior-point steps.
        weights: (n,) those of the squared distance; all 1 if None.
        restore: repairs a batch; says where it leads, and (B,) which samples are in the set then. None begins at y,
            as if the set were convex.
        systems: those on the pattern of the rows; None for dense ones.
        tol: the violation up to which y itself will do.
        near: (B, n) what is repaired at first, y unless given.
    """
    left = outside(instance, y, tol)
    if not len(left) or not differentiable(instance.select(left[:1]).map, y[left[:1]]):
        return y
    metric = torch.ones_like(y[0]) if weights is None else weights.to(y.dtype) / weights.mean().to(y.dtype)
    tensors = instance.map.tensors(y) if torch.is_grad_enabled() else ()
    recipe = _Recipe(left, iterations, metric, restore, systems, None if near is None else near.detach())
    return _Project.apply(recipe, instance, y, instance.lower, instance.upper, *tensors)  # pyright: ignore


def outside(instance: Instance, y: Tensor, tol: float) -> Tensor:
    """(k,) the samples that break a row by more than the tolerance."""
    with torch.no_grad():
        violation = largest(residual(instance.map.value(y), instance.lower, instance.upper))
    return (~(violation <= tol)).nonzero().squeeze(1)


def differentiable(map: Map, y: Tensor) -> bool:
    """Do all rows have second derivatives? Functions that come with a Jacobian may be written without torch."""
    with torch.enable_grad():
        leaf = y.detach().requires_grad_()
        pairs = ((part, part.inner if isinstance(part, LiftedMap) else part) for part in map.parts)
        given = (part for part, own in pairs if isinstance(own, FunctionMap) and own.given_jacobian is not None)
        return all(part.value(leaf).requires_grad for part in given)


class _Recipe(NamedTuple):
    left: Tensor  # the samples outside
    iterations: int
    metric: Tensor
    restore: Restore | None
    systems: Systems | None  # on the pattern of the rows
    near: Tensor | None  # what is repaired at first, if not y


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recipe: _Recipe, instance: Instance, y: Tensor, lower: Tensor, upper: Tensor, *tensors: Tensor
    ) -> Tensor:
        leaves: dict[int, Tensor] = {}
        instance = Instance(instance.map.detached(leaves), lower, upper, instance.equal)
        ctx.found, ctx.point = _find(recipe, instance, y)
        ctx.recipe, ctx.instance, ctx.wanted = recipe, instance, tuple(leaves.get(id(t), t) for t in tensors)
        ctx.save_for_backward(y, *tensors)  # so that autograd notices when one of them is overwritten
        return y.index_copy(0, ctx.found, ctx.point.z)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        v, found, y = gradients[0], ctx.found, ctx.saved_tensors[0]
        with without_autocast(y.device):
            with torch.set_grad_enabled(bool(ctx.wanted)):  # so that gradients reach the tensors of the whole batch
                part = ctx.instance.select(found)
                task = Task.of(part, y[found], ctx.recipe.metric, ctx.recipe.systems)
            pulled = _pull_back(task, ctx.point, v[found], ctx.wanted)
        bounds = (_in_order(part, rows, box) for rows, box in ((pulled.lower, pulled.low), (pulled.upper, pulled.high)))
        lower, upper = (torch.zeros_like(ctx.instance.lower).index_copy(0, found, bound) for bound in bounds)
        return None, None, v.index_copy(0, found, pulled.y), lower, upper, *pulled.tensors


def _find(recipe: _Recipe, instance: Instance, y: Tensor) -> tuple[Tensor, Point]:
    """(k,) the samples whose nearest point was found, and these points."""
    rows = sum(part.rows for part in instance.map.parts if not isinstance(part, IdentityMap))
    whole = recipe.systems is not None or y.device.type != "cpu"
    most = len(y) if whole else max(_FEWEST, _ENTRIES // max(1, rows * y.shape[1]))
    found = [_find_some(recipe, instance, y, some) for some in recipe.left.split(most)]
    if len(found) == 1:
        return found[0]
    samples, points = zip(*found, strict=True)
    return torch.cat(samples), Point(*(torch.cat(tensors) for tensors in zip(*points, strict=True)))


def _find_some(recipe: _Recipe, instance: Instance, y: Tensor, left: Tensor) -> tuple[Tensor, Point]:
    """The same of some samples."""
    task = Task.of(instance.select(left), y[left], recipe.metric, recipe.systems)
    if recipe.restore is not None and not task.convex:
        return _from_repaired(recipe, instance, y, left)
    clipped = torch.minimum(torch.maximum(task.y, task.low), task.high)
    point, good = _search(task, clipped, recipe.iterations, STRAIGHT)
    if recipe.restore is None or bool(good.all()):
        return left[good], Point(*(tensor[good] for tensor in point))
    others, other = _from_repaired(recipe, instance, y, left[~good])
    return torch.cat([left[good], others]), _joined(Point(*(tensor[good] for tensor in point)), other)


def _from_repaired(recipe: _Recipe, instance: Instance, y: Tensor, left: Tensor) -> tuple[Tensor, Point]:
    """The same, from where a repair leads."""
    found, point = _after_repair(recipe, instance, y, left, y if recipe.near is None else recipe.near)
    if recipe.near is None or len(found) == len(left):
        return found, point
    others, other = _after_repair(recipe, instance, y, left[~torch.isin(left, found)], y)
    return torch.cat([found, others]), _joined(point, other)


def _joined(one: Point, two: Point) -> Point:
    return Point(*(torch.cat(pair) for pair in zip(one, two, strict=True)))


def _after_repair(recipe: _Recipe, instance: Instance, y: Tensor, left: Tensor, near: Tensor) -> tuple[Tensor, Point]:
    """The same, from where a repair of certain points leads."""
    assert recipe.restore is not None
    start, reached = recipe.restore(instance.select(left), near[left])
    left, start = left[reached], start[reached]
    task = Task.of(instance.select(left), y[left], recipe.metric, recipe.systems)
    point, good = _search(task, start, recipe.iterations, QUICK)
    good = good & _nearer(task, point, start)
    again = (~good).nonzero().squeeze(1)
    if len(again):
        rest, begun = task.select(again), start[again]
        other, found = _search(rest, begun, recipe.iterations, CAREFUL)
        found = found & _nearer(rest, other, begun)
        point = Point(*(old.index_copy(0, again, new) for old, new in zip(point, other, strict=True)))
        good = good.index_copy(0, again, found)
    return left[good], Point(*(tensor[good] for tensor in point))


def _search(task: Task, start: Tensor, steps: int, course: Course) -> tuple[Point, Tensor]:
    """Where a search leads from points of the set, or from anywhere, and (B,) whether that is a nearest point."""
    state = interior.begin(task, start, course)
    point, good = state.point, torch.zeros(len(start), dtype=torch.bool, device=start.device)
    left = torch.arange(len(start), device=start.device)
    for last in course.last:
        if not len(left):
            break
        part = task.select(left)
        state = interior.approach(part, state, steps, last, course.straight)
        found, settled = _settle(part, state.point)
        if course.straight and last <= _LAST:  # Newton's method cannot tell rows apart that are nearly dependent
            ended = ~settled & (state.left <= last * state.unit).squeeze(1) & _obeyed(part, state.point.z)
            found = Point(*(torch.where(ended.unsqueeze(1), a, b) for a, b in zip(state.point, found, strict=True)))
            settled = settled | ended
        point = Point(*(old.index_copy(0, left, new) for old, new in zip(point, found, strict=True)))
        good = good.index_copy(0, left, settled)
        rest = (~settled).nonzero().squeeze(1)
        left, state = left[rest], state.select(rest)
    return point, good


def _nearer(task: Task, point: Point, start: Tensor) -> Tensor:
    """(B,) whether a point is no farther from y than the start."""
    # a start that breaks rows within the tolerance may be nearer, to first order by its multipliers times that
    rows = residual(task.rows.value(start), task.lower, task.upper)
    box = residual(start, task.low, task.high)
    force = task.weights * (task.y - point.z)
    excuse = (point.multipliers * rows).abs().sum(1) + (force * box).abs().sum(1)
    return task.distance(point.z) <= task.distance(start) * (1 + _ROUNDING) + _EXCUSED * excuse


def _settle(task: Task, point: Point) -> tuple[Point, Tensor]:
    """Where Newton's method leads, and (B,) whether that is a nearest point."""
    z, multipliers = point
    settled = torch.zeros(len(z), dtype=torch.bool, device=z.device)
    small = torch.finfo(z.dtype).eps ** 0.6
    left = (z.isfinite().all(1) & multipliers.isfinite().all(1)).nonzero().squeeze(1)
    last = z.new_zeros(len(z), z.shape[1] + multipliers.shape[1])
    for k in range(_SETTLING):
        if not len(left):
            break
        part, before = task.select(left), z[left]
        step = _newton(part, Point(before, multipliers[left]))
        good = step.convex & step.d.isfinite().all(1) & step.multipliers.isfinite().all(1)
        left, before, d, after = left[good], before[good], step.d[good], step.multipliers[good]
        still = largest(d) <= small * (1 + largest(before))
        move = torch.cat([d, after - multipliers[left]], 1)
        if k % _EVERY == _EVERY - 1:
            move = torch.where(still.unsqueeze(1), move, _to_the_end(move, last[left]))
        last = last.index_copy(0, left, move)
        d, change = move.split([z.shape[1], multipliers.shape[1]], 1)
        z, multipliers = z.index_copy(0, left, before + d), multipliers.index_add(0, left, change)
        settled = settled.index_copy(0, left, still)
        left = left[~still]
    return Point(z, multipliers), settled & _obeyed(task, z)  # an empty set has no nearest point


def _obeyed(task: Task, z: Tensor) -> Tensor:
    """(B,) is z in the set, but for rounding?"""
    away = task.away(z, task.at(z).lengths)
    return away <= torch.finfo(z.dtype).eps ** 0.5 * (1 + largest(z))


def _to_the_end(move: Tensor, last: Tensor) -> Tensor:
    """A step, or, where it is the last one times a ratio, that and all that would follow."""
    ratio = (move * last).sum(1, keepdim=True) / last.square().sum(1, keepdim=True)
    return torch.where((ratio > _SLOW) & (ratio < _SLOWEST), move / (1 - ratio), move)


class _Active(NamedTuple):
    """Which rows (B, m) and variables (B, n) are held at a bound; an equality counts as held from above."""

    above: Tensor
    below: Tensor
    high: Tensor
    low: Tensor


def _active(task: Task, at: RowsAt, value: Tensor, multipliers: Tensor) -> _Active:
    """Those that multipliers and values say."""
    above = (task.lower == task.upper) | (multipliers + (value - task.upper) / at.lengths > 0)
    below = ~above & (multipliers + (value - task.lower) / at.lengths < 0)
    center = task.y - at.pull(torch.where(above | below, multipliers, 0.0)) / task.weights
    high = (task.low == task.high) | (center > task.high)
    return _Active(above, below, high, ~high & (center < task.low))


def _saddle(task: Task, at: RowsAt, active: _Active, multipliers: Tensor) -> tuple[Saddle, Tensor]:
    """The system of the rows and variables that are held, and (B, m) its damping."""
    damping, rows = share_of(at.z.dtype) * at.lengths, active.above | active.below
    system = System(task.weights.expand_as(at.z), active.high | active.low, damping, rows, multipliers)
    return at.saddle(system, exact=True), damping


def _newton(task: Task, point: Point) -> Solved:
    """One step: what z moves by, and the next multipliers."""
    z, at, value = point.z, task.at(point.z), task.rows.value(point.z)
    active = _active(task, at, value, point.multipliers)
    multipliers = torch.where(active.above | active.below, point.multipliers, 0.0)
    saddle, damping = _saddle(task, at, active, multipliers)
    off = torch.where(active.above, value - task.upper, torch.where(active.below, value - task.lower, 0.0))
    free = saddle.inverse * task.weights * (task.y - z)
    move = torch.where(active.high, task.high - z, torch.where(active.low, task.low - z, free))
    # the share acts on the change of the multipliers, so that rows are met exactly in the end
    flat = saddle.move(move, off + damping * multipliers)
    step = saddle.bent(flat, _PRODUCTS, torch.finfo(z.dtype).eps ** 0.75)
    return step._replace(multipliers=step.multipliers[:, : task.rows.rows])


class _Pulled(NamedTuple):
    """Cotangents of predictions, bounds of rows, the box, and the tensors inside g."""

    y: Tensor
    lower: Tensor
    upper: Tensor
    low: Tensor
    high: Tensor
    tensors: list[Tensor | None]


def _pull_back(task: Task, point: Point, v: Tensor, wanted: tuple[Tensor, ...]) -> _Pulled:
    """The implicit gradient at nearest points, for their cotangent v (B, n)."""
    z, at = point.z, task.at(point.z)
    active = _active(task, at, task.rows.value(z), point.multipliers)
    multipliers, rows = torch.where(active.above | active.below, point.multipliers, 0.0), task.rows.rows
    saddle, _ = _saddle(task, at, active, multipliers)
    flat = Solved(*saddle.split(v, rows), saddle.sound)
    p, eta, _ = saddle.bent(flat, _ADJOINT, torch.finfo(z.dtype).eps ** 1.5, rows)
    left = v - saddle.B(p) - saddle.pull(eta)  # what a variable that is held passes on to its bound
    eta = eta[:, :rows]
    tensors = [None if t is None else -t for t in task.rows.pullback(z, [(multipliers, p)], eta, wanted)[1:]]
    held = (torch.where(active.below, eta, 0.0), torch.where(active.above, eta, 0.0))
    box = (torch.where(active.low, left, 0.0), torch.where(active.high, left, 0.0))
    return _Pulled(task.weights * p, *held, *box, tensors)


def _in_order(instance: Instance, rows: Tensor, box: Tensor) -> Tensor:
    """What belongs to the rows beside the first box, and to that box, in the order of all rows."""
    parts = instance.map.parts
    first = box_of(parts)
    pieces = list(rows.split([part.rows for i, part in enumerate(parts) if i != first], 1))
    if first is not None:
        pieces.insert(first, box)
    return torch.cat(pieces, 1)
