"""Several seeds of one model as one: weights stacked along a first dimension, samples of all seeds in one batch.

A batch holds the samples of the first seed, then those of the second, and so on: (S*B, d). The stacked network applies
its slice s to the rows of seed s; the layer treats every row by itself, so it repairs the rows of all seeds at once.
The loss is the sum of the seeds' losses, and with it every gradient is that of its own seed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from snarenet.model import ConstrainedModel
from snarenet.problems import Problem


class StackedNet(nn.Module):
    """Networks of one shape as one: every parameter and buffer has a first dimension of seeds.

    Dropout draws numbers for each network. Batch norm's statistics are those of each network.

    Args:
        nets: the networks, whose tensors are copied.
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.count = len(nets)
        self.net = copy.deepcopy(nets[0])
        tensors = [dict(net.named_parameters()) | dict(net.named_buffers()) for net in nets]
        _replace(self.net, {name: torch.stack([own[name].detach() for own in tensors]) for name in tensors[0]})

    def forward(self, x: Tensor) -> Tensor:
        """(S*B, n) predictions for inputs (S*B, d), seed by seed."""
        state = dict(self.net.named_parameters()) | dict(self.net.named_buffers())

        def predict(own: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self.net, own, (x,))

        return vmap(predict, randomness="different")(state, x.unflatten(0, (self.count, -1))).flatten(0, 1)

    def window(self, k: int) -> nn.Module:
        """Network k, whose tensors are those of the stack: what changes here or there changes in both."""
        net = copy.deepcopy(self.net)
        tensors = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        _replace(net, {name: tensor.detach()[k] for name, tensor in tensors.items()})
        return net


def _replace(net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the network other parameters and buffers of the same names, without copies."""
    learned = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    for name, tensor in tensors.items():
        owner, _, own = name.rpartition(".")
        value = nn.Parameter(tensor, learned[name]) if name in learned else tensor
        setattr(net.get_submodule(owner), own, value)


def stack(models: Sequence[ConstrainedModel]) -> ConstrainedModel:
    """One model of all of these, with the layer of the first; a single model stays as it is."""
    first = models[0]
    return (
        first if len(models) == 1 else ConstrainedModel(StackedNet([m.net for m in models]), first.layer, first.units)
    )


def windows(model: ConstrainedModel) -> list[ConstrainedModel]:
    """What `stack` made, model by model: they share its tensors and its layer."""
    if not isinstance(model.net, StackedNet):
        return [model]
    return [ConstrainedModel(model.net.window(k), model.layer, model.units) for k in range(model.net.count)]


def cannot_stack(model: ConstrainedModel, problem: Problem) -> str:
    """Why seeds of this model cannot be trained as one, in words; "" if they can."""
    layer = model.layer
    if "seed" in inspect.signature(type(layer)).parameters:
        return f"{layer.title} makes random choices of its own for each seed"
    if any(parameter.requires_grad for parameter in layer.parameters()):
        return "the constraints are trained, too"
    if not problem.direct:
        return f"`{type(problem).__name__}` has a `run` of its own, which may take samples apart"
    return ""
