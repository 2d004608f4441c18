"""A problem of your own: a cable over a hill, its shape by a network, each link short enough and above the ground.

    python examples/cable.py --epochs 15 --seeds 3

Needs `pip install "snarenet[solvers,plots]"`. Nothing is set but the number of epochs: the rows are one function, whose
sparse Jacobian is found by itself. Draws cables beside IPOPT's to OUT/cables.svg. `--exact-gradients` shows what
training would be if single samples could drown the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import snarenet as sn
from snarenet.report.figures import BLUE, canvas, to_svg

SPAN = 10.0


class Cable(sn.Problem):
    """Least potential energy of a cable from (0, 0) to (10, 0); x is the hill's height, its place, and the slack."""

    name = "cable"

    def __init__(self, links: int = 30, instances: int = 1500) -> None:
        super().__init__()
        self.links, self.size = links, 2 * (links - 1)
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("inputs", torch.rand(instances, 3, generator=draw, dtype=torch.float64))
        lower = torch.cat([torch.full((links,), -torch.inf), torch.zeros(links - 1)])
        upper = torch.cat([torch.ones(links), torch.full((links - 1,), torch.inf)])
        self.constraints = sn.Nonlinear(self.rows, 2 * links - 1, lower, upper)

    def points(self, y: Tensor) -> Tensor:
        """(B, links + 1, 2) all points of the cable, with its ends."""
        ends = y.new_tensor([[0.0, 0.0], [SPAN, 0.0]]).expand(len(y), 2, 2)
        return torch.cat([ends[:, :1], y.view(len(y), -1, 2), ends[:, 1:]], 1)

    @staticmethod
    def ground(along: Tensor, x: Tensor) -> Tensor:
        """How high the ground is, (B, k), at `along` (B, k)."""
        return -2 + 1.5 * x[:, :1] * torch.exp(-((along - 3 - 4 * x[:, 1:2]) ** 2))

    def rows(self, y: Tensor, x: Tensor) -> Tensor:
        """Squared lengths of the links, at most 1, and heights above the ground, at least 0."""
        points, longest = self.points(y), SPAN * (1.05 + 0.25 * x[:, 2:3]) / self.links
        lengths = (points[:, 1:] - points[:, :-1]).square().sum(2) / longest**2
        inner = points[:, 1:-1]
        return torch.cat([lengths, inner[..., 1] - self.ground(inner[..., 0], x)], 1)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        """The sum of the heights."""
        return self.points(y)[..., 1].sum(1)

    @property
    def typical(self) -> Tensor:
        """A cable that sags a little: where predictions begin."""
        along = torch.linspace(0, SPAN, self.links + 1, dtype=torch.float64, device=self.inputs.device)[1:-1]
        return torch.stack([along, -0.5 * torch.sin(torch.pi * along / SPAN)], 1).flatten()


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description="A cable over a hill")
    parser.add_argument("--links", type=int, default=30)
    parser.add_argument("--instances", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--exact-gradients", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/cable"))
    options = parser.parse_args()

    problem, models = Cable(options.links, options.instances), []
    x = problem.split("test")
    optimum = sn.reference.solve(problem, x)
    for seed in range(options.seeds):
        config = sn.TrainConfig(epochs=options.epochs, batch=100, seed=seed)
        models.append(config.build(problem))
        models[-1].layer.limits_gradients = not options.exact_gradients
        sn.Trainer(config, options.out / f"seed{seed}").fit(models[-1], problem)
        found = sn.evaluate(models[-1], problem, reference=optimum.objective).summary
        gap, feasible = found["gap"]["relative"], found["feasible"]["1e-08"]
        print(f"seed {seed}: mean relative gap {gap:.3%}, {feasible:.0%} of {len(x)} cables feasible to 1e-08")
    _draw(problem, models[0](x[:3]).detach(), optimum.value[:3], x[:3], options.out / "cables.svg")


def _draw(problem: Cable, ours: Tensor, theirs: Tensor, x: Tensor, file: Path) -> None:
    along = torch.linspace(0, SPAN, 200, dtype=torch.float64)
    with canvas((7.0, 2.4)) as figure:
        for k, axes in enumerate(figure.subplots(1, len(x), sharey=True)):
            axes.fill_between(along, problem.ground(along.unsqueeze(0), x[k : k + 1])[0], -2.2, color="0.85")
            for name, value, style in (("IPOPT", theirs, "0.6"), ("network and repair", ours, BLUE)):
                axes.plot(*problem.points(value[k : k + 1])[0].T, color=style, marker=".", ms=3, lw=1, label=name)
        axes.legend(frameon=False, fontsize=7)
        file.write_text(to_svg(figure))


if __name__ == "__main__":
    main()
