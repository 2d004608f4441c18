"""What a user may ask of a repair, checked."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from snarenet.constraints import Instance
from snarenet.constraints.data import check_shape, describe
from snarenet.linalg import ConjugateGradients
from snarenet.tracing import tracing

Rows = Literal["auto", "all", "active"]
Solver = Literal["auto"] | ConjugateGradients
Store = Literal["auto"] | bool


def check_options(
    rows: object, tol: float, max_steps: object, solver: object, store_factors: object, dtype: torch.dtype | None
) -> torch.dtype:
    """The precision of the repair, if all options make sense."""
    if rows not in ("auto", "all", "active"):
        raise ValueError(f"`rows` must be 'auto', 'all' or 'active', but got {rows!r}")
    check_count("max_steps", max_steps)
    if solver != "auto" and not isinstance(solver, ConjugateGradients):
        raise ValueError(f"`solver` must be 'auto' or ConjugateGradients(...), but got {solver!r}")
    if store_factors not in ("auto", True, False):
        raise ValueError(f"`store_factors` must be 'auto', True or False, but got {store_factors!r}")
    dtype = torch.float64 if dtype is None else dtype
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"`dtype` must be torch.float32 or torch.float64, but got {dtype}")
    if not tol >= 0 or math.isinf(tol):
        raise ValueError(f"`tol` must be a finite number >= 0, but got {tol!r}")
    if 0 < tol < 8 * torch.finfo(dtype).eps:
        raise ValueError(
            f"`tol` = {tol:g} is finer than {dtype} can keep; use at least 1e-5 for float32, 1e-14 for float64"
        )
    return dtype


def relaxed(instance: Instance, relax: float | Tensor) -> Instance:
    """The instance with every bound widened by `relax`, a number, (rows,) or (B, rows)."""
    if not isinstance(relax, Tensor):
        if not relax >= 0:
            raise ValueError(f"`relax` must be >= 0, but got {relax!r}")
        if relax == 0:
            return instance
    else:
        batch, rows = instance.lower.shape
        if relax.ndim:
            check_shape("relax", relax, (rows,), (batch, rows))
        if not tracing() and not bool((relax >= 0).all()):
            raise ValueError("`relax` must be >= 0 everywhere")
        relax = relax.to(instance.lower)
    equal = (False,) * len(instance.equal)  # a widened equality is none
    return Instance(instance.map, instance.lower - relax, instance.upper + relax, equal)


def check_count(name: str, value: object, least: int = 0) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be a whole number >= {least}, but got {value!r}")


def check_weights(weights: Tensor | None, nearest: int, size: int | None = None) -> None:
    """Raise unless `weights` is None, or positive numbers (n,) that `nearest` can use."""
    if weights is None:
        return
    if nearest == 0:
        raise ValueError("`weights` are those of the distance that `nearest` makes small, but `nearest` is 0")
    if not isinstance(weights, Tensor) or weights.requires_grad:
        raise ValueError(f"`weights` must be a constant tensor of shape ({size or 'n'},), but got {describe(weights)}")
    check_shape("weights", weights, (size or "n",))
    if not tracing() and not bool(((weights > 0) & weights.isfinite()).all()):
        raise ValueError("`weights` must be positive and finite")
