r"""`LinearKernels`: the loop in constraint space as kernels, which do not wait for the host after every step.

$$ z \leftarrow z - r T_k, \qquad r = \mathrm{relu}(z - u) - \mathrm{relu}(l - z); $$

the way back is $b \leftarrow b - q$, q the rows of $T_k^\top b$ that step k found violated. Up to `MOST_ROWS` rows, one
kernel each way takes all steps: a block keeps a few samples in shared memory and goes on until they have all stopped.
With more rows a step is a matrix product and one kernel for all the rest.

What they compute is what the plain loop computes in `ConstraintSpace`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.damping import Damping, schedule
from snarenet.repair.engine import Batch, Description, Engine, Gradients, Outcome, Tape
from snarenet.repair.gpu import blocks, launching
from snarenet.repair.loop.spaces import ConstraintSpace
from snarenet.repair.stopping import GOING, inner_tolerance, strictness
from snarenet.tracing import tracing

_LOOK = 8  # steps between two looks at who is still going: a look waits for the GPU


class LinearKernels(Engine):
    """Takes steps on z = A y.

    Args:
        space: the rows, and the way between y and z.
        damping: the rule of the damping, one that does not search.
        tol: the tolerance.
        max_steps: limit on steps.
    """

    def __init__(self, space: ConstraintSpace, damping: Damping, tol: float, max_steps: int) -> None:
        self.space, self.tol, self.max_steps = space, tol, max_steps
        self.spectrum, self.levels = space.spectrum, schedule(damping, max_steps)
        scales = space.scales()
        self.strictness = strictness(scales, tol) if damping.relative else torch.ones_like(scales)
        self.tolerances = tol, inner_tolerance(tol, space.slack)  # for samples that take no step, and for the others

    def run(self, batch: Batch, taped: bool) -> tuple[Outcome, LinearTape | None]:
        z = self.space.start(batch.y).contiguous()
        lower, upper = (bound.expand_as(z).contiguous() for bound in (batch.lower, batch.upper))
        status, steps = (torch.empty(len(z), dtype=torch.int64, device=z.device) for _ in range(2))
        run = self._at_once if z.shape[1] <= blocks.MOST_ROWS else self._step_by_step
        position, codes = run(z, Batch(batch.y, lower, upper, batch.finite), status, steps, taped)
        tape = LinearTape(self, codes, steps, batch.learns_bounds) if taped else None
        return Outcome(self.space.finish(batch.y, position), status, steps), tape

    def describe(self, batch: Batch) -> Description:
        rows = len(self.spectrum.A)
        where, system = self.space.describe(batch.y, batch.finite, 0.0)
        how = "a kernel for all steps" if rows <= blocks.MOST_ROWS else "a product and a kernel a step"
        return Description(f"CUDA kernels {where}, {how}", system, rows)  # a byte a row and step

    def _at_once(self, z: Tensor, batch: Batch, status: Tensor, steps: Tensor, taped: bool) -> tuple[Tensor, Tensor]:
        """All steps in one kernel: (position, codes)."""
        transfers, position = self.spectrum.transfers(self.levels), z.clone()
        codes = torch.empty((self.max_steps if taped else 0, *z.shape), dtype=torch.int8, device=z.device)
        blocks.launch(
            "linear", "forward", position, batch.lower, batch.upper, transfers, len(transfers), self.strictness,
            batch.finite, self.max_steps, *map(float, self.tolerances), codes, status, steps, int(taped),
        )  # fmt: skip
        return position, codes

    def _step_by_step(
        self, z: Tensor, batch: Batch, status: Tensor, steps: Tensor, taped: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """A product and a kernel for each step, and a look at the status now and then: (position, codes)."""
        position, residual = torch.empty_like(z), torch.empty_like(z)
        program, (first_tol, tol) = blocks.load("linear", z.dtype, z.device), self.tolerances
        shared = (blocks.THREADS + launching.SLICE) * z.element_size()
        codes: list[Tensor] = []

        def settle(trial: Tensor, first: bool) -> None:
            code = torch.empty(z.shape if taped else (0,), dtype=torch.int8, device=z.device)
            program.launch(
                "settle", len(z), blocks.THREADS, shared,
                [z.shape[1], trial, position, residual, batch.lower, batch.upper, self.strictness, batch.finite,
                 float(first_tol if first else tol), code, status, steps, int(first), int(taped)],
            )  # fmt: skip
            if taped and not first:
                codes.append(code)

        settle(z, first=True)
        for k in range(self.max_steps):
            if k % _LOOK == 0 and not tracing() and not bool((status == GOING).any()):
                break
            settle(position - self.spectrum.transfer(residual, self.level(k)), first=False)
        return position, codes

    def level(self, k: int) -> float:
        """The damping of step k."""
        return self.levels[min(k, len(self.levels) - 1)]


class LinearTape(Tape):
    """Which rows each step found above or below their bounds.

    Args:
        engine: what wrote it.
        codes: (max_steps, B, rows) int8, or (B, rows) for each step; `code_of` in common.cuh says what they mean.
        steps: (B,) how many each sample took.
        bounds: do the bounds need gradients?
    """

    def __init__(self, engine: LinearKernels, codes: Tensor | list[Tensor], steps: Tensor, bounds: bool) -> None:
        self.engine, self.codes, self.steps, self.bounds = engine, codes, steps, bounds

    def pull_back(self, y: Tensor, v: Tensor, wanted: tuple[Tensor, ...]) -> Gradients:
        space = self.engine.space
        b = space.pull_start(v).clone(memory_format=torch.contiguous_format)
        lower, upper = (torch.zeros_like(b), torch.zeros_like(b)) if self.bounds else (b, b)  # never touched, then
        (self._at_once if isinstance(self.codes, Tensor) else self._step_by_step)(b, lower, upper)
        found = space.pull_finish(y, v, b, None, ())[0]
        return Gradients(found, lower, upper) if self.bounds else Gradients(found, None, None)

    def _at_once(self, b: Tensor, lower: Tensor, upper: Tensor) -> None:
        """All steps back in one kernel; b becomes the cotangent of the first position."""
        engine, codes = self.engine, self.codes
        assert isinstance(codes, Tensor)
        transfers = engine.spectrum.transfers(engine.levels, transpose=True)
        blocks.launch(
            "linear", "backward", b, codes, self.steps, transfers, len(transfers), lower, upper, int(self.bounds)
        )

    def _step_by_step(self, b: Tensor, lower: Tensor, upper: Tensor) -> None:
        """A product and a kernel for each step back."""
        program = blocks.load("linear", b.dtype, b.device)
        for k in reversed(range(len(self.codes))):
            product = self.engine.spectrum.transfer(b, self.engine.level(k), transpose=True)
            arguments = [b.numel(), b, product, self.codes[k], lower, upper, int(self.bounds)]
            program.launch("pull", -(-b.numel() // blocks.THREADS), blocks.THREADS, 0, arguments)
