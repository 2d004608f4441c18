"""`KernelSystems`: sparse systems of a batch by kernels, a block of threads a sample; `sparse.cu` is their other half.

They solve what `linalg/sparse.py` solves, in the same form, by the same fronts. A factor is one launch, and so is a
solution with all its refinements: each sample refines as often as it needs, and nobody waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints.sparsity import Pattern
from snarenet.linalg import Estimate, SparseFactor, SparseNormal, sparse_normal
from snarenet.linalg.sparse import REFINEMENTS, ROUNDING
from snarenet.repair.gpu import launching
from snarenet.repair.gpu.nvrtc import Argument

THREADS = 256  # of a block
_NUMBERS = 10  # at the head of a plan, before the places of its arrays
_LEAST, _MOST = 4.0, 1.0  # shift of a singular matrix, in roundings times its size; and the share of it to give up at


class KernelSystems:
    """The pattern's part, made once.

    Args:
        normal: the analysed pattern; no row or column is set aside.
    """

    def __init__(self, normal: SparseNormal) -> None:
        self.normal = normal
        core, (rows, columns) = normal.gram.core, normal.shape
        steps, pooled = core.unpadded()
        self.largest = max((step.size for step in steps), default=0)
        self.kept = sum(step.size * step.pivots for step in steps)
        self.scratch = pooled + len(normal.row)
        self.room = 4 * rows + columns + 2 * core.size
        first, second, entry, diagonal = core.products()
        node = np.full(core.entries, -1)
        node[diagonal] = np.arange(core.size)
        row, col = normal.row.cpu().numpy(), normal.col.cpu().numpy()
        assert (np.diff(row) >= 0).all(), "nonzeros come row by row"
        numbers = [normal.form == "primal", rows, columns, len(row), core.size, len(node), pooled]
        arrays = [row, col, _starts(row, rows), _starts(col, columns), np.argsort(col, kind="stable")]
        arrays += [_starts(entry, len(node)), first, second, node, *_fronts(steps)]
        self._plan = _packed([*numbers, self.kept, len(steps), self.largest], arrays)
        self._on: dict[torch.device, Tensor] = {}

    @property
    def estimate(self) -> Estimate:
        return self.normal.estimate

    def factor(
        self, values: Tensor, damping: Tensor, inverse_weights: Tensor | None = None, active: Tensor | None = None
    ) -> KernelFactor:
        """The factors of a batch; see `SparseNormal`."""
        if active is not None:
            damping = torch.where(active, damping, 1.0)
            values = torch.where(active[:, self.rows_of(values.device)], values, 0.0)
        values, damping = values.contiguous(), damping.contiguous()
        weights = None if inverse_weights is None else inverse_weights.contiguous()
        batch, real = len(values), values.element_size()
        kept, length = values.new_empty(batch, self.kept), values.new_empty(batch)
        info = torch.empty(batch, dtype=torch.int32, device=values.device)
        beside = THREADS + 2 * self.largest
        inside = (beside + self.largest**2) * real <= launching.most_shared(values)
        front = self.largest**2
        scratch = values.new_empty(batch, self.scratch + (0 if inside else front))
        factor = KernelFactor(self, values, damping, weights, kept, length, info)
        shift = _LEAST * torch.finfo(values.dtype).eps * self.normal.gram.size
        factor.launch(
            "factor", (beside + front * inside) * real, scratch, int(inside), kept, length, info, shift, _MOST
        )  # fmt: skip
        return factor

    def plan(self, device: torch.device) -> Tensor:
        """All places, for the kernels."""
        if device not in self._on:
            self._on[device] = self._plan.to(device)
        return self._on[device]

    def rows_of(self, device: torch.device) -> Tensor:
        """(nnz,) the row of each nonzero."""
        start = _NUMBERS + 14
        return self.plan(device)[start : start + len(self.normal.row)]


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

    def solve(self, rhs: Tensor) -> Tensor:
        systems, rhs = self.systems, rhs.contiguous()
        found, scratch = torch.empty_like(rhs), rhs.new_empty(len(rhs), systems.room)
        rounding = ROUNDING * torch.finfo(rhs.dtype).eps
        shared = (THREADS + systems.largest) * rhs.element_size()
        refinements = REFINEMENTS if systems.normal.refines else 0
        self.launch("solve", shared, self.kept, self.length, rhs, found, scratch, refinements, rounding)
        return found

    def push(self, v: Tensor) -> Tensor:
        return self._product("push", v, self.systems.normal.shape[0])

    def pull(self, w: Tensor) -> Tensor:
        return self._product("pull", w, self.systems.normal.shape[1])

    def _product(self, name: str, v: Tensor, size: int) -> Tensor:
        found = v.new_empty(len(v), size)
        plan = self.systems.plan(v.device)
        _launch(name, self.values, 0, plan, self.values, v.contiguous(), found)
        return found

    def launch(self, name: str, shared: int, *arguments: Argument) -> None:
        """Start a kernel on these systems; `arguments` are those after the systems' own."""
        weighted = self.inverse_weights is not None
        weights = self.inverse_weights if self.inverse_weights is not None else self.damping  # which is not read then
        plan = self.systems.plan(self.values.device)
        _launch(name, self.values, shared, plan, self.values, self.damping, weights, int(weighted), *arguments)


def _launch(name: str, like: Tensor, shared: int, *arguments: Argument) -> None:
    """Start a kernel, a block for every sample of `like` (B, ...)."""
    if len(like):
        launching.load("sparse", like.dtype, like.device).launch(name, len(like), THREADS, shared, arguments)


def _starts(index: np.ndarray, size: int) -> np.ndarray:
    """(size + 1,) where the lines begin, of entries that are sorted by line, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(np.bincount(index, minlength=size))])


def _fronts(steps: list) -> list[np.ndarray]:
    """The arrays from `front` on: a front's numbers, its nodes, and what is added where."""
    fronts, nodes, targets, starts, sources = [], [], [], [np.zeros(1, np.int64)], []
    pivot = node = target = source = factor = 0
    for step in steps:
        taken, places = step.taken.cpu().numpy(), step.target.cpu().numpy()
        order = np.argsort(places, kind="stable")
        distinct, counts = np.unique(places, return_counts=True)
        fronts.append([step.pivots, step.border, pivot, node, target, len(distinct), factor, step.left.start])
        nodes += [step.pivot_nodes.cpu().numpy(), step.border_nodes.cpu().numpy()]
        targets.append(distinct)
        starts.append(source + np.cumsum(counts))
        sources.append(taken[order])
        pivot, node, target = pivot + step.pivots, node + step.size, target + len(distinct)
        source, factor = source + len(taken), factor + step.size * step.pivots
    empty = [np.empty(0, np.int64)]
    joined = (np.concatenate(empty + parts) for parts in (nodes, targets, starts, sources))
    return [np.array(fronts, np.int64).reshape(-1), *joined]


def _packed(numbers: list[int], arrays: list[np.ndarray]) -> Tensor:
    """Numbers, the places of the arrays and the arrays, one after the other."""
    ends = np.cumsum([len(numbers) + len(arrays), *(len(array) for array in arrays)])
    return torch.from_numpy(np.concatenate([numbers, ends[:-1], *arrays]).astype(np.int32))
