r"""Muon for matrices and for stacks of them; each moves as PyTorch's would move it.

PyTorch's takes no stacks, and a learning rate that a CUDA graph could not read.

With the gradient G, the moving average $M \leftarrow 0.95 M + 0.05 G$ and the look-ahead $N = 0.05 G + 0.95 M$,

$$ W \leftarrow (1 - η w) W - 0.2\, η \sqrt{\max(a, b)}\; \mathrm{orth}(N), $$

where W is (a, b), w the weight decay and orth five steps of Newton and Schulz towards $U V'$ of $N = U S V'$.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MOMENTUM = 0.95
_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; these and what follows are PyTorch's defaults
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon(..., adjust_lr_fn="match_rms_adamw")`, for parameters (a, b) and (S, a, b).

    Args:
        params: the matrices, or stacks of them.
        lr: learning rate, a number or a tensor.
        weight_decay: of the weights, apart from the gradient.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float | Tensor, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move all parameters that have a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - _MOMENTUM)
                update = orthogonalize(weight.grad.lerp(mean, _MOMENTUM))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update.to(weight.dtype) * (0.2 * math.sqrt(max(weight.shape[-2:])) * group["lr"]))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices (a, b) or (S, a, b) with singular values near 1 and the same singular vectors, in bfloat16."""
    if matrices.ndim == 2:
        return orthogonalize(matrices.unsqueeze(0)).squeeze(0)
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    X = matrices.bfloat16()
    X = X.mT if tall else X
    X = X / X.norm(dim=(1, 2), keepdim=True).clamp(min=_TINY)
    for _ in range(_STEPS):
        gram = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X
