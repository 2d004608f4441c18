r"""`Simplicial`: the factors of `multifrontal` on a CPU, by compiled C++ (`simplicial.cpp`).

The same matrices $\mathrm{diag}(\delta) + \sum_c k_c k_c^\top$, entry by entry instead of front by front: eight samples
fill a vector register, so that no front needs to be dense, and a whole factorisation or solve is one call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet import native
from snarenet.linalg.multifrontal import Cliques
from snarenet.linalg.ordering import Graph, minimum_degree

_SOURCE = Path(__file__).with_suffix(".cpp")
_LANES = 8  # samples side by side; the same number is in simplicial.cpp
_SUFFIX = {torch.float64: "f64", torch.float32: "f32"}


class _Symbolic(ctypes.Structure):
    """As in simplicial.cpp, which says what is what."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("size", "entries", "products")),
        *((name, ctypes.c_void_p) for name in ("order", "start", "row", "from_", "update", "end")),
        *((name, ctypes.c_void_p) for name in ("first", "second", "target")),
    ]


class _Jacobian(ctypes.Structure):
    """As in simplicial.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "nonzeros")),
        *((name, ctypes.c_void_p) for name in ("row", "col")),
    ]


def usable(like: Tensor) -> bool:
    """Can compiled code work on such a tensor?"""
    return like.device.type == "cpu" and like.dtype in _SUFFIX and native.library(_SOURCE) is not None


def _call(name: str, like: Tensor, *arguments: Any) -> None:
    """A function of the library for the dtype of `like`; tensors go as the addresses of their contiguous numbers."""
    library = native.library(_SOURCE)
    assert library is not None
    function = library[f"{name}_{_SUFFIX[like.dtype]}"]
    function(*(_argument(argument) for argument in arguments))


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, ctypes.Structure):
        return ctypes.byref(value)
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value) if value is not None else None


class Simplicial:
    """The pattern's part, made once: the columns of the factor, and which entries change which.

    Args:
        cliques: the vectors k_c.
    """

    def __init__(self, cliques: Cliques) -> None:
        self.size, graph = cliques.size, cliques.graph()
        order = minimum_degree(graph)  # the least fill; shallow trees are of no use here
        rows = _columns(graph, order)
        start = np.cumsum([0, *(len(below) for below in rows)])
        row = np.array([place for below in rows for place in below], np.int64)
        column = np.repeat(np.arange(self.size), np.diff(start))
        changes = np.flatnonzero(row != column)  # entries below the diagonal, by the column that they change
        changes = changes[np.argsort(row[changes], kind="stable")]
        bounds = np.searchsorted(row[changes], np.arange(self.size + 1))
        first, second = cliques.pairs()
        place = np.empty(self.size, np.int64)
        place[np.asarray(order, np.int64)] = np.arange(self.size)
        one, other = place[cliques.nodes[first]], place[cliques.nodes[second]]
        codes = np.minimum(one, other) * self.size + np.maximum(one, other)
        target = np.searchsorted(column * self.size + row, codes)
        sequence = np.argsort(target, kind="stable")
        self.entries = len(row)
        self._arrays = [
            np.ascontiguousarray(array, np.int64)
            for array in (
                *(order, start, row, bounds, changes, start[1:][column[changes]]),
                *(first[sequence], second[sequence], target[sequence]),
            )
        ]  # kept, as the structure has only their addresses
        addresses = (array.ctypes.data for array in self._arrays)
        self.symbolic = _Symbolic(self.size, self.entries, len(first), *addresses)

    def factor(self, values: Tensor, diagonal: Tensor) -> SimplicialFactor:
        """The factors for nonzeros (count, B), the batch as the fastest axis, and diagonals (B, size)."""
        values, diagonal, batch = values.contiguous(), diagonal.contiguous(), len(diagonal)
        numbers = values.new_empty(-(-batch // _LANES), self.entries, _LANES)
        info = torch.empty(batch, dtype=torch.int32)
        _call("factor", values, self.symbolic, batch, len(values), values, diagonal, numbers, info)
        return SimplicialFactor(self, numbers, info)


@dataclass(frozen=True)
class SimplicialFactor:
    """Factors of a batch; `info` (B,) is not 0 where a matrix was not positive definite."""

    pattern: Simplicial
    numbers: Tensor  # (groups of samples, entries, samples in a group)
    info: Tensor

    def solve(self, rhs: Tensor) -> Tensor:
        """The solutions (B, k, size) for right-hand sides (B, k, size)."""
        rhs = rhs.contiguous()
        found = torch.empty_like(rhs)
        _call("solve", rhs, self.pattern.symbolic, *rhs.shape[:2], self.numbers, rhs, found)
        return found

    def __getitem__(self, samples: Tensor) -> SimplicialFactor:
        """The factors of some samples (their places)."""
        return SimplicialFactor(self.pattern, _grouped(self._apart()[samples]), self.info[samples])

    def replaced(self, samples: Tensor, other: SimplicialFactor) -> SimplicialFactor:
        """The same with the factors of another for these samples (their places)."""
        numbers = _grouped(self._apart().index_copy(0, samples, other._apart()))
        return SimplicialFactor(self.pattern, numbers, self.info.index_copy(0, samples, other.info))

    def _apart(self) -> Tensor:
        """(B, entries)."""
        return self.numbers.mT.flatten(0, 1)[: len(self.info)]

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes


def _grouped(numbers: Tensor) -> Tensor:
    """(B, entries) as `SimplicialFactor` keeps them."""
    padded = torch.nn.functional.pad(numbers, (0, 0, 0, -len(numbers) % _LANES), value=1.0)
    return padded.unflatten(0, (-1, _LANES)).mT.contiguous()


class Nonzeros:
    """Nonzeros with matrices whose nonzeros (nnz, B) stand at (row, col), and systems made of them."""

    def __init__(self, row: Tensor, col: Tensor, shape: tuple[int, int]) -> None:
        self.row, self.col, self.shape = row.contiguous(), col.contiguous(), shape
        self.jacobian = _Jacobian(*shape, len(row), self.row.data_ptr(), self.col.data_ptr())

    def times(self, values: Tensor, v: Tensor, transposed: bool) -> Tensor:
        """(B, rows) for v (B, columns), or transposed the other way round."""
        values, v = values.contiguous(), v.contiguous()
        found = v.new_empty(len(v), self.shape[transposed])
        _call("product", v, self.jacobian, len(v), int(transposed), values, v, found)
        return found

    def refined(
        self,
        factor: SimplicialFactor,
        primal: bool,
        effort: tuple[float, int],
        system: tuple[Tensor, Tensor, Tensor | None, Tensor],
        rhs: Tensor,
    ) -> Tensor:
        """The solutions (B, k, rows) of `SparseFactor`'s systems.

        Args:
            factor: of the dual or of the primal form.
            primal: which of them.
            effort: the backward error to reach, in roundings, and how many refinements are tried at most.
            system: its values (nnz, B), damping (B, rows), inverse weights (B, columns) and length (B, 1).
            rhs: (B, k, rows).
        """
        rhs = rhs.contiguous()
        found = torch.empty_like(rhs)
        given = (None if part is None else part.contiguous() for part in system)
        sizes = (*rhs.shape[:2], int(primal), *effort)
        _call("refine", rhs, factor.pattern.symbolic, self.jacobian, *sizes, factor.numbers, *given, rhs, found)
        return found


def _columns(graph: Graph, order: list[int]) -> list[list[int]]:
    """The places of the entries in each column of the factor, the diagonal first."""
    place = {node: k for k, node in enumerate(order)}
    below: list[set[int]] = [set() for _ in order]
    for k, node in enumerate(order):
        below[k].update(p for other in graph[node] if (p := place[other]) > k)
        if below[k]:
            parent = min(below[k])
            below[parent] |= below[k] - {parent}
    return [[k, *sorted(others)] for k, others in enumerate(below)]
