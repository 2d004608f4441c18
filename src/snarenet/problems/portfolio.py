r"""Portfolio: weights w that earn the most after the cost of trading, within a risk limit that depends on x,

$$ \min_w \; -\mu(x)^\top w + \tfrac12 \sum_i c_i (w_i - h_i)^2 \quad \text{s.t.} \quad
   w^\top \Sigma(x) w \le \sigma^2(x), \; \|w - h\|_1 \le \tau, \; G w \le g, \; 1^\top w = 1, \; w \ge 0. $$

x holds scores of the factors' premia and of their volatilities, and the weights h that are held. Returns and risk have
the factors' exposures E in common: $\mu = \alpha + E \lambda(x)$ and $\Sigma = F(x) F(x)^\top + D$, F = E times the
volatilities. The risk limit is 1.1 times the variance of equal weights. The quadratic cost is that of market impact:
without it the optimum jumps from one asset to the next as returns pass each other, since a linear objective has its
optimum in a corner wherever the risk limit does not bind. Returns, risks and costs are a year's.

The family has two forms, in both of which the objective is, up to a constant, half a squared distance in the metric c:
the projection of a prediction that is linear in x is the optimum. In the form `weights` y = w, the turnover is an
`L1Ball`, and the prediction $h + \mu / c$. In the form `trades` $y = (b, s)$, what is bought and what is sold,
$w = h + b - s$: all rows are smooth, and the prediction is $(\mu / c, -\mu / c)$.
There $s \le h$ stands for w >= 0, and $b_i^2 + s_i^2$ for $(b_i - s_i)^2$ in cost and risk: the same where no asset is
both bought and sold, which never pays, and on the safe side elsewhere.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints import Box, Constraints, L1Ball, Linear, Quadratic
from snarenet.problems.base import check_sizes, uniform
from snarenet.problems.separable import Separable

Form = Literal["trades", "weights"]
Risk = Literal["factor", "full"]

_PREMIUM, _PREMIA = 0.05, (0.02, 0.03)  # of the market; how far a score of 1 moves the market's and the others'
_VOLATILITIES = (0.16, 0.05)  # of the market and of the others
_SWING = 0.2  # the share of a volatility that a score of 1 adds
_OWN = (0.15, 0.35)  # volatility of an asset by itself, lowest and highest
_ALPHA = 0.02  # spread of returns that no factor explains
_IMPACT = (0.2, 1.0)  # c: trading 1 % of the portfolio in an asset costs c / 2 basis points
_DRIFT = 0.3  # spread of the logarithms of held weights about equal ones
_CAP = 1.25  # of a group's share of equal weights
_ROOM = 1.1  # sigma^2 over the variance of equal weights: binds in most instances


class Portfolio(Separable):
    """The family above. Whatever is held obeys all limits, so every instance is feasible.

    Args:
        assets: how many weights there are.
        factors: columns k of E; the first is the market.
        groups: into how many groups the assets are dealt, each limited to 1.25 times its share of equal weights.
        turnover: tau, at most 2.
        risk: "factor" for the Sigma(x) above, by its factors; "full" for a constant one, written out.
        form: "trades" or "weights", what y is.
        instances: how many inputs: x = (k scores of premia, k scores of volatilities unless Sigma is constant, and
            the held weights as multiples of equal ones).
        seed: of all data.
    """

    convex = True
    starts = 1
    exposures: Tensor
    volatilities: Tensor
    own: Tensor
    alpha: Tensor
    premia: Tensor
    spreads: Tensor
    members: Tensor
    caps: Tensor
    impact: Tensor

    def __init__(
        self,
        assets: int = 50,
        factors: int = 5,
        groups: int = 5,
        turnover: float = 0.4,
        risk: str = "factor",
        form: str = "trades",
        instances: int = 10_000,
        seed: int = 2025,
    ) -> None:
        super().__init__()
        check_sizes(assets=assets, factors=factors, groups=groups, instances=instances)
        check_sizes(0, seed=seed)
        if groups > assets:
            raise ValueError(f"`groups` must be at most `assets` = {assets}, but got {groups}")
        if not 0 <= turnover <= 2:
            raise ValueError(f"`turnover` must be in [0, 2], but got {turnover!r}")
        for name, value, known in (("risk", risk, get_args(Risk)), ("form", form, get_args(Form))):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}, but got {value!r}")
        self.assets, self.factors, self.risk, self.form, self.turnover = assets, factors, risk, form, float(turnover)
        self.size = 2 * assets if form == "trades" else assets
        self._draw(np.random.default_rng(seed), groups)
        inputs = self.sample(instances, torch.Generator().manual_seed(seed))
        self.store(inputs.numpy(), square=self.impact.repeat(self.size // assets).numpy())
        self.constraints = self._trades() if form == "trades" else self._weights()

    def _draw(self, draw: np.random.Generator, groups: int) -> None:
        """The market: all that no x changes."""
        n, k = self.assets, self.factors
        exposures = draw.normal(0, 1, (n, k))
        exposures[:, 0] = 1 + 0.25 * exposures[:, 0]
        market = np.arange(k) == 0
        members = (np.arange(n) % groups == np.arange(groups)[:, None]).astype(float)
        data = {
            "exposures": exposures,
            "volatilities": np.where(market, *_VOLATILITIES),
            "own": draw.uniform(*_OWN, n) ** 2,
            "alpha": draw.normal(0, _ALPHA, n),
            "premia": np.where(market, _PREMIUM, 0.0),
            "spreads": np.where(market, *_PREMIA),
            "members": members,
            "caps": _CAP * members.mean(1),
            "impact": draw.uniform(*_IMPACT, n),
        }
        for name, value in data.items():
            self.register_buffer(name, torch.from_numpy(value))

    def _weights(self) -> Constraints:
        """The rows on y = w."""
        limit = lambda x: self.limit(x).unsqueeze(1)  # noqa: E731
        if self.risk == "factor":
            risk = Quadratic(factor=self.loadings, diagonal=self.own, upper=limit)
        else:
            F = self.loadings(self.inputs[:1])[0]
            risk = Quadratic((F @ F.T + self.own.diag()).unsqueeze(0), upper=self.limit(self.inputs[:1]).item())
        budget = Linear(torch.ones(1, self.assets, dtype=torch.float64), equals=1.0)
        return L1Ball(self.held, self.turnover) & risk & Linear(self.members, upper=self.caps) & budget & Box(0.0, None)

    def _trades(self) -> Constraints:
        r"""The rows on y = (b, s): those of d = b - s = (I, -I) y, with $(h + d)' \Sigma (h + d)$ multiplied out."""

        def factor(x: Tensor) -> Tensor:
            F = self.loadings(x)
            return torch.cat([F, -F], 1)

        def slope(x: Tensor) -> Tensor:
            F, held = self.loadings(x), self.held(x)
            g = 2 * ((F @ (held.unsqueeze(1) @ F).mT).squeeze(2) + self.own * held)
            return torch.cat([g, -g], 1).unsqueeze(1)

        def room(x: Tensor) -> Tensor:
            return (self.limit(x) - self.variance(self.held(x), x)).unsqueeze(1)

        if self.risk == "factor":
            risk = Quadratic(factor=factor, diagonal=self.own.repeat(2), G=slope, upper=room)
        else:
            F = factor(self.inputs[:1])[0]
            risk = Quadratic((F @ F.T + self.own.repeat(2).diag()).unsqueeze(0), slope, upper=room)
        ones = torch.ones(1, self.assets, dtype=torch.float64)
        groups = Linear(
            torch.cat([self.members, -self.members], 1), upper=lambda x: self.caps - self.held(x) @ self.members.T
        )
        budget = Linear(torch.cat([ones, -ones], 1), equals=0.0)
        turnover = Linear(torch.cat([ones, ones], 1), upper=self.turnover)
        most = lambda x: torch.cat([torch.full_like(self.held(x), math.inf), self.held(x)], 1)  # noqa: E731
        return risk & groups & turnover & budget & Box(0.0, most)

    def weights_of(self, y: Tensor, x: Tensor) -> Tensor:
        """(B, assets) the weights w that y stands for."""
        if self.form == "weights":
            return y
        bought, sold = y.chunk(2, 1)
        return self.held(x) + bought - sold

    def returns(self, x: Tensor) -> Tensor:
        """(B, assets) expected returns."""
        return self.alpha + (self.premia + self.spreads * x[:, : self.factors]) @ self.exposures.T

    def loadings(self, x: Tensor) -> Tensor:
        """(B, assets, k) the F of Sigma = F F' + D."""
        if self.risk == "full":
            return (self.exposures * self.volatilities).expand(len(x), -1, -1)
        scores = x[:, self.factors : 2 * self.factors]
        return self.exposures * (self.volatilities * (1 + _SWING * scores)).unsqueeze(1)

    def held(self, x: Tensor) -> Tensor:
        """(B, assets) the weights before trading."""
        return x[:, -self.assets :] / self.assets

    def variance(self, w: Tensor, x: Tensor) -> Tensor:
        """(B,) the variance of the weights w (B, assets)."""
        return self._variance(w, self.loadings(x))

    def limit(self, x: Tensor) -> Tensor:
        """(B,) sigma^2."""
        return _ROOM * self.variance(self._equal(len(x)), x)

    def _variance(self, w: Tensor, loadings: Tensor) -> Tensor:
        return (w.unsqueeze(1) @ loadings).squeeze(1).square().sum(1) + w.square() @ self.own

    def slope(self, x: Tensor) -> Tensor:
        returns = self.returns(x)
        if self.form == "trades":
            return torch.cat([-returns, returns], 1)
        return -returns - self.impact * self.held(x)

    def offset(self, x: Tensor) -> Tensor:
        held = self.held(x)
        if self.form == "trades":
            return -(self.returns(x) * held).sum(1)
        return 0.5 * held.square() @ self.impact

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        device, scores = generator.device, self.factors * (2 if self.risk == "factor" else 1)
        side = torch.ones(scores, dtype=torch.float64, device=device)
        x = uniform(count, -side, side, generator)
        drift = torch.randn(count, self.assets, generator=generator, dtype=torch.float64, device=device)
        return torch.cat([x, self.assets * self._allowed((_DRIFT * drift).softmax(1), x)], 1)

    def _allowed(self, w: Tensor, scores: Tensor) -> Tensor:
        """w as far from equal weights as the limits on groups and risk allow: both hold at equal weights."""
        equal, loadings = self._equal(len(w)), self.loadings(scores)
        d = w - equal
        room, rise = self.caps - equal @ self.members.T, d @ self.members.T
        share = torch.where(rise > 0, room / rise.clamp(min=1e-300), math.inf).amin(1).clamp(max=1)
        a, c = self._variance(equal, loadings), self._variance(d, loadings)
        b = (self._variance(w, loadings) - a - c) / 2
        most = ((b.square() + c * (self.limit(scores) - a)).sqrt() - b) / c  # a + 2 b t + c t^2 is the limit
        return equal + torch.minimum(share, most).unsqueeze(1) * d

    def _equal(self, count: int) -> Tensor:
        return torch.full((count, self.assets), 1 / self.assets, dtype=torch.float64, device=self.own.device)
