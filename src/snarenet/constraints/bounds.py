"""`Bounds`: the lower and upper bounds of a set, whichever way a user gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from snarenet.constraints.data import Datum, check_finite, check_ordered, describe, is_function, recall, store


class Bounds(nn.Module):
    """lower(x) <= . <= upper(x), or `equals` for both; a missing side is infinite."""

    def __init__(self, lower: Datum | None = None, upper: Datum | None = None, equals: Datum | None = None) -> None:
        super().__init__()
        if equals is None and lower is None and upper is None:
            raise ValueError("give at least one of `lower`, `upper` and `equals`")
        if equals is not None and (lower is not None or upper is not None):
            raise ValueError("give either `equals` or `lower` and `upper`, not both")
        if equals is not None:
            self.names: tuple[str, ...] = ("equals",)
            store(self, "equals", equals)
        else:
            self.names = ("lower", "upper")
            store(self, "lower", -torch.inf if lower is None else lower)
            store(self, "upper", torch.inf if upper is None else upper)
        self.fixed = all(isinstance(getattr(self, name), Tensor) for name in self.names)
        self.rows = self._rows()
        if self.fixed:
            self._check(*(getattr(self, name) for name in self.names))

    @property
    def equal(self) -> bool:
        """Were equalities asked for?"""
        return self.names == ("equals",)

    def at(self, x: Any) -> tuple[Tensor, Tensor]:
        """(lower, upper) at x."""
        bounds = tuple(recall(self, name, x) for name in self.names)
        for name, bound in zip(self.names, bounds, strict=True):
            # (B,) and (rows,) could be mistaken for each other
            if bound.ndim == 1 and is_function(getattr(self, name)):
                raise ValueError(f"`{name}(x)` must return (B, rows) or a number, but got {describe(bound)}")
        if not self.fixed:
            self._check(*bounds)
        return bounds[0], bounds[-1]

    def _rows(self) -> int | None:
        """How many rows the bounds themselves ask for, where they say."""
        given = [getattr(self, name) for name in self.names]
        sizes = {bound.shape[-1] for bound in given if isinstance(bound, Tensor) and bound.ndim}
        if len(sizes) > 1:
            raise ValueError(f"`lower` and `upper` must agree in size, but they have {sorted(sizes)} entries")
        return sizes.pop() if sizes else None

    def check_rows(self, rows: int, name: str) -> None:
        """Raise unless the bounds fit a set of so many rows."""
        if self.rows not in (None, rows):
            raise ValueError(f"expected bounds with {rows} entries, as many as `{name}` has rows, but got {self.rows}")

    def _check(self, *bounds: Tensor) -> None:
        if self.equal:
            check_finite("equals", bounds[0])
        else:
            check_ordered(*bounds)
