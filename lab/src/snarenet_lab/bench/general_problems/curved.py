"""Small curved sets, each of another kind: four tori, a shell between ellipsoids, products, and sines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems.arithmetic import Torch
from snarenet_lab.bench.general_problems.base import F64, General
from snarenet_lab.bench.general_problems.constants import Constants

_SPREAD = 0.1


def torus() -> General:
    """Four points, each on a torus, with a plane that couples them."""
    wide, thin = 2.0, 0.7

    def rows(y: Any, x: Any, m: Any) -> Any:
        a, b, c = (m.take(y, slice(i, None, 3)) for i in range(3))
        around = a * a + b * b
        total = around + c * c + (wide**2 - thin**2)
        return m.join((total * total - 4 * wide**2 * around) / 10, m.total(a) + m.total(c) - m.take(x, slice(0, 1)))

    typical = torch.tensor([2.7, 0, 0, 0, 2.0, 0.7, -1.3, 0, 0, 0, -2.7, 0], dtype=F64)
    zero = torch.zeros(5, dtype=F64)
    return _problem("torus", rows, (zero, zero), 5.0, typical, _normal(1, 0.5, 1.0))


def shell() -> General:
    """Outside one ellipsoid and inside others, on a plane."""
    n = 12
    factor = torch.randn(3, n, n, generator=_seeded(5), dtype=F64)
    Q = factor @ factor.mT / n + 0.3 * torch.eye(n, dtype=F64)
    constants = Constants(**{f"Q{i}": Q[i].numpy() for i in range(3)})

    def rows(y: Any, x: Any, m: Any) -> Any:
        squares = [m.total(y * m.times(matrix, y)) for matrix in constants.beside(y).values()]
        return m.join(*squares, m.total(y) - m.take(x, slice(0, 1)))

    lower, upper = torch.tensor([4.0, 3.0, -math.inf, 0.0], dtype=F64), torch.tensor([4.4, 6.0, 5.0, 0.0], dtype=F64)
    return _problem(
        "shell", rows, (lower, upper), 1.5, 0.6 * torch.randn(n, generator=_seeded(6), dtype=F64), _normal()
    )


def bilinear() -> General:
    """Sums of products that x gives, and bounds on products of neighbours."""
    k = 20
    constants = Constants(A=torch.randn(8, k, generator=_seeded(7), dtype=F64).numpy())

    def rows(y: Any, x: Any, m: Any) -> Any:
        u, v = m.take(y, slice(0, k)), m.take(y, slice(k, None))
        sums = m.times(constants.beside(y)["A"], u * v) - x
        return m.join(sums, m.take(u, slice(0, -1)) * m.take(v, slice(1, None)))

    zero, one = torch.zeros(8, dtype=F64), torch.ones(k - 1, dtype=F64)
    bounds = torch.cat([zero, -0.5 * one]), torch.cat([zero, 0.9 * one])
    typical = torch.rand(2 * k, generator=_seeded(8), dtype=F64) + 0.3
    return _problem("bilinear", rows, bounds, 2.0, typical, _normal(8, 1.5))


def trigonometric() -> General:
    """Sums of sines that x gives, and bounds on sums of cosines."""
    n = 20
    A, B = (torch.randn(count, n, generator=_seeded(seed), dtype=F64).numpy() for count, seed in ((6, 9), (8, 10)))
    constants = Constants(A=A, B=B)

    def rows(y: Any, x: Any, m: Any) -> Any:
        k = constants.beside(y)
        return m.join(m.times(k["A"], m.sin(y)) - x, m.times(k["B"], m.cos(2 * y) + y))

    zero, one = torch.zeros(6, dtype=F64), torch.ones(8, dtype=F64)
    bounds = torch.cat([zero, -1.5 * one]), torch.cat([zero, 1.5 * one])
    typical = torch.randn(n, generator=_seeded(11), dtype=F64)
    return _problem("trigonometric", rows, bounds, 3.0, typical, _normal(6, 1.5))


def _problem(
    name: str,
    rows: Callable[[Any, Any, Any], Any],
    bounds: tuple[Tensor, Tensor],
    most: float,
    typical: Tensor,
    draw: Callable[[int, torch.Generator], Tensor],
) -> General:
    """Rows within bounds, in a box of this size; the objective is the least norm."""
    function = sn.Nonlinear(lambda y, x: rows(y, x, Torch()), len(bounds[0]), *bounds)
    spread = torch.full_like(typical, _SPREAD)
    return General(name, function & sn.Box(-most, most), typical, spread, draw, lambda y, x, m: y * y, rows)


def _normal(size: int = 1, scale: float = 1.0, mean: float = 0.0) -> Callable[[int, torch.Generator], Tensor]:
    return lambda batch, generator: mean + scale * torch.randn(batch, size, generator=generator, dtype=F64)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
