r"""`FSNetLayer`: FSNet's feasibility-seeking steps, minimising the violation from the prediction on by L-BFGS.

$$ \phi(y) = \| \mathrm{relu}(g(y) - u) - \mathrm{relu}(l - g(y)) \|^2, \qquad y \leftarrow y - \alpha d, \quad
   d = H \nabla \phi(y), $$

with H the L-BFGS estimate of `lbfgs.py` (at first 0.1 times the identity) and $\alpha$ the first of 1, 1/2, 1/4, ...
that satisfies Armijo's condition $\phi(y - \alpha d) \le \phi(y) - 10^{-4} \alpha \nabla\phi^\top d$, for each sample
on its own. The gradient is that of the first `unroll` iterations; later ones count as a constant shift.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.constraints.base import Instance, largest, residual
from snarenet.layers.base import Layer, OnFailure
from snarenet.layers.lbfgs import InverseHessian
from snarenet.repair import Options
from snarenet.repair.options import check_count
from snarenet.solution import Solution

_ARMIJO = 1e-4
_FIRST = 0.1  # the first step, in gradients


class FSNetLayer(Layer):
    """Minimises phi, the sum of squared violations, from the prediction on; for any differentiable constraints.

    The phi of a sample never rises. A sample stops when it is feasible, as `stop` says, where the gradient vanishes, or
    when no step length serves; feasibility is not guaranteed. Gradients flow to y, x, the bounds and every tensor
    inside g, through the first `unroll` iterations.

    Args:
        constraints: the set to obey.
        memory: pairs that L-BFGS keeps.
        unroll: iterations that are differentiated.
        halvings: how often a step may be halved.
        stop: the phi below which a sample stops, in training and in eval mode; None stops it when no row is violated by
            more than `tol`.
        gradient_tol: a sample stops when the gradient of phi is shorter.
        tol: largest violation that counts as feasible; a phi of 1e-7 can leave one of 3e-4.
        max_steps: limit on iterations.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".

    Example:
        >>> import torch, snarenet as sn
        >>> disk = sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), upper=1.0)
        >>> y = FSNetLayer(disk, stop=None, tol=1e-9)(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
        >>> round(y.norm().item(), 6)
        1.0
    """

    title = "FSNet"
    recordable = False

    def __init__(
        self,
        constraints: Constraints,
        memory: int = 30,
        unroll: int = 30,
        halvings: int = 10,
        stop: tuple[float, float] | None = (1e-7, 1e-9),
        gradient_tol: float = 1e-6,
        tol: float = 1e-3,
        max_steps: int = 50,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__(constraints, Options(tol=tol, max_steps=max_steps), on_failure)
        for name, value, least in (("memory", memory, 1), ("unroll", unroll, 0), ("halvings", halvings, 0)):
            check_count(name, value, least)
        if stop is not None and (len(stop) != 2 or not min(stop) >= 0):
            raise ValueError(f"`stop` must be None or two numbers >= 0, but got {stop!r}")
        if not gradient_tol >= 0:
            raise ValueError(f"`gradient_tol` must be >= 0, but got {gradient_tol!r}")
        self.memory, self.unroll, self.halvings = memory, unroll, halvings
        self.stop, self.gradient_tol = stop, gradient_tol

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        work, finite, start, instance = self.constraints.prepare(y, x, relax)
        value, steps, stalled = self._descend(instance, start, self.aim(y))
        value = torch.where(finite.unsqueeze(1), value, work)
        return self.judge(instance, value, work, torch.where(finite, steps, 0), y.dtype, stalled)

    def _descend(self, instance: Instance, y: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """L-BFGS from y: (where it leads, the iterations of each sample, who stopped short of the set)."""
        everyone = torch.arange(len(y), device=y.device)
        steps, stalled = torch.zeros_like(everyone), torch.zeros_like(everyone, dtype=torch.bool)
        value = differentiable = y
        hessian = InverseHessian(y.new_full((len(y), 1), _FIRST), self.memory)
        s = _Live(everyone, instance, y, *_measure(instance, y), hessian)
        moved = s.phi.isfinite()
        for k in range(self.max_steps):
            done, flat = self._feasible(s, tol), s.gradient.norm(dim=1) < self.gradient_tol
            stalled[s.samples] = ~done & (flat | ~moved)
            s = s.select((moved & ~done & ~flat).nonzero().squeeze(1))
            if not len(s.samples):
                break
            steps[s.samples] += 1
            with torch.set_grad_enabled(torch.is_grad_enabled() and k < self.unroll):
                s, moved = self._step(s)
                value = value.index_copy(0, s.samples, s.y)
            if k < self.unroll:
                differentiable = value
        return differentiable + (value - differentiable).detach(), steps, stalled

    def _step(self, s: _Live) -> tuple[_Live, Tensor]:
        """The samples after one iteration, and which of them it moved."""
        direction = -s.hessian.times(s.gradient)
        with torch.no_grad():
            length, moved = self._search(s, direction)
        y = s.y + length * direction
        r, phi, gradient = _measure(s.instance, y)
        hessian = s.hessian.updated(y - s.y, gradient - s.gradient)
        return s._replace(y=y, residual=r, phi=phi, gradient=gradient, hessian=hessian), moved

    def _search(self, s: _Live, direction: Tensor) -> tuple[Tensor, Tensor]:
        """(b, 1) step lengths by Armijo's condition, 0 where no length satisfies it, and (b,) where one does."""
        slope = (s.gradient * direction).sum(1)
        length, good = torch.ones_like(slope), torch.zeros_like(slope, dtype=torch.bool)
        for _ in range(self.halvings + 1):
            phi = _violation(s.instance, s.y + length.unsqueeze(1) * direction).square().sum(1)
            good = phi <= s.phi + _ARMIJO * length * slope  # False where phi is NaN
            if bool(good.all()):
                break
            length = torch.where(good, length, length / 2)
        return torch.where(good, length, 0.0).unsqueeze(1), good

    def _feasible(self, s: _Live, tol: float) -> Tensor:
        """(b,) who need not go on."""
        if self.stop is None:
            return largest(s.residual) <= tol
        return s.phi < self.stop[0 if self.training else 1]

    def extra_repr(self) -> str:
        return f"memory={self.memory}, unroll={self.unroll}, tol={self.tol:g}, max_steps={self.max_steps}"


class _Live(NamedTuple):
    """The samples at work and where they stand."""

    samples: Tensor  # their places in the batch
    instance: Instance
    y: Tensor
    residual: Tensor
    phi: Tensor
    gradient: Tensor
    hessian: InverseHessian

    def select(self, keep: Tensor) -> _Live:
        """Some of these samples."""
        if len(keep) == len(self.samples):
            return self
        y, r, phi, gradient = (tensor[keep] for tensor in self[2:6])
        instance, hessian = self.instance.select(keep), self.hessian.select(keep)
        return _Live(self.samples[keep], instance, y, r, phi, gradient, hessian)


def _violation(instance: Instance, y: Tensor) -> Tensor:
    """(b, rows) what y violates."""
    return residual(instance.map.value(y), instance.lower, instance.upper)


def _measure(instance: Instance, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The residual at y, phi and its gradient 2 J'r."""
    r = _violation(instance, y)
    return r, r.square().sum(1), instance.map.vjp(y, 2 * r)
