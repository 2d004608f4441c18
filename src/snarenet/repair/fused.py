r"""The loop in constraint space as GPU kernels, in Triton, which do not wait for the host after every step.

$$ z \leftarrow z - r T_k, \qquad r = \mathrm{relu}(z - u) - \mathrm{relu}(l - z); $$

the way back is $b \leftarrow b - q$, q the rows of $T_k^\top b$ that step k found violated. Up to `MOST_ROWS` rows, one
kernel each way takes all steps: a program keeps its samples in registers and goes on until they have all stopped. With
more rows a step is a matrix product and one kernel for all the rest.

What they compute is what `loop.py` computes with `ConstraintSpace`, which is also what runs without a GPU or Triton,
and for a damping that searches.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.data import tracing
from snarenet.damping import Damping
from snarenet.linalg import Spectrum
from snarenet.solution import Status

MOST_ROWS = 128  # a program keeps its samples' rows in registers
_SAMPLES, _CHUNK, _WARPS = 16, 32, 8  # of a program: samples, rows of T that it multiplies at a time, and warps
_BLOCK = 1024  # numbers that a program of an elementwise kernel takes
_LOOK = 8  # steps between two looks at who is still going: a look waits for the GPU


class Job(NamedTuple):
    """What the kernels need to know about a repair."""

    spectrum: Spectrum
    damping: Damping
    strictness: Tensor  # (rows,) factors on the residual before it is compared with the tolerance
    first_tol: float  # for samples that take no step
    tol: float
    max_steps: int


class Record(NamedTuple):
    """What the way back needs: which rows each step found above (1) or below (2) their bounds, and the job."""

    codes: Tensor | list[Tensor]  # (max_steps, B, rows) int8, or (B, rows) for each step
    steps: Tensor  # (B,)
    job: Job
    bounds: bool


def available(z: Tensor, damping: Damping) -> bool:
    """Can the kernels take over?"""
    on_gpu = z.is_cuda or bool(os.environ.get("TRITON_INTERPRET"))
    return on_gpu and not damping.searches and z.numel() > 0 and not torch.compiler.is_compiling() and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def iterate(
    job: Job, z: Tensor, lower: Tensor, upper: Tensor, finite: Tensor, record: bool, bounds: bool
) -> tuple[Tensor, Tensor, Tensor, Record | None]:
    """(position, status, steps) after the loop, and what `pull_back` needs, if asked for."""
    lower, upper = (bound.expand_as(z).contiguous() for bound in (lower, upper))
    status, steps = (torch.empty(len(z), dtype=torch.int64, device=z.device) for _ in range(2))
    run = _at_once if z.shape[1] <= MOST_ROWS else _step_by_step
    position, codes = run(job, z.contiguous(), lower, upper, finite, status, steps, record)
    return position, status, steps, Record(codes, steps, job, bounds) if record else None


def pull_back(record: Record, cotangent: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The cotangent of the first position and of the bounds, from that of the last position."""
    b = cotangent.clone(memory_format=torch.contiguous_format)
    lower, upper = (torch.zeros_like(b), torch.zeros_like(b)) if record.bounds else (b, b)  # never touched, then
    if isinstance(record.codes, Tensor):
        (batch, rows), transfers = b.shape, _transfers(record.job)
        _kernels().backward[_programs(batch)](
            b, record.codes, record.steps, transfers, torch.empty_like(b), lower, upper, batch, rows, len(transfers),
            BOUNDS=record.bounds, **_shape(rows),
        )  # fmt: skip
    else:
        levels = _schedule(record.job.damping, record.job.max_steps)
        for k in reversed(range(len(record.codes))):
            product = record.job.spectrum.transfer(b, levels[min(k, len(levels) - 1)], transpose=True)
            _kernels().pull[(-(-b.numel() // _BLOCK),)](
                b, product, record.codes[k], lower, upper, b.numel(), BOUNDS=record.bounds, BLOCK=_BLOCK
            )
    return (b, lower, upper) if record.bounds else (b, None, None)


def _at_once(
    job: Job, z: Tensor, lower: Tensor, upper: Tensor, finite: Tensor, status: Tensor, steps: Tensor, record: bool
) -> tuple[Tensor, Tensor]:
    """All steps in one kernel: (position, codes)."""
    (batch, rows), transfers = z.shape, _transfers(job)
    position, scratch = z.clone(), torch.empty_like(z)
    codes = torch.zeros((job.max_steps if record else 0, batch, rows), dtype=torch.int8, device=z.device)
    _kernels().forward[_programs(batch)](
        position, lower, upper, transfers, job.strictness, finite, scratch, codes, status, steps,
        batch, rows, len(transfers), job.max_steps, job.first_tol, job.tol,
        RECORD=record, **_shape(rows), **_STATUS,
    )  # fmt: skip
    return position, codes


def _step_by_step(
    job: Job, z: Tensor, lower: Tensor, upper: Tensor, finite: Tensor, status: Tensor, steps: Tensor, record: bool
) -> tuple[Tensor, list[Tensor]]:
    """A product and a kernel for each step, and a look at the status now and then: (position, codes)."""
    position, residual, levels = torch.empty_like(z), torch.empty_like(z), _schedule(job.damping, job.max_steps)
    block = min(1024, _padded(z.shape[1]))
    codes: list[Tensor] = []

    def settle(trial: Tensor, first: bool) -> None:
        code = torch.empty(z.shape if record else (0,), dtype=torch.int8, device=z.device)
        _kernels().settle[(len(z),)](
            trial, position, residual, lower, upper, job.strictness, finite, code, status, steps, z.shape[1],
            job.first_tol if first else job.tol, FIRST=first, RECORD=record, BLOCK=block, **_STATUS,
        )  # fmt: skip
        if record and not first:
            codes.append(code)

    settle(z, first=True)
    for k in range(job.max_steps):
        if k % _LOOK == 0 and not tracing() and not bool((status == _STATUS["GOING"]).any()):
            break
        settle(position - job.spectrum.transfer(residual, levels[min(k, len(levels) - 1)]), first=False)
    return position, codes


_STATUS = {
    "CONVERGED": int(Status.CONVERGED),
    "GOING": int(Status.MAX_STEPS),
    "NONFINITE": int(Status.NONFINITE),
}


def _padded(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())


def _programs(batch: int) -> tuple[int]:
    return (-(-batch // _SAMPLES),)


def _shape(rows: int) -> dict[str, int]:
    padded = _padded(rows)
    return {"PADDED": padded, "SAMPLES": _SAMPLES, "CHUNK": min(_CHUNK, padded), "num_warps": _WARPS}


@functools.lru_cache(maxsize=64)
def _schedule(damping: Damping, max_steps: int) -> tuple[float, ...]:
    """The damping of the first steps; the last one is that of all later steps."""
    levels = [float(damping.first(torch.empty(0)))]
    for k in range(max_steps - 1):
        following = float(damping.following(k, levels[-1], None))
        if following == levels[-1]:
            break
        levels.append(following)
    return tuple(levels)


def _transfers(job: Job) -> Tensor:
    """(count, rows, rows) the T of these dampings, computed once."""
    return job.spectrum.transfers(_schedule(job.damping, job.max_steps))


@functools.cache
def _kernels() -> Any:
    """The kernels, compiled when they are first called; Triton is imported here and nowhere else."""
    from snarenet.repair import kernels

    return kernels
