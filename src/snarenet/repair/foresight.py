r"""`foresee`: rows that a step would break, and had better take in.

A step uses the rows that are violated. Its linear model may lead beyond the bounds of others, which the next step uses,
to break others again: an active set is found one step at a time, and with little damping not at all. So a step is
looked at before it is taken. With d and the multipliers w of the violated rows, the rows that it would break are

$$ g_i - J_i d \notin [l_i, u_i] \quad \text{by more than} \quad 0.01 \, \|J_i\| \, \|d\|. $$

Where one of them would be farther outside than a fifth of what is violated now, in lengths of rows, the step is made
once more: these rows are used as well, with their slack $r_i = g_i - b_i$ to the bound $b_i$ that they would break, and
inequalities whose multipliers point inwards are left out. This is one step of a primal-dual active-set method on the
linear model. More of them gain little, as the next step has another model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.base import largest

TOUCH = 0.01  # of a step's length: how far it may lead beyond a bound that it does not see; from 0.003 to 0.03 alike
BREAK = 0.2  # of the largest violation: what is farther outside is worth another factor


class Rows(NamedTuple):
    """The rows that a step works on.

    Attributes:
        used: (b, rows) true for those that it uses.
        residual: (b, rows) what it is to take away of them: a violation, or the slack of a row that is taken in.
        low: (b, rows) true for rows that are taken in at their lower bounds; None where none is taken in.
    """

    used: Tensor
    residual: Tensor
    low: Tensor | None = None


class Model(NamedTuple):
    """What the linear model of a step says.

    Attributes:
        value: (b, rows) g where it begins.
        change: (b, rows) J d, by which the rows fall.
        left: (b, rows) the residual that it leaves of the rows in use, damping times multipliers.
        length: (b, 1) of d.
        scales: squared lengths of the rows, (b, rows) or one that expands to it.
    """

    value: Tensor
    change: Tensor
    left: Tensor
    length: Tensor
    scales: Tensor


def foresee(rows: Rows, model: Model, lower: Tensor, upper: Tensor) -> tuple[Rows, Tensor]:
    """The rows of the step that is to be taken, and (b,) true where these are others."""
    lengths, ahead = model.scales.sqrt(), model.value - model.change
    over, under = ahead - upper, lower - ahead
    beyond = torch.maximum(over, under)
    broken = ~rows.used & (beyond > TOUCH * model.length * lengths)
    again = largest(torch.where(broken, beyond / lengths, 0.0)) > BREAK * largest(rows.residual / lengths)
    inward = rows.used & (lower < upper) & (model.left * rows.residual <= 0)
    low = broken & (under > over)
    slack = model.value - torch.where(low, lower, upper)
    changed = again.unsqueeze(1) & (broken | inward)
    residual = torch.where(changed, torch.where(broken, slack, 0.0), rows.residual)
    return Rows((rows.used & ~changed) | (broken & changed), residual, low & changed), again
