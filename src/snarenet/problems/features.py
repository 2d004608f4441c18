"""`OfFeatures`: the feasible set of a problem whose inputs hold more than a model may see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.constraints.base import Instance


class OfFeatures(Constraints):
    """The same set at the first entries of x, which alone a model sees: a layer that it has knows no others.

    Args:
        of: the set.
        features: how many entries it sees.
    """

    def __init__(self, of: Constraints, features: int) -> None:
        super().__init__()
        self.of, self.features = of, features
        self.rows, self.size, self.memo = of.rows, of.size, of.memo

    def value(self, y: Tensor, x: Any = None) -> Tensor:
        return self.of.value(y, self._seen(x))

    def bounds(self, x: Any = None) -> tuple[Tensor, Tensor]:
        return self.of.bounds(self._seen(x))

    def at(self, y: Tensor, x: Any = None) -> Instance:
        return self.of.at(y, self._seen(x))

    @property
    def parts(self) -> Sequence[Constraints]:
        return self.of.parts

    @property
    def constant(self) -> bool:
        return self.of.constant

    @property
    def constant_rows(self) -> Tensor:
        return self.of.constant_rows

    def rows_for(self, size: int | None) -> int | None:
        return self.of.rows_for(size)

    def _seen(self, x: Any) -> Any:
        return x[:, : self.features] if isinstance(x, Tensor) else x
