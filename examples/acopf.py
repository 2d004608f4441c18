"""AC optimal power flow: a network proposes, the repair makes it obey every limit of the grid, IPOPT is the yardstick.

    python examples/acopf.py --case 30_ieee --epochs 40
    python examples/acopf.py --case my_grid.m            # any file of MATPOWER's

Needs `pip install "snarenet[power,solvers,plots]"`. Writes the run to --out and draws the grid before and after the
repair of one test instance to OUT/grid.svg.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import snarenet as sn
from snarenet.report.evaluation import sentence
from snarenet.report.scenes import draw_grid


def main() -> None:
    """Train, evaluate, draw."""
    parser = argparse.ArgumentParser(description="AC optimal power flow")
    parser.add_argument("--case", default="30_ieee", help="a case of PGLib-OPF, or a file .m")
    parser.add_argument("--sampler", default="uniform", help="uniform, wide or dc3")
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/acopf-example"))
    options = parser.parse_args()

    problem = sn.problems.load("acopf", case=options.case, sampler=options.sampler, instances=options.instances)
    assert isinstance(problem, sn.problems.ACOPF)
    problem.to("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{len(problem.infeasible('train'))} of the training inputs have no feasible point and are left out")

    config = sn.TrainConfig.recipe("best", "acopf", epochs=options.epochs, width=options.width, batch=100)
    model = config.build(problem)
    sn.Trainer(config, options.out / "run").fit(model, problem)

    x = problem.split("test")
    optimum = sn.reference.solve(problem, x)
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

    with torch.no_grad():
        solution = model.solve(x[:1])
    states = {"prediction": solution.raw[0], "repaired": solution.value[0], "IPOPT": optimum.value[0]}
    (options.out / "grid.svg").write_text(draw_grid(problem, states, x[0]).svg)
    print(f"The grid before and after the repair: {options.out / 'grid.svg'}")


if __name__ == "__main__":
    main()
