"""The repair: engines that take predictions to a set, starts that bring them near it, and how both are chosen."""

from snarenet.repair.explain import Explanation, explain, explain_alone, explain_with
from snarenet.repair.options import Nearest, Options, Rescue, Rows, Solver, Start, Store
from snarenet.repair.repair import repair, repair_with
from snarenet.repair.start.nearest import prepare

__all__ = [
    "Explanation",
    "Nearest",
    "Options",
    "Rescue",
    "Rows",
    "Solver",
    "Start",
    "Store",
    "explain",
    "explain_alone",
    "explain_with",
    "prepare",
    "repair",
    "repair_with",
]
