"""The repair: the loop, the spaces that it runs in, and how one is chosen."""

from snarenet.repair.loop import repair
from snarenet.repair.options import Rows, Solver, Store, check_options
from snarenet.repair.structure import prepare

__all__ = ["Rows", "Solver", "Store", "check_options", "prepare", "repair"]
