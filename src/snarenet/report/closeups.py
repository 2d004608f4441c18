"""Instances to pick from on a run's page: a figure of them all, and the details of each as JSON for `page.js`.

An instance is an object with its numbers (`gap`, `objective`, `distance`, ...), `moves`, the variables that the repair
moved farthest, and `rows`, those that the prediction violated or that are at a bound at the output, in the order of
their violations and multipliers. Numbers have five digits; those that are not finite are null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from snarenet.reference.program import at_bound
from snarenet.report.figures import BLUE, Picture, canvas, finish, log_axis
from snarenet.report.hover import Hint
from snarenet.report.html import figure, prose
from snarenet.report.numbers import short

Arrays = Mapping[str, np.ndarray]

_MOVES, _ROWS = 60, 60  # at most so many of an instance are on the page
_COUNTED = "Variables and rows are counted from 0."
_MULTIPLIERS = (
    "Multipliers μ belong to the rows at a bound. They bring ∇f + Jᵀμ at y̌ closest to zero in least squares: free for "
    "equalities, at least 0 at an upper bound and at most 0 at a lower one. The KKT residual is what they leave, "
    "relative to ∇f where that is larger than 1: 0 at a stationary point. The larger it is, the less multipliers say."
)
_UNKNOWN = (
    "There are no multipliers: they need scipy, `pip install 'snarenet[solvers]'`, numbers that are finite, and a "
    "Jacobian of at most 2^20 entries."
)


def closeups(arrays: Arrays, tol: float) -> str:
    """The body of the section: a figure, a form and tables to fill, and what to fill them with.

    Args:
        arrays: what `look_closely` found, and the rest of the evaluation.
        tol: by how much a row may be beyond its bound before it is called violated.
    """
    known = np.isfinite(arrays["closeup_multiplier"]).any()
    data = json.dumps([details(arrays, k, tol) for k in range(len(arrays["closeup"]))], separators=(",", ":"))
    return f"""<p>{prose(_which(arrays))} <span id="how">To pick one takes JavaScript.</span></p>
<div class="grid">{figure(draw_ranks(arrays))}
<div id="picked" hidden>
<p class="pick"><button type="button" id="previous" aria-label="previous instance">‹</button>
<input type="range" id="rank" min="0" max="{len(arrays["closeup"]) - 1}" value="0" aria-label="instance, worst first">
<button type="button" id="next" aria-label="next instance">›</button></p>
<table id="numbers" aria-live="polite"></table>
</div></div>
<div class="grid tables"><div id="moves"></div><div id="rows"></div></div>
<p class="quiet">{_COUNTED} {prose(_MULTIPLIERS if known else _UNKNOWN)}</p>
<script type="application/json" id="closeups">{data}</script>"""


def _which(arrays: Arrays) -> str:
    kept, total = len(arrays["closeup"]), len(arrays["gap"])
    name, _ = _badness(arrays)
    if kept == total:
        return f"All {total} instances, the largest {name} first."
    return f"{kept} of {total} instances: those with the largest {name}, and some spread over the others."


def _badness(arrays: Arrays) -> tuple[str, np.ndarray]:
    """What instances are sorted by, and how much of it each has."""
    gap = arrays["gap"]
    if np.isfinite(gap).any():
        return "gap", gap[arrays["closeup"]]
    return "distance", np.linalg.norm(arrays["closeup_value"] - arrays["closeup_prediction"], axis=1)


def draw_ranks(arrays: Arrays) -> Picture:
    """Gaps, or distances where no gap is known, on a log axis, the largest first; a click on a point picks it."""
    (name, size), rank, instance = _badness(arrays), arrays["closeup_rank"] + 1, arrays["closeup"]
    known = np.flatnonzero(np.isfinite(size))
    with canvas((4.8, 3.0)) as drawn:
        axes = drawn.subplots()
        lowest = log_axis(axes, "y", size[known], "≤ 0")
        height = np.where(size <= 0, lowest, size)
        axes.plot(rank[known], height[known], "o", color=BLUE, markersize=3)
        unit = "gap f(y) − f*\n(units of the objective)" if name == "gap" else "distance from prediction\nto output"
        axes.set(xlabel="instance, the worst first (rank)", ylabel=unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
        texts = [f"instance {instance[k]}, rank {rank[k]}: {name} {short(float(size[k]))}" for k in known]
        hints = [Hint(axes, (rank[k], height[k]), text, pick=int(k)) for k, text in zip(known, texts, strict=True)]
        caption = f"The {name} of each of these instances."
        return finish(drawn, caption, f"Point plot on a log axis of the {name} of {len(known)} instances.", hints)


def details(arrays: Arrays, k: int, tol: float) -> dict[str, Any]:
    """What the page says of the k-th instance that was looked at closely."""
    index = int(arrays["closeup"][k])
    prediction, value = arrays["closeup_prediction"][k], arrays["closeup_value"][k]
    before, after, lower, upper, multiplier = (
        arrays[f"closeup_{name}"][k] for name in ("before", "after", "lower", "upper", "multiplier")
    )
    over = before - np.clip(before, lower, upper)
    sides = _sides(after, lower, upper)
    moved = value - prediction
    farthest = np.argsort(-np.abs(moved), kind="stable")
    violated, active = ~(np.abs(over) <= tol), sides != "inside"
    told = np.flatnonzero(violated | active)
    told = told[np.lexsort((-np.abs(np.nan_to_num(multiplier[told])), -np.abs(over[told])))]
    whole = {name: arrays[name][index] for name in ("gap", "objective", "violation", "steps") if name in arrays}
    return {
        "instance": index,
        "rank": int(arrays["closeup_rank"][k]) + 1,
        **{name: _rounded(number) for name, number in whole.items()},
        "distance": _rounded(np.linalg.norm(moved)),
        "predicted": _rounded(np.max(np.abs(over), initial=0.0)),
        "residual": _rounded(arrays["closeup_residual"][k]),
        "counts": {
            "moves": len(moved),
            "rows": len(told),
            "violated": int(violated.sum()),
            "active": int(active.sum()),
        },
        "moves": [[int(j), *map(_rounded, (prediction[j], value[j], moved[j]))] for j in farthest[:_MOVES]],
        "rows": [
            [int(i), *map(_rounded, (lower[i], upper[i], before[i], over[i], after[i])), sides[i], _rounded(mu)]
            for i, mu in zip(told[:_ROWS], multiplier[told[:_ROWS]], strict=True)
        ],
    }


def _sides(value: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """(m,) at which bound each row is."""
    found = np.full(len(value), "inside")
    found[at_bound(value, lower)] = "lower"
    found[at_bound(value, upper) & (np.abs(upper - value) <= np.abs(value - lower))] = "upper"
    found[lower == upper] = "equal"
    return found


def _rounded(number: Any) -> float | None:
    """Five digits of a number; None where it is not finite."""
    return float(f"{number:.5g}") if np.isfinite(number) else None
