"""`feasible_starts`: initial conditions for BoTorch's `optimize_acqf` that obey nonlinear constraints.

BoTorch optimises an acquisition function over q points of d entries under c(x) >= 0 by SLSQP, which must start inside:

    X = argmin |X - S|  so that  c(X) >= 0,  h(X) = 0,  bounds[0] <= X <= bounds[1]

for Sobol points S; of those that reached the set, BoTorch's own heuristic picks by their acquisition values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Box, Constraints, Linear, Nonlinear, Stack
from snarenet.repair import repair

try:
    from botorch.optim.initializers import gen_batch_initial_conditions
    from botorch.optim.parameter_constraints import get_constraint_tolerance
    from botorch.utils.sampling import draw_sobol_samples
except ImportError as error:
    raise ImportError('`feasible_starts` needs BoTorch: pip install "snarenet[botorch]"') from error

Function = tuple[Callable[[Tensor], Tensor], bool]
Row = tuple[Tensor, Tensor, float]


def feasible_set(
    bounds: Tensor,
    q: int = 1,
    nonlinear_inequality_constraints: Sequence[Function] | None = None,
    nonlinear_equality_constraints: Sequence[Function] | None = None,
    inequality_constraints: Sequence[Row] | None = None,
    equality_constraints: Sequence[Row] | None = None,
    fixed_features: dict[int, float] | None = None,
) -> Constraints:
    """The set of all q-batches, flattened to (B, q d), that obey constraints in BoTorch's notation.

    Args:
        bounds: (2, d) bounds of a point.
        q: how many points a batch has.
        nonlinear_inequality_constraints: pairs of a function and whether it is intra-point: c(x) >= 0, of each point
            (d,) if it is, else of the whole batch (q, d). Functions go through `torch.vmap`.
        nonlinear_equality_constraints: the same with h(x) = 0; BoTorch itself has none.
        inequality_constraints: triples (indices, coefficients, rhs), a sum that is at least rhs; indices (k,) of each
            point, or (k, 2) of points and their entries.
        equality_constraints: the same with sums that equal rhs.
        fixed_features: the value of each entry of a point that is fixed.
    """
    lower, upper = (bound.repeat(q) for bound in _fixed(bounds.to(torch.float64), fixed_features or {}))
    parts: list[Constraints] = [Box(lower, upper)]
    at_least: dict[str, Any] = {"lower": 0.0}
    equal: dict[str, Any] = {"equals": 0.0}
    d = bounds.shape[-1]
    for functions, bound in ((nonlinear_inequality_constraints, at_least), (nonlinear_equality_constraints, equal)):
        for function, intrapoint in functions or ():
            parts.append(Nonlinear(_batched(function, intrapoint, q, d), q if intrapoint else 1, **bound))
    for triples, side in ((inequality_constraints, "lower"), (equality_constraints, "equals")):
        for indices, coefficients, rhs in triples or ():
            parts.append(Linear(_matrix(indices, coefficients, q, d), **{side: float(rhs)}))
    return Stack(*parts).to(bounds.device)


def feasible_starts(
    acq_function: Any,
    bounds: Tensor,
    q: int,
    num_restarts: int,
    raw_samples: int,
    fixed_features: dict[int, float] | None = None,
    options: dict[str, Any] | None = None,
    inequality_constraints: Sequence[Row] | None = None,
    equality_constraints: Sequence[Row] | None = None,
    *,
    nonlinear_inequality_constraints: Sequence[Function] | None = None,
    nonlinear_equality_constraints: Sequence[Function] | None = None,
) -> Tensor:
    """(num_restarts, q, d) initial conditions that obey all constraints to half of BoTorch's tolerance.

    `optimize_acqf` does not hand nonlinear constraints to its `ic_generator`: give them beforehand, with
    `partial(feasible_starts, nonlinear_inequality_constraints=...)`. The other arguments are those of BoTorch's
    `gen_batch_initial_conditions`; for the constraints see `feasible_set`.
    """
    constraints = feasible_set(
        bounds, q, nonlinear_inequality_constraints, nonlinear_equality_constraints,
        inequality_constraints, equality_constraints, fixed_features,
    )  # fmt: skip
    tol = get_constraint_tolerance(bounds.dtype) / 2

    def draw(count: int, q: int, seed: int | None) -> Tensor:
        drawn = draw_sobol_samples(bounds, count, q, seed=seed)
        with torch.no_grad():
            found = repair(constraints, drawn.flatten(1), tol=tol, rescue=True)
        inside = found.violation <= tol
        if int(inside.sum()) < num_restarts:
            raise RuntimeError(
                f"of {count} Sobol points {int(inside.sum())} could be moved into the feasible set, but {num_restarts} "
                f"starts are needed: raise `raw_samples`, or check that the set is not empty. {found.describe()}"
            )
        return found.value[inside].view(-1, *drawn.shape[1:])

    return gen_batch_initial_conditions(
        acq_function, bounds, q, num_restarts, raw_samples, options=options, generator=draw
    )


def _fixed(bounds: Tensor, features: dict[int, float]) -> Tensor:
    """(2, d) the bounds, closed at fixed features."""
    bounds = bounds.clone()
    for index, value in features.items():
        bounds[:, index] = float(value)
    return bounds


def _batched(function: Callable[[Tensor], Tensor], intrapoint: bool, q: int, d: int) -> Callable[[Tensor, Any], Tensor]:
    """(B, q d) -> (B, q) the function of each point, or (B, 1) that of the batch of points."""

    def rows(y: Tensor, x: Any) -> Tensor:
        points = y.reshape(-1, d) if intrapoint else y.reshape(-1, q, d)
        return torch.vmap(lambda point: function(point).reshape(()))(points).reshape(-1, q if intrapoint else 1)

    return rows


def _matrix(indices: Tensor, coefficients: Tensor, q: int, d: int) -> Tensor:
    """The rows of a linear constraint on flattened batches: (q, q d) of each point, or (1, q d)."""
    coefficients = coefficients.to("cpu", torch.float64)
    if indices.ndim == 2:
        row = torch.zeros(q, d, dtype=torch.float64)
        row[indices[:, 0].cpu(), indices[:, 1].cpu()] = coefficients
        return row.reshape(1, -1)
    row = torch.zeros(d, dtype=torch.float64).index_copy(0, indices.cpu(), coefficients)
    return torch.block_diag(*[row.unsqueeze(0)] * q)
