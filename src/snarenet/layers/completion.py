r"""Completion: constant linear equalities C y = b hold exactly once some of the variables follow from the others.

Split y into partial variables $y_p$, free to choose, and the others, $y_o$, as many as there are equalities:

$$ y_o = C_o^{-1} (b - C_p\, y_p), \qquad \frac{\partial y}{\partial y_p} = \begin{pmatrix} I \\ -S \end{pmatrix},
\qquad S = C_o^{-1} C_p. $$

The condition of $C_o$ decides how exactly the equalities hold and how steep functions of y become in $y_p$: pivoting
keeps it small, a random choice leaves it to luck.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints, Instance, Linear
from snarenet.constraints.data import describe
from snarenet.constraints.maps import StackedMap
from snarenet.memo import Memo

Partial = Literal["pivoted", "random"]

_RANK = 1e-10  # a column this short, in lengths of the first, depends on those picked before
_DETERMINANT = 1e-4  # least |det C_o| of a random choice, the paper's
# Most condition of C_o in a random choice. The paper's runs drew before they were seeded, so its choices are not known;
# of `nclp` one in twelve is so bad that DC3 diverges at the paper's step (the choice of its seed 789 has 3,300).
_CONDITION = 1e3
_ATTEMPTS = 1000


class _Matrices(NamedTuple):
    """What completion computes with, all in float64."""

    partial: Tensor  # C_p (m, n - m)
    inverse: Tensor  # of C_o (m, m)
    spread: Tensor  # S (m, n - m)
    place: Tensor  # (n,) where each variable stands in (y_p, y_o)


class Completion(nn.Module):
    """Which variables are partial, and how the others follow from them, in float64.

    Equalities are the parts of the set given as `Linear(C, equals=...)` with one matrix C for all samples that is not
    learned; several are stacked. Without any, every variable is partial and completion changes nothing.

    Args:
        constraints: the set.
        partial: "pivoted" picks the columns of C_o one by one, each time the longest after projecting out those picked
            before; "random" draws the partial variables until |det C_o| is at least 1e-4, as the paper does, and the
            condition of C_o at most 1,000.
        seed: of the random choice.

    Attributes:
        rows: m, how many equalities there are.
        size: the n of y; None if the set does not tell, which one with equalities does.
        order: (n,) the partial variables, then the others. It is saved: what a network predicts depends on it.
    """

    order: Tensor

    def __init__(self, constraints: Constraints, partial: Partial = "pivoted", seed: int = 0) -> None:
        super().__init__()
        if not isinstance(partial, str) or partial not in ("pivoted", "random"):
            raise ValueError(f"`partial` must be 'pivoted' or 'random', but got {partial!r}")
        found = {i: part for i, part in enumerate(constraints.parts) if isinstance(part, Linear) and _is_equality(part)}
        self.index = tuple(found)
        self.parts = tuple(found.values())  # a tuple: the set is registered, and saved, by its owner
        self.rows = sum(part.known_rows() for part in self.parts)
        self.size = constraints.size
        self.memo = Memo()
        self.register_buffer("order", self._choose(partial, seed))

    def count(self, size: int) -> int:
        """How many of `size` variables are partial."""
        if self.size not in (None, size):
            raise ValueError(f"`size` must be {self.size}, as the constraints have it, but got {size}")
        return size - self.rows

    def right_side(self, instance: Instance) -> Tensor:
        """(B, m) b of the equalities."""
        return _columns(instance, instance.lower, self.index)

    def remaining(self, instance: Instance) -> Instance:
        """The rows that are not completed."""
        if not self.parts:
            return instance
        maps = instance.map.parts
        rest = tuple(i for i in range(len(maps)) if i not in self.index)
        lower, upper = (_columns(instance, bound, rest) for bound in (instance.lower, instance.upper))
        return Instance(StackedMap([maps[i] for i in rest]), lower, upper, tuple(instance.equal[i] for i in rest))

    def begin(self, partial: Tensor, instance: Instance) -> Tensor:
        """y (B, n) with these partial variables (B, n - m)."""
        return self.complete(partial, self.right_side(instance))

    def tangent(self, y: Tensor, instance: Instance) -> Completion:
        """What lifts and reduces at y: the same everywhere."""
        return self

    def move(self, y: Tensor, velocity: Tensor, tangent: Completion, instance: Instance) -> Tensor:
        """y after its partial variables have moved by -velocity."""
        return y - tangent.lift(velocity)

    def complete(self, partial: Tensor, b: Tensor) -> Tensor:
        """y (B, n) with these partial variables (B, n - m) and C y = b (B, m)."""
        if not self.parts:
            return partial
        matrices = self._matrices()
        others = (b - partial @ matrices.partial.T) @ matrices.inverse.T
        return torch.cat([partial, others], 1)[:, matrices.place]

    def lift(self, direction: Tensor) -> Tensor:
        """(d_p, -S d_p): how y moves (B, n) when the partial variables move by d_p."""
        if not self.parts:
            return direction
        matrices = self._matrices()
        return torch.cat([direction, -direction @ matrices.spread.T], 1)[:, matrices.place]

    def reduce(self, gradient: Tensor) -> Tensor:
        """d_p - S' d_o: the gradient in the partial variables (B, n - m) from the one in y; the transpose of `lift`."""
        if not self.parts:
            return gradient
        free, tied = gradient[:, self.order].split([gradient.shape[1] - self.rows, self.rows], 1)
        return free - tied @ self._matrices().spread

    def _sources(self) -> tuple[Tensor, ...]:
        """The matrices of the equalities as the set holds them now."""
        maps = (part.constant_map(torch.float64) for part in self.parts)
        return tuple(map.A for map in maps if map is not None)

    def _equalities(self) -> Tensor:
        """C (m, n)."""
        return torch.cat([A.detach().to(torch.float64) for A in self._sources()])

    def _choose(self, partial: Partial, seed: int) -> Tensor:
        if not self.parts:
            return torch.empty(0, dtype=torch.long)
        C = self._equalities()
        order = pivoted_order(C.cpu())  # for a random choice, too: it raises if there is none
        return (order if partial == "pivoted" else random_order(C.cpu(), seed)).to(C.device)

    def _matrices(self) -> _Matrices:
        """Computed again only when the equalities are moved, loaded or changed."""

        def build() -> _Matrices:
            C_p, C_o = self._equalities()[:, self.order].split([len(self.order) - self.rows, self.rows], 1)
            return _Matrices(C_p, torch.linalg.inv(C_o), torch.linalg.solve(C_o, C_p), self.order.argsort())

        return self.memo.get("matrices", (*self._sources(), self.order), build)

    def extra_repr(self) -> str:
        return f"rows={self.rows}, size={self.size}"


def check_partial(partial: Tensor, size: int | None, rows: int) -> Tensor:
    """`partial`, if it is a batch of values for the partial variables, of `size` less `rows`."""
    count = None if size is None else size - rows
    if not isinstance(partial, Tensor) or partial.ndim != 2 or count not in (None, partial.shape[1]):
        expected = f"(B, {'n' if count is None else count})"
        raise ValueError(f"`y` must have shape {expected}, the partial variables, but got {describe(partial)}")
    if not partial.is_floating_point():
        raise TypeError(f"`y` must be a floating-point tensor, but got {partial.dtype}")
    return partial


def pivoted_order(C: Tensor) -> Tensor:
    """The partial variables, then the others, these by pivoted orthogonalisation of the columns of C (m, n)."""
    rest = C / C.norm(dim=1, keepdim=True)  # the scale of an equality means nothing; a zero row becomes NaN
    picked: list[int] = []
    longest = rest.norm(dim=0).max()
    for _ in range(len(C)):
        lengths = rest.norm(dim=0)
        lengths[picked] = 0.0
        column = int(lengths.argmax())
        if not lengths[column] > _RANK * longest:
            raise ValueError(f"completion needs independent equalities, but only {len(picked)} of {len(C)} rows are")
        picked.append(column)
        axis = rest[:, column] / lengths[column]
        rest = rest - axis.unsqueeze(1) * (axis @ rest)
    partial = [i for i in range(C.shape[1]) if i not in picked]
    return torch.tensor(partial + sorted(picked))


def random_order(C: Tensor, seed: int, condition: float = _CONDITION) -> Tensor:
    """The partial variables, then the others, drawn as the paper's code draws them, and again above this condition."""
    m, n = C.shape
    draw = np.random.RandomState(seed)
    for _ in range(_ATTEMPTS):
        partial = torch.from_numpy(draw.choice(n, n - m, replace=False))
        others = torch.ones(n, dtype=torch.bool).index_fill(0, partial, False).nonzero().squeeze(1)
        square = C[:, others]
        if torch.linalg.det(square).abs() >= _DETERMINANT and torch.linalg.cond(square) <= condition:
            return torch.cat([partial, others])
    raise ValueError(f"none of {_ATTEMPTS} random choices of the partial variables can be completed; use 'pivoted'")


def _is_equality(part: Linear) -> bool:
    return part.limit.equal and part.constant_map(torch.float64) is not None


def _columns(instance: Instance, bound: Tensor, parts: tuple[int, ...]) -> Tensor:
    """A bound's entries (B, .) for the rows of these parts of a stack."""
    pieces = bound.split([map.rows for map in instance.map.parts], 1)
    return torch.cat([bound[:, :0], *(pieces[i] for i in parts)], 1)
