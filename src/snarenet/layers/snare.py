"""`SnareLayer`: the repair as a layer behind a network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from snarenet.constraints import Constraints
from snarenet.constraints.data import check_objective, select_inputs
from snarenet.damping import Damping, as_damping
from snarenet.layers.base import Layer, OnFailure
from snarenet.layers.steady import steady
from snarenet.optimum import polish
from snarenet.optimum.polishing import FAR, NEAR, Descents
from snarenet.repair import Explanation, Options, Rescue, Rows, Solver, Start, Store, explain_with, prepare, repair_with
from snarenet.repair.conflict import remember
from snarenet.repair.gpu.graphs import Recorder
from snarenet.repair.options import as_start, as_step, as_weights, check_count, check_metric, check_weights
from snarenet.solution import Solution
from snarenet.tracing import tracing


class SnareLayer(Layer):
    """Takes predictions to the feasible set, differentiably, by Levenberg-Marquardt steps.

    In training mode the gradient of a sample is shortened where the repair makes it more than three times longer, as
    happens to a few far from curved rows, which would drown all others (see `steady.py`). `layer.limits_gradients =
    False` leaves it as it is; in eval mode it is exact in any case.

    Args:
        constraints: the set to obey.
        damping: "auto" for what suits the start; a number means `Constant`, as in the paper.
        rows: "auto", "all" (the paper) or "active"; see `repair`.
        tol: largest violation that counts as feasible.
        max_steps: limit on steps.
        rescue: repair samples that did not converge again, in other ways, before they count as failed; see `repair`.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".
        dtype: precision of the repair, float64 unless given; that of outputs is that of y, but at least float32.
        solver: "auto", or `ConjugateGradients()` for problems too large for a Jacobian.
        store_factors: keep factors for the backward pass; see `repair`.
        start: where steps begin: "auto" or `Nearest(...)`, at the nearest point of the set where it can be found, or
            None, at the prediction, as in the paper; see `repair`.
        restarts: for sets with several pieces: begin so often elsewhere, where a sample is still outside; see `repair`.
        weights: (n,) how dear it is to move each variable, in every step and for the start; see `repair`.
        scale: (n,) a typical size of each variable; the same as weights = 1 / scale**2.
        objective: f(y, x) of a batch, (B,), differentiable: what is repaired is y - W^-1 grad f(y), a step down f,
            instead of y. Where the nearest point is sought and f has no second derivatives but the weights W, that is
            the least point of f in the set, whatever is predicted; where f has at most twice these, and the set is
            convex, it is nearer to it than y. Of several nears of a set that is not convex, the one is searched that
            the repair of y leads to. A prediction at which f has no gradient is taken as it is. In eval mode, where no
            gradient is asked for, samples that only the rescue brings to the set, anywhere, are then led to points at
            which f is lower (`optimum.polish`); with `layer.polishes = "all"` every sample is, with "none" nobody.
        step: factor of the step down f, at most 2 over the largest ratio of second derivatives to weights; None for no
            step.
        typical: (n,) a point in or near the set for a typical x: in eval mode, samples that nothing else brings to the
            set are repaired from there, with all of the rescue.
        record: on a GPU, record a repair with this many steps into a CUDA graph, one for each shape of a batch, and
            replay it: several times faster where kernels are small. Samples that need more steps are repaired again
            without it, as is every batch under constraints with tensors that need a gradient. One call must be
            differentiated before the next. The search for the nearest point of curved rows cannot be recorded:
            there "auto" begins at the prediction. What is recorded is neither polished nor begun again at `typical`.
            0 for none.
        nearest: deprecated, the iterations of `start=Nearest(nearest)`.

    Example:
        >>> import torch, snarenet as sn
        >>> layer = sn.SnareLayer(sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 3), equals=1.0))
        >>> y = layer(torch.tensor([[2.0, 1.0, -3.0]], dtype=torch.float64))
        >>> bool((y >= -1e-8).all()), round(y.sum().item(), 6)
        (True, 1.0)
    """

    title = "SnareNet"
    limits_gradients = True  # in training mode
    polishes = "rescued"

    def __init__(
        self,
        constraints: Constraints,
        damping: float | Damping | Literal["auto"] = "auto",
        rows: Rows = "auto",
        tol: float = 1e-8,
        max_steps: int = 100,
        rescue: Rescue = True,
        on_failure: OnFailure = "warn",
        dtype: torch.dtype | None = None,
        *,
        solver: Solver = "auto",
        store_factors: Store = "auto",
        start: Start = "auto",
        restarts: int = 0,
        weights: Tensor | None = None,
        scale: Tensor | None = None,
        objective: Callable[[Tensor, Any], Tensor] | None = None,
        step: float | Tensor | None = 1.0,
        typical: Tensor | None = None,
        record: int = 0,
        nearest: int | None = None,
    ) -> None:
        options = Options(
            as_damping(damping), rows, tol, max_steps, rescue, as_start(start, nearest), restarts, solver,
            store_factors, dtype or torch.float64,
        )  # fmt: skip
        super().__init__(constraints, options, on_failure)
        check_count("record", record)
        weights = as_weights(weights, scale, constraints.memo)
        check_weights(weights, constraints.size, numbers=True)
        self.record, self.objective = record, objective
        self.weights: Tensor | None
        self.step: Tensor | None
        if typical is not None:
            check_metric("typical", typical, constraints.size)
        self.typical: Tensor | None
        self.register_buffer("weights", weights)
        self.register_buffer("typical", typical, persistent=False)
        self.register_buffer("step", None if objective is None or step is None else as_step(step))
        self._recorder = Recorder()
        self.register_load_state_dict_post_hook(_prepare_again)
        self.prepare()

    def prepare(self) -> None:
        """Compute what constant constraints allow to compute once; called whenever they are built, moved or loaded."""
        prepare(self.options, self.constraints, self.weights)
        self.descends = self.step is not None and bool(self.step)
        self._recorder = Recorder()  # what was recorded knows the old tensors

    def _apply(self, fn: Any, recurse: bool = True) -> SnareLayer:
        super()._apply(fn, recurse)
        owner, own = getattr(self.objective, "__self__", None), self.weights if self.step is None else self.step
        if own is not None and isinstance(owner, nn.Module):  # a problem's, which has tensors of its own
            owner.to(own.device)
        self.prepare()
        return self

    def solve(self, y: Tensor, x: Any = None, relax: float | Tensor | None = None) -> Solution:
        if self.record and self._can_record(y, x, relax):
            inner, finish = self._steady(y)
            solution = self._replay(inner, x)
            if solution is not None:
                solution = finish(solution)
                self._report(remember(solution, self.constraints, x, 0.0, self.options))
                return solution
        return super().solve(y, x, relax)

    @property
    def metric(self) -> Tensor | None:
        return self.weights

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        inner, finish = self._steady(y)
        first, valley = self.descend(inner, x), inner if self.descends else None

        def reach(options: Options, known: Solution | None = None) -> Solution:
            found = repair_with(options, self.constraints, first, x, relax, self.weights, known, near=valley)
            return finish(found._replace(raw=y))

        if self.training or tracing() or self.options.rescue is not True:
            return reach(self.options)
        if self.objective is None or self.polishes == "none" or torch.is_grad_enabled():
            return self._from_typical(reach(self.options), x)  # what is differentiated is what the repair made
        found = reach(replace(self.options, rescue=False, restarts=0))
        near = found.converged
        if not bool(near.all()):
            found = self._from_typical(reach(self.options, found), x)
            found = self._polished(found, found.converged & ~near, x, FAR)
        return self._polished(found, near, x, NEAR) if self.polishes == "all" else found

    def _from_typical(self, found: Solution, x: Any) -> Solution:
        """The same with samples that nothing brought to the set repaired from a typical point of it."""
        samples = (~found.converged & found.raw.isfinite().all(1)).nonzero().squeeze(1)
        if self.typical is None or not len(samples) or not self._divides(found, x, samples):
            return found
        start = self.typical.to(found.value).expand(len(samples), -1)
        again = repair_with(self.options, self.constraints, start, select_inputs(x, samples), 0.0, self.weights)
        reached = again.converged.nonzero().squeeze(1)
        steps = again.steps + found.steps[samples]
        again = again._replace(raw=found.raw[samples], steps=steps)
        return _put(found, samples[reached], Solution(*(tensor[reached] for tensor in again)))

    def _polished(self, found: Solution, which: Tensor, x: Any, descents: Descents) -> Solution:
        """The same with better points for samples (B,) of the set; see `polish`."""
        samples = which.nonzero().squeeze(1)
        if not len(samples) or not self._divides(found, x, samples):
            return found
        assert self.objective is not None
        x, some = select_inputs(x, samples), Solution(*(tensor[samples] for tensor in found))
        value, tol = some.value.double(), self.aim(some.raw)
        value = polish(self.objective, self.constraints, value, x, tol=tol, descents=descents)
        return _put(
            found, samples, self.judge(self.constraints.at(value, x), value, some.raw, some.steps, some.raw.dtype)
        )

    def _divides(self, found: Solution, x: Any, samples: Tensor) -> bool:
        """Can the set be had for some of the samples alone? Not if it holds tensors with an entry for each of them."""
        try:
            self.constraints.at(found.value[samples], select_inputs(x, samples))
        except ValueError:
            return False
        return True

    def _steady(self, y: Tensor) -> tuple[Tensor, Callable[[Solution], Solution]]:
        """`steady`, if gradients are to be limited; a compiled call has no hooks."""
        asked = self.training and self.limits_gradients and not torch.compiler.is_compiling()
        if asked and isinstance(y, Tensor) and y.ndim == 2 and y.requires_grad and torch.is_grad_enabled():
            return steady(y, self.weights)
        return y, lambda solution: solution

    def descend(self, y: Tensor, x: Any) -> Tensor:
        """(B, n) the points that are repaired: the predictions, or a step down the objective from there."""
        if not self.descends or not isinstance(y, Tensor) or y.ndim != 2 or not y.numel():
            return y
        assert self.objective is not None
        assert self.step is not None
        slope, value = _slope(self.objective, y, x)
        move = self.step * slope if self.weights is None else self.step * slope / self.weights
        known = move.isfinite().all(1) & value.isfinite()
        return y - torch.where(known.unsqueeze(1), move, 0.0).to(y.dtype)

    def explain(self, y: Tensor | None = None, x: Any = None) -> Explanation:
        recorded = self.record > 0 and isinstance(y, Tensor) and y.ndim == 2 and self._can_record(y, x, None)
        found = explain_with(self.options, self.constraints, y, x, weights=self.weights, recorded=recorded)
        if self.descends:
            found = replace(found, start=f"{found.start}; of a step down the objective from the prediction")
        if recorded:
            found = replace(found, engine=f"{found.engine}; recorded with {self.record} steps")
        return found

    def _can_record(self, y: Tensor, x: Any, relax: float | Tensor | None) -> bool:
        exact = relax is None or not self.training or (isinstance(relax, float | int) and relax == 0)
        return (
            isinstance(y, Tensor)
            and y.is_cuda
            and len(y) > 0
            and exact
            and not tracing()
            and self.options.krylov is None
            and not self.options.rule.searches
            and (x is None or all(isinstance(leaf, Tensor) for leaf in tree_leaves(x)))
        )

    def _replay(self, y: Tensor, x: Any) -> Solution | None:
        """The repair with `record` steps, from a recording, and more for samples that need them; None without one."""
        options = replace(self.options, max_steps=self.record, rescue=False)

        def call(y: Tensor, x: Any = None) -> tuple[Tensor, ...]:
            first = self.descend(y, x)
            solution = repair_with(options, self.constraints, first, x, 0.0, self.weights, recorded=True)
            value, _, *rest = solution
            return value, *rest, solution.converged.all()

        found = self._recorder(call, *([y] if x is None else [y, x]), key=options)
        if found is None:
            return None
        solution = Solution(found[0], y, *found[1:-1])
        if bool(found[-1]):
            return solution
        first = self.descend(y, x)
        again = repair_with(self.options, self.constraints, first, x, 0.0, self.weights, solution, recorded=True)
        return again._replace(raw=y)

    def extra_repr(self) -> str:
        asked = self.options
        start = f"start={asked.start!r}, damping={asked.damping!r}"
        return f"{start}, rows={asked.rows!r}, tol={asked.tol:g}, max_steps={asked.max_steps}"


def _put(found: Solution, samples: Tensor, others: Solution) -> Solution:
    """The same with others in the places of these samples (k,)."""
    return Solution(*(old.index_copy(0, samples, new.to(old.dtype)) for old, new in zip(found, others, strict=True)))


def _slope(f: Callable[[Tensor, Any], Tensor], y: Tensor, x: Any) -> tuple[Tensor, Tensor]:
    """The gradient (B, n) of f at y, and f (B,). Not differentiable in an exported program: it holds no transforms."""
    if not torch.compiler.is_exporting():

        def total(z: Tensor) -> tuple[Tensor, Tensor]:
            value = check_objective(f(z, x), z)
            return value.sum(), value

        return torch.func.grad(total, has_aux=True)(_Guarded.apply(y))
    with nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        leaf = y.detach().requires_grad_()
        value = check_objective(f(leaf, x), leaf)
        return torch.autograd.grad(value.sum(), leaf)[0], value


class _Guarded(torch.autograd.Function):
    """y itself, with no gradient for samples where that is no number: outside the domain of f it has no derivatives."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        (gradient,) = gradients
        return torch.where(gradient.isfinite().all(1, keepdim=True), gradient, 0.0)


def _prepare_again(layer: SnareLayer, _: Any) -> None:
    layer.prepare()
