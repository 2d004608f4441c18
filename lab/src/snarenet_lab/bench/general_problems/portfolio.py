"""A portfolio: weights with a limit on the risk y'(F(x) F(x)' + D) y that depends on x, written in four forms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems.arithmetic import Torch
from snarenet_lab.bench.general_problems.base import F64, General
from snarenet_lab.bench.general_problems.constants import Constants

FORMS = ("factored", "matrix", "function", "lifted")


class _Market:
    """Loadings F (n, factors), which x scales by column, variances D (n,), means (n,), and a limit on the risk."""

    def __init__(self, n: int, factors: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.F = (0.3 * torch.randn(n, factors, generator=generator, dtype=F64) / math.sqrt(factors)).numpy()
        self.D = (0.05 + 0.1 * torch.rand(n, generator=generator, dtype=F64)).numpy()
        self.mean = torch.randn(n, generator=generator, dtype=F64).numpy()
        self.constants = Constants(F=self.F, D=self.D, mean=self.mean, across=self.F.T.copy())
        self.limit = 1.2 * float((self.F.mean(0) ** 2).sum() + self.D.mean() / n)  # 1.2 times that of equal weights

    def loadings(self, x: Tensor) -> Tensor:
        """(B, n, factors) of torch."""
        return self.constants.beside(x)["F"] * (1 + 0.2 * x).unsqueeze(1)

    def covariance(self, x: Tensor) -> Tensor:
        """(B, 1, n, n) of torch."""
        loadings = self.loadings(x)
        return (loadings @ loadings.mT + self.constants.beside(x)["D"].diag()).unsqueeze(1)

    def risk(self, y: Any, x: Any, m: Any) -> Any:
        """The risk of y, by its factors."""
        k = self.constants.beside(y)
        z = m.times(k["across"], y) * (1 + 0.2 * x)
        return m.total(z * z) + m.total(m.const(k["D"]) * y * y)


def portfolio(n: int = 200, form: str = "factored", factors: int = 10) -> General:
    """Weights y >= 0 with sum 1 and y'(F(x) F(x)' + D) y at most 1.2 times the risk of equal weights at the nominal x.

    Args:
        n: assets.
        form: "factored", F and D as `Quadratic`; "matrix", the whole matrix as `Quadratic`; "function", `Nonlinear` of
            F'y; "lifted", further variables z = F'y in rows of `Linear` with a matrix per sample, and a diagonal
            `Quadratic`.
        factors: columns of F; x scales them.
    """
    if form not in FORMS:
        raise ValueError(f"`form` must be one of {', '.join(FORMS)}, but got {form!r}")
    market = _Market(n, factors)
    constraints = _lifted(market, n, factors) if form == "lifted" else _plain(market, n, form)
    extra = factors if form == "lifted" else 0
    typical = torch.cat([torch.full((n,), 1 / n, dtype=F64), torch.zeros(extra, dtype=F64)])

    def rows(y: Any, x: Any, m: Any) -> Any:
        weights, k = m.take(y, slice(0, n)), market.constants.beside(y)
        if not extra:
            return m.join(market.risk(weights, x, m), m.total(weights))
        z = m.take(y, slice(n, None))
        risk = m.total(m.const(k["D"]) * weights * weights) + m.total(z * z)
        return m.join(risk, m.times(k["across"], weights) * (1 + 0.2 * x) - z, m.total(weights))

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        return torch.randn(batch, factors, generator=generator, dtype=F64)

    def objective(y: Any, x: Any, m: Any) -> Any:
        return -m.const(market.constants.beside(y)["mean"]) * m.take(y, slice(0, n))

    spread = torch.full_like(typical, 1 / n)
    return General(f"portfolio {n}, {form}", constraints, typical, spread, draw, objective, rows)


def _plain(market: _Market, n: int, form: str) -> sn.Constraints:
    """On the weights alone."""
    if form == "factored":
        risk = sn.Quadratic(factor=market.loadings, diagonal=torch.from_numpy(market.D), upper=market.limit)
    elif form == "matrix":
        risk = sn.Quadratic(market.covariance, upper=market.limit)
    else:
        risk = sn.Nonlinear(lambda y, x: market.risk(y, x, Torch()), 1, upper=market.limit)
    return risk & sn.Linear(torch.ones(1, n, dtype=F64), equals=1.0) & sn.Box(0.0, 1.0)


def _lifted(market: _Market, n: int, factors: int) -> sn.Constraints:
    """On the weights and z."""

    def lift(x: Tensor) -> Tensor:
        eye = torch.eye(factors, dtype=x.dtype, device=x.device)
        return torch.cat([market.loadings(x).mT, -eye.expand(len(x), -1, -1)], 2)

    squares = torch.cat([torch.from_numpy(market.D), torch.ones(factors, dtype=F64)]).unsqueeze(0)
    budget = torch.cat([torch.ones(n, dtype=F64), torch.zeros(factors, dtype=F64)]).unsqueeze(0)
    free = torch.full((factors,), math.inf, dtype=F64)
    box = sn.Box(torch.cat([torch.zeros(n, dtype=F64), -free]), torch.cat([torch.ones(n, dtype=F64), free]))
    factors_of = sn.Linear(lift, equals=torch.zeros(factors, dtype=F64))
    return sn.Quadratic(squares, upper=market.limit) & factors_of & sn.Linear(budget, equals=1.0) & box
