"""What is reported about a model: the paper's metrics, as its code computes them, and some that are harder to fool.

Per instance i and row j: e_ij the violation of an inequality, q_ij of an equality, gap_i = f(y_i) - f*_i, signed. The
geometric means clamp at 1e-16, so a negative gap counts as 1e-16: look at the mean, the quantiles and the share of
negative gaps as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.constraints.data import select_inputs
from snarenet.layers.proximity import REACH
from snarenet.problems import Outcome
from snarenet.solution import Solution

_TINY = 1e-16
_COUNTED = 1e-4  # a row violated by more than this counts as a violation (the paper)
_TIGHT = 1e-5  # a row is at a bound that is so near, relative to the bound where that is larger than 1
_THRESHOLDS = (1e-1, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12)


def gmean(values: Tensor) -> float:
    """Geometric mean of max(values, 1e-16)."""
    return math.exp(values.clamp(min=_TINY).log().mean().item()) if values.numel() else math.nan


def gaps(gap: Tensor, reference: Tensor) -> dict[str, float] | None:
    """The distribution of the optimality gap, over the instances whose reference is known; None if there is none."""
    known = reference.isfinite()
    if not bool(known.any()):
        return None
    gap, reference = gap[known], reference[known]
    quantiles = torch.quantile(gap, torch.tensor([0.5, 0.9, 0.99], dtype=gap.dtype)).tolist()
    return {
        "gmean": gmean(gap),
        "mean": gap.mean().item(),
        "max": gap.max().item(),
        **dict(zip(("median", "q90", "q99"), quantiles, strict=True)),
        "negative": (gap < 0).double().mean().item(),
        "relative": (gap / reference.abs()).mean().item(),
        "optimal": (gap < _COUNTED).double().mean().item(),
        "instances": len(gap),
    }


def errors(rows: Tensor) -> dict[str, float]:
    """Largest, mean and (the paper's) geometric mean violation of some rows (N, m)."""
    if not rows.numel():
        return {"max": 0.0, "mean": 0.0, "gmean": _TINY}
    per_instance = rows.clamp(min=_TINY).log().mean(1).exp()
    return {"max": rows.max().item(), "mean": rows.mean().item(), "gmean": gmean(per_instance)}


def nearness(solution: Solution, constraints: Constraints, x: Any, weights: Tensor | None) -> dict[str, float]:
    """What says whether outputs can learn: an output on a bound has no gradient across it, wherever its prediction is.

    `tight` is the share of inequalities at one of their bounds. `distance` is that from predictions to outputs, root
    mean square in the metric of `weights`, over what outputs vary by. `stuck` is the share of outputs that are farther
    from their predictions than `proximity` allows for, and than outputs vary on average.
    """
    value, raw = solution.value.to(torch.float64), solution.raw.to(torch.float64)
    reached = solution.converged.nonzero().squeeze(1)
    value, raw, x = value[reached], raw[reached], select_inputs(x, reached)
    if not len(value):
        return {}
    instance = constraints.at(value, x)
    rows, unequal = instance.map.value(value), instance.lower < instance.upper
    near = (rows - instance.lower <= _near(instance.lower)) | (instance.upper - rows <= _near(instance.upper))
    root = torch.ones_like(value[0]) if weights is None else weights.sqrt()
    varies, away = root * value.std(0, correction=0), root * (value - raw).square().mean(0).sqrt()
    typical = varies.square().mean().sqrt()
    return {
        "tight": (near & unequal).sum().item() / max(1, int(unequal.sum())),
        "distance": (away.square().mean().sqrt() / typical).item() if typical else 0.0,
        "stuck": ((away > REACH * varies) & (away > typical)).double().mean().item(),
    }


def _near(bound: Tensor) -> Tensor:
    """How near a bound counts as at it; nothing is near an infinite one."""
    return torch.where(bound.isfinite(), _TIGHT * (1 + bound.abs()), -math.inf)


def summarize(outcome: Outcome, equal: Tensor, reference: Tensor | None = None) -> dict[str, Any]:
    """All metrics of a model's outcome; `equal` (rows,) marks equalities, `reference` (N,) holds f*, NaN if unknown."""
    out = Outcome(*(tensor.detach().cpu() for tensor in outcome))
    equal = equal.cpu()
    worst = out.errors.amax(1) if out.errors.shape[1] else torch.zeros_like(out.objective)
    found = None if reference is None else gaps(out.objective - reference.cpu(), reference.cpu())
    summary: dict[str, Any] = {
        "instances": len(out.objective),
        "objective": {"mean": out.objective.mean().item(), "max": out.objective.max().item()},
        "gap": found,
        "ineq": errors(out.errors[:, ~equal]),
        "eq": errors(out.errors[:, equal]),
        "violation": out.violation.max().item(),  # at any time, where errors are integrals over time
        "violations": (out.errors[:, ~equal] > _COUNTED).double().sum(1).mean().item(),
        "feasible": {f"{t:.0e}": (worst < t).double().mean().item() for t in _THRESHOLDS},
        "steps": {"median": out.steps.double().median().item(), "max": int(out.steps.max())},
        "converged": out.converged.double().mean().item(),
    }
    if found is not None and reference is not None:
        solved = (out.objective - reference.cpu() < _COUNTED) & (worst < _COUNTED)
        summary["solved"] = solved.double().mean().item()
    return summary
