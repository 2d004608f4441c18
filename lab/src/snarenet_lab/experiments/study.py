"""`Study`: a reproduction in progress: finished runs, their evaluations at any tolerance, optima, measurements.

In the folder of a reproduction are

    runs/           a folder for every training run, named by its content
    references/     optimal values, one file for each problem and split
    measured/       results of measurements, named by their arguments
    ITEM.json       the results of an item; ITEM.md, .csv, .tex and ITEM-*.svg are made of it
    report.html     all of them on one page

Nothing that is there is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snarenet.files import write_whole
from snarenet.problems import Problem, load
from snarenet.problems.base import Split
from snarenet.reference import solve
from snarenet.training import Run, TrainConfig, evaluate
from snarenet_lab.experiments.budget import Budget
from snarenet_lab.experiments.item import Entry
from snarenet_lab.experiments.quantities import cells
from snarenet_lab.files import write_text
from snarenet_lab.report.results import Row
from snarenet_lab.sweep import TrainingJob, gap_to


class Optima(NamedTuple):
    """Optimal values of a split, NaN where unknown, and the solver's seconds for each: both (N,), on the CPU."""

    objective: Tensor
    seconds: Tensor


class Study:
    """A reproduction in progress.

    Args:
        budget: what it may cost.
        seeds: runs of each setting.
        out: its folder.
        device: where to train, to evaluate and to measure.
        engine: the solver of the reference optima; "none" for no gaps.
        cluster: address of a Ray cluster to solve them on.
        measures: false to read measurements only.
        only: labels of the rows to train for, with * for anything; all if empty.
    """

    def __init__(
        self,
        budget: Budget,
        seeds: int,
        out: Path,
        device: str = "cpu",
        engine: str = "ipopt",
        cluster: str | None = None,
        measures: bool = True,
        only: Sequence[str] = (),
    ) -> None:
        self.budget, self.seeds, self.out, self.device = budget, seeds, out, device
        self.engine, self.cluster, self.measures, self.only = engine, cluster, measures, tuple(only)
        self.missing: dict[str, str] = {}  # why there is no reference
        self.unmeasured = False  # is there something that was not measured, and may not be now?
        self._problems: dict[str, Problem] = {}
        self._optima: dict[str, Optima | None] = {}

    @property
    def runs(self) -> Path:
        """The folder of the training runs."""
        return self.out / "runs"

    def wants(self, entry: Entry) -> bool:
        """Is this row to be trained for?"""
        return not self.only or any(fnmatchcase(entry.label, pattern) for pattern in self.only)

    def problem(self, family: str, sizes: Mapping[str, Any]) -> Problem:
        """The problem, on the device."""
        key = _key(family, sizes)
        if key not in self._problems:
            self._problems[key] = load(family, **sizes).to(self.device)
        return self._problems[key]

    def optima(self, family: str, sizes: Mapping[str, Any], split: Split = "test") -> Optima | None:
        """Reference optima, from the folder or solved now; None without a solver."""
        key = f"{_key(family, sizes)}-{split}-{self.engine}"
        if key not in self._optima:
            self._optima[key] = self._read_optima(key, family, sizes, split)
        return self._optima[key]

    def _read_optima(self, key: str, family: str, sizes: Mapping[str, Any], split: Split) -> Optima | None:
        file = self.out / "references" / f"{key}.npz"
        if file.exists():
            with np.load(file, allow_pickle=False) as kept:
                objective = torch.from_numpy(kept["objective"])
                known = "seconds" in kept.files  # a file made by hand may hold the objective alone
                return Optima(objective, torch.from_numpy(kept["seconds"]) if known else objective * torch.nan)
        problem = load(family, **sizes)
        if self.engine == "none" or not problem.solvable:
            return None
        try:
            found = solve(problem, problem.split(split), self.engine, cluster=self.cluster)
        except ImportError as error:
            self.missing[key] = f"No gaps on {family}: {error}; or copy {file.parent.name}/{file.name} from elsewhere."
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        arrays = {"objective": found.objective.numpy(), "seconds": found.seconds.numpy()}
        write_whole(file, lambda opened: np.savez(opened, allow_pickle=False, **arrays))
        return Optima(found.objective, found.seconds)

    def run(self, job: TrainingJob) -> Run | None:
        """The finished run of a job, if there is one."""
        folder = self.runs / job.name
        return Run.open(folder) if Run.evaluated(folder) else None

    def evaluation(
        self, job: TrainingJob, tol: float | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """What a run's model achieves on the test instances at a tolerance: a summary, and arrays.

        Evaluated once, in this process, when nothing else runs, and kept in the run's folder.
        """
        run = self.run(job)
        if run is None:
            return None
        name = "evaluation-own" if tol is None else f"evaluation-{tol:.0e}"
        summary, arrays = run.read_json(f"{name}.json"), run.read_arrays(f"{name}.npz")
        if summary is None or arrays is None:
            problem = self.problem(job.problem, job.sizes)
            model = run.load_model(problem)
            model.layer.on_failure = "ignore"  # the table says how many failed
            summary, arrays = evaluate(model, problem, tol=tol)
            run.write_arrays(f"{name}.npz", arrays)
            run.write_json(f"{name}.json", summary)
        return summary, arrays

    def row(self, entry: Entry) -> Row:
        """The row of an entry, over the seeds that are done."""
        summaries, seeds = [], []
        for job in entry.jobs:
            summary = self.summary(job, entry.tol)
            if summary is not None:
                summaries.append(summary)
                seeds.append(job.config.seed)
        known = tuple(seeds)
        return Row(
            entry.label,
            entry.source,
            cells(summaries),
            len(known),
            len(entry.jobs),
            known,
            command(entry.jobs[0], entry.tol),
            entry.jobs[0].config.epochs,
            entry.paper_epochs,
        )

    def summary(self, job: TrainingJob, tol: float | None = None) -> dict[str, Any] | None:
        """The summary of a finished run, with its gap where optima are known, and the seconds of its training."""
        found, run = self.evaluation(job, tol), self.run(job)
        if found is None or run is None:
            return None
        summary, arrays = found
        optima = self.optima(job.problem, job.sizes)
        gap = None if optima is None else gap_to(torch.from_numpy(arrays["objective"]), optima.objective)
        return summary | {"gap": gap, "training": run.metrics()[-1]["seconds"]}

    def measured(self, name: str, arguments: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """What `measure` returns, from the folder if it was called with these arguments before; None if it may not."""
        text = json.dumps(arguments, sort_keys=True)
        file = self.out / "measured" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
        if file.exists():
            return json.loads(file.read_text())["result"]
        if not self.measures:
            self.unmeasured = True
            return None
        result = measure()
        write_text(file, json.dumps({"arguments": arguments, "result": result}, indent=1))
        return result


def command(job: TrainingJob, tol: float | None = None) -> str:
    """What to type to train this one run by itself."""
    config = job.config
    recipe = min(("paper", "best"), key=lambda name: len(_changes(config, name, job.problem)))
    words = ["snarenet train", job.problem, "--recipe", recipe, "--method", config.method, "--seed", str(config.seed)]
    for name, value in _changes(config, recipe, job.problem).items():
        option = name.replace("_", "-")
        words.append(f"--{'' if value else 'no-'}{option}" if isinstance(value, bool) else f"--{option} {value}")
    if tol is not None:
        words.append(f"--test-tol {tol:g}")
    if job.sizes:
        words.append("--sizes " + " ".join(f"{name} {value}" for name, value in job.sizes.items()))
    return " ".join(words)


def _changes(config: TrainConfig, recipe: str, family: str) -> dict[str, Any]:
    """The fields in which a configuration differs from a recipe."""
    usual = TrainConfig.recipe(recipe, family, method=config.method, seed=config.seed).to_dict()
    skipped = ("seed", "method", "validate_every", "checkpoint_seconds")
    return {name: v for name, v in config.to_dict().items() if v != usual[name] and name not in skipped}


def _key(family: str, sizes: Mapping[str, Any]) -> str:
    """A readable name of a problem."""
    return "-".join([family, *(f"{name}{value}" for name, value in sorted(sizes.items()))])
