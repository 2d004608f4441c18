"""How close to the optimum training comes: several seeds of the recipe `best`, side by side on one machine.

    python benchmarks/training.py nclp --out runs/nclp [--seeds 5] [--engine ipopt] [--set width=1024 fresh=True ...]

Each seed trains in a process of its own and is resumed if its folder is there; on a GPU they share it. Then every model
is evaluated on the test instances at 1e-10, and gaps are taken against the reference solver (`--engine none`: only the
objectives are kept, and the same command with an engine finds the gaps later). Reported: mean and standard deviation
over the seeds.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from common import markdown, show

import snarenet as sn
from snarenet.reference import solve
from snarenet.training import metrics

TOL = 1e-10


def train(name: str, out: Path, seed: int, changes: dict, device: str) -> None:
    """Train one seed, or go on with it, and keep what it achieves on the test instances."""
    problem = sn.problems.load(name).to(device)
    config = sn.TrainConfig.recipe("best", name, seed=seed, **changes)
    folder = out / f"seed-{seed}"
    resume = folder if (folder / "checkpoint.safetensors").exists() else None
    model = config.build(problem)
    run = sn.Trainer(config, folder).fit(model, problem, resume)
    found = sn.evaluate(model, problem, tol=TOL)
    run.write_json("evaluation.json", found.summary)
    run.write_arrays("evaluation.npz", found.arrays)


def results(out: Path, seeds: range, best: torch.Tensor) -> list[str]:
    """A row of the table: gaps over the seeds, feasibility, steps, time."""
    gmeans, largest, violation, converged, steps, seconds = [], [], [], [], [], []
    for seed in seeds:
        run = sn.Run.open(out / f"seed-{seed}")
        with np.load(run.path / "evaluation.npz") as arrays:
            gap = metrics.gaps(torch.from_numpy(arrays["objective"]) - best, best)
            violation.append(arrays["violation"].max())
            converged.append((arrays["violation"] <= TOL).mean())
            steps.append(arrays["steps"].max())
        assert gap is not None
        gmeans.append(gap["gmean"])
        largest.append(gap["max"])
        seconds.append(run.metrics()[-1]["seconds"])
    spread = (lambda values: stdev(values)) if len(seeds) > 1 else (lambda values: 0.0)
    return [
        f"{mean(gmeans):.1e} ± {spread(gmeans):.0e}",
        f"{mean(largest):.1e} ± {spread(largest):.0e}",
        f"{100 * min(converged):g} %, {max(violation):.0e}",
        str(max(steps)),
        f"{mean(seconds):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", choices=sn.problems.names())
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seed", type=int, help="train this one only, in this process")
    parser.add_argument("--engine", default="ipopt", help="reference solver, or none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="changes to the recipe")
    options = parser.parse_args()
    changes = {name: _value(text) for name, text in (pair.split("=", 1) for pair in options.set)}
    if options.seed is not None:
        return train(options.problem, options.out, options.seed, changes, options.device)
    command = [sys.executable, __file__, options.problem, "--out", str(options.out), "--device", options.device]
    seeds = range(options.seeds)
    done = [(options.out / f"seed-{seed}" / "evaluation.npz").exists() for seed in seeds]
    jobs = [subprocess.Popen([*command, "--seed", str(s), "--set", *options.set]) for s in seeds if not done[s]]
    codes = [job.wait() for job in jobs]
    if any(codes):
        raise SystemExit("a seed failed; what it said is above")
    if options.engine == "none":
        return None
    best = solve(sn.problems.load(options.problem), engine=options.engine).objective
    columns = ["problem", "gap, geometric mean", "gap, largest", f"feasible to {TOL:g}, worst", "steps", "seconds"]
    rows = [[f"{options.problem} {' '.join(options.set)}", *results(options.out, seeds, best)]]
    show(f"{options.seeds} seeds, 833 test instances", columns, rows)
    print(markdown(columns, rows))
    return None


def _value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main()
