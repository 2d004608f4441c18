"""`Trainer`: epochs, relaxation, validation, metrics, checkpoints; what a step is says `step.py`."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem
from snarenet.training.config import TrainConfig
from snarenet.training.distributed import Group
from snarenet.training.evaluate import at, evaluate
from snarenet.training.progress import Callback, pretraining, progress
from snarenet.training.run import Run, RunError, default_folder
from snarenet.training.seeds import cannot_stack, stack, windows
from snarenet.training.step import Stepper


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
            model: the model, changed in place; on return it has the trained (or averaged) weights and is in eval mode.
            problem: the problem.
            resume: the folder of a run to go on with, of the same configuration and problem.
        """
        group = Group.join(problem.inputs.device)
        if group.size > 1 and resume is None and self.out is None:
            raise ValueError("give `out` under torchrun: all processes must know the run folder")
        run = self._open(resume or self.out or default_folder(problem), self.config, problem, group, resume is not None)
        self._train([run], [model], problem, group, resume is not None)
        return run

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
        models = [config.build(problem) for config in configs]
        reason = cannot_stack(models[0], problem)
        if reason and len(seeds) > 1:
            warnings.warn(f"the seeds are trained one after the other, since {reason}", stacklevel=2)
        runs: list[Run] = []
        together: dict[tuple[int, int], list[int]] = {}  # runs that were cut off at different epochs part
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
        config = runs[0].config
        seeds = ", ".join(str(run.config.seed) for run in runs)
        title = f"{problem.name or 'training'} · {models[0].layer.title} · seed{'s' * (len(runs) > 1)} {seeds}"
        with torch.random.fork_rng():  # dropout draws from the global numbers: leave the user's alone
            torch.manual_seed(config.seed)
            session = _Session(config, runs, models, problem, group)
            if resume:
                session.load()
            else:
                session.prepare(self.quiet or not group.leads)
            saved = time.monotonic()
            with progress(config.epochs, session.epoch, title) as show:
                for lines in session.epochs(self.reference):
                    last = session.epoch == config.epochs
                    if not group.leads:
                        continue
                    for run, line in zip(runs, lines, strict=True):
                        run.log(line)
                        for callback in self.callbacks:
                            callback(line)
                    if not self.quiet:
                        show(lines[0])
                    if last or time.monotonic() - saved >= config.checkpoint_seconds:
                        session.save()
                        saved = time.monotonic()
            session.finish()


class _Session:
    """Training in progress: all its state, of one run or of several whose models are stacked."""

    def __init__(
        self, config: TrainConfig, runs: list[Run], models: list[ConstrainedModel], problem: Problem, group: Group
    ) -> None:
        self.config, self.runs, self.problem, self.group = config, runs, problem, group
        self.model = stack(models)
        self.models = windows(self.model)
        self.data = problem.split("train")
        self.device = self.data.device
        self.stepper = Stepper(self.model, problem, config, group, len(runs))
        self.generators = [torch.Generator(self.device).manual_seed(run.config.seed) for run in runs]
        self.relaxations = [config.build_relaxation() for _ in runs]
        averaging = get_ema_multi_avg_fn(config.average) if config.average else None
        self.average = AveragedModel(self.model, multi_avg_fn=averaging, use_buffers=False) if averaging else None
        # what is evaluated: the models, or their running averages
        self.best = self.models if self.average is None else windows(self.average.module)  # pyright: ignore
        self.epoch, self.seconds = 0, 0.0
        self.broken: set[int] = set()  # the places of runs whose weights are not numbers
        group.broadcast(self.model.state_dict().values())

    @property
    def steps_per_epoch(self) -> int:
        """Optimisation steps in an epoch."""
        return math.ceil(len(self.data) / self.config.batch)

    def prepare(self, quiet: bool) -> None:
        """What comes before the first epoch: the method's own training, and the relaxation of the untrained network."""
        layer, n = self.model.layer, self.problem.size
        if self.config.relaxation != "none" and layer.predictions(n) != n:
            raise ValueError(
                f"`relaxation` must be 'none' for {layer.title}, whose predictions are not points of the set"
            )
        begin = time.perf_counter()
        with pretraining(layer.title, quiet) as show:
            layer.pretrain(self.data, steps=self.config.pretrain or None, seed=self.config.seed, progress=show)
        for relaxation, model in zip(self.relaxations, self.models, strict=True):
            if self.config.relaxation == "adarel":
                relaxation.measure(model, self.data)
            self.group.broadcast([relaxation.initial])
        self.group.broadcast(self.model.layer.state_dict().values())
        self.seconds = time.perf_counter() - begin
        if self.group.leads:
            self.save()

    def epochs(self, reference: Tensor | None) -> Iterator[list[dict[str, Any]]]:
        """Train to the end; gives the metrics of each epoch after it, a line for every run."""
        while self.epoch < self.config.epochs:
            begin = time.perf_counter()
            found = self._epoch()
            self.epoch += 1
            self._check([line["loss"] for line in found])
            self.seconds += time.perf_counter() - begin  # of training alone
            done = {"epoch": self.epoch, "step": self.epoch * self.steps_per_epoch}
            lines = [{**done, **line, "seconds": self.seconds} for line in found]
            if self.epoch % self.config.validate_every == 0 or self.epoch == self.config.epochs:
                for line, model in zip(lines, self.best, strict=True):
                    line["valid"] = evaluate(model, self.problem, "valid", reference=reference, timed=False).summary
            yield lines

    def _check(self, losses: list[float]) -> None:
        """Stop once the weights of all runs have ceased to be numbers, which they stay; say so if those of one have."""
        for k, loss in enumerate(losses):
            if k in self.broken or not math.isnan(loss) or all(p.isfinite().all() for p in self.models[k].parameters()):
                continue
            self.broken.add(k)
            said = (
                f"the training of seed {self.runs[k].config.seed} broke down in epoch {self.epoch}: its weights are no "
                "longer numbers; a lower `lr` or a `clip` may help"
            )
            if len(self.broken) == len(self.runs):
                raise FloatingPointError(said)
            warnings.warn(said, stacklevel=2)

    def _epoch(self) -> list[dict[str, Any]]:
        config, soft = self.config, self.config.relaxation == "soft" and self.epoch < self.config.relaxed_epochs
        each = [relaxation.to(self.device).at(self.epoch) for relaxation in self.relaxations]
        tensors = [one for one in each if isinstance(one, Tensor)]  # of all runs or of none
        relax = torch.stack(tensors) if len(tensors) > 1 else each[0]
        step, steps = self.epoch * self.steps_per_epoch, config.epochs * self.steps_per_epoch
        totals, lr = self.stepper.totals, 0.0
        totals.clear()
        self.model.train()
        layer = self.model.layer
        tol, most = (config.tol, config.max_steps) if config.method == "snare" else (layer.tol, layer.max_steps)
        with at(layer, tol, config.record if self.stepper.records else most, "ignore"):
            for i, x in enumerate(self._batches()):
                lr = config.lr_at(step + i, steps)
                self.stepper(x, relax, soft, lr)
                if self.average is not None:
                    self.average.update_parameters(self.model)
        largest = [one.max().item() if isinstance(one, Tensor) else one for one in each]
        return [{**totals.line(self.group, k), "relax": eps, "lr": lr} for k, eps in enumerate(largest)]

    def _batches(self) -> Iterator[Tensor]:
        """The inputs of an epoch, those of each run in its own order; the same in all processes."""
        batch, count = self.config.batch, self.steps_per_epoch
        if self.config.fresh:
            for _ in range(count):
                yield torch.cat([self.problem.sample(batch, generator) for generator in self.generators])
            return
        size = len(self.data)
        order = torch.stack([torch.randperm(size, generator=g, device=self.device) for g in self.generators])
        if self.stepper.records:  # a recording has one size: fill the last batch up from the first
            order = torch.cat([order, order], 1)[:, : count * batch]
        for index in order.split(batch, 1):
            yield self.data[index.flatten()]

    def save(self) -> None:
        """Write a checkpoint of every run, which can go on with the others or alone."""
        for k, run in enumerate(self.runs):
            tensors = {f"model.{name}": tensor for name, tensor in self.models[k].state_dict().items()}
            tensors |= {f"optimizer.{name}": tensor for name, tensor in self.stepper.state(k).items()}
            if self.average is not None:
                tensors |= {f"average.{name}": tensor for name, tensor in self.best[k].state_dict().items()}
                tensors["averaged"] = self.average.n_averaged
            tensors["relaxation"] = self.relaxations[k].initial
            tensors["generator"] = self.generators[k].get_state()
            tensors["random"] = torch.get_rng_state()
            if self.device.type == "cuda":
                tensors["random_cuda"] = torch.cuda.get_rng_state(self.device)
            state = {"epoch": self.epoch, "seconds": self.seconds, "fingerprint": run.fingerprint}
            run.write_tensors("checkpoint.safetensors", tensors, state)

    def load(self) -> None:
        """Go on from the last checkpoints, all of the same epoch."""
        optimizers = []
        for k, run in enumerate(self.runs):
            tensors, state = run.read_tensors("checkpoint.safetensors")
            if state.get("fingerprint") != run.fingerprint:
                raise RunError(f"{run.path / 'checkpoint.safetensors'} belongs to another run")
            self.models[k].load_state_dict(_part(tensors, "model."))
            optimizers.append(_part(tensors, "optimizer."))
            if self.average is not None:
                self.best[k].load_state_dict(_part(tensors, "average."))
                self.average.n_averaged.copy_(tensors["averaged"])
            self.relaxations[k].initial = tensors["relaxation"]
            self.generators[k].set_state(tensors["generator"])
            torch.set_rng_state(tensors["random"])
            if "random_cuda" in tensors and self.device.type == "cuda":
                torch.cuda.set_rng_state(tensors["random_cuda"], self.device)
            self.epoch, self.seconds = state["epoch"], state["seconds"]
            if self.group.leads:
                run.rewind(self.epoch)
        self.stepper.load_state(optimizers)
        self.group.wait()

    def finish(self) -> None:
        """Leave the trained weights in the models, and on disk."""
        for run, model, best in zip(self.runs, self.models, self.best, strict=True):
            if self.average is not None:
                model.load_state_dict(best.state_dict())
            model.eval()
            if self.group.leads:
                run.write_tensors("model.safetensors", model.state_dict())
        self.group.wait()


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
