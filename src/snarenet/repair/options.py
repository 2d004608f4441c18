"""`Options`: what a user may ask of a repair, checked once, for `repair`, `SnareLayer` and training alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from snarenet.constraints.data import check_shape, describe
from snarenet.damping import Annealed, Damping
from snarenet.linalg import ConjugateGradients
from snarenet.tracing import tracing

Rows = Literal["auto", "all", "active"]
Solver = Literal["auto"] | ConjugateGradients
Store = Literal["auto"] | bool
Weigh = Literal["all", "nearest"]

_STORE_BYTES = 2**30  # factors kept for the backward pass when `store_factors="auto"`


@dataclass(frozen=True)
class Options:
    """How a repair goes about it; `repair` documents each field."""

    damping: Damping = Annealed()
    rows: Rows = "auto"
    tol: float = 1e-8
    max_steps: int = 100
    rescue: bool = False
    nearest: int = 0
    solver: Solver = "auto"
    store_factors: Store = "auto"
    dtype: torch.dtype = torch.float64
    weigh: Weigh = "all"

    def __post_init__(self) -> None:
        if not isinstance(self.damping, Damping):
            raise TypeError(f"`damping` must be Constant, Annealed or Adaptive, but got {type(self.damping).__name__}")
        if self.rows not in ("auto", "all", "active"):
            raise ValueError(f"`rows` must be 'auto', 'all' or 'active', but got {self.rows!r}")
        check_count("max_steps", self.max_steps)
        check_count("nearest", self.nearest)
        if self.solver != "auto" and not isinstance(self.solver, ConjugateGradients):
            raise ValueError(f"`solver` must be 'auto' or ConjugateGradients(...), but got {self.solver!r}")
        if self.store_factors not in ("auto", True, False):
            raise ValueError(f"`store_factors` must be 'auto', True or False, but got {self.store_factors!r}")
        if self.weigh not in ("all", "nearest"):
            raise ValueError(f"`weigh` must be 'all' or 'nearest', but got {self.weigh!r}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"`dtype` must be torch.float32 or torch.float64, but got {self.dtype}")
        if not self.tol >= 0 or math.isinf(self.tol):
            raise ValueError(f"`tol` must be a finite number >= 0, but got {self.tol!r}")
        if 0 < self.tol < self.finest:
            raise ValueError(
                f"`tol` = {self.tol:g} is finer than {self.dtype} can keep; "
                "use at least 1e-5 for float32, 1e-14 for float64"
            )

    @property
    def finest(self) -> float:
        """The least tolerance that the repair's precision can keep."""
        return 8 * torch.finfo(self.dtype).eps

    def aim(self, output: torch.dtype) -> float:
        """What to stop at for outputs of this dtype: half the tolerance, if rounding to it may cost the other half."""
        rounds = torch.finfo(output).eps > torch.finfo(self.dtype).eps
        return max(self.tol / 2, min(self.tol, self.finest)) if rounds else self.tol

    @property
    def krylov(self) -> ConjugateGradients | None:
        """The matrix-free solver, if one was asked for."""
        return self.solver if isinstance(self.solver, ConjugateGradients) else None

    @property
    def room(self) -> float:
        """Bytes that may be spent on keeping factors for the backward pass."""
        return _STORE_BYTES if self.store_factors == "auto" else math.inf if self.store_factors else 0


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be a whole number >= {least}, but got {value!r}")


def check_weights(weights: Tensor | None, options: Options, size: int | None = None, *, numbers: bool = False) -> None:
    """Raise unless `weights` is None, or a tensor (n,) of use; of positive `numbers`, if these are looked at."""
    if weights is None:
        return
    if options.weigh == "nearest" and options.nearest == 0:
        raise ValueError("`weights` are for `nearest` alone (`weigh='nearest'`), but `nearest` is 0")
    if not isinstance(weights, Tensor) or weights.requires_grad:
        raise ValueError(f"`weights` must be a constant tensor of shape ({size or 'n'},), but got {describe(weights)}")
    check_shape("weights", weights, (size or "n",))
    if numbers and not tracing() and not bool(((weights > 0) & weights.isfinite()).all()):
        raise ValueError("`weights` must be positive and finite")
