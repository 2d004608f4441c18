"""The repair: engines that take predictions to a set, starts that bring them near it, and how both are chosen."""

from snarenet.repair.choose import prepare
from snarenet.repair.options import Options, Rows, Solver, Store
from snarenet.repair.repair import repair, repair_with

__all__ = ["Options", "Rows", "Solver", "Store", "prepare", "repair", "repair_with"]
