"""The textbook repair: batched J'J, an LU solve, and autograd through the unrolled loop. Slow, obvious, independent.

It follows the paper's step, and adds what the library adds (annealed and relative damping, active rows, a stop per
sample), each in its most direct form. Tests compare values and gradients with it; benchmarks measure against it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def textbook_repair(
    value: Function,
    jacobian: Function,
    lower: Tensor,
    upper: Tensor,
    y: Tensor,
    *,
    damping: Callable[[int], float],
    relative: bool = False,
    active: bool = False,
    tol: float = 1e-8,
    max_steps: int = 100,
    per_sample: bool = True,
    weights: Tensor | None = None,
) -> tuple[Tensor, int]:
    """The repaired y and the number of steps; `value` (B, m) and `jacobian` (B, m, n) are functions of y.

    `weights` (n,) are those of the metric of the steps, 1 unless given; the largest counts as 1.
    """
    metric = y.new_ones(y.shape[1]) if weights is None else (weights / weights.max()).to(y)
    J = jacobian(y)
    scale = (J.square() / metric).sum(-1) if relative else torch.ones_like(J[..., 0])
    for k in range(max_steps):
        g = value(y)
        r = torch.relu(g - upper) - torch.relu(lower - g)
        worst = r.abs().amax(1)
        if bool((worst <= tol).all()):
            return y, k
        J = jacobian(y)
        if active:
            J = J * ((r != 0) | (lower == upper)).unsqueeze(-1)
        weighted = J.mT / scale.unsqueeze(1)
        d = torch.linalg.solve(weighted @ J + damping(k) * metric.diag(), (weighted @ r.unsqueeze(-1))).squeeze(-1)
        y = torch.where((worst > tol).unsqueeze(1), y - d, y) if per_sample else y - d
    return y, max_steps


def autograd_jacobian(value: Function) -> Function:
    """The Jacobian (B, m, n) of a function of the batch, one row at a time, differentiable again."""

    def jacobian(y: Tensor) -> Tensor:
        with torch.enable_grad():
            y = y if y.requires_grad else y.detach().requires_grad_()
            g = value(y)
            rows = [torch.autograd.grad(g[:, i].sum(), y, create_graph=True)[0] for i in range(g.shape[1])]
        return torch.stack(rows, 1)

    return jacobian
