"""Speed and memory of one repair, forward plus backward, against the textbook layer; all in one run, outputs compared.

    python benchmarks/repair.py [--out FILE.md]

Starts are A^+ x + 0.5 N(0, I) on the paper's test inputs. Memory is the growth of the peak resident size,
each measured in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import hardware, markdown, median_ms, peak_growth_mib, show, start, textbook
from torch import Tensor

import snarenet as sn

TOL = 1e-8


Method = Callable[..., tuple[Tensor, int]]


@dataclass
class Row:
    """Something to measure: a function of (problem, y, x) that returns the repaired y and its steps."""

    name: str
    problem: str
    batch: int
    run: Method
    like: Method | None = None  # what it must equal in value and gradient when both take the same steps
    repeats: int = 9


def ours(**options) -> Method:
    def run(problem: sn.problems.Problem, y: Tensor, x: Tensor, steps: int | None = None) -> tuple[Tensor, int]:
        stop = {"tol": TOL, "max_steps": 200} if steps is None else {"tol": 0.0, "max_steps": steps}
        solution = sn.repair(problem.constraints, y, x, **stop, **options)
        assert steps is not None or solution.converged.all()
        return solution.value, int(solution.steps.max())

    return run


def paper(problem: sn.problems.Problem, y: Tensor, x: Tensor, steps: int | None = None) -> tuple[Tensor, int]:
    return textbook(problem, y, x, 0.01, TOL if steps is None else 0.0, steps or 200)


def as_function(problem: sn.problems.Problem, y: Tensor, x: Tensor) -> tuple[Tensor, int]:
    """QCQP given as one plain function, its Jacobian left to torch.func."""
    quadratic, linear = problem.constraints.parts
    H, G, A, h = quadratic.H, quadratic.G, linear.A, quadratic.limit.upper
    constraints = sn.Nonlinear(
        lambda y, x: torch.cat([y.square() @ H.T + y @ G.T, y @ A.T], 1),
        rows=len(H) + len(A),
        lower=lambda x: torch.cat([torch.full((len(x), len(H)), -torch.inf, dtype=x.dtype), x], 1),
        upper=lambda x: torch.cat([h.expand(len(x), -1), x], 1),
    )
    solution = sn.repair(constraints, y, x, tol=TOL)
    assert solution.converged.all()
    return solution.value, int(solution.steps.max())


def enforce(problem: sn.problems.Problem, y: Tensor, x: Tensor) -> tuple[Tensor, int]:
    """enforce-nn's projection, Newton on equalities and Fischer-Burmeister complementarity, with our Jacobian."""
    from enforce.core.config import ENFORCEConfig
    from enforce.core.model import ENFORCE

    quadratic, linear = problem.constraints.parts
    H, G, A, h = quadratic.H, quadratic.G, linear.A, quadratic.limit.upper
    n, m, eps = problem.size, len(H), 1e-8

    def parts(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, multipliers = z[:, :n], z[:, n:]
        slack = y.square() @ H.T + y @ G.T - h
        return slack, multipliers, torch.sqrt(multipliers**2 + slack**2 + eps)

    def residual(x: Tensor, z: Tensor) -> Tensor:
        slack, multipliers, root = parts(z)
        return torch.cat([z[:, :n] @ A.T - x, root - multipliers + slack], 1)

    def jacobian(z: Tensor) -> Tensor:
        slack, multipliers, root = parts(z)
        inner = (2 * z[:, None, :n] * H + G) * (slack / root + 1).unsqueeze(2)
        bottom = torch.cat([inner, torch.diag_embed(multipliers / root - 1)], 2)
        top = torch.cat([A.expand(len(z), -1, -1), A.new_zeros(len(z), len(A), m)], 2)
        return torch.cat([top, bottom], 1)

    one, zero = torch.ones(1), torch.zeros(1)
    config = ENFORCEConfig(input_neurons=x.shape[1], output_neurons=n + m, max_it=100)
    layer = ENFORCE((zero, one), (zero, one), residual, config, weighting_option=1, jac=jacobian)
    z = torch.cat([y, y.new_zeros(len(y), m)], 1)
    layer.compute_dc_dy(x, z)
    z = layer.project(x, z)
    layer.nc = m + len(A)
    z, steps = layer.ada_np(x, z, tolerance_mode="max", tolerance_value=TOL)
    return z[:, :n], steps


ROWS = [
    Row("textbook, damping 0.01", "nclp", 200, paper, repeats=3),
    Row("snarenet, all rows, damping 0.01", "nclp", 200, ours(rows="all", damping=0.01), paper, 21),
    Row("snarenet, defaults", "nclp", 200, ours(), repeats=21),
    Row("textbook, damping 0.01", "qcqp", 100, paper, repeats=3),
    Row("snarenet, all rows, damping 0.01", "qcqp", 100, ours(rows="all", damping=0.01), paper),
    Row("snarenet, defaults", "qcqp", 100, ours()),
    Row("snarenet, defaults, as one function", "qcqp", 100, as_function),
]
if importlib.util.find_spec("enforce"):
    ROWS.append(Row("enforce-nn 1.0.4", "qcqp", 100, enforce, repeats=3))


def differentiated(method: Method, row: Row, **options) -> tuple[Tensor, Tensor, int, float]:
    """One pass: value, gradient, steps and violation."""
    problem = sn.problems.load(row.problem)
    y, x = start(problem, 0.5, row.batch)
    y.requires_grad_()
    value, steps = method(problem, y, x, **options)
    value.square().sum().backward()
    return value.detach(), y.grad, steps, problem.constraints.violation(value.detach(), x).max().item()


def difference(row: Row, steps: int) -> str:
    """Largest relative difference in value and gradient from what the row must equal, after as many steps."""
    if row.like is None:
        return ""
    mine, theirs = (differentiated(method, row, steps=steps)[:2] for method in (row.run, row.like))
    return f"{max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, theirs, strict=True)):.0e}"


def timed(row: Row) -> float:
    problem = sn.problems.load(row.problem)
    y, x = start(problem, 0.5, row.batch)
    y.requires_grad_()

    def step() -> None:
        y.grad = None
        row.run(problem, y, x)[0].square().sum().backward()

    return median_ms(step, row.repeats)


def peak_mib(index: int) -> float:
    """Growth of the peak resident size over one pass, in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", str(index)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory is not None:
        row = ROWS[options.memory]
        small = Row(row.name, row.problem, 2, row.run)
        differentiated(small.run, small)  # loads libraries and data, so that they do not count
        print(peak_growth_mib(lambda: differentiated(row.run, row)))
        return
    columns = ["problem, method", "batch", "steps", "ms", "times faster", "MiB", "violation", "difference"]
    table, baseline = [], {}
    for index, row in enumerate(ROWS):
        *_, steps, violation = differentiated(row.run, row)
        ms = timed(row)
        baseline.setdefault(row.problem, ms)
        ratio = f"{baseline[row.problem] / ms:.1f}"
        memory = f"{peak_mib(index):.0f}"
        table.append(
            [
                f"{row.problem}: {row.name}",
                row.batch,
                steps,
                f"{ms:.1f}",
                ratio,
                memory,
                f"{violation:.0e}",
                difference(row, steps),
            ]
        )
        print(f"{row.problem}: {row.name}: {ms:.1f} ms", file=sys.stderr)
    show(f"forward + backward to violation {TOL:g}; {hardware()}", columns, table)
    if options.out:
        options.out.write_text(markdown(columns, table))


if __name__ == "__main__":
    main()
