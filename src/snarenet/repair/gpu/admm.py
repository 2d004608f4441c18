"""`multipliers`: the iterations of `start/admm.py`, where the way back is derived, by one kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snarenet.repair.gpu import blocks, launching
from snarenet.repair.start.admm import RELAXATION


def suits(y: Tensor, rows: int) -> bool:
    """Can the kernel take so many rows, where y is?"""
    return launching.supported(y) and 0 < rows <= blocks.MOST_ROWS


def multipliers(image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int) -> Tensor:
    """s after so many iterations from the image A y (B, rows)."""
    found: Any = _Multipliers.apply(image, lower, upper, K, iterations)
    return found


class _Multipliers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: Tensor, lower: Tensor, upper: Tensor, K: Tensor, iterations: int) -> Tensor:
        image, lower, upper = (tensor.contiguous() for tensor in (image, lower, upper))
        taped = any(ctx.needs_input_grad)
        codes = torch.empty((iterations + 1) * taped, *image.shape, dtype=torch.int8, device=image.device)
        found = torch.empty_like(image)
        blocks.launch("admm", "approach", image, lower, upper, K, iterations, RELAXATION, found, codes, int(taped))
        ctx.K, ctx.codes, ctx.iterations = K, codes, iterations
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore
        cotangent = gradients[0].clone(memory_format=torch.contiguous_format)
        lower, upper = torch.empty_like(cotangent), torch.empty_like(cotangent)
        blocks.launch("admm", "approach_back", cotangent, ctx.K, ctx.iterations, RELAXATION, ctx.codes, lower, upper)
        return cotangent, lower, upper, None, None
