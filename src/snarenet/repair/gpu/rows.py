"""Kernels that take one sample a block, and constant rows with diagonal Hessians as they want them; see `rows.cuh`."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet.constraints.maps import IdentityMap, LinearMap, Map, QuadraticMap
from snarenet.linalg import Spectrum
from snarenet.repair.gpu import launching, nvrtc

THREADS = 256  # of a block where a multiprocessor has memory for two; one that has it for itself gets twice as many
LOST, FOUND, CROWDED = range(3)  # how a search ends; crowded: more rows in use than there was room for
_RESERVED = 1024  # bytes of shared memory that a multiprocessor keeps for itself, for every block


class PackedRows(NamedTuple):
    """Constant rows, as the kernels want them."""

    constants: Tensor  # everything in `struct Rows` of rows.cuh, one after the other
    size: int  # variables
    kept: int  # rows that are not eliminated
    eliminated: int  # rows that are
    rank: int  # of the latter
    # shared memory of a block, for each number of rows that may be in use at a time: one block a multiprocessor, or two
    bytes: tuple[tuple[int, ...], tuple[int, ...]]
    primal: bool = False  # are they for the system of the variables, and not for that of the rows in use?


def suits(map: Map) -> bool:
    """Are these rows the same for all samples and training steps, with diagonal Hessians?"""
    return bool(map.rows) and all(_suits(part) for part in map.parts)


def _suits(part: Map) -> bool:
    if isinstance(part, QuadraticMap):
        constant = part.H.ndim == part.G.ndim == 2 and not (part.H.requires_grad or part.G.requires_grad)
        return part.diagonal and constant
    return isinstance(part, IdentityMap) or (isinstance(part, LinearMap) and part.constant)


def tensors(map: Map) -> tuple[Tensor, ...]:
    """The coefficients of rows that suit."""
    return tuple(tensor for part in map.parts for tensor in _tensors(part))


def _tensors(part: Map) -> tuple[Tensor, ...]:
    if isinstance(part, QuadraticMap):
        return part.H, part.G
    return (part.A,) if isinstance(part, LinearMap) else ()


def pack(
    source: str, map: Map, spectrum: Spectrum | None, y: Tensor, used: int, primal: bool = False
) -> PackedRows | None:
    """Rows that suit, for the kernels of a source file; None if a block has no memory for so many of them at a time.

    `spectrum` is that of the rows that were eliminated; the `primal` system has their normal matrix instead.
    """
    size, kept, eliminated = y.shape[1], map.rows, 0 if spectrum is None else len(spectrum.A)
    alone, paired = (_shared_bytes(source, size, kept, eliminated, y, blocks, primal) for blocks in (1, 2))
    if alone[used] > launching.most_shared(y):
        return None
    H, G = _coefficients(map, y)
    pieces, rank = [H, G, H.T, G.T], 0
    if spectrum is not None:
        A, scale, rank = spectrum.A, spectrum.root.square(), 0 if primal else len(spectrum.values)
        pieces += [A, A.T, scale, *(_normal(A, scale) if primal else _rotation(spectrum))]
    constants = torch.cat([piece.reshape(-1) for piece in pieces])
    return PackedRows(constants, size, kept, eliminated, rank, (alone, paired), primal)


def _normal(A: Tensor, scale: Tensor) -> list[Tensor]:
    """What the primal system needs of constant rows beside themselves."""
    weighted = A / scale.unsqueeze(1)
    i, j = torch.tril_indices(A.shape[1], A.shape[1], device=A.device)
    return [weighted, weighted.T, (A.T @ weighted)[i, j]]


def _rotation(spectrum: Spectrum) -> list[Tensor]:
    """What the dual system needs of rows that are eliminated."""
    right, rank = spectrum.right, len(spectrum.values)
    complete = torch.linalg.qr(right, mode="complete").Q
    basis = torch.cat([right, complete[:, rank:]], 1)
    left = spectrum.left / spectrum.root.unsqueeze(1)
    return [basis, basis.T, left, left.T, spectrum.values, right.new_zeros(len(right) - rank)]


def _coefficients(map: Map, y: Tensor) -> tuple[Tensor, Tensor]:
    """H and G (rows, n) of rows that suit."""
    H, G = zip(*(_coefficients_of(part, y) for part in map.parts), strict=True)
    return torch.cat(H), torch.cat(G)


def _coefficients_of(part: Map, y: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(part, QuadraticMap):
        return part.H, part.G
    G = part.jacobian(y)
    return torch.zeros_like(G), G


def longest(map: Map, spectrum: Spectrum | None, y: Tensor) -> float:
    """The largest squared length that a row of J has where no variable is beyond 1, or that an eliminated row has."""
    H, G = _coefficients(map, y)
    rows = 2 * H.abs() + G.abs()
    return float((rows if spectrum is None else torch.cat([rows, spectrum.A])).square().sum(1).max())


def _shared_bytes(
    source: str, size: int, kept: int, eliminated: int, y: Tensor, blocks: int, primal: bool
) -> tuple[int, ...]:
    """Shared memory of a block, as `struct Work` of rows.cuh lays it out, for 0, 1, ..., `kept` rows in use."""
    found = torch.empty(kept + 1, dtype=torch.int32, device=y.device)
    arguments = [size, kept, eliminated + kept, _threads(blocks), found]
    _load(source, y, 2, primal).launch("shared_bytes", 1, 1, 0, arguments)
    return tuple(found.tolist())


def room(rows: PackedRows, y: Tensor, blocks: int) -> int:
    """The most rows that may be in use at a time if a multiprocessor is to have so many blocks, one or two."""
    memory = (launching.most_shared(y) + _RESERVED) // blocks - _RESERVED
    return max(0, bisect_right(rows.bytes[blocks - 1], memory) - 1)


def launch(
    source: str, name: str, rows: PackedRows, like: Tensor, *arguments: nvrtc.Argument, used: int | None = None
) -> None:
    """Start a kernel for these rows, `used` of them at a time at most: one block a sample, as many as `like` has."""
    used = rows.kept if used is None else used
    blocks = 2 if used <= room(rows, like, 2) else 1
    shared = rows.bytes[blocks - 1][used]
    kernels = _load(source, like, blocks, rows.primal)
    kernels.launch(name, len(like), _threads(blocks), shared, [*rows[:5], *arguments])


def _threads(blocks: int) -> int:
    """Threads of a block if a multiprocessor is to have so many blocks."""
    return THREADS * 2 // blocks


def _load(source: str, like: Tensor, blocks: int, primal: bool) -> nvrtc.Kernels:
    return launching.load(
        source, like.dtype, like.device,
        THREADS=_threads(blocks), BLOCKS=blocks, PRIMAL=int(primal), LOST=LOST, FOUND=FOUND, CROWDED=CROWDED,
    )  # fmt: skip
