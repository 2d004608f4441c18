r"""`Flow`: an invertible network $\Phi_x$ from the latent cube to a box, one map for every input x.

$$ \Phi_x = \sigma \circ N \circ (M_x \circ N \circ W \circ N)^3, $$

with N a scaling and shift of each entry (`ActNorm`), W an invertible matrix (`LUMatrix`), M an autoregressive network
conditioned on x (`Autoregressive`), and σ a sigmoid onto the open box (-0.1, 1.1). All have triangular or diagonal
derivatives up to a permutation, so each knows the logarithms of its scales: their sum is log |det ∂Φ|.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, logsigmoid

_BLOCKS = 3
_MARGIN = 0.1  # by how much the box is wider than the unit cube, so that all of the cube has an inverse
_STEEPEST = 2.0  # bound on the log-scales of the autoregressive networks, which keeps their inverse accurate


class Flow(nn.Module):
    """The network above. Two flows with the same arguments are equal; global random numbers are left alone.

    Args:
        size: the d of latent points and outputs.
        inputs: size of x.
        hidden: hidden units of the autoregressive networks; half of `size`, but at least 8, unless given.
        seed: seed of the initial weights.
    """

    def __init__(self, size: int, inputs: int, hidden: int | None = None, seed: int = 0) -> None:
        super().__init__()
        for name, value in {"size": size, "inputs": inputs, "hidden": 1 if hidden is None else hidden}.items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, but got {value}")
        hidden = max(8, size // 2) if hidden is None else hidden
        self.steps = nn.ModuleList()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for _ in range(_BLOCKS):
                self.steps.extend([ActNorm(size), LUMatrix(size), ActNorm(size), Autoregressive(size, inputs, hidden)])
        self.steps.append(ActNorm(size))
        self.to(torch.float64)

    def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image of latent points z (B, d), in (-0.1, 1.1), and log |det| (B,) of the derivative there."""
        y, scales = self.trace(z, x)
        return y, torch.stack([scale.sum(1) for scale in scales]).sum(0)

    def trace(self, z: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The image of z, and the log-scales of every step on the way, each (B, d)."""
        scales = []
        for step in self.steps:
            z, scale = step(z, x)
            scales.append(scale.expand_as(z))
        width = 1 + 2 * _MARGIN
        slope = math.log(width) + logsigmoid(z) + logsigmoid(-z)
        return width * torch.sigmoid(z) - _MARGIN, [*scales, slope]

    def inverse(self, y: Tensor, x: Tensor) -> Tensor:
        """The latent points whose images are y, all entries of which must lie in (-0.1, 1.1)."""
        z = torch.logit((y + _MARGIN) / (1 + 2 * _MARGIN))
        for step in reversed(self.steps):
            z = step.inverse(z, x)  # pyright: ignore
        return z

    @property
    def initialised(self) -> bool:
        """Has it seen data?"""
        return all(bool(step.initialised) for step in self.steps if isinstance(step, ActNorm))


class ActNorm(nn.Module):
    """z -> (z - shift) exp(scale); its first batch in training mode sets both, so that it leaves with mean 0, std 1."""

    shift: nn.Parameter
    scale: nn.Parameter
    initialised: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("initialised", torch.tensor(False))

    def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised z, and the log-scales."""
        if self.training and len(z) and not self.initialised:
            with torch.no_grad():
                self.shift.copy_(z.mean(0))
                self.scale.copy_(-z.std(0, correction=0).clamp(min=1e-6).log())
                self.initialised.fill_(True)
        return (z - self.shift) * self.scale.exp(), self.scale

    def inverse(self, y: Tensor, x: Tensor) -> Tensor:
        """The z that gives y."""
        return y * (-self.scale).exp() + self.shift


class LUMatrix(nn.Module):
    """z -> P L U z, orthogonal at first; P stays, L has ones on its diagonal and U the entries sign * exp(scale)."""

    permutation: Tensor
    sign: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        orthogonal = nn.init.orthogonal_(torch.empty(size, size, dtype=torch.float64))
        P, L, U = torch.linalg.lu(orthogonal)
        self.register_buffer("permutation", P)
        self.register_buffer("sign", U.diagonal().sign())
        self.scale = nn.Parameter(U.diagonal().abs().log())
        self.lower, self.upper = nn.Parameter(L.tril(-1)), nn.Parameter(U.triu(1))

    def factors(self) -> tuple[Tensor, Tensor]:
        """L and U."""
        L = self.lower.tril(-1) + torch.eye(len(self.lower), dtype=self.lower.dtype, device=self.lower.device)
        return L, self.upper.triu(1) + torch.diag(self.sign * self.scale.exp())

    def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The product, and the log-scales."""
        L, U = self.factors()
        return z @ (self.permutation @ L @ U).T, self.scale

    def inverse(self, y: Tensor, x: Tensor) -> Tensor:
        """The z that gives y."""
        L, U = self.factors()
        half = torch.linalg.solve_triangular(L, (y @ self.permutation).T, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(U, half, upper=True).T


class Autoregressive(nn.Module):
    r"""$y_i = z_i e^{s_i} + t_i$, where s_i and t_i depend on x and on z_1 ... z_{i-1} alone (MADE).

    $(s, t) = V\, \mathrm{relu}(w(x) \circ (U z + c) + b(x)) + e$, with masked U and V, and affine w and b. It is the
    identity at first. Going forward takes one pass, going back one pass an entry.
    """

    see: Tensor
    reach: Tensor

    def __init__(self, size: int, inputs: int, hidden: int) -> None:
        super().__init__()
        entry = torch.arange(size)
        sees = torch.linspace(0, size - 1, hidden).round()  # how many entries a hidden unit sees; the first only x
        self.register_buffer("see", (entry < sees.unsqueeze(1)).double())
        self.register_buffer("reach", (sees <= entry.unsqueeze(1)).double().repeat(2, 1))
        self.first, self.last = nn.Linear(size, hidden), nn.Linear(hidden, 2 * size)
        self.condition = nn.Linear(inputs, 2 * hidden)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def coefficients(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The log-scales s and the shifts t."""
        weight, bias = self.condition(x).chunk(2, 1)
        h = torch.relu((1 + weight) * linear(z, self.first.weight * self.see, self.first.bias) + bias)
        scale, shift = linear(h, self.last.weight * self.reach, self.last.bias).chunk(2, 1)
        return _STEEPEST * torch.tanh(scale / _STEEPEST), shift

    def forward(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The image of z, and the log-scales."""
        scale, shift = self.coefficients(z, x)
        return z * scale.exp() + shift, scale

    def inverse(self, y: Tensor, x: Tensor) -> Tensor:
        """The z that gives y, entry after entry."""
        z, entries = torch.zeros_like(y), torch.arange(y.shape[1], device=y.device)
        for i in range(y.shape[1]):
            scale, shift = self.coefficients(z, x)
            z = torch.where(entries == i, (y - shift) * (-scale).exp(), z)
        return z
