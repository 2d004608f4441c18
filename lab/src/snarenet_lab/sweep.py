"""`sweep`: many training runs, each in a folder that its content names, so that done work is never done again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snarenet.problems import Problem, load
from snarenet.processes import scatter, scatter_over
from snarenet.training import Run, RunError, TrainConfig, Trainer, evaluate
from snarenet.training.metrics import gaps
from snarenet.training.progress import say

_NEUTRAL = ("validate_every", "checkpoint_seconds")  # fields that do not change what is trained


@dataclass(frozen=True)
class TrainingJob:
    """A training run to make.

    Attributes:
        problem: name of the family.
        config: how to train.
        sizes: arguments of the family.
        tol: tolerance of the repair in the test; the layer's own unless given.
    """

    problem: str
    config: TrainConfig
    sizes: dict[str, Any] = field(default_factory=dict)
    tol: float | None = None

    @property
    def name(self) -> str:
        """The name of its folder: readable, and another one whenever something that counts is different.

        Fields that are as they once were do not count, so that a field which is new does not change all names.
        """
        default = TrainConfig.from_dict({}).to_dict()
        fields = {name: v for name, v in _counting(self.config).items() if v != default[name]}
        text = json.dumps([self.problem, self.sizes, fields, self.tol], sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:10]
        return f"{self.problem}-{self.config.method}-seed{self.config.seed}-{key}"

    @property
    def seedless(self) -> str:
        """What runs have in common that differ in nothing but their seeds."""
        return replace(self, config=self.config.replace(seed=0)).name


def sweep(
    jobs: Iterable[TrainingJob],
    out: Path,
    *,
    device: str = "cpu",
    workers: int | None = None,
    cluster: str | None = None,
    stacked: bool = False,
    quiet: bool = False,
) -> dict[str, str]:
    """Make the runs that are not there yet; a run that was stopped goes on.

    Args:
        jobs: the runs.
        out: the folder of all run folders.
        device: where to train.
        workers: runs at a time, each in a process of its own. 1 unless given, which stays in this process; on a
            cluster as many as it has room for.
        cluster: address of a Ray cluster to train on, see `snarenet.processes.scatter_over`. `out` must be on a disk
            that all its nodes share under the same path; a run whose process or node dies goes on from its checkpoint.
        stacked: train runs that differ in nothing but their seeds as one, see `Trainer.fit_seeds`; if that fails, each
            goes on by itself.
        quiet: show no progress of a run in this process.

    Returns:
        Why runs failed, by the names of their jobs; the others are done.
    """
    missing = {job.name: job for job in jobs if not _is_done(job, out)}
    groups: dict[str, list[TrainingJob]] = {}
    for name, job in missing.items():
        groups.setdefault(job.seedless if stacked else name, []).append(job)
    if cluster is not None and missing:
        done = _on_cluster(cluster, groups, out, device, workers)
    else:
        tasks = {name: (several, out, device, quiet) for name, several in groups.items()}
        side_by_side = min(workers or 1, len(tasks))
        done = (
            scatter(_attempt, tasks, side_by_side, _share_cores, (side_by_side,))
            if side_by_side > 1
            else ((name, _attempt(task)) for name, task in tasks.items())
        )
    failures = {}
    each = (pair for group, reasons in done for pair in zip(groups[group], reasons, strict=True))
    for count, (job, failure) in enumerate(each, 1):
        name = job.name
        if not quiet:
            say(f"[{count} of {len(missing)}] {name}: {failure or 'done'}")
        if failure:
            failures[name] = failure
    return failures


def _is_done(job: TrainingJob, out: Path) -> bool:
    """Is the run there? An error if it is, but of another configuration: the default of a field has changed since."""
    folder = out / job.name
    if not Run.evaluated(folder):
        return False
    mine, theirs = _counting(job.config), Run.open(folder).config.to_dict()
    changed = [name for name in mine if mine[name] != theirs[name]]
    if changed:
        raise RunError(f"{folder} holds a run with another default of {', '.join(changed)}: choose another `out`")
    return True


def _counting(config: TrainConfig) -> dict[str, Any]:
    """The fields that decide what is trained."""
    idle = () if config.relaxation == "adarel" else ("relax_mode",)
    return {name: value for name, value in config.to_dict().items() if name not in (*_NEUTRAL, *idle)}


def _share_cores(workers: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _attempt(task: tuple[Sequence[TrainingJob], Path, str, bool]) -> list[str]:
    """Why each run failed, or an empty string: one failure does not end the others."""
    jobs, out, device, quiet = task
    try:
        if len(jobs) == 1:
            run_job(jobs[0], out, device, quiet)
        else:
            run_stacked(jobs, out, device, quiet)
    except (RuntimeError, ValueError, ArithmeticError, ImportError, OSError) as error:
        if len(jobs) == 1:
            return [f"{type(error).__name__}: {error}"]
        return [_attempt(([job], out, device, quiet))[0] for job in jobs]
    return [""] * len(jobs)


def _on_cluster(
    cluster: str, groups: Mapping[str, Sequence[TrainingJob]], out: Path, device: str, workers: int | None
) -> Iterator[tuple[str, list[str]]]:
    """(name, why its runs failed) of each group of runs, made on a cluster."""
    out, kind = out.absolute(), torch.device(device).type  # which GPU of a node it is, Ray says
    out.mkdir(parents=True, exist_ok=True)
    marker = out / f".shared-{uuid.uuid4().hex}"
    marker.touch()
    try:
        tasks = {name: (marker, (jobs, out, kind, True)) for name, jobs in groups.items()}
        yield from scatter_over(cluster, _attempt_there, tasks, workers, gpu=kind == "cuda")
    finally:
        marker.unlink(missing_ok=True)


def _attempt_there(task: tuple[Path, tuple[Sequence[TrainingJob], Path, str, bool]]) -> list[str]:
    """`_attempt` on a node of a cluster, if it sees the file `marker` that the first process wrote."""
    marker, attempt = task
    if not marker.exists():  # what is written here would be lost
        raise ValueError(
            "`out` must be a folder on a disk that all nodes of the cluster share, but the node "
            f"{platform.node()} does not see what is written to {marker.parent}"
        )
    torch.set_num_threads(1)  # the core it was given; and the same numbers on every node
    return _attempt(attempt)


def run_job(job: TrainingJob, out: Path, device: str, quiet: bool = False) -> Run:
    """Train, or go on with it, and keep what the model achieves on the test instances."""
    return run_stacked([job], out, device, quiet)[0]


def run_stacked(jobs: Sequence[TrainingJob], out: Path, device: str, quiet: bool = False) -> list[Run]:
    """`run_job` for jobs that differ in nothing but their seeds, trained as one."""
    first = jobs[0]
    problem, folders = load(first.problem, **first.sizes).to(device), [out / job.name for job in jobs]
    seeds = [job.config.seed for job in jobs]
    runs = Trainer(first.config, quiet=quiet).fit_seeds(seeds, problem, folders, resume=True)
    for run in runs:
        found = evaluate(run.load_model(problem), problem, tol=first.tol)
        run.save_evaluation(*found)
    return runs


@dataclass(frozen=True)
class Result:
    """What a finished run achieved: the summary of `evaluate`, with gaps where references are given."""

    job: TrainingJob
    summary: dict[str, Any]
    seconds: float  # of training


def results(jobs: Sequence[TrainingJob], out: Path, reference: Tensor | None = None) -> Iterator[Result]:
    """The finished ones of these runs; `reference` (N,) holds the optimal values of the test instances."""
    for job in jobs:
        run = Run.open(out / job.name) if Run.exists(out / job.name) else None
        summary = None if run is None else run.summary()
        if run is None or summary is None:
            continue
        arrays = run.instances() or {}
        if reference is not None:
            summary = summary | {"gap": gap_to(torch.from_numpy(arrays["objective"]), reference)}
        yield Result(job, summary, run.metrics()[-1]["seconds"])


def gap_to(objective: Tensor, reference: Tensor) -> dict[str, float] | None:
    """The distribution of the gap of these objectives (N,) to optimal values (N,), NaN where unknown."""
    known = reference.cpu()
    return gaps(objective - known, known)


def applicable(problem: Problem, configs: Iterable[TrainConfig]) -> tuple[list[TrainConfig], dict[str, str]]:
    """The configurations whose method can handle the problem, and, by the others' methods, why not."""
    fit, refused = [], {}
    for config in configs:
        try:
            config.build_layer(problem)
        except (ValueError, ImportError) as error:
            refused[config.method] = str(error)
        else:
            fit.append(config)
    return fit, refused
