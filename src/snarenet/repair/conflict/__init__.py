"""Which rows of an empty set fight each other, with a certificate that is checked: what `Solution.conflict` returns."""

from snarenet.repair.conflict.conflict import Conflict, ConflictRow, SampleConflict
from snarenet.repair.conflict.farkas import Certificate
from snarenet.repair.conflict.origin import Origin, remember

__all__ = ["Certificate", "Conflict", "ConflictRow", "Origin", "SampleConflict", "remember"]
