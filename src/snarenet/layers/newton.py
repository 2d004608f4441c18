r"""Completion of any equalities: the other variables follow from the partial ones by Newton's method, as DC3 has it.

With h(y) = 0 all equalities of a set, rows of functions and fixed variables among them, and y = (y_p, y_o) split at a
typical point,

$$ y_o \leftarrow y_o - (\partial h / \partial y_o)^{-1} h(y_p, y_o), \qquad
\frac{\partial y}{\partial y_p} = \begin{pmatrix} I \\ -S \end{pmatrix}, \quad
S = \Big(\frac{\partial h}{\partial y_o}\Big)^{-1} \frac{\partial h}{\partial y_p}. $$

Gradients are implicit: a last step with a constant inverse has the derivative above. Nothing guarantees that Newton's
method gets there; what it leaves is in the violation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints, Instance, Linear
from snarenet.layers.completion import Partial, pivoted_order, random_order

_STEPS = 20  # DC3's power flow takes fewer than ten
_TOL = 1e-11
_LONGEST = 0.5  # change of a variable in a step: angles and voltages are of the order of one


class Around(NamedTuple):
    """A typical point y (n,) of a set, and its input x (d,)."""

    y: Tensor
    x: Tensor


class Tangent(NamedTuple):
    """How y moves with its partial variables, at one y; constants.

    Attributes:
        spread: S (B, m, n - m).
        order: (n,) the partial variables, then the others.
    """

    spread: Tensor
    order: Tensor

    def lift(self, direction: Tensor) -> Tensor:
        """(d_p, -S d_p): how y moves (B, n) when the partial variables move by d_p."""
        others = -(self.spread @ direction.unsqueeze(2)).squeeze(2)
        return torch.cat([direction, others], 1)[:, self.order.argsort()]

    def reduce(self, gradient: Tensor) -> Tensor:
        """d_p - S' d_o: the gradient in the partial variables (B, n - m) from the one in y; the transpose of `lift`."""
        rows = self.spread.shape[1]
        free, tied = gradient[:, self.order].split([gradient.shape[1] - rows, rows], 1)
        return free - (tied.unsqueeze(1) @ self.spread).squeeze(1)


class NewtonCompletion(nn.Module):
    """Which variables are partial, and how the others follow from them; predictions are relative to a typical point.

    Args:
        constraints: the set.
        around: where it is linearised to choose the partial variables, and where Newton's method starts.
        partial: "pivoted" or "random", see `Completion`; or the partial variables themselves, (n - m,).
        seed: of the random choice.

    Attributes:
        rows: m, how many equalities there are.
        size: the n of y.
        order: (n,) the partial variables, then the others.
        equal: (all rows,) true for the equalities.
        start: (n,) the typical point.
    """

    order: Tensor
    equal: Tensor
    start: Tensor

    def __init__(
        self, constraints: Constraints, around: Around, partial: Partial | Tensor = "pivoted", seed: int = 0
    ) -> None:
        super().__init__()
        y, x = around.y.double().unsqueeze(0), around.x.double().unsqueeze(0)
        with torch.no_grad():
            instance = constraints.at(y, x)
            equal = (instance.lower == instance.upper)[0]
            C = _whole(instance.map.jacobian(y), 1)[0, equal].cpu()
        self.rows, self.size = len(C), y.shape[1]
        if isinstance(partial, Tensor):
            order = self._given(partial.cpu())
        else:
            order = pivoted_order(C) if partial == "pivoted" else random_order(C, seed)
        for name, tensor in {"order": order.to(y.device), "equal": equal, "start": y[0].detach().clone()}.items():
            self.register_buffer(name, tensor)

    def _given(self, partial: Tensor) -> Tensor:
        chosen = torch.zeros(self.size, dtype=torch.bool).index_fill(0, partial, True)
        if int(chosen.sum()) != len(partial) or len(partial) != self.size - self.rows:
            asked = f"{self.size - self.rows} variables, as {self.rows} equalities leave them"
            raise ValueError(f"`partial` must name {asked}, but names {int(chosen.sum())}")
        return torch.cat([partial, (~chosen).nonzero().squeeze(1)])

    @staticmethod
    def applies(constraints: Constraints, around: Around) -> bool:
        """Are there equalities that constant matrices do not give?"""
        instance = constraints.at(around.y.double().unsqueeze(0), around.x.double().unsqueeze(0))
        pieces = (instance.lower == instance.upper)[0].split([part.rows for part in instance.map.parts])
        parts = zip(constraints.parts, instance.map.parts, pieces, strict=True)
        return any(bool(piece.any()) for part, map, piece in parts if not (isinstance(part, Linear) and map.constant))

    def count(self, size: int) -> int:
        """How many of `size` variables are partial."""
        if size != self.size:
            raise ValueError(f"`size` must be {self.size}, as the typical point has it, but got {size}")
        return size - self.rows

    def begin(self, partial: Tensor, instance: Instance) -> Tensor:
        """y (B, n) whose partial variables are so far (B, n - m) from those of the typical point."""
        count = self.size - self.rows
        near = self.start.expand(len(partial), -1)[:, self.order]
        return self._complete(near[:, :count] + partial, near[:, count:], instance)

    def remaining(self, instance: Instance) -> Instance:
        """The rows that steps are taken for: all, as those completed have no gradient along the tangent."""
        return instance

    @torch.no_grad()
    def tangent(self, y: Tensor, instance: Instance) -> Tangent:
        """At y."""
        J = self._jacobian(y, instance)
        count = self.size - self.rows
        return Tangent(torch.linalg.solve_ex(J[..., count:], J[..., :count])[0], self.order)

    def move(self, y: Tensor, velocity: Tensor, tangent: Tangent, instance: Instance) -> Tensor:
        """y after its partial variables have moved by -velocity."""
        count = self.size - self.rows
        moved = (y - tangent.lift(velocity))[:, self.order]
        return self._complete(moved[:, :count], moved[:, count:], instance)

    def _complete(self, partial: Tensor, others: Tensor, instance: Instance) -> Tensor:
        place = self.order.argsort()
        count = self.size - self.rows
        fixed, others = partial.detach(), others.detach()
        with torch.no_grad():
            for _ in range(_STEPS):
                y = torch.cat([fixed, others], 1)[:, place]
                h = self._left(y, instance)
                if not bool((h.abs() > _TOL).any()):
                    break
                step = self._solved(y, instance, h, count)
                longest = step.abs().amax(1, keepdim=True).nan_to_num(torch.inf)
                step = step * (_LONGEST / longest.clamp(min=_LONGEST))
                others = others - step.nan_to_num(0.0, 0.0, 0.0)
            y = torch.cat([fixed, others], 1)[:, place]
        if torch.is_grad_enabled():
            h = self._left(torch.cat([partial, others], 1)[:, place], instance)
            others = others - self._solved(y, instance, h, count)
        return torch.cat([partial, others], 1)[:, place]

    def _solved(self, y: Tensor, instance: Instance, h: Tensor, count: int) -> Tensor:
        with torch.no_grad():
            J = self._jacobian(y, instance)[..., count:]
            inverse = torch.linalg.inv_ex(J)[0]
        return (inverse @ h.unsqueeze(2)).squeeze(2)

    def _left(self, y: Tensor, instance: Instance) -> Tensor:
        """(B, m) h."""
        return instance.map.value(y)[:, self.equal] - instance.lower[:, self.equal]

    def _jacobian(self, y: Tensor, instance: Instance) -> Tensor:
        """(B, m, n) of h, its columns in `order`."""
        return _whole(instance.map.jacobian(y), len(y))[:, self.equal][:, :, self.order]

    def extra_repr(self) -> str:
        return f"rows={self.rows}, size={self.size}"


def _whole(J: Tensor, batch: int) -> Tensor:
    return J if J.ndim == 3 else J.expand(batch, -1, -1)
