"""Does every sample reach the set, and in how many steps? From near and far starts, on sets that break simpler methods.

For each family: failures, steps (median, max) and mean displacement |y - y_hat| of the layer's defaults at 1e-10 and
1e-12, and, at 1e-12 with up to 500 steps, of active rows alone, all rows, and the paper's choice (damping 0.01).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet_lab.bench.common import Benchmark, command_line, hardware
from snarenet_lab.starts import start

BATCH = 833  # as many samples as the paper's test sets have
COLUMNS = ("family", "method", "tolerance", "failures", "median steps", "max steps", "displacement")

Case = tuple[sn.Constraints, Tensor, Any]  # constraints, predictions and inputs


def normal(*shape: int, seed: int) -> Tensor:
    """Random numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probability(n: int, sigma: float, seed: int) -> Case:
    """y >= 0, sum y = 1."""
    simplex = sn.Box(0.0, None) & sn.Linear(torch.ones(1, n, dtype=torch.float64), equals=1.0)
    return simplex, sigma * normal(BATCH, n, seed=seed), None


def cones(smooth: bool, sigma: float, seed: int) -> Case:
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


def coupled_box(n: int, sigma: float, seed: int) -> Case:
    """|y| <= 1 with one equality a y = x that uses up to 80 % of the box's reach."""
    a = normal(1, n, seed=100)
    x = 0.8 * a.abs().sum() * (2 * torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(seed)).double() - 1)
    return sn.Box(-1.0, 1.0) & sn.Linear(a, equals=lambda x: x), sigma * normal(BATCH, n, seed=seed), x


def families(device: torch.device) -> dict[str, Callable[[int], Case]]:
    """Functions of a seed, by the names of what they draw; the problems of the paper are on the device already."""

    def quadratic(name: str, sigma: float) -> Callable[[int], Case]:
        problem = sn.problems.load(name).to(device)
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


METHODS: dict[str, dict[str, Any]] = {
    "defaults": {"tol": 1e-10, "rescue": True},
    "defaults ": {"tol": 1e-12, "rescue": True},
    "active rows": {"tol": 1e-12, "rows": "active", "max_steps": 500},
    "all rows": {"tol": 1e-12, "rows": "all", "max_steps": 500},
    "paper": {"tol": 1e-12, "rows": "all", "damping": 0.01, "max_steps": 500},
}


def measure(
    device: torch.device, out: Path, seeds: int = 5, rival_seeds: int = 1, only: str | Sequence[str] | None = None
) -> Benchmark:
    """Repair all families; the defaults must not fail on a single sample.

    Args:
        device: where.
        out: nothing is kept there but the table.
        seeds: draws of the predictions for the defaults.
        rival_seeds: the same for the other methods.
        only: names in `families`, one or several; all of them unless given.
    """
    known, rows, failed = families(device), [], 0
    chosen = known if only is None else (only,) if isinstance(only, str) else only
    if unknown := set(chosen) - set(known):
        raise ValueError(f"`only` are {'; '.join(known)}, but got {'; '.join(sorted(unknown))}")
    for family in chosen:
        for method, options in METHODS.items():
            mine = method.startswith("defaults")
            # from afar most of these cones end at their tips, where a norm has no derivative and steps are short
            patience = {"max_steps": 500} if "norms, σ = 30" in family else {}
            if not mine and "n = 1000" in family and method != "active rows":
                continue  # a 1001 x 1001 system per sample and step
            cases = (known[family](seed) for seed in range(seeds if mine else rival_seeds))
            failures, samples, *found = _attempts(cases, device, options | patience)
            failed += mine and failures > 0
            name = method.strip() + (", 500 steps" if patience else "")
            rows.append([family, name, f"{options['tol']:.0e}", f"{failures} / {samples}", *found])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    title = "Repair from A⁺x + σ N(0, I), or σ N(0, I) where there is no x"
    failure = f"the defaults failed on {failed} rows" if failed else ""
    return Benchmark(title, COLUMNS, rows, command_line("robustness", device), hardware(device), failure)


def _attempts(
    cases: Iterable[Case], device: torch.device, options: dict[str, Any]
) -> tuple[int, int, int | None, int | None, float | None]:
    """How many samples fail, of how many; median and largest steps, and mean displacement, of the others."""
    steps, moved, failures, samples = [], [], 0, 0
    for constraints, y, x in cases:
        y = y.to(device)
        with torch.no_grad():
            solution = sn.repair(constraints.to(device), y, None if x is None else x.to(device), start=None, **options)
        failures += int((~solution.converged).sum())
        samples += len(y)
        steps.append(solution.steps[solution.converged])
        moved.append((solution.value - y).norm(dim=1)[solution.converged])
    steps, moved = torch.cat(steps), torch.cat(moved)
    if not len(steps):
        return failures, samples, None, None, None
    return failures, samples, int(steps.median()), int(steps.max()), moved.mean().item()
