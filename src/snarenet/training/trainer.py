"""`Trainer`: from models and a problem to run folders; what happens on the way says `session.py`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem
from snarenet.training.config import TrainConfig
from snarenet.training.distributed import Group
from snarenet.training.lock import hold
from snarenet.training.progress import Callback, progress, say
from snarenet.training.run import Run, default_folder
from snarenet.training.seeds import cannot_stack
from snarenet.training.session import Session, check_trainable


class Trainer:
    """Trains models.

    Args:
        config: how.
        out: the run folder; "runs/PROBLEM-TIME" unless given.
        callbacks: called with every line of metrics, in the leading process.
        reference: (N,) optimal values of the validation instances, NaN where unknown, to show the gap while training.
        quiet: show no progress.
    """

    def __init__(
        self,
        config: TrainConfig,
        out: str | Path | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        reference: Tensor | None = None,
        quiet: bool = False,
    ) -> None:
        self.config, self.out, self.callbacks = config, out, callbacks
        self.reference, self.quiet = reference, quiet

    def fit(self, model: ConstrainedModel, problem: Problem, resume: str | Path | None = None) -> Run:
        """Train the model on the problem, both on the same device.

        Args:
            model: the model, changed in place; on return it is in eval mode, with the weights that `config.keep` names
                (averaged, if so configured); `Run.kept` says of which epoch they are.
            problem: the problem.
            resume: the folder of a run to go on with, of the same configuration and problem; it begins anew if it was
                stopped before its first checkpoint.

        The folder is locked meanwhile: an error if another training is in it.
        """
        group = Group.join(problem.inputs.device)
        if group.size > 1 and resume is None and self.out is None:
            raise ValueError("give `out` under torchrun: all processes must know the run folder")
        check_trainable(model, problem, self.config)
        folder = Path(resume or self.out or default_folder(problem))
        with ExitStack() as held:
            begun = False
            if group.leads:
                (Run.make_folder if resume is None else Run.check_begun)(folder)
                held.enter_context(hold(folder))
                begun = resume is not None and Run.begun(folder)
                if resume is not None and not begun and not self.quiet:
                    say(f"{folder}: the run was stopped before its first checkpoint, and begins anew")
            begun = group.told(begun)
            run = self._open(folder, self.config, problem, group, begun)
            self._train([run], [model], problem, group, begun)
        return run

    def check(self, model: ConstrainedModel, problem: Problem, resume: str | Path | None = None) -> None:
        """Raise what `fit` would raise before it trains, and change nothing: for callers with long work to do first."""
        check_trainable(model, problem, self.config)
        if resume is not None:
            Run.check_begun(resume)
        folder = resume or self.out
        if folder is None or not Path(folder).is_dir():
            return
        with hold(folder):
            if resume is None:
                Run.check_new(folder)
            elif Run.has_checkpoint(folder):
                Run.open(folder).resume(self.config, problem)

    def fit_seeds(
        self,
        seeds: Sequence[int],
        problem: Problem,
        folders: Sequence[str | Path] | None = None,
        *,
        resume: bool = False,
    ) -> list[Run]:
        """Train a model of the configuration for each seed, all at once: their weights are stacked.

        Each run is what `fit` makes of its seed, up to rounding, except that dropout draws other numbers, and that
        `seconds` in its metrics counts the time of all. Where seeds cannot be stacked, they are trained one after the
        other, with a warning that says why. Callbacks are called with the line of every seed.

        Args:
            seeds: the seeds, all different; `config.seed` does not count.
            problem: the problem.
            folders: a run folder for each seed; seed0, seed1, ... in the folder `out` unless given.
            resume: go on with the runs that have a checkpoint, and begin the others anew.
        """
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"`seeds` must be one or more different numbers, but got {list(seeds)}")
        if folders is None:
            parent = Path(self.out or default_folder(problem))
            folders = [parent / f"seed{seed}" for seed in seeds]
        if len(folders) != len(seeds):
            raise ValueError(f"`folders` must name a folder for each of {len(seeds)} seeds, but got {len(folders)}")
        group = Group.join(problem.inputs.device)
        if group.size > 1:
            raise ValueError("`fit_seeds` trains in one process: under torchrun use `fit`")
        configs = [self.config.replace(seed=seed) for seed in seeds]
        found = self.config.find(problem)
        models = [config.build(problem, found=found) for config in configs]
        reason = cannot_stack(models[0], problem)
        if reason and len(seeds) > 1:
            warnings.warn(f"the seeds are trained one after the other, since {reason}", stacklevel=2)
        runs: list[Run] = []
        together: dict[tuple[int, int], list[int]] = {}  # runs that were cut off at different epochs part
        check_trainable(models[0], problem, self.config)
        with ExitStack() as held:
            for folder in folders:
                Run.make_folder(folder)
                held.enter_context(hold(folder))
            for k, (folder, config) in enumerate(zip(folders, configs, strict=True)):
                begun = resume and Run.begun(folder)
                runs.append(self._open(folder, config, problem, group, begun))
                epoch = runs[k].saved_epoch() if begun else -1
                together.setdefault((epoch, k if reason else 0), []).append(k)
            for (epoch, _), some in together.items():
                self._train([runs[k] for k in some], [models[k] for k in some], problem, group, epoch >= 0)
        return runs

    def _open(self, out: str | Path, config: TrainConfig, problem: Problem, group: Group, resume: bool) -> Run:
        """The run in a folder: a new one, or one to go on with."""
        if not resume and group.leads:
            Run.create(out, config, problem)
        group.wait()
        run = Run.open(out)
        if resume:
            run.resume(config, problem)
            if group.leads:
                run.write_config()
        run.config = config
        return run

    def _train(
        self, runs: list[Run], models: list[ConstrainedModel], problem: Problem, group: Group, resume: bool
    ) -> None:
        """Train the models of these runs, which differ in their seeds alone, all at once."""
        config, quiet = runs[0].config, self.quiet or not group.leads
        about = f"{problem.name or 'training'} · {models[0].layer.title}"
        seeds = ", ".join(str(run.config.seed) for run in runs)
        title = f"{about} · seed{'s' * (len(runs) > 1)} {seeds}"
        with torch.random.fork_rng():  # dropout draws from the global numbers: leave the user's alone
            torch.manual_seed(config.seed)
            session = Session(runs, models, problem, group)
            if resume:
                session.load()
            else:
                session.prepare(quiet)
            with progress(config.epochs, session.epoch, title, quiet) as show:
                self._go_on(session, show)
            chosen = session.finish()
        for run, kept in zip(runs, chosen, strict=True):
            if not quiet:
                say(f"{about} · seed {run.config.seed}: {kept.sentence()}")

    def _go_on(self, session: Session, show: Callback) -> None:
        """Train to the end; the leading process keeps metrics and checkpoints."""
        saved = time.monotonic()
        for lines in session.epochs(self.reference):
            if not session.group.leads:
                continue
            for member, line in zip(session.members, lines, strict=True):
                member.run.log(line)
                for callback in self.callbacks:
                    callback(line)
            show(lines[0])
            last = session.epoch == session.config.epochs
            if last or time.monotonic() - saved >= session.config.checkpoint_seconds:
                session.save()
                saved = time.monotonic()
