"""Portfolios: how near to Clarabel's optimum, and how fast, beside Clarabel itself.

- Clarabel solves one instance after the other on one core, with the risk by its factors and the turnover lifted; its
  time is that of setting up and solving, without any check.
- The projection: predictions are returns over costs, a closed form, and the layer starts at the nearest point in the
  metric of the costs. Nothing is trained: the layer is a batched solver that has gradients. It is given what is bought
  and sold, and, in a second row, the weights themselves, with the turnover as an `L1Ball`.
- The network is trained on the objective, and its predictions are repaired without a projection.

Times on a CPU are those of one core, as the process counts them, so that other work on the machine does not matter.
What Clarabel found is kept in `OUT/portfolio-clarabel.jsonl`, for a machine that has a GPU and no Clarabel.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems import Portfolio
from snarenet.reference import solve
from snarenet.reference.engines import Clarabel
from snarenet.reference.reading import read_structure
from snarenet_lab.bench.common import Benchmark, Ledger, command_line, hardware, median_ms

COLUMNS = (
    "assets", "method", "mean gap, %", "largest gap, %", "largest violation", "ms an instance", "times faster",
)  # fmt: skip
_TIMED = 50  # instances that Clarabel is timed on


def measure(
    device: torch.device,
    out: Path,
    assets: Sequence[int] = (50, 200),
    instances: int = 2400,
    batch: int = 100,
    epochs: int = 0,
) -> Benchmark:
    """Solve test instances in every way.

    Args:
        device: where.
        out: what Clarabel found is kept there.
        assets: how many there are; with 5 factors up to a hundred, else 10.
        instances: of the family, a twelfth of which are for tests.
        batch: how many test instances are repaired at once.
        epochs: of the network, on fresh inputs; 0 for no network.
    """
    threads, rows, ledger = torch.get_num_threads(), [], Ledger(out / "portfolio-clarabel.jsonl")
    torch.set_num_threads(1)
    try:
        for count in assets:
            sizes: dict[str, Any] = {"assets": count, "factors": 5 if count <= 100 else 10, "instances": instances}
            for row in _rows(sizes, device, batch, epochs, ledger):
                rows.append([str(count), *row])
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)
    title = f"Portfolios with a risk that depends on x, up to {batch} at a time"
    return Benchmark(title, COLUMNS, rows, command_line("portfolio", device), hardware(device))


def _rows(sizes: dict[str, Any], device: torch.device, batch: int, epochs: int, ledger: Ledger) -> list[list[Any]]:
    problem = Portfolio(**sizes)
    x = problem.split("test")[:batch]
    found = ledger.get(sizes | {"samples": len(x)}, lambda: _clarabel(problem, x))
    best, solver = torch.tensor(found["objective"], dtype=torch.float64), found["ms"]
    rows = [["Clarabel, one core", 0.0, 0.0, found["violation"], solver, 1.0]]
    problem, x = problem.to(device), x.to(device)

    def add(method: str, run: Callable[[], sn.Solution], of: Portfolio) -> None:
        solution = run()
        gap = 100 * (of.objective(solution.value, x).cpu() - best) / best.abs()
        ms = _ms(run, device) / len(x)
        worst = of.constraints.violation(solution.value, x).max().item()
        rows.append([method, gap.mean().item(), gap.max().item(), worst, ms, solver / ms])

    ideal = problem.returns(x) / problem.impact
    prediction = torch.cat([ideal, -ideal], 1)
    weights = problem.impact.repeat(2)
    add("projection", lambda: _repaired(problem, prediction, x, weights), problem)
    plain = Portfolio(**sizes, form="weights").to(device)
    add("projection, on weights", lambda: _repaired(plain, plain.held(x) + ideal, x, plain.impact), plain)
    if epochs:
        model = _trained(plain, epochs)
        add("network", lambda: model.solve(x), plain)
    return rows


def _clarabel(problem: Portfolio, x: Tensor) -> dict[str, Any]:
    """What Clarabel finds, and how long it takes."""
    best = solve(problem, x, "clarabel", workers=1, cache=False)
    violation = best.violation.max().item()
    return {"objective": best.objective.tolist(), "violation": violation, "ms": _clarabel_ms(problem, x[:_TIMED])}


def _clarabel_ms(problem: Portfolio, x: Tensor) -> float:
    """Milliseconds of the process for an instance, from its numbers to Clarabel's solution."""
    instance = problem.constraints.at(x.new_zeros(len(x), problem.size), x)
    read = read_structure(problem, instance, x)
    assert not isinstance(read, str)
    total = 0.0
    for program, lower, upper in zip(*read, strict=True):
        solver = Clarabel(program)
        begin = time.process_time()
        solver(lower, lower, upper)
        total += time.process_time() - begin
    return 1e3 * total / len(x)


def _repaired(problem: Portfolio, prediction: Tensor, x: Tensor, weights: Tensor) -> sn.Solution:
    return sn.repair(problem.constraints, prediction, x, start=sn.Nearest(), weights=weights)


def _trained(problem: Portfolio, epochs: int) -> sn.ConstrainedModel:
    """A network of the default size, trained on fresh inputs."""
    config = sn.TrainConfig(epochs=epochs, fresh=True, validate_every=max(1, epochs))
    model = config.build(problem)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        sn.Trainer(config, Path(folder) / "run", quiet=True).fit(model, problem)
    return model.eval()


def _ms(run: Callable[[], object], device: torch.device) -> float:
    """Time of a call in milliseconds: on a CPU that of the process, the least of three."""
    with torch.no_grad():
        if device.type == "cuda":
            return median_ms(run, 5, device)
        times = []
        for _ in range(3):
            begin = time.process_time()
            run()
            times.append(time.process_time() - begin)
        return 1e3 * min(times)
