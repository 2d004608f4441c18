"""Problems as users write them, for what is measured of the general case; IPOPT solves the same rows."""

from snarenet_lab.bench.general_problems.arm import arm
from snarenet_lab.bench.general_problems.base import General, Ipopt, Optimum
from snarenet_lab.bench.general_problems.curved import bilinear, shell, torus, trigonometric
from snarenet_lab.bench.general_problems.families import acopf, unicycle
from snarenet_lab.bench.general_problems.linear import cart, track
from snarenet_lab.bench.general_problems.portfolio import FORMS, portfolio

__all__ = [
    "FORMS",
    "General",
    "Ipopt",
    "Optimum",
    "acopf",
    "arm",
    "bilinear",
    "cart",
    "portfolio",
    "shell",
    "torus",
    "track",
    "trigonometric",
    "unicycle",
]
