"""A standing search for what breaks the promises: random sets, scales, precisions and options, checked and shrunk.

A case is made from (seed, index) alone, so that `--only INDEX` does it again. A defect is printed as Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from snarenet_lab.fuzz.checks import defect
from snarenet_lab.fuzz.drawing import draw
from snarenet_lab.fuzz.shrinking import shrink

_LINE_SECONDS = 10.0  # between two lines of progress


def _print(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class Defect:
    """A case that broke a promise."""

    seed: int
    index: int
    check: str
    said: str
    source: str

    def __str__(self) -> str:
        return f"# case {self.index} of seed {self.seed}, {self.check}: {self.said}\n{self.source}"


class Search(NamedTuple):
    """What a search went through."""

    cases: int
    samples: int
    defects: list[Defect]

    def describe(self) -> str:
        """In a sentence."""
        many = f"{len(self.defects)} defects" if len(self.defects) != 1 else "1 defect"
        return f"{self.samples:,} samples in {self.cases:,} cases: {many if self.defects else 'no defect'}."


def fuzz(
    samples: int = 100_000,
    seed: int = 0,
    seconds: float | None = None,
    only: int | None = None,
    most: int = 10,
    report: Callable[[str], object] = _print,
) -> Search:
    """Search until so many samples were repaired, or so many seconds are over, or so many defects are found.

    Args:
        samples: rows of batches to repair.
        seed: of all cases.
        seconds: time limit; none unless given.
        only: the index of the one case to do.
        most: defects after which to stop.
        report: told of progress and of defects, in lines.
    """
    began, told = time.monotonic(), time.monotonic()
    done, index, found = 0, only or 0, []
    while done < samples and len(found) < most and (seconds is None or time.monotonic() - began < seconds):
        case = draw(seed, index)
        if (broken := defect(case)) is not None:
            check, said = broken
            small = shrink(case, check)
            said = (defect(small, (check,)) or broken)[1]
            found.append(Defect(seed, index, check.__name__, said, small.source()))
            report(str(found[-1]))
        done, index = done + len(case.y), index + 1
        if only is not None:
            break
        if time.monotonic() - told > _LINE_SECONDS:
            told = time.monotonic()
            report(f"{done:,} of {samples:,} samples in {index:,} cases, {len(found)} defects")
    return Search(index - (only or 0), done, found)
