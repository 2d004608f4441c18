"""Reference solutions: what a solver finds for every instance of a problem, checked, and kept on disk."""

from snarenet.reference.solving import ENGINES, Reference, overlooked, solve

__all__ = ["ENGINES", "Reference", "overlooked", "solve"]
