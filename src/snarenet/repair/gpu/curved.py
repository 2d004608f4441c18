r"""`CurvedKernels`: the loop in output space as kernels, for constant rows with diagonal Hessians.

$$ g_i(y) = y^\top \mathrm{diag}(H_i)\, y + G_i y, \qquad y \leftarrow y - P J^\top w - d_e, \qquad
   (J P J^\top + \lambda_k D)\, w = r - J d_e, $$

where $d_e$ and $P = Q\, \mathrm{diag}(c_k)\, Q^\top$ come from eliminated constant rows (`linalg/eliminated.py`), or

$$ y \leftarrow y - d, \qquad (\lambda_k I + A^\top S^{-1} A + J^\top D^{-1} J)\, d
   = A^\top S^{-1} r_e + J^\top D^{-1} r, $$

where A are the constant rows: `dual.cuh` and `primal.cuh` have a step and its adjoint by these systems. One block of
threads takes all steps of one sample: it keeps the matrix and what that is made of in shared memory, factors and solves
there, and stops by itself. Nobody waits for the host. On the way back a block makes its matrices again from the
positions that it wrote down; factors of primal systems are kept, as far as there is room.

What they compute is what the plain loop computes in `OutputSpace`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.damping import Damping, schedule
from snarenet.repair.engine import Batch, Description, Engine, Gradients, Outcome, Tape
from snarenet.repair.gpu import launching
from snarenet.repair.gpu.rows import PackedRows, launch
from snarenet.repair.stopping import GOING, negligible, shortest
from snarenet.tracing import tracing

_STAGE = 32  # steps that one launch may take: the tape of a stage has room for all its steps, needed or not


class CurvedKernels(Engine):
    """Takes steps on y.

    Args:
        rows: the constraints.
        active: use only equalities and violated rows.
        damping: the rule of the damping, one that does not search.
        tol: the tolerance.
        max_steps: limit on steps.
        room: bytes that may be spent on factors for the backward pass.
    """

    def __init__(
        self, rows: PackedRows, active: bool, damping: Damping, tol: float, max_steps: int, room: float
    ) -> None:
        self.rows, self.active, self.relative = rows, active, damping.relative
        self.tol, self.max_steps, self.room = tol, max_steps, room
        self.factor = rows.size * (rows.size + 3) // 2 if rows.primal else 0  # numbers of a factor that is kept
        dtype, device = rows.constants.dtype, rows.constants.device
        self.levels = launching.constants(schedule(damping, max_steps), dtype, device)
        # the least length of a row that counts in comparing with the tolerance; 0: lengths do not count
        self.shortest = shortest(tol, dtype) if self.relative else 0.0

    def run(self, batch: Batch, taped: bool) -> tuple[Outcome, CurvedTape | None]:
        rows, y, size = self.rows, batch.y, len(batch.y)
        lower, upper = batch.lower.contiguous(), batch.upper.contiguous()
        value = y.clone(memory_format=torch.contiguous_format)
        status, steps = (torch.empty(size, dtype=torch.int64, device=y.device) for _ in range(2))
        moves, scale = torch.empty(size, dtype=torch.int32, device=y.device), y.new_empty(size, rows.kept)
        stages: list[_Stage] = []
        room = self.room
        for begin in range(0, max(self.max_steps, 1), _STAGE):
            if begin and not tracing() and not bool((status == GOING).any()):
                break
            end = min(begin + _STAGE, self.max_steps)
            count = end - begin if taped else 0
            trail, records = (y.new_empty(count, size, width) for width in (rows.size, rows.kept))
            codes = torch.empty(count, size, rows.eliminated + rows.kept, dtype=torch.int8, device=y.device)
            nbytes = count * size * self.factor * y.element_size()
            factors = y.new_empty(count if nbytes <= room else 0, size, self.factor)
            room -= factors.numel() * factors.element_size()
            self.launch(
                "forward", value,
                lower, upper, scale, batch.finite, self.levels, len(self.levels), begin, end, float(self.tol),
                self.shortest, negligible(y.dtype), status, steps, moves, trail, records, codes, int(taped),
                factors, int(factors.numel() > 0),
            )  # fmt: skip
            if taped:
                stages.append(_Stage(begin, end, trail, records, codes, factors, value.clone()))
        tape = CurvedTape(self, stages, moves, scale, batch.learns_bounds) if taped else None
        return Outcome(value, status, steps), tape

    def describe(self, batch: Batch) -> Description:
        rows, real = self.rows, batch.y.element_size()
        order, which, done = rows.kept, " at most: the rows in use", "eliminated"
        if rows.primal:
            order, which, done = rows.size, ": the variables", "added up beforehand"
        what = f"; {rows.eliminated:,} constant rows {done}" if rows.eliminated else ""
        system = f"dense Cholesky factors in shared memory, {order:,} x {order:,} a sample{which}"
        nbytes = real * (rows.size + rows.kept) + rows.eliminated + rows.kept
        nbytes += real * self.factor if len(batch.y) * self.max_steps * self.factor * real <= self.room else 0
        return Description(f"CUDA kernels on y, a block of threads a sample{what}", system, nbytes)

    def launch(self, name: str, first: Tensor, *arguments: Tensor | int | float) -> None:
        """Start a kernel for the samples in `first` (B, n), its first tensor."""
        launch("curved", name, self.rows, first, int(self.active), int(self.relative), first, *arguments)


class _Stage(NamedTuple):
    """Some steps, as the way back needs them: positions, a number a row, which rows broke which bound, the end."""

    begin: int
    end: int
    y: Tensor  # (steps, B, n)
    records: Tensor  # (steps, B, m) multipliers, or residuals: what `step` of dual.cuh and primal.cuh returns
    codes: Tensor  # (steps, B, rows) int8; `code_of` in common.cuh says what they mean
    factors: Tensor  # (steps, B, numbers); without steps if there is no room
    last: Tensor  # (B, n)


class CurvedTape(Tape):
    """The stages of a repair.

    Args:
        engine: what wrote it.
        stages: the stages.
        moves: (B,) how many steps each sample was moved by.
        scale: (B, m) the scales of its rows.
        bounds: do the bounds need gradients?
    """

    def __init__(self, engine: CurvedKernels, stages: list[_Stage], moves: Tensor, scale: Tensor, bounds: bool) -> None:
        self.engine, self.stages, self.moves, self.scale, self.bounds = engine, stages, moves, scale, bounds

    def pull_back(self, y: Tensor, v: Tensor, wanted: tuple[Tensor, ...]) -> Gradients:
        engine, rows = self.engine, self.engine.rows
        cotangent, scale = v.clone(memory_format=torch.contiguous_format), torch.zeros_like(self.scale)
        lower, upper = (v.new_zeros(len(v) if self.bounds else 0, rows.eliminated + rows.kept) for _ in range(2))
        for stage in reversed(self.stages):
            engine.launch(
                "backward", stage.last,
                self.scale, engine.levels, len(engine.levels), stage.begin, stage.end, self.moves, stage.y,
                stage.records, stage.codes, cotangent, scale, lower, upper, int(self.bounds),
                stage.factors, int(stage.factors.numel() > 0),
            )  # fmt: skip
        return Gradients(cotangent, lower, upper) if self.bounds else Gradients(cotangent, None, None)
