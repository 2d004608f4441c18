"""The repair: engines that take predictions to a set, starts that bring them near it, and how both are chosen."""

from snarenet.repair.choose import prepare
from snarenet.repair.explain import Explanation, explain, explain_alone, explain_with
from snarenet.repair.options import Options, Rows, Solver, Store, Weigh
from snarenet.repair.repair import repair, repair_with

__all__ = [
    "Explanation",
    "Options",
    "Rows",
    "Solver",
    "Store",
    "Weigh",
    "explain",
    "explain_alone",
    "explain_with",
    "prepare",
    "repair",
    "repair_with",
]
