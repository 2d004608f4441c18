"""The paper's appendix on soft epochs: what HardNet loses when they end, on the validation instances of NCLP.

These runs note the objective of every validation instance every few epochs, with and without the repair, in
`curve.npz` of their folders; gaps are made of it where optima are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem
from snarenet.training import Run, Trainer, evaluate
from snarenet_lab.experiments.budget import Budget
from snarenet_lab.experiments.item import Entry, Item
from snarenet_lab.experiments.quantities import columns
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import axis, curve, curves
from snarenet_lab.report.results import Sheet
from snarenet_lab.sweep import TrainingJob

# fig:soft_hardnet_max: HardNet after 500 and 1000 soft epochs; no numbers are printed. 2,000 epochs in all are assumed.
_SOFT = (500, 1000)
_EPOCHS = 2000
_POINTS = 100  # on a curve
_FILE = "curve.npz"


class SoftItem(Item):
    """Soft epochs can harm."""

    name = "soft"
    title = "Soft epochs before HardNet, on NCLP"
    about = (
        "HardNet after 500 and after 1,000 soft epochs, of 2,000 (the paper does not say of how many), and with AdaRel "
        "instead. In soft epochs the network's own output is what the loss sees: its gap (dashed) is low because it is "
        "infeasible, and is not what counts; after the repair (solid) the gap is what HardNet would deliver."
    )

    sweeps = False  # a sweep does not note curves
    draws_runs = True  # those curves

    def entries(self, budget: Budget, seeds: int) -> list[Entry]:
        sizes = budget.sizes_of("nclp")
        settings: dict[str, dict[str, Any]] = {
            f"{count} soft epochs": {"relaxation": "soft", "relax_epochs": count} for count in _SOFT
        } | {"500 AdaRel epochs": {"relaxation": "adarel", "relax_epochs": 500}}
        return [
            Entry.make(
                label,
                "parity",
                "nclp",
                lambda seed, c=changes: budget.parity_config("nclp", seed, _EPOCHS, "hardnet", **c),
                sizes,
                seeds,
                paper_epochs=_EPOCHS,
            )
            for label, changes in settings.items()
        ]

    def prepare(self, study: Study) -> None:
        for entry in filter(study.wants, self.entries(study.budget, study.seeds)):
            for job in entry.jobs:
                train_with_curve(job, study)

    def sheets(self, study: Study) -> list[Sheet]:
        rows = tuple(study.row(entry) for entry in self.entries(study.budget, study.seeds))
        shown = columns("gap_max", "gap_gmean", "ineq_max", "eq_max", "feasible", "training")
        return [Sheet("soft", "HardNet after soft epochs: test instances", shown, rows, "The paper prints no numbers.")]

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        optima = study.optima("nclp", study.budget.sizes_of("nclp"), "valid")
        if optima is None:
            return []
        series = []
        for color, entry in enumerate(self.entries(study.budget, study.seeds)):
            notes = [run.read_arrays(_FILE) for job in entry.jobs if (run := study.run(job)) is not None]
            known = [note for note in notes if note is not None]
            if not known:
                continue
            soft = entry.jobs[0].config.relaxation == "soft"
            best = optima.objective.numpy()
            for name in ("repaired", "raw") if soft else ("repaired",):
                most = np.stack([np.nanmax(note[name] - best, axis=1) for note in known])
                mean = np.exp(np.log(most.clip(1e-16)).mean(0))  # over seeds, as in the paper
                x = known[0]["epoch"]
                shown = x <= entry.jobs[0].config.relaxed_epochs if name == "raw" else np.full(len(x), True)
                label = entry.label if name == "repaired" else f"{entry.label}, not repaired"
                series.append(
                    curve(label, x[shown].tolist(), mean[shown].tolist(), "dashed" if name == "raw" else "solid", color)
                )
        if not series:
            return []
        caption = "HardNet: the largest gap of the validation instances while training, geometric mean over the seeds"
        x, y = axis("epoch"), axis("gap, max (units of the objective)", log=True)
        return [curves("validation", caption, x, y, series)]


def train_with_curve(job: TrainingJob, study: Study) -> None:
    """Train a job unless it is done, and note the objective of the validation instances on the way."""
    run = study.run(job)
    if run is not None and run.read_arrays(_FILE) is not None:
        return
    folder = study.runs / job.name
    problem = study.problem(job.problem, job.sizes)
    model = job.config.build(problem)
    resume = folder if Run.begun(folder) and (folder / _FILE).exists() else None
    if resume is None:
        Run.remove(folder)
    notes = _Notes(problem, model, folder, max(1, job.config.epochs // _POINTS))
    run = Trainer(job.config, folder, callbacks=[notes], quiet=True).fit(model, problem, resume)
    found = evaluate(model, problem)
    run.save_evaluation(*found)


class _Notes:
    """A callback that keeps the objectives (R, N) of the validation instances, every few epochs."""

    def __init__(self, problem: Problem, model: ConstrainedModel, folder: Any, every: int) -> None:
        self.problem, self.model, self.folder, self.every = problem, model, folder, every

    def __call__(self, line: dict[str, Any]) -> None:
        epoch = line["epoch"]
        if epoch % self.every:
            return
        run, training = Run.open(self.folder), self.model.training
        x = self.problem.split("valid")
        with torch.no_grad():
            self.model.eval()
            raw = self.problem.objective(self.model.raw(x), x)
            repaired = self.problem.objective(self.model(x), x)
            self.model.train(training)
        new = {"epoch": np.array([epoch]), "raw": raw.cpu().numpy()[None], "repaired": repaired.cpu().numpy()[None]}
        old = run.read_arrays(_FILE)
        if old is not None:
            kept = old["epoch"] < epoch  # what came after the checkpoint from which this run goes on is done again
            new = {name: np.concatenate([old[name][kept], array]) for name, array in new.items()}
        run.write_arrays(_FILE, new)
