"""`approach`: towards the nearest point of the set, by the method that suits its rows, on the device at hand.

The repair finds *a* feasible point; with satisfied rows frozen it may lie far from the prediction, and the map from one
to the other may stretch distances, and with them the errors of a network. The orthogonal projection does not: it never
moves two points apart.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import Map
from snarenet.memo import Memo
from snarenet.repair.choose import choose, sparse_suits
from snarenet.repair.engine import Batch
from snarenet.repair.gpu import admm as admm_kernels
from snarenet.repair.gpu import search as search_kernel
from snarenet.repair.options import Options
from snarenet.repair.start import active_set, admm, smooth
from snarenet.repair.stopping import CONVERGED
from snarenet.solution import RepairWarning, warn
from snarenet.tracing import tracing

_UNTRACED = (
    "`nearest` projects onto rows with other than diagonal Hessians by a search that cannot be exported or recorded: "
    "this one starts at the projection onto the constant linear rows alone, or at the prediction"
)


def approach(
    memo: Memo,
    instance: Instance,
    y: Tensor,
    iterations: int,
    weights: Tensor | None = None,
    matrix_free: bool = False,
) -> Tensor:
    """Points (B, n) at the projections of y, or near them.

    Onto constant linear rows alone, by ADMM; onto rows with diagonal Hessians, by an active-set method; onto any other
    rows by interior-point steps from a repaired point. The latter two are exact, or, where they find nothing, y itself.
    Without matrices, exported or recorded, only constant rows count next to those of the last kind.

    Args:
        memo: keeps what is computed once.
        instance: the constraints.
        y: (B, n) predictions.
        iterations: of the method.
        weights: (n,) those of the squared distance, equal unless given.
        matrix_free: never form a Jacobian.
    """
    map = instance.map
    if _onto_all_rows(map):
        packed = search_kernel.pack(memo, map, y)
        search = active_set.search if packed is None else partial(search_kernel.search, packed)
        return active_set.project(instance, y, iterations, weights, search)
    if _curved(map) and not matrix_free:
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            from snarenet.repair.start.eager import project_eagerly  # here, as it imports the whole compiler

            return project_eagerly(memo, instance, y, iterations, weights)  # pyright: ignore
        if not tracing():
            return project(memo, instance, y, iterations, weights)
        warn(_UNTRACED, RepairWarning)
    rows = sum(part.rows for part in map.parts if part.constant)
    iterate = admm_kernels.multipliers if admm_kernels.suits(y, rows) else admm.multipliers
    return admm.approach(memo, instance, y, iterations, weights, iterate)


def _onto_all_rows(map: Map) -> bool:
    """Is the projection onto all rows found by the active-set method, and not onto the constant ones by ADMM?"""
    return map.diagonal_hessian and not all(part.constant for part in map.parts)


def _curved(map: Map) -> bool:
    """Are there rows with other than diagonal Hessians?"""
    return not map.diagonal_hessian and not all(part.constant for part in map.parts)


def project(memo: Memo, instance: Instance, y: Tensor, iterations: int, weights: Tensor | None) -> Tensor:
    """The projections of y onto rows of any kind, by `smooth`; it looks at values, so it is never traced."""
    return smooth.project(instance, y, iterations, weights, partial(_restored, memo), sparse_suits(instance))


def _restored(memo: Memo, instance: Instance, y: Tensor) -> tuple[Tensor, Tensor]:
    """Where a plain repair leads, and (B,) whether it reached the set."""
    tol = max(Options.tol, torch.finfo(y.dtype).eps ** 0.75)
    engine, lower, upper = choose(Options(tol=tol, dtype=y.dtype), memo, instance, y)
    (value, status, _), _ = engine.run(Batch(y, lower, upper, y.isfinite().all(1)), taped=False)
    return value, status == CONVERGED


def describe(map: Map, iterations: int, matrix_free: bool = False) -> str:
    """What `approach` does, in words."""
    if _onto_all_rows(map):
        return f"at the projection onto all rows, by up to {iterations} iterations of an active-set method"
    if _curved(map) and not matrix_free:
        return f"at the projection onto all rows, by a repair and up to {iterations} interior-point steps from there"
    rows = sum(part.rows for part in map.parts if part.constant)
    if not rows:
        return "at the prediction: without matrices `nearest` finds no constant rows"
    which = "all rows" if rows == map.rows else f"{rows:,} constant rows of {map.rows:,}"
    return f"near the projection onto {which}, by {iterations} iterations of ADMM"
