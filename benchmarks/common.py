"""What the benchmarks share: starting points, the textbook for a problem, clocks and tables."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import snarenet as sn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from textbook import textbook_repair


def start(problem: sn.problems.Problem, sigma: float, batch: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Predictions A^+ x + sigma N(0, I) for the test inputs x, and x: A^+ x solves the equalities A y = x."""
    x = problem.split("test")[:batch]
    right = torch.linalg.pinv(problem.constraints.parts[1].A)
    noise = torch.randn(len(x), problem.size, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return x @ right.T + sigma * noise.to(x.device), x


def textbook(
    problem: sn.problems.Problem, y: Tensor, x: Tensor, damping: float, tol: float, max_steps: int = 200
) -> tuple[Tensor, int]:
    """The authors' layer on NCLP or QCQP: all rows, hand-written Jacobian, unrolled, one stop for the batch."""
    first, second = problem.constraints.parts
    A = second.A
    if isinstance(first, sn.Quadratic):
        H, G = first.H, first.G

        def value(y: Tensor) -> Tensor:
            return torch.cat([y.square() @ H.T + y @ G.T, y @ A.T], 1)

        def jacobian(y: Tensor) -> Tensor:
            return torch.cat([2 * y.unsqueeze(1) * H + G, A.expand(len(y), -1, -1)], 1)
    else:
        rows = torch.cat([first.A, A])

        def value(y: Tensor) -> Tensor:
            return y @ rows.T

        def jacobian(y: Tensor) -> Tensor:
            return rows.expand(len(y), -1, -1)

    _, lower, upper, *_ = problem.constraints.at(y.detach(), x)
    return textbook_repair(
        value, jacobian, lower, upper, y, damping=lambda k: damping, tol=tol, max_steps=max_steps, per_sample=False
    )


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time of a call in milliseconds, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def peak_growth_mib(run: Callable[[], object]) -> float:
    """How far the peak resident size rises above the present size while `run` runs (Linux)."""

    def read(field: str) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return float(line.split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
    before = read("VmRSS")
    run()
    return read("VmHWM") - before


def hardware(device: str = "cpu") -> str:
    """The machine, in a line."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table for people."""
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=160).print(table)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table for a document."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"
