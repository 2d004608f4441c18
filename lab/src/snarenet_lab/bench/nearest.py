r"""The distance to the prediction, against the nearest point of the set, which IPOPT looks for.

A prediction is a point y of the set and noise, each variable up to 20 % of its size off,

$$ \hat y = y + s \max(|y|, \bar y) \odot N(0, I), \qquad s \sim U(0, 0.2). $$

IPOPT minimises $\| z - \hat y \|^2$ over the set from $\hat y$; a sample where it finds nothing is left out. "Within
0.1 %" are samples whose distance is at most 1.001 times IPOPT's. Times are of a thread on the processor, a sample;
"times the repair" compares forward and backward of `start="auto"` with `start=None`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snarenet as sn
from snarenet.reference.program import digest
from snarenet.reference.threads import one_thread
from snarenet_lab.bench.common import Benchmark, Ledger, command_line, hardware
from snarenet_lab.bench.general_problems import (
    General,
    Ipopt,
    acopf,
    bilinear,
    cart,
    shell,
    torus,
    track,
    trigonometric,
    unicycle,
)  # fmt: skip

CASES: dict[str, Callable[[], General]] = {
    "torus": torus,
    "shell": shell,
    "bilinear": bilinear,
    "trigonometric": trigonometric,
    "AC-OPF 57": partial(acopf, "57_ieee"),
    "unicycle 20": partial(unicycle, 20),
    "track 200": track,
    "cart 50": cart,
}
TOL, CLOSE = 1e-8, 1.001
_MOST = 0.2  # how far off predictions are, in sizes of their variables
_LEAST = 0.05  # the least size of a variable
_ITERATIONS = 300
COLUMNS = (
    *("set", "variables", "rows", "samples", "within 0.1 %", "worst", "in the set", "repair alone: within 0.1 %"),
    *("repair alone: worst", "ms", "repair alone: ms", "times the repair", "IPOPT ms"),
)


def measure(
    device: torch.device, out: Path, only: str | Sequence[str] | None = None, samples: int = 200, repeats: int = 3
) -> Benchmark:
    """Measure all sets; 99 of 100 samples must be within 0.1 %, all of them in the set, at most 3 times the repair.

    Args:
        device: where the repairs run; IPOPT runs on the CPU.
        out: what IPOPT found is kept in nearest-ipopt.jsonl there.
        only: names in `CASES`, one or several; all unless given.
        samples: predictions of each set.
        repeats: passes on the clock.
    """
    names = tuple(CASES) if only is None else (only,) if isinstance(only, str) else tuple(only)
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"`only` must be of {', '.join(CASES)}, but got {', '.join(unknown)}")
    ledger, rows = Ledger(out / "nearest-ipopt.jsonl"), []
    for name in names:
        rows.append(_row(name, CASES[name](), samples, repeats, device, ledger))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    title = "The distance from predictions up to 20 % off, against the nearest point"
    table = Benchmark(title, COLUMNS, rows, command_line("nearest", device), hardware(device))
    missed = [row["set"] for row in table.records() if row["within 0.1 %"] < 0.99 or row["in the set"] < 1]
    return replace(table, failure=f"not near enough, or outside: {', '.join(missed)}" if missed else "")


def predictions(problem: General, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Predictions (B, n) off points of the set, and inputs."""
    y, x = problem.start(count, 1.0, seed)
    found = sn.repair(problem.constraints, y, x, start=None, rescue=True)
    base, x = found.value[found.converged], x[found.converged]
    size = base.abs().clamp(min=base.abs().mean(0).clamp(min=_LEAST))
    draw = torch.Generator().manual_seed(seed + 1)
    share = _MOST * torch.rand(len(base), 1, generator=draw, dtype=torch.float64)
    return base + share * size * torch.randn(base.shape, generator=draw, dtype=torch.float64), x


def references(problem: General, y: Tensor, x: Tensor) -> dict[str, Any]:
    """IPOPT's nearest points to predictions, one after the other on one thread."""
    n, d = y.shape[1], x.shape[1]

    def apart(both: Any, m: Any) -> tuple[Any, Any]:
        return m.take(both, slice(0, d)), m.take(both, slice(d, None))

    def distance(z: Any, both: Any, m: Any) -> Any:
        gap = z - apart(both, m)[1]
        return gap * gap / 2

    program = replace(
        problem,
        draw=lambda count, _: torch.zeros(count, d + n, dtype=torch.float64),
        objective=distance,
        rows=lambda z, both, m: problem.rows(z, apart(both, m)[0], m),
    )
    with one_thread():
        solver = Ipopt(program, max_iter=_ITERATIONS, tol=1e-9)
        found = [_solve(solver, problem, *pair) for pair in zip(y, x, strict=True)]
    return {name: [one[name] for one in found] for name in ("y", "success", "ms")}


def _solve(solver: Ipopt, problem: General, y: Tensor, x: Tensor) -> dict[str, Any]:
    rows, box = problem.bounds(x)
    numbers = {
        "x0": y,
        "p": torch.cat([x, y]),
        "lbx": box[:, 0],
        "ubx": box[:, 1],
        "lbg": rows[:, 0],
        "ubg": rows[:, 1],
    }
    begin = time.thread_time()
    found = solver.solver(**{name: v.numpy() for name, v in numbers.items()})
    ms = 1e3 * (time.thread_time() - begin)
    point = np.asarray(found["x"]).flatten().tolist()
    return {"y": point, "success": bool(solver.solver.stats()["success"]), "ms": ms}


def _row(name: str, problem: General, samples: int, repeats: int, device: torch.device, ledger: Ledger) -> list[Any]:
    y, x = predictions(problem, samples)
    key = {"problem": name, "digest": digest(y.numpy(), x.numpy()).hex()[:16]}
    known = ledger.get(key, partial(references, problem, y, x))
    solved = torch.tensor(known["success"])
    y, x, best = y[solved], x[solved], torch.tensor(known["y"], dtype=torch.float64)[solved]
    limit = (best - y).norm(dim=1)
    y, x, constraints = y.to(device), x.to(device), problem.constraints.to(device)
    (near, *fast), (plain, *slow) = (_timed(constraints, y, x, start, repeats) for start in ("auto", None))
    ratios = [(value - y).norm(dim=1).cpu() / limit for value in (near, plain)]
    found = [((ratio <= CLOSE).double().mean().item(), ratio.max().item()) for ratio in ratios]
    inside = (constraints.violation(near, x) <= TOL).double().mean().item()
    forward = [1e3 * clock[0] / len(y) for clock in (fast, slow)]
    times = sum(fast) / sum(slow)
    ms = float(np.median(np.array(known["ms"])[solved.numpy()]))
    rows = constraints.rows_for(y.shape[1])
    return [name, y.shape[1], rows, len(y), *found[0], inside, *found[1], *forward, times, ms]


def _timed(constraints: sn.Constraints, y: Tensor, x: Tensor, start: Any, repeats: int) -> tuple[Tensor, float, float]:
    """Where a repair leads, and the least seconds of its forward and backward pass."""
    layer, value, best = sn.SnareLayer(constraints, tol=TOL, start=start), y, (np.inf, np.inf)
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for repeat in range(repeats + 1):  # the first one does not count: it may compile
            leaf = y.clone().requires_grad_()
            begin = time.thread_time()
            value = layer(leaf, x)
            middle = time.thread_time()
            value.square().sum().backward()
            if repeat:
                best = min(best[0], middle - begin), min(best[1], time.thread_time() - middle)
    finally:
        torch.set_num_threads(count)
    return value.detach(), *best
