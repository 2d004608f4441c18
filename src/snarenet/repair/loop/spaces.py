r"""Where the repair iterates, and the exact adjoint of its steps.

A *space* holds the constraints of one batch and knows how to take a step and how to pull a cotangent back through it.

- `ConstraintSpace`: all rows linear and constant. Iterates on z = A y with one cached spectrum,
  $z \leftarrow z - r T_k$, and recovers y at the end: no matrix per sample.
- `OutputSpace`: everything else. Iterates on y with one linear system per sample and step.

The adjoint of $y^+ = y - J^\top w$, $(J J^\top + \lambda D) w = r$: with $v$ the cotangent of $y^+$,
$p = (J J^\top + \lambda D)^{-1} J v$, $e = v - J^\top p$ and $d = J^\top w$, all held fixed in

$$ \psi(y, \cdot) = \langle w, \partial g\, e \rangle - \langle p, \partial g\, d \rangle + \langle p, r \rangle, $$

the cotangent of y is $v - \nabla_y \psi$, that of every tensor inside g is $-\nabla \psi$, that of a bound is p on the
rows that break it, and that of the row scale $D_{ii}$ is $\lambda p_i w_i$. docs/mathematics.md derives this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.maps import IdentityMap, Linearization, Map, add, gradients
from snarenet.constraints.sparsity import Pattern
from snarenet.linalg import (
    ConjugateGradients,
    Dual,
    Eliminated,
    EliminatedBox,
    Primal,
    SparseDual,
    SparseFactor,
    Spectrum,
    System,
    Systems,
    column,
    eliminate,
)
from snarenet.repair.foresight import Model, Rows, foresee
from snarenet.repair.loop.steps import Pulled, Step, Trial
from snarenet.repair.stopping import negligible, slack
from snarenet.tracing import tracing


class Space(ABC):
    """The iteration's state and its steps; `position` is what it iterates on, one row per sample."""

    slack: float = 0.0  # how far rounding may move the residual between the last step and y
    traceable: bool = False  # can torch.compile trace its adjoint?
    steady: bool = False  # is every step a contraction, so that slow progress is still progress?
    curved: bool = False  # are there rows other than linear ones and quadratic ones with a diagonal H?
    selects: bool = False  # does a step leave rows out that are inside their bounds?

    @abstractmethod
    def start(self, y: Tensor) -> Tensor:
        """The position of y."""

    @abstractmethod
    def value(self, position: Tensor) -> Tensor:
        """g at a position: (b, rows)."""

    @abstractmethod
    def step(self, position: Tensor, residual: Tensor, violated: Tensor, damping: float | Tensor) -> tuple[Tensor, Any]:
        """The next position and what the step's way back needs."""

    @abstractmethod
    def finish(self, y: Tensor, position: Tensor) -> Tensor:
        """The output that belongs to a position, for the prediction y."""

    @abstractmethod
    def select(self, keep: Tensor) -> Space:
        """The space of some of its samples."""

    @abstractmethod
    def describe(self, position: Tensor, violated: Tensor, damping: float | Tensor) -> tuple[str, str]:
        """Where it iterates, and the linear system of a step from a position, in words."""

    @abstractmethod
    def predict(self, position: Tensor, trial: Tensor, residual: Tensor, saved: Any) -> Tensor:
        """The residual that the linear model foresees after a step, (b, rows)."""

    @abstractmethod
    def scales(self) -> Tensor:
        """(b, rows) or (rows,): the scale of each row, its squared length for a relative damping and 1 otherwise."""

    def size(self, position: Tensor) -> Tensor:
        """(b,) how large the entries of a position are."""
        return position.square().mean(1).sqrt()

    def merit(self, residual: Tensor, saved: Any) -> Tensor:
        """(b,) the sum of squared violations, each row in its own scale; `saved` is of the step that asks."""
        return (residual.square() / self.scales()).sum(1)

    def below(self, residual: Tensor, saved: Any) -> Tensor:
        """(b, rows) true where the step's cotangent belongs to the lower bound."""
        return residual < 0

    def stationary(self, residual: Tensor, damping: float | Tensor, saved: Any) -> Tensor | None:
        """(b,) true where no step can reduce the violation, or None where the space cannot tell."""
        return None

    def flat(self, position: Tensor, residual: Tensor) -> Tensor:
        """(b,) true where the gradient of the scaled violation is nothing beside it: `stationary` made certain.

        A space that has nothing better believes `stationary`.
        """
        return torch.ones(len(residual), dtype=torch.bool, device=residual.device)

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """The tensors inside g that need a gradient."""
        return ()

    def detached(self, leaves: dict[int, Tensor]) -> Space:
        """The same space on tensors without a history; see `constraints.maps.cut`."""
        return self

    @abstractmethod
    def pull_start(self, v: Tensor) -> Tensor:
        """The cotangent of the last position, from that of the output, v (B, n)."""

    @abstractmethod
    def pull_step(self, step: Step, cotangent: Tensor, wanted: tuple[Tensor, ...]) -> Pulled:
        """The step's share of the gradients, from the cotangent of the position after it."""

    @abstractmethod
    def pull_finish(
        self, y: Tensor, v: Tensor, cotangent: Tensor, scale: Tensor | None, wanted: tuple[Tensor, ...]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Gradients in the prediction y and in `wanted`, from the cotangents of the first position and the scales."""


def keep_where(mask: Tensor | None, value: Tensor) -> Tensor:
    """value (b, m) where the mask (b, m) or (b,) is true, else 0; all of it without a mask."""
    if mask is None:
        return value
    return torch.where(mask if mask.ndim == 2 else mask.unsqueeze(1), value, 0.0)


class ConstraintSpace(Space):
    r"""All rows are A y with one A; the position is z = A y.

    Its adjoint works with b, where $A v = A A^\top b$: a step takes $b \leftarrow b - q$, q the violated rows of
    $T_k^\top b$, and the prediction's cotangent is $v - A^\top \sum q$.
    """

    traceable = steady = True

    def __init__(self, spectrum: Spectrum) -> None:
        self.spectrum = spectrum
        self.slack = slack(spectrum.A.dtype)

    def start(self, y: Tensor) -> Tensor:
        return y @ self.spectrum.A.T

    def value(self, position: Tensor) -> Tensor:
        return position

    def step(self, position: Tensor, residual: Tensor, violated: Tensor, damping: float | Tensor) -> tuple[Tensor, Any]:
        return position - self.spectrum.transfer(residual, damping), None

    def finish(self, y: Tensor, position: Tensor) -> Tensor:
        for _ in range(2):  # the second time only refines: it removes what rounding left of the first
            y = y - (self.start(y) - position) @ self.spectrum.pseudo_inverse.T
        return y

    def select(self, keep: Tensor) -> ConstraintSpace:
        return self

    def describe(self, position: Tensor, violated: Tensor, damping: float | Tensor) -> tuple[str, str]:
        rows, rank = len(self.spectrum.A), len(self.spectrum.values)
        return "on z = A y", f"one spectrum for all samples and steps: {rows:,} rows of rank {rank:,}"

    def predict(self, position: Tensor, trial: Tensor, residual: Tensor, saved: Any) -> Tensor:
        return residual - (position - trial)

    def scales(self) -> Tensor:
        return self.spectrum.root.square()

    def pull_start(self, v: Tensor) -> Tensor:
        return v @ self.spectrum.pseudo_inverse

    def pull_step(self, step: Step, cotangent: Tensor, wanted: tuple[Tensor, ...]) -> Pulled:
        q = keep_where(step.used, self.spectrum.transfer(cotangent, step.damping, transpose=True))
        q = keep_where(step.moved, q)
        return Pulled(cotangent - q, q, None, ())

    def pull_finish(
        self, y: Tensor, v: Tensor, cotangent: Tensor, scale: Tensor | None, wanted: tuple[Tensor, ...]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        return v - (self.pull_start(v) - cotangent) @ self.spectrum.A, ()


Factor = Tensor | SparseFactor | None


class Budget:
    """Bytes that may still be spent on keeping factors for the backward pass."""

    def __init__(self, total: float) -> None:
        self.left = total

    def take(self, factor: Factor) -> Factor:
        """`factor` if it fits, else None."""
        if factor is None:
            return None
        # `nbytes` of a tensor cannot be traced
        size = factor.numel() * factor.element_size() if isinstance(factor, Tensor) else factor.nbytes
        if size > self.left:
            return None
        self.left -= size
        return factor


class _Move(NamedTuple):
    """How far a step goes, its multipliers, what it leaves of the residual, as `Saved` has them, and its factor."""

    d: Tensor
    w: Tensor
    left: Tensor
    factor: Factor


class Saved(NamedTuple):
    """A step in output space: where it started, how far it went, its multipliers, and its factor if there was room."""

    y: Tensor
    d: Tensor
    w: Tensor
    left: Tensor  # (b, m) the residual r - J d of the rows in use, as the linear model foresees it
    factor: Factor


@dataclass(eq=False)
class OutputSpace(Space):
    """Any constraints; the position is y. Eliminated rows come first, the others after them.

    Args:
        eliminated: a box or constant rows that are eliminated, or None.
        spectrum: the spectrum of the eliminated rows; None for a box.
        others: the remaining rows.
        scale: (B, m) scale of the remaining rows.
        scale_fn: the scale as a function of (others, y), differentiable; None where it is constant.
        active: use only equalities and violated rows in J.
        krylov: matrix-free solver, or None for Cholesky factors.
        budget: memory for factors that the backward pass reuses.
        sparse: the systems on the pattern of the remaining rows, None for dense ones; what is eliminated is a box, or
            nothing.
        relative: are rows scaled by their lengths?
        units: (n,) those of the variables, of mean square 1, by which they are compared; equal unless given.
    """

    eliminated: Map | None
    spectrum: Spectrum | None
    others: Map
    scale: Tensor
    scale_fn: Callable[[Map, Tensor], Tensor] | None
    active: bool
    krylov: ConjugateGradients | None
    budget: Budget
    sparse: Systems | None = None
    relative: bool = True
    units: Tensor | None = None

    def __post_init__(self) -> None:
        self.first = 0 if self.eliminated is None else self.eliminated.rows  # where the other rows begin
        self.curved, self.selects = not self.others.diagonal_hessian, self.active

    def start(self, y: Tensor) -> Tensor:
        return y

    def value(self, position: Tensor) -> Tensor:
        value = self.others.value(position)
        return value if self.eliminated is None else torch.cat([self.eliminated.value(position), value], 1)

    def finish(self, y: Tensor, position: Tensor) -> Tensor:
        return position

    def size(self, position: Tensor) -> Tensor:
        return super().size(position if self.units is None else position * self.units)

    def select(self, keep: Tensor) -> OutputSpace:
        eliminated = None if self.eliminated is None else self.eliminated.select(keep)
        return replace(self, eliminated=eliminated, others=self.others.select(keep), scale=self.scale[keep])

    def detached(self, leaves: dict[int, Tensor]) -> OutputSpace:
        return replace(self, others=self.others.detached(leaves))

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return self.others.tensors(y)

    def scales(self) -> Tensor:
        if self.eliminated is None:
            return self.scale
        if self.spectrum is not None:
            first = self.spectrum.root.square()
        else:
            box = self.scale.new_ones(1, self.first)
            first = self.eliminated.row_norms(box) if self.relative else box
        return torch.cat([first.expand(self.scale.shape[0], -1), self.scale], 1)

    def system(
        self,
        y: Tensor,
        violated: Tensor,
        damping: float | Tensor,
        factor: Factor = None,
        linear: Linearization | None = None,
    ) -> System:
        """The linear system of a step from y; `linear` are the remaining rows there, if somebody has them."""
        active = violated if self.active else None
        others = None if active is None else active[:, self.first :]
        if self.sparse is not None:
            if isinstance(factor, SparseFactor):
                return SparseDual(factor, damping, None if self.eliminated is None else self._box(y, active, damping))
            linear = self.others.linearize(y) if linear is None else linear
            values, pattern = linear.values, linear.pattern  # in this order: evaluating J may widen the pattern
            assert pattern is not None
            return self._on_pattern(pattern, values, self.scale, y, active, damping)
        assert not isinstance(factor, SparseFactor)
        linear = self.others.linearize(y) if linear is None else linear
        if self.eliminated is None and self.others.rows > y.shape[1] and self.krylov is None:
            return Primal(linear, others, self.scale, damping, factor)
        eliminated: Eliminated | None = None
        if self.spectrum is not None:
            eliminated = eliminate(self.spectrum, damping)
        elif self.eliminated is not None:
            eliminated = self._box(y, active, damping)
        return Dual(linear, others, self.scale * column(damping), damping, eliminated, factor, self.krylov)

    def _on_pattern(
        self,
        pattern: Pattern,
        values: Tensor,
        scale: Tensor,
        y: Tensor,
        active: Tensor | None,
        damping: float | Tensor,
    ) -> SparseDual:
        """The system of some samples on the pattern of the remaining rows."""
        assert self.sparse is not None
        box = None if self.eliminated is None else self._box(y, active, damping)
        weights, others = None if box is None else box.weights, None if active is None else active[:, self.first :]
        factor = self.sparse(pattern).factor(values, scale * column(damping), weights, others)
        return SparseDual(factor, damping, box)

    def describe(self, position: Tensor, violated: Tensor, damping: float | Tensor) -> tuple[str, str]:
        box = self.eliminated is not None and self.spectrum is None
        what = "" if self.eliminated is None else "; the box" if box else f"; {self.first:,} constant rows"
        words = self.system(position, violated, damping).describe()
        return f"on y{what}{what and ' eliminated'}", words

    def _box(self, y: Tensor, active: Tensor | None, damping: float | Tensor) -> EliminatedBox:
        assert self.eliminated is not None
        (box,) = self.eliminated.parts
        assert isinstance(box, IdentityMap)
        used = torch.ones_like(y) if active is None else active[:, : self.first].to(y)
        return EliminatedBox(used, damping, box.scale, self.relative)

    def step(self, position: Tensor, residual: Tensor, violated: Tensor, damping: float | Tensor) -> tuple[Tensor, Any]:
        move = self._move(self.system(position, violated, damping), residual)
        return position - move.d, self._saved(position, move)

    def step_ahead(
        self, position: Tensor, rows: Rows, damping: Tensor, value: Tensor, lower: Tensor, upper: Tensor
    ) -> Trial:
        """A step that was looked at before it is taken, see `foresight.py`; `value` is g at the position."""
        linear = self.others.linearize(position)
        move = self._move(self.system(position, rows.used, damping, linear=linear), rows.residual)
        change, left = linear.jvp(move.d), move.left
        if self.eliminated is not None:
            first = self.eliminated.jvp(position, move.d)
            change, left = (
                torch.cat([first, change], 1),
                torch.cat([rows.residual[:, : self.first] - first, left], 1),
            )
        model = Model(value, change, left, move.d.norm(dim=1, keepdim=True), self.scales())
        rows, again = foresee(rows, model, lower, upper)
        if tracing() or bool(again.any()):
            move = self._moved_again(move, linear, rows, damping, again)
        return Trial(position - move.d, rows, self._saved(position, move))

    def _moved_again(self, move: _Move, linear: Linearization, rows: Rows, damping: Tensor, again: Tensor) -> _Move:
        """The same with another move of those that shall move `again`, (b,): by other rows, and the same J."""
        if self.sparse is None or tracing():  # the others have the same rows as before, so they move as before
            return self._move(self.system(linear.y, rows.used, damping, linear=linear), rows.residual)
        some, values, pattern = again.nonzero().squeeze(1), linear.values, linear.pattern
        assert pattern is not None
        used, scale = rows.used[some], self.scale[some]
        system = self._on_pattern(pattern, values[some], scale, linear.y[some], used, damping[some])
        new = self._move(system, rows.residual[some])
        d, w, left = (old.index_copy(0, some, part) for old, part in zip(move[:3], new[:3], strict=True))
        assert isinstance(move.factor, SparseFactor)
        return _Move(d, w, left, move.factor.replaced(some, system.factor))

    def _move(self, system: System, residual: Tensor) -> _Move:
        d, w = system.step(residual[:, self.first :], residual[:, : self.first])
        return _Move(d, w, system.left(w), system.factor)

    def _saved(self, position: Tensor, move: _Move) -> Saved:
        return Saved(position, *move[:3], self.budget.take(move.factor))

    def predict(self, position: Tensor, trial: Tensor, residual: Tensor, saved: Saved) -> Tensor:
        if self.eliminated is None:
            return saved.left
        return torch.cat([residual[:, : self.first] - self.eliminated.jvp(position, saved.d), saved.left], 1)

    def stationary(self, residual: Tensor, damping: float | Tensor, saved: Saved) -> Tensor:
        r"""Is the gradient $\tilde J^\top \tilde r = (\tilde J^\top \tilde J + \lambda) d$ nothing beside $\tilde r$?

        The scaled rows have about unit length, so the norm of their Gram matrix is at most their number.
        """
        size = (residual.square() / self.scales()).sum(1).sqrt()
        bound = saved.d.norm(dim=1) * (residual.shape[1] + damping)
        return bound <= negligible(size.dtype) * size

    def flat(self, position: Tensor, residual: Tensor) -> Tensor:
        """The same by the gradient itself: far from the prediction scaled rows may be longer than they were there."""
        weights = residual / self.scales()
        gradient = self.others.linearize(position).vjp(weights[:, self.first :])
        if self.eliminated is not None:
            gradient = gradient + self.eliminated.vjp(position, weights[:, : self.first])
        size = (residual * weights).sum(1).sqrt()
        return (gradient.norm(dim=1) <= negligible(size.dtype) * size) & size.isfinite()

    def pull_start(self, v: Tensor) -> Tensor:
        return v

    def pull_step(self, step: Step, cotangent: Tensor, wanted: tuple[Tensor, ...]) -> Pulled:
        y, d, w, _, factor = step.saved
        system = self.system(y, step.used, step.damping, factor)
        p, e, p_eliminated = system.adjoint(cotangent)
        p, w = keep_where(step.moved, p), keep_where(step.moved, w)
        q = keep_where(step.used[:, self.first :], p)
        change, *found = self.others.pullback(y, [(-w, e), (p, d)], -q, wanted)  # of minus psi
        if self.eliminated is not None and p_eliminated is not None:
            first = keep_where(step.moved, keep_where(step.used[:, : self.first], p_eliminated))
            change = add(change, -self.eliminated.vjp(y, first))
            q = torch.cat([first, q], 1)
        before = cotangent if change is None else cotangent + change
        scale = None if self.scale_fn is None else system.weight * p * w
        return Pulled(before, q, scale, found)

    def pull_finish(
        self, y: Tensor, v: Tensor, cotangent: Tensor, scale: Tensor | None, wanted: tuple[Tensor, ...]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        if scale is None or self.scale_fn is None:
            return cotangent, [None] * len(wanted)
        change, *found = pull_scale(self.others, y, scale, self.scale_fn, wanted)
        return cotangent if change is None else cotangent + change, found


def pull_scale(
    map: Map, y: Tensor, weights: Tensor, scale_fn: Callable[[Map, Tensor], Tensor], wanted: tuple[Tensor, ...]
) -> Sequence[Tensor | None]:
    """The gradient of <weights, scale_fn(map, y)> in y and in `wanted`."""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        at, used = y, weights.any(1)
        if not tracing() and not bool(used.all()):  # one that took no step may have rows that overflow
            index = used.nonzero().squeeze(1)
            map, at, weights = map.select(index), y[index], weights[index]
        weighted = (weights * scale_fn(map if wanted else map.of_y_alone(), at)).sum()
    return gradients(weighted, (y, *wanted))
