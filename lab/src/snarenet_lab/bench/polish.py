r"""Polishing: how far from the optimum it leaves a result, and what it takes, beside a solver that begins anew.

A result of a network is stood in for by an optimum and noise, a share of what the optima of the problem differ by,

$$ \hat y = y^* + 0.3\, s \odot N(0, I), \qquad s_j = \operatorname{std} y^*_j, $$

repaired in the plain metric, which leaves it some tenths of a per cent off. Gaps are relative to IPOPT's optimum. Times
are of a sample: on a CPU of one thread, on a GPU of the batch; IPOPT's are its own, on one thread of the processor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet.optimum import polish
from snarenet.problems import Problem, load
from snarenet.reference import solve
from snarenet_lab.bench.common import Benchmark, command_line, hardware, median_ms

CASES: dict[str, Callable[..., Problem]] = {
    "AC-OPF 14": partial(load, "acopf", case="14_ieee"),
    "AC-OPF 57": partial(load, "acopf", case="57_ieee"),
    "AC-OPF 118": partial(load, "acopf", case="118_ieee"),
    "AC-OPF 300": partial(load, "acopf", case="300_ieee"),
    "unicycle 20": partial(load, "mpc", horizon=20),
}
_INSTANCES = 3  # drawn for every sample: some are for tests, and some have no feasible point
_NOISE = 0.3
TOL = 1e-8
COLUMNS = (
    *("problem", "variables", "samples", "mean gap before", "mean gap", "largest gap", "in the set"),
    *("repair ms", "polish ms", "IPOPT ms", "IPOPT / polish"),
)


def measure(
    device: torch.device, out: Path, only: str | Sequence[str] | None = None, samples: int = 200, repeats: int = 3
) -> Benchmark:
    """Measure all problems; no result may be worse than before, or outside of its set.

    Args:
        device: where samples are polished; IPOPT runs on the CPU.
        out: what IPOPT found is kept in polish-ipopt there.
        only: names in `CASES`, one or several; all unless given.
        samples: of each problem.
        repeats: passes on the clock.
    """
    names = tuple(CASES) if only is None else (only,) if isinstance(only, str) else tuple(only)
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"`only` must be of {', '.join(CASES)}, but got {', '.join(unknown)}")
    rows = []
    for name in names:
        problem = CASES[name](instances=_INSTANCES * samples)
        rows.append(_row(name, problem, samples, repeats, device, out / "polish-ipopt"))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    title = "Results some tenths of a per cent off the optimum, polished"
    table = Benchmark(title, COLUMNS, rows, command_line("polish", device), hardware(device))
    missed = [r["problem"] for r in table.records() if r["in the set"] < 1 or r["mean gap"] > r["mean gap before"]]
    return replace(table, failure=f"worse than before, or outside: {', '.join(missed)}" if missed else "")


@torch.no_grad()
def _row(name: str, problem: Problem, samples: int, repeats: int, device: torch.device, kept: Path) -> list[Any]:
    x = problem.split("train")[:samples]
    best = solve(problem, x, workers=1, cache=kept)
    x, y, optimum = (tensor[best.ok] for tensor in (x, best.value, best.objective))
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prediction = y + _NOISE * y.std(0) * noise
    problem, prediction, x = problem.to(device), prediction.to(device), x.to(device)

    def repaired() -> sn.Solution:
        return sn.repair(problem.constraints, prediction, x, start=None, rescue=True)

    found = repaired()
    some = found.converged
    result, inputs, optimum = found.value[some], x[some], optimum[some.cpu()]

    def polished() -> Tensor:
        return polish(problem.objective, problem.constraints, result, inputs)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        clock = [median_ms(run, repeats, device) / len(result) for run in (repaired, polished)]
    finally:
        torch.set_num_threads(threads)
    better = polished()
    inside = (problem.constraints.violation(better, inputs) <= TOL).double().mean().item()
    before, after = (_gaps(problem, z, inputs, optimum) for z in (result, better))
    solver = 1e3 * best.seconds[best.ok].median().item()
    sizes = problem.size, len(result), before.mean().item(), after.mean().item(), after.max().item(), inside
    return [name, *sizes, *clock, solver, solver / clock[1]]


def _gaps(problem: Problem, z: Tensor, x: Tensor, optimum: Tensor) -> Tensor:
    """(B,) relative to the optimum."""
    return (problem.objective(z, x).cpu() - optimum) / optimum.abs()
