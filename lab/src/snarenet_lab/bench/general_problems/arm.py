r"""Inverse kinematics: joint angles y of an arm in space whose hand has the position and orientation that x asks for.

Joints turn about the hand's own z and y axes in turn, with links along z between them. With the axes $a_i$ of the hand
and $t_i$ of the target the rows are $p(y) = p$ and $\sum_i a_i(y) \times t_i = 0$, which says that no turn is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems.arithmetic import Torch
from snarenet_lab.bench.general_problems.base import F64, General
from snarenet_lab.bench.general_problems.constants import Constants

_LINKS = (0.34, 0.40, 0.40, 0.126)  # m, one at every second joint
_LIMITS = np.deg2rad([170.0, 120.0, 170.0, 120.0, 170.0, 120.0, 175.0])  # those of a common arm of seven joints
_JOINTS = len(_LIMITS)
_CONSTANTS = Constants(origin=np.zeros(3), a=np.eye(3)[0], b=np.eye(3)[1], c=np.eye(3)[2])


def arm() -> General:
    """An arm of seven joints: one more than a position and an orientation need."""
    limits = torch.from_numpy(_LIMITS)

    def rows(y: Any, x: Any, m: Any) -> Any:
        position, axes = _hand(y, m)
        targets = [m.take(x, slice(3 * i, 3 * i + 3)) for i in range(4)]
        turn = sum(m.cross(axis, target) for axis, target in zip(axes, targets[1:], strict=True))
        return m.join(position - targets[0], turn)

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        share = 2 * torch.rand(batch, len(limits), generator=generator, dtype=F64) - 1
        m = Torch()
        position, axes = _hand(0.8 * limits * share, m)
        return m.join(position, *axes)

    def objective(y: Any, x: Any, m: Any) -> Any:
        return y * y

    constraints = sn.Nonlinear(lambda y, x: rows(y, x, Torch()), 6, equals=0.0) & sn.Box(-limits, limits)
    bent = torch.tensor([0.0, 0.5, 0.0, -1.0, 0.0, 0.5, 0.0], dtype=F64)  # not stretched: no singular Jacobian
    return General(f"arm, {len(limits)} joints", constraints, bent, limits / 10, draw, objective, rows)


def _hand(y: Any, m: Any) -> tuple[Any, list[Any]]:
    """Position and axes of the hand."""
    k = _CONSTANTS.beside(y)
    position, a, b, c = (m.const(k[name]) for name in ("origin", "a", "b", "c"))
    for joint in range(_JOINTS):
        angle = m.take(y, slice(joint, joint + 1))
        cos, sin = m.cos(angle), m.sin(angle)
        if joint % 2 == 0:
            position = position + _LINKS[joint // 2] * c
            a, b = cos * a + sin * b, cos * b - sin * a
        else:
            a, c = cos * a - sin * c, sin * a + cos * c
    return position, [a, b, c]
