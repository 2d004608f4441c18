r"""Forecast: all series of a hierarchy, some steps ahead, coherent, not negative and true to what is known already,

$$ \min_y \; \tfrac1n \sum_i \Big( \frac{y_i - z_i}{s_i} \Big)^2 \quad \text{s.t.} \quad
   C y = 0, \; y \ge 0, \; y_i = v_i \text{ where } k_i = 1, $$

with z what happened and $s_i$ the root mean square of the changes of series i from one time to the next, in the first
four fifths of the observations (the scale of RMSSE, the score of the M5 competition).

A model sees the first `features` entries of x: the history of the leaves, the season, how far to look ahead, and which
series are known in advance (k) with their values (v): a contract, a budget, a shop that is closed. What happened stands
behind them, for the objective alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints import Box, Linear
from snarenet.problems.base import Problem, check_sizes
from snarenet.problems.hierarchy import Array, Hierarchy, read_csv, synthetic

_EARLY = 0.8  # share of the observations that scales are taken from: no more than is trained on
_SMALLEST = 0.01  # of the mean over all series: the least s_i of a series that hardly changes, or is hardly there
_LENGTH = 1000  # of synthetic series


class Forecast(Problem):
    """The family above, on synthetic series or a file of your own.

    An instance is a time and a number of steps to look ahead, and instances are in the order of time: what is tested is
    later than what was trained on.

    Args:
        levels: children of the root, of each of these, and so on: (4, 5) has 1 + 4 + 20 series.
        csv: a file of observations instead, see `snarenet.problems.hierarchy.read_csv`.
        hierarchy: the file of its summing matrix, if the names of the leaves are not paths.
        history: how many values of each leaf a model sees, and the one a period before the target.
        horizon: how many steps ahead at most.
        period: of the season.
        known: probability of a series to be known in advance.
        missing: probability of a synthetic value not to be observed.
        seed: of all that is random.
    """

    convex = True
    starts = 1

    def __init__(
        self,
        levels: tuple[int, ...] = (4, 5),
        csv: str = "",
        hierarchy: str = "",
        history: int = 8,
        horizon: int = 4,
        period: int = 52,
        known: float = 0.0,
        missing: float = 0.0,
        seed: int = 2025,
    ) -> None:
        super().__init__()
        check_sizes(history=history, horizon=horizon, period=period)
        check_sizes(0, seed=seed)
        for name, share in {"known": known, "missing": missing}.items():
            if not 0 <= share < 1:
                raise ValueError(f"`{name}` must be in [0, 1), but got {share!r}")
        if horizon > period:
            raise ValueError(f"`horizon` must be at most `period` = {period}, but got {horizon}")
        draw = np.random.default_rng(seed)
        if csv:
            seen = read_csv(Path(csv), Path(hierarchy) if hierarchy else None)
        else:
            seen = synthetic(Hierarchy.from_levels(tuple(levels)), _LENGTH, period, missing, draw)
        self.observations, self.hierarchy = seen, seen.hierarchy
        self.history, self.horizon, self.period, self.known = history, horizon, period, known
        self._collect(draw)
        C = torch.from_numpy(self.hierarchy.coherence)
        self.constraints = Linear(C, equals=0.0) & Box(self._lowest, self._highest)

    scale: Tensor
    level: Tensor

    def _collect(self, draw: np.random.Generator) -> None:
        """The inputs of all instances, the scales s, and the means of the series, in which a model sees them."""
        leaves, values = self.observations.leaves, self.observations.values
        first = max(self.period, self.history)
        origins = range(first - 1, len(leaves) - self.horizon)
        if len(origins) < 10:
            least = first + self.horizon + 9
            raise ValueError(f"at least {least} observations are needed for these sizes, but there are {len(leaves)}")
        self.size = len(self.hierarchy.names)
        early = values[: int(_EARLY * len(values))]
        for name, found in {"scale": _changes(early), "level": _means(early)}.items():
            self.register_buffer(name, torch.from_numpy(found))
        targets = np.stack([values[origin + 1 : origin + 1 + self.horizon] for origin in origins])
        masks = (draw.random(targets.shape) < self.known) & np.isfinite(targets)
        x = [
            self._input(origin, lead, mask, target, target)
            for origin, row, marks in zip(origins, targets, masks, strict=True)
            for lead, (target, mask) in enumerate(zip(row, marks, strict=True), 1)
        ]
        self.register_buffer("inputs", torch.from_numpy(np.stack(x)))
        self.features = self.inputs.shape[1] - self.size

    def _input(self, origin: int, lead: int, mask: Array, known: Array, target: Array) -> Array:
        """An x: what a model sees at the time `origin`, with what is known of `lead` steps later, and what happened."""
        leaves, level, aim = self.observations.leaves, self.level.numpy(), origin + lead
        recent = np.vstack([leaves[origin - self.history + 1 : origin + 1], leaves[aim - self.period]])
        shape = recent / level[-recent.shape[1] :]
        angle = 2 * np.pi * aim / self.period
        calendar = [np.sin(angle), np.cos(angle), lead / self.horizon]
        gaps = np.isnan(recent).mean(0)
        plan = np.where(mask, known / level, 0.0)
        return np.concatenate([np.nan_to_num(shape).ravel(), gaps, calendar, mask, plan, target])

    def ahead(self, lead: int = 1, known: Mapping[str, float] | None = None) -> Tensor:
        """(1, features) what a model sees at the end of the observations, to look `lead` steps ahead.

        Args:
            lead: how many steps, at most the horizon.
            known: values of series that are known in advance, by name.
        """
        if not 1 <= lead <= self.horizon:
            raise ValueError(f"`lead` must be from 1 to the horizon {self.horizon}, but got {lead!r}")
        mask, value = np.zeros(self.size), np.zeros(self.size)
        for name, number in (known or {}).items():
            if name not in self.hierarchy.names:
                raise ValueError(f"`known` must name series such as {self.hierarchy.names[:3]}, but got {name!r}")
            mask[self.hierarchy.names.index(name)], value[self.hierarchy.names.index(name)] = 1.0, number
        x = self._input(len(self.observations.leaves) - 1, lead, mask.astype(bool), value, value)
        return self.seen(torch.from_numpy(x).unsqueeze(0))

    def season(self, x: Tensor) -> Tensor:
        """(B, n) the naive forecast: what was a period before; zero for a leaf that is missing there."""
        count = self.hierarchy.summing.shape[1]
        leaves = x[:, self.history * count : (self.history + 1) * count] * self.level[-count:]
        return leaves @ torch.from_numpy(self.hierarchy.summing).to(x).T

    def target(self, x: Tensor) -> Tensor:
        """(B, n) what happened; NaN where nobody knows."""
        return x[:, -self.size :]

    def fixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, n) each: which series are known, and their values, zero for others."""
        mask, plan = self.seen(x)[:, -2 * self.size :].split(self.size, 1)
        return mask > 0.5, plan * self.level

    def _lowest(self, x: Tensor) -> Tensor:
        return self.fixed(x)[1]

    def _highest(self, x: Tensor) -> Tensor:
        mask, value = self.fixed(x)
        return torch.where(mask, value, torch.inf)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        error = (y - self.target(x)) / self.scale
        return torch.where(error.isnan(), 0.0, error).square().sum(1) / error.isfinite().sum(1).clamp(min=1)

    @property
    def weights(self) -> Tensor:
        return self.scale.square().reciprocal()

    @property
    def solvable(self) -> bool:
        """No: what happened is not known when a forecast is made, and no solver gets closer to it."""
        return False


def _changes(values: Array) -> Array:
    """(n,) the root mean square of changes, none of them tiny."""
    changes = np.diff(values, axis=0)
    found = np.sqrt(_means(changes**2, 0.0))
    return np.maximum(found, _SMALLEST * found.mean()) if found.any() else np.ones_like(found)


def _means(values: Array, least: float = _SMALLEST) -> Array:
    """(n,) means of what is there, each at least this share of their mean."""
    found = np.nansum(values, 0) / np.maximum(np.isfinite(values).sum(0), 1)
    return np.maximum(found, least * found.mean()) if found.any() else np.ones_like(found)


def crps(samples: Tensor, target: Tensor) -> Tensor:
    r"""(B, n) the continuous ranked probability score of samples (B, S, n), $E|Y - z| - \tfrac12 E|Y - Y'|$, unbiased.

    Args:
        samples: two or more of every forecast.
        target: (B, n) what happened.
    """
    if samples.ndim != 3 or samples.shape[1] < 2 or samples[:, 0].shape != target.shape:
        raise ValueError(
            f"`samples` must be (B, S, n) with two samples or more for a `target` (B, n), but got "
            f"{tuple(samples.shape)} and {tuple(target.shape)}"
        )
    count = samples.shape[1]
    ordered = samples.sort(1).values
    ranks = 2 * torch.arange(1, count + 1, dtype=samples.dtype, device=samples.device) - count - 1
    spread = (ranks[:, None] * ordered).sum(1) / (count * (count - 1))  # half of E|Y - Y'|
    return (samples - target.unsqueeze(1)).abs().mean(1) - spread
