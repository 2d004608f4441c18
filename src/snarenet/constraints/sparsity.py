r"""`Pattern`: where a Jacobian may be nonzero; and its colouring, from which few products give all of it.

Columns that share no row get the same colour. With the columns of colour c added up in a seed $s_c$, the product
$J s_c$ has every entry of theirs at a place of its own:

$$ J_{ij} = (J s_{c(j)})_i \quad \text{for } (i, j) \text{ in the pattern}. $$

The same with rows and $J^\top$. As many products as there are colours give J; 118 buses of AC-OPF have 344 columns and
21 colours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints.data import describe
from snarenet.constraints.products import Products


class SparsityWarning(UserWarning):
    """A Jacobian has entries that were not known to be there."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which entries of a (rows, columns) matrix may be nonzero; equal if the entries are.

    Attributes:
        row: (nnz,) the row of every entry, in order of rows, then of columns.
        col: (nnz,) its column.
        shape: (rows, columns).
    """

    row: Tensor
    col: Tensor
    shape: tuple[int, int]

    @staticmethod
    def of(value: Any) -> Pattern:
        """The pattern of a matrix: an array or a tensor, a sparse tensor, or a sparse matrix of scipy's.

        Every entry that a sparse layout stores counts, be it zero.
        """
        if isinstance(value, Pattern):
            return value
        if hasattr(value, "tocoo"):  # scipy's
            entries = value.tocoo()
            row, col, shape = entries.row, entries.col, tuple(entries.shape)
        elif isinstance(value, Tensor) and value.layout != torch.strided:
            row, col = (
                value.detach().to_sparse_coo().coalesce().indices().cpu().numpy() if value.ndim == 2 else ((), ())
            )
            shape = tuple(value.shape)
        else:
            dense = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
            shape = dense.shape
            row, col = dense.nonzero() if dense.ndim == 2 else ((), ())
        if len(shape) != 2:
            raise ValueError(f"a pattern must be a matrix (rows, n), but got {describe(value)}")
        return Pattern._from(np.asarray(row), np.asarray(col), (int(shape[0]), int(shape[1])))

    @staticmethod
    def _from(row: np.ndarray[Any, Any], col: np.ndarray[Any, Any], shape: tuple[int, int]) -> Pattern:
        """From entries in any order, and any number of times."""
        places = np.unique(row.astype(np.int64) * shape[1] + col.astype(np.int64))
        row, col = np.divmod(places, max(1, shape[1]))
        return Pattern(torch.from_numpy(row), torch.from_numpy(col), shape)

    @staticmethod
    def full(rows: int, columns: int) -> Pattern:
        """Every entry."""
        return Pattern.of(np.ones((rows, columns), dtype=bool))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return self.shape[1]

    @property
    def nnz(self) -> int:
        """How many entries there are."""
        return len(self.row)

    @property
    def density(self) -> float:
        """The share of entries that may be nonzero."""
        return self.nnz / max(1, self.rows * self.columns)

    @cached_property
    def places(self) -> Tensor:
        """(nnz,) where each entry stands in the matrix read row by row."""
        return self.row * self.columns + self.col

    @cached_property
    def starts(self) -> Tensor:
        """(rows + 1,) where the entries of each row begin, and where the last ones end."""
        return torch.searchsorted(self.row, torch.arange(self.rows + 1))

    @cached_property
    def transposed(self) -> tuple[Pattern, Tensor]:
        """The pattern of the transpose, and (nnz,) the place here of each entry there."""
        order = torch.argsort(self.col, stable=True)
        return Pattern(self.col[order], self.row[order], (self.columns, self.rows)), order

    @cached_property
    def _key(self) -> bytes:
        return hashlib.blake2b(self.places.numpy().tobytes() + repr(self.shape).encode()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and (self is other or self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Pattern({self.rows} x {self.columns}, {self.nnz} entries, {100 * self.density:.3g} %)"

    def __or__(self, other: Pattern) -> Pattern:
        """The union; this pattern itself if it has all entries of the other."""
        if self.shape != other.shape:
            raise ValueError(f"patterns of shape {self.shape} and {other.shape} have no union")
        both = np.union1d(self.places.numpy(), other.places.numpy())
        return self if len(both) == self.nnz else Pattern._from(*np.divmod(both, max(1, self.columns)), self.shape)

    def missing(self, other: Pattern) -> Pattern:
        """The entries of the other that are not in this one."""
        rest = np.setdiff1d(other.places.numpy(), self.places.numpy(), assume_unique=True)
        return Pattern._from(*np.divmod(rest, max(1, self.columns)), self.shape)

    @cached_property
    def _on(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`row` and `col` on a device, copied once."""
        if device.type == "cpu":
            return self.row, self.col
        if device not in self._on:
            self._on[device] = self.row.to(device), self.col.to(device)
        return self._on[device]

    def gather(self, J: Tensor) -> Tensor:
        """(B, nnz) or (nnz,) the entries of matrices (B, rows, columns) or (rows, columns)."""
        row, col = self.on(J.device)
        return J[..., row, col]

    def dense(self, values: Tensor) -> Tensor:
        """(B, rows, columns) with values (B, nnz) at the entries and zeros elsewhere."""
        row, col = self.on(values.device)
        zeros = values.new_zeros(values.shape[0], self.rows * self.columns)
        return zeros.index_copy(1, row * self.columns + col, values).unflatten(1, self.shape)

    def times(self, values: Tensor, v: Tensor) -> Tensor:
        """(B, rows) the product of matrices with values (B, nnz) and vectors v (B, columns)."""
        row, col = self.on(values.device)
        return _sums(values.T * v.T[col], row, self.rows)

    def transposed_times(self, values: Tensor, w: Tensor) -> Tensor:
        """(B, columns) the product of the transposes and vectors w (B, rows)."""
        row, col = self.on(values.device)
        return _sums(values.T * w.T[row], col, self.columns)

    def of_columns(self, scale: Tensor) -> Tensor:
        """(nnz,) what scale (columns,) has for the column of each entry."""
        return scale[self.on(scale.device)[1]]

    def row_sums(self, values: Tensor) -> Tensor:
        """(B, rows) the sum of the values (B, nnz) in each row."""
        return _sums(values.T, self.on(values.device)[0], self.rows)

    @cached_property
    def _stacks(self) -> dict[tuple[Pattern, ...], Pattern]:
        return {}

    @staticmethod
    def stack(patterns: Sequence[Pattern]) -> Pattern:
        """The patterns one below the other; joined once."""
        first, *others = patterns
        if not others:
            return first
        known = first._stacks.get(tuple(others))
        if known is None:
            offsets = np.cumsum([0, *(p.rows for p in patterns)]).tolist()
            row = torch.cat([p.row + offset for p, offset in zip(patterns, offsets, strict=False)])
            known = Pattern(row, torch.cat([p.col for p in patterns]), (offsets[-1], first.columns))
            first._stacks[tuple(others)] = known
        return known


def _sums(terms: Tensor, index: Tensor, size: int) -> Tensor:
    """(B, size) the sums of terms (nnz, B) with the same index; with the batch as the fastest axis that is quickest."""
    zeros = terms.new_zeros(size, terms.shape[1])
    if terms.is_cuda:  # where `index_add` adds in any order, and no two results are the same
        return zeros.index_put((index,), terms, accumulate=True).T.contiguous()
    return zeros.index_add(0, index, terms).T.contiguous()


@lru_cache(maxsize=32)
def identity(size: int) -> Pattern:
    """The pattern of a unit matrix."""
    index = torch.arange(size)
    return Pattern(index, index, (size, size))


@dataclass(frozen=True)
class Colouring:
    """Colours for the columns of a pattern, or for its rows.

    Attributes:
        pattern: what was coloured.
        colours: (columns,) or (rows,) from 0.
        count: how many there are.
        by_rows: are these colours of rows, for products with the transpose?
    """

    pattern: Pattern
    colours: Tensor
    count: int
    by_rows: bool

    @staticmethod
    def of(pattern: Pattern) -> Colouring:
        """Colours of columns or rows, whichever are fewer; of rows if there are as many, their products are cheaper."""
        row, col = pattern.row.numpy(), pattern.col.numpy()
        sides = {False: (row, col, pattern.shape), True: (col, row, pattern.shape[::-1])}
        least = {side: np.bincount(across, minlength=1).max() for side, (across, *_) in sides.items()}
        best: Colouring | None = None
        for by_rows in sorted(sides, key=lambda side: (least[side], not side)):
            room = max(pattern.shape) if best is None else best.count - (not by_rows)
            if least[by_rows] > room:  # as many colours as entries in the longest line, at least
                continue
            colours, count = _greedy(*sides[by_rows], limit=room)
            if count <= room:
                best = Colouring(pattern, torch.from_numpy(colours), count, by_rows)
        assert best is not None
        return best

    @cached_property
    def _kept(self) -> dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]]:
        return {}

    def seeds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """What J, or its transpose, is multiplied with, a row for each colour; and (nnz,) the colour of each entry."""
        key = like.device, like.dtype
        if key not in self._kept:
            seeds = torch.zeros(self.count, len(self.colours), dtype=like.dtype)
            seeds[self.colours, torch.arange(len(self.colours))] = 1.0
            entries = self.colours[self.pattern.row if self.by_rows else self.pattern.col]
            self._kept[key] = seeds.to(like.device), entries.to(like.device)
        return self._kept[key]

    def values(self, products: Products) -> Tensor:
        """(B, nnz) the entries of J, from a product for each colour; in memory the batch is the fastest axis."""
        seeds, colour = self.seeds(products.y)
        row, col = self.pattern.on(products.y.device)
        return products.many(seeds, self.by_rows)[colour, :, col if self.by_rows else row].T


def _greedy(
    row: np.ndarray[Any, Any], col: np.ndarray[Any, Any], shape: tuple[int, int], limit: int
) -> tuple[np.ndarray[Any, Any], int]:
    """Colours (columns,) so that columns of one colour share no row, and their number.

    Columns with many neighbours come first. Gives up beyond `limit` colours, and then says so many and one.
    """
    rows, columns = shape
    lengths = np.bincount(row, minlength=rows)
    order = np.argsort(col, kind="stable")
    ends = np.searchsorted(col[order], np.arange(columns + 1))
    row_of = row[order]
    neighbours = np.bincount(col, weights=lengths[row], minlength=columns)  # with repetitions
    colours, count = np.zeros(columns, dtype=np.int64), min(1, columns)
    taken = np.zeros((rows, max(1, lengths.max(initial=0))), dtype=bool)
    for j in np.argsort(-neighbours, kind="stable"):
        mine = row_of[ends[j] : ends[j + 1]]
        free = np.flatnonzero(~taken[mine].any(0))
        colour = int(free[0]) if len(free) else taken.shape[1]
        if colour == taken.shape[1]:
            taken = np.concatenate([taken, np.zeros_like(taken)], 1)
        if colour >= limit:
            return colours, limit + 1
        taken[mine, colour] = True
        colours[j], count = colour, max(count, colour + 1)
    return colours, count


def read(name: str, value: object, rows: int) -> Pattern:
    """The pattern that a user declares, checked."""
    try:
        pattern = Pattern.of(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f'`{name}` must be "auto", None or a boolean matrix (rows, n): {error}') from error
    if pattern.rows != rows:
        raise ValueError(f"`{name}` must have shape ({rows}, n), but got shape {cast(Any, pattern.shape)}")
    return pattern
