"""`explain`: what a repair finds in its constraints, what it does about them and why, and what would be faster.

Nothing is decided here: `choose.py` chooses, the engine that comes back describes itself, and so does its start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from snarenet.constraints import Constraints, Instance
from snarenet.constraints.maps import FunctionMap, IdentityMap, Map
from snarenet.constraints.structure import Structure
from snarenet.damping import as_damping
from snarenet.repair.advice import advise
from snarenet.repair.choose import choose, hindrance, why
from snarenet.repair.engine import Batch
from snarenet.repair.metric import metric_of
from snarenet.repair.options import Options, as_start, as_weights, check_weights
from snarenet.repair.precision import without_autocast
from snarenet.repair.rescue import attempts
from snarenet.repair.start import nearest

_SHOWN = 4  # parts that the text has a line for
_ADVICE = 4  # sentences of advice at most
_BATCH = 2  # samples that are made up where there are none


@dataclass(frozen=True)
class Part:
    """One set of a stack.

    Attributes:
        kind: its class.
        rows: how many rows it has; None where only a call tells.
        equalities: how many of them are equalities, in all samples.
        form: "linear, one matrix", "linear, a matrix a sample", "quadratic, diagonal Hessians" or "curved".
        entries: entries of its Jacobian that may be nonzero; None where it is dense, or nobody looked.
        colours: passes that compute the Jacobian on its pattern; None where it is computed otherwise.
        jacobian: how the Jacobian comes about, in words.
        compiled: of a function: "compiled", or why it is not; "" where nobody asked.
    """

    kind: str
    rows: int | None
    equalities: int = 0
    form: str = ""
    entries: int | None = None
    colours: int | None = None
    jacobian: str = ""
    compiled: str = ""

    def __str__(self) -> str:
        rows = "? rows" if self.rows is None else f"{self.rows:,} row{'s' * (self.rows != 1)}"
        some = "all" if self.equalities == self.rows else f"{self.equalities:,} of them"
        equal = f", {some} equalities" if self.equalities else ""
        words = (self.form, self.jacobian, self.compiled)
        return f"{self.kind}: {rows}{equal}" + "".join(f"; {some}" for some in words if some)


@dataclass(frozen=True)
class Explanation:
    """What a repair finds and does; `print` it.

    Attributes:
        variables: the n of y; None where only a call tells.
        rows: of all parts; None where only a call tells.
        equalities: rows whose bounds are equal, in all samples.
        box: is there a set that bounds each variable?
        parts: the sets that were joined.
        engine: what takes the steps, and where; "" without a y.
        system: the linear system of a step.
        reasons: why this engine and this system.
        start: where the repair begins.
        metric: what its steps measure distances by; "" for plain ones.
        damping: its rule.
        rescue: what is done about samples that do not converge.
        memory: bytes that a step of one sample keeps for the backward pass.
        advice: sentences on what would be faster; none if nothing is known.
    """

    variables: int | None
    rows: int | None
    equalities: int
    box: bool
    parts: tuple[Part, ...]
    engine: str = ""
    system: str = ""
    reasons: tuple[str, ...] = ()
    start: str = ""
    metric: str = ""
    damping: str = ""
    rescue: str = ""
    memory: float = 0.0
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        variables, rows = ("?" if count is None else f"{count:,}" for count in (self.variables, self.rows))
        lines = [f"{variables} variables, {rows} rows", *(f"  {part}" for part in self.parts[:_SHOWN])]
        if len(self.parts) > _SHOWN:
            lines.append(f"  and {len(self.parts) - _SHOWN} more")
        told = {
            "engine": self.engine,
            "system": self.system,
            "because": "; ".join(self.reasons),
            "start": self.start,
            "metric": self.metric,
            "damping": self.damping,
            "rescue": self.rescue,
            "backward": f"{_memory(self.memory)} a sample and step" if self.memory else "",
        }
        lines += [f"{name}: {words}" for name, words in told.items() if words]
        return "\n".join([*lines, *(f"- {sentence}" for sentence in self.advice)])


def explain(constraints: Constraints, y: Tensor | None = None, x: Any = None, **options: Any) -> Explanation:
    """What `repair(constraints, y, x, **options)` would find and do, why, and what would be faster.

    Args:
        constraints: the set.
        y: predictions (B, n), or one of them (n,). Without them numbers are made up, if the set says how many it
            needs; else what is known of the set alone is told.
        x: inputs of the set, as `repair` takes them; those of one prediction if y is one.
        options: those of `repair`.

    Example:
        >>> import torch, snarenet as sn
        >>> simplex = sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 3), equals=1.0)
        >>> print(sn.explain(simplex).system)
        dense Cholesky factors, 1 x 1 a sample at most: the rows in use
    """
    relax, dtype = options.pop("relax", 0.0), options.pop("dtype", None)
    weights = as_weights(options.pop("weights", None), options.pop("scale", None), constraints.memo)
    damping = as_damping(options.pop("damping", "auto"))
    start = as_start(options.pop("start", "auto"), options.pop("nearest", None))
    asked = Options(damping, start=start, dtype=dtype or torch.float64, **options)
    check_weights(weights)
    return explain_with(asked, constraints, y, x, relax, weights)


def explain_with(
    options: Options,
    constraints: Constraints,
    y: Tensor | None = None,
    x: Any = None,
    relax: float | Tensor = 0.0,
    weights: Tensor | None = None,
    recorded: bool = False,
) -> Explanation:
    """`explain` with options that were checked before; `recorded`: of a repair that is replayed."""
    if isinstance(y, Tensor) and y.ndim == 1:
        y, x = y.unsqueeze(0), tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, x)
    if y is None and (y := _made_up(constraints, x)) is None:
        return explain_alone(constraints)
    with without_autocast(y.device):
        _, finite, start, instance = constraints.prepare(y, x, relax, options.dtype)
        if not len(start):
            raise ValueError("`y` must have at least one sample to explain a repair by, but its batch is empty")
        metric, units = metric_of(options, constraints.memo, weights, start.shape[1]), None
        memo, taken, first = constraints.memo, instance, start
        if metric is not None:
            memo, units, first = metric.memo, metric.units, metric.into(start)
            taken = instance._replace(map=metric.map(instance.map))
        plan = nearest.plan(constraints.memo, options, instance, metric, recorded)
        options = replace(options, damping=plan.damping)
        engine, lower, upper = choose(options, memo, taken, first, units)
        with torch.no_grad():
            start = start.detach()
            found = engine.describe(Batch(first.detach(), lower, upper, finite))
            reasons = why(options, memo, taken)
            parts = _parts(constraints, instance, start, options)
            once = hindrance(options, memo, taken.map.parts) is None
            advice = tuple(islice(advise(options, constraints, instance, start, once), _ADVICE))
    pace = ", each sample at its own pace" if engine.paced else ""
    tries = len(attempts(options, instance, metric is not None)) if options.rescue else 0
    return Explanation(
        variables=start.shape[1],
        rows=instance.map.rows,
        equalities=sum(part.equalities for part in parts),
        box=any(isinstance(map, IdentityMap) for map in instance.map.parts),
        parts=parts,
        engine=found.engine,
        system=found.system,
        reasons=reasons,
        start=nearest.describe(plan, instance.map),
        metric="" if metric is None else str(metric),
        damping=f"{options.rule}{pace}",
        rescue=_rescue(tries, options.restarts),
        memory=found.nbytes,
        advice=advice,
    )


def explain_alone(constraints: Constraints, engine: str = "known with y and x: give them as well") -> Explanation:
    """What is known of a set without y and x."""
    parts = tuple(Part(type(part).__name__, part.rows_for(constraints.size)) for part in constraints.parts)
    box = any(part.kind == "Box" for part in parts)
    return Explanation(constraints.size, constraints.rows_for(constraints.size), 0, box, parts, engine)


def _rescue(attempts: int, restarts: int) -> str:
    """What samples get that do not converge, in words."""
    more = f"up to {attempts} more attempt{'s' * (attempts > 1)}" if attempts else ""
    again = f"{restarts} restart{'s' * (restarts > 1)}" if restarts else ""
    return " and ".join(words for words in (more, again) if words) or "none"


def _made_up(constraints: Constraints, x: Any) -> Tensor | None:
    """Predictions to try the set with; None where it does not say their size, or asks for an x that is not there."""
    if constraints.size is None:
        return None
    tensors = [leaf for leaf in (*tree_leaves(x), *constraints.buffers()) if isinstance(leaf, Tensor)]
    batch = next((len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim), _BATCH)
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(batch, constraints.size, generator=draw, dtype=torch.float64)
    y = y.to(tensors[0].device if tensors else y.device)
    if x is not None:
        return y
    try:
        constraints.at(y)
    except Exception:  # a user's function of x, given None, may raise anything
        return None
    return y


def _parts(constraints: Constraints, instance: Instance, y: Tensor, options: Options) -> tuple[Part, ...]:
    maps = instance.map.parts
    pinned = (instance.lower == instance.upper).all(0).split([map.rows for map in maps])
    found = []
    for set, map, equal in zip(constraints.parts, maps, pinned, strict=True):
        kind, form, seen = type(set).__name__, _form(map), options.krylov is None or not isinstance(map, FunctionMap)
        pattern = map.pattern if seen else None
        entries, colours, words = None, None, ""
        if pattern is not None and pattern.density < 1 and not isinstance(map, IdentityMap):
            entries = pattern.nnz
            words = f"{entries:,} of {map.rows * y.shape[1]:,} entries of J ({100 * pattern.density:.2g} %)"
        if isinstance(map, FunctionMap):
            if entries is not None and isinstance(map.structure, Structure):
                colours = map.structure.colouring(y.shape[1]).count
            words = _passes(map, words, colours, y) if seen else "J is never formed"
        compiled = str(map.compiled or "") if isinstance(map, FunctionMap) else ""
        found.append(Part(kind, map.rows, int(equal.sum()), form, entries, colours, words, compiled))
    return tuple(found)


def _passes(map: FunctionMap, entries: str, colours: int | None, y: Tensor) -> str:
    """How the Jacobian of a function comes about."""
    if colours is not None and isinstance(map.structure, Structure):
        known = "detected" if map.structure.declared is None else "declared"
        recorded = map.structure.recorded(map, y)
        how = "" if recorded is None else f", {recorded.describe(map, y)}"
        return f"{entries}, {known}, {colours} colour{'s' * (colours != 1)}{how}"
    if map.given_jacobian is not None:
        return f"{entries or 'dense J'}, by your `jacobian`"
    return f"dense J in {min(map.rows, y.shape[1]):,} passes"


def _form(map: Map) -> str:
    if isinstance(map, IdentityMap):
        return "bounds on each variable"
    if map.linear:
        return "linear, one matrix" if map.constant else "linear, a matrix a sample"
    return "quadratic, diagonal Hessians" if map.diagonal_hessian else "curved"


def _memory(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} GiB"
