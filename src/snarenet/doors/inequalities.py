"""Linear inequalities A y <= b(x), one side each, as the sets that repair them best.

Rows that are plus or minus an entry of y are a `Box`. Others that are equal up to their sign become one row with two
sides: a row that comes twice would make the rows dependent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from snarenet.constraints import Box, Constraints, Linear

Limit = Tensor | nn.Module  # a module is a function of x


class Tightest(nn.Module):
    """The smallest of the limits of each group, times a sign; infinite where there is none.

    Args:
        limit: b, (m,) or a function of x.
        members: (k,) which rows of b.
        groups: (k,) the group that each is in.
        count: how many groups there are.
        sign: 1 for upper bounds; -1 for lower ones, as -a y <= b is a y >= -b.
    """

    members: Tensor
    groups: Tensor

    def __init__(self, limit: Limit, members: Tensor, groups: Tensor, count: int, sign: float) -> None:
        super().__init__()
        self.count, self.sign = count, sign
        self.limit = limit if isinstance(limit, nn.Module) else None
        self.register_buffer("members", members, persistent=False)
        self.register_buffer("groups", groups, persistent=False)

    def forward(self, x: object) -> Tensor:
        assert self.limit is not None
        return self.of(self.limit(x))

    def of(self, limits: Tensor) -> Tensor:
        """(B, count) of limits (B, m)."""
        none = limits.new_full((len(limits), self.count), torch.inf)
        chosen = limits[:, self.members]
        return self.sign * none.scatter_reduce(1, self.groups.expand(len(limits), -1), chosen, "amin")


def bounded(A: Tensor, limit: Limit) -> list[Constraints]:
    """The sets of A y <= limit, with A (m, n) constant."""
    found: list[Constraints] = []
    sign = _first_sign(A)
    single = ((A != 0).sum(1) == 1) & (A.abs().sum(1) == 1)
    if bool(single.any()):
        rows = single.nonzero().flatten()
        found.append(Box(*_sides(limit, rows, A[rows].abs().argmax(1), A.shape[1], sign)))
    if not bool(single.all()):
        rows = (~single).nonzero().flatten()
        distinct, groups = torch.unique(sign[rows].unsqueeze(1) * A[rows], dim=0, return_inverse=True)
        found.append(Linear(distinct, *_sides(limit, rows, groups, len(distinct), sign)))
    for part in found:
        part.rows, part.size = part.rows_for(A.shape[1]), A.shape[1]
    return found


def _first_sign(A: Tensor) -> Tensor:
    """(m,) the sign of the first entry of every row that is not zero; 1 where there is none."""
    first = (A != 0).to(torch.int8).argmax(1, keepdim=True)
    return torch.where(A.gather(1, first).squeeze(1) < 0, -1.0, 1.0).to(A)


def _sides(limit: Limit, rows: Tensor, groups: Tensor, count: int, sign: Tensor) -> list[Tensor | Tightest | None]:
    """(lower, upper) of so many groups; None where no row bounds that side."""
    found: list[Tensor | Tightest | None] = []
    for side in (-1.0, 1.0):
        mine = sign[rows] == side
        if not bool(mine.any()):
            found.append(None)
            continue
        tightest = Tightest(limit, rows[mine], groups[mine], count, side)
        found.append(tightest.of(limit.unsqueeze(0))[0] if isinstance(limit, Tensor) else tightest)
    return found
