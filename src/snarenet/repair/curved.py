r"""The loop in output space as CUDA kernels, for rows that are constant and curved at most along the axes.

$$ g_i(y) = y^\top \mathrm{diag}(H_i)\, y + G_i y, \qquad y \leftarrow y - P J^\top w - d_e, \qquad
   (J P J^\top + \lambda_k D)\, w = r - J d_e, $$

where $d_e$ and $P = Q\, \mathrm{diag}(c_k)\, Q^\top$ come from eliminated constant rows (`linalg.py`). One block of
threads takes all steps of one sample: it keeps the rows that are in use, rotated by Q, and their Gram matrix in shared
memory, factors and solves there, and stops by itself. Nobody waits for the host, and no matrix per sample is stored: on
the way back a block makes its matrices again from the positions that it wrote down.

What they compute is what `loop.py` computes with `OutputSpace`, which is also what runs without a GPU, for other rows,
for problems that do not fit, and for a damping that searches.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.maps import IdentityMap, LinearMap, Map, QuadraticMap
from snarenet.damping import Damping
from snarenet.linalg import Spectrum
from snarenet.repair import kernels
from snarenet.repair.fused import schedule
from snarenet.solution import Status
from snarenet.tracing import tracing

_THREADS = 256  # of a block
_RESERVED = 1024  # bytes of shared memory that a multiprocessor keeps for itself, for every block
_STAGE = 32  # steps that one launch may take: the record of a stage is that of all its steps, needed or not


class Rows(NamedTuple):
    """Constant rows, as the kernels want them."""

    constants: Tensor  # everything in `struct Rows` of kernels/curved.cu, one after the other
    size: int  # variables
    kept: int  # rows that are not eliminated
    eliminated: int  # rows that are
    rank: int  # of the latter


class CurvedSpace(NamedTuple):
    """What `OutputSpace` is to the plain loop."""

    rows: Rows
    active: bool  # use only equalities and violated rows
    relative: bool  # scale the damping by the squared lengths of the rows
    traceable: bool = False

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """The tensors inside g that need a gradient: none."""
        return ()

    def detached(self, leaves: dict[int, Tensor]) -> CurvedSpace:
        """It has no history."""
        return self


class Job(NamedTuple):
    """What the kernels need to know about a repair."""

    space: CurvedSpace
    damping: Damping
    tol: float
    finest: float  # least length of a row that counts in comparing with the tolerance; 0: lengths do not count
    max_steps: int


class Stage(NamedTuple):
    """Some steps, as the way back needs them: positions, multipliers, rows above (1) or below (2) bounds, the end."""

    begin: int
    end: int
    y: Tensor  # (steps, B, n)
    w: Tensor  # (steps, B, m)
    codes: Tensor  # (steps, B, rows) int8
    last: Tensor  # (B, n)


class Record(NamedTuple):
    """The stages of a repair, how many steps each sample was moved by, and the scales of its rows."""

    job: Job
    stages: list[Stage]
    moves: Tensor  # (B,)
    scale: Tensor  # (B, m)
    bounds: bool


def suits(others: Map) -> bool:
    """Are these rows the same for all samples and training steps, and curved at most along the axes?"""
    return bool(others.rows) and all(_suits(part) for part in others.parts)


def _suits(part: Map) -> bool:
    if isinstance(part, QuadraticMap):
        constant = part.H.ndim == part.G.ndim == 2 and not (part.H.requires_grad or part.G.requires_grad)
        return part.diagonal and constant
    return isinstance(part, IdentityMap) or (isinstance(part, LinearMap) and part.constant)


def tensors(others: Map) -> tuple[Tensor, ...]:
    """The coefficients of rows that suit."""
    return tuple(tensor for part in others.parts for tensor in _tensors(part))


def _tensors(part: Map) -> tuple[Tensor, ...]:
    if isinstance(part, QuadraticMap):
        return part.H, part.G
    return (part.A,) if isinstance(part, LinearMap) else ()


def describe(others: Map, spectrum: Spectrum | None, y: Tensor, used: int) -> Rows | None:
    """Rows that suit, for the kernels; None if a block has no memory for so many of them at a time."""
    sizes = y.shape[1], others.rows, 0 if spectrum is None else len(spectrum.A)
    if _shared_bytes(*sizes, used, y) > kernels.most_shared(y):
        return None
    H, G = (torch.cat(pieces) for pieces in zip(*(_coefficients(part, y) for part in others.parts), strict=True))
    pieces, rank = [H, G, H.T, G.T], 0
    if spectrum is not None:
        A, rank = spectrum.A, len(spectrum.values)
        complete = torch.linalg.qr(spectrum.right, mode="complete").Q
        basis = torch.cat([spectrum.right, complete[:, rank:]], 1)
        left = spectrum.left / spectrum.root.unsqueeze(1)
        values = torch.cat([spectrum.values, A.new_zeros(y.shape[1] - rank)])
        pieces += [A, A.T, basis, basis.T, left, left.T, values, spectrum.root.square()]
    return Rows(torch.cat([piece.reshape(-1) for piece in pieces]), *sizes, rank)


def _coefficients(part: Map, y: Tensor) -> tuple[Tensor, Tensor]:
    """H and G (rows, n) of a part."""
    if isinstance(part, QuadraticMap):
        return part.H, part.G
    G = part.jacobian(y)
    return torch.zeros_like(G), G


def iterate(
    job: Job, y: Tensor, lower: Tensor, upper: Tensor, finite: Tensor, record: bool, bounds: bool
) -> tuple[Tensor, Tensor, Tensor, Record | None]:
    """(value, status, steps) after the loop, and what `pull_back` needs, if asked for."""
    rows, batch = job.space.rows, len(y)
    lower, upper = lower.contiguous(), upper.contiguous()
    value = y.clone(memory_format=torch.contiguous_format)
    status, steps = (torch.empty(batch, dtype=torch.int64, device=y.device) for _ in range(2))
    moves, scale = torch.empty(batch, dtype=torch.int32, device=y.device), y.new_empty(batch, rows.kept)
    levels = numbers(schedule(job.damping, job.max_steps), y.dtype, y.device)
    stages: list[Stage] = []
    for begin in range(0, max(job.max_steps, 1), _STAGE):
        if begin and not tracing() and not bool((status == int(Status.MAX_STEPS)).any()):
            break
        end = min(begin + _STAGE, job.max_steps)
        count = end - begin if record else 0
        trail_y, trail_w = (y.new_empty(count, batch, size) for size in (rows.size, rows.kept))
        codes = torch.empty(count, batch, rows.eliminated + rows.kept, dtype=torch.int8, device=y.device)
        _launch(
            "forward", job, value,
            lower, upper, scale, finite, levels, len(levels), begin, end, float(job.tol), job.finest, _still(y.dtype),
            status, steps, moves, trail_y, trail_w, codes, int(record),
        )  # fmt: skip
        if record:
            stages.append(Stage(begin, end, trail_y, trail_w, codes, value.clone()))
    return value, status, steps, Record(job, stages, moves, scale, bounds) if record else None


def pull_back(record: Record, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The cotangents of the prediction and of the bounds, from that of the value."""
    job, rows = record.job, record.job.space.rows
    cotangent, scale = v.clone(memory_format=torch.contiguous_format), torch.zeros_like(record.scale)
    lower, upper = (v.new_zeros(len(v) if record.bounds else 0, rows.eliminated + rows.kept) for _ in range(2))
    levels = numbers(schedule(job.damping, job.max_steps), v.dtype, v.device)
    for stage in reversed(record.stages):
        _launch(
            "backward", job, stage.last,
            record.scale, levels, len(levels), stage.begin, stage.end, record.moves, stage.y, stage.w, stage.codes,
            cotangent, scale, lower, upper, int(record.bounds),
        )  # fmt: skip
    return (cotangent, lower, upper) if record.bounds else (cotangent, None, None)


def _launch(name: str, job: Job, first: Tensor, *arguments: Tensor | int | float) -> None:
    launch(name, job.space.rows, first, int(job.space.active), int(job.space.relative), first, *arguments)


def room(rows: Rows, y: Tensor, blocks: int) -> int:
    """The most rows that may be in use at a time if a multiprocessor is to have so many blocks."""
    memory = (kernels.most_shared(y) + _RESERVED) // blocks - _RESERVED
    need = functools.partial(_shared_bytes, rows.size, rows.kept, rows.eliminated, y=y)
    return max(0, bisect_right(range(rows.kept + 1), memory, key=need) - 1)


def launch(name: str, rows: Rows, like: Tensor, *arguments: Tensor | int | float, used: int | None = None) -> None:
    """Start a kernel for these rows, `used` of them at a time at most: one block a sample, as many as `like` has."""
    shared = _shared_bytes(rows.size, rows.kept, rows.eliminated, rows.kept if used is None else used, like)
    program = kernels.load("curved", like.dtype, like.device)
    program.launch(name, len(like), _THREADS, shared, [*rows, *arguments])


def _still(dtype: torch.dtype) -> float:
    """The share of the residual below which its gradient is nothing; as in `OutputSpace.stationary`."""
    return torch.finfo(dtype).eps ** 0.6


@functools.lru_cache(maxsize=64)
def numbers(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these, made once: a copy to the device cannot be recorded."""
    return torch.tensor(values, dtype=dtype, device=device)


def _shared_bytes(size: int, count: int, eliminated: int, used: int, y: Tensor) -> int:
    """Shared memory of a block: what `struct Work` of kernels/curved.cu lays out."""
    vectors = 5 * size + 2 * (eliminated + count) + 4 * count + 4 * _THREADS
    matrices = (18 * size if eliminated else 0) + used * (size | 1) + (used + 1) * (used + 2) // 2
    return (vectors + matrices) * y.element_size() + (count + (count + 31) // 32) * 4
