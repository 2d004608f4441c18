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


class Units(nn.Module):
    """Units in which a network predicts: x in deviations from a mean, y in scales from a centre; none is trained.

    A network whose outputs start at typical values, and differ by as much as these do, learns faster, and few of its
    outputs begin far behind a bound.

    Args:
        mean: (d,) of the inputs.
        deviation: (d,) of the inputs, positive.
        centre: (n,) a typical output.
        scale: (n,) how far outputs are from it, positive.
    """

    mean: Tensor
    deviation: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, centre: Tensor, scale: Tensor) -> None:
        super().__init__()
        for name, value in {"mean": mean, "deviation": deviation, "centre": centre, "scale": scale}.items():
            self.register_buffer(name, value.detach().clone())

    @classmethod
    def of(cls, inputs: Tensor, outputs: Tensor) -> Units:
        """Means and deviations over all but the last dimension, of data to learn from.

        Args:
            inputs: (..., d) inputs; one that never changes is left as it is.
            outputs: (..., n) outputs; the scale of one that never changes is 1.
        """
        (mean, deviation), (centre, scale) = _moments(inputs), _moments(outputs)
        return cls(torch.where(deviation > 0, mean, 0.0), _positive(deviation), centre, _positive(scale))

    def into(self, x: Tensor) -> Tensor:
        """What the network sees of inputs x (..., d)."""
        return (x - self.mean) / self.deviation

    def back(self, y: Tensor) -> Tensor:
        """What the network's outputs y (B, n) mean."""
        return self.centre + self.scale * y


def _moments(data: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation; the latter is 0 where it is no more than rounding."""
    flat = data.detach().flatten(0, -2)
    deviation = flat.std(0, correction=0)
    tiny = 100 * torch.finfo(flat.dtype).eps * flat.abs().amax(0)
    return flat.mean(0), torch.where(deviation > tiny, deviation, 0.0)


def _positive(deviation: Tensor) -> Tensor:
    return torch.where(deviation > 0, deviation, 1.0)


class ConstrainedModel(nn.Module):
    """x -> network -> repaired y.

    The network may have another precision than x: its input is cast to the dtype of its parameters, and its prediction
    back to the dtype of x, so that a float32 network with float64 inputs gives outputs feasible to float64 accuracy.
    Under `torch.autocast` the network runs as it says and the layer does not; outputs are float32 at least.

    Args:
        net: any module from x to predictions (B, n).
        layer: what makes them feasible.
        units: those of the network, if not those of x and y.
    """

    def __init__(self, net: nn.Module, layer: Layer, units: Units | None = None) -> None:
        super().__init__()
        self.net, self.layer, self.units = net, layer, units

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
        seen = x if self.units is None else self.units.into(x)
        seen, dtype = (cast(seen, own[0]), reduce(torch.promote_types, given)) if own and given else (seen, None)
        y = self.net(seen)
        y = y if dtype is None else y.to(dtype)
        return y if self.units is None else self.units.back(y).to(y.dtype)
