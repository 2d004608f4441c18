"""`Part`: fields whose types say what they may be, checked when they are set.

A field is a `Literal`, a `bool`, or a number in an interval, written into its type: `Count`, `Share`, ...; or one of
two such kinds.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


class Interval(NamedTuple):
    """Which numbers a field may be, in words and as low <= value < high, or <= high if it is closed."""

    words: str
    low: float
    high: float = math.inf
    closed: bool = False

    def holds(self, value: float) -> bool:
        """Is the number one of them?"""
        return self.low <= value < self.high or (self.closed and value == self.high)


_LARGEST = 2**63  # what PyTorch can count to, and seed with

Count = Annotated[int, Interval(">= 0 and a whole number", 0, _LARGEST)]
Size = Annotated[int, Interval("at least 1 and a whole number", 1, _LARGEST)]
Weight = Annotated[float, Interval(">= 0 and finite", 0.0)]
Share = Annotated[float, Interval("in [0, 1)", 0.0, 1.0)]
Ratio = Annotated[float, Interval("in [0, 1]", 0.0, 1.0, closed=True)]
Seconds = Annotated[float, Interval(">= 0", 0.0, closed=True)]
_PLAIN = {  # numbers without an interval of their own
    int: Interval("a whole number", -_LARGEST, _LARGEST),
    float: Interval("a finite number", -sys.float_info.max),
}


@dataclass(frozen=True)
class Part:
    """What all parts have: the seed of whatever they draw, and a check of every field."""

    seed: int = 0
    """Seed of the initial weights, the order of the inputs and dropout."""

    def __post_init__(self) -> None:
        for name, kind in _types(type(self)).items():
            check(name, getattr(self, name), kind)


@cache
def _types(part: type[Part]) -> dict[str, Any]:
    return get_type_hints(part, include_extras=True)


def check(name: str, value: object, kind: Any) -> None:
    """Raise unless `value` is of the type that a field called `name` has."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    found = [_misfit(value, one) for one in kinds if one is not NoneType]
    if not (value is None and NoneType in kinds) and all(found):
        raise ValueError(f"`{name}` must be {' or '.join(found)}, but got {value!r}")


def _misfit(value: object, kind: Any) -> str:
    """What a value of this type would be, in words; "" if it is one."""
    options = get_args(kind)
    if get_origin(kind) is Literal:
        fits = isinstance(value, str) and value in options
        return "" if fits else f"{'one of ' * (len(options) > 1)}{', '.join(options)}"
    kind, interval = options if get_origin(kind) is Annotated else (kind, _PLAIN.get(kind))
    fits = isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if fits and (not isinstance(interval, Interval) or interval.holds(value)):  # pyright: ignore[reportArgumentType]
        return ""
    return interval.words if isinstance(interval, Interval) else f"a {kind.__name__}"
