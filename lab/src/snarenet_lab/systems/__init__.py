"""A collection of nonlinear systems l <= g(y) <= u, from the literature and of ours, to judge a repair by.

`SYSTEMS` has all of them. Every second one of each file is held out: choose settings by the others, judge by these.
"""

from __future__ import annotations

from dataclasses import replace

from snarenet_lab.systems.applications import APPLICATIONS
from snarenet_lab.systems.base import System
from snarenet_lab.systems.equations import MORE_GARBOW_HILLSTROM, SQUARE
from snarenet_lab.systems.hard import HARD
from snarenet_lab.systems.hock_schittkowski import HOCK_SCHITTKOWSKI

__all__ = ["SYSTEMS", "System"]

SYSTEMS: tuple[System, ...] = tuple(
    replace(system, held_out=k % 2 == 1)
    for group in (HOCK_SCHITTKOWSKI, MORE_GARBOW_HILLSTROM, SQUARE, APPLICATIONS, HARD)
    for k, system in enumerate(group)
)
