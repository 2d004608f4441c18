"""Model predictive control: a network plans past a keep-out zone, and every plan obeys the dynamics to 1e-8.

    python examples/mpc.py --horizon 20 --epochs 40

Needs `pip install "snarenet[solvers,plots]"`. Writes the run to --out and draws plans beside IPOPT's, and what the
controller drives when it plans again at every step, to OUT/plans.svg and OUT/driven.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import snarenet as sn
from snarenet.report.evaluation import sentence
from snarenet.report.scenes import draw_plans


def main() -> None:
    """Train, evaluate, drive, draw."""
    parser = argparse.ArgumentParser(description="Model predictive control")
    parser.add_argument("--horizon", type=int, default=20)
    parser.add_argument("--region", default="paper", help="where to start: paper or wide")
    parser.add_argument("--instances", type=int, default=1200)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/mpc-example"))
    options = parser.parse_args()

    problem = sn.problems.load("mpc", horizon=options.horizon, region=options.region, instances=options.instances).to(
        "cuda" if torch.cuda.is_available() else "cpu"
    )
    assert isinstance(problem, sn.problems.MPC)
    config = sn.TrainConfig.recipe("best", "mpc", epochs=options.epochs, width=options.width, batch=100)
    model = config.build(problem)
    sn.Trainer(config, options.out / "run").fit(model, problem)

    x = problem.split("test")[:100]
    optimum = sn.reference.solve(problem, problem.split("test"))
    found = sn.evaluate(
        model,
        problem,
        reference=optimum.objective,
        reference_seconds=optimum.seconds.mean().item(),
        engine="ipopt",
    )
    gap = found.arrays["gap"] / optimum.objective.cpu().numpy()
    print(sentence(found.summary))
    print(f"Relative gap: mean {gap.mean():.3%}, largest {gap.max():.3%}")

    few = x[:8]
    paths = {"network and repair": problem.trajectory(model, few), "IPOPT": problem.paths(optimum.value[:8], few)}
    (options.out / "plans.svg").write_text(draw_plans(problem, {k: v.detach() for k, v in paths.items()}).svg)

    steps = 2 * options.horizon
    ours = problem.drive(lambda state: model.solve(state).value, few, steps)
    theirs = problem.drive(lambda state: sn.reference.solve(problem, state, cache=False, workers=1).value, few, steps)
    driven = {"network and repair": ours.states, "IPOPT": theirs.states}
    (options.out / "driven.svg").write_text(draw_plans(problem, driven).svg)
    print(f"Closed loop, {steps} steps: cost {ours.cost.mean():.4g}, IPOPT's {theirs.cost.mean():.4g}")
    print(f"Least margin to the ellipse: {ours.margin.min():.2e}, IPOPT's {theirs.margin.min():.2e}")


if __name__ == "__main__":
    main()
