"""Demand of shops, regions and the whole, forecast so that it adds up, is never negative and keeps to what is agreed.

    python examples/forecast.py --figure fan.svg
    python examples/forecast.py --csv sales.csv --period 7

A network forecasts every leaf; the layer makes of it a forecast of all series that adds up, is not negative and keeps
to series that are known in advance. A fan of samples, the forecast plus errors that it once made, goes through the same
layer: every single sample adds up.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.problems import Forecast, crps


class Leaves(nn.Module):
    """What each leaf was a period before, corrected by a network, and added up."""

    def __init__(self, problem: Forecast, width: int) -> None:
        super().__init__()
        self.problem, self.S = problem, torch.from_numpy(problem.hierarchy.summing)
        self.net = sn.MLP(problem.inputs.shape[1] - problem.size, self.S.shape[1], width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n) forecasts of all series, from what a model sees of x."""
        count = self.S.shape[1]
        leaves = self.problem.season(x)[:, -count:] + self.problem.scale[-count:] * self.net(x.float()).double()
        return leaves @ self.S.T


def train(problem: Forecast, epochs: int, width: int = 128) -> tuple[nn.Module, sn.SnareLayer]:
    """A network that is trained through the layer; the proximity keeps leaves at zero from getting stuck there."""
    torch.manual_seed(0)
    net, data = Leaves(problem, width), problem.split("train")
    layer = sn.SnareLayer(problem.constraints, weights=1 / problem.scale**2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs) * -(-len(data) // 100))
    for _ in range(epochs):
        for index in torch.randperm(len(data)).split(100):
            x = data[index]
            solution = layer.solve(net(problem.seen(x)), problem.seen(x))
            loss = problem.objective(solution.value, x).mean()
            optimizer.zero_grad()
            (loss + layer.proximity(solution, loss)).backward()
            optimizer.step()
            schedule.step()
    return net.eval(), layer.eval()


@torch.no_grad()
def sample(problem: Forecast, net: nn.Module, layer: sn.SnareLayer, x: Tensor, count: int = 100) -> Tensor:
    """(B, count, n) samples for what a model sees of x: the forecast plus errors of the validation instances."""
    valid = problem.split("valid")
    errors = problem.target(valid) - layer(net(problem.seen(valid)), problem.seen(valid))
    errors = errors[errors.isfinite().all(1)]
    picks = torch.randint(len(errors), (len(x), count), generator=torch.Generator().manual_seed(0))
    samples = layer(net(x), x).unsqueeze(1) + errors[picks]
    return layer(samples.flatten(0, 1), x.repeat_interleave(count, 0)).unflatten(0, (len(x), count))


def draw(problem: Forecast, samples: Tensor, x: Tensor, file: Path) -> None:
    """Fans of the whole, of a part of it and of its smallest leaf, beside what happened."""
    import matplotlib.pyplot as plt

    names, size = problem.hierarchy.names, problem.level
    leaves = len(problem.hierarchy.leaves)
    small = len(names) - leaves + int(size[-leaves:].argmin())
    chosen = {0: "#3b6ea8", 1: "#e08a3c", small: "#1b7837"}
    figure, panels = plt.subplots(len(chosen), 1, figsize=(6.8, 6), sharex=True, layout="constrained")
    time, target = torch.arange(len(x)), problem.target(x)
    for axes, (series, color) in zip(panels, chosen.items(), strict=True):
        values = samples[:, :, series]
        for low, high, alpha in ((0.05, 0.95, 0.18), (0.25, 0.75, 0.32)):
            axes.fill_between(
                time, values.quantile(low, 1), values.quantile(high, 1), color=color, alpha=alpha, linewidth=0
            )
        axes.plot(time, values.median(1).values, color=color, lw=1.6)
        axes.plot(time, target[:, series], ".", color="0.15", ms=4)
        axes.set_title(names[series], fontsize=9, loc="left", color=color)
        axes.set_ylim(bottom=0)
        axes.grid(color="0.93")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("week of the test period; dots: what happened, bands: 50 and 90 % of the samples")
    plt.rcParams["svg.hashsalt"] = "snarenet"
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main(arguments: list[str] | None = None) -> float:
    """Train, say how good the forecasts are, and draw; returns the error as a share of the naive forecast's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", default="", help="observations of your own: a column `date`, then leaves")
    parser.add_argument("--period", type=int, default=52)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args(arguments)
    problem = Forecast(csv=given.csv, period=given.period, known=0.1)
    net, layer = train(problem, given.epochs)
    test = problem.split("test")
    x = test[:: problem.horizon]  # those that look one step ahead
    samples = sample(problem, net, layer, problem.seen(x))
    C = torch.from_numpy(problem.hierarchy.coherence)
    assert (samples @ C.T).abs().max() <= 1e-7, "every sample adds up"
    assert samples.min() >= -1e-8, "and is not negative"
    with torch.no_grad():
        found = problem.objective(layer(net(problem.seen(test)), problem.seen(test)), test).mean().item()
    naive = problem.objective(problem.season(test), test).mean().item()
    score = (crps(samples, problem.target(x)) / problem.scale).nanmean().item()
    print(f"error {found:.3f}, of the naive forecast {naive:.3f}; CRPS one step ahead {score:.3f}")
    if given.figure:
        draw(problem, samples, x, given.figure)
    return found / naive


if __name__ == "__main__":
    main()
