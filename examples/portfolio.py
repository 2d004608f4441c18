"""A portfolio manager's network: from signals to trades that obey every limit, trained on what the market then did.

    python examples/portfolio.py --figure frontier.svg

A network turns signals into expected returns. The layer makes trades of them: the best for these returns after the cost
of market impact, within budget, turnover, sector limits and a risk limit. Nobody tells the network returns: it learns
them through the layer, from what its portfolios earned. Then the layer draws an efficient frontier.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import snarenet as sn

torch.set_default_dtype(torch.float64)
_OUTLOOK = torch.tensor([[0.3, 0.8, -0.6, 0.4, -0.2]])  # signals of the month that the frontier is drawn for


class Market:
    """Exposures E of n assets to k factors, their volatilities, impact costs c; returns have the factors' signals."""

    def __init__(self, n: int, k: int = 5, sectors: int = 5) -> None:
        draw = torch.Generator().manual_seed(0)
        self.E = torch.randn(n, k, generator=draw)
        self.E[:, 0] = 1 + 0.25 * self.E[:, 0]  # the first is the market
        self.F = self.E * torch.tensor([0.16] + [0.05] * (k - 1))
        self.D = (0.15 + 0.2 * torch.rand(n, generator=draw)) ** 2
        self.c = 0.2 + 0.8 * torch.rand(n, generator=draw)
        self.sector = (torch.arange(n) % sectors == torch.arange(sectors)[:, None]).double()
        self.n, self.k = n, k

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """(signals, held weights, returns that follow) of some months."""
        draw = torch.Generator().manual_seed(seed)
        signals = 2 * torch.rand(count, self.k, generator=draw) - 1
        held = torch.softmax(0.3 * torch.randn(count, self.n, generator=draw), 1)
        noise = 0.05 * torch.randn(count, self.n, generator=draw)
        return signals, held, self.mean(signals) + noise

    def mean(self, signals: Tensor) -> Tensor:
        """The expected returns that the network has to find out."""
        return (torch.tensor([0.05] + [0.0] * (self.k - 1)) + 0.03 * signals) @ self.E.T

    def risk(self, w: Tensor) -> Tensor:
        """(B,) variance of the weights w."""
        return (w @ self.F).square().sum(1) + w.square() @ self.D


def trading_layer(market: Market, turnover: float = 0.4) -> sn.SnareLayer:
    """Trades y = (buys, sells) away from x["held"], of a risk of at most x["limit"]: every row is one line."""
    n, one = market.n, torch.ones(1, market.n)

    def slope(x: dict) -> Tensor:  # of the risk of held + buys - sells
        g = 2 * ((x["held"] @ market.F) @ market.F.T + market.D * x["held"])
        return torch.cat([g, -g], 1).unsqueeze(1)

    caps = 1.25 * market.sector.mean(1)
    limits = (
        sn.Quadratic(
            factor=torch.cat([market.F, -market.F]),
            diagonal=market.D.repeat(2),
            G=slope,
            upper=lambda x: x["limit"] - market.risk(x["held"]).unsqueeze(1),
        )
        & sn.Linear(torch.cat([market.sector, -market.sector], 1), upper=lambda x: caps - x["held"] @ market.sector.T)
        & sn.Linear(torch.cat([one, one], 1), upper=turnover)
        & sn.Linear(torch.cat([one, -one], 1), equals=0.0)
        & sn.Box(0.0, lambda x: torch.cat([torch.full((len(x["held"]), n), torch.inf), x["held"]], 1))
    )
    return sn.SnareLayer(
        limits, start=sn.Nearest(), weights=market.c.repeat(2)
    )  # in this metric the nearest is the best


def trade(layer: sn.SnareLayer, returns: Tensor, held: Tensor, limit: Tensor, cost: Tensor) -> Tensor:
    """(B, n) the weights after the best trades for these expected returns."""
    ideal = returns / cost
    bought, sold = layer(torch.cat([ideal, -ideal], 1), {"held": held, "limit": limit}).chunk(2, 1)
    return held + bought - sold


def train(market: Market, layer: sn.SnareLayer, steps: int, batch: int = 50) -> tuple[nn.Module, list[float]]:
    """A network from signals to returns, which learns from what its portfolios earned, and that, step by step."""
    torch.manual_seed(0)
    net = nn.Linear(market.k, market.n)
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, 0.05)
    optimizer, earned = torch.optim.Adam(net.parameters(), lr=5e-3), []
    equal = 1.1 * market.risk(torch.full((1, market.n), 1 / market.n))
    for step in range(steps):
        signals, held, returns = market.draw(batch, seed=1 + step)
        held = _within(held, market, equal)
        w = trade(layer, net(signals), held, equal.expand(batch, 1), market.c)
        utility = (returns * w).sum(1) - 0.5 * (w - held).square() @ market.c
        optimizer.zero_grad()
        (-utility.mean()).backward()
        optimizer.step()
        earned.append(utility.mean().item())
    return net, earned


def _within(held: Tensor, market: Market, limit: Tensor) -> Tensor:
    """Held weights moved halfway to equal ones until they obey all limits, so that there is something to trade from."""
    equal = torch.full_like(held, 1 / market.n)
    for _ in range(60):
        caps = held @ market.sector.T <= 1.25 * market.sector.mean(1)
        fine = (market.risk(held) <= limit) & caps.all(1)
        held = torch.where(fine.unsqueeze(1), held, (held + equal) / 2)
    return held


def frontier(market: Market, layer: sn.SnareLayer, points: int = 40) -> tuple[Tensor, Tensor]:
    """Volatility and expected return after costs of the best portfolios within risk limits from low to high."""
    held = torch.full((points, market.n), 1 / market.n)
    returns = market.mean(_OUTLOOK[:, : market.k]).expand(points, -1)
    limits = market.risk(held[:1]) * torch.linspace(0.92, 1.5, points).unsqueeze(1)
    with torch.no_grad():
        w = trade(layer, returns, held, limits, market.c)
    return market.risk(w).sqrt(), (returns * w).sum(1) - 0.5 * (w - held).square() @ market.c


def draw(market: Market, file: Path) -> None:
    """The frontier for several limits on turnover."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    equal = torch.full((1, market.n), 1 / market.n)
    start = 100 * market.risk(equal).sqrt().item(), 100 * (market.mean(_OUTLOOK[:, : market.k]) * equal).sum().item()
    for turnover, color in ((0.2, "#c1440e"), (0.4, "#e08a3c"), (0.8, "#3b6ea8"), (2.0, "#1b7837")):
        risk, earned = (100 * found for found in frontier(market, trading_layer(market, turnover)))
        axes.plot(risk, earned, color=color, lw=2)
        axes.annotate(f"{turnover:.0%}", (risk[-1], earned[-1]), (4, -3), textcoords="offset points", color=color)
    axes.plot(*start, "o", color="0.15", ms=7)
    axes.annotate("held: equal weights", start, (8, -4), textcoords="offset points", color="0.15")
    axes.set(xlabel="volatility, % a year", ylabel="expected return after costs, % a year")
    axes.set_title("Efficient frontiers, by the turnover that is allowed", fontsize=10, loc="left")
    axes.margins(x=0.08)
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    plt.rcParams["svg.hashsalt"] = "snarenet"
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> float:
    """Train, say what was earned, and draw; returns what the trained network earns of the best possible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=int, default=30)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args(arguments)
    market = Market(given.assets)
    layer = trading_layer(market)
    net, _ = train(market, layer, given.steps)
    signals, held, _ = market.draw(200, seed=0)
    limit = 1.1 * market.risk(torch.full((1, market.n), 1 / market.n))
    held = _within(held, market, limit)
    mean = market.mean(signals)
    earned = []
    with torch.no_grad():
        for returns in (net(signals), mean):
            w = trade(layer, returns, held, limit.expand(200, 1), market.c)
            gain = (mean * (w - held)).sum(1) - 0.5 * (w - held).square() @ market.c
            earned.append(gain.mean().item())
            assert (w.sum(1) - 1).abs().max() <= 1e-8
            assert w.min() >= -1e-8
            assert (market.risk(w) <= limit + 1e-8).all()
            assert (w - held).abs().sum(1).max() <= 0.4 + 1e-8
    print(f"trading gains {earned[0]:.2%} a year with the network, {earned[1]:.2%} with the true expectations")
    if given.figure:
        draw(market, given.figure)
    return earned[0] / earned[1]


if __name__ == "__main__":
    main()
