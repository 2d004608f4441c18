r"""The paper's two theorems, measured: half the squared violation F of all-row steps against their bounds.

Theorem 1, linear rows of full rank, least singular value σ:  $F(y_k) \le (1 - σ^2 / (σ^2 + λ))^k F(y_0)$.

Theorem 2, convex rows:  $F(y_k) \le F(y_0) / (1 + k F(y_0) / (2 D^2 (σ^2 + λ)))$, where D is the largest distance of a
point with $F(y) \le F(y_0)$ to the set, σ² bounds the squared norm of the Jacobian there, L is its Lipschitz constant,
and $λ \ge (1 + \sqrt{17} / 4) L \sqrt{2 F(y_0)}$, the condition under which the proof holds; the paper's is weaker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Constraints, Linear, Quadratic
from snarenet.problems import Problem
from snarenet.repair import repair
from snarenet.report.tables import Column
from snarenet_lab.experiments.item import Item
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import axis, curve, curves
from snarenet_lab.report.results import Cell, Row, Sheet
from snarenet_lab.starts import start

SAFE = 1 + math.sqrt(17) / 4
_STEPS = 200
_SETS = 20  # predictions of Theorem 2, each with a damping of its own, so one at a time
_DAMPINGS = (0.01, 0.1, 1.0, 10.0)
_SLACK = 1 + 1e-9  # of rounding
_ROUNDING = 1e-20  # F below this is rounding


class TheoryItem(Item):
    """Measured convergence against the bounds."""

    name = "theory"
    title = "Convergence against the bounds of the two theorems"
    about = (
        "No training: repairs of random predictions with all rows and constant damping, as the theorems assume. "
        "Theorem 1 on the constraints of NCLP, predictions C⁺x + N(0, I). Theorem 2 on the unit ball and on random "
        "ellipsoids with an equality, whose constants D, σ and L are known or bounded; λ is the smallest that the "
        "proof allows, 2.03 L √(2F(y₀)), since the paper's own condition does not carry its proof."
    )
    draws_runs = True  # whole curves

    def sheets(self, study: Study) -> list[Sheet]:
        shown = (
            Column("damping", "λ"),
            Column("samples", "predictions", "count"),
            Column("broken", "bound broken", "count"),
            Column("tightest", "measured / bound, max"),
            Column("measured", "steps to F/F(y₀) = 1e-6", "count"),
            Column("bound", "steps the bound promises", "count"),
        )
        rows = []
        for found in self._found(study):
            cells = {key: Cell(found[key]) for key in ("damping", "samples", "broken", "tightest")}
            for key, numbers in (("measured", found["worst"]), ("bound", found["limit"])):
                count = _first_below(numbers, 1e-6)
                cells[key] = Cell(text=f"> {_STEPS}") if count is None else Cell(count)
            rows.append(Row(found["label"], "measured", cells))
        note = (
            f"Over {_STEPS} steps and all predictions; the ratio of measured F to its bound must not exceed 1. The "
            "paper prints no numbers for this."
        )
        return [Sheet("bounds", "Measured convergence and the theorems' bounds", shown, tuple(rows), note)]

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        groups: dict[str, list[dict[str, Any]]] = {"1": [], "2": []}
        for found in self._found(study):
            groups["1" if found["label"].startswith("Theorem 1") else "2"].append(found)
        specs = []
        for theorem, several in groups.items():
            if not several:
                continue
            series = []
            for color, found in enumerate(several):
                label = found["label"].partition(", ")[2]
                steps = list(range(len(found["worst"])))
                series.append(curve(label, steps, [max(v, 1e-16) for v in found["worst"]], color=color))
                limit = [max(v, 1e-16) for v in found["limit"]]
                series.append(curve(f"bound, {label}", steps, limit, "dashed", color))
            caption = (
                f"Theorem {theorem}: the largest F(y_k)/F(y_0) of all predictions (solid) and its bound (dashed); "
                "below 1e-16 is rounding"
            )
            x, y = axis("step k (count)"), axis("F(y$_k$) / F(y$_0$)", log=True)
            specs.append(curves(f"theorem-{theorem}", caption, x, y, series))
        return specs

    def _found(self, study: Study) -> list[dict[str, Any]]:
        """The measurements, from the folder if they are there."""
        sizes, samples, device = study.budget.sizes_of("nclp"), study.budget.samples, study.device
        problem = study.problem("nclp", sizes)
        found = []
        for damping in _DAMPINGS:
            arguments = {"theorem": 1, "sizes": sizes, "samples": samples, "damping": damping, "steps": _STEPS}
            found.append(study.measured("theory", arguments, lambda d=damping: linear(problem, samples, d)))
        for kind in ("ball", "ellipsoids"):
            arguments = {"theorem": 2, "kind": kind, "samples": samples, "steps": _STEPS}
            found.append(study.measured("theory", arguments, lambda kind=kind: convex(kind, samples, device)))
        return [one for one in found if one is not None]


def linear(problem: Problem, samples: int, damping: float) -> dict[str, Any]:
    """Theorem 1 on the linear constraints of a problem."""
    y, x = start(problem, 1.0, samples)
    matrix = problem.constraints.jacobian(y[:1], x[:1]).reshape(-1, problem.size)
    square = float(torch.linalg.svdvals(matrix)[-1]) ** 2
    path = _path(problem.constraints, y, x, damping)
    limit = torch.tensor([(damping / (square + damping)) ** k for k in range(_STEPS + 1)], dtype=torch.float64)
    return _summary(f"Theorem 1, λ = {damping:g}", damping, path, limit.unsqueeze(1).expand_as(path))


def convex(kind: str, samples: int, device: str) -> dict[str, Any]:
    """Theorem 2, every prediction with a set of its own (ellipsoids), or one set (ball), at the safe damping."""
    draws = torch.Generator().manual_seed(1)
    found = [_ball(draws, device) if kind == "ball" else _ellipsoids(draws, device) for _ in range(min(samples, _SETS))]
    paths, limits, dampings = (list(part) for part in zip(*found, strict=True))
    return _summary(f"Theorem 2, {kind}", sum(dampings) / len(dampings), torch.cat(paths, 1), torch.cat(limits, 1))


def _ball(draws: torch.Generator, device: str, n: int = 6) -> tuple[Tensor, Tensor, float]:
    """Path, bound (K+1, 1) and damping for the unit ball, whose constants are known: L = 2, D = |y| - 1, σ = 2 |y|."""
    ball = Quadratic(torch.ones(1, n), torch.zeros(1, n), upper=1.0).to(device)
    radius = 1.5 + 18.5 * torch.rand(1, generator=draws).item()
    y = torch.nn.functional.normalize(torch.randn(1, n, generator=draws, dtype=torch.float64)).to(device) * radius
    return _bounded(ball, y, lipschitz=2.0, distance=radius - 1, squared=4 * radius**2)


def _ellipsoids(draws: torch.Generator, device: str, n: int = 6, rows: int = 3) -> tuple[Tensor, Tensor, float]:
    """The same for random ellipsoids about the origin and a plane through it, with bounds on the constants."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    H, G, plane, y = 0.2 + draw(rows, n).abs(), draw(rows, n), draw(1, n), 3 * draw(1, n)
    constraints = (Quadratic(H, G, upper=1.0) & Linear(plane, equals=0.0)).to(device)
    size = math.sqrt(2 * _merit(constraints, y.to(device)).item())
    # where F <= F(y_0), the first row keeps h |y|^2 - g |y| <= 1 + size
    h, g = H[0].min().item(), G[0].norm().item()
    radius = (g + math.sqrt(g**2 + 4 * h * (1 + size))) / (2 * h)
    steepest = sum((2 * H[i].max().item() * radius + G[i].norm().item()) ** 2 for i in range(rows))
    lipschitz = 2 * H.square().sum(0).max().sqrt().item()  # row i of J(y) - J(z) is 2 H_i (y - z)
    return _bounded(constraints, y.to(device), lipschitz, radius, steepest + plane.norm().item() ** 2)


def _bounded(
    constraints: Constraints, y: Tensor, lipschitz: float, distance: float, squared: float
) -> tuple[Tensor, Tensor, float]:
    """F(y_k) / F(y_0) and its bound, both (K+1, 1), and the safe damping."""
    start = _merit(constraints, y).item()
    damping = SAFE * lipschitz * math.sqrt(2 * start)
    rate = start / (2 * distance**2 * (squared + damping))
    limit = torch.tensor([[1 / (1 + rate * k)] for k in range(_STEPS + 1)], dtype=torch.float64)
    return _path(constraints, y, None, damping), limit, damping


def _merit(constraints: Constraints, y: Tensor, x: Tensor | None = None) -> Tensor:
    """F: half the squared violation of each sample."""
    return 0.5 * constraints.residual(y, x).square().sum(1)


def _path(constraints: Constraints, y: Tensor, x: Tensor | None, damping: float) -> Tensor:
    """(K+1, B) F(y_k) / F(y_0), with all rows and a constant damping."""
    merits = [_merit(constraints, y, x)]
    for _ in range(_STEPS):  # a constant damping has no memory: one step at a time is the whole path
        y = repair(constraints, y, x, start=None, damping=damping, rows="all", tol=0.0, max_steps=1).value
        merits.append(_merit(constraints, y, x))
    path = torch.stack(merits)
    path = torch.where(path > _ROUNDING, path, 0.0)
    return (path / path[0].clamp(min=1e-300)).cpu()


def _summary(label: str, damping: float, path: Tensor, limit: Tensor) -> dict[str, Any]:
    """What is kept of a measurement."""
    ratio = path / limit.clamp(min=1e-300)
    return {
        "label": label,
        "damping": damping,
        "samples": path.shape[1],
        "broken": int((ratio > _SLACK).any(0).sum()),
        "tightest": ratio[1:].max().item(),
        "worst": path.amax(1).tolist(),
        "limit": limit.amax(1).tolist(),
    }


def _first_below(numbers: Sequence[float], level: float) -> int | None:
    return next((k for k, number in enumerate(numbers) if number <= level), None)
