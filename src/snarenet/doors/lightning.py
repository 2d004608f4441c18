"""`ConstrainedModule` trains a constrained model in Lightning; `Feasibility` logs how the repairs of any module went.

The loss is that of a training loop of one's own: the mean of f(y, x) over a batch of repaired outputs y, and the pull
of `layer.proximity` on outputs that are stuck on a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from snarenet.layers import Layer
from snarenet.model import ConstrainedModel
from snarenet.solution import RepairWarning, Solution, warn
from snarenet.training.metrics import nearness

try:
    import lightning
except ImportError as error:
    raise ImportError('Lightning is an extra: pip install "snarenet[lightning]"') from error


class ConstrainedModule(lightning.LightningModule):
    """A model with its objective, for `Trainer.fit`, `validate`, `test` and `predict`.

    A batch is x, or a sequence that begins with x, as data loaders make it.

    Args:
        model: network and layer.
        objective: function of the outputs (B, n) and all entries of a batch, f(y, x, ...), that returns (B,).
        lr: of AdamW; override `configure_optimizers` for another optimiser.
    """

    def __init__(self, model: ConstrainedModel, objective: Callable[..., Tensor], lr: float = 1e-3) -> None:
        super().__init__()
        self.model, self.objective, self.lr = model, objective, lr

    def forward(self, x: Any) -> Tensor:
        """Feasible outputs for x."""
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """The loss of a batch, with the pull on stuck outputs."""
        solution, loss = self._run(batch)
        self.log("train_loss", loss.detach(), batch_size=len(solution.status))
        return loss + self.model.layer.proximity(solution, loss)

    def validation_step(self, batch: Any, batch_idx: int = 0) -> None:
        """Log the objective, without the pull."""
        self._log_objective("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        """The same for test data."""
        self._log_objective("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        """Feasible outputs for the x of a batch."""
        return self(_entries(batch)[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def _log_objective(self, name: str, batch: Any) -> None:
        solution, loss = self._run(batch)
        self.log(name, loss, prog_bar=True, batch_size=len(solution.status))

    def _run(self, batch: Any) -> tuple[Solution, Tensor]:
        entries = _entries(batch)
        solution = self.model.solve(entries[0])
        return solution, self.objective(solution.value, *entries).mean()


def _entries(batch: Any) -> Sequence[Any]:
    return batch if isinstance(batch, (list, tuple)) else (batch,)


class Feasibility(lightning.Callback):
    """Logs the repairs of all layers inside a module, whatever it does with them, and warns of those that failed.

    Logged for each of train, val and test, over an epoch: `{stage}_converged`, the share of samples; `_violation`, the
    largest; `_steps`, their mean; `_tight`, the share of inequalities at one of their bounds; `_stuck`, the share of
    outputs that sit on a bound far from what the network predicts, and hardly vary. At the end of an epoch in which
    samples failed comes a `RepairWarning`, also of layers with `on_failure="ignore"`.
    """

    def __init__(self) -> None:
        self.repairs: list[dict[str, float]] = []  # of the batch at hand
        self.failures: dict[str, tuple[int, int]] = {}  # of an epoch: how many samples failed, of how many
        self.handles: list[RemovableHandle] = []

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Listen to all layers."""
        layers = [module for module in pl_module.modules() if isinstance(module, Layer)]
        if not layers:
            raise ValueError(f"expected a module with a SnareLayer inside, but {type(pl_module).__name__} has none")
        self.teardown(trainer, pl_module, stage)
        self.handles = [layer.register_solution_hook(self._listener(layer)) for layer in layers]

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Listen no more."""
        while self.handles:
            self.handles.pop().remove()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._log(pl_module, "train")

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log(pl_module, "val")

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._log(pl_module, "test")

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._warn(trainer, "train")

    def on_validation_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._warn(trainer, "val")

    def on_test_epoch_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._warn(trainer, "test")

    def _listener(self, layer: Layer) -> Callable[[Solution], None]:
        def listen(solution: Solution) -> None:
            if len(solution.status):
                self.repairs.append(_measured(solution, layer.metric))

        return listen

    def _log(self, module: lightning.LightningModule, stage: str) -> None:
        """Log the repairs of a batch, all layers and calls together."""
        repairs, self.repairs = self.repairs, []
        if not repairs:
            return
        samples = [int(repair["samples"]) for repair in repairs]
        failed = sum(int(repair["failed"]) for repair in repairs)
        before = self.failures.get(stage, (0, 0))
        self.failures[stage] = before[0] + failed, before[1] + sum(samples)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": sum(samples)}
        module.log(f"{stage}_violation", max(repair["violation"] for repair in repairs), reduce_fx="max", **options)
        means = {name: sum(k * repair[name] for k, repair in zip(samples, repairs, strict=True)) for name in _MEANS}
        module.log_dict({f"{stage}_{name}": total / sum(samples) for name, total in means.items()}, **options)

    def _warn(self, trainer: lightning.Trainer, stage: str) -> None:
        failed, seen = self.failures.pop(stage, (0, 0))
        if failed:
            warn(
                f"in epoch {trainer.current_epoch}, {stage}, {failed} of {seen} samples were not repaired to the "
                f"tolerance: their outputs violate constraints, see `{stage}_violation`",
                RepairWarning,
            )


_MEANS = ("converged", "steps", "tight", "stuck")


def _measured(solution: Solution, weights: Tensor | None) -> dict[str, float]:
    """What is logged of one repair."""
    found = {"tight": 0.0, "stuck": 0.0}
    if solution.origin is not None and solution.raw.shape == solution.value.shape:
        with torch.no_grad():
            found |= nearness(solution, solution.origin.constraints, solution.origin.x, weights)
    failed = int((~solution.converged).sum())
    return found | {
        "samples": len(solution.status),
        "failed": failed,
        "converged": 1 - failed / len(solution.status),
        "violation": solution.violation.max().item(),
        "steps": solution.steps.double().mean().item(),
    }
