r"""`hold`: rows that the next step keeps although the last one led inside their bounds.

A step uses the rows that are violated. One that it lands exactly on its bound, its multiplier pushing outwards, belongs
to the next step as well; a curved row lands a little inside instead, by $O(\|d\|^2)$. Left out, it is broken again by
the next step, used by the one after, and so on: convergence becomes linear. Such a row is held: its residual is its
slack, with which the step leads back to the bound.

$$ r_i = g_i - b_i \quad \text{where} \quad (r - J d)_i \ne 0 \text{ points beyond } b_i, \quad
   |g_i - b_i| \le 0.03 \, \|J_i\| \, \|d\|. $$

Foreseen residuals are multipliers times damping, so their signs are those of the multipliers. Rows farther inside are
free: far from the set, holding rows leads nowhere.
"""

from __future__ import annotations

from torch import Tensor

HOLD = 0.03  # of a step's length: how far inside a row may have landed; from 0.01 to 0.1 makes no difference


def hold(
    value: Tensor, lower: Tensor, upper: Tensor, used: Tensor, foreseen: Tensor, reach: Tensor
) -> tuple[Tensor, Tensor]:
    """The slacks g - b of rows, and (b, rows) true for those that are held.

    Args:
        value: (b, rows) g after the step.
        lower: their bounds, as `upper`.
        upper: their bounds.
        used: true for rows that the step used.
        foreseen: the residual that the linear model foresaw.
        reach: the length of the step, in the scale of each row.
    """
    over, under = value - upper, value - lower
    held = used & (lower < upper) & (over <= 0) & (under >= 0)
    slack = over.where(foreseen > 0, under)
    return slack, held & (foreseen != 0) & (slack.abs() <= HOLD * reach)
