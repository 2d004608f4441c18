"""CasADi's `Opti`, whose bounds may depend on parameters: lb(p) <= g <= ub(p) becomes rows with bounds in numbers.

A bound that depends on p is moved to the other side: g - lb(p) >= 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def rows(ca: Any, opti: Any) -> tuple[Any, Array, Array]:
    """(g, lower, upper) of the constraints of an `Opti`."""
    g, low, high, p = opti.g, opti.lbg, opti.ubg, opti.p
    some = np.random.default_rng(0).uniform(0.5, 1.5, p.shape)
    lower, upper = (side.full().ravel() for side in ca.Function("bounds", [p], [low, high])(some))
    varies_low, varies_high, equal = _varies(ca, low, p), _varies(ca, high, p), lower == upper
    moved_low = np.flatnonzero(varies_low)
    moved_high = np.flatnonzero(varies_high & ~equal)  # an equality is moved once
    return (
        ca.vertcat(g, (g - low)[moved_low.tolist()], (g - high)[moved_high.tolist()]),
        np.r_[np.where(varies_low, -np.inf, lower), np.zeros(len(moved_low)), np.full(len(moved_high), -np.inf)],
        np.r_[
            np.where(varies_high, np.inf, upper),
            np.where(equal[moved_low], 0.0, np.inf),
            np.zeros(len(moved_high)),
        ],
    )


def _varies(ca: Any, side: Any, p: Any) -> Array:
    return np.array(ca.which_depends(side, p, 1, True), dtype=bool) if p.numel() else np.zeros(side.numel(), dtype=bool)
