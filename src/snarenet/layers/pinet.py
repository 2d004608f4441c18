r"""`PiNetLayer`: the nearest point of a polyhedron, by Douglas-Rachford splitting (Pi-net).

The method lifts $z = A y$ and alternates between an affine set and boxes. With $v = (y, z)$,

$$ \min_v \|y - \hat y\|^2 \quad \text{s.t.} \quad v \in \{A y = z,\; C y = b\}, \quad v \in \{l \le z \le u,\;
\text{box of } y\}, $$
$$ v_k = \Pi_{\text{affine}}(s_k), \quad t_k = \mathrm{prox}_{\text{box}}(2 v_k - s_k), \quad
s_{k+1} = s_k + \omega (t_k - v_k). $$

The affine projection is one constant matrix. $t_k$ obeys every bound, so $|t_k - v_k|$ bounds the violation of $v_k$,
and is zero only at the solution: a sample stops on it. The gradient is that of the projection itself. With the rows N
active at the solution (equalities, and bounds whose box was hit by $2 v_k - s_k$),

$$ dy = (I - N^+ N)\, d\hat y + N^+\, d(\text{active bounds}). $$
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.constraints.base import Instance, largest
from snarenet.constraints.linear import Box, Linear
from snarenet.constraints.maps import IdentityMap, LinearMap
from snarenet.layers.base import Layer, OnFailure
from snarenet.linalg import Dual, EliminatedBox
from snarenet.repair import Options
from snarenet.solution import Solution

_MARGIN = 0.9  # of the tolerance ends the splitting; the rest is for the rounding of the violation that is reported
_SHIFT = 1e-12  # keeps the system of the active rows regular where they depend on each other; rows have unit length


class PiNetLayer(Layer):
    """The orthogonal projection onto linear constraints with constant matrices, and its exact gradient.

    Equalities hold to rounding after every step; bounds to the tolerance, where the status says so. Gradients flow to
    predictions, bounds and whatever made them, not to matrices.

    Args:
        constraints: `Linear` sets with constant matrices, `Box` sets, or a stack of them.
        omega: relaxation of the splitting, in (0, 2).
        sigma: weight of the distance to the prediction in a step, > 0; changes the speed, not the solution.
        tol: largest violation that counts as feasible.
        max_steps: limit on steps.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".

    Example:
        >>> import torch, snarenet as sn
        >>> from snarenet.layers.pinet import PiNetLayer
        >>> simplex = sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 3), equals=1.0)
        >>> y = PiNetLayer(simplex)(torch.tensor([[1.0, 0.5, -3.0]], dtype=torch.float64))
        >>> [round(abs(entry), 6) for entry in y[0].tolist()]
        [0.75, 0.25, 0.0]
    """

    title = "Pi-net"
    recordable = False

    def __init__(
        self,
        constraints: Constraints,
        omega: float = 1.65,
        sigma: float = 0.28,
        tol: float = 1e-8,
        max_steps: int = 5000,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__(constraints, Options(tol=tol, max_steps=max_steps), on_failure)
        if not 0 < omega < 2:
            raise ValueError(f"`omega` must be between 0 and 2, but got {omega!r}")
        if not 0 < sigma < float("inf"):
            raise ValueError(f"`sigma` must be > 0, but got {sigma!r}")
        for part in constraints.parts:
            if not isinstance(part, (Linear, Box)):
                raise ValueError(f"Pi-net repairs linear constraints only, but got {type(part).__name__}")
            if isinstance(part, Linear) and part.constant_map(torch.float64) is None:
                raise ValueError("Pi-net needs a constant matrix, but `A` is learned, per sample or a function of x")
        self.omega, self.sigma = omega, sigma

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        work = self.constraints.check(y).to(torch.float64)
        instance = self.constraints.at(work, x).relaxed(relax)
        lifted = self.constraints.memo.get(
            ("pinet", instance.equal, y.shape[1]),
            tuple(self.constraints.buffers()),
            lambda: _Lifted(instance, work),
        )
        splitting = _Splitting(lifted, self.omega, self.sigma, self.aim(y), self.max_steps)
        value, steps = _Project.apply(splitting, work, instance.lower, instance.upper)  # pyright: ignore
        return self.judge(instance, value, y, steps, y.dtype)

    def extra_repr(self) -> str:
        return f"omega={self.omega:g}, sigma={self.sigma:g}, tol={self.tol:g}, max_steps={self.max_steps}"


class _Lifted:
    """The polyhedron of an instance, for points v = (y, z), and all that its constant rows allow to compute once.

    Rows are of three kinds: those of one box, which bound y itself; declared equalities, which belong to the affine
    set; and all others, which bound z. Each row of a matrix is scaled to unit length, which is where Ruiz
    equilibration of the rows ends.
    """

    def __init__(self, instance: Instance, y: Tensor) -> None:
        parts = instance.map.parts
        numbers = torch.arange(instance.map.rows, device=y.device).split([part.rows for part in parts])
        boxes = [i for i, part in enumerate(parts) if isinstance(part, IdentityMap)][:1]
        kinds: list[list[Tensor]] = [[], [], []]
        for i, (rows, equal) in enumerate(zip(numbers, instance.equal, strict=True)):
            kinds[0 if i in boxes else 1 if equal else 2].append(rows)
        none = numbers[0][:0]
        self.box, self.equal, self.rest = (torch.cat([none, *kind]) for kind in kinds)
        J = instance.map.jacobian(y)
        lengths = J.norm(dim=1)
        self.scale = torch.where(lengths > 0, 1 / lengths, 1.0)
        unit = J * self.scale.unsqueeze(1)
        self.A, C = unit[self.rest], unit[self.equal]
        self.active = LinearMap(torch.cat([C, self.A]))
        eye = torch.eye(len(self.A), dtype=J.dtype, device=J.device)
        # the affine set is M v = (0, b); a pseudo-inverse, for equalities may depend on each other
        M = torch.cat([torch.cat([self.A, -eye], 1), torch.cat([C, C.new_zeros(len(C), len(eye))], 1)])
        inverse = torch.linalg.pinv(M)
        self.projector = torch.eye(M.shape[1], dtype=J.dtype, device=J.device) - inverse @ M
        self.shift = inverse[:, len(eye) :].T

    def lift(self, y: Tensor) -> Tensor:
        """(y, A y)."""
        return torch.cat([y, y @ self.A.T], 1)

    def bounds(self, bound: Tensor, y: Tensor, default: float) -> Tensor:
        """A bound of all rows (B, rows) as one of v; `default` where there is no box."""
        of_y = bound[:, self.box] if len(self.box) else torch.full_like(y, default)
        return torch.cat([of_y, (bound * self.scale)[:, self.rest]], 1)

    def unscaled(self, v: Tensor, n: int) -> Tensor:
        """A difference of points v, in the units of the rows."""
        return torch.cat([v[:, :n], v[:, n:] / self.scale[self.rest]], 1)


class _Splitting(NamedTuple):
    """What one call of the layer asks for."""

    lifted: _Lifted
    omega: float
    sigma: float
    tol: float
    max_steps: int


class _Point(NamedTuple):
    """Where the splitting ended: y, steps, and for y and z which bounds were hit, -1 lower, 1 upper, 0 none."""

    y: Tensor
    steps: Tensor
    hit: Tensor


def _iterate(splitting: _Splitting, y: Tensor, lower: Tensor, upper: Tensor) -> _Point:
    """The splitting; a sample leaves the batch as soon as it has converged, and one that is not a number at once."""
    lifted, n = splitting.lifted, y.shape[1]
    pull = 2 * splitting.sigma * y
    low, high = lifted.bounds(lower, y, -torch.inf), lifted.bounds(upper, y, torch.inf)
    offset = (upper * lifted.scale)[:, lifted.equal] @ lifted.shift
    s = lifted.lift(y)
    end = _Point(y.clone(), torch.zeros(len(y), dtype=torch.int64, device=y.device), torch.zeros_like(s))
    live = y.isfinite().all(1).nonzero().squeeze(1)
    s, pull, low, high, offset = (tensor[live] for tensor in (s, pull, low, high, offset))
    for step in range(splitting.max_steps + 1):
        v = s @ lifted.projector + offset
        p = 2 * v - s
        p = torch.cat([(p[:, :n] + pull) / (1 + 2 * splitting.sigma), p[:, n:]], 1)
        t = p.clamp(low, high)
        done = largest(lifted.unscaled(t - v, n)) <= _MARGIN * splitting.tol
        if step == splitting.max_steps:
            done = torch.ones_like(done)
        if bool(done.any()):
            gone = live[done]
            end.y[gone], end.steps[gone] = v[done, :n], step
            # a pair of equal bounds is always hit, on whichever side
            end.hit[gone] = torch.where(low == high, torch.where(p < low, -1.0, 1.0), (p - t).sign())[done]
            live, s, pull, low, high, offset, t, v = (
                tensor[~done] for tensor in (live, s, pull, low, high, offset, t, v)
            )
        if not len(live):
            break
        s = s + splitting.omega * (t - v)
    return end


class _Project(torch.autograd.Function):
    """The projection, with the derivative of the projection onto the active rows."""

    @staticmethod
    def forward(ctx: Any, splitting: _Splitting, y: Tensor, lower: Tensor, upper: Tensor) -> Any:
        end = _iterate(splitting, y, lower, upper)
        ctx.lifted, ctx.rows = splitting.lifted, lower.shape[1]
        ctx.save_for_backward(end.y, end.hit)
        ctx.mark_non_differentiable(end.steps)
        return end.y, end.steps

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        y, hit = ctx.saved_tensors
        lifted, v, n = ctx.lifted, gradients[0], y.shape[1]
        equal = torch.ones(len(y), len(lifted.equal), dtype=torch.bool, device=y.device)
        active = torch.cat([equal, hit[:, n:] != 0], 1)
        box = EliminatedBox(hit[:, :n].abs(), 0.0) if len(lifted.box) else None
        delta = torch.full_like(active, _SHIFT, dtype=y.dtype)
        p, to_prediction, to_box = Dual(lifted.active.linearize(y), active, delta, _SHIFT, box).adjoint(v)
        to_rows = v.new_zeros(len(y), ctx.rows)
        to_rows[:, torch.cat([lifted.equal, lifted.rest])] = p
        below = torch.zeros_like(to_rows)
        below[:, lifted.rest] = (hit[:, n:] < 0).to(y.dtype)
        to_rows = to_rows * lifted.scale
        if to_box is not None:
            to_rows[:, lifted.box], below[:, lifted.box] = to_box, (hit[:, :n] < 0).to(y.dtype)
        return None, to_prediction, to_rows * below, to_rows * (1 - below)
