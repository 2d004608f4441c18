r"""`look_closely`: some instances of an evaluation in every detail, for a page that lets its reader pick one.

Of an instance: the prediction $\hat y$, the output $\check y$, the rows $g$ at both, their bounds, and the multipliers
$\mu$ of the rows at a bound, which bring

$$ \nabla f(\check y) + J(\check y)^\top \mu $$

closest to zero in least squares: free for equalities, $\mu_i \ge 0$ at an upper and $\mu_i \le 0$ at a lower bound, see
`reference/program.py`. The KKT residual says how close; it is zero where the output is a stationary point.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from snarenet.problems import Problem
from snarenet.reference.program import Array, Program
from snarenet.reference.reading import Autograd, Lagrangian
from snarenet.reference.rows import array
from snarenet.solution import Solution

_WORST = 0.2  # of the instances looked at are the worst, the others are spread over the rest
_NUMBERS = 2**22  # at most so many are kept, of fewer instances if need be
_ENTRIES = 2**20  # of a Jacobian that is factored for multipliers


def look_closely(problem: Problem, x: Tensor, solution: Solution, gap: Array, count: int) -> dict[str, np.ndarray]:
    """Arrays of k <= count instances, worst first.

    These are `closeup` (k,), which of the instances; `closeup_rank` (k,), 0 for the worst by their gap, or by the
    distance from prediction to output where no gap is known; `closeup_prediction` and `closeup_value` (k, n);
    `closeup_before` and `closeup_after` (k, m), g at both; `closeup_lower`, `closeup_upper` and `closeup_multiplier`
    (k, m), and `closeup_residual` (k,), NaN where multipliers are not known.

    Args:
        problem: the problem.
        x: (N, d) the inputs.
        solution: what the model returned for them.
        gap: (N,) their gaps, NaN where unknown.
        count: how many instances to look at; fewer if they are large.
    """
    prediction, value = (tensor.to(torch.float64) for tensor in (solution.raw, solution.value))
    instance = problem.feasible_set.at(value, x)
    n, m = value.shape[1], instance.lower.shape[1]
    count = min(count, max(1, _NUMBERS // (2 * n + 5 * m)))
    known = np.isfinite(gap)
    distance = array((value - prediction).norm(dim=1))
    worst = np.where(known, gap, -np.inf) if known.any() else np.nan_to_num(distance, nan=np.inf)
    order = np.argsort(-worst, kind="stable")
    rank = choose(len(order), count)
    chosen = torch.as_tensor(order[rank], device=x.device)
    seen = instance.select(chosen)
    multiplier, residual = _multipliers(problem, x, value, order[rank])
    return {
        "closeup": order[rank],
        "closeup_rank": rank,
        "closeup_prediction": array(prediction[chosen]),
        "closeup_value": array(value[chosen]),
        "closeup_before": array(seen.map.value(prediction[chosen])),
        "closeup_after": array(seen.map.value(value[chosen])),
        "closeup_lower": array(seen.lower),
        "closeup_upper": array(seen.upper),
        "closeup_multiplier": multiplier,
        "closeup_residual": residual,
    }


def choose(total: int, count: int) -> np.ndarray:
    """(k,) ranks to look at: the worst ones, and others evenly from the rest, the best included."""
    if total <= count:
        return np.arange(total)
    worst = int(_WORST * count)
    return np.append(np.arange(worst), np.linspace(worst, total - 1, count - worst).round().astype(int))


def _multipliers(problem: Problem, x: Tensor, value: Tensor, chosen: np.ndarray) -> tuple[Array, Array]:
    """(k, m) of the rows at the outputs, and (k,) KKT residuals; NaN without scipy, and for large Jacobians."""
    lagrangian, found = Lagrangian(problem), []
    for i in chosen.tolist():
        y, one = array(value[i]), x[[i]]
        instance = problem.feasible_set.at(value[[i]], one)
        program = Autograd(problem, one, instance, lagrangian)
        found.append(_multipliers_of(program, y, array(instance.lower[0]), array(instance.upper[0])))
    multipliers, residual = zip(*found, strict=True)
    return np.stack(multipliers), np.array(residual)


def _multipliers_of(program: Program, y: Array, lower: Array, upper: Array) -> tuple[Array, float]:
    try:
        found = program.multipliers(y, lower, upper) if len(lower) * len(y) <= _ENTRIES else None
    except ImportError:  # scipy, which is an extra
        found = None
    return (np.full(len(lower), np.nan), np.nan) if found is None else (found, program.residual(y, lower, upper, found))
