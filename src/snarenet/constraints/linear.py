"""`Linear` and `Box`: sets whose rows are linear in y."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.base import Instance, LimitedRows
from snarenet.constraints.bounds import Bounds
from snarenet.constraints.data import Datum, check_finite, check_inputs, check_shape, recall_matrix, store
from snarenet.constraints.maps import IdentityMap, LinearMap, SparseMap
from snarenet.constraints.sparse import SparseMatrix, is_sparse
from snarenet.constraints.structure import Seen


class Linear(LimitedRows):
    """lower <= A y <= upper, or A y = equals.

    Args:
        A: matrix (m, n), one per sample (B, m, n), or a function of x that returns either. A constant matrix may be
            sparse, a tensor or a matrix of scipy's: with `solver=ConjugateGradients()` it is never made dense.
        lower: lower bounds: a number, (m,), (B, m), or a function of x; None for none.
        upper: upper bounds, likewise.
        equals: right-hand side of equalities, instead of `lower` and `upper`.

    Example:
        >>> import torch, snarenet as sn
        >>> simplex = sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 3), equals=1.0)
        >>> simplex.violation(torch.tensor([[0.5, 0.5, 0.5]])).item()
        0.5
    """

    A: Tensor | SparseMatrix | Callable[[Any], Any]

    def __init__(
        self,
        A: Datum,
        lower: Datum | None = None,
        upper: Datum | None = None,
        equals: Datum | None = None,
    ) -> None:
        super().__init__()
        self.seen = Seen()
        self.limit = Bounds(lower, upper, equals)
        if is_sparse(A):
            self.A = SparseMatrix("A", A)
        else:
            store(self, "A", A)
            if not isinstance(self.A, Tensor):
                self.rows = self.limit.rows
                return
            check_shape("A", self.A, ("m", "n"), ("B", "m", "n"))
            check_finite("A", self.A)
        self.rows, self.size = self.A.shape[-2:]
        self.limit.check_rows(self.rows, "A")

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        if isinstance(self.A, SparseMatrix):
            return self._instance(y, self._sparse_map(self.A, y.dtype), x)
        A = recall_matrix(self, "A", self.rows, y, x)
        return self._instance(y, self.constant_map(y.dtype) or LinearMap(A.to(y.dtype), self.seen), x)

    def constant_map(self, dtype: torch.dtype) -> LinearMap | None:
        """y -> A y, if A is one matrix for all samples and not learned; the same tensor every time, even if cast.

        None also for a sparse A that is too large for the direct routes, which ask this.
        """
        A = self.A
        if isinstance(A, SparseMatrix):
            return self._sparse_map(A, dtype) if A.small else None
        if not isinstance(A, Tensor) or A.ndim != 2 or A.requires_grad:
            return None
        return LinearMap(A if A.dtype == dtype else self.memo.get(("A", dtype), (A,), lambda: A.to(dtype)), self.seen)

    def _sparse_map(self, A: SparseMatrix, dtype: torch.dtype) -> SparseMap:
        return self.memo.get(("A", dtype), (A.values, A.indices), lambda: SparseMap(A, dtype))

    @property
    def constant(self) -> bool:
        return isinstance(self.A, SparseMatrix) or self.constant_map(torch.float64) is not None


class Box(LimitedRows):
    """lower <= y <= upper, entry by entry; each a number, (n,), (B, n), or a function of x, and possibly infinite."""

    def __init__(self, lower: Datum | None, upper: Datum | None) -> None:
        super().__init__()
        self.limit = Bounds(lower, upper)
        self.rows = self.size = self.limit.rows

    def value(self, y: Tensor, x: Any = None) -> Tensor:
        return self.check(y)

    def at(self, y: Tensor, x: Any = None) -> Instance:
        check_inputs(y, x)
        return self._instance(y, IdentityMap(y.shape[1]), x)

    @property
    def constant(self) -> bool:
        return True

    def rows_for(self, size: int | None) -> int | None:
        return size if self.rows is None else self.rows
