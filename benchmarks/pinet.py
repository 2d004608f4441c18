"""Pi-net's authors' JAX package against our `PiNetLayer` and `SnareLayer`: forward + backward on NCLP, in one run.

    SNARENET_PINET_PYTHON=pinet-env/bin/python python benchmarks/pinet.py [--out FILE.md]

The interpreter is one with `pip install pinet-hcnn`. Starts are A^+ x + s N(0, I) on 200 test inputs of the paper, the
same for all; both sides use two CPU threads and float64. The package (jitted, compiled before the clock starts) runs a
fixed number of iterations: the fewest, in steps of five, after which the worst sample obeys the tolerance. Its sigma is
the best of a small grid with its authors' own, on validation inputs; the rest (omega 1.7, Ruiz scaling, bicgstab with
25 iterations) is as in their benchmark of this size. Ours stops by itself. Methods take turns, and the best of three
medians counts.

Distances and gradient differences are the largest ones, from those of `PiNetLayer` at a tolerance of 1e-11.
`SnareLayer` does not look for the nearest point, so its distance is no error; with `nearest`, it begins near it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from common import hardware, markdown, median_ms, show, start
from test_pinet_original import Case, nclp_case, original
from torch import Tensor

import snarenet as sn
from snarenet.layers.base import Layer
from snarenet.layers.pinet import PiNetLayer

THREADS, BATCH, ROUNDS, REPEATS = 2, 200, 3, 9
NOISE = (0.5, 2.0)
TOLERANCES = (1e-6, 1e-8)
SIGMAS = (0.03, 0.05, 0.068, 0.085, 0.1, 0.15)  # 0.068 is the authors'
COUNTS = range(25, 151, 5)
OURS = {
    "PiNetLayer": PiNetLayer,
    "SnareLayer": sn.SnareLayer,
    "SnareLayer, nearest=20": partial(sn.SnareLayer, damping=sn.Annealed(1e-3, 0.1), nearest=20),
}


def differentiated(layer: Layer, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """One pass: value, gradient and steps."""
    y = case["y"].clone().requires_grad_()
    solution = layer.solve(y, case["right"])
    (gradient,) = torch.autograd.grad((case["weights"] * solution.value).sum(), y)
    return solution.value.detach(), gradient, solution.steps


def exact(problem: sn.problems.Problem) -> Layer:
    return PiNetLayer(problem.constraints, tol=1e-11, on_failure="raise")


def farthest(tensor: Tensor, expected: Tensor) -> float:
    return (tensor - expected).abs().max().item()


def package(sigma: float, count: int, repeats: int = 0) -> dict[str, float]:
    """The authors' settings of the package, but for sigma and the number of iterations."""
    return {"n_iter": count, "n_iter_bwd": 25, "sigma": sigma, "omega": 1.7, "ruiz": 25, "repeats": repeats}


def best_sigma(problem: sn.problems.Problem, noise: float) -> float:
    """The sigma with which the package is nearest to the projections on validation inputs after 50 iterations.

    Not the one that violates least: with a small sigma all iterates are feasible, and far from the projection.
    """
    x = problem.split("valid")[:BATCH]
    right = torch.linalg.pinv(problem.constraints.parts[1].A)
    generator = torch.Generator().manual_seed(1)
    y = x @ right.T + noise * torch.randn(len(x), problem.size, generator=generator, dtype=x.dtype)
    expected = exact(problem)(y, x)
    found = original(nclp_case(problem, x, y), *(package(sigma, 50) for sigma in SIGMAS))
    errors = [farthest(result["value"], expected) for result in found]
    return SIGMAS[errors.index(min(errors))]


def rows(problem: sn.problems.Problem, noise: float) -> Sequence[Sequence[object]]:
    """The table's rows for one kind of start."""
    y, x = start(problem, noise, BATCH)
    case, sigma = nclp_case(problem, x, y), best_sigma(problem, noise)
    results: dict[tuple[float, str], tuple[Tensor, Tensor, int]] = {}
    settings, layers = {}, {}
    scan = original(case, *(package(sigma, count) for count in COUNTS))
    for tol in TOLERANCES:
        name = f"original, sigma {sigma:g}"
        fits = [problem.constraints.violation(result["value"], x).max() <= tol for result in scan]
        if True not in fits:
            raise RuntimeError(f"the package needs more than {COUNTS[-1]} iterations to a tolerance of {tol:g}")
        first = fits.index(True)
        results[tol, name] = scan[first]["value"], scan[first]["y"], COUNTS[first]
        settings[tol, name] = package(sigma, COUNTS[first], REPEATS)
        for title, build in OURS.items():
            layer = layers[tol, title] = build(problem.constraints, tol=tol, on_failure="raise")
            value, gradient, steps = differentiated(layer, case)
            results[tol, title] = value, gradient, int(steps.max())
    times: dict[tuple[float, str], list[float]] = {key: [] for key in results}
    for _ in range(ROUNDS):
        for key, result in zip(settings, original(case, *settings.values()), strict=True):
            times[key].append(1e3 * result["times"].median().item())
        for key, layer in layers.items():
            times[key].append(median_ms(lambda layer=layer: differentiated(layer, case), REPEATS))
    expected, slope, _ = differentiated(exact(problem), case)
    table = []
    for (tol, name), (value, gradient, steps) in results.items():
        worst = problem.constraints.violation(value, x).max().item()
        difference = "" if name.startswith("SnareLayer") else f"{farthest(gradient, slope):.0e}"
        found = f"{worst:.0e}", f"{farthest(value, expected):.0e}", difference, f"{min(times[tol, name]):.1f}"
        table.append([f"{noise:g}", f"{tol:g}", name, steps, *found])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args()
    if not os.environ.get("SNARENET_PINET_PYTHON"):
        parser.error("SNARENET_PINET_PYTHON must name an interpreter that has pinet-hcnn installed")
    os.environ["NPROC"] = str(THREADS)  # XLA's threads
    torch.set_num_threads(THREADS)
    problem = sn.problems.load("nclp")
    columns = ["noise", "tol", "method", "steps", "violation", "distance", "gradient", "ms"]
    table = [row for noise in NOISE for row in rows(problem, noise)]
    show(f"NCLP, B = {BATCH}, forward + backward; {hardware()}", columns, table)
    if options.out:
        options.out.write_text(markdown(columns, table))


if __name__ == "__main__":
    main()
