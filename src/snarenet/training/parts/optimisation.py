"""`Optimisation`: which optimizer moves the weights, how far, and along which gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from snarenet.training.muon import Muon
from snarenet.training.parts.base import Part, Share, Weight


@dataclass(frozen=True)
class Optimisation(Part):
    """The optimizer and its learning rate."""

    optimizer: Literal["muon", "adamw"] = "muon"
    """For the weight matrices: Muon's orthogonal updates reach a gap 30 times smaller than AdamW in as many steps.
    Biases and all else are always AdamW's."""
    lr: Weight = 5e-3
    """Largest learning rate; Muon's is scaled to the size of AdamW's updates, which want about 1e-3."""
    weight_decay: Weight = 0.1
    """Keeps the largest gap down on a finite data set; 0 is slightly better with fresh inputs."""
    warmup: Share = 0.05
    """Share of the steps in which the learning rate rises to its largest value."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after that: to zero along a cosine, where the last digits of the gap are won, or constant."""
    clip: Weight = 0.0
    """Largest norm of the gradient; 0 for no limit."""
    average: Share = 0.0
    """Decay of a running average of the weights, which is then what is evaluated; 0 for none."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the loss adds up over a batch."""

    def lr_at(self, step: int, steps: int) -> float:
        """The learning rate of step `step` of `steps`."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        if self.schedule == "constant":
            return self.lr
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

    def build_optimizers(
        self, parameters: Sequence[Parameter], matrices: Sequence[Parameter], lr: float | Tensor
    ) -> list[torch.optim.Optimizer]:
        """AdamW, and, if so configured, Muon for those that are matrices; a tensor `lr` is for recording them."""
        chosen = list(matrices) if self.optimizer == "muon" else []
        others = [p for p in parameters if not any(p is matrix for matrix in chosen)]
        decay, recorded = self.weight_decay, isinstance(lr, Tensor)
        found: list[torch.optim.Optimizer] = []
        if others:
            found.append(torch.optim.AdamW(others, lr=lr, weight_decay=decay, capturable=recorded))
        if chosen:
            found.append(Muon(chosen, lr=lr, weight_decay=decay))
        return found

    def build_average(self, model: torch.nn.Module) -> AveragedModel | None:
        """The running average of a model's weights; None where none is kept."""
        if not self.average:
            return None
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.average), use_buffers=False)
