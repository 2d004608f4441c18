"""`StepTape`: what the loop writes down step by step, and how it is read backward."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from snarenet.constraints.maps import add
from snarenet.repair.engine import Gradients, Tape
from snarenet.repair.loop.spaces import Space
from snarenet.repair.loop.steps import Step
from snarenet.tracing import tracing


class StepTape(Tape):
    """The steps of a repair, in order.

    Attributes:
        space: that of the whole batch.
        bounds: do the bounds need gradients?
        steps: what was written so far.
        lasts: (B,) how many steps led to the point that was returned; None if all samples converged.
    """

    def __init__(self, space: Space, bounds: bool) -> None:
        self.space, self.bounds = space, bounds
        self.steps: list[Step] = []
        self.lasts: Tensor | None = None

    def mask(self, lasts: Tensor) -> None:
        """Leave out steps after the one that led to the point that was returned; for tapes that cannot choose."""
        for k, step in enumerate(self.steps):
            led = lasts > k
            self.steps[k] = step._replace(moved=led if step.moved is None else step.moved & led)

    def pull_back(self, y: Tensor, v: Tensor, wanted: tuple[Tensor, ...]) -> Gradients:
        space, batch = self.space, len(v)
        steps = self.steps
        if self.lasts is not None:  # one that was rescued may have gone too far for its steps to be pulled back
            steps = self._up_to(torch.where((v == 0).all(1), 0, self.lasts))
        cotangent = space.pull_start(v)
        totals: list[Tensor | None] = [None] * len(wanted)
        lower = upper = scale = None
        for _, group in groupby(reversed(steps), key=lambda step: id(step.samples)):
            together = list(group)
            samples = together[0].samples
            with torch.set_grad_enabled(bool(wanted)):  # so that gradients reach the tensors of the whole batch
                part = space if samples is None else space.select(samples)
            mine = cotangent if samples is None else cotangent[samples]
            for step in together:
                pulled = part.pull_step(step, mine, wanted)
                mine = pulled.cotangent
                if step.below is not None:
                    below = pulled.rows * step.below
                    lower = _scatter_add(lower, samples, below, batch)
                    upper = _scatter_add(upper, samples, pulled.rows - below, batch)
                if pulled.scale is not None:
                    scale = _scatter_add(scale, samples, pulled.scale, batch)
                totals = [add(a, b) for a, b in zip(totals, pulled.tensors, strict=True)]
            cotangent = mine if samples is None else cotangent.index_copy(0, samples, mine)
        found_y, found = space.pull_finish(y, v, cotangent, scale, wanted)
        if tracing():  # one that ran away may have steps that cannot be pulled back, and here none is left out
            found_y = torch.where((v != 0).any(1, keepdim=True), found_y, 0.0)
        return Gradients(found_y, lower, upper, [add(a, b) for a, b in zip(totals, found, strict=True)])

    def _up_to(self, lasts: Tensor) -> list[Step]:
        """The steps without those that a sample took after so many (B,)."""
        kept = []
        for k, step in enumerate(self.steps):
            keep = ((lasts if step.samples is None else lasts[step.samples]) > k).nonzero().squeeze(1)
            if len(keep):
                kept.append(step if len(keep) == len(step.used) else step.select(keep))
        return kept


def _scatter_add(total: Tensor | None, samples: Tensor | None, part: Tensor, batch: int) -> Tensor:
    """total + part, where part holds only some samples of the batch and None stands for zero."""
    if samples is None:
        return part if total is None else total + part
    total = part.new_zeros(batch, *part.shape[1:]) if total is None else total
    return total.index_add(0, samples, part)
