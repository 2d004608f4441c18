"""How the damping schedule decides training quality: the same training with different schedules.

A float32 MLP 400-400 (SiLU) is trained on the objective through the repair (AdamW 1e-3 with cosine decay, batch 200, no
penalty, no relaxation, tol 1e-6), and tested with tol 1e-10. The mean objective on the 833 test instances is the mean
optimality gap up to a constant: lower is better, and differences are differences of gaps.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import snarenet as sn
from snarenet_lab.bench.common import Benchmark, command_line, hardware

COLUMNS = ("damping", "mean objective, one per seed", "largest violation", "steps in training", "seconds")
SCHEDULES: dict[str, list[tuple[float, float]]] = {  # start and ratio
    "nclp": [(10, 0.4), (10, 0.5), (10, 0.6), (10, 0.7), (10, 0.8), (1, 0.6), (100, 0.6)],
    "qcqp": [(10, 0.3), (10, 0.5), (10, 0.6), (10, 0.7), (1, 0.6), (100, 0.6)],
}


def measure(
    device: torch.device,
    out: Path,
    problem: str = "nclp",
    epochs: int = 60,
    seeds: int = 2,
    schedules: Sequence[tuple[float, float]] | None = None,
    sizes: dict[str, Any] | None = None,
) -> Benchmark:
    """Train with every schedule.

    Args:
        device: where.
        out: nothing is kept there but the table.
        problem: the family, in `SCHEDULES`.
        epochs: of each run.
        seeds: runs of each schedule.
        schedules: (start, ratio) of each; those of the family unless given.
        sizes: arguments of the family.
    """
    if problem not in SCHEDULES:
        raise ValueError(f"`problem` must be one of {', '.join(SCHEDULES)}, but got {problem!r}")
    family, rows = sn.problems.load(problem, **sizes or {}).to(device), []
    for start, ratio in SCHEDULES[problem] if schedules is None else schedules:
        runs = [train(family, sn.Annealed(start, ratio), epochs, seed) for seed in range(seeds)]
        objectives = ", ".join(f"{run['objective']:.4f}" for run in runs)
        means = (sum(run[key] for run in runs) / len(runs) for key in ("steps", "seconds"))
        rows.append([f"{start} · {ratio}ᵏ", objectives, max(run["violation"] for run in runs), *means])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return Benchmark(f"{problem}, {epochs} epochs", COLUMNS, rows, command_line("damping", device), hardware(device))


def train(problem: sn.problems.Problem, damping: sn.Annealed, epochs: int, seed: int) -> dict[str, float]:
    """What a training with this schedule leads to: "objective", "violation", "steps" and "seconds"."""
    torch.manual_seed(seed)
    data, batch = problem.split("train"), 200
    layer = sn.SnareLayer(problem.constraints, damping, tol=1e-6, start=None)
    model = sn.ConstrainedModel(sn.MLP(data.shape[1], problem.size), layer).to(data.device)
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(data) / batch))
    begin, steps = time.perf_counter(), []
    for _ in range(epochs):
        for index in torch.randperm(len(data)).to(data.device).split(batch):
            solution = model.solve(data[index])
            loss = problem.objective(solution.value, data[index]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            steps.append(solution.steps.max())
    seconds = time.perf_counter() - begin
    layer.tol = 1e-10
    with torch.no_grad():
        test = problem.split("test")
        solution = model.eval().solve(test)
        objective = problem.objective(solution.value, test).mean().item()
    return {
        "objective": objective,
        "violation": solution.violation.max().item(),
        "steps": torch.stack(steps).double().mean().item(),
        "seconds": seconds,
    }
