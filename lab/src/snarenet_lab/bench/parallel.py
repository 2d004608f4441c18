"""Data-parallel training: the same global batch on one process and on several, under `torchrun`.

Every process takes its share of each batch, and gradients are added up, so the loss must be the same to rounding;
"difference" is that of the last epoch's loss, relative to one process's. Each process has one thread on a CPU. A row
with as many threads in one process shows what threads alone would gain. Processes that have to share one GPU talk by
gloo, since NCCL wants a GPU each; they show the overhead and no speed-up. The first epoch does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from snarenet.problems import load
from snarenet.training import Run, TrainConfig, Trainer
from snarenet_lab.bench.common import Benchmark, hardware

COLUMNS = ("problem", "processes", "threads each", "batch", "s per epoch", "speed-up", "loss", "difference", "GPUs")
BATCHES = {"nclp": 1000, "qcqp": 1000}


def measure(
    device: torch.device,
    out: Path,
    processes: Sequence[int] = (1, 2),
    batches: Mapping[str, int] | None = None,
    epochs: int = 4,
    sizes: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Train the recipe `best` of some problems on different numbers of processes.

    Args:
        device: "cpu" or "cuda".
        out: the runs go into `out/parallel`; old ones there are made again.
        processes: how many, the first of which the others are compared with.
        batches: the problems, and their global batches; `BATCHES` unless given.
        epochs: of each run.
        sizes: arguments of the families.
        changes: fields of the recipe that are different.
    """
    rows: list[list[Any]] = []
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    for problem, batch in (batches or BATCHES).items():
        config = dict(changes or {}) | {"batch": batch, "epochs": epochs, "validate_every": epochs}
        plans = [(count, 1) for count in processes]
        if device.type == "cpu" and max(processes) > 1:
            plans.append((1, max(processes)))
        first: tuple[float, float] | None = None
        for count, threads in plans:
            folder = out / "parallel" / f"{problem}-{count}x{threads}"
            task = {"problem": problem, "sizes": dict(sizes or {}), "config": config, "out": str(folder)}
            _launch(task | {"device": device.type, "threads": threads}, count)
            seconds, loss = _read(Run.open(folder))
            pace, base = first = first or (seconds, loss)
            used = f"{count} share {gpus}" if count > gpus else f"{count}"
            difference = abs(loss - base) / abs(base)
            rows.append(
                [problem, count, threads, batch, seconds, pace / seconds, loss, difference, used if gpus else None]
            )
    title = "Training on several processes, the same global batch"
    return Benchmark(title, COLUMNS, rows, f"snarenet bench parallel --device {device.type}", hardware(device))


def _launch(task: Mapping[str, Any], processes: int) -> None:
    """Run `main` in each of some processes."""
    Run.remove(task["out"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "snarenet_lab.bench.parallel", json.dumps(task)]
    environment = os.environ | {"OMP_NUM_THREADS": str(task["threads"])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"training on {processes} processes failed: {done.stderr.strip()[-2000:]}")


def _read(run: Run) -> tuple[float, float]:
    """Seconds of an epoch, without the first if there are more, and the loss of the last."""
    lines = run.metrics()
    seconds = [line["seconds"] for line in lines]
    pace = (seconds[-1] - seconds[0]) / (len(lines) - 1) if len(lines) > 1 else seconds[0]
    return pace, lines[-1]["loss"]


def main() -> None:
    """Train, as one of the processes that `torchrun` started; the task is on the command line, as JSON."""
    task = json.loads(sys.argv[1])
    rank, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(task["threads"])
    device = torch.device(task["device"])
    if device.type == "cuda":
        shared = count > torch.cuda.device_count()
        device = torch.device("cuda", 0 if shared else rank)
        torch.cuda.set_device(device)
        if shared and count > 1:
            dist.init_process_group("gloo")
    problem = load(task["problem"], **task["sizes"]).to(device)
    config = TrainConfig.recipe("best", task["problem"], **task["config"])
    Trainer(config, task["out"], quiet=True).fit(config.build(problem), problem)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
