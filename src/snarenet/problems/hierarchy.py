r"""Series that add up: a hierarchy, its observations, and where they come from.

Every series is a sum of leaves, $y = S b$, aggregates first and the leaves b last. So y is coherent where
$C y = 0$, $C = (I \;\; -S_{agg})$.
"""

from __future__ import annotations

import csv
import math
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Hierarchy(NamedTuple):
    """Which leaves each series adds up.

    Attributes:
        names: of all series, aggregates first, then leaves.
        summing: (n, leaves) the matrix S; its last rows are the identity.
    """

    names: tuple[str, ...]
    summing: Array

    @property
    def leaves(self) -> tuple[str, ...]:
        """The names of the leaves."""
        return self.names[-self.summing.shape[1] :]

    @property
    def coherence(self) -> Array:
        """(aggregates, n) the matrix C: C y = 0 for coherent y."""
        count = len(self.names) - self.summing.shape[1]
        return np.hstack([np.eye(count), -self.summing[:count]])

    @classmethod
    def from_levels(cls, levels: tuple[int, ...]) -> Hierarchy:
        """A tree whose root has levels[0] children, each of which has levels[1], and so on."""
        if not levels or any(isinstance(count, bool) or count < 1 for count in levels):
            raise ValueError(f"`levels` must be one or more numbers of children, each at least 1, but got {levels!r}")
        leaves = [""]
        for count in levels:
            leaves = [f"{leaf}/{child}" for leaf in leaves for child in range(1, count + 1)]
        return cls.from_paths([f"total{leaf}" for leaf in leaves])

    @classmethod
    def from_paths(cls, leaves: list[str]) -> Hierarchy:
        """The tree of leaves with names like "total/region/leaf": every prefix of a path is an aggregate."""
        parts = [leaf.split("/") for leaf in leaves]
        depth = max(map(len, parts))
        nodes = dict.fromkeys("/".join(path[:k]) for k in range(1, depth) for path in parts if k < len(path))
        both = [leaf for leaf in leaves if leaf in nodes]
        if both:
            raise ValueError(f"a leaf must not be an aggregate as well, but {both[0]!r} is both")
        above = [[leaf.startswith(node + "/") for leaf in leaves] for node in nodes]
        return cls._of(list(nodes), np.array(above, dtype=float).reshape(len(nodes), len(leaves)), leaves)

    @classmethod
    def from_file(cls, file: Path, leaves: list[str]) -> Hierarchy:
        """A summing matrix as CSV: a name, then an entry for each leaf, which the first line names."""
        head, rows = _table(file)
        if sorted(head[1:]) != sorted(leaves):
            raise ValueError(f"{file}: the first line must name a column for series, then the leaves {leaves}")
        order = [head.index(leaf) for leaf in leaves]
        aggregates = {row[0]: [_number(file, row[0], row[k]) for k in order] for row in rows if row[0] not in leaves}
        return cls._of(list(aggregates), np.array(list(aggregates.values())).reshape(-1, len(leaves)), leaves)

    @classmethod
    def _of(cls, aggregates: list[str], above: Array, leaves: list[str]) -> Hierarchy:
        if not aggregates:
            raise ValueError(
                f"a hierarchy needs an aggregate: name leaves like 'total/region/leaf', but got {leaves[:3]}"
            )
        if not np.isfinite(above).all() or (above < 0).any():
            raise ValueError("a summing matrix must have finite entries, at least 0")
        return cls((*aggregates, *leaves), np.vstack([above, np.eye(len(leaves))]))


class Observations(NamedTuple):
    """What was observed: (T, leaves) values of the leaves, NaN where one is missing."""

    hierarchy: Hierarchy
    leaves: Array

    @property
    def values(self) -> Array:
        """(T, n) the values of all series; an aggregate of which a part is missing is missing, too."""
        return np.stack([self._total(row) for row in self.hierarchy.summing], 1)

    def _total(self, row: Array) -> Array:
        return self.leaves[:, row != 0] @ row[row != 0]


def read_csv(file: Path, hierarchy: Path | None = None) -> Observations:
    """Observations from a CSV file: a column `date`, then one for each leaf; an empty cell is missing.

    Args:
        file: the observations. Dates are ISO dates, strictly increasing; values are numbers, at least 0.
        hierarchy: a summing matrix, see `Hierarchy.from_file`; else the leaves' names are paths like
            "total/region/leaf".
    """
    head, rows = _table(file)
    if head[0] != "date" or len(head) < 2 or len(set(head)) < len(head):
        raise ValueError(f"{file}: the first line must be `date` and the names of the leaves, each once, but is {head}")
    try:
        dates = [date.fromisoformat(row[0]) for row in rows]
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    late = [b for a, b in pairwise(dates) if b <= a]
    if late:
        raise ValueError(f"{file}: dates must be increasing, but {late[0]} comes after a later one, or twice")
    values = np.array([[_number(file, row[0], cell) for cell in row[1:]] for row in rows])
    if (values < 0).any():
        when, which = np.argwhere(values < 0)[0]
        raise ValueError(f"{file}: values must be at least 0, but {head[1 + which]!r} is negative on {dates[when]}")
    leaves = head[1:]
    tree = Hierarchy.from_paths(leaves) if hierarchy is None else Hierarchy.from_file(hierarchy, leaves)
    return Observations(tree, values)


def _table(file: Path) -> tuple[list[str], list[list[str]]]:
    """The first line of a CSV file, and the others, all of its length."""
    with open(file, newline="", encoding="utf-8-sig") as stream:
        lines = [[cell.strip() for cell in line] for line in csv.reader(stream) if any(map(str.strip, line))]
    if len(lines) < 2:
        raise ValueError(f"{file}: a line of names and at least one of numbers are needed")
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(lines[0]):
            raise ValueError(f"{file}: line {number} must have {len(lines[0])} cells, but has {len(line)}")
    return lines[0], lines[1:]


def _number(file: Path, row: str, cell: str) -> float:
    """The number in a cell; NaN for an empty one."""
    try:
        value = float(cell) if cell else math.nan
    except ValueError as error:
        raise ValueError(f"{file}: {cell!r} in the line of {row} is no number") from error
    if math.isinf(value):
        raise ValueError(f"{file}: {cell!r} in the line of {row} is not finite")
    return value


def synthetic(
    hierarchy: Hierarchy, length: int, period: int, missing: float, draw: np.random.Generator
) -> Observations:
    """Demand with trend, season and noise, some of which leaves of one parent have in common; a leaf may sell nothing.

    Levels differ by a factor of ten or more; small leaves are zero for much of the time. Each value is missing with
    probability `missing`.
    """
    count = hierarchy.summing.shape[1]
    time = np.arange(length)
    level = np.maximum(np.exp(draw.normal(0, 0.8, count)), 0.3)
    trend = 1 + draw.uniform(-0.3, 0.6, count) * time[:, None] / length
    phase = draw.uniform(0, 0.6, count)
    season = 1 + draw.uniform(0.2, 0.6, count) * np.sin(2 * np.pi * (time[:, None] / period + phase))
    aggregates = hierarchy.summing[: len(hierarchy.names) - count]
    shared = sum(np.outer(_slow(length, draw), row != 0) for row in aggregates)
    own = draw.normal(0, 1, (length, count))
    noise = 0.15 * shared + (0.25 / np.sqrt(level)) * own
    values = np.maximum(level * (trend * season + noise) - 0.1, 0.0)
    return Observations(hierarchy, np.where(draw.random((length, count)) < missing, math.nan, values))


def _slow(length: int, draw: np.random.Generator) -> Array:
    """(length,) a process that returns to zero within about ten steps."""
    steps, value, found = draw.normal(0, 1, length), 0.0, np.empty(length)
    for k, step in enumerate(steps):
        value = 0.9 * value + 0.44 * step
        found[k] = value
    return found
