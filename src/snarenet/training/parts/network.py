"""`Network`: the fully connected network that predicts, and how its weights begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from snarenet.model import MLP
from snarenet.training.parts.base import Count, Part, Share, Size

_ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Network(Part):
    """The network before the layer."""

    width: Size = 400
    """Size of the hidden layers; wider is better, as far as time allows."""
    depth: Count = 2
    """Hidden layers."""
    activation: Literal["silu", "relu", "gelu", "tanh"] = "silu"
    """Nonlinearity; a smooth one fits a smooth solution map better."""
    dropout: Share = 0.0
    """Share of hidden units dropped: noise in a regression with unlimited data only costs accuracy."""
    batch_norm: bool = False
    """Normalise hidden layers over the batch; not needed at these depths."""
    init: Literal["torch", "kaiming"] = "torch"
    """Initial weights: PyTorch's, or Kaiming's normal ones (the paper)."""
    standardise: bool = True
    """Let the network see inputs with mean 0 and deviation 1, and start its outputs at a typical solution, in scales in
    which solutions differ: fixed numbers, from the training inputs. Not for policies, which see other inputs."""
    head: float = 1.0
    """Factor on the initial weights of the last layer; a small one starts near y = 0, at a nominal policy, say."""
    precision: Literal["float32", "float64"] = "float32"
    """Precision of the network; the repair always runs in float64."""

    def build_net(self, inputs: int, outputs: int) -> MLP:
        """A fresh network; only `seed` decides its weights, and the global random numbers are left alone."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            activation = _ACTIVATIONS[self.activation]
            net = MLP(inputs, outputs, self.width, self.depth, activation, self.dropout, self.batch_norm)
            if self.init == "kaiming":
                for layer in net:
                    if isinstance(layer, nn.Linear):
                        nn.init.kaiming_normal_(layer.weight)
            if self.head != 1:
                with torch.no_grad():
                    for parameter in net[-1].parameters():
                        parameter.mul_(self.head)
        return net.to(getattr(torch, self.precision))
