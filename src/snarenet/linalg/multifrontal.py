r"""`Multifrontal`: Cholesky factors of a batch of $\mathrm{diag}(\delta) + \sum_c k_c k_c^\top$ on one sparse pattern.

Each front (see `fronts`) is assembled from products of nonzeros and from what its children left, all samples and all
fronts of a group at once. With its pivots p and border u,

$$ A_{pp} = L L^\top, \quad M = L^{-1}, \quad Z = M A_{pu}, \quad A_{uu} - Z^\top Z \to \text{parent}. $$

The factor of a front is kept as $T = [M;\, -Z^\top M]$: a solve takes $T b_p = [y;\, \text{change of } b_u]$ on the way
up and $x_p = T^\top [y;\, x_u]$ on the way down, one product each. No operation mixes samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from snarenet.linalg.fronts import Group, Tree, best_tree
from snarenet.linalg.ordering import Graph

_CHUNK = 2**17  # numbers that are made at a time: fresh memory costs more than the arithmetic


@dataclass(frozen=True)
class Cliques:
    """The vectors $k_c$: nonzero e is at `nodes[e]` of vector `vectors[e]`; no two are at the same place."""

    nodes: np.ndarray
    vectors: np.ndarray
    size: int

    def graph(self) -> Graph:
        """Which nodes share a vector."""
        graph: Graph = [set() for _ in range(self.size)]
        order = np.argsort(self.vectors, kind="stable")
        for members in np.split(self.nodes[order], np.flatnonzero(np.diff(self.vectors[order])) + 1):
            names = members.tolist()
            for node in names:
                graph[node].update(names)
        for node, others in enumerate(graph):
            others.discard(node)
        return graph

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Every two nonzeros of one vector, once, and each with itself: (first, second) as places of nonzeros."""
        order = np.argsort(self.vectors, kind="stable")
        _, starts, counts = np.unique(self.vectors[order], return_index=True, return_counts=True)
        first, second = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for count in np.unique(counts):
            i, j = np.tril_indices(count)
            members = order[starts[counts == count][:, None] + np.arange(count)]
            first.append(members[:, i].ravel())
            second.append(members[:, j].ravel())
        return np.concatenate(first), np.concatenate(second)


@dataclass(frozen=True)
class Step:
    """What the numbers of one group need: shapes and places.

    The entries `taken` of the pool, [entries of the matrix | 1 | what fronts left], are added at `target` to the fronts
    of the group, which lie one after the other; what these leave goes to `left`. A padded pivot has the 1.
    """

    count: int
    pivots: int
    border: int
    taken: Tensor
    target: Tensor
    left: slice
    pivot_nodes: Tensor
    border_nodes: Tensor

    @property
    def size(self) -> int:
        return self.pivots + self.border

    def to(self, device: torch.device) -> Step:
        return replace(
            self,
            taken=self.taken.to(device),
            target=self.target.to(device),
            pivot_nodes=self.pivot_nodes.to(device),
            border_nodes=self.border_nodes.to(device),
        )


class Multifrontal:
    """The pattern's part, made once: order, fronts and places."""

    def __init__(self, cliques: Cliques) -> None:
        self.size, self.cliques = cliques.size, cliques
        self.tree = best_tree(cliques.graph())
        first, second = cliques.pairs()
        one, other = cliques.nodes[first], cliques.nodes[second]
        codes = np.maximum(one, other) * self.size + np.minimum(one, other)
        diagonal = np.arange(self.size) * (self.size + 1)
        known, entry = np.unique(np.concatenate([diagonal, codes]), return_inverse=True)
        order = np.argsort(entry[self.size :], kind="stable")
        places = (first[order], second[order], entry[self.size :][order], entry[: self.size])
        self._first, self._second, self._entry, self._diagonal = (torch.from_numpy(place) for place in places)
        self._known = np.divmod(known, max(1, self.size))  # row and column of each entry of the lower half
        self.entries = len(known)
        self._steps, self._pool = _Places(self.tree, *self._known).steps()

    def unpadded(self, tree: Tree, order: list[int]) -> tuple[list[Step], int]:
        """A step for each front of another tree, without padding, in an order that has children before parents.

        And how many entries the pool has.
        """
        groups = [Group([k], len(tree.fronts[k].pivots), len(tree.fronts[k].border)) for k in order]
        return _Places(replace(tree, groups=groups), *self._known).steps()

    def products(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The products of two nonzeros, by the entry that each is added to, ascending: (first, second, entry).

        And (size,) the entry of each node on the diagonal.
        """
        first, second, entry, diagonal = (
            place.cpu().numpy() for place in (self._first, self._second, self._entry, self._diagonal)
        )
        return first, second, entry, diagonal

    def factor(self, values: Tensor, diagonal: Tensor) -> Factor:
        """The factors for nonzeros (count, B), the batch as the fastest axis, and diagonals (B, size)."""
        self._move(values.device)
        batch = len(diagonal)
        pool = values.new_empty(batch, self._pool)
        pool[:, : self.entries] = self._matrix(values, diagonal)
        pool[:, self.entries] = 1
        factors, codes = [], [torch.zeros(batch, 1, dtype=torch.int32, device=values.device)]
        for step in self._steps:
            transfer, code, left = _eliminate(step, _assemble(step, pool))
            pool[:, step.left] = left.reshape(batch, step.count * step.border**2)
            codes.append(code.view(batch, step.count))
            factors.append(transfer)
        return Factor(self._steps, factors, torch.cat(codes, 1).amax(1))

    def _matrix(self, values: Tensor, diagonal: Tensor) -> Tensor:
        """The lower half's entries (B, entries), in chunks that stay in a cache."""
        found = values.new_zeros(self.entries, values.shape[1])
        found[self._diagonal] = diagonal.T
        chunk = max(1, _CHUNK // max(1, values.shape[1]))
        for first, second, entry in zip(
            *(t.split(chunk) for t in (self._first, self._second, self._entry)), strict=True
        ):
            found.index_add_(0, entry, values.index_select(0, first).mul_(values.index_select(0, second)))
        return found.T

    def _move(self, device: torch.device) -> None:
        if self._first.device != device:
            places = (self._first, self._second, self._entry, self._diagonal)
            self._first, self._second, self._entry, self._diagonal = (place.to(device) for place in places)
            self._steps = [step.to(device) for step in self._steps]


@dataclass(frozen=True)
class Factor:
    """Factors of a batch; `info` (B,) is not 0 where a matrix was not positive definite."""

    steps: list[Step]
    transfers: list[Tensor]  # of each group: (B * fronts, size, pivots)
    info: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        """The solutions (B, k, size) for right-hand sides (B, k, size)."""
        batch, width = rhs.shape[:2]
        x = torch.cat([rhs, rhs.new_zeros(batch, width, 1)], 2)  # the last place is that of padding
        halves = []
        for step, transfer in zip(self.steps, self.transfers, strict=True):
            both = torch.bmm(transfer, _columns(take(x, step.pivot_nodes), step.count))
            halves.append(both[:, : step.pivots])
            if step.border:
                change = _rows(both[:, step.pivots :], batch, step.count)
                x.scatter_add_(2, step.border_nodes.expand_as(change), change)
        for step, transfer, half in reversed(list(zip(self.steps, self.transfers, halves, strict=True))):
            if step.border:
                half = torch.cat([half, _columns(take(x, step.border_nodes), step.count)], 1)
            found = _rows(torch.bmm(transfer.mT, half), batch, step.count)
            x.scatter_(2, step.pivot_nodes.expand_as(found), found)
        return x[..., :-1]

    def __getitem__(self, samples: Tensor) -> Factor:
        """The factors of some samples (their places)."""
        apart = [
            t.unflatten(0, (len(self.info), step.count)) for step, t in zip(self.steps, self.transfers, strict=True)
        ]
        return Factor(self.steps, [transfers[samples].flatten(0, 1) for transfers in apart], self.info[samples])

    def replaced(self, samples: Tensor, other: Factor) -> Factor:
        """The same with the factors of another for these samples (their places)."""
        batch, transfers = len(self.info), []
        for step, mine, new in zip(self.steps, self.transfers, other.transfers, strict=True):
            apart = mine.unflatten(0, (batch, step.count))
            transfers.append(apart.index_copy(0, samples, new.unflatten(0, (len(samples), step.count))).flatten(0, 1))
        return Factor(self.steps, transfers, self.info.index_copy(0, samples, other.info))

    @property
    def nbytes(self) -> int:
        return sum(transfer.nbytes for transfer in self.transfers)


def take(values: Tensor, places: Tensor) -> Tensor:
    """values[..., places]; `gather` is faster here than indexing."""
    return values.gather(-1, places.expand(*values.shape[:-1], -1))


def _columns(values: Tensor, count: int) -> Tensor:
    """(B, k, count * s) as matrices (B * count, s, k)."""
    batch, width, entries = values.shape
    size = entries // count
    return values.view(batch, width, count, size).permute(0, 2, 3, 1).reshape(batch * count, size, width)


def _rows(matrices: Tensor, batch: int, count: int) -> Tensor:
    """Matrices (B * count, s, k) as (B, k, count * s)."""
    _, size, width = matrices.shape
    return matrices.reshape(batch, count, size, width).permute(0, 3, 1, 2).reshape(batch, width, count * size)


def _assemble(step: Step, pool: Tensor) -> Tensor:
    """The lower halves of a group's fronts: (B * fronts, size, size)."""
    fronts = pool.new_zeros(len(pool), step.count * step.size**2)
    fronts.scatter_add_(1, step.target.expand(len(pool), -1), take(pool, step.taken))
    return fronts.view(len(pool) * step.count, step.size, step.size)


def _eliminate(step: Step, fronts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """T, LAPACK's code and what is left for the parents."""
    p = step.pivots
    lower, code = torch.linalg.cholesky_ex(fronts[:, :p, :p])
    eye = torch.eye(p, dtype=fronts.dtype, device=fronts.device).expand(len(fronts), p, p)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
    if not step.border:
        return inverse, code, fronts.new_empty(len(fronts), 0)
    half = torch.bmm(fronts[:, p:, :p], inverse.mT)  # Z'
    left = torch.baddbmm(fronts[:, p:, p:], half, half.mT, alpha=-1)
    return torch.cat([inverse, torch.bmm(half, inverse).neg_()], 1), code, left


class _Places:
    """Turns a tree and the entries of a matrix, at nodes `rows` and `columns`, into places in memory."""

    def __init__(self, tree: Tree, rows: np.ndarray, columns: np.ndarray) -> None:
        self.tree, self.entries = tree, len(rows)
        size = len(tree.order)
        place = np.empty(size, np.int64)  # node -> place in the order
        place[np.asarray(tree.order, np.int64)] = np.arange(size)
        owner = np.empty(size, np.int64)  # place -> front that has it as a pivot
        for k, front in enumerate(tree.fronts):
            owner[front.pivots] = k
        one, other = place[rows], place[columns]
        self.rows, self.columns = np.maximum(one, other), np.minimum(one, other)
        order = np.argsort(owner[self.columns], kind="stable")
        bounds = np.searchsorted(owner[self.columns][order], np.arange(len(tree.fronts) + 1))
        self.own = [order[a:b] for a, b in pairwise(bounds.tolist())]  # front -> its entries
        self.children: list[list[int]] = [[] for _ in tree.fronts]
        for k, parent in enumerate(tree.parents):
            if parent >= 0:
                self.children[parent].append(k)
        self.left: dict[int, tuple[int, int]] = {}  # front -> where what it leaves begins, and the length of its rows

    def steps(self) -> tuple[list[Step], int]:
        """The steps, and how many entries the pool has."""
        stop, steps = self.entries + 1, []
        for group in self.tree.groups:
            steps.append(self._step(group, stop))
            for slot, k in enumerate(group.fronts):
                self.left[k] = stop + slot * group.border**2, group.border
            stop += len(group.fronts) * group.border**2
        return steps, stop

    def _step(self, group: Group, start: int) -> Step:
        fronts = [self.tree.fronts[k] for k in group.fronts]
        places = (self._front(k, group, slot * group.size**2) for slot, k in enumerate(group.fronts))
        taken, target = zip(*places, strict=True)
        return Step(
            len(fronts),
            group.pivots,
            group.border,
            taken=torch.from_numpy(np.concatenate(taken)),
            target=torch.from_numpy(np.concatenate(target)),
            left=slice(start, start + len(fronts) * group.border**2),
            pivot_nodes=torch.from_numpy(np.concatenate([self._nodes(f.pivots, group.pivots) for f in fronts])),
            border_nodes=torch.from_numpy(np.concatenate([self._nodes(f.border, group.border) for f in fronts])),
        )

    def _nodes(self, places: list[int], length: int) -> np.ndarray:
        """The nodes at these places, filled up with one that does not exist."""
        nodes = [self.tree.order[place] for place in places]
        return np.array(nodes + [len(self.tree.order)] * (length - len(nodes)), np.int64)

    def _front(self, k: int, group: Group, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Which entries of the pool go into a front, and where."""
        front, size = self.tree.fronts[k], group.size
        local = {place: i for i, place in enumerate(front.pivots)}
        local |= {place: group.pivots + i for i, place in enumerate(front.border)}
        rows = np.array([local[place] for place in self.rows[self.own[k]].tolist()], np.int64)
        columns = np.array([local[place] for place in self.columns[self.own[k]].tolist()], np.int64)
        spare = np.arange(len(front.pivots), group.pivots)
        taken = [self.own[k], np.full(len(spare), self.entries)]
        target = [rows * size + columns, spare * (size + 1)]
        for child in self.children[k]:
            begin, length = self.left[child]
            inside = np.array([local[place] for place in self.tree.fronts[child].border], np.int64)
            i, j = np.tril_indices(len(inside))
            taken.append(begin + i * length + j)
            target.append(inside[i] * size + inside[j])
        return np.concatenate(taken), start + np.concatenate(target)
