"""`approach`: towards the nearest point of the set, by the method that suits its rows, on the device at hand.

The repair finds *a* feasible point; with satisfied rows frozen it may lie far from the prediction, and the map from one
to the other may stretch distances, and with them the errors of a network. The orthogonal projection does not: it never
moves two points apart.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import Map
from snarenet.memo import Memo
from snarenet.repair.gpu import admm as admm_kernels
from snarenet.repair.gpu import search as search_kernel
from snarenet.repair.start import active_set, admm


def approach(memo: Memo, instance: Instance, y: Tensor, iterations: int, weights: Tensor | None = None) -> Tensor:
    """Points (B, n) near the projections of y.

    Where all rows have diagonal Hessians, and some are not constant and linear, these are the projections onto all
    rows, by an active-set method; else onto the constant linear rows, by ADMM, and y itself if there are none.
    `weights` (n,) are those of the squared distance, equal unless given. `memo` keeps what is computed once.
    """
    map = instance.map
    if _onto_all_rows(map):
        packed = search_kernel.pack(memo, map, y)
        search = active_set.search if packed is None else partial(search_kernel.search, packed)
        return active_set.project(instance, y, iterations, weights, search)
    rows = sum(part.rows for part in map.parts if part.constant)
    iterate = admm_kernels.multipliers if admm_kernels.suits(y, rows) else admm.multipliers
    return admm.approach(memo, instance, y, iterations, weights, iterate)


def _onto_all_rows(map: Map) -> bool:
    """Is the projection onto all rows found by the active-set method, and not onto the constant ones by ADMM?"""
    return map.diagonal_hessian and not all(part.constant for part in map.parts)


def describe(map: Map, iterations: int) -> str:
    """What `approach` does, in words."""
    if _onto_all_rows(map):
        return f"at the projection onto all rows, by up to {iterations} iterations of an active-set method"
    rows = sum(part.rows for part in map.parts if part.constant)
    if not rows:
        return "at the prediction: `nearest` finds no constant rows and no rows with diagonal Hessians alone"
    which = "all rows" if rows == map.rows else f"{rows:,} constant rows of {map.rows:,}"
    return f"near the projection onto {which}, by {iterations} iterations of ADMM"
