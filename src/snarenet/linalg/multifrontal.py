r"""`Multifrontal`: Cholesky factors of a batch of $\mathrm{diag}(\delta) + \sum_c k_c k_c^\top$ with one sparse pattern.

Each front (see `fronts`) is assembled from products of nonzeros and from what its children left, all samples and all
fronts of a group at once. With its pivots p and border u,

$$ A_{pp} = L L^\top, \quad M = L^{-1}, \quad Z = M A_{pu}, \quad A_{uu} - Z^\top Z \to \text{parent}. $$

The factor of a front is kept as $T = [M;\, -Z^\top M]$: a solve takes $T b_p = [y;\, \text{change of } b_u]$ on the way
up and $x_p = T^\top [y;\, x_u]$ on the way down, one product each. No operation mixes samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from snarenet.linalg.fronts import Front, Group, Tree, best_tree
from snarenet.linalg.ordering import Graph


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
class _Step:
    """What the numbers of one group need: shapes and places.

    Fronts lie one after the other in rows of `size` entries. `source` are places among everything that may be added,
    [products | diagonal | 1 | what fronts leave for their parents], `target` those in the fronts.
    """

    count: int
    pivots: int
    border: int
    source: Tensor
    target: Tensor
    left: slice
    pivot_nodes: Tensor
    border_nodes: Tensor

    @property
    def size(self) -> int:
        return self.pivots + self.border

    def to(self, device: torch.device) -> _Step:
        places = (self.source, self.target, self.pivot_nodes, self.border_nodes)
        source, target, pivots, border = (place.to(device) for place in places)
        return _Step(self.count, self.pivots, self.border, source, target, self.left, pivots, border)


class Multifrontal:
    """The pattern's part, made once: order, fronts and places."""

    def __init__(self, cliques: Cliques, tree: Tree | None = None) -> None:
        self.size = cliques.size
        self.tree = best_tree(cliques.graph()) if tree is None else tree
        first, second = cliques.pairs()
        self._first, self._second = torch.from_numpy(first), torch.from_numpy(second)
        self._steps, self._entries = _Places(self.tree, len(first)).steps(cliques.nodes[first], cliques.nodes[second])

    def factor(self, values: Tensor, diagonal: Tensor) -> Factor:
        """The factors for nonzeros (B, count) and diagonals (B, size)."""
        self._move(values.device)
        batch = len(values)
        pool = values.new_empty(batch, self._entries)
        count = len(self._first)
        torch.mul(_take(values, self._first), _take(values, self._second), out=pool[:, :count])
        pool[:, count : count + self.size] = diagonal
        pool[:, count + self.size] = 1
        info = torch.zeros(batch, dtype=torch.int32, device=values.device)
        factors = []
        for step in self._steps:
            transfer, code, left = _eliminate(step, _assemble(step, pool))
            pool[:, step.left] = left.reshape(batch, -1)
            info = torch.maximum(info, code.view(batch, step.count).amax(1))
            factors.append(transfer)
        return Factor(self._steps, factors, info)

    def _move(self, device: torch.device) -> None:
        if self._first.device != device:
            self._first, self._second = self._first.to(device), self._second.to(device)
            self._steps = [step.to(device) for step in self._steps]


@dataclass(frozen=True)
class Factor:
    """Factors of a batch; `info` (B,) is not 0 where a matrix was not positive definite."""

    steps: list[_Step]
    transfers: list[Tensor]  # of each group: (B * fronts, size, pivots)
    info: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        """The solutions (B, k, size) for right-hand sides (B, k, size)."""
        batch, width = rhs.shape[:2]
        x = torch.cat([rhs, rhs.new_zeros(batch, width, 1)], 2)  # the last place is that of padding
        halves = []
        for step, transfer in zip(self.steps, self.transfers, strict=True):
            both = transfer @ _columns(_take(x, step.pivot_nodes), step.count)
            halves.append(both[:, : step.pivots])
            if step.border:
                change = both[:, step.pivots :].view(batch, step.count, step.border, width)
                change = change.permute(0, 3, 1, 2).reshape(batch, width, -1)
                x.scatter_add_(2, step.border_nodes.expand_as(change), change)
        for step, transfer, half in reversed(list(zip(self.steps, self.transfers, halves, strict=True))):
            if step.border:
                half = torch.cat([half, _columns(_take(x, step.border_nodes), step.count)], 1)
            found = (transfer.mT @ half).view(batch, step.count, step.pivots, width)
            found = found.permute(0, 3, 1, 2).reshape(batch, width, -1)
            x.scatter_(2, step.pivot_nodes.expand_as(found), found)
        return x[..., :-1]

    @property
    def bytes(self) -> int:
        return sum(transfer.numel() * transfer.element_size() for transfer in self.transfers)


def _take(values: Tensor, places: Tensor) -> Tensor:
    """values[..., places]; `gather` is faster here than indexing."""
    return values.gather(-1, places.expand(*values.shape[:-1], -1))


def _columns(values: Tensor, count: int) -> Tensor:
    """(B, k, count * s) as matrices (B * count, s, k)."""
    batch, width, entries = values.shape
    return values.view(batch, width, count, entries // count).permute(0, 2, 3, 1).reshape(-1, entries // count, width)


def _assemble(step: _Step, pool: Tensor) -> Tensor:
    """The lower halves of a group's fronts: (B * fronts, size, size)."""
    fronts = pool.new_zeros(len(pool), step.count * step.size**2)
    fronts.scatter_add_(1, step.target.expand(len(pool), -1), _take(pool, step.source))
    return fronts.view(-1, step.size, step.size)


def _eliminate(step: _Step, fronts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """T, LAPACK's code and what is left for the parents."""
    p = step.pivots
    lower, code = torch.linalg.cholesky_ex(fronts[:, :p, :p])
    eye = torch.eye(p, dtype=fronts.dtype, device=fronts.device).expand(len(fronts), p, p)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
    if not step.border:
        return inverse, code, fronts.new_empty(len(fronts), 0)
    half = fronts[:, p:, :p] @ inverse.mT  # Z'
    left = torch.baddbmm(fronts[:, p:, p:], half, half.mT, alpha=-1)
    return torch.cat([inverse, torch.bmm(half, inverse).neg_()], 1), code, left


class _Places:
    """Turns a tree into places in memory."""

    def __init__(self, tree: Tree, products: int) -> None:
        self.tree, self.products, self.size = tree, products, len(tree.order)
        self.place = np.empty(self.size, np.int64)  # node -> place in the order
        self.place[np.asarray(tree.order, np.int64)] = np.arange(self.size)
        self.owner = np.empty(self.size, np.int64)  # place -> front that has it as a pivot
        for k, front in enumerate(tree.fronts):
            self.owner[front.pivots] = k
        self.children: list[list[int]] = [[] for _ in tree.fronts]
        for k, parent in enumerate(tree.parents):
            if parent >= 0:
                self.children[parent].append(k)

    def steps(self, first: np.ndarray, second: np.ndarray) -> tuple[list[_Step], int]:
        """The steps for products of nonzeros at nodes `first` and `second`, and how many entries the pool has."""
        rows, columns = self.place[first], self.place[second]
        rows, columns = np.maximum(rows, columns), np.minimum(rows, columns)
        diagonal = np.arange(self.size)
        self.rows, self.columns = np.concatenate([rows, self.place]), np.concatenate([columns, self.place])
        order = np.argsort(self.owner[self.columns], kind="stable")
        bounds = np.searchsorted(self.owner[self.columns][order], np.arange(len(self.tree.fronts) + 1))
        self.own = [order[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        assert len(diagonal) == self.size
        stop = self.products + self.size + 1
        self.left: dict[int, tuple[int, int]] = {}  # front -> where what it leaves begins, and the length of its rows
        steps = []
        for group in self.tree.groups:
            steps.append(self._step(group, stop))
            for slot, k in enumerate(group.fronts):
                self.left[k] = stop + slot * group.border**2, group.border
            stop += len(group.fronts) * group.border**2
        return steps, stop

    def _step(self, group: Group, start: int) -> _Step:
        source, target, pivots, border = [], [], [], []
        for slot, k in enumerate(group.fronts):
            front = self.tree.fronts[k]
            found = self._front(k, front, group)
            source.append(found[0])
            target.append(found[1] + slot * group.size**2)
            pivots.append(self._padded(front.pivots, group.pivots))
            border.append(self._padded(front.border, group.border))
        length = len(group.fronts) * group.border**2
        tensors = (torch.from_numpy(np.concatenate(places)) for places in (source, target, pivots, border))
        source, target, pivots, border = tensors
        left = slice(start, start + length)
        return _Step(len(group.fronts), group.pivots, group.border, source, target, left, pivots, border)

    def _padded(self, places: list[int], length: int) -> np.ndarray:
        nodes = np.asarray(self.tree.order, np.int64)[places] if places else np.empty(0, np.int64)
        return np.concatenate([nodes, np.full(length - len(places), self.size, np.int64)])

    def _front(self, k: int, front: Front, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """Places of what is added to one front, and where; a padded pivot gets a 1 on its diagonal."""
        local = {place: i for i, place in enumerate(front.pivots)}
        local |= {place: group.pivots + i for i, place in enumerate(front.border)}
        own = self.own[k]
        rows = np.array([local[place] for place in self.rows[own].tolist()], np.int64)
        columns = np.array([local[place] for place in self.columns[own].tolist()], np.int64)
        source, target = [own], [rows * group.size + columns]
        for child in self.children[k]:
            start, length = self.left[child]
            inside = np.array([local[place] for place in self.tree.fronts[child].border], np.int64)
            i, j = np.tril_indices(len(inside))
            source.append(start + i * length + j)
            target.append(inside[i] * group.size + inside[j])
        spare = np.arange(len(front.pivots), group.pivots)
        source.append(np.full(len(spare), self.products + self.size))
        target.append(spare * (group.size + 1))
        return np.concatenate(source), np.concatenate(target)
