"""`reproduce`: the paper's tables and figures, done again; what is there is not done twice, what fails is said.

    from snarenet_lab.experiments.reproduce import reproduce
    reproduce(["nclp"], "smoke", seeds=2, out=Path("reproduction"))

A command line is not needed, nor are solvers (references may be copied from elsewhere) or matplotlib (`snarenet report`
draws the figures anywhere, from the JSON files).
"""

from __future__ import annotations

import fnmatch
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from snarenet.solution import RepairWarning
from snarenet.training import Run
from snarenet.training.run import environment
from snarenet_lab.experiments.budget import BUDGETS, Budget
from snarenet_lab.experiments.cbf import CBFItem
from snarenet_lab.experiments.damping import DampingItem
from snarenet_lab.experiments.inequalities import InequalitiesItem
from snarenet_lab.experiments.item import Item
from snarenet_lab.experiments.nclp import NCLPItem
from snarenet_lab.experiments.ncqcqp import NonConvexQCQPItem
from snarenet_lab.experiments.qcqp import QCQPItem
from snarenet_lab.experiments.rows import RowsItem
from snarenet_lab.experiments.scaling import ScalingItem
from snarenet_lab.experiments.soft import SoftItem
from snarenet_lab.experiments.stored import held, with_stored, with_stored_figures
from snarenet_lab.experiments.study import Study, command
from snarenet_lab.experiments.theory import TheoryItem
from snarenet_lab.experiments.warmup import WarmupItem
from snarenet_lab.report.documents import read_item, write_results
from snarenet_lab.report.results import Cell, Results, Row, Sheet
from snarenet_lab.sweep import TrainingJob, sweep

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        NCLPItem(),
        QCQPItem(),
        NonConvexQCQPItem(),
        DampingItem(),
        InequalitiesItem(),
        WarmupItem(),
        SoftItem(),
        CBFItem(),
        ScalingItem(),
        TheoryItem(),
        RowsItem(),
    )
}


def reproduce(
    items: Sequence[str],
    budget: str | Budget = "smoke",
    seeds: int = 5,
    out: Path = Path("reproduction"),
    *,
    device: str = "cpu",
    jobs: int | None = None,
    cluster: str | None = None,
    stacked: bool = False,
    engine: str = "ipopt",
    share: float | None = None,
    only: Sequence[str] = (),
    train: bool = True,
    quiet: bool = False,
) -> list[Results]:
    """Train and measure what is not there yet, and write the results of each item to `out`.

    Args:
        items: names in `ITEMS`; "all" for all of them.
        budget: "smoke", "standard", "paper", or one of your own.
        seeds: runs of each setting, with the paper's seeds first.
        out: the folder; see `snarenet_lab.experiments.study` for what is in it.
        device: where to train and to measure.
        jobs: runs at a time.
        cluster: address of a Ray cluster to train on.
        stacked: train all seeds of a setting as one, see `sweep`.
        engine: solver of the reference optima, "none" for no gaps.
        share: of the paper's epochs, for runs of its recipe; that of the budget unless given.
        only: train for rows of these labels, with * for anything; all unless given. The others keep what they have.
        train: false to make tables of what is there, and train and measure nothing.
        quiet: show no progress.
    """
    chosen = [item for name, item in ITEMS.items() if name in _names(items)]
    plan = _budget(budget) if share is None else replace(_budget(budget), share=share, shares={})
    where = (out, device, engine, cluster, train, only)
    studies = {item.name: Study(plan.of(item.name), _seeds(item, seeds), *where) for item in chosen}
    _check_labels(only, [label for item in chosen for label in _labels(item, studies[item.name])])
    planned = {item.name: _jobs(item, studies[item.name]) for item in chosen}
    failures: dict[str, str] = {}
    if train:
        every = {job.name: job for item in chosen if item.sweeps for job in _lacking(item, studies[item.name])}
        how = {"device": device, "workers": jobs, "cluster": cluster, "stacked": stacked, "quiet": quiet}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RepairWarning)  # the tables say how many instances failed
            failures = sweep(every.values(), out / "runs", **how)
        for item in chosen:
            item.prepare(studies[item.name])
    found = []
    for item in chosen:
        if not quiet:
            print(f"{item.name}: tables and figures", file=sys.stderr, flush=True)
        found.append(_results(item, studies[item.name], planned[item.name], failures))
        write_results(found[-1], out)
    return found


def _names(items: Sequence[str]) -> list[str]:
    wrong = [name for name in items if name not in ITEMS and name != "all"]
    if wrong or not items:
        raise ValueError(f"`items` must be some of all, {', '.join(ITEMS)}, but got {', '.join(wrong) or 'none'}")
    return list(ITEMS) if "all" in items else list(items)


def _budget(budget: str | Budget) -> Budget:
    if isinstance(budget, Budget):
        return budget
    if budget not in BUDGETS:
        raise ValueError(f"`budget` must be one of {', '.join(BUDGETS)}, but got {budget!r}")
    return BUDGETS[budget]


def _seeds(item: Item, seeds: int) -> int:
    return min(seeds, item.most_seeds) if item.most_seeds else seeds


def _labels(item: Item, study: Study) -> list[str]:
    return [entry.label for entry in item.entries(study.budget, study.seeds)]


def _check_labels(only: Sequence[str], labels: Sequence[str]) -> None:
    wrong = [pattern for pattern in only if not fnmatch.filter(labels, pattern)]
    if wrong:
        known = "; ".join(dict.fromkeys(labels)) or "none, as nothing is trained"
        raise ValueError(f"`only` must be labels of rows ({known}), but got {', '.join(map(repr, wrong))}")


def _jobs(item: Item, study: Study) -> list[TrainingJob]:
    entries = item.entries(study.budget, study.seeds)
    return list({job.name: job for entry in entries for job in entry.jobs}.values())


def _lacking(item: Item, study: Study) -> list[TrainingJob]:
    """The runs that are to be made: those of rows that are wanted and not stored, or lack their seeds."""
    stored, found = _stored(item, study), {}
    rows = {} if stored is None else _by_label(stored.sheets)
    for entry in item.entries(study.budget, study.seeds):
        jobs, several = entry.jobs, rows.get((entry.label, entry.source))
        known: set[int] = set()
        if several:
            seeds = [job.config.seed for job in jobs]
            known = held(several.pop(0), jobs[0].config.epochs, command(jobs[0], entry.tol), seeds)
        if study.wants(entry):
            found |= {job.name: job for job in jobs if job.config.seed not in known}
    return list(found.values())


def _stored(item: Item, study: Study) -> Results | None:
    """What is known from before, of the same problems."""
    stored = read_item(study.out, item.name)
    return None if stored is None or stored.origin.get("budget") != study.budget.name else stored


def _by_label(sheets: Sequence[Sheet]) -> dict[tuple[str, str], list[Row]]:
    """The rows of one label and source: one a table, in the order of the entries."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in (row for sheet in sheets for row in sheet.rows):
        rows.setdefault((row.label, row.source), []).append(row)
    return rows


def _results(item: Item, study: Study, jobs: list[TrainingJob], failures: dict[str, str]) -> Results:
    stored = _stored(item, study)
    sheets = with_stored(item.sheets(study), stored)
    waiting = _waiting(item, study, sheets)
    names = {job.name for job in jobs}
    refused = Counter((name.rsplit("-seed", 1)[0], why) for name, why in failures.items() if name in names)
    remarks = [f"Could not finish {_runs(count)} of {name}: {why}" for (name, why), count in refused.items()]
    if len(waiting) > sum(refused.values()):
        rest = _runs(len(waiting) - sum(refused.values()))
        remarks.append(f"{rest} of {len(jobs)} are not done; the same command goes on with them.")
    remarks += study.missing.values()
    if study.unmeasured and stored is None:
        remarks.append("Not everything is measured; the same command without --no-train goes on with it.")
    if any(_stacked(row) for sheet in sheets for row in sheet.rows):
        remarks.append("Seeds were trained as one: the training time of a row is that of all its seeds together.")
    figures = item.figures(study, sheets)
    if item.draws_runs:
        figures = with_stored_figures(figures, stored)
    notes = [*remarks, *item.remarks(study, sheets)]
    about = f"{item.about} {study.budget.about}"
    origin = _origin(item, study, jobs, len(jobs) - len(waiting), stored)
    main = ("", "") if study.budget.name == "smoke" else item.main  # its numbers mean nothing
    return Results(item.name, item.title, about, tuple(sheets), tuple(figures), tuple(notes), origin, main)


def _waiting(item: Item, study: Study, sheets: Sequence[Sheet]) -> set[str]:
    """The names of the runs that are neither at hand nor in a row of as many epochs."""
    rows, found = _by_label(sheets), set()
    for entry in item.entries(study.budget, study.seeds):
        row = rows[entry.label, entry.source].pop(0)
        known = row.seeds if row.epochs >= entry.jobs[0].config.epochs else ()
        found |= {job.name for job in entry.jobs if job.config.seed not in known and study.run(job) is None}
    return found


def _stacked(row: Row) -> bool:
    """Were the seeds of this row trained as one? Then the clock shows the same for all of them."""
    seconds = row.cells.get("training", Cell()).values
    return row.source != "paper" and len(seconds) > 1 and len(set(seconds)) == 1


def _runs(count: int) -> str:
    return f"{count} run" + ("" if count == 1 else "s")


def _origin(item: Item, study: Study, jobs: list[TrainingJob], done: int, stored: Results | None) -> dict[str, Any]:
    """Where the numbers are from: these runs, and those of stored rows."""
    device = torch.device(study.device)
    machines: Counter[str] = Counter()
    for job in jobs:
        run = study.run(job)
        if run is not None:
            machines[_machine(run)] += 1
    words = ["snarenet reproduce", item.name, "--budget", study.budget.name, "--seeds", str(study.seeds)]
    usual = BUDGETS.get(study.budget.name)
    if usual is not None and usual.of(item.name).share != study.budget.share:
        words += ["--share", f"{study.budget.share:g}"]
    return {
        "command": " ".join([*words, "--device", device.type, "--out", study.out.name or "."]),
        "budget": study.budget.name,
        "seeds": study.seeds,
        "runs": len(jobs),
        "done": done,
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "environment": environment(device),
        "trained on": ({} if stored is None else dict(stored.origin["trained on"])) | dict(machines),
    }


def _machine(run: Run) -> str:
    """The machine of a run, in words."""
    known = run.environment() or {}
    return ", ".join(
        [known.get("device", "unknown"), f"torch {known.get('torch', '?')}", f"git {known.get('git', '?')}"]
    )
