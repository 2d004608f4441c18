"""Reference solutions: what a solver finds for every instance of a problem, checked, and kept on disk."""

from snarenet.reference.engines import ENGINES
from snarenet.reference.solving import Reference, solve

__all__ = ["ENGINES", "Reference", "solve"]
