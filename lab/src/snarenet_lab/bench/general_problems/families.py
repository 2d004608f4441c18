"""AC optimal power flow and a unicycle's plan, families of the library, for the general bench."""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.problems import ACOPF, MPC
from snarenet_lab.bench.general_problems.base import General


def acopf(case: str = "118_ieee") -> General:
    """AC optimal power flow on a case of PGLib-OPF, or on a file of MATPOWER's; its typical point is a flat start."""
    problem = ACOPF(case, instances=1)
    box = problem.constraints.parts[-1].at(problem.flat.unsqueeze(0))
    low, high = box.lower[0], box.upper[0]
    width = torch.where(low.isfinite() & high.isfinite(), high - low, 0.5)  # a tenth: 0.05 rad, 0.02 per unit, ...
    objective, rows = (lambda y, x, m: problem.flows.price(y, m)), problem.flows.rows
    name = f"AC-OPF {problem.grid.name.removeprefix('case')}"
    return General(name, problem.constraints, problem.flat, width / 10, problem.sample, objective, rows)


def unicycle(horizon: int = 20) -> General:
    """The plan of a unicycle around an ellipse, of HardNet++'s benchmark, over any horizon."""
    problem = MPC(horizon, instances=1)
    far: Tensor = torch.tensor([0.3] * 3 * horizon + [0.2] * 2 * horizon, dtype=torch.float64)
    objective, rows = (lambda y, x, m: problem.plan.cost(y, m)), problem.plan.rows
    return General(f"unicycle {horizon}", problem.constraints, problem.typical, far, problem.sample, objective, rows)
