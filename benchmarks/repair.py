"""Speed and memory of one repair, forward plus backward, against the textbook layer; all in one run, outputs compared.

    python benchmarks/repair.py [--device cpu|cuda] [--out FILE.md]

Starts are A^+ x + 0.5 N(0, I) on the paper's test inputs. Memory is, on a CPU, the growth of the peak resident size,
measured in a process of its own; on a GPU, that of the peak of allocated memory. The last column is the largest
relative difference, in value and gradient, from what a row must equal. With --out, a JSON file goes beside the Markdown
file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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
    sizes: tuple[int, int, int] = ()  # variables, inequalities and equalities, if not the paper's
    backward: bool = True

    @property
    def title(self) -> str:
        """The problem with its sizes, and what is done with it."""
        return " ".join([self.problem, *map(str, self.sizes)]) + ("" if self.backward else ", forward only")

    def load(self, device: str) -> tuple[sn.problems.Problem, Tensor, Tensor]:
        """The problem, predictions that need a gradient, and inputs."""
        names = ("size", "inequalities", "equalities")
        problem = sn.problems.load(self.problem, **dict(zip(names, self.sizes, strict=False))).to(device)
        y, x = start(problem, 0.5, self.batch)
        return problem, y.requires_grad_(self.backward), x


def ours(**options) -> Method:
    def run(problem: sn.problems.Problem, y: Tensor, x: Tensor, steps: int | None = None) -> tuple[Tensor, int]:
        stop = {"tol": TOL, "max_steps": 200} if steps is None else {"tol": 0.0, "max_steps": steps}
        solution = sn.repair(problem.constraints, y, x, **stop, **options)
        assert steps is not None or solution.converged.all()
        return solution.value, int(solution.steps.max())

    return run


def recorded(record: int) -> Method:
    """A `SnareLayer` with the defaults, recorded into a CUDA graph."""
    layers: dict[int, sn.SnareLayer] = {}

    def run(problem: sn.problems.Problem, y: Tensor, x: Tensor) -> tuple[Tensor, int]:
        if id(problem) not in layers:
            layers[id(problem)] = sn.SnareLayer(problem.constraints, tol=TOL, record=record)
        solution = layers[id(problem)].solve(y, x)
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


def constant(**options) -> Method:
    return ours(rows="all", damping=0.01, **options)


CPU = [
    Row("textbook, damping 0.01", "nclp", 200, paper, repeats=3),
    Row("snarenet, all rows, damping 0.01", "nclp", 200, constant(), paper, 21),
    Row("snarenet, defaults", "nclp", 200, ours(), repeats=21),
    Row("textbook, damping 0.01", "qcqp", 100, paper, repeats=3),
    Row("snarenet, all rows, damping 0.01", "qcqp", 100, constant(), paper),
    Row("snarenet, defaults", "qcqp", 100, ours()),
    Row("snarenet, defaults, as one function", "qcqp", 100, as_function),
]
if importlib.util.find_spec("enforce"):
    CPU.append(Row("enforce-nn 1.0.4", "qcqp", 100, enforce, repeats=3))


def on_gpu(problem: str, batch: int, record: int, sizes: tuple[int, ...] = (), like: bool = True) -> list[Row]:
    """The rows for one problem on a GPU."""
    return [
        Row("textbook, damping 0.01", problem, batch, paper, repeats=3, sizes=sizes),
        Row("snarenet, all rows, damping 0.01", problem, batch, constant(), paper if like else None, sizes=sizes),
        Row("snarenet, defaults", problem, batch, ours(), sizes=sizes),
        Row("snarenet, defaults, recorded", problem, batch, recorded(record), ours() if like else None, sizes=sizes),
    ]


GPU = [
    *on_gpu("nclp", 200, 40),
    *on_gpu("nclp", 200, 20, (500, 450, 50), like=False),
    *on_gpu("nclp", 200, 20, (1000, 950, 50), like=False),
    *on_gpu("qcqp", 100, 20),
    *on_gpu("qcqp", 833, 20, like=False),
    *on_gpu("qcqp", 100, 24, (100, 100, 50), like=False),
    Row("snarenet, defaults", "nclp", 833, ours(), backward=False),
    Row("snarenet, defaults, recorded", "nclp", 833, recorded(40), backward=False),
    Row("snarenet, defaults", "qcqp", 833, ours(), backward=False),
    Row("snarenet, defaults, recorded", "qcqp", 833, recorded(20), backward=False),
]


def differentiated(method: Method, row: Row, device: str, **options) -> tuple[Tensor, Tensor, int, float]:
    """One pass: value, gradient, steps and violation."""
    problem, y, x = row.load(device)
    with torch.set_grad_enabled(row.backward):
        value, steps = method(problem, y, x, **options)
    if row.backward:
        value.square().sum().backward()
    violation = problem.constraints.violation(value.detach(), x).max().item()
    return value.detach(), y.detach() if y.grad is None else y.grad, steps, violation


def difference(row: Row, steps: int, device: str) -> str:
    """Largest relative difference in value and gradient from what the row must equal, after as many steps."""
    if row.like is None:
        return ""
    fixed = {} if "recorded" in row.name else {"steps": steps}
    mine, theirs = (differentiated(method, row, device, **fixed)[:2] for method in (row.run, row.like))
    return f"{max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, theirs, strict=True)):.0e}"


def timed(row: Row, device: str) -> tuple[float, float]:
    """Median milliseconds of a pass, and, on a GPU, the MiB by which its peak of memory rises."""
    problem, y, x = row.load(device)

    def step() -> None:
        y.grad = None
        with torch.set_grad_enabled(row.backward):
            value = row.run(problem, y, x)[0]
        if row.backward:
            value.square().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    if device == "cpu":
        return median_ms(step, row.repeats), 0.0
    y.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    return median_ms(step, row.repeats), memory


def peak_mib(index: int) -> float:
    """Growth of the peak resident size over one pass, in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory", str(index)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device, rows = options.device, GPU if options.device == "cuda" else CPU
    if options.memory is not None:
        row = rows[options.memory]
        small = Row(row.name, row.problem, 2, row.run)
        differentiated(small.run, small, device)  # loads libraries and data, so that they do not count
        print(peak_growth_mib(lambda: differentiated(row.run, row, device)))
        return
    columns = ["problem, method", "batch", "steps", "ms", "times faster", "MiB", "violation", "difference"]
    table, baseline = [], {}
    for index, row in enumerate(rows):
        *_, steps, violation = differentiated(row.run, row, device)
        ms, memory = timed(row, device)
        memory = peak_mib(index) if device == "cpu" else memory
        first = baseline.setdefault((row.title, row.batch), ms)
        ratio, apart = f"{first / ms:.1f}", difference(row, steps, device)
        label = f"{row.title}: {row.name}"
        table.append([label, row.batch, steps, f"{ms:.3g}", ratio, f"{memory:.0f}", f"{violation:.0e}", apart])
        print(*table[-1], sep=" | ", file=sys.stderr, flush=True)
    show(f"forward + backward to violation {TOL:g}; {hardware(device)}", columns, table)
    if options.out:
        options.out.write_text(markdown(columns, table))
        found = {"hardware": hardware(device), "rows": [dict(zip(columns, line, strict=True)) for line in table]}
        options.out.with_suffix(".json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
