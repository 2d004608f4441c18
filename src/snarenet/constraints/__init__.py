"""Constraint sets: what must hold."""

from snarenet.constraints.base import Constraints, Instance
from snarenet.constraints.l1 import L1Ball
from snarenet.constraints.linear import Box, Linear
from snarenet.constraints.nonlinear import Nonlinear
from snarenet.constraints.quadratic import Quadratic
from snarenet.constraints.sparsity import Pattern, SparsityWarning
from snarenet.constraints.stack import Stack

__all__ = [
    "Box",
    "Constraints",
    "Instance",
    "L1Ball",
    "Linear",
    "Nonlinear",
    "Pattern",
    "Quadratic",
    "SparsityWarning",
    "Stack",
]
