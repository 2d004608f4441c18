"""`Trainer`: epochs, relaxation, validation, metrics, checkpoints; what a step is says `step.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem
from snarenet.relaxation import AdaptiveRelaxation
from snarenet.training.config import TrainConfig
from snarenet.training.distributed import Group
from snarenet.training.evaluate import at, evaluate
from snarenet.training.progress import Callback, pretraining, progress
from snarenet.training.run import Run, RunError, default_folder
from snarenet.training.step import Stepper, Totals


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
        out = resume or self.out or default_folder(problem)
        if resume is None and group.leads:
            Run.create(out, self.config, problem)
        group.wait()
        run = Run.open(out)
        if resume is not None:
            run.resume(self.config, problem)
            if group.leads:
                run.write_config()
        with torch.random.fork_rng():  # dropout draws from the global numbers: leave the user's alone
            torch.manual_seed(self.config.seed)
            session = _Session(self.config, run, model, problem, group)
            if resume is not None:
                session.load()
            else:
                session.prepare(self.quiet or not group.leads)
            self._train(session)
        return run

    def _train(self, session: _Session) -> None:
        config, run, group = self.config, session.run, session.group
        title = f"{session.problem.name or 'training'} · {session.model.layer.title} · seed {config.seed}"
        saved = time.monotonic()
        with progress(config.epochs, session.epoch, title) as show:
            for line in session.epochs(self.reference):
                last = session.epoch == config.epochs
                if not group.leads:
                    continue
                run.log(line)
                for callback in (*self.callbacks, *([] if self.quiet else [show])):
                    callback(line)
                if last or time.monotonic() - saved >= config.checkpoint_seconds:
                    session.save()
                    saved = time.monotonic()
        session.finish()


class _Session:
    """A training run in progress: all its state."""

    def __init__(self, config: TrainConfig, run: Run, model: ConstrainedModel, problem: Problem, group: Group) -> None:
        self.config, self.run, self.model, self.problem, self.group = config, run, model, problem, group
        self.data = problem.split("train")
        self.device = self.data.device
        self.stepper = Stepper(model, problem, config, group)
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        self.relaxation: AdaptiveRelaxation = config.build_relaxation()
        averaging = get_ema_multi_avg_fn(config.average) if config.average else None
        self.average = AveragedModel(model, multi_avg_fn=averaging, use_buffers=False) if averaging else None
        self.epoch, self.seconds = 0, 0.0
        group.broadcast(model.state_dict().values())

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
        if self.config.relaxation == "adarel":
            self.relaxation.measure(self.model, self.data)
        self.group.broadcast([*self.model.layer.state_dict().values(), self.relaxation.initial])
        self.seconds = time.perf_counter() - begin
        if self.group.leads:
            self.save()

    def epochs(self, reference: Tensor | None) -> Iterator[dict[str, Any]]:
        """Train to the end; gives the metrics of each epoch after it."""
        while self.epoch < self.config.epochs:
            begin = time.perf_counter()
            line = self._epoch()
            self.epoch += 1
            self.seconds += time.perf_counter() - begin  # of training alone
            line = {"epoch": self.epoch, "step": self.epoch * self.steps_per_epoch, **line, "seconds": self.seconds}
            if self.epoch % self.config.validate_every == 0 or self.epoch == self.config.epochs:
                line["valid"] = evaluate(self.best, self.problem, "valid", reference=reference, timed=False).summary
            yield line

    @property
    def best(self) -> ConstrainedModel:
        """What is evaluated: the model, or its running average."""
        return self.model if self.average is None else self.average.module  # pyright: ignore

    def _epoch(self) -> dict[str, Any]:
        config, soft = self.config, self.config.relaxation == "soft" and self.epoch < self.config.relaxed_epochs
        relax = self.relaxation.to(self.device).at(self.epoch)
        step, steps = self.epoch * self.steps_per_epoch, config.epochs * self.steps_per_epoch
        totals, lr = Totals(self.device), 0.0
        self.model.train()
        layer = self.model.layer
        tol, most = (config.tol, config.max_steps) if config.method == "snare" else (layer.tol, layer.max_steps)
        with at(layer, tol, config.record if self.stepper.records else most, "ignore"):
            for i, x in enumerate(self._batches()):
                lr = config.lr_at(step + i, steps)
                self.stepper(x, relax, soft, lr, totals)
                if self.average is not None:
                    self.average.update_parameters(self.model)
        largest = relax.max().item() if isinstance(relax, Tensor) else relax
        return {**totals.line(self.group), "relax": largest, "lr": lr}

    def _batches(self) -> Iterator[Tensor]:
        """The inputs of an epoch, the same in all processes."""
        batch, count = self.config.batch, self.steps_per_epoch
        if self.config.fresh:
            for _ in range(count):
                yield self.problem.sample(batch, self.generator)
            return
        order = torch.randperm(len(self.data), generator=self.generator, device=self.device)
        if self.stepper.records:  # a recording has one size: fill the last batch up from the first
            order = torch.cat([order, order])[: count * batch]
        for index in order.split(batch):
            yield self.data[index]

    def save(self) -> None:
        """Write a checkpoint."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.stepper.state().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.best.state_dict().items()}
            tensors["averaged"] = self.average.n_averaged
        tensors["relaxation"] = self.relaxation.initial
        tensors["generator"] = self.generator.get_state()
        tensors["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(self.device)
        state = {"epoch": self.epoch, "seconds": self.seconds, "fingerprint": self.run.fingerprint}
        self.run.write_tensors("checkpoint.safetensors", tensors, state)

    def load(self) -> None:
        """Go on from the last checkpoint."""
        tensors, state = self.run.read_tensors("checkpoint.safetensors")
        if state.get("fingerprint") != self.run.fingerprint:
            raise RunError(f"{self.run.path / 'checkpoint.safetensors'} belongs to another run")

        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        self.model.load_state_dict(part("model."))
        self.stepper.load_state(part("optimizer."))
        if self.average is not None:
            self.best.load_state_dict(part("average."))
            self.average.n_averaged.copy_(tensors["averaged"])
        self.relaxation.initial = tensors["relaxation"]
        self.generator.set_state(tensors["generator"])
        torch.set_rng_state(tensors["random"])
        if "random_cuda" in tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random_cuda"], self.device)
        self.epoch, self.seconds = state["epoch"], state["seconds"]
        if self.group.leads:
            self.run.rewind(self.epoch)
        self.group.wait()

    def finish(self) -> None:
        """Leave the trained weights in the model, and on disk."""
        if self.average is not None:
            self.model.load_state_dict(self.best.state_dict())
        self.model.eval()
        if self.group.leads:
            self.run.write_tensors("model.safetensors", self.model.state_dict())
        self.group.wait()
