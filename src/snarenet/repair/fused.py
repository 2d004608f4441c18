r"""The loop in constraint space as GPU kernels, which do not wait for the host after every step.

$$ z \leftarrow z - r T_k, \qquad r = \mathrm{relu}(z - u) - \mathrm{relu}(l - z); $$

the way back is $b \leftarrow b - q$, q the rows of $T_k^\top b$ that step k found violated. Up to `MOST_ROWS` rows, one
kernel each way takes all steps: a block keeps a few samples in shared memory and goes on until they have all stopped.
With more rows a step is a matrix product and one kernel for all the rest.

What they compute is what `loop.py` computes with `ConstraintSpace`, which is also what runs without a GPU, and for a
damping that searches.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.damping import Damping
from snarenet.linalg import Spectrum
from snarenet.repair import kernels
from snarenet.solution import Status
from snarenet.tracing import tracing

MOST_ROWS = 128  # with more, all samples together make better use of a matrix than a few
_THREADS = 512  # of a block
_BLOCKS = 264  # to aim at: two for each multiprocessor of a large GPU
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
    return kernels.supported(z) and not damping.searches


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
    job, b = record.job, cotangent.clone(memory_format=torch.contiguous_format)
    lower, upper = (torch.zeros_like(b), torch.zeros_like(b)) if record.bounds else (b, b)  # never touched, then
    bounds = int(record.bounds)
    if isinstance(record.codes, Tensor):
        transfers = _transfers(job, transpose=True)
        launch("backward", b, 4, record.codes, record.steps, transfers, len(transfers), lower, upper, bounds)
    else:
        levels, program = schedule(job.damping, job.max_steps), kernels.load("linear", b.dtype, b.device)
        for k in reversed(range(len(record.codes))):
            product = job.spectrum.transfer(b, levels[min(k, len(levels) - 1)], transpose=True)
            arguments = [b.numel(), b, product, record.codes[k], lower, upper, bounds]
            program.launch("pull", -(-b.numel() // _THREADS), _THREADS, 0, arguments)
    return (b, lower, upper) if record.bounds else (b, None, None)


def launch(name: str, first: Tensor, arrays: int, *arguments: Tensor | int | float) -> None:
    """Launch a kernel that takes a few samples a block, for the samples in `first` (B, rows).

    Args:
        name: of the kernel.
        first: its first tensor.
        arrays: how many arrays it keeps in shared memory, each with a number for every sample and row.
        arguments: the others.
    """
    batch, rows = first.shape
    samples = next((count for count in (1, 2) if batch <= count * _BLOCKS), 4)  # of a block
    shared = samples * (arrays * rows + max(_THREADS, 16)) * first.element_size()  # 16: SLICE in common.cuh
    program = kernels.load("linear", first.dtype, first.device)
    blocks = -(-batch // samples)
    program.launch(f"{name}{samples}", blocks, _THREADS, shared, [rows, batch, first, *arguments])


def _at_once(
    job: Job, z: Tensor, lower: Tensor, upper: Tensor, finite: Tensor, status: Tensor, steps: Tensor, record: bool
) -> tuple[Tensor, Tensor]:
    """All steps in one kernel: (position, codes)."""
    transfers, position = _transfers(job), z.clone()
    codes = torch.empty((job.max_steps if record else 0, *z.shape), dtype=torch.int8, device=z.device)
    launch(
        "forward", position, 6, lower, upper, transfers, len(transfers), job.strictness, finite, job.max_steps,
        float(job.first_tol), float(job.tol), codes, status, steps, int(record),
    )  # fmt: skip
    return position, codes


def _step_by_step(
    job: Job, z: Tensor, lower: Tensor, upper: Tensor, finite: Tensor, status: Tensor, steps: Tensor, record: bool
) -> tuple[Tensor, list[Tensor]]:
    """A product and a kernel for each step, and a look at the status now and then: (position, codes)."""
    position, residual, levels = torch.empty_like(z), torch.empty_like(z), schedule(job.damping, job.max_steps)
    program, shared = kernels.load("linear", z.dtype, z.device), (_THREADS + 16) * z.element_size()
    codes: list[Tensor] = []

    def settle(trial: Tensor, first: bool) -> None:
        code = torch.empty(z.shape if record else (0,), dtype=torch.int8, device=z.device)
        program.launch(
            "settle", len(z), _THREADS, shared,
            [z.shape[1], trial, position, residual, lower, upper, job.strictness, finite,
             float(job.first_tol if first else job.tol), code, status, steps, int(first), int(record)],
        )  # fmt: skip
        if record and not first:
            codes.append(code)

    settle(z, first=True)
    for k in range(job.max_steps):
        if k % _LOOK == 0 and not tracing() and not bool((status == int(Status.MAX_STEPS)).any()):
            break
        settle(position - job.spectrum.transfer(residual, levels[min(k, len(levels) - 1)]), first=False)
    return position, codes


@functools.lru_cache(maxsize=64)
def schedule(damping: Damping, max_steps: int) -> tuple[float, ...]:
    """The damping of the first steps; the last one is that of all later steps."""
    levels = [float(damping.first(torch.empty(0)))]
    for k in range(max_steps - 1):
        following = float(damping.following(k, levels[-1], None))
        if following == levels[-1]:
            break
        levels.append(following)
    return tuple(levels)


def _transfers(job: Job, transpose: bool = False) -> Tensor:
    """(count, rows, rows) the T of these dampings, or their transposes, computed once."""
    return job.spectrum.transfers(schedule(job.damping, job.max_steps), transpose)
