"""One optimisation step: the loss of a batch, its gradient, the update; by itself or recorded into a CUDA graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from snarenet.constraints.compiled import at_once
from snarenet.layers import Layer, SoftLayer
from snarenet.layers.proximity import REACH, proximity
from snarenet.model import ConstrainedModel
from snarenet.problems import Outcome, Problem
from snarenet.repair.gpu.graphs import beside, recording_into
from snarenet.solution import Solution
from snarenet.training.config import TrainConfig
from snarenet.training.distributed import Group
from snarenet.training.muon import Muon
from snarenet.training.rows import kind, searched
from snarenet.training.witness import Witness

# Of the loss's gradient, for stuck outputs: less than in loops whose networks start anywhere. And, on rows of any kind,
# for all predictions, at the end of training, to which it grows from 0: else they drift away. AC-OPF with 30 buses, 150
# epochs, one seed, the share constant: the mean relative gap on validation instances is 3e-6 without, and grows, 9e-7
# with 0.001, 1.7e-7 with 0.01. With 57 buses, in 24 epochs, training breaks down without; the gap is 5e-5 with a share
# that is constant, 4e-5 with one that grows: at first a network learns faster if it need not be near the set.
_STUCK, _DRIFTING = 0.1, 0.01

_NEARLY_ALL, _MORE, _FEWEST = 0.98, 1.5, 8  # of a recording: whose steps count, how many more it has, and the least
_TRIES = 3  # to record: what happens at the same time on the device may spoil one
_FAILED = 0.01  # share of an epoch's samples that did not converge, for which a recording gets more steps


class Totals:
    """What an epoch adds up, seed by seed, on the device, so that nobody waits for it step by step."""

    def __init__(self, device: torch.device, seeds: int = 1) -> None:
        self.sums = torch.zeros(seeds, 7, dtype=torch.float64, device=device)
        self.most = torch.zeros(seeds, dtype=torch.float64, device=device)  # violation

    def clear(self) -> None:
        """Begin anew, in the same tensors: a recording writes to them."""
        self.sums.zero_()
        self.most.zero_()

    def add(self, loss: Tensor, outcome: Outcome) -> None:
        """Count a batch; `loss` (B,) is that of its samples."""
        found = (loss, outcome.objective, ~outcome.converged, outcome.violation, outcome.steps)
        loss, objective, failed, violation, steps = (t.detach().unflatten(0, (len(self.sums), -1)) for t in found)
        if not loss.numel():  # a process's share of a small batch may be empty
            return
        kinds = (torch.ones_like(loss), loss, objective, failed)
        usual = torch.where(failed, 0, steps).double().quantile(_NEARLY_ALL, 1)
        batches = torch.ones_like(self.most)
        self.sums += torch.stack([*(kind.sum(1) for kind in kinds), steps.amax(1), usual, batches], 1)
        self.most.copy_(torch.maximum(self.most, violation.amax(1)))

    def usual_steps(self) -> float:
        """How many repair steps nearly all samples of a batch need that converge, on average, of the slowest seed."""
        return (self.sums[:, 5] / self.sums[:, 6].clamp(min=1)).max().item()

    def line(self, group: Group, seed: int = 0) -> dict[str, float]:
        """The numbers of the epoch, of the seed with this place in the stack; `steps` is the mean of batch maxima."""
        steps, batches = self.sums[seed, [4, 6]].tolist()
        count, loss, objective, failed = group.total(self.sums[seed, :4].clone()).tolist()
        return {
            "loss": loss / count,
            "objective": objective / count,
            "violation": group.total(self.most[seed].clone(), largest=True).item(),
            "failed": failed / count,
            "steps": steps / max(batches, 1),
        }


def recordable(config: TrainConfig, layer: Layer, problem: Problem) -> bool:
    """Is a step to be recorded, on a GPU? By itself one of our method, unless a search in it looks at values."""
    if config.record == "auto":
        return config.method == "snare" and (layer.options.start is None or not searched(problem))
    return config.record > 0 and layer.recordable


class Stepper:
    """Takes optimisation steps.

    Args:
        model: what is trained.
        problem: what it is trained on.
        config: weights of the loss, clipping.
        group: the processes that train together.
        seeds: how many models `model` is a stack of, see `seeds.py`; a batch has samples for each of them.
    """

    def __init__(
        self, model: ConstrainedModel, problem: Problem, config: TrainConfig, group: Group, seeds: int = 1
    ) -> None:
        self.model, self.problem, self.config, self.group, self.seeds = model, problem, config, group, seeds
        soft = SoftLayer(model.layer.constraints, tol=config.tol, on_failure="ignore")
        self.unrepaired = ConstrainedModel(
            model.net, soft, model.units
        )  # for epochs that leave predictions as they are
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        device = problem.inputs.device
        self.bounded = not bool(problem.equalities(problem.inputs[:1]).all())
        self.plain = kind(problem) != "any"
        self.totals = Totals(device, seeds)
        self.records = device.type == "cuda" and group.size == 1 and recordable(config, model.layer, problem)
        self.record = 0 if config.record == "auto" else config.record  # steps in a recording; 0 until they are known
        self.lost = 0.0  # the share of samples that more steps do not help
        self.before: float | None = None  # the share that failed before more steps were tried
        self.lr = torch.tensor(config.lr, device=device)  # tensors: a recording reads them
        self.pull = torch.zeros((), device=device)
        ndim = 2 if seeds == 1 else 3
        matrices = [p for p in model.net.parameters() if p.requires_grad and p.ndim == ndim]
        self.optimizers = config.build_optimizers(self.parameters, matrices, self.lr if self.records else config.lr)
        self._recorded: dict[str, _Recording] = {}
        self._update: torch.cuda.CUDAGraph | None = None
        self._updates = 0

    def __call__(self, x: Tensor, relax: float | Tensor, soft: bool, lr: float, done: float) -> None:
        """One step on a batch.

        Args:
            x: the batch.
            relax: a number, (rows,), or (seeds, rows).
            soft: leave predictions as they are.
            lr: the learning rate.
            done: the share of all steps that were taken before.
        """
        self.pull.fill_(_DRIFTING * done)
        recording = self._recording(x, relax, soft) if self.records else None
        if recording is None:
            self.differentiate(x, relax, soft)
        else:
            recording.replay(x, relax)
        self.group.add_gradients(self.parameters)
        self.lr.fill_(lr)
        if self.records and self._updates:  # the first update has made the optimizers' tensors
            if self._update is None:
                self._update = torch.cuda.CUDAGraph()
                with recording_into(self._update):
                    self.update()
            self._update.replay()
        else:
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"] = self.lr if isinstance(group["lr"], Tensor) else lr
            self.update()
        self._updates += 1

    def choose_record(self, x: Tensor) -> None:
        """Let a recording have some more steps than nearly all samples of x (B, d) need now."""
        with torch.no_grad():
            outcome = self.problem.run(self.model, x.repeat(self.seeds, 1))
        plain = outcome.converged & (outcome.steps <= self.config.max_steps)  # the others were rescued, or are lost
        steps = outcome.steps[plain].double()
        usual = steps.quantile(_NEARLY_ALL).item() if len(steps) else 0.0
        self.record, self.lost = max(_FEWEST, math.ceil(_MORE * usual)), 1 - plain.double().mean().item()

    def review_record(self, failed: float, steps: float) -> None:
        """Record again with more steps if too large a share of an epoch's samples failed, with fewer if few are needed.

        Those do not count that would have to be rescued, as a recording has no rescue, nor those that fail with more
        steps as they did without.

        Args:
            failed: the share of samples that did not converge.
            steps: how many steps nearly all samples need that converge.
        """
        if not self.records or self.config.record != "auto":
            return
        enough, record = max(_FEWEST, math.ceil(_MORE * steps)), self.record
        if self.before is not None and failed > self.before - _FAILED:
            self.lost = failed
        self.before = None
        if failed > self.lost + _FAILED and record < self.config.max_steps:
            self.before, record = failed, min(self.config.max_steps, math.ceil(_MORE * record))
        elif _MORE * enough < record:
            record = enough
        if record != self.record:
            self.record = record
            self._recorded.clear()

    def update(self) -> None:
        """Move the parameters along their gradients."""
        if self.config.clip:
            _clip(self.parameters, self.config.clip, self.seeds)
        for optimizer in self.optimizers:
            optimizer.step()

    def _recording(self, x: Tensor, relax: float | Tensor, soft: bool) -> _Recording | None:
        """The step recorded for this kind of batch; None, from then on, if that is not possible."""
        kind = "soft" if soft else "relaxed" if isinstance(relax, Tensor) else "exact"
        for left in reversed(range(_TRIES if kind not in self._recorded else 0)):
            try:
                self._recorded[kind] = _Recording(self, x, relax, soft)
                break
            except RuntimeError as error:
                if not left:
                    said = "steps take longer than they could: none could be recorded into a CUDA graph"
                    warnings.warn(f"{said}: {_first(error)}", stacklevel=2)
                    self.records = False
                    return None
        return self._recorded[kind]

    def differentiate(self, x: Tensor, relax: float | Tensor, soft: bool) -> None:
        """Set the gradients of the loss on this process's share of x, and add the batch to the totals."""
        config, mine = self.config, self.group.share(x)
        model = self.unrepaired if soft else self.model
        size = len(x) // self.seeds  # of the batch of one seed
        if isinstance(relax, Tensor) and self.seeds > 1:
            relax = relax.repeat_interleave(size, 0)
        witness = Witness(model)
        outcome = self.problem.run(witness, mine, relax if isinstance(relax, Tensor) else None)
        if not outcome.cost.requires_grad and not config.penalty:
            raise ValueError(
                "`objective(y, x)` has no derivative in `y`, so there is nothing to train by: was it computed outside "
                "torch, or detached?"
            )
        penalty = outcome.penalty if config.penalised == "squares" else outcome.errors.sum(1)
        loss = outcome.cost + config.penalty * penalty
        if config.method == "snare" and not config.penalty and not soft:
            # outside the set an objective may be better than in it: a sample that was not repaired teaches nothing
            loss = torch.where(outcome.converged, loss, 0.0)
        loss = loss + self._proximity(loss, outcome, witness.only)
        total = loss.sum() / size if config.reduction == "mean" else loss.sum()
        for parameter in self.parameters:
            if parameter.grad is not None:  # kept, not freed: a recording writes to it
                parameter.grad.zero_()
        total.backward()
        self.totals.add(loss, outcome)

    def _proximity(self, loss: Tensor, outcome: Outcome, solution: Solution | None) -> Tensor | float:
        """(B,) what keeps predictions near the set; by itself only where a problem asks for one solution a sample."""
        if self.config.proximity != "auto":
            return self.config.proximity * outcome.distance
        if not self.bounded or solution is None:
            return 0.0
        layer, own = self.model.layer, {"seeds": self.seeds, "total": self.group.total}
        share, reach = (_STUCK, REACH) if self.plain else (self.pull, 0.0)
        return proximity(solution.value, solution.raw, loss, layer.metric, share, reach, **own)

    def state(self, seed: int = 0) -> dict[str, Tensor]:
        """The optimizers' tensors, by name, of the seed with this place in the stack."""
        return {
            f"{k}.{i}.{name}": tensor[seed] if self.seeds > 1 and tensor.ndim else tensor
            for k, optimizer in enumerate(self.optimizers)
            for i, entry in optimizer.state_dict()["state"].items()
            for name, tensor in entry.items()
        }

    def load_state(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Restore what `state` gave for each seed."""
        tensors = states[0]
        if self.seeds > 1:  # numbers, such as AdamW's count of steps, are those of all
            tensors = {key: torch.stack([s[key] for s in states]) if t.ndim else t for key, t in tensors.items()}
        for k, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            entries: dict[int, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                owner, i, name = key.split(".", 2)
                if int(owner) == k:
                    entries.setdefault(int(i), {})[name] = tensor
            for i, entry in entries.items():
                _check_entry(type(optimizer), i, entry, parameters[i])
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _first(error: BaseException) -> BaseException:
    """The error that led to this one."""
    return error if error.__context__ is None else _first(error.__context__)


# What an optimizer keeps of a parameter: with less it would fail in its next step, or begin anew.
_KEPT = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, Muon: {"momentum_buffer"}}


def _check_entry(kind: type, i: int, entry: dict[str, Tensor], parameter: Tensor) -> None:
    """Raise unless an optimizer can go on with what was kept of its parameter i."""
    if set(entry) != _KEPT[kind]:
        raise ValueError(f"{kind.__name__} needs {sorted(_KEPT[kind])} of parameter {i}, but has {sorted(entry)}")
    for name, tensor in entry.items():
        if tensor.ndim and tensor.shape != parameter.shape:
            shapes = f"shape {tuple(parameter.shape)}, but {name!r} has {tuple(tensor.shape)}"
            raise ValueError(f"parameter {i} of {kind.__name__} has {shapes}")


def _clip(parameters: list[torch.nn.Parameter], limit: float, seeds: int) -> None:
    """Shorten the gradient of each seed to the norm `limit`, if it is longer."""
    if seeds == 1:
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1)  # as PyTorch does it
    for gradient in gradients:
        gradient.mul_(factors.view(-1, *[1] * (gradient.ndim - 1)))


class _Recording:
    """Loss and gradients of a batch as a CUDA graph, replayed on new inputs; a repair takes a fixed number of steps."""

    def __init__(self, stepper: Stepper, x: Tensor, relax: float | Tensor, soft: bool) -> None:
        self.x, self.relax = x.clone(), relax.clone() if isinstance(relax, Tensor) else relax
        noted = [*stepper.model.state_dict().values(), stepper.totals.sums, stepper.totals.most]
        before = [tensor.clone() for tensor in noted]
        with beside(), at_once():
            for _ in range(3):  # what is made once must be there before the recording
                stepper.differentiate(self.x, self.relax, soft)
        self.graph = torch.cuda.CUDAGraph()
        with recording_into(self.graph):
            stepper.differentiate(self.x, self.relax, soft)
        with torch.no_grad():  # undo what batch norm and the totals noted, in place: the graph knows these tensors
            for tensor, old in zip(noted, before, strict=True):
                tensor.copy_(old)

    def replay(self, x: Tensor, relax: float | Tensor) -> None:
        """Loss and gradients of other inputs."""
        self.x.copy_(x)
        if isinstance(relax, Tensor) and isinstance(self.relax, Tensor):
            self.relax.copy_(relax)
        self.graph.replay()
