"""Elimination orders: little fill on meshes, shallow trees for chains, and no surprise on odd graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snarenet.linalg.fronts import best_tree
from snarenet.linalg.ordering import Graph, minimum_degree, nested_dissection

ORDERS = (minimum_degree, nested_dissection)


def graph_of(size: int, edges: list[tuple[int, int]]) -> Graph:
    graph: Graph = [set() for _ in range(size)]
    for i, j in edges:
        if i != j:
            graph[i].add(j)
            graph[j].add(i)
    return graph


def path(size: int) -> Graph:
    return graph_of(size, [(k, k + 1) for k in range(size - 1)])


def mesh(side: int) -> Graph:
    right = [(i * side + j, i * side + j + 1) for i in range(side) for j in range(side - 1)]
    down = [(i * side + j, (i + 1) * side + j) for i in range(side - 1) for j in range(side)]
    return graph_of(side**2, right + down)


def eliminated(graph: Graph, order: list[int]) -> list[set[int]]:
    """The later neighbours of each node when it is eliminated: the textbook's game on the graph itself."""
    left, found = [set(neighbours) for neighbours in graph], []
    for node in order:
        found.append(left[node])
        for other in left[node]:
            left[other] |= left[node] - {other}
            left[other].discard(node)
    return found


def fill(graph: Graph, order: list[int]) -> int:
    return sum(map(len, eliminated(graph, order)))


def height(graph: Graph, order: list[int]) -> int:
    place = {node: k for k, node in enumerate(order)}
    heights = [1] * len(order)
    for k, later in enumerate(eliminated(graph, order)):
        if later:
            parent = min(place[node] for node in later)
            heights[parent] = max(heights[parent], heights[k] + 1)
    return max(heights)


class TestMinimumDegree:
    def test_a_tree_gets_no_fill(self) -> None:
        tree = graph_of(63, [(k, (k - 1) // 2) for k in range(1, 63)])
        assert fill(tree, minimum_degree(tree)) == 62

    def test_a_star_ends_with_its_middle(self) -> None:
        star = graph_of(50, [(7, k) for k in range(50)])
        assert 7 in minimum_degree(star)[-2:]
        assert fill(star, minimum_degree(star)) == 49

    def test_a_mesh(self) -> None:
        """Half of what row by row has, which grows with the power 1.5 of the number of nodes."""
        graph = mesh(20)
        assert fill(graph, list(range(400))) >= 7000
        assert fill(graph, minimum_degree(graph)) <= 3600


class TestNestedDissection:
    def test_a_path_is_shallow(self) -> None:
        """A linear number of entries, and a height of the logarithm beside that of one domain."""
        graph = path(1000)
        order = nested_dissection(graph)
        assert fill(graph, order) <= 2000
        assert height(graph, order) <= 40
        assert height(graph, minimum_degree(graph)) >= 499

    def test_a_mesh(self) -> None:
        graph = mesh(20)
        assert fill(graph, nested_dissection(graph)) <= 4500

    def test_a_clique_cannot_be_cut(self) -> None:
        graph = graph_of(40, [(i, j) for i in range(40) for j in range(i)])
        assert sorted(nested_dissection(graph)) == list(range(40))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.data())
def test_every_node_once(order, size: int, data: st.DataObject) -> None:
    node = st.integers(0, size - 1)
    graph = graph_of(size, data.draw(st.lists(st.tuples(node, node), max_size=3 * size)))
    assert sorted(order(graph)) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.data())
def test_fronts_hold_every_later_neighbour(size: int, data: st.DataObject) -> None:
    """Each node is a pivot once, and its front has all nodes that its elimination touches."""
    node = st.integers(0, size - 1)
    graph = graph_of(size, data.draw(st.lists(st.tuples(node, node), max_size=3 * size)))
    tree = best_tree(graph)
    later = eliminated(graph, tree.order)
    assert sorted(k for front in tree.fronts for k in front.pivots) == list(range(size))
    assert sorted(k for group in tree.groups for k in group.fronts) == list(range(len(tree.fronts)))
    for front, parent in zip(tree.fronts, tree.parents, strict=True):
        inside = {tree.order[k] for k in front.pivots + front.border}
        assert all(later[k] <= inside for k in front.pivots)
        above = tree.fronts[parent].pivots + tree.fronts[parent].border if parent >= 0 else []
        assert set(front.border) <= set(above)
