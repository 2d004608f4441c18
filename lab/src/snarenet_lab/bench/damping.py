"""How the damping schedule decides training quality: the same training with different schedules.

    python benchmarks/damping.py [--problem nclp] [--epochs 60] [--seeds 2] [--out FILE.md]

A float32 MLP 400-400 (SiLU) is trained on the objective through the repair (AdamW 1e-3 with cosine decay, batch 200, no
penalty, no relaxation, tol 1e-6), and tested with tol 1e-10. The mean objective on the 833 test instances is the mean
optimality gap up to a constant: lower is better, and differences are differences of gaps.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import torch

import snarenet as sn
from snarenet.bench.common import Table, hardware

SCHEDULES = {
    "nclp": [(10, 0.4), (10, 0.5), (10, 0.6), (10, 0.7), (10, 0.8), (1, 0.6), (100, 0.6)],
    "qcqp": [(10, 0.3), (10, 0.5), (10, 0.6), (10, 0.7), (1, 0.6), (100, 0.6)],
}


def train(name: str, damping: sn.Annealed, epochs: int, seed: int, device: str) -> dict[str, float]:
    torch.manual_seed(seed)
    problem = sn.problems.load(name).to(device)
    layer = sn.SnareLayer(problem.constraints, damping, tol=1e-6)
    model = sn.ConstrainedModel(sn.MLP(problem.inputs.shape[1], problem.size), layer).to(device)
    data, batch = problem.split("train"), 200
    optimizer = torch.optim.AdamW(model.net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(data) / batch))
    begin, steps = time.perf_counter(), []
    for _ in range(epochs):
        for index in torch.randperm(len(data)).to(device).split(batch):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", default="nclp", choices=SCHEDULES)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args()
    columns = ["damping", "mean objective, one per seed", "largest violation", "steps in training", "seconds"]
    rows = []
    for start, ratio in SCHEDULES[options.problem]:
        damping = sn.Annealed(start, ratio)
        runs = [train(options.problem, damping, options.epochs, s, options.device) for s in range(options.seeds)]
        rows.append(
            [
                f"{start} · {ratio}ᵏ",
                ", ".join(f"{run['objective']:.4f}" for run in runs),
                f"{max(run['violation'] for run in runs):.0e}",
                f"{sum(run['steps'] for run in runs) / len(runs):.0f}",
                f"{sum(run['seconds'] for run in runs) / len(runs):.0f}",
            ]
        )
        print(rows[-1], file=sys.stderr)
    title = f"{options.problem}, {options.epochs} epochs"
    table = Table(title, columns, rows, "python benchmarks/damping.py", hardware(torch.device(options.device)))
    table.show()
    if options.out:
        options.out.write_text(table.markdown())


if __name__ == "__main__":
    main()
