"""The matrix-free route: conjugate gradients on products with the Jacobian and its transpose, which is never formed.

- waves: -0.5 <= W y + 0.5 sin(V y) + 0.1 (W y)^2 <= 0.5 with dense W and V, `rows` by `size`, from 2 N(0, I).
- sparse: A y <= -0.1 with 5 entries in each row of A, 25 times as many rows and 20 times as many variables.
- nclp: the paper's largest, 1000 variables and 1000 constraints.
- qcqp: the paper's QCQP-50.

An iteration of conjugate gradients is one product with J and one with its transpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet_lab.bench.common import Benchmark, command_line, hardware, peak_growth_mib, synchronize
from snarenet_lab.starts import start

CASES = ("waves", "sparse", "nclp", "qcqp")
COLUMNS = (
    "case", "rows x variables", "samples", "failures", "violation", "steps", "iterations, forward + backward",
    "forward s", "backward s", "memory MiB", "one Jacobian and factor MiB",
)  # fmt: skip


@dataclass(frozen=True)
class Counted(sn.ConjugateGradients):
    """The solver, with a count of its iterations."""

    iterations: list[int] = field(default_factory=list)

    def solve(self, operator: Callable[[Tensor], Tensor], rhs: Tensor, diagonal: Tensor) -> Tensor:
        """The solution, as always."""

        def counted(w: Tensor) -> Tensor:
            self.iterations.append(1)
            return operator(w)

        return super().solve(counted, rhs, diagonal)


def waves(size: int, rows: int, device: str | torch.device = "cpu") -> sn.Constraints:
    """Dense rows with a sine and a square."""
    generator = torch.Generator().manual_seed(0)
    W, V = (torch.randn(rows, size, generator=generator, dtype=torch.float64) / size**0.5 for _ in range(2))
    W, V = W.to(device), V.to(device)

    def g(y: Tensor, x: None) -> Tensor:
        z = y @ W.T
        return z + 0.5 * torch.sin(y @ V.T) + 0.1 * z**2

    return sn.Nonlinear(g, rows=rows, lower=-0.5, upper=0.5).to(device)


def sparse(size: int, rows: int, entries: int = 5) -> sn.Constraints:
    """A sparse matrix with a few entries in each row."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(0, size, (rows, entries), generator=generator)
    values = torch.randn(rows, entries, generator=generator, dtype=torch.float64)
    indices = torch.stack([torch.arange(rows).repeat_interleave(entries), columns.flatten()])
    return sn.Linear(
        torch.sparse_coo_tensor(indices, values.flatten(), (rows, size), check_invariants=True), upper=-0.1
    )


def measure(
    device: torch.device,
    out: Path,
    cases: str | Sequence[str] = CASES,
    size: int = 5000,
    rows: int = 2000,
    batch: int = 4,
) -> Benchmark:
    """Repair and differentiate every case once.

    Args:
        device: where.
        out: nothing is kept there but the table.
        cases: names in `CASES`, one or several.
        size: variables of `waves`.
        rows: of `waves`.
        batch: how many predictions are repaired.
    """
    cases = (cases,) if isinstance(cases, str) else cases
    if unknown := set(cases) - set(CASES):
        raise ValueError(f"`cases` are {', '.join(CASES)}, but got {', '.join(sorted(unknown))}")
    found = [_row(name, *_case(name, size, rows, batch, device)) for name in cases]
    title = "The matrix-free route: forward and backward"
    return Benchmark(title, COLUMNS, found, command_line("matrix_free", device), hardware(device))


def _case(
    name: str, size: int, rows: int, batch: int, device: torch.device
) -> tuple[sn.Constraints, Tensor, Tensor | None]:
    """The constraints, predictions and inputs of a case."""

    def noise(size: int) -> Tensor:
        return 2 * torch.randn(batch, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)

    if name == "waves":
        return waves(size, rows, device), noise(size), None
    if name == "sparse":
        return sparse(20 * size, 25 * rows).to(device), noise(20 * size), None
    sizes = {"size": 1000, "inequalities": 950, "equalities": 50} if name == "nclp" else {}
    problem = sn.problems.load(name, **sizes).to(device)
    return problem.constraints, *start(problem, 0.5, batch)


def _row(name: str, constraints: sn.Constraints, y: Tensor, x: Tensor | None) -> list[Any]:
    """One row of the table."""
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
