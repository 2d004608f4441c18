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
from snarenet.memo import Memo
from snarenet.solution import warn
from snarenet.tracing import tracing

Rows = Literal["auto", "all", "active"]
Solver = Literal["auto"] | ConjugateGradients
Store = Literal["auto"] | bool

_STORE_BYTES = 2**30  # factors kept for the backward pass when `store_factors="auto"`, or on a GPU
_STORE_SHARE = 32  # this part of its memory, if that is more


@dataclass(frozen=True)
class Nearest:
    """Begin a repair at the nearest point of its set, or close to it; for `start=` of `repair` and `SnareLayer`.

    Attributes:
        iterations: of the method that suits the rows, see `repair`; "auto" for the number that suits the method.

    Example:
        >>> import torch, snarenet as sn
        >>> disk = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), rows=1, upper=1.0)
        >>> sn.SnareLayer(disk, start=sn.Nearest())(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
        tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """

    iterations: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.iterations != "auto":
            check_count("iterations", self.iterations, 1)


Start = Literal["auto"] | Nearest | None
Rescue = bool | Literal["first"]


@dataclass(frozen=True)
class Options:
    """How a repair goes about it; `repair` documents each field."""

    damping: Damping | Literal["auto"] = "auto"
    rows: Rows = "auto"
    tol: float = 1e-8
    max_steps: int = 100
    rescue: Rescue = False
    start: Start = "auto"
    restarts: int = 0
    solver: Solver = "auto"
    store_factors: Store = "auto"
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        if self.damping != "auto" and not isinstance(self.damping, Damping):
            raise TypeError(
                f"`damping` must be 'auto', Constant, Annealed or Adaptive, but got {type(self.damping).__name__}"
            )
        if self.rows not in ("auto", "all", "active"):
            raise ValueError(f"`rows` must be 'auto', 'all' or 'active', but got {self.rows!r}")
        check_count("max_steps", self.max_steps)
        if self.rescue not in (True, False, "first"):
            raise ValueError(f"`rescue` must be True, False or 'first', but got {self.rescue!r}")
        if self.start is not None and self.start != "auto" and not isinstance(self.start, Nearest):
            raise ValueError(f"`start` must be 'auto', None or Nearest(...), but got {self.start!r}")
        check_count("restarts", self.restarts)
        if self.solver != "auto" and not isinstance(self.solver, ConjugateGradients):
            raise ValueError(f"`solver` must be 'auto' or ConjugateGradients(...), but got {self.solver!r}")
        if self.store_factors not in ("auto", True, False):
            raise ValueError(f"`store_factors` must be 'auto', True or False, but got {self.store_factors!r}")
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
    def rule(self) -> Damping:
        """The damping; the plain one as long as no start has chosen another."""
        return Annealed() if isinstance(self.damping, str) else self.damping

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

    def room(self, device: torch.device) -> float:
        """Bytes that may be spent on keeping factors for the backward pass."""
        if self.store_factors != "auto":
            return math.inf if self.store_factors else 0
        if device.type != "cuda" or torch.compiler.is_compiling():
            return _STORE_BYTES
        return max(_STORE_BYTES, torch.cuda.get_device_properties(device).total_memory // _STORE_SHARE)


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be a whole number >= {least}, but got {value!r}")


def as_start(start: Start, nearest: int | None) -> Start:
    """`start`, or what `nearest` means, which was its name."""
    if nearest is None:
        return start
    check_count("nearest", nearest)
    if start != "auto":
        raise ValueError(f"`start` = {start!r} and `nearest` = {nearest} say the same: give `start` alone")
    warn(f"`nearest` is deprecated: write `start={f'sn.Nearest({nearest})' if nearest else None}`", DeprecationWarning)
    return Nearest(nearest) if nearest else None


def as_weights(weights: Tensor | None, scale: Tensor | None, memo: Memo) -> Tensor | None:
    """`weights`, or one over the squares of `scale`; `memo` keeps them, so that they are the same at every call."""
    if scale is None:
        return weights
    if weights is not None:
        raise ValueError("`weights` and `scale` say the same, weights = 1 / scale**2: give one of them")
    check_metric("scale", scale)

    def build() -> Tensor:
        check_metric("scale", scale, numbers=True)
        return scale.detach().to(torch.float64).pow(-2)

    return memo.get(("scale",), (scale,), build)


def as_step(step: float | Tensor) -> Tensor:
    """`step` as a tensor without dimensions."""
    found = torch.as_tensor(step, dtype=torch.float64).detach().clone()
    if found.ndim or not 0 <= found.item() < math.inf:
        raise ValueError(f"`step` must be a number >= 0 and finite, but got {step!r}")
    return found


def check_metric(name: str, given: object, size: int | None = None, *, numbers: bool = False) -> None:
    """Raise unless `given` is a tensor (n,) without a gradient; of positive `numbers`, if these are looked at."""
    if not isinstance(given, Tensor) or given.requires_grad:
        raise ValueError(f"`{name}` must be a constant tensor of shape ({size or 'n'},), but got {describe(given)}")
    check_shape(name, given, (size or "n",))
    if numbers and not tracing() and not bool(((given > 0) & given.isfinite()).all()):
        raise ValueError(f"`{name}` must be positive and finite")


def check_weights(weights: Tensor | None, size: int | None = None, *, numbers: bool = False) -> None:
    """Raise unless `weights` is None, or a tensor (n,) of use; of positive `numbers`, if these are looked at."""
    if weights is None:
        return
    check_metric("weights", weights, size, numbers=numbers)
