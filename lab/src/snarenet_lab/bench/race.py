"""A training race on NCLP: how many seconds of training until the test instances are nearly optimal and all feasible.

A target is a geometric mean, over the test instances, of the relative suboptimality (f(y) - f*) / |f*|, together with
every one of them feasible to 1e-8 (ours) or 1e-6 (the others). The learning rate falls along a cosine, so a run that
was not planned to end there is no fair sample: instead every method climbs a ladder of epochs, 1, 2, 4, ..., each rung
a run of its own, planned to its end, and the seconds of the shortest run that meets the target count. It stops when all
targets are met, or when the next run would take longer than the limit.

Seconds are those of training: a method's own pretraining counts; validation, tests, the compilation of kernels (a short
run before the first makes up for it) and that of JAX do not. A method has the recipe `best` of its own. The original
Pi-net has the same network, Adam with the best learning rate of a small grid, and the iterations and gradient of its
authors' benchmark. Runs that are done are kept under `out`, and never made again.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.files import write_whole
from snarenet.layers import METHODS
from snarenet.problems import Problem, load
from snarenet.problems.separable import Separable
from snarenet.reference import solve
from snarenet.training import Run, TrainConfig
from snarenet.training.metrics import gmean
from snarenet_lab.bench import original
from snarenet_lab.bench.common import Benchmark, hardware
from snarenet_lab.bench.field import original_arrays
from snarenet_lab.sweep import TrainingJob, applicable, sweep

ORIGINAL = "pinet-jax"
RACERS = ("snare", "pinet", ORIGINAL, "dc3", "hardnet", "hproj", "fsnet", "optnet")
TARGETS = (3.5e-3, 1e-4)
LADDER = (1, 2, 4, 8, 16, 32, 64, 128)
LADDERS = {"hproj": (16, 64)}  # its pretraining takes a minute or more, in every run
LIMIT = {"cuda": 120.0, "cpu": 300.0}
RATES = (1e-4, 3e-4, 1e-3, 3e-3)  # of the original Pi-net's Adam
_OURS, _OTHERS = 1e-8, 1e-6  # to which every instance must be feasible
_BATCHES = {"optnet": 32}  # as in `compare`: a cone program for every sample is slow, so it gets more steps
_RECORD = 10  # steps of a repair in a recorded training step, on a GPU; as in docs/methods.md
_ITERATIONS = 50  # of the original Pi-net in training


@dataclass(frozen=True)
class Rung:
    """A finished run: its length, the gap and violation of its test, and the seconds that a further epoch takes."""

    epochs: int
    seconds: float
    gap: float
    violation: float
    pace: float
    setting: str = ""


@dataclass(frozen=True)
class Race:
    """What all methods share: the problem, its optima, and where and how long they run."""

    problem: Problem
    reference: Tensor
    device: torch.device
    out: Path
    limit: float
    changes: Mapping[str, Any]

    def config(self, method: str, epochs: int) -> TrainConfig:
        """How a method is trained."""
        own = {"batch": _BATCHES[method]} if method in _BATCHES else {}
        if self.device.type == "cuda":
            own["record"] = _RECORD
        fixed = {"method": method, "epochs": epochs, "validate_every": epochs}
        return TrainConfig.recipe("best", self.problem.name, **own | dict(self.changes) | fixed)

    def gap(self, objective: Tensor) -> float:
        """Geometric mean of the relative suboptimality, over instances whose optimum is known."""
        known = self.reference.isfinite()
        best = self.reference[known]
        return gmean((objective[known] - best) / best.abs())

    def tolerance(self, method: str) -> float:
        """To which every instance must be feasible."""
        return _OURS if method == "snare" else _OTHERS


def measure(
    device: torch.device,
    out: Path,
    methods: str | Sequence[str] = RACERS,
    targets: Sequence[float] = TARGETS,
    ladder: Sequence[int] | None = None,
    limit: float | None = None,
    reference: Path | str | None = None,
    sizes: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Benchmark:
    """Let the methods race.

    Args:
        device: where to train.
        out: the runs go into `out/race`.
        methods: names in `snarenet.layers.METHODS`, or "pinet-jax"; one or several.
        targets: relative suboptimalities.
        ladder: epochs of the runs, ascending; `LADDER`, or the method's own in `LADDERS`, unless given.
        limit: most seconds of a run, `LIMIT` unless given.
        reference: a .npz file with the optimal values of the test instances under "nclp"; IPOPT's unless given.
        sizes: arguments of the family.
        changes: fields of the recipes that are different, for all methods.
    """
    methods = (methods,) if isinstance(methods, str) else methods
    if unknown := set(methods) - {*METHODS, ORIGINAL}:
        raise ValueError(f"`methods` are {', '.join((*METHODS, ORIGINAL))}, but got {', '.join(sorted(unknown))}")
    problem = load("nclp", **sizes or {}).to(device)
    optima, seconds = _reference(problem, reference), limit or LIMIT[device.type]
    race = Race(problem, optima, device, out / "race", seconds, changes or {})
    rows = []
    for method in methods:
        rungs = ladder or LADDERS.get(method, LADDER)
        found, remark = (
            _original(race, targets, rungs) if method == ORIGINAL else _trained(race, method, targets, rungs)
        )
        rows.append([_title(method), race.tolerance(method), *_cells(found, targets, race.tolerance(method)), remark])
    heads = [head for target in targets for head in (f"s to {target:.1e}", f"epochs to {target:.1e}")]
    columns = ["method", "feasible to", *heads, "best gap", "its violation", "longest run, s", "remark"]
    title = "Seconds of training on NCLP until the test instances are within a relative gap, all of them feasible"
    return Benchmark(title, columns, rows, f"snarenet bench race --device {device.type}", hardware(device))


def _title(method: str) -> str:
    return "Pi-net (JAX)" if method == ORIGINAL else METHODS[method].title


def _reference(problem: Problem, path: Path | str | None) -> Tensor:
    """(N,) optimal values of the test instances."""
    count = len(problem.split("test"))
    if path is None:
        return solve(problem).objective.cpu()
    with np.load(path, allow_pickle=False) as file:
        if problem.name not in file or file[problem.name].shape != (count,):
            raise ValueError(f"`reference` must hold {count} values under {problem.name!r}, but {path} does not")
        return torch.from_numpy(file[problem.name])


def _climb(
    run: Callable[[int], Rung], targets: Sequence[float], tol: float, ladder: Sequence[int], limit: float
) -> list[Rung]:
    """The runs up to the first that meets all targets, as long as none is expected to take longer than the limit."""
    rungs: list[Rung] = []
    for epochs in ladder:
        if rungs and rungs[-1].seconds + rungs[-1].pace * (epochs - rungs[-1].epochs) > limit:
            break
        rungs.append(run(epochs))
        print(rungs[-1], file=sys.stderr, flush=True)
        if all(_meets(rungs[-1], target, tol) for target in targets):
            break
    return rungs


def _meets(rung: Rung, target: float, tol: float) -> bool:
    return rung.gap <= target and rung.violation <= tol


def _cells(rungs: Sequence[Rung], targets: Sequence[float], tol: float) -> list[Any]:
    """Seconds and epochs to each target, and the best that was reached."""
    cells: list[Any] = []
    for target in targets:
        first = next((rung for rung in rungs if _meets(rung, target, tol)), None)
        cells += ["not reached" if rungs else None, None] if first is None else [first.seconds, first.epochs]
    if not rungs:
        return [*cells, None, None, None]
    best = min(rungs, key=lambda rung: (rung.violation > tol, rung.gap))
    return [*cells, best.gap, best.violation, max(rung.seconds for rung in rungs)]


def _trained(race: Race, method: str, targets: Sequence[float], ladder: Sequence[int]) -> tuple[list[Rung], str]:
    """The runs of a method of this package, and why there are none, or what failed."""
    _, refused = applicable(race.problem, [race.config(method, 1)])
    if method in refused:
        return [], refused[method]
    failures: dict[str, str] = {}
    tol, sizes = race.tolerance(method), dict(race.problem.sizes)
    jobs = {epochs: TrainingJob(race.problem.name, race.config(method, epochs), sizes, tol) for epochs in ladder}
    if not Run.evaluated(race.out / jobs[ladder[0]].name):
        _warm_up(race, method)

    def run(epochs: int) -> Rung:
        failures.update(sweep([jobs[epochs]], race.out, device=str(race.device), quiet=True))
        return _failed(epochs) if failures else _rung(race, race.out / jobs[epochs].name, epochs)

    rungs = _climb(run, targets, tol, ladder, race.limit)
    return [rung for rung in rungs if rung.pace < float("inf")], "; ".join(failures.values())


def _failed(epochs: int) -> Rung:
    """The end of a ladder."""
    never = float("inf")
    return Rung(epochs, never, never, never, never)


def _warm_up(race: Race, method: str) -> None:
    """Two steps, so that libraries are loaded and kernels compiled when the clock starts."""
    config = race.config(method, 1).replace(pretrain=1)
    sizes = dict(race.problem.sizes) | {"instances": round(1.3 * config.batch)}
    with tempfile.TemporaryDirectory() as folder:
        sweep([TrainingJob(race.problem.name, config, sizes)], Path(folder), device=str(race.device), quiet=True)


def _rung(race: Race, folder: Path, epochs: int) -> Rung:
    run = Run.open(folder)
    arrays, seconds = run.instances(), [line["seconds"] for line in run.metrics()]
    if arrays is None:
        raise RuntimeError(f"{folder} was not evaluated")
    pace = (seconds[-1] - seconds[0]) / (epochs - 1) if epochs > 1 else seconds[-1]
    gap = race.gap(torch.from_numpy(arrays["objective"]))
    return Rung(epochs, seconds[-1], gap, float(arrays["violation"].max()), pace)


def _original(race: Race, targets: Sequence[float], ladder: Sequence[int]) -> tuple[list[Rung], str]:
    """The runs of Pi-net's authors' package."""
    if original.interpreter() is None:
        return [], "not installed"
    config, problem, tol = race.config("pinet", 1), race.problem, race.tolerance(ORIGINAL)
    assert isinstance(problem, Separable)
    own = {"inputs": problem.split("train"), "test": problem.split("test")}
    terms = {"square": problem.square, "linear": problem.linear, "sine": problem.sine}
    home = load(problem.name, **problem.sizes)  # on the CPU, where its random numbers are drawn
    arrays = {name: t.cpu().numpy() for name, t in (original_arrays(home, 0.5) | own | terms).items()}
    shared = {
        **{"width": config.width, "depth": config.depth, "batch": config.batch, "seed": config.seed},
        **{"rates": list(RATES), "iterations": _ITERATIONS, "tol": tol, "most": 2000},
    }

    def run(epochs: int) -> Rung:
        settings = shared | {"epochs": epochs}
        found = _kept(
            race,
            settings,
            lambda: original.call("train", arrays, race.device.type, torch.get_num_threads(), **settings),
        )
        rungs = []
        for i, rate in enumerate(RATES):
            gap, violation = race.gap(torch.from_numpy(found["objective"][i])), float(found["violation"][i].max())
            seconds = float(found["seconds"][i])
            rungs.append(Rung(epochs, seconds, gap, violation, seconds / epochs, f"learning rate {rate:g}"))
        return min(rungs, key=lambda rung: (rung.violation > tol, rung.gap))

    try:
        rungs = _climb(run, targets, tol, ladder, race.limit)
    except RuntimeError as error:
        return [], f"failed: {str(error).splitlines()[-1]}"
    best = min(rungs, key=lambda rung: (rung.violation > tol, rung.gap))
    return rungs, f"Adam, {best.setting} in its best run"


def _kept(race: Race, settings: Mapping[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `compute` finds, kept in a file that the settings name."""
    text = json.dumps([race.problem.name, race.problem.sizes, settings], sort_keys=True)
    path = race.out / f"{ORIGINAL}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.npz"
    if not path.exists():
        found = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: np.savez(file, allow_pickle=False, **found))
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
