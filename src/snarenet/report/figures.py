"""Figures; matplotlib comes with the extra `plots` and is imported where it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Constraints


def pyplot() -> Any:
    """matplotlib's pyplot without a screen, or an error that names what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "snarenet[plots]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_repair_paths(constraints: Constraints, paths: Tensor, file: Path, title: str = "") -> None:
    """Draw a set in the plane and the paths (K, B, 2) of B repairs, from prediction to feasible point, to a PNG."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6.5, 5.5), layout="constrained")
    flat = paths.reshape(-1, 2)
    low, high = flat.amin(0) - 0.4, flat.amax(0) + 0.4
    grid = [torch.linspace(float(a), float(b), 400, dtype=torch.float64) for a, b in zip(low, high, strict=True)]
    points = torch.cartesian_prod(*grid)
    _, lower, upper = constraints.at(points)
    value = constraints.value(points)
    excess = torch.maximum(value - upper, lower - value)  # of each constraint, negative inside
    shape = (len(grid[0]), len(grid[1]))
    for row in excess.T:
        axes.contour(*(g.numpy() for g in grid), row.reshape(shape).T.numpy(), [0.0], colors="0.45", linewidths=1)
    inside = excess.amax(1).reshape(shape).T.numpy()
    axes.contourf(*(g.numpy() for g in grid), inside, [-torch.inf, 0.0], colors=["#bfe3c0"])
    for path in paths.transpose(0, 1):
        axes.plot(*path.T.numpy(), "-", color="#3b6ea8", linewidth=0.9, marker=".", markersize=3, alpha=0.8)
    axes.plot(*paths[0].T.numpy(), "o", color="#c1440e", markersize=5, label="prediction")
    axes.plot(*paths[-1].T.numpy(), "o", color="#1b7837", markersize=5, label="repaired")
    axes.set(xlabel="$y_1$", ylabel="$y_2$", title=title, aspect="equal")
    figure.legend(loc="outside lower center", ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
