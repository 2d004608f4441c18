"""`Session`: training in progress, of one run or of several whose models are stacked; what a step is says `step.py`."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem
from snarenet.relaxation import AdaptiveRelaxation
from snarenet.training.best import Best, Kept, Score
from snarenet.training.config import TrainConfig
from snarenet.training.distributed import Group
from snarenet.training.evaluate import at, evaluate
from snarenet.training.progress import pretraining
from snarenet.training.run import Run
from snarenet.training.seeds import stack, windows
from snarenet.training.step import Stepper

_MANY = 0.2  # share of outputs; some may have every reason to stay where they are


def check_trainable(model: ConstrainedModel, problem: Problem, config: TrainConfig) -> None:
    """Raise unless the model can be trained on the problem in this way: what only these three together can say."""
    layer = model.layer
    if not len(problem.split("train")):
        raise ValueError(f"there is nothing to train on: {len(problem.inputs)} instances leave none for 'train'")
    if config.relaxation != "none" and layer.predictions(problem.size) != problem.size:
        raise ValueError(f"`relaxation` must be 'none' for {layer.title}, whose predictions are not points of the set")
    if config.fresh:
        if not problem.always_feasible:
            raise ValueError("`fresh` must be False for inputs that may have no feasible point; draw more instances")
        problem.sample(1, torch.Generator(problem.inputs.device))


@dataclass
class Member:
    """One of the runs of a session, and what it has for itself.

    Attributes:
        run: its folder and configuration.
        model: its model, whose tensors are a part of the stack's.
        averaged: the model with the running average of its weights, where there is one: that is evaluated.
        generator: draws its inputs.
        relaxation: of its epochs.
        best: its best validated weights.
        broken: have its weights ceased to be numbers?
    """

    run: Run
    model: ConstrainedModel
    averaged: ConstrainedModel | None
    generator: torch.Generator
    relaxation: AdaptiveRelaxation
    best: Best = field(default_factory=Best)
    broken: bool = False

    @property
    def evaluated(self) -> ConstrainedModel:
        """The model to evaluate, and to return if the last weights are asked for."""
        return self.averaged or self.model


class Session:
    """All the state of a training.

    Args:
        runs: the runs, which differ in their seeds alone.
        models: a model for each.
        problem: what they are trained on.
        group: the processes that train together.
    """

    def __init__(self, runs: list[Run], models: list[ConstrainedModel], problem: Problem, group: Group) -> None:
        self.config: TrainConfig = runs[0].config
        self.problem, self.group = problem, group
        self.data = problem.split("train")
        self.device = self.data.device
        self.model = stack(models)
        self.stepper = Stepper(self.model, problem, self.config, group, len(runs))
        self.average = self.config.build_average(self.model)
        each = windows(self.model)
        averages = [None] * len(runs) if self.average is None else windows(self.average.module)  # pyright: ignore
        generators = [torch.Generator(self.device).manual_seed(run.config.seed) for run in runs]
        self.members = [
            Member(run, model, averaged, generator, self.config.build_relaxation())
            for run, model, averaged, generator in zip(runs, each, averages, generators, strict=True)
        ]
        self.epoch, self.seconds, self.warned, self.outside = 0, 0.0, False, False
        group.broadcast(self.model.state_dict().values())

    @property
    def steps_per_epoch(self) -> int:
        """Optimisation steps in an epoch."""
        return math.ceil(len(self.data) / self.config.batch)

    def prepare(self, quiet: bool) -> None:
        """What comes before the first epoch: the method's own training, and the relaxation of the untrained network."""
        layer = self.model.layer
        begin = time.perf_counter()
        with pretraining(layer.title, quiet) as show:
            layer.pretrain(
                self.problem.seen(self.data), steps=self.config.pretrain or None, seed=self.config.seed, progress=show
            )
        for member in self.members:
            if self.config.relaxation == "adarel":
                self._measure(member)
            self.group.broadcast([member.relaxation.initial])
        self.group.broadcast(self.model.layer.state_dict().values())
        self.seconds = time.perf_counter() - begin
        if self.group.leads:
            self.save()

    def _measure(self, member: Member) -> None:
        """Set the relaxation of a run; as in training, in batches of the size that batch norm will see."""
        training = self.config.relax_mode == "train"
        data = self.problem.seen(self.data)
        batches = data.tensor_split(self.steps_per_epoch) if training else data
        member.relaxation.measure(member.model, batches, training)

    def epochs(self, reference: Tensor | None) -> Iterator[list[dict[str, Any]]]:
        """Train to the end; gives the metrics of each epoch after it, a line for every run."""
        while self.epoch < self.config.epochs:
            begin = time.perf_counter()
            found = self._train_epoch()
            self.epoch += 1
            self._check(found)
            self.seconds += time.perf_counter() - begin  # of training alone
            done = {"epoch": self.epoch, "step": self.epoch * self.steps_per_epoch}
            lines = [{**done, **line, "seconds": self.seconds} for line in found]
            if self.config.validates(self.epoch) and len(self.problem.split("valid")):
                for line, member in zip(lines, self.members, strict=True):
                    line |= self._validate(member, reference)
            yield lines

    def _validate(self, member: Member, reference: Tensor | None) -> dict[str, Any]:
        """What the validation adds to the metrics of an epoch; the weights are kept if they are the best so far."""
        model = member.evaluated
        # weights are chosen by what is returned, but if all of it is polished, one network is as good as another
        polish = "none" if model.layer.polishes == "none" else "rescued"
        found = evaluate(model, self.problem, "valid", reference=reference, timed=False, polish=polish).summary
        member.best.offer(Score.of(self.epoch, found), model)
        score = member.best.score
        self._warn_of_stuck(found)
        return {"valid": found} | ({} if score is None else {"best": score.epoch})

    def _warn_of_stuck(self, found: dict[str, Any]) -> None:
        """Say once if, after half of the epochs, many outputs are stuck on bounds and nothing brings them back."""
        share, pulled = found.get("stuck") or 0.0, self.config.proximity == "auto"
        if self.warned or pulled or share < _MANY or 2 * self.epoch < self.config.epochs or not self.group.leads:
            return
        self.warned = True
        warnings.warn(
            f"{share:.0%} of the outputs sit on a bound, far from what the network predicts, and hardly vary: they get "
            f"no gradient there; with `proximity` 'auto' instead of {self.config.proximity:g} they come back",
            stacklevel=2,
        )

    def _warn_of_domain(self, line: dict[str, Any]) -> None:
        """Say once if outputs that count have an objective that is no number, whatever its gradient is there."""
        if self.outside or not math.isnan(line["loss"]) or not self.group.leads:
            return
        self.outside = True
        warnings.warn(
            f"the objective of some outputs was no number in epoch {self.epoch}, and what they teach means nothing: "
            "keep them in its domain by rows of the set, a `Box` for example",
            stacklevel=2,
        )

    def _check(self, lines: list[dict[str, Any]]) -> None:
        """Stop once the weights of all runs have ceased to be numbers, which they stay; say so if those of one have."""
        for member, line in zip(self.members, lines, strict=True):
            known = not math.isnan(line["loss"] + line["objective"])  # a loss may leave out what is no number
            if member.broken or known:
                continue
            if all(p.isfinite().all() for p in member.model.parameters()):
                self._warn_of_domain(line)
                continue
            member.broken = True
            said = (
                f"the training of seed {member.run.config.seed} broke down in epoch {self.epoch}: its weights are no "
                "longer numbers; a lower `lr` or a `clip` may help, or a set inside the objective's domain"
            )
            if all(other.broken for other in self.members):
                raise FloatingPointError(said)
            warnings.warn(said, stacklevel=2)

    def _train_epoch(self) -> list[dict[str, Any]]:
        """One pass over the training inputs; gives a line of metrics for every run."""
        config, soft = self.config, self.config.relaxation == "soft" and self.epoch < self.config.relaxed_epochs
        each = [member.relaxation.to(self.device).at(self.epoch) for member in self.members]
        tensors = [one for one in each if isinstance(one, Tensor)]  # of all runs or of none
        relax = torch.stack(tensors) if len(tensors) > 1 else each[0]
        step, steps = self.epoch * self.steps_per_epoch, config.epochs * self.steps_per_epoch
        totals, lr = self.stepper.totals, 0.0
        totals.clear()
        self.model.train()
        layer = self.model.layer
        tol, most = (config.tol, config.max_steps) if config.method == "snare" else (layer.tol, layer.max_steps)
        if self.stepper.records and not self.stepper.record:
            with at(layer, tol, most, "ignore"):
                self.stepper.choose_record(self.data[: config.batch])
        most = self.stepper.record if self.stepper.records else most
        rescue = True if self.problem.always_feasible else "first"  # where sets are hard to reach, all is too dear
        with at(layer, tol, most, "ignore", rescue):
            for i, x in enumerate(self._batches()):
                lr = config.lr_at(step + i, steps)
                self.stepper(x, relax, soft, lr, (step + i) / steps)
                if self.average is not None:
                    self.average.update_parameters(self.model)
        largest = [one.max().item() if isinstance(one, Tensor) else one for one in each]
        lines = [{**totals.line(self.group, k), "relax": eps, "lr": lr} for k, eps in enumerate(largest)]
        self.stepper.review_record(max(line["failed"] for line in lines), totals.usual_steps())
        return lines

    def _batches(self) -> Iterator[Tensor]:
        """The inputs of an epoch, those of each run in its own order; the same in all processes."""
        batch, count = self.config.batch, self.steps_per_epoch
        generators = [member.generator for member in self.members]
        if self.config.fresh:
            for _ in range(count):
                yield torch.cat([self.problem.sample(batch, generator) for generator in generators])
            return
        size = len(self.data)
        order = torch.stack([torch.randperm(size, generator=g, device=self.device) for g in generators])
        if self.stepper.records:  # a recording has one size: fill the last batch up from the first
            order = torch.cat([order, order], 1)[:, : count * batch]
        for index in order.split(batch, 1):
            yield self.data[index.flatten()]

    def save(self) -> None:
        """Write a checkpoint of every run, which can go on with the others or alone."""
        for k, member in enumerate(self.members):
            loose = {
                "relaxation": member.relaxation.initial,
                "generator": member.generator.get_state(),
                "random": torch.get_rng_state(),
                "record": torch.tensor(self.stepper.record),
            }
            groups = {"model": member.model.state_dict(), "optimizer": self.stepper.state(k)}
            if self.average is not None:
                groups["average"] = member.evaluated.state_dict()
                loose["averaged"] = self.average.n_averaged
            if self.device.type == "cuda":
                loose["random_cuda"] = torch.cuda.get_rng_state(self.device)
            score = member.best.score
            state = {"epoch": self.epoch, "seconds": self.seconds, "best": score and score._asdict()}
            member.run.save_checkpoint({**groups, "best": member.best.tensors, "": loose}, state)

    def load(self) -> None:
        """Go on from the last checkpoints, all of the same epoch."""
        read = [member.run.read_checkpoint() for member in self.members]
        for member, (groups, state) in zip(self.members, read, strict=True):
            try:
                self._restore(member, groups, state)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise member.run.unfit(error) from error
        try:
            self.stepper.load_state([groups.get("optimizer", {}) for groups, _ in read])
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self.members[0].run.unfit(error) from error
        for member in self.members:
            if self.group.leads:
                member.run.rewind(self.epoch)
        self.group.wait()

    def _restore(self, member: Member, groups: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Take over what a checkpoint says about a run; an error that names what does not fit."""
        loose = groups[""]
        member.model.load_state_dict(groups["model"])
        if self.average is not None:
            member.evaluated.load_state_dict(groups["average"])
            self.average.n_averaged.copy_(loose["averaged"])
        if state.get("best") is not None:  # not in checkpoints of the first version
            member.best.score, member.best.tensors = Score(**state["best"]), groups["best"]
            expected = {name: tensor.shape for name, tensor in member.model.state_dict().items()}
            if {name: tensor.shape for name, tensor in groups["best"].items()} != expected:
                raise ValueError("the best weights have other names or shapes than the model's")
        if state["epoch"] and not groups.get("optimizer"):
            raise ValueError("it has nothing of the optimizer")
        if self.config.relaxation == "adarel":
            rows = len(self.problem.equalities(self.data[:1]))
            if loose["relaxation"].shape != (rows,):
                raise ValueError(f"the relaxation must have {rows} rows, but has {tuple(loose['relaxation'].shape)}")
        member.relaxation.initial = loose["relaxation"]
        torch.set_rng_state(loose["random"])
        if ("random_cuda" in loose) != (self.device.type == "cuda"):  # another kind of device: other draws, as good
            member.generator.manual_seed(member.run.config.seed + state["epoch"])
        else:
            member.generator.set_state(loose["generator"])
            if "random_cuda" in loose:
                torch.cuda.set_rng_state(loose["random_cuda"], self.device)
        if "record" in loose:
            self.stepper.record = int(loose["record"])
        self.epoch, self.seconds = state["epoch"], state["seconds"]

    def finish(self) -> list[Kept]:
        """Leave the chosen weights in the models, and on disk; says which they are."""
        chosen = []
        for member in self.members:
            epoch, score = self.epoch, member.best.score
            if self.config.keep == "best" and score is not None:
                epoch = score.epoch
                member.model.load_state_dict(member.best.tensors)
            elif member.averaged is not None:
                member.model.load_state_dict(member.averaged.state_dict())
            self.group.broadcast(member.model.state_dict().values())  # the leader's choice is that of all
            member.model.eval()
            chosen.append(Kept(epoch, self.epoch, score))
            if self.group.leads:
                member.run.save_model(member.model, chosen[-1])
        self.group.wait()
        return chosen
