r"""What a precision can hold: which dtype comes back, what the returned value violates, and what rounding excuses.

A repair works in float64 and rounds at the end. Rounding y to a precision of $\epsilon$ moves row i by at most

$$ \tfrac{\epsilon}{2} \sum_j |J_{ij}\, y_j| = \tfrac12 a_i $$

to first order. So a repair that is rounded aims at tol / 2 (`Options.aim`), and ends with $|r_i| \le \max(\text{tol},
a_i)$: that is what CONVERGED means, of the value that is returned, in float64. Where $a_i$ was needed the solution says
so (`Solution.allowance`), and a `PrecisionWarning` does. A result in float64 needs no allowance and gets none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from snarenet.constraints.base import Instance, largest, residual
from snarenet.repair.stopping import CONVERGED, GOING, NONFINITE
from snarenet.solution import PrecisionWarning, Solution, warn
from snarenet.tracing import tracing, without_grad


def output_dtype(given: torch.dtype) -> torch.dtype:
    """The dtype of outputs for predictions of this dtype: the same, but at least float32."""
    return torch.promote_types(given, torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Autocast switched off, where it is on: a repair chooses its own precision."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def in_full_precision(function: Callable[..., Solution], y: Tensor, x: Any, *rest: Any) -> Solution:
    """function(y, x, *rest) without autocast; x, which autocast would have cast, is at least float32 there."""
    if not isinstance(y, Tensor) or not torch.is_autocast_enabled(y.device.type):
        return function(y, x, *rest)
    with without_autocast(y.device):
        return function(y, tree_map(_widened, x), *rest)


def _widened(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(output_dtype(leaf.dtype)) if floating else leaf


class Verdict(NamedTuple):
    """What can be said of returned values, (B,) each.

    Attributes:
        violation: the largest violation, in float64; infinite where value or violation is not a number.
        allowance: what rounding excuses, where a violation of more than the tolerance is excused; else zero.
        status: codes of `Status`.
    """

    violation: Tensor
    allowance: Tensor
    status: Tensor


def judge(instance: Instance, value: Tensor, tol: float, work: torch.dtype, status: Tensor) -> Verdict:
    """The verdict on values as they are returned.

    Args:
        instance: the constraints, in float64.
        value: (B, n) what is returned, in its own precision.
        tol: the tolerance; 0 asks for none, and nothing is excused.
        work: the precision that it was computed in.
        status: (B,) what the method says of samples that did not converge.
    """
    with without_grad():
        y = value.detach().to(torch.float64)
        g = instance.map.value(y)
        r = residual(g, instance.lower, instance.upper).abs()
        worst = largest(r)
        finite = y.isfinite().all(1) & worst.isfinite()
        worst = torch.where(finite, worst, math.inf)
        allowance = torch.zeros_like(worst)
        unit = max(torch.finfo(dtype).eps for dtype in (value.dtype, work))
        if tol and unit > torch.finfo(torch.float64).eps:
            if tracing():
                allowance = torch.where(finite, _allowance(instance, y, g, r, tol, unit, work), 0.0)
            elif len(over := (finite & (worst > tol)).nonzero().squeeze(1)):
                some = _allowance(instance.select(over), y[over], g[over], r[over], tol, unit, work)
                allowance = allowance.index_copy(0, over, some)
        kept = torch.where(status == CONVERGED, GOING, status)
        status = torch.where((worst <= tol) | (allowance > 0), CONVERGED, kept)
        return Verdict(worst, allowance, torch.where(finite, status, NONFINITE))


def _allowance(
    instance: Instance, y: Tensor, g: Tensor, r: Tensor, tol: float, unit: float, work: torch.dtype
) -> Tensor:
    """(B,) the largest a_i of the rows over the tolerance, where it excuses all of them; else zero."""
    a = unit * instance.map.magnitudes(y)
    if work != torch.float64:  # then rows and bounds were rounded as well
        a = a + unit * g.abs()
    over = r > tol
    return torch.where((~over | (r <= a)).all(1), largest(torch.where(over, a, 0.0)), 0.0)


def tell(solution: Solution, tol: float) -> None:
    """Warn where a tolerance was finer than the precision; the same text for many batches, so that it is shown once."""
    if tracing() or not bool((solution.allowance > 0).any()):
        return
    held = 10.0 ** math.ceil(math.log10(solution.allowance.max().item()))
    warn(
        f"float32 cannot hold the tolerance {tol:g} here, but {held:g}: samples within what it holds count as "
        "converged, and `Solution.violation` says what they violate. For more, repair in float64 (`dtype`) and pass "
        f"predictions in float64: y.double(), or x.double() to a ConstrainedModel. For less, ask for tol={held:g}.",
        PrecisionWarning,
    )
