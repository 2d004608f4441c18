"""Does every sample reach the set, and in how many steps? From near and far starts, on sets that break simpler methods.

    python benchmarks/robustness.py [--seeds 5] [--rival-seeds 1] [--out FILE.md]

For each family: failures, steps (median, max) and mean displacement |y - y_hat| of the layer's defaults at 1e-10 and
1e-12, and, at 1e-12 with up to 500 steps, of active rows alone, all rows, and the paper's choice (damping 0.01).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import snarenet as sn
from snarenet.bench.common import Table, hardware, start

BATCH = 833  # as many samples as the paper's test sets have


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probability(n: int, sigma: float, seed: int) -> tuple[sn.Constraints, Tensor, None]:
    """y >= 0, sum y = 1."""
    simplex = sn.Box(0.0, None) & sn.Linear(torch.ones(1, n, dtype=torch.float64), equals=1.0)
    return simplex, sigma * normal(BATCH, n, seed=seed), None


def cones(smooth: bool, sigma: float, seed: int) -> tuple[sn.Constraints, Tensor, None]:
    """Ten second-order cones |(a, b)| <= t whose heights t add up to 5, as norms or as a^2 + b^2 <= t^2 with t >= 0."""
    y = sigma * normal(BATCH, 30, seed=seed)
    cone = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    heights = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).repeat(1, 10)
    total = sn.Linear(heights, equals=5.0)
    if smooth:
        lower = torch.where(heights[0] == 1, 0.0, -torch.inf)
        H = torch.block_diag(*[cone.unsqueeze(0)] * 10)
        return sn.Quadratic(H, torch.zeros_like(H), upper=0.0) & sn.Box(lower, None) & total, y, None

    def gaps(y: Tensor, x: None) -> Tensor:
        parts = y.unflatten(1, (10, 3))
        return parts[..., :2].norm(dim=2) - parts[..., 2]

    return sn.Nonlinear(gaps, rows=10, upper=0.0) & total, y, None


def coupled_box(n: int, sigma: float, seed: int) -> tuple[sn.Constraints, Tensor, Tensor]:
    """|y| <= 1 with one equality a y = x that uses up to 80 % of the box's reach."""
    a = normal(1, n, seed=100)
    x = 0.8 * a.abs().sum() * (2 * torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(seed)).double() - 1)
    return sn.Box(-1.0, 1.0) & sn.Linear(a, equals=lambda x: x), sigma * normal(BATCH, n, seed=seed), x


def families() -> dict[str, object]:
    """Name -> function of a seed that returns constraints, predictions and inputs."""

    def quadratic(name: str, sigma: float):
        problem = sn.problems.load(name)
        return lambda seed: (problem.constraints, *start(problem, sigma, seed=seed))

    found = {}
    for name in ("nclp", "qcqp", "ncqcqp", "ncqcqp-fast", "ncqcqp-hard"):
        for sigma in (0.5, 2.0):
            found[f"{name}, σ = {sigma:g}"] = quadratic(name, sigma)
    for sigma in (1.0, 30.0):
        found[f"probability vectors, n = 30, σ = {sigma:g}"] = lambda seed, sigma=sigma: probability(30, sigma, seed)
        found[f"probability vectors, n = 1000, σ = {sigma:g}"] = lambda seed, sigma=sigma: probability(
            1000, sigma, seed
        )
        found[f"second-order cones, squared, σ = {sigma:g}"] = lambda seed, sigma=sigma: cones(True, sigma, seed)
        found[f"second-order cones, norms, σ = {sigma:g}"] = lambda seed, sigma=sigma: cones(False, sigma, seed)
        found[f"box and one row, n = 100, σ = {sigma:g}"] = lambda seed, sigma=sigma: coupled_box(100, sigma, seed)
    return found


METHODS = {
    "defaults": {"tol": 1e-10, "rescue": True},
    "defaults ": {"tol": 1e-12, "rescue": True},
    "active rows": {"tol": 1e-12, "rows": "active", "max_steps": 500},
    "all rows": {"tol": 1e-12, "rows": "all", "max_steps": 500},
    "paper": {"tol": 1e-12, "rows": "all", "damping": 0.01, "max_steps": 500},
}


def measure(seeds: int, rival_seeds: int) -> Iterator[list[object]]:
    for family, make in families().items():
        for method, options in METHODS.items():
            mine = method.startswith("defaults")
            # from afar most of these cones end at their tips, where a norm has no derivative and steps are short
            patience = {"max_steps": 500} if "norms, σ = 30" in family else {}
            if not mine and "n = 1000" in family and method != "active rows":
                continue  # a 1001 x 1001 system per sample and step
            steps, moved, failures, samples = [], [], 0, 0
            for seed in range(seeds if mine else rival_seeds):
                constraints, y, x = make(seed)
                with torch.no_grad():
                    solution = sn.repair(constraints, y, x, **{**options, **patience})
                failures += int((~solution.converged).sum())
                samples += len(y)
                steps.append(solution.steps[solution.converged])
                moved.append((solution.value - y).norm(dim=1)[solution.converged])
            steps, moved = torch.cat(steps), torch.cat(moved)
            median, most = (int(steps.median()), int(steps.max())) if len(steps) else ("–", "–")
            distance = f"{moved.mean():.3g}" if len(moved) else "–"
            print(f"{family}: {method.strip()}: {failures} of {samples} failed, {most} steps", file=sys.stderr)
            name = method.strip() + (", 500 steps" if patience else "")
            yield [family, name, f"{options['tol']:.0e}", f"{failures} / {samples}", median, most, distance]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of the defaults")
    parser.add_argument("--rival-seeds", type=int, default=1, help="of the other methods")
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args()
    columns = ["family", "method", "tolerance", "failures", "median steps", "max steps", "displacement"]
    rows = list(measure(options.seeds, options.rival_seeds))
    title = "repair from A⁺x + σ N(0, I), or σ N(0, I) where there is no x"
    table = Table(title, columns, rows, "python benchmarks/robustness.py", hardware())
    table.show()
    if options.out:
        options.out.write_text(table.markdown())
    failed = [row for row in rows if row[1].startswith("defaults") and not row[3].startswith("0 ")]
    if failed:
        sys.exit(f"the defaults failed on {len(failed)} rows")


if __name__ == "__main__":
    main()
