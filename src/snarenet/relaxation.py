r"""AdaRel: training starts on a set relaxed by what the untrained network violates, and ends on the true one.

The repair at epoch t aims at $\{y : l - \varepsilon_t \le g(y, x) \le u + \varepsilon_t\}$, with
$\varepsilon_t = \varepsilon_0\, \phi(s)$, where s runs from 0 at the epoch `start` to 1 after `epochs` more, and $\phi$
falls continuously from 1 to 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints

Decay = Literal["linear", "cosine", "harmonic"]


class Constrained(Protocol):
    """What is asked of a layer here."""

    @property
    def constraints(self) -> Constraints: ...


class Model(Protocol):
    """What is asked of a model here; `ConstrainedModel` has it."""

    training: bool

    @property
    def layer(self) -> Constrained: ...
    def raw(self, x: Any) -> Tensor: ...
    def train(self, mode: bool = True) -> Any: ...


class AdaptiveRelaxation(nn.Module):
    """The relaxation of each training epoch.

    Args:
        epochs: how long the relaxation lasts; 0 for none.
        decay: "linear" (the paper), "cosine", or "harmonic", a steep start with a long tail; all reach 0 continuously.
        start: the epoch at which it begins; before that the relaxation is at its full size.
        per_sample: keep one relaxation per training sample and constraint (the paper's Algorithm 2) instead of one per
            constraint (the authors' code).
        quantile: which quantile of the violations over the data sets the relaxation of a constraint; 1 is the largest.

    The measured relaxation is part of `state_dict`, so that training goes on where it was interrupted.
    """

    initial: Tensor

    def __init__(
        self,
        epochs: int,
        decay: Decay = "linear",
        start: int = 0,
        *,
        per_sample: bool = False,
        quantile: float = 1.0,
    ) -> None:
        super().__init__()
        if epochs < 0 or start < 0:
            raise ValueError(f"`epochs` and `start` must be >= 0, but got {epochs!r} and {start!r}")
        if decay not in _DECAYS:
            raise ValueError(f"`decay` must be one of {', '.join(_DECAYS)}, but got {decay!r}")
        if not 0 <= quantile <= 1:
            raise ValueError(f"`quantile` must be between 0 and 1, but got {quantile!r}")
        if per_sample and quantile != 1:
            raise ValueError("`quantile` is taken over samples: leave it at 1 with `per_sample=True`")
        self.epochs, self.decay, self.start = epochs, decay, start
        self.per_sample, self.quantile = per_sample, quantile
        self.register_buffer("initial", torch.empty(0, dtype=torch.float64))

    @torch.no_grad()
    def measure(self, model: Model, data: Tensor | Iterable[Any], training: bool = False) -> Tensor:
        """Set the relaxation from one pass of the network, without repair, over the training inputs.

        Args:
            model: the model that is about to be trained.
            data: all inputs x in one tensor, or batches of them.
            training: measure in training mode, as the authors' code does: with dropout, and with the statistics of each
                batch in batch norm, which the network will have from its first step on. What that step predicts is then
                inside the relaxed set; in eval mode batch norm starts as the identity, and it may not be.

        Returns:
            (rows,) or, per sample, (N, rows).
        """
        before = model.training
        model.train(training)
        try:
            batches = data.split(4096) if isinstance(data, Tensor) else data
            found = [model.layer.constraints.residual(model.raw(x), x).abs().to(torch.float64) for x in batches]
        finally:
            model.train(before)
        if not found:
            raise ValueError("`data` holds no batch to measure")
        violations = torch.cat(found)
        if not bool(violations.isfinite().all()):
            raise ValueError("the violations of the untrained network are not all finite")
        if not self.per_sample:
            violations = violations.amax(0) if self.quantile == 1 else _quantile(violations, self.quantile)
        self.initial = violations
        return violations

    def factor(self, epoch: float) -> float:
        """The share of the initial relaxation that is left at `epoch`."""
        done = 1.0 if self.epochs == 0 and epoch >= self.start else (epoch - self.start) / max(self.epochs, 1)
        if done >= 1:
            return 0.0
        return _DECAYS[self.decay](max(0.0, done), self.epochs)

    def at(self, epoch: float, index: Tensor | None = None) -> float | Tensor:
        """The relaxation at `epoch`: 0 once it is over, else (rows,), or (B, rows) for the training samples `index`."""
        factor = self.factor(epoch)
        if factor == 0:
            return 0.0
        if not self.initial.numel():
            raise RuntimeError("call `measure` before `at`: the relaxation is set by the untrained network")
        if self.per_sample:
            if index is None:
                raise ValueError("`index` must name the training samples of the batch when `per_sample=True`")
            return self.initial[index.to(self.initial.device)] * factor
        return self.initial * factor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        saved = state_dict.get(f"{prefix}initial")
        if saved is not None:  # its shape is known only after measuring
            self.initial = torch.empty_like(saved, device=self.initial.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"epochs={self.epochs}, decay={self.decay!r}, start={self.start}"


def _quantile(violations: Tensor, quantile: float) -> Tensor:
    """The quantile of each column; torch.quantile stops at 16 million entries, sorting does not."""
    rank = math.ceil(quantile * (len(violations) - 1))
    return violations.sort(0).values[rank]


def _harmonic(done: float, epochs: int) -> float:
    last = 1 / (epochs + 1)
    return (1 / (done * epochs + 1) - last) / (1 - last)


_DECAYS = {
    "linear": lambda done, epochs: 1 - done,
    "cosine": lambda done, epochs: 0.5 * (1 + math.cos(math.pi * done)),
    "harmonic": _harmonic,
}
