"""The plain engine: the `loop`, the `spaces` that it runs in, and its `tape`."""

from snarenet.repair.loop.bounded import BoundedSpace
from snarenet.repair.loop.loop import Live, Loop
from snarenet.repair.loop.spaces import Budget, ConstraintSpace, OutputSpace, Space

__all__ = ["BoundedSpace", "Budget", "ConstraintSpace", "Live", "Loop", "OutputSpace", "Space"]
