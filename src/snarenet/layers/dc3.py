r"""`DC3Layer`: completion and gradient correction (Donti, Rolnick and Kolter, 2021).

The network predicts partial variables; the others follow from the equalities (see `completion.py`), by Newton's method
where these are functions (`newton.py`, as the paper does for power flow). The rows that remain are approached by
gradient steps with momentum that never leave the equalities:

$$ F(y) = \| \mathrm{relu}(g(y) - u) - \mathrm{relu}(l - g(y)) \|^2, \qquad
v \leftarrow \gamma\, p + \beta v, \quad p = P^\top \nabla F(y), \qquad y \leftarrow y - P v, \qquad
P = \partial y / \partial y_p. $$

The paper's $\gamma$ is a small constant. `step="auto"` takes $\gamma = \|p\| / \|M p\|$ at every step, with
$M = 2 P^\top J^\top J P$ over the violated rows: 1/L for the curvature L of F along its gradient, which costs one more
product with J and one with its transpose, fits each sample, and follows the rows that are violated at the time.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from snarenet.constraints import Constraints, Instance
from snarenet.constraints.base import largest, residual
from snarenet.layers.base import Layer, OnFailure
from snarenet.layers.completion import Completion, Partial, check_partial
from snarenet.layers.newton import Around, NewtonCompletion, Tangent
from snarenet.repair import Options
from snarenet.repair.options import check_count
from snarenet.solution import Solution
from snarenet.tracing import tracing

_ROUNDING = 1e-9  # a row that a step took to its bound is violated by rounding or not at all: it counts as satisfied


class DC3Layer(Layer):
    """Completes predictions by the equalities and corrects them by a few gradient steps.

    Constant linear equalities hold to rounding, always, and so do others, if `around` is given, where Newton's method
    converges; lengths and directions are then constants to the gradient. All other rows are approached only: nothing
    guarantees that the steps suffice, and `Solution.status` says where they did not. A sample stops when its largest
    violation is at most `tol`. The first `train_steps` steps are unrolled: gradients flow through all of them, lengths
    included, to the predictions, x, the bounds and every tensor inside g. Steps after them, in eval mode only, have no
    gradient.

    Args:
        constraints: the set to obey.
        step: γ, or "auto", the formula above.
        momentum: β, from 0 to below 1.
        train_steps: steps in training and in eval mode.
        test_steps: limit on further steps in eval mode.
        partial: how the partial variables are chosen, "pivoted" or "random"; see `Completion`. With `around`, also the
            variables themselves, (n - m,).
        around: a typical point y (n,) of the set and its input x (d,): all equalities, also those that are functions,
            are completed by Newton's method, and predictions are relative to that point. Else constant linear ones are.
        seed: of the random choice.
        tol: largest violation that counts as feasible.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".

    Example:
        >>> import torch, snarenet as sn
        >>> from snarenet.layers.dc3 import DC3Layer
        >>> layer = DC3Layer(sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 3), equals=1.0))
        >>> layer.predictions(3)
        2
        >>> round(layer(torch.tensor([[0.3, 0.2]])).sum().item(), 6)
        1.0
    """

    title = "DC3"

    def __init__(
        self,
        constraints: Constraints,
        step: float | Literal["auto"] = "auto",
        momentum: float = 0.5,
        train_steps: int = 10,
        test_steps: int = 10,
        partial: Partial | Tensor = "pivoted",
        around: tuple[Tensor, Tensor] | None = None,
        seed: int = 0,
        tol: float = 1e-4,
        on_failure: OnFailure = "warn",
    ) -> None:
        for name, count in {"train_steps": train_steps, "test_steps": test_steps}.items():
            check_count(name, count)
        super().__init__(constraints, Options(tol=tol, max_steps=train_steps + test_steps), on_failure)
        if step != "auto" and not (isinstance(step, float | int) and 0 < step < math.inf):
            raise ValueError(f"`step` must be 'auto' or a number > 0, but got {step!r}")
        if not 0 <= momentum < 1:
            raise ValueError(f"`momentum` must be at least 0 and less than 1, but got {momentum!r}")
        if not 0 <= tol < math.inf:
            raise ValueError(f"`tol` must be a finite number >= 0, but got {tol!r}")
        self.step: float | Literal["auto"] = step
        self.momentum, self.train_steps, self.test_steps = momentum, train_steps, test_steps
        self.completion: Completion | NewtonCompletion
        if around is not None and NewtonCompletion.applies(constraints, Around(*around)):
            self.completion = NewtonCompletion(constraints, Around(*around), partial, seed)
        else:
            self.completion = Completion(constraints, partial, seed)  # pyright: ignore[reportArgumentType]: it says so

    def predictions(self, size: int) -> int:
        return self.completion.count(size)

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        work = check_partial(y, self.completion.size, self.completion.rows).to(torch.float64)
        finite = work.isfinite().all(1, keepdim=True)
        size = work.shape[1] + self.completion.rows
        true = self.constraints.at(work.new_zeros(len(work), size), x)
        instance = true.relaxed(relax)  # its equalities are met anyway
        start = self.completion.begin(torch.where(finite, work, 0.0), true)
        rest = self.completion.remaining(instance)
        value, steps = self._correct(true, rest, start, self.train_steps, self.aim(y))
        if not self.training and self.test_steps:
            with torch.no_grad():
                final, more = self._correct(true, rest, value.detach(), self.test_steps, self.aim(y))
            value, steps = value + (final - value.detach()), steps + more
        value, raw = (torch.where(finite, point, torch.nan) for point in (value, start))
        return self.judge(instance, value, raw, steps, y.dtype)

    def _correct(self, true: Instance, rest: Instance, y: Tensor, steps: int, tol: float) -> tuple[Tensor, Tensor]:
        """The point after at most so many steps for the rows that remain, and how many each sample took."""
        taken = torch.zeros(len(y), dtype=torch.long, device=y.device)
        velocity = y.new_zeros(len(y), y.shape[1] - self.completion.rows)
        for _ in range(steps):
            r = residual(rest.map.value(y), rest.lower, rest.upper)
            going = largest(r.detach()) > tol
            if not tracing() and not bool(going.any()):
                break
            tangent: Any = self.completion.tangent(y, true)
            gradient = 2 * tangent.reduce(rest.map.vjp(y, r))
            length = self._length(rest, y, r, gradient, tangent) if self.step == "auto" else self.step
            velocity = torch.where(going.unsqueeze(1), length * gradient + self.momentum * velocity, 0.0)
            y = self.completion.move(y, velocity, tangent, true)
            taken = taken + going
        return y, taken

    def _length(self, rest: Instance, y: Tensor, r: Tensor, gradient: Tensor, tangent: Completion | Tangent) -> Tensor:
        """(B, 1) |p| / |M p| for the gradient p, zero where that is zero."""
        J_p = rest.map.jvp(y, tangent.lift(gradient))
        violated = r.abs() > _ROUNDING * largest(r).unsqueeze(1)
        bent = 2 * tangent.reduce(rest.map.vjp(y, violated * J_p))
        curvature = bent.norm(dim=1, keepdim=True)
        curved = curvature > 0
        return torch.where(curved, gradient.norm(dim=1, keepdim=True), 0.0) / torch.where(curved, curvature, 1.0)

    def extra_repr(self) -> str:
        steps = f"train_steps={self.train_steps}, test_steps={self.test_steps}"
        return f"step={self.step!r}, momentum={self.momentum}, {steps}, tol={self.tol:g}"
