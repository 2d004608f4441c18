"""`differentiable`: an engine as one operation of autograd, whose backward pass is the engine's tape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snarenet.repair.engine import Batch, Engine, Outcome
from snarenet.tracing import without_grad


def differentiable(engine: Engine, batch: Batch) -> Outcome:
    """What the engine makes of the batch, with a backward pass where a gradient is needed."""
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():  # an exported model is for inference
        with without_grad():
            return engine.run(batch, taped=False)[0]
    if torch.compiler.is_compiling() and not engine.traceable:
        from snarenet.repair.eager import run_eagerly  # here, as it imports the whole compiler

        return run_eagerly(engine, batch)  # pyright: ignore
    return run(engine, batch)


def run(engine: Engine, batch: Batch) -> Outcome:
    """Through autograd's Function if any tensor that goes in needs a gradient, else without a tape."""
    tensors = engine.tensors(batch.y)
    if any(t.requires_grad for t in (batch.y, batch.lower, batch.upper, *tensors)):
        return Outcome(*_Repair.apply(engine, batch.finite, batch.y, batch.lower, batch.upper, *tensors))  # pyright: ignore
    with torch.no_grad():
        return engine.run(batch, taped=False)[0]


class _Repair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Engine, finite: Tensor, y: Tensor, lower: Tensor, upper: Tensor, *tensors: Tensor
    ) -> Any:
        leaves: dict[int, Tensor] = {}
        (value, status, steps), ctx.tape = engine.detached(leaves).run(Batch(y, lower, upper, finite), taped=True)
        ctx.wanted = tuple(leaves.get(id(t), t) for t in tensors)
        ctx.save_for_backward(y, *tensors)  # so that autograd notices when one of them is overwritten
        ctx.mark_non_differentiable(status, steps)
        return value, status, steps

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        found = ctx.tape.pull_back(ctx.saved_tensors[0], gradients[0], ctx.wanted)
        return None, None, found.y, found.lower, found.upper, *found.tensors
