"""`Part`: fields whose types say what they may be, checked when they are set.

A field is a `Literal`, a `bool`, or a number in an interval, written into its type: `Count`, `Share`, ...
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


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
    options = [option for option in get_args(kind) if option is not type(None)]
    if type(None) in get_args(kind):  # a field that may be None
        if value is not None:
            check(name, value, options[0])
        return
    if get_origin(kind) is Literal:
        if value not in options:
            raise ValueError(f"`{name}` must be one of {', '.join(options)}, but got {value!r}")
        return
    kind, interval = options if get_origin(kind) is Annotated else (kind, _PLAIN.get(kind))
    fits = isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or (isinstance(interval, Interval) and not interval.holds(value)):  # pyright: ignore[reportArgumentType]
        words = interval.words if isinstance(interval, Interval) else f"a {kind.__name__}"
        raise ValueError(f"`{name}` must be {words}, but got {value!r}")
