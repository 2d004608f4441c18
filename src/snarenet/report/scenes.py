"""Pictures of applications: a grid with its loadings and voltages, plans beside those of a solver."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.problems import ACOPF, MPC
from snarenet.problems.arithmetic import Torch
from snarenet.problems.mpc import GOAL
from snarenet.report.figures import BLUE, GREEN, ORANGE, Picture, canvas, to_svg

Array = np.ndarray[Any, Any]

_ROUNDS = 300  # of the springs that lay out a grid
_RED = "#b2182b"


def draw_grid(problem: ACOPF, states: dict[str, Tensor], x: Tensor) -> Picture:
    """A grid in several states: branches by their loading, buses by their voltage, red where a limit is broken.

    Args:
        problem: the grid.
        states: what each is called, and its y (n,).
        x: (d,) the loads.
    """
    place, notes = layout(problem), []
    with canvas((4.6 * len(states), 4.4)) as figure:
        axes = np.atleast_1d(figure.subplots(1, len(states)))
        voltages = None
        for one, (name, y) in zip(axes, states.items(), strict=True):
            voltages = _draw_state(one, problem, place, y)
            notes.append(f"{name}: {_balance(problem, y, x)}")
            one.set_xlabel(f"{name}: {_balance(problem, y, x)}")
        bar = figure.colorbar(voltages, ax=list(axes), shrink=0.7, pad=0.02)
        bar.set_label("voltage (per unit)")
        picture = to_svg(figure)
    caption = f"{problem.grid.name}; width of a branch: its loading; red: limits broken. {'; '.join(notes)}."
    return Picture(picture, caption, f"Map of {problem.grid.name} with loadings and voltages in {len(states)} states.")


def _draw_state(axes: Any, problem: ACOPF, place: Array, y: Tensor) -> Any:
    grid, flows = problem.grid, problem.flows
    p_f, q_f, p_t, q_t, _ = flows.branches(y.double().unsqueeze(0), Torch())
    power = torch.maximum(torch.hypot(p_f, q_f), torch.hypot(p_t, q_t))[0].cpu().numpy()
    loading = np.where(np.isfinite(grid.rating), power / grid.rating, 0.0)
    for f, t, share in zip(*grid.ends, loading, strict=True):
        over = share > 1 + 1e-6
        colour = _RED if over else (0.85 - 0.62 * share, 0.88 - 0.45 * share, 0.93 - 0.27 * share)
        width = 0.8 + 2.2 * min(share, 1.5)
        axes.plot(*place[[f, t]].T, color=colour, linewidth=width, zorder=1)
    vm = y[grid.buses : 2 * grid.buses].cpu().numpy()
    low, high = grid.voltage
    broken = (vm < low - 1e-6) | (vm > high + 1e-6)
    size = max(8.0, min(60.0, 3000 / grid.buses))
    scale = {"cmap": "viridis", "vmin": low.min(), "vmax": high.max()}
    drawn = axes.scatter(*place.T, c=vm, s=size, edgecolors=np.where(broken, _RED, "0.3"), zorder=2, **scale)
    axes.set(xticks=[], yticks=[], aspect="equal")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return drawn


def _balance(problem: ACOPF, y: Tensor, x: Tensor) -> str:
    """The largest imbalance at a bus, and the cost."""
    at, loads = y.double().unsqueeze(0), x.double().unsqueeze(0)
    missing = problem.constraints.value(at, loads)[0, : 2 * problem.grid.buses].abs().max().item() * problem.grid.base
    size = "0" if missing < 1e-4 else f"{missing:,.1f}"
    return f"imbalance {size} MVA, {problem.objective(at, loads).item():,.0f} $/h"


def layout(problem: ACOPF) -> Array:
    """(buses, 2) places of buses: springs along branches, all buses apart; the same each time."""
    grid = problem.grid
    n, (f, t) = grid.buses, grid.ends
    place = np.random.default_rng(3).uniform(-1, 1, (n, 2))
    ideal = 1.5 / np.sqrt(n)
    for heat in np.linspace(0.2, 0.002, _ROUNDS):
        apart = place[:, None] - place[None]
        distance = np.linalg.norm(apart, axis=2) + 1e-9
        push = (apart * (ideal**2 / distance**2)[..., None]).sum(1)
        along = place[f] - place[t]
        pull = along * np.linalg.norm(along, axis=1, keepdims=True) / ideal
        np.add.at(push, f, -pull)
        np.add.at(push, t, pull)
        length = np.linalg.norm(push, axis=1, keepdims=True) + 1e-12
        place += push / length * np.minimum(length, heat)
    return place - place.mean(0)


def draw_plans(problem: MPC, plans: dict[str, Tensor], most: int = 12) -> Picture:
    """Ways past the ellipse, a colour for each planner.

    Args:
        problem: the problem.
        plans: who planned, and (N, K, 3) states.
        most: at most so many ways of each are drawn.
    """
    styles = ((BLUE, "-", 1.6), (ORANGE, "--", 1.0), (GREEN, ":", 1.2))
    with canvas((5.6, 4.0)) as figure:
        from matplotlib.patches import Ellipse

        axes = figure.subplots()
        for cx, cy, rx, ry in problem.obstacles.tolist():
            axes.add_patch(Ellipse((cx, cy), 2 * rx, 2 * ry, facecolor="0.88", edgecolor="0.45", label="keep out"))
        for (name, paths), (colour, line, width) in zip(plans.items(), styles, strict=False):
            for k, path in enumerate(paths[:most].cpu().numpy()):
                label = name if k == 0 else None
                axes.plot(path[:, 0], path[:, 1], line, color=colour, linewidth=width, label=label, alpha=0.85)
        starts = next(iter(plans.values()))[:most, 0].cpu()
        axes.plot(starts[:, 0], starts[:, 1], "o", color="0.3", markersize=3, label="start")
        axes.plot(*GOAL[:2], "x", color="0.1", markersize=7, label="goal")
        axes.set(xlabel="$p_x$ (m)", ylabel="$p_y$ (m)", aspect="equal")
        figure.legend(loc="outside lower center", ncols=5)
        caption = f"{min(most, len(starts))} starts; ways of {' and '.join(plans)}."
        return Picture(to_svg(figure), caption, f"Map of the ways of {' and '.join(plans)} past an ellipse.")
