"""Supernodes of a sparse Cholesky factor: which pivots are eliminated together, in which dense fronts, level by level.

A *front* is a dense symmetric matrix on its pivots and on the later nodes (its *border*) that they touch. Eliminating
the pivots leaves a matrix on the border, which is added to the front of the *parent*: that of the first border node.
Fronts on one level of the tree do not know each other and are factored together, padded to one size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snarenet.linalg.ordering import Graph, minimum_degree, nested_dissection

# Times in microseconds, fitted on one core of an AMD EPYC in float64; only ratios matter.
_CALL = 100.0  # of one group of fronts in a batch, whatever their number: its dozen torch operations
_FRONT = 0.3  # of one front: a call of LAPACK
_ENTRY = 2.5e-3  # of one entry of a front: assembled and copied
_FLOP = 0.1e-3  # of one multiplication and addition
_PRODUCT = 4e-3  # of one product of two nonzeros, added to its place
_BATCH = 32  # samples that a call's time is shared by
_MERGE = (0.3, 1.0, 3.0, 10.0, 30.0)  # what a front is taken to cost when fronts are merged: several are tried


@dataclass
class Front:
    """The nodes of one front, as places in the elimination order, ascending."""

    pivots: list[int]
    border: list[int]


@dataclass(frozen=True)
class Group:
    """Fronts of one level that are padded to `pivots` and `border` nodes and factored by one call."""

    fronts: list[int]
    pivots: int
    border: int

    @property
    def size(self) -> int:
        return self.pivots + self.border


@dataclass(frozen=True)
class Tree:
    """An elimination order (place -> node), its fronts with their parents (-1: none), grouped level by level."""

    order: list[int]
    fronts: list[Front]
    parents: list[int]
    groups: list[Group]
    cost: float  # microseconds a sample, estimated
    levels: int

    @property
    def entries(self) -> int:
        """Entries of the factor, with those that padding adds."""
        return sum(len(group.fronts) * group.size * group.pivots for group in self.groups)


def front_cost(pivots: int, border: int, front: float = _FRONT) -> float:
    """Microseconds to assemble, factor and solve with one front."""
    size = pivots + border
    flops = pivots**3 / 3 + pivots**2 * (size + border) + pivots * border**2
    return front + _ENTRY * size**2 + _FLOP * flops


def gram_cost(products: int) -> float:
    """Microseconds for so many products of two nonzeros."""
    return _PRODUCT * products


def dense_cost(size: int, length: int) -> float:
    """Microseconds for one dense matrix: K K' with K (size, length), its factor and a solve."""
    return _CALL / _BATCH / 4 + 4e-3 * size**2 + _FLOP * size**2 * (size / 9 + 0.4 * length)


def best_tree(graph: Graph) -> Tree:
    """The cheapest tree by the estimate, among two orders and several degrees of merging."""
    return _topped(min(trees(graph), key=lambda tree: tree.cost))


def trees(graph: Graph, merging: Sequence[float] = _MERGE) -> list[Tree]:
    """Trees by two orders and several degrees of merging: what a front is taken to cost in itself, in microseconds."""
    found: list[Tree] = []
    orders: tuple[Callable[[Graph], list[int]], ...] = (minimum_degree, nested_dissection)
    for order in (find(graph) for find in orders):
        fronts, parents = _supernodes(graph, order)
        found += [_grouped(order, *_merged(fronts, parents, penalty)) for penalty in merging]
    return found


def _supernodes(graph: Graph, order: list[int]) -> tuple[list[Front], list[int]]:
    """Chains of columns of the factor with the same structure below, each a front; children before parents."""
    place = {node: k for k, node in enumerate(order)}
    below: list[set[int]] = [set() for _ in order]
    children = [0] * len(order)
    owner, fronts = [0] * len(order), list[Front]()
    for k, node in enumerate(order):
        below[k].update(p for other in graph[node] if (p := place[other]) > k)
        if below[k]:
            parent = min(below[k])
            below[parent] |= below[k] - {parent}
            children[parent] += 1
    for k in range(len(order)):
        last = fronts[-1] if fronts else None
        if last and k in below[k - 1] and children[k] == 1 and len(below[k - 1]) == len(below[k]) + 1:
            last.pivots.append(k)
        else:
            fronts.append(Front([k], []))
        owner[k] = len(fronts) - 1
    for front in fronts:
        front.border = sorted(below[front.pivots[-1]])
    return fronts, [owner[front.border[0]] if front.border else -1 for front in fronts]


def _merged(fronts: list[Front], parents: list[int], penalty: float) -> tuple[list[Front], list[int]]:
    """Children merged into their parents as long as that is cheaper, with `penalty` microseconds for a front."""
    pivots = [len(front.pivots) for front in fronts]
    into = list(range(len(fronts)))
    offspring: list[list[int]] = [[] for _ in fronts]
    for k, front in enumerate(fronts):
        border = len(front.border)
        offspring[k].sort(key=lambda child: -(pivots[child] + len(fronts[child].border)))
        for child in offspring[k]:
            both = front_cost(pivots[k] + pivots[child], border, penalty)
            apart = front_cost(pivots[k], border, penalty)
            if both <= apart + front_cost(pivots[child], len(fronts[child].border), penalty):
                pivots[k] += pivots[child]
                into[child] = k
        if parents[k] >= 0:
            offspring[parents[k]].append(k)
    return _collected(fronts, parents, into)


def _collected(fronts: list[Front], parents: list[int], into: list[int]) -> tuple[list[Front], list[int]]:
    """The fronts after each was merged into the later one `into` names, itself for those that stay."""
    for k in reversed(range(len(fronts))):
        into[k] = into[into[k]]
    kept = [k for k in range(len(fronts)) if into[k] == k]
    name = {k: new for new, k in enumerate(kept)}
    found = [Front([], fronts[k].border) for k in kept]
    for k, front in enumerate(fronts):
        found[name[into[k]]].pivots.extend(front.pivots)
    for front in found:
        front.pivots.sort()
    return found, [name[into[parents[k]]] if parents[k] >= 0 else -1 for k in kept]


def _grouped(order: list[int], fronts: list[Front], parents: list[int]) -> Tree:
    levels_of = heights(parents)
    levels = max(levels_of, default=-1) + 1
    members: list[list[int]] = [[] for _ in range(levels)]
    for k, height in enumerate(levels_of):
        members[height].append(k)
    groups, cost = [], 0.0
    for level in members:
        found, price = _split(fronts, level)
        groups += found
        cost += price
    return Tree(order, fronts, parents, groups, cost, levels)


def heights(parents: list[int]) -> list[int]:
    """The level of each front: 0 without children, else one more than the highest of them."""
    found = [0] * len(parents)
    for k, parent in enumerate(parents):
        if parent >= 0:
            found[parent] = max(found[parent], found[k] + 1)
    return found


def _split(fronts: list[Front], level: list[int]) -> tuple[list[Group], float]:
    """One level's fronts by size, cut where padding would cost more than one call more."""
    level = sorted(level, key=lambda k: (len(fronts[k].pivots) + len(fronts[k].border), len(fronts[k].pivots)))
    kinds: list[list[int]] = []
    for k in level:  # fronts of one size stay together
        if kinds and _size(fronts[kinds[-1][0]]) == _size(fronts[k]):
            kinds[-1].append(k)
        else:
            kinds.append([k])
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first so many kinds: cost, and where the last group begins
    for stop in range(1, len(kinds) + 1):
        pivots = border = count = 0
        options = []
        for start in reversed(range(stop)):
            p, u = _size(fronts[kinds[start][0]])
            pivots, border, count = max(pivots, p), max(border, u), count + len(kinds[start])
            options.append((best[start][0] + _CALL / _BATCH + count * front_cost(pivots, border), start))
        best.append(min(options))
    groups, stop = [], len(kinds)
    while stop:
        start = best[stop][1]
        chosen = [k for kind in kinds[start:stop] for k in kind]
        sizes = [_size(fronts[k]) for k in chosen]
        groups.append(Group(chosen, max(p for p, _ in sizes), max(u for _, u in sizes)))
        stop = start
    return groups, best[-1][0]


def _size(front: Front) -> tuple[int, int]:
    return len(front.pivots), len(front.border)


def _topped(tree: Tree) -> Tree:
    """The levels at the top, which have few fronts, merged into the roots as long as that is cheaper."""
    best = tree
    for level in reversed(range(tree.levels - 1)):
        levels, into = heights(tree.parents), list(range(len(tree.fronts)))
        for k, parent in enumerate(tree.parents):
            if levels[k] >= level and parent >= 0:
                into[k] = parent
        other = _grouped(tree.order, *_collected(tree.fronts, tree.parents, into))
        if other.cost < best.cost:
            best = other
        elif other.cost > 2 * best.cost:
            break
    return best
