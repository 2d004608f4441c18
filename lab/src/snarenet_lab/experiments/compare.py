"""`compare`: every method on one problem, trained alike, next to classical solvers; one table and one figure.

In the folder of a comparison are the runs, each in a folder of its own, classical.json, the rows of the solvers, and
comparison.json, .csv, .md and .svg.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from snarenet.layers import METHODS
from snarenet.problems import Problem, load
from snarenet.reference import solve
from snarenet.solution import Solution, Status
from snarenet.training import Run, TrainConfig, evaluate
from snarenet.training.metrics import summarize
from snarenet.training.run import environment
from snarenet_lab.files import write_text
from snarenet_lab.report.comparison import Contender, comparison_table, csv_table, draw_comparison
from snarenet_lab.sweep import TrainingJob, applicable, gap_to, results, sweep

INSTANCES = 100  # test instances that the classical solvers are timed on
_SOLVERS = {"ipopt": "IPOPT", "clarabel": "Clarabel", "slsqp": "SLSQP"}
# A cone program for every sample takes a hundred times as long as the other methods, an unrolled L-BFGS twenty times:
# these get a share of the epochs, and OptNet smaller batches, for more steps.
_SHARES = {"optnet": 0.1, "fsnet": 0.2}
_BATCHES = {"optnet": 32}


@dataclass(frozen=True)
class Plan:
    """What to compare.

    Attributes:
        problem: name of the family.
        sizes: arguments of the family.
        methods: names in `METHODS`.
        seeds: how many runs of each, with the seeds 0, 1, ...
        epochs: of each run; OptNet and FSNet, which are slow, get a tenth and a fifth of them.
        recipe: "best", with each method's `fair` setting, or "paper".
        changes: fields of the recipe that are different, for all methods, or, as "METHOD.FIELD", for one.
        tol: tolerance of the test; that of each method's layer unless given.
    """

    problem: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    methods: Sequence[str] = tuple(METHODS)
    seeds: int = 3
    epochs: int = 10
    recipe: Literal["best", "paper"] = "best"
    changes: Mapping[str, Any] = field(default_factory=dict)
    tol: float | None = None

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"`seeds` must be at least 1, but got {self.seeds}")
        for method in (*self.methods, *(name.split(".")[0] for name in self.changes if "." in name)):
            if method not in METHODS:
                raise ValueError(f"`methods` are {', '.join(METHODS)}, but got {method!r}")
        for name, argument in {"epochs": "epochs", "method": "methods", "seed": "seeds"}.items():
            if name in self.changes:
                raise ValueError(f"`changes` must not set {name!r} for all methods: that is what `{argument}` does")

    def config(self, method: str, seed: int) -> TrainConfig:
        """How one run is trained."""
        common = {name: value for name, value in self.changes.items() if "." not in name}
        prefix = f"{method}."
        own = {name.removeprefix(prefix): v for name, v in self.changes.items() if name.startswith(prefix)}
        slow: dict[str, Any] = {"epochs": max(1, round(_SHARES.get(method, 1.0) * self.epochs))}
        if method in _BATCHES:
            slow["batch"] = _BATCHES[method]
        chosen = common | slow | own
        fixed = {"method": method, "seed": seed, "validate_every": max(1, chosen["epochs"])}
        return TrainConfig.recipe(self.recipe, self.problem, **chosen | fixed)

    def jobs(self, problem: Problem) -> tuple[dict[str, list[TrainingJob]], dict[str, str]]:
        """The runs of each method that can handle the problem, and why others cannot."""
        fit, refused = applicable(problem, [self.config(method, 0) for method in self.methods])
        seeds = range(self.seeds)
        sizes = dict(self.sizes)
        jobs = {
            config.method: [
                TrainingJob(self.problem, self.config(config.method, seed), sizes, self.tol) for seed in seeds
            ]
            for config in fit
        }
        return jobs, refused


def compare(
    plan: Plan,
    out: Path,
    *,
    device: str = "cpu",
    workers: int | None = None,
    cluster: str | None = None,
    reference: Tensor | None = None,
    classical: bool = True,
    stacked: bool = False,
    quiet: bool = False,
) -> tuple[list[Contender], list[str]]:
    """Train what is not trained yet, measure, and write the table and the figure to `out`.

    Args:
        plan: what to compare.
        out: where; a comparison that was stopped goes on there.
        device: where to train and to time.
        workers: runs at a time; 1 unless given, on a cluster as many as it has room for.
        cluster: address of a Ray cluster to train on; `out` must be on a disk that its nodes share, see `sweep`. Times
            are measured in this process.
        reference: (N,) optimal values of the test instances, for gaps.
        classical: also time the classical solvers that can handle the problem.
        stacked: train the seeds of a method as one where that is possible, see `sweep`.
        quiet: show no progress.

    Returns:
        The methods and solvers with what they achieved, and remarks: who refused, what failed.
    """
    problem = load(plan.problem, **plan.sizes).to(device)
    jobs, refused = plan.jobs(problem)
    remarks = [f"{METHODS[method].title}: not here, since {reason}" for method, reason in refused.items()]
    every = [job for several in jobs.values() for job in several]
    failures = sweep(every, out, device=device, workers=workers, cluster=cluster, stacked=stacked, quiet=quiet)
    remarks += [f"{name}: failed, {reason}" for name, reason in failures.items()]
    found = (_contender(several, out, problem, reference) for several in jobs.values())
    contenders = [one for one in found if one is not None]
    if classical and problem.solvable:
        solvers, refusals = _solvers(problem, out, reference)
        contenders, remarks = contenders + solvers, remarks + refusals
    _write(plan, contenders, remarks, out)
    return contenders, remarks


def _contender(jobs: list[TrainingJob], out: Path, problem: Problem, reference: Tensor | None) -> Contender | None:
    """A method, with the runs that are done."""
    runs, config = [], jobs[0].config
    for result in results(jobs, out, reference):
        seconds = None if runs else _timed(Run.open(out / result.job.name), problem)
        own = {"seconds": {"model": seconds}, "training": result.seconds, "seed": result.job.config.seed}
        runs.append(result.summary | own)
    label = config.build_layer(problem).title
    budget = f"{_count(config.epochs, 'epoch')}, {_count(len(runs), 'seed')}"
    return Contender(label, budget, runs) if runs else None


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _timed(run: Run, problem: Problem) -> float:
    """Seconds that an instance takes, all test instances in one batch, with nothing else running; measured once."""
    known = run.read_json("timing.json")
    if known is None:
        found = evaluate(run.load_model(problem), problem)
        known = {"seconds": found.summary["seconds"]["model"], **environment(problem.inputs.device)}
        run.write_json("timing.json", known)
    return known["seconds"]


class _Solved:
    """Solutions in the place of a model."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def solve(self, x: Any, relax: float | Tensor | None = None) -> Solution:
        """These solutions, whatever x is."""
        steps = torch.zeros(len(self.value), dtype=torch.long)
        none = steps.double()
        return Solution(self.value, self.value, torch.full_like(steps, int(Status.CONVERGED)), steps, none, none)


def _solvers(problem: Problem, out: Path, reference: Tensor | None) -> tuple[list[Contender], list[str]]:
    """Every classical solver that can handle the problem, on the first test instances, and why others cannot.

    Times are those of the solver alone, modelling excluded: with one process, and, per instance, with one on each core.
    """
    file, cores = out / "classical.json", os.cpu_count() or 1
    known = json.loads(file.read_text()) if file.exists() else {}
    local = load(problem.name, **problem.sizes)
    x = local.split("test")[:INSTANCES]
    solvers, refusals = [], []
    for engine, title in _SOLVERS.items():
        key = json.dumps([problem.name, problem.sizes, engine], sort_keys=True)
        if key not in known:
            try:
                alone = solve(local, x, engine, starts=1, workers=1, cache=False)
                loaded = solve(local, x.repeat(cores, 1), engine, starts=1, workers=cores, cache=False)
            except (ValueError, ImportError) as error:  # not for this problem, or not installed
                refusals.append(f"{title}: not here, since {error}")
                continue
            outcome = local.run(_Solved(alone.value), x)
            known[key] = summarize(outcome, local.equalities(x)) | {
                "seconds": {"model": alone.seconds.mean().item()},
                "parallel": loaded.seconds.mean().item() / cores,
                "objectives": outcome.objective.tolist(),
            }
            write_text(file, json.dumps(known, indent=1))
        found = {name: value for name, value in known[key].items() if name != "objectives"}
        if reference is not None:
            found["gap"] = gap_to(torch.tensor(known[key]["objectives"], dtype=torch.float64), reference[: len(x)])
        solvers.append(Contender(title, _count(len(x), "instance"), [found]))
    return solvers, refusals


def _write(plan: Plan, contenders: list[Contender], remarks: list[str], out: Path) -> None:
    found = {"problem": plan.problem, "remarks": remarks, "rows": [one._asdict() for one in contenders]}
    write_text(out / "comparison.json", json.dumps(found, indent=1))
    write_text(out / "comparison.csv", csv_table(contenders))
    notes = "".join(f"- {remark}\n" for remark in remarks)
    write_text(out / "comparison.md", comparison_table(contenders).markdown() + ("\n" + notes if notes else ""))
    try:
        picture = draw_comparison(contenders, f"{plan.problem}, test instances")
    except ImportError as error:
        remarks.append(f"No figure: {error}")
    else:
        write_text(out / "comparison.svg", picture)
