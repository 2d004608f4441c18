"""Problems as users write them, for what is measured of the general case; IPOPT solves the same rows."""

from snarenet_lab.bench.general_problems.arm import arm
from snarenet_lab.bench.general_problems.base import General, Ipopt, Optimum
from snarenet_lab.bench.general_problems.grid import Grid, acopf, grid_problem
from snarenet_lab.bench.general_problems.portfolio import FORMS, portfolio
from snarenet_lab.bench.general_problems.unicycle import unicycle

__all__ = ["FORMS", "General", "Grid", "Ipopt", "Optimum", "acopf", "arm", "grid_problem", "portfolio", "unicycle"]
