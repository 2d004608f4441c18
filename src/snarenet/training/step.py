"""One optimisation step: the loss of a batch, its gradient, the update; by itself or recorded into a CUDA graph."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor

from snarenet.layers import SoftLayer
from snarenet.model import ConstrainedModel
from snarenet.problems import Outcome, Problem
from snarenet.training.config import TrainConfig
from snarenet.training.distributed import Group


class Totals:
    """What an epoch adds up, on the device, so that nobody waits for it step by step."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # samples, loss, objective, failures
        self.most = torch.zeros(1, dtype=torch.float64, device=device)  # violation
        self.steps: list[Tensor] = []  # most steps of each batch

    def add(self, loss: Tensor, outcome: Outcome) -> None:
        """Count a batch; `loss` (B,) is that of its samples."""
        failed = (~outcome.converged).sum()
        count = torch.full_like(failed, len(loss))
        self.sums += torch.stack([count, loss.sum(), outcome.objective.sum(), failed]).detach()
        if len(loss):  # a process's share of a small batch may be empty
            self.most.copy_(torch.maximum(self.most, outcome.violation.max()))
            self.steps.append(outcome.steps.max())

    def line(self, group: Group) -> dict[str, float]:
        """The numbers of the epoch."""
        count, loss, objective, failed = group.total(self.sums).tolist()
        return {
            "loss": loss / count,
            "objective": objective / count,
            "violation": group.total(self.most, largest=True).item(),
            "failed": failed / count,
            "steps": torch.stack(self.steps).double().mean().item() if self.steps else 0.0,
        }


class Stepper:
    """Takes optimisation steps.

    Args:
        model: what is trained.
        problem: what it is trained on.
        config: weights of the loss, clipping.
        group: the processes that train together.
    """

    def __init__(self, model: ConstrainedModel, problem: Problem, config: TrainConfig, group: Group) -> None:
        self.model, self.problem, self.config, self.group = model, problem, config, group
        soft = SoftLayer(model.layer.constraints, tol=config.tol, on_failure="ignore")
        self.unrepaired = ConstrainedModel(model.net, soft)  # for epochs that leave predictions as they are
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = _optimizers(model, self.parameters, config)
        on_gpu = problem.inputs.device.type == "cuda"
        self.records = config.record > 0 and on_gpu and group.size == 1 and model.layer.recordable
        self._recorded: dict[str, _Recording] = {}

    def __call__(self, x: Tensor, relax: float | Tensor, soft: bool, lr: float, totals: Totals) -> None:
        """One step on the batch x at the learning rate lr."""
        recording = self._recording(x, relax, soft) if self.records else None
        loss, outcome = self.differentiate(x, relax, soft) if recording is None else recording.replay(x, relax)
        totals.add(loss, outcome)
        self.group.add_gradients(self.parameters)
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def _recording(self, x: Tensor, relax: float | Tensor, soft: bool) -> _Recording | None:
        """The step recorded for this kind of batch; None, from then on, if that is not possible."""
        kind = "soft" if soft else "relaxed" if isinstance(relax, Tensor) else "exact"
        if kind not in self._recorded:
            try:
                self._recorded[kind] = _Recording(self, x, relax, soft)
            except RuntimeError as error:
                warnings.warn(f"the step could not be recorded into a CUDA graph: {error}", stacklevel=2)
                self.records = False
                return None
        return self._recorded[kind]

    def differentiate(self, x: Tensor, relax: float | Tensor, soft: bool) -> tuple[Tensor, Outcome]:
        """Set the gradients of the loss on this process's share of x: (the loss of every sample, the outcome)."""
        config, mine = self.config, self.group.share(x)
        model = self.unrepaired if soft else self.model
        outcome = self.problem.run(model, mine, relax if isinstance(relax, Tensor) else None)
        loss = outcome.cost + config.penalty * outcome.penalty + config.proximity * outcome.distance
        total = loss.sum() / len(x) if config.reduction == "mean" else loss.sum()
        for parameter in self.parameters:
            if parameter.grad is not None:  # kept, not freed: a recording writes to it
                parameter.grad.zero_()
        total.backward()
        return loss.detach(), Outcome(*(tensor.detach() for tensor in outcome))

    def state(self) -> dict[str, Tensor]:
        """The optimizers' tensors, by name."""
        return {
            f"{k}.{i}.{name}": tensor
            for k, optimizer in enumerate(self.optimizers)
            for i, entry in optimizer.state_dict()["state"].items()
            for name, tensor in entry.items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` gave."""
        for k, optimizer in enumerate(self.optimizers):
            entries: dict[int, dict[str, Tensor]] = {}
            for key, tensor in tensors.items():
                owner, i, name = key.split(".", 2)
                if int(owner) == k:
                    entries.setdefault(int(i), {})[name] = tensor
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _optimizers(
    model: ConstrainedModel, parameters: list[torch.nn.Parameter], config: TrainConfig
) -> list[torch.optim.Optimizer]:
    """AdamW, and, if so configured, Muon for the matrices of the network."""
    decay = config.weight_decay
    matrices = [p for p in model.net.parameters() if p.requires_grad and p.ndim == 2 and config.optimizer == "muon"]
    others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    found: list[torch.optim.Optimizer] = []
    if others:
        found.append(torch.optim.AdamW(others, lr=config.lr, weight_decay=decay))
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=config.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    return found


class _Recording:
    """Loss and gradients of a batch as a CUDA graph, replayed on new inputs; a repair takes a fixed number of steps."""

    def __init__(self, stepper: Stepper, x: Tensor, relax: float | Tensor, soft: bool) -> None:
        self.x, self.relax = x.clone(), relax.clone() if isinstance(relax, Tensor) else relax
        state = copy.deepcopy(stepper.model.state_dict())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what is made once must be there before the recording
                stepper.differentiate(self.x, self.relax, soft)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = stepper.differentiate(self.x, self.relax, soft)
        with torch.no_grad():  # undo what batch norm noted, in place: the graph knows these tensors
            for name, tensor in stepper.model.state_dict().items():
                tensor.copy_(state[name])

    def replay(self, x: Tensor, relax: float | Tensor) -> tuple[Tensor, Outcome]:
        """Loss and gradients of other inputs; what it returns is overwritten by the next."""
        self.x.copy_(x)
        if isinstance(relax, Tensor) and isinstance(self.relax, Tensor):
            self.relax.copy_(relax)
        self.graph.replay()
        loss, outcome = self.result
        return loss, outcome._replace(steps=outcome.steps.clone())
