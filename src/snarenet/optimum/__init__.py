"""Optima of a batch of problems, by the systems of the repair."""

from snarenet.optimum.descent import descend
from snarenet.optimum.polishing import polish
from snarenet.optimum.slope import Slope

__all__ = ["Slope", "descend", "polish"]
