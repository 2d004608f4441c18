"""The matrix-free route: conjugate gradients on products with the Jacobian and its transpose, which is never formed.

    python benchmarks/matrix_free.py [--cases waves sparse] [--size 5000 --rows 2000 --batch 4] [--device cuda]

- waves: -0.5 <= W y + 0.5 sin(V y) + 0.1 (W y)^2 <= 0.5 with dense W and V, `--rows` by `--size`, from 2 N(0, I).
- sparse: A y <= -0.1 with 5 entries in each row of A, 25 times as many rows and 20 times as many variables.
- nclp: the paper's largest, 1000 variables and 1000 constraints.
- qcqp: the paper's QCQP-50.

An iteration of conjugate gradients is one product with J and one with its transpose.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet.bench.common import Table, hardware, peak_growth_mib, start, synchronize


@dataclass(frozen=True)
class Counted(sn.ConjugateGradients):
    """The solver, with a count of its iterations."""

    iterations: list[int] = field(default_factory=list)

    def solve(self, operator: Callable[[Tensor], Tensor], rhs: Tensor, diagonal: Tensor) -> Tensor:
        def counted(w: Tensor) -> Tensor:
            self.iterations.append(1)
            return operator(w)

        return super().solve(counted, rhs, diagonal)


def waves(size: int, rows: int, device: str | torch.device = "cpu") -> sn.Constraints:
    generator = torch.Generator().manual_seed(0)
    W, V = (torch.randn(rows, size, generator=generator, dtype=torch.float64) / size**0.5 for _ in range(2))
    W, V = W.to(device), V.to(device)

    def g(y: Tensor, x: None) -> Tensor:
        z = y @ W.T
        return z + 0.5 * torch.sin(y @ V.T) + 0.1 * z**2

    return sn.Nonlinear(g, rows=rows, lower=-0.5, upper=0.5).to(device)


def sparse(size: int, rows: int, entries: int = 5) -> sn.Constraints:
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(0, size, (rows, entries), generator=generator)
    values = torch.randn(rows, entries, generator=generator, dtype=torch.float64)
    indices = torch.stack([torch.arange(rows).repeat_interleave(entries), columns.flatten()])
    return sn.Linear(
        torch.sparse_coo_tensor(indices, values.flatten(), (rows, size), check_invariants=True), upper=-0.1
    )


def case(name: str, options: argparse.Namespace) -> tuple[sn.Constraints, Tensor, Any]:
    """The constraints, predictions and inputs of a case."""
    device, batch = options.device, options.batch

    def noise(size: int) -> Tensor:
        return 2 * torch.randn(batch, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)

    if name == "waves":
        return waves(options.size, options.rows, device), noise(options.size), None
    if name == "sparse":
        size, rows = 20 * options.size, 25 * options.rows
        return sparse(size, rows).to(device), noise(size), None
    sizes = {"size": 1000, "inequalities": 950, "equalities": 50} if name == "nclp" else {}
    problem = sn.problems.load(name, **sizes).to(device)
    y, x = start(problem, 0.5, batch)
    return problem.constraints, y, x


def measure(name: str, options: argparse.Namespace) -> list[Any]:
    """One row of the table."""
    constraints, y, x = case(name, options)
    device, solver = y.device, Counted()
    solutions, seconds, counts = [], [], []

    def clock() -> None:
        synchronize(device)
        seconds.append(time.perf_counter())
        counts.append(len(solver.iterations))

    def run() -> None:
        clock()
        solutions.append(sn.repair(constraints, y, x, solver=solver))
        clock()
        solutions[-1].value.square().sum().backward()
        clock()

    y.requires_grad_()
    if device.type == "cuda":  # the first call loads libraries
        sn.repair(constraints, y, x, solver=sn.ConjugateGradients(max_iterations=8), max_steps=2).value.sum().backward()
    memory = peak_growth_mib(run, device)
    solution, rows, (batch, size) = solutions[0], constraints.known_rows(), y.shape
    return [
        name,
        f"{rows:,} x {size:,}",
        batch,
        int((~solution.converged).sum()),
        float(solution.violation.max()),
        int(solution.steps.max()),
        f"{counts[1] - counts[0]} + {counts[2] - counts[1]}",
        seconds[1] - seconds[0],
        seconds[2] - seconds[1],
        memory,
        8 * batch * rows * (size + rows) / 2**20,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["waves", "sparse", "nclp", "qcqp"]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--size", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    given = [f"--cases {' '.join(options.cases)}"] if options.cases != names else []
    given += [
        f"--{name} {value}"
        for name, value in vars(options).items()
        if name != "cases" and value != parser.get_default(name)
    ]
    Table(
        "the matrix-free route: forward and backward",
        [
            "case",
            "rows x variables",
            "samples",
            "failures",
            "violation",
            "steps",
            "iterations, forward + backward",
            "forward s",
            "backward s",
            "memory MiB",
            "one Jacobian and factor MiB",
        ],
        [measure(name, options) for name in options.cases],
        " ".join(["python benchmarks/matrix_free.py", *given]),
        hardware(torch.device(options.device)),
    ).show()


if __name__ == "__main__":
    main()
