"""Networks with a layer behind them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from snarenet.constraints.data import cast
from snarenet.layers.base import Layer
from snarenet.solution import Solution


class MLP(nn.Sequential):
    """Fully connected network.

    Args:
        inputs: size of x.
        outputs: size of y.
        width: size of the hidden layers.
        depth: how many hidden layers there are.
        activation: the nonlinearity, SiLU unless given.
        dropout: share of hidden units dropped in training.
        batch_norm: normalise hidden layers over the batch.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: int = 400,
        depth: int = 2,
        activation: Callable[[], nn.Module] = nn.SiLU,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        for name, size in {"inputs": inputs, "outputs": outputs, "width": width}.items():
            if size < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {size}")
        layers: list[nn.Module] = []
        for before in [inputs, *[width] * depth][:depth]:
            layers.append(nn.Linear(before, width))
            if batch_norm:
                layers.append(nn.BatchNorm1d(width))
            layers.append(activation())
            if dropout:
                layers.append(nn.Dropout(dropout))
        super().__init__(*layers, nn.Linear(width if depth else inputs, outputs))


class ConstrainedModel(nn.Module):
    """x -> network -> repaired y.

    The network may have another precision than x: its input is cast to the dtype of its parameters, and its prediction
    back to the dtype of x, so that a float32 network with float64 inputs gives outputs feasible to float64 accuracy.
    Under `torch.autocast` the network runs as it says and the layer does not; outputs are float32 at least.

    Args:
        net: any module from x to predictions (B, n).
        layer: what makes them feasible.
    """

    def __init__(self, net: nn.Module, layer: Layer) -> None:
        super().__init__()
        self.net, self.layer = net, layer

    def forward(self, x: Any, relax: float | Tensor | None = None) -> Tensor:
        """Feasible outputs for the inputs x; `relax` widens the set in training mode only."""
        return self.layer(self.raw(x), x, relax)

    def solve(self, x: Any, relax: float | Tensor | None = None) -> Solution:
        """Feasible outputs with the status of every sample."""
        return self.layer.solve(self.raw(x), x, relax)

    def raw(self, x: Any) -> Tensor:
        """The network's predictions before the repair."""
        own = [parameter.dtype for parameter in self.net.parameters() if parameter.is_floating_point()]
        given = [leaf.dtype for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not own or not given:
            return self.net(x)
        return self.net(cast(x, own[0])).to(reduce(torch.promote_types, given))
