r"""`HProjLayer`: homeomorphic projection, a pull towards the centre in the latent space of an invertible network.

An invertible network $\Phi_x$ learns to map the latent cube onto the feasible set. A prediction that is not feasible
is pulled along the latent segment from the centre c = (½, ..., ½),

$$ y(\alpha) = \Phi_x\big(c + \alpha\,(\Phi_x^{-1}(\hat y) - c)\big), \qquad 0 \le \alpha \le 1, $$

by bisection for a large α whose y(α) is feasible. Constant linear equalities are completed (see `completion.py`): the
network predicts the partial variables only.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.constraints.base import Instance, largest, residual
from snarenet.constraints.bounds import Bounds
from snarenet.constraints.data import check_finite, check_shape, describe
from snarenet.layers.base import Layer, OnFailure, Progress
from snarenet.layers.completion import Completion, Partial
from snarenet.layers.flow import Flow
from snarenet.repair import Options
from snarenet.repair.gpu.graphs import Replayed
from snarenet.solution import Solution

Bisect = Literal["infeasible", "all"]

_CENTRE = 0.5
_POINTS, _INPUTS, _BATCH = 1024, 10_000, 512  # latent points and inputs to train on, and how many a step takes
_VIOLATION, _DISTORTION = 10.0, 1.0  # their weights in the loss of the invertible network, against the volume


class HProjLayer(Layer):
    """Pulls infeasible predictions towards the centre of a learned image of the feasible set, in eval mode.

    The network's outputs are squashed to the box by a sigmoid and completed. In training mode that is all: train with
    a penalty on the violation. Call `pretrain` before the first use in eval mode. A sample comes out feasible if the
    centre's image is, or any point that the bisection meets; else its status is STALLED. Gradients are exact in both
    modes: α is constant almost everywhere.

    Args:
        constraints: the set to obey; its equalities must be linear with one matrix for all samples.
        inputs: size of x, a tensor (B, inputs).
        size: the n of y, where the constraints do not tell.
        box: the partial variables lie in [-box, box]; the paper's 100 leaves the set a tiny part of it.
        bisect: "infeasible" leaves feasible predictions alone; "all" (the paper) bisects those too.
        partial: choice of the partial variables, "pivoted" or, as in the paper, "random".
        width: the bisection of a sample ends when its interval of α is shorter.
        widen: train the invertible network on inputs from the range of the given ones, widened by this, as in the
            paper; None for the given inputs themselves.
        hidden: hidden units of the invertible network; see `Flow`.
        pretrain_steps: steps of `pretrain`, the paper's number unless given.
        lr: learning rate of `pretrain`.
        seed: of the random choice of partial variables.
        tol: largest violation that counts as feasible.
        max_steps: limit on the steps of the bisection.
        on_failure: what to do about samples that failed: "warn", "raise" a `RepairError`, or "ignore".
    """

    title = "HProj"

    def __init__(
        self,
        constraints: Constraints,
        inputs: int,
        size: int | None = None,
        *,
        box: float = 5.0,
        bisect: Bisect = "infeasible",
        partial: Partial = "pivoted",
        width: float = 1e-2,
        widen: float | None = None,
        hidden: int | None = None,
        pretrain_steps: int = 20_000,
        lr: float = 1e-3,
        seed: int = 0,
        tol: float = 1e-5,
        max_steps: int = 100,
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__(constraints, Options(tol=tol, max_steps=max_steps), on_failure)
        if bisect not in ("infeasible", "all"):
            raise ValueError(f"`bisect` must be 'infeasible' or 'all', but got {bisect!r}")
        for name, value in {"box": box, "width": width, "lr": lr, "pretrain_steps": pretrain_steps}.items():
            if not value > 0:
                raise ValueError(f"`{name}` must be > 0, but got {value!r}")
        if constraints.size is None and size is None:
            raise ValueError("give `size`, the n of y: these constraints do not tell it")
        if size is not None and constraints.size not in (None, size):
            raise ValueError(f"`size` must be {constraints.size}, as the constraints have it, but got {size}")
        self.size, self.inputs = size or constraints.size or 0, inputs
        self.box, self.width, self.widen, self.lr = box, width, widen, lr
        self.bisect: Bisect = bisect
        self.completion = Completion(constraints, partial, seed)
        _check_equalities(constraints, self.completion)
        self.hidden, self.pretrain_steps = hidden, pretrain_steps
        self.flow = Flow(self.predictions(self.size), inputs, hidden).requires_grad_(False)

    def predictions(self, size: int) -> int:
        return self.completion.count(size)

    def repair(self, y: Tensor, x: Any, relax: float | Tensor) -> Solution:
        self._check(y, x)
        work = y.to(torch.float64)
        finite = work.isfinite().all(1)
        share = torch.sigmoid(torch.where(finite.unsqueeze(1), work, 0.0))
        share = torch.where(finite.unsqueeze(1), share, torch.nan)  # last, so that no NaN gets into the gradient
        instance = self._instance(work, x)
        raw = value = self._output(share, instance)
        steps = torch.zeros_like(finite, dtype=torch.long)
        ended = torch.zeros_like(finite)
        if not self.training:
            chosen = finite if self.bisect == "all" else finite & ~_feasible(raw, instance, self.aim(y))
            samples = chosen.nonzero().squeeze(1)
            if len(samples):
                pulled, took, narrow = self._pull(share[samples], x[samples], instance.select(samples), self.aim(y))
                value = raw.index_copy(0, samples, pulled)
                steps, ended = steps.index_copy(0, samples, took), ended.index_copy(0, samples, narrow)
        instance = instance.relaxed(relax)
        # where it ended even the centre is infeasible: no step would help
        return self.judge(instance, value, raw, steps, y.dtype, stalled=ended)

    def pretrain(
        self,
        inputs: Tensor,
        *,
        steps: int | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        r"""Train the invertible network from scratch: a large image of the cube, feasible, and evenly stretched.

        $$ \min_\Phi\; -\tfrac1d \log|\det \partial\Phi_x(z)| + 10\, \|\text{violation}\|_1 + \sum_{\text{steps}}
        (\max_i s_i - \min_i s_i), $$

        on average over fixed latent points z and inputs x, with s the log-scales of the steps of the flow.

        Args:
            inputs: (N, inputs) inputs x to train for.
            steps: steps of Adam, `pretrain_steps` unless given.
            seed: of the initial weights, the latent points and the batches.
            progress: called with (steps done, steps in all) now and then, and at the end.
        """
        check_shape("inputs", inputs, ("N", self.inputs))
        if not len(inputs):
            raise ValueError("`inputs` must hold at least one input")
        x = check_finite("inputs", inputs).detach().to(torch.float64)
        generator = torch.Generator(x.device).manual_seed(seed)
        if self.widen is not None:
            low, high = x.amin(0) - self.widen, x.amax(0) + self.widen
            x = low + (high - low) * _uniform(_INPUTS, self.inputs, x, generator)
        points = _uniform(_POINTS, self.predictions(self.size), x, generator)
        flow = Flow(self.predictions(self.size), self.inputs, self.hidden, seed).to(x.device)
        lr = torch.tensor(self.lr, device=x.device) if x.is_cuda else self.lr  # a tensor: a recording reads it
        optimizer = torch.optim.Adam(flow.parameters(), lr, weight_decay=1e-6, capturable=x.is_cuda)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000, 0.9)
        steps = self.pretrain_steps if steps is None else steps

        def learn(z: Tensor, given: Tensor) -> None:
            loss = torch.stack(list(self._terms(flow, z, given).values())).sum()
            optimizer.zero_grad()
            loss.backward(inputs=list(flow.parameters()))  # and not to the constraints, should they be learned
            optimizer.step()

        replayed = Replayed(learn)
        for step in range(steps):
            replayed(*(_some(rows, generator) for rows in (points, x)))
            flow.eval()  # the first batch has set its normalisation
            schedule.step()
            if progress is not None and (step % 100 == 99 or step == steps - 1):
                progress(step + 1, steps)
        self.flow.load_state_dict(flow.state_dict())

    def _terms(self, flow: Flow, z: Tensor, x: Tensor) -> dict[str, Tensor]:
        """The three terms of the loss of `pretrain`, with their weights."""
        share, scales = flow.trace(z, x)
        instance = self._instance(share, x)
        violation = _residual(self._output(share, instance), instance).abs().sum(1)
        logs = torch.stack(scales)  # (steps, B, d)
        return {
            "volume": -logs.sum((0, 2)).mean() / z.shape[1],
            "violation": _VIOLATION * violation.mean(),
            "distortion": _DISTORTION * (logs.amax(2) - logs.amin(2)).sum(0).mean(),
        }

    def _pull(self, share: Tensor, x: Tensor, instance: Instance, tol: float) -> tuple[Tensor, Tensor, Tensor]:
        """Bisection: the outputs, the steps that each sample took, and whether its interval became narrow."""
        if not self.flow.initialised:
            raise RuntimeError("HProj has no invertible network yet: call `pretrain(inputs)` before use in eval mode")
        dtype = next(self.flow.parameters()).dtype
        x = x.to(dtype)
        arm = self.flow.inverse(share.to(dtype), x) - _CENTRE

        def output(alpha: Tensor) -> Tensor:
            image, _ = self.flow(_CENTRE + alpha.unsqueeze(1).to(dtype) * arm, x)
            return self._output(image.to(torch.float64), instance)

        low, high = torch.zeros_like(share[:, 0]), torch.ones_like(share[:, 0])
        steps = torch.zeros_like(low, dtype=torch.long)
        with torch.no_grad():
            for _ in range(self.max_steps):
                going = high - low >= self.width
                if not bool(going.any()):
                    break
                alpha = 0.1 * low + 0.9 * high
                feasible = _feasible(output(alpha), instance, tol)
                low = torch.where(going & feasible, alpha, low)
                high = torch.where(going & ~feasible, alpha, high)
                steps += going
        return output(low), steps, high - low < self.width

    def _check(self, y: Tensor, x: Any) -> None:
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"`x` must have shape (B, {self.inputs}), but got {describe(x)}")
        if not isinstance(y, Tensor) or y.shape != (len(x), self.predictions(self.size)):
            raise ValueError(
                f"`y` must have shape ({len(x)}, {self.predictions(self.size)}), one number for every variable that "
                f"does not follow from equalities, but got {describe(y)}"
            )
        if not y.is_floating_point():
            raise TypeError(f"`y` must be a floating-point tensor, but got {y.dtype}")

    def _instance(self, like: Tensor, x: Tensor) -> Instance:
        return self.constraints.at(like.new_zeros(len(x), self.size), x)

    def _output(self, share: Tensor, instance: Instance) -> Tensor:
        """The complete y (B, n) whose partial variables stand at these shares of the box."""
        return self.completion.complete(self.box * (2 * share - 1), self.completion.right_side(instance))

    def extra_repr(self) -> str:
        return f"box={self.box:g}, bisect={self.bisect!r}, tol={self.tol:g}, max_steps={self.max_steps}"


def _feasible(y: Tensor, instance: Instance, tol: float) -> Tensor:
    return largest(_residual(y.detach(), instance)) <= tol  # False where it is NaN


def _residual(y: Tensor, instance: Instance) -> Tensor:
    return residual(instance.map.value(y), instance.lower, instance.upper)


def _uniform(count: int, size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(count, size, generator=generator, dtype=like.dtype, device=like.device)


def _some(rows: Tensor, generator: torch.Generator) -> Tensor:
    """A batch of these rows."""
    return rows[torch.randint(len(rows), (_BATCH,), generator=generator, device=rows.device)]


def _check_equalities(constraints: Constraints, completion: Completion) -> None:
    """Raise if there are equalities that no completion takes care of: the rest of the set must have an interior."""
    for i, part in enumerate(constraints.parts):
        limit = getattr(part, "limit", None)
        if isinstance(limit, Bounds) and limit.equal and i not in completion.index:
            kind = type(part).__name__
            raise ValueError(f"HProj needs linear equalities with one constant matrix, but got {kind} equalities")
