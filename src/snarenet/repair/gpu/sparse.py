"""`KernelSystems`: sparse systems of a batch by kernels, a block of threads a sample; `sparse.cuh` is their other half.

They solve what `linalg/sparse.py` solves, in the same form, with a tree of fronts of their own: a block waits for
memory more than it computes, so small fronts side by side are better than few large ones. A factor is one launch, and
so is a solution with all its refinements: each sample refines as often as it needs, and nobody waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints.sparsity import Pattern
from snarenet.linalg import Estimate, SparseFactor, SparseNormal, SparseSystems, sparse_normal
from snarenet.linalg.fronts import Front, Tree, heights, trees
from snarenet.linalg.multifrontal import Step
from snarenet.linalg.sparse import REFINEMENTS, ROUNDING
from snarenet.repair.gpu import launching, nvrtc
from snarenet.repair.gpu.nvrtc import Argument

THREADS = 256  # of a block, and twice as many where factors are large
WARP = 32  # threads that need no barrier to wait for each other
_MERGING = (0.0, 0.03, 0.1, 0.3, 1.0)  # what a front may be taken to cost when fronts are merged: little, beside a CPU
_TEAMS = {32: 1, 64: 4}  # the most nodes of a front, and how many warps take it at least; larger ones are for a block
_LARGE = 50_000  # entries of a large factor
_SHARING = 8  # the most threads that share a sum
_RESIDENT = 2, 4  # blocks that a multiprocessor has registers for: few samples get more each, of many some wait in turn
_INSIDE = {"FRONTS": 1, "SOLVING": 2, "FACTOR": 4, "TABLES": 8, "VECTORS": 16}  # what may be in shared memory
_FRONTS, _SOLVING, _FACTOR, _TABLES, _VECTORS = _INSIDE.values()
_WORK = 768  # bytes of what all threads share, at most
_RESERVED = 1024  # bytes of shared memory that every block has for itself
_LEAST, MOST = 4.0, 1.0  # shift of a singular matrix, in roundings times its size; and the share of it to give up at


class KernelSystems:
    """The pattern's part, made once.

    Args:
        normal: the analysed pattern; no row or column is set aside.
    """

    def __init__(self, normal: SparseNormal) -> None:
        self.normal = normal
        core, (rows, columns) = normal.gram.core, normal.shape
        tree = min(trees(core.cliques.graph(), _MERGING), key=_latency)
        self.kept = sum(len(front.pivots) * _size(front) for front in tree.fronts)
        self.threads = THREADS * (2 if self.kept > _LARGE else 1)
        stages = [stage for level in _levels(tree) for stage in _staged(tree, level, self.threads // WARP)]
        steps, pooled = core.unpadded(tree, [k for stage in stages for k in stage.fronts])
        fronts, slots = _fronts(steps, core.size)
        at_a_time = [(self.threads // WARP // stage.warps, stage.largest) for stage in stages]  # teams, nodes
        self._at_work = max((teams * _front(largest) for teams, largest in at_a_time), default=0)
        self._at_hand = max((teams * largest for teams, largest in at_a_time), default=0)
        self._making, self._solving, self._vectors = pooled + len(normal.row), 2 * core.size + slots, 4 * rows + columns
        row, col = normal.row.cpu().numpy(), normal.col.cpu().numpy()
        assert (np.diff(row) >= 0).all(), "nonzeros come row by row"
        column = np.argsort(-np.bincount(col, minlength=columns), kind="stable")  # neighbours do not wait for others
        rank = np.argsort(column)[col]
        by_column, (tables, others) = np.argsort(rank, kind="stable"), fronts
        numbers = [normal.form == "primal", rows, columns, len(row), core.size, core.entries, pooled, self.kept]
        numbers += [len(stages), self._at_hand, slots]
        table = _table(stages)
        arrays = [row, col, _starts(row, rows), column, _starts(rank, columns), by_column, row[by_column]]
        arrays += [*_products(*core.products(), core.entries), table, *tables, *others]
        self._tables = sum(map(len, tables)) + len(table)
        self._plan, self._rows = _packed(numbers, arrays), len(numbers) + len(arrays)
        self._on: dict[torch.device, Tensor] = {}

    @property
    def estimate(self) -> Estimate:
        return self.normal.estimate

    @property
    def exact(self) -> SparseSystems | None:
        return self if self.normal.form == "dual" else self._dual

    @cached_property
    def _dual(self) -> SparseSystems | None:
        dual = self.normal.exact
        apart = dual is not None and dual.gram.rank > 0  # rows or columns, which is for operations of torch
        return dual if dual is None or apart else KernelSystems(dual)

    def factor(
        self, values: Tensor, damping: Tensor, inverse_weights: Tensor | None = None, active: Tensor | None = None
    ) -> KernelFactor:
        """The factors of a batch; see `SparseNormal`."""
        if active is not None:
            damping = torch.where(active, damping, 1.0)
            values = torch.where(active[:, self.rows_of(values.device)], values, 0.0)
        values, damping = values.contiguous(), damping.contiguous()
        factor = self.empty(values, damping, None if inverse_weights is None else inverse_weights.contiguous())
        factor.launch("factor", factor.info, self.shift(values), MOST, making=True, using=False)
        return factor

    def empty(self, values: Tensor, damping: Tensor, inverse_weights: Tensor | None) -> KernelFactor:
        """Factors that are yet to be made."""
        batch = len(values)
        info = torch.empty(batch, dtype=torch.int32, device=values.device)
        kept, length = values.new_empty(batch, self.kept), values.new_empty(batch)
        return KernelFactor(self, values, damping, inverse_weights, kept, length, info)

    def inside(self, like: Tensor, making: bool, using: bool) -> int:
        """What a block that makes factors, uses them or both has in shared memory, the most useful first.

        Fronts are there if they fit at all, the others if they leave room for the neighbours of a block.
        """
        most = launching.most_shared(like)
        found = _FRONTS if making and self.shared(like, _FRONTS) <= most else 0
        for piece in (_SOLVING, _FACTOR, _TABLES, _VECTORS) if using else (_TABLES,):
            fits = max(most // _resident(like, self.threads) - _RESERVED, self.shared(like, found))
            if self.shared(like, found | piece) <= fits and (piece != _VECTORS or found & _SOLVING):
                found |= piece
        return found

    def shared(self, like: Tensor, inside: int) -> int:
        """Bytes of shared memory that a block needs with this `inside`."""
        size = like.element_size()
        solving = self._solving * bool(inside & _SOLVING) + self._vectors * bool(inside & _VECTORS)
        copied = -(-4 * self._tables // size) * bool(inside & _TABLES) + self.kept * bool(inside & _FACTOR)
        at_work = max(self._at_work * (inside & _FRONTS), solving)
        return _WORK + (self.threads + self._at_hand + copied + at_work) * size

    def room(self, inside: int, making: bool) -> int:
        """Numbers of scratch that a sample needs."""
        made = self._making + self._at_work * (not inside & _FRONTS) if making else 0
        return max(made, 0 if inside & _VECTORS else self._solving + self._vectors)

    def shift(self, like: Tensor) -> float:
        """The least shift of a singular matrix, as a share of its mean diagonal."""
        return _LEAST * torch.finfo(like.dtype).eps * self.normal.gram.size

    @property
    def refinements(self) -> int:
        return REFINEMENTS if self.normal.refines else 0

    def plan(self, device: torch.device) -> Tensor:
        """All places, for the kernels."""
        if device not in self._on:
            self._on[device] = self._plan.to(device)
        return self._on[device]

    def rows_of(self, device: torch.device) -> Tensor:
        """(nnz,) the row of each nonzero."""
        return self.plan(device)[self._rows : self._rows + len(self.normal.row)]


@lru_cache(maxsize=64)
def kernel_systems(pattern: Pattern) -> KernelSystems:
    """What follows from the pattern of J, computed once."""
    return KernelSystems(sparse_normal(pattern))


@dataclass(frozen=True)
class KernelFactor(SparseFactor):
    """Factors of a batch by kernels."""

    systems: KernelSystems
    values: Tensor  # (B, nnz) of rows in use, else 0
    damping: Tensor
    inverse_weights: Tensor | None
    kept: Tensor  # (B, entries)
    length: Tensor  # (B,) of a typical row, in the metric
    info: Tensor  # (B,) 0 where there is a factor

    @property
    def estimate(self) -> Estimate:
        return self.systems.estimate

    def describe(self) -> str:
        return f"{self.systems.kept:,} entries, a block of threads a sample"

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + self.values.nbytes

    def __getitem__(self, samples: Tensor) -> KernelFactor:
        weights = None if self.inverse_weights is None else self.inverse_weights[samples]
        values, damping, kept, length = (t[samples] for t in (self.values, self.damping, self.kept, self.length))
        return replace(
            self, values=values, damping=damping, inverse_weights=weights, kept=kept, length=length,
            info=self.info[samples],
        )  # fmt: skip

    def replaced(self, samples: Tensor, other: KernelFactor) -> KernelFactor:
        names = ("values", "damping", "inverse_weights", "kept", "length", "info")
        both = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return replace(self, **{name: a if a is None else a.index_copy(0, samples, b) for name, (a, b) in both.items()})

    def solve(self, rhs: Tensor) -> Tensor:
        found = torch.empty_like(rhs, memory_format=torch.contiguous_format)
        self.launch("solve", rhs.contiguous(), found, self.systems.refinements, rounding(rhs))
        return found

    def push(self, v: Tensor) -> Tensor:
        return self._product("push", v, self.systems.normal.shape[0])

    def pull(self, w: Tensor) -> Tensor:
        return self._product("pull", w, self.systems.normal.shape[1])

    def _product(self, name: str, v: Tensor, size: int) -> Tensor:
        found = v.new_empty(len(v), size)
        plan = self.systems.plan(v.device)
        start("sparse", name, self.values, 0, plan, self.values, v.contiguous(), found)
        return found

    def launch(
        self, name: str, *arguments: Argument, making: bool = False, using: bool = True, source: str = "sparse"
    ) -> None:
        """Start a kernel on these systems, which makes their factors, uses them or both.

        `arguments` are those after the systems' own and their scratch.
        """
        systems, values, weights = self.systems, self.values, self.inverse_weights
        inside = systems.inside(values, making, using)
        room = systems.room(inside, making)
        start(
            source, name, values, systems.shared(values, inside), systems.plan(values.device), values, self.damping,
            self.damping if weights is None else weights, int(weights is not None), self.kept, self.length,
            values.new_empty(len(values), room), room, inside, *arguments, threads=systems.threads,
        )  # fmt: skip


def rounding(like: Tensor) -> float:
    """The backward error that a solution may have."""
    return ROUNDING * torch.finfo(like.dtype).eps


def start(source: str, name: str, like: Tensor, shared: int, *arguments: Argument, threads: int | None = None) -> None:
    """Start a kernel, a block of threads for every sample of `like` (B, ...)."""
    if len(like):
        loaded(source, like, threads or THREADS).launch(name, len(like), threads or THREADS, shared, arguments)


def loaded(source: str, like: Tensor, threads: int) -> nvrtc.Kernels:
    """The kernels of a source file for blocks of so many threads."""
    numbers = _INSIDE | {"BLOCK": threads, "RESIDENT": _resident(like, threads)}
    numbers |= {"WARP": WARP, "SHARING": _SHARING, "WORK": _WORK}
    return launching.load(source, like.dtype, like.device, **numbers)


def _resident(like: Tensor, threads: int) -> int:
    """Blocks that a multiprocessor works on at a time, with a block for every sample of `like` (B, ...)."""
    few, many = (max(1, blocks * THREADS // threads) for blocks in _RESIDENT)
    return few if len(like) <= few * launching.multiprocessors(like) else many


def _products(
    first: np.ndarray, second: np.ndarray, entry: np.ndarray, diagonal: np.ndarray, entries: int
) -> tuple[np.ndarray, ...]:
    """`entry` to `node`: entries with the same number of products are neighbours, so that nobody waits for others."""
    counts, node = np.bincount(entry, minlength=entries), np.full(entries, -1)
    node[diagonal] = np.arange(len(diagonal))
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(entries, np.int64)
    rank[order] = np.arange(entries)
    moved = np.argsort(rank[entry], kind="stable")
    return order, _starts(rank[entry], entries), first[moved], second[moved], node[order]


def _starts(index: np.ndarray, size: int) -> np.ndarray:
    """(size + 1,) where the lines begin, of entries that are sorted by line, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.bincount(index, minlength=size))])


def _front(size: int) -> int:
    """Numbers of a front with four more columns."""
    return size**2 + 4 * size


def _size(front: Front) -> int:
    return len(front.pivots) + len(front.border)


class _Stage(NamedTuple):
    """Fronts of a level that teams of so many warps take side by side, the largest ones first."""

    fronts: list[int]
    warps: int
    largest: int  # nodes of a front


def _levels(tree: Tree) -> list[list[int]]:
    """The fronts of each level, the largest ones first."""
    found: list[list[int]] = [[] for _ in range(tree.levels)]
    for k, height in enumerate(heights(tree.parents)):
        found[height].append(k)
    return [sorted(level, key=lambda k: -_size(tree.fronts[k])) for level in found]


def _staged(tree: Tree, level: list[int], warps: int) -> list[_Stage]:
    """The stages of a level: one for each size of teams; where there are few fronts, teams are larger."""
    sizes = [_size(tree.fronts[k]) for k in level]
    needed = [min((team for most, team in _TEAMS.items() if size <= most), default=warps) for size in sizes]
    if _shared_by(len(level), warps) >= needed[0]:
        return [_Stage(level, _shared_by(len(level), warps), sizes[0])]
    found = []
    for team in sorted(set(needed), reverse=True):
        chosen = [i for i, other in enumerate(needed) if other == team]
        most = max(min(team, warps), _shared_by(len(chosen), warps))
        found.append(_Stage([level[i] for i in chosen], most, sizes[chosen[0]]))
    return found


def _table(stages: list[_Stage]) -> np.ndarray:
    """The first front of each stage, its warps and nodes; and the end."""
    numbers, first = list[int](), 0
    for fronts, warps, largest in stages:
        numbers += [first, warps, largest]
        first += len(fronts)
    return np.array([*numbers, first])


def _shared_by(count: int, warps: int) -> int:
    """Warps that each of so many fronts may have, if all of them are taken at the same time: a power of 2, or all."""
    return warps if count == 1 else 2 ** max(0, (warps // count).bit_length() - 1)


def _latency(tree: Tree) -> float:
    """Microseconds that a block takes for one factor, roughly: it waits for its memory, so stages and pivots count."""
    found, warps = 0.0, 256 // 32
    for level in _levels(tree):
        for chosen, team, _ in _staged(tree, level, warps):
            fronts, teams = [tree.fronts[k] for k in chosen], warps // team
            each = [4 + len(front.pivots) * (0.2 + 2.5e-3 * _size(front) ** 2 / team) for front in fronts]
            found += 1 + sum(max(each[first : first + teams]) for first in range(0, len(each), teams))
    return found


def _fronts(steps: list[Step], size: int) -> tuple[tuple[list[np.ndarray], list[np.ndarray]], int]:
    """The arrays from `front` on: a front's numbers, its nodes, the slots of each node; and what is added where.

    And how many slots there are.
    """
    fronts, nodes, rounds, targets, sources, borders = [], [], [0], [], [], []
    pivot = node = factor = slot = 0
    for step in steps:
        taken, places = step.taken.cpu().numpy(), step.target.cpu().numpy()
        order = np.argsort(places, kind="stable")
        taken, places = taken[order], places[order]
        turn = np.arange(len(places)) - np.searchsorted(places, places)  # how many came to its place before
        turns = np.bincount(turn)
        begin = pivot, node, len(rounds) - 1, len(turns), factor, step.left.start, slot
        fronts.append([step.pivots, step.border, *begin])
        borders.append(step.border_nodes.cpu().numpy())
        nodes += [step.pivot_nodes.cpu().numpy(), borders[-1]]
        order = np.argsort(turn, kind="stable")
        targets.append(places[order])
        sources.append(taken[order])
        rounds += [rounds[-1] + int(count) for count in np.cumsum(turns)]
        pivot, node = pivot + step.pivots, node + step.size
        factor, slot = factor + step.size * step.pivots, slot + step.border
    of, nodes, targets, sources = (
        np.concatenate([np.empty(0, np.int64), *parts]) for parts in (borders, nodes, targets, sources)
    )
    numbers = np.array(fronts, np.int64).reshape(-1)
    tables = [numbers, nodes, _starts(of, size), np.argsort(of, kind="stable")]  # `of`: the node of each slot
    return (tables, [np.array(rounds), targets, sources]), slot


def _packed(numbers: list[int], arrays: list[np.ndarray]) -> Tensor:
    """Numbers, the places of the arrays and the arrays, one after the other."""
    ends = np.cumsum([len(numbers) + len(arrays), *(len(array) for array in arrays)])
    return torch.from_numpy(np.concatenate([numbers, ends[:-1], *arrays]).astype(np.int32))
