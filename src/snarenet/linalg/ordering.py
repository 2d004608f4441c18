"""Elimination orders of a sparse symmetric matrix: minimum degree, and nested dissection for shallow trees.

A graph is a list of sets: the neighbours of each node, without itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

Graph = list[set[int]]

_DOMAIN = 24  # nodes up to which nested dissection cuts no further


def minimum_degree(graph: Graph) -> list[int]:
    """The node with the fewest neighbours first, its neighbours joined to each other, and so on: little fill.

    Joined neighbours are kept as one set per eliminated node (a quotient graph), never as edges, and a degree is the
    bound of the approximate minimum degree method: what two sets share outside the last front is counted twice.
    """
    direct = [set(neighbours) for neighbours in graph]
    cliques: list[set[int]] = [set() for _ in graph]  # the eliminated nodes whose sets a node is in
    members: dict[int, set[int]] = {}
    degree = [len(neighbours) for neighbours in graph]
    queue = [(count, node) for node, count in enumerate(degree)]
    heapq.heapify(queue)
    order: list[int] = []
    while queue:
        count, node = heapq.heappop(queue)
        if count != degree[node]:
            continue  # an old entry
        if count >= len(graph) - len(order) - 1:  # all that are left are neighbours of each other
            return order + [left for left, known in enumerate(degree) if known >= 0]
        order.append(node)
        degree[node] = -1
        swallowed = cliques[node]
        front = direct[node].union(*(members.pop(clique) for clique in swallowed))
        front.discard(node)
        outside: dict[int, int] = {}  # of every other set that meets the front: its members outside
        for other in front:
            cliques[other] -= swallowed
            for clique in cliques[other]:
                outside[clique] = outside.get(clique, len(members[clique])) - 1
        inside = {clique for clique, count in outside.items() if not count}  # they say nothing that the front does not
        for clique in inside:
            del members[clique]
        members[node] = front
        for other in front:
            cliques[other] -= inside
            direct[other] = {one for one in direct[other] if one != node and one not in front}
            bound = len(direct[other]) + len(front) - 1 + sum(outside[clique] for clique in cliques[other])
            cliques[other].add(node)
            degree[other] = min(bound, len(graph) - len(order) - 1)
            heapq.heappush(queue, (degree[other], other))
    return order


def nested_dissection(graph: Graph) -> list[int]:
    """Halves first, the nodes between them last, by levels of breadth-first search: log2 levels for a chain."""
    order: list[int] = []
    stack: list[tuple[set[int], bool]] = [(part, False) for part in _components(graph, range(len(graph)))]
    while stack:  # filled from the end: a separator is written before what it separates
        nodes, separator = stack.pop()
        if separator or len(nodes) <= _DOMAIN:
            order.extend(reversed(_local_order(graph, nodes)))
            continue
        between = _separator(graph, nodes)
        rest = nodes - between
        stack.extend((part, False) for part in _components(graph, rest))
        stack.append((between, True))
    return order[::-1]


def _local_order(graph: Graph, nodes: set[int]) -> list[int]:
    names = sorted(nodes)
    place = {node: k for k, node in enumerate(names)}
    inner = [{place[other] for other in graph[node] if other in place} for node in names]
    return [names[k] for k in minimum_degree(inner)]


def _components(graph: Graph, nodes: Iterable[int]) -> list[set[int]]:
    left, found = set(nodes), []
    for start in sorted(left):
        if start in left:
            found.append(set().union(*_levels(graph, left, start)))
            left -= found[-1]
    return found


def _levels(graph: Graph, nodes: set[int], start: int) -> list[set[int]]:
    """The nodes of one component, by their distance from the start."""
    seen, levels = {start}, [{start}]
    while True:
        further = set().union(*(graph[node] for node in levels[-1])) & nodes
        further -= seen
        if not further:
            return levels
        seen |= further
        levels.append(further)


def _separator(graph: Graph, nodes: set[int]) -> set[int]:
    """A small set of nodes near the middle of a connected set."""
    levels = _levels(graph, nodes, min(nodes))
    while len(longer := _levels(graph, nodes, min(levels[-1], key=lambda node: (len(graph[node]), node)))) > len(
        levels
    ):
        levels = longer  # from the far end: a longer way has smaller levels
    before, best, found = 0, math.inf, nodes
    for k, level in enumerate(levels[:-1]):
        needed = {node for node in level if graph[node] & levels[k + 1]}
        smaller = min(before, len(nodes) - before - len(level))
        if smaller and len(needed) / smaller < best:  # small, and cuts in halves
            best, found = len(needed) / smaller, needed
        before += len(level)
    return found
