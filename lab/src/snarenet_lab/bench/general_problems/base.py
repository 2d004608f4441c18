"""`General`: a problem as users write it, `Nonlinear(fn) & Box` and the like, that IPOPT can solve too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems.arithmetic import Casadi
from snarenet.reference.program import need

F64 = torch.float64


@dataclass(frozen=True)
class General:
    """A problem of the general case.

    Attributes:
        name: what it is called in tables.
        constraints: the set; a box is its last part.
        typical: (n,) a point of the set, or one near it, at the nominal x.
        spread: (n,) how much an entry of y differs from input to input.
        draw: samples x: a function of their number and a generator.
        objective: what IPOPT minimises, the sum of what this function of (y, x, arithmetic) returns for one sample.
        rows: g of one sample, but for the box: a function of (y, x, arithmetic).
    """

    name: str
    constraints: sn.Constraints
    typical: Tensor
    spread: Tensor
    draw: Callable[[int, torch.Generator], Tensor]
    objective: Callable[[Any, Any, Any], Any]
    rows: Callable[[Any, Any, Any], Any]

    def start(self, batch: int, offset: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Predictions (B, n) so many spreads off the typical point, and inputs."""
        generator = torch.Generator().manual_seed(seed)
        x = self.draw(batch, generator)
        noise = torch.randn(batch, len(self.typical), generator=generator, dtype=F64)
        return self.typical + offset * self.spread * noise, x

    def repaired(self) -> General:
        """The same with a typical point that is in the set at the mean of some inputs."""
        x = self.draw(64, torch.Generator().manual_seed(0)).mean(0, keepdim=True)
        found = sn.repair(self.constraints, self.typical.unsqueeze(0), x, start=None, rescue=True)
        return replace(self, typical=found.value[0])

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, 2) of g and (n, 2) of the box, for one input."""
        instance = self.constraints.at(self.typical.unsqueeze(0), x.unsqueeze(0))
        both = torch.stack([instance.lower[0], instance.upper[0]], 1)
        return both[: -len(self.typical)], both[-len(self.typical) :]


class Optimum(NamedTuple):
    """What IPOPT found for one input.

    Attributes:
        y: (n,) where it ended.
        objective: f(y).
        success: does it say that this is optimal?
        iterations: how many it took.
        seconds: of its thread on the processor, which other work on the machine does not lengthen.
    """

    y: Tensor
    objective: float
    success: bool
    iterations: int
    seconds: float


class Ipopt:
    """IPOPT on a problem, with exact derivatives by CasADi; built once for all inputs.

    Args:
        problem: what to solve.
        options: further ones of IPOPT's.
    """

    def __init__(self, problem: General, **options: Any) -> None:
        ca, m = need("casadi"), Casadi()
        self.problem = problem
        size = problem.draw(1, torch.Generator().manual_seed(0)).shape[1]
        y, x = ca.SX.sym("y", len(problem.typical)), ca.SX.sym("x", size)
        program = {"x": y, "p": x, "f": ca.sum1(problem.objective(y, x, m)), "g": problem.rows(y, x, m)}
        quiet = {"print_time": False, "ipopt.print_level": 0, "ipopt.sb": "yes"}
        self.solver = ca.nlpsol(
            "general", "ipopt", program, quiet | {f"ipopt.{name}": value for name, value in options.items()}
        )

    def __call__(self, x: Tensor) -> Optimum:
        """The optimum for one input, from the typical point."""
        rows, box = self.problem.bounds(x)
        numbers = {"x0": self.problem.typical, "p": x, "lbx": box[:, 0], "ubx": box[:, 1]}
        numbers |= {"lbg": rows[:, 0], "ubg": rows[:, 1]}
        arguments = {name: v.numpy() for name, v in numbers.items()}
        begin = time.thread_time()
        found = self.solver(**arguments)
        seconds = time.thread_time() - begin
        statistics = self.solver.stats()
        y = torch.from_numpy(np.asarray(found["x"])).flatten()
        return Optimum(y, float(found["f"]), bool(statistics["success"]), int(statistics["iter_count"]), seconds)
