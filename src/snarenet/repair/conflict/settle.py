r"""From where a repair ended to a point of least violation: a minimiser of

$$ \phi(y) = \tfrac12 \sum_i r_i(y)^2 / s_i^2, \qquad \nabla \phi = J^\top S^{-2} r, \qquad
   \nabla^2 \phi = J^\top S^{-2} J + \sum_i (r_i / s_i^2) \nabla^2 g_i, $$

with row lengths s that stay as they were at the start. The steps of a repair leave the last sum out: near a set that is
not empty it vanishes, but where it is, they are slow. So Newton's method makes the last steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from snarenet.constraints.base import Constraints, Instance, residual
from snarenet.constraints.maps.base import CHUNK
from snarenet.damping import Adaptive
from snarenet.repair.choose import choose
from snarenet.repair.engine import Batch
from snarenet.repair.options import Options

_STEPS = 100  # of the repair
_NEWTON = 60  # steps of Newton's method, of which five to twenty are usual
_HALVINGS = 40  # of one such step
_BALANCED = 1e-10  # |J'r| / (|J| |r|) at which it stops
_LEAST = 1e-10  # share of the largest curvature that each direction is given
_DECREASE = 1e-4  # share of the decrease to first order that a step has to bring


def settle(options: Options, constraints: Constraints, instance: Instance, start: Tensor, finite: Tensor) -> Tensor:
    """The points (B, n) to which the steps of a repair lead: it returned the best point it saw, not the last."""
    options = replace(options, damping=Adaptive(), rows="active", tol=0.0, max_steps=_STEPS, dtype=torch.float64)
    engine, lower, upper = choose(options, constraints.memo, instance, start)
    (point, _, _), _ = engine.run(Batch(start, lower, upper, finite), taped=False)
    return torch.where(point.isfinite().all(1, keepdim=True), point, start)


def polish(one: Instance, z: Tensor, scale: Tensor) -> Tensor:
    """z (1, n) after Newton's method, for an instance of one sample and lengths (1, rows); z itself for a large one."""
    n = z.shape[1]
    if n * n * max(one.map.rows, 1) > CHUNK:
        return z
    for _ in range(_NEWTON):
        r = _scaled(one, z, scale)
        J = one.map.jacobian(z).expand(1, one.map.rows, n)[0] / scale[0].unsqueeze(1)
        J = torch.where(r[0].unsqueeze(1) != 0, J, 0.0)
        slope = r[0] @ J
        if not float(slope.norm()) > _BALANCED * float(J.norm() * r.norm()):
            break
        curvature, directions = torch.linalg.eigh(J.mT @ J + _second(one, z, r / scale))
        curvature = curvature.abs()
        step = -directions @ (directions.mT @ slope / curvature.clamp(min=_LEAST * float(curvature.max())))
        found = _search(one, z, scale, step, float(slope @ step))
        if found is None:
            break
        z = found
    return z


def _scaled(one: Instance, y: Tensor, scale: Tensor) -> Tensor:
    return residual(one.map.value(y), one.lower, one.upper) / scale


def _second(one: Instance, z: Tensor, weights: Tensor) -> Tensor:
    """(n, n) the sum of weighted Hessians, a column a copy of the sample."""
    n = z.shape[1]
    if one.map.linear:
        return z.new_zeros(n, n)
    copies = one.map.select(torch.zeros(n, dtype=torch.long, device=z.device))
    y, w, unit = z.expand(n, n).contiguous(), weights.expand(n, -1), torch.eye(n, dtype=z.dtype, device=z.device)
    found = copies.pullback(y, [(w, unit)], torch.zeros_like(w), ())[0]
    found = z.new_zeros(n, n) if found is None else found
    return (found + found.mT) / 2


def _search(one: Instance, z: Tensor, scale: Tensor, step: Tensor, slope: float) -> Tensor | None:
    """The first of z + step, z + step / 2, ... that decreases the violation enough; None if none does."""
    before = float(_scaled(one, z, scale).square().sum()) / 2
    share = 1.0
    for _ in range(_HALVINGS):
        trial = z + share * step
        after = float(_scaled(one, trial, scale).square().sum()) / 2
        if after <= before + _DECREASE * share * slope and after < before:
            return trial
        share /= 2
    return None
