"""`apart`: a differentiable function of predictions and constraints as one node of autograd.

A loss may be differentiated inside `torch.autocast`, and plain operations on float32 are then differentiated in half
precision. The backward pass of a node of its own is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.repair.precision import without_autocast

Function = Callable[[Instance, Tensor], Tensor]


def apart(function: Function, instance: Instance, y: Tensor) -> Tensor:
    """function(instance, y), whose gradients in y, bounds and the tensors of the map autocast does not touch."""
    tensors = instance.map.tensors(y) if torch.is_grad_enabled() else ()
    inputs = (y, instance.lower, instance.upper, *tensors)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return function(instance, y)
    return _Apart.apply(function, instance, *inputs)  # pyright: ignore


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Function, instance: Instance, y: Tensor, lower: Tensor, upper: Tensor, *tensors: Tensor
    ) -> Tensor:
        leaves: dict[int, Tensor] = {}
        with torch.enable_grad():
            own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in (y, lower, upper)]
            value = function(Instance(instance.map.detached(leaves), own[1], own[2], instance.equal), own[0])
        ctx.value, ctx.inputs = value, (*own, *(leaves.get(id(tensor), tensor) for tensor in tensors))
        ctx.save_for_backward(y, *tensors)  # so that autograd notices when one of them is overwritten
        return value.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        y, wanted = ctx.saved_tensors[0], [tensor for tensor in ctx.inputs if tensor.requires_grad]
        with without_autocast(y.device):
            found = iter(torch.autograd.grad(ctx.value, wanted, gradients[0], allow_unused=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in ctx.inputs)
