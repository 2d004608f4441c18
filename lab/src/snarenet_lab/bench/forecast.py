"""Coherent forecasts: one network, trained alike, with nothing behind it, bottom-up, with MinT and with our layer.

The network corrects the naive forecast, what was a period before, in scales of the errors. Behind it

- nothing: it forecasts all series, which do not add up;
- bottom-up: it forecasts leaves, kept positive by softplus, and adds them up: coherent, but no series can be fixed;
- MinT: the forecasts of the first, reconciled by the covariance of their errors on the validation instances, with the
  shrinkage and the bound at zero of `hierarchicalforecast`, where that is installed;
- our layer, reconciling: the forecasts of the first, projected in the metric of the variances of those errors;
- our layer, trained through: it forecasts all series, and the layer reconciles them while it is trained.

The error is the mean square of scaled errors, as in RMSSE; samples are those of the point forecast with errors of the
validation instances added, and repaired again where a method can. The weights of the best validation count.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.problems import Forecast
from snarenet_lab.bench.common import Benchmark, Ledger, command_line, hardware

COLUMNS = (
    "series, known", "method", "error", "of known series", "largest violation", "CRPS", "training s", "ms an instance",
)  # fmt: skip
_MINT, _RECONCILING, _THROUGH = "MinT, shrunk, non-negative", "SnareNet, reconciling", "SnareNet, trained through"
_METHODS = ("no constraint", "bottom-up, softplus", _MINT, _RECONCILING, _THROUGH)
_SAMPLES = 50

Finish = Callable[[Tensor, Any], Tensor]  # from a network's forecasts and what a model sees to a method's forecasts


def measure(
    device: torch.device,
    out: Path,
    levels: str = "4x5",
    known: Sequence[float] = (0.0, 0.1),
    epochs: int = 40,
    seeds: int = 5,
) -> Benchmark:
    """Train and test every method on every hierarchy, with and without known series.

    Args:
        device: where.
        out: what was found is kept there, so that a stopped bench goes on.
        levels: hierarchies: children of the root, of each of these, and so on.
        known: probabilities of a series to be known in advance.
        epochs: of each training.
        seeds: trainings of each method; a row has the means.
    """
    ledger, rows = Ledger(out / "forecast.jsonl"), []
    for tree in levels.split(","):
        for share in known:
            problem = Forecast(levels=tuple(map(int, tree.split("x"))), known=share).to(device)
            for method in _METHODS:
                if method == _MINT and _mint_module() is None:
                    print("MinT is left out: pip install hierarchicalforecast", file=sys.stderr)
                    continue
                found = [
                    ledger.get(
                        {"levels": tree, "known": share, "method": method, "epochs": epochs, "seed": seed},
                        lambda method=method, problem=problem, seed=seed: run(problem, method, epochs, seed),
                    )
                    for seed in range(seeds)
                ]
                means = [sum(one[key] for one in found) / seeds for key in ("error", "fixed")]
                worst = max(one["violation"] for one in found)
                rest = [sum(one[key] for one in found) / seeds for key in ("crps", "seconds", "ms")]
                fixed = means[1] if share else None
                rows.append([f"{problem.size}, {share:.0%}", method, means[0], fixed, worst, *rest])
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    title = f"Forecasts up to 4 steps ahead, {epochs} epochs, {seeds} seeds"
    return Benchmark(title, COLUMNS, rows, command_line("forecast", device), hardware(device))


class Corrector(nn.Module):
    """The naive forecast, corrected by an MLP in scales of the errors: (B, n), or (B, leaves) of leaves alone."""

    def __init__(self, problem: Forecast, width: int = 200, leaves: bool = False) -> None:
        super().__init__()
        assert problem.features is not None
        self.problem, self.count = problem, problem.hierarchy.summing.shape[1] if leaves else problem.size
        self.net = sn.MLP(problem.features, self.count, width)

    def forward(self, x: Tensor) -> Tensor:
        """Forecasts for what a model sees of x, in float64."""
        found = self.net(x.float()).double()
        return self.problem.season(x)[:, -self.count :] + self.problem.scale[-self.count :] * found


def run(problem: Forecast, method: str, epochs: int, seed: int) -> dict[str, float]:
    """Train a method and test it: "error", "fixed", "violation", "crps", "seconds" and "ms"."""
    torch.manual_seed(seed)
    softplus, through = method.startswith("bottom"), method == _THROUGH
    net = Corrector(problem, leaves=softplus).to(problem.inputs.device)
    layer = sn.SnareLayer(problem.constraints, weights=problem.weights, on_failure="ignore")
    S = torch.from_numpy(problem.hierarchy.summing).to(problem.inputs)

    def forecast(raw: Tensor, x: Tensor) -> Tensor:
        """What a method makes of the network's forecasts."""
        if through:
            return layer(raw, x)
        scale = problem.scale[-raw.shape[1] :]
        return (scale * nn.functional.softplus(raw / scale)) @ S.T if softplus else raw

    def loss(raw: Tensor, x: Tensor) -> Tensor:
        """What training minimises; outputs at zero go on learning."""
        if not through:
            return problem.objective(forecast(raw, problem.seen(x)), x).mean()
        found = layer.solve(raw, problem.seen(x))
        error = problem.objective(found.value, x).mean()
        return error + layer.proximity(found, error)

    begin = time.perf_counter()
    layer.tol = 1e-6
    _train(problem, net, forecast, loss, epochs)
    layer.tol = 1e-8
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        valid = problem.split("valid")
        before = net(problem.seen(valid))
        if method == _MINT:
            finish = mint(problem, before, problem.target(valid))
        elif method == _RECONCILING:
            finish = reconciling(problem, before, problem.target(valid))
        else:
            finish = forecast
        return _tested(problem, net, finish, method) | {"seconds": seconds}


def _train(problem: Forecast, net: nn.Module, forecast: Finish, loss: Callable[..., Tensor], epochs: int) -> None:
    """AdamW with a cosine, in batches of 100; the weights of the best validation stay."""
    data, valid = problem.split("train"), problem.split("valid")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(data) / 100))
    best, kept = math.inf, copy.deepcopy(net.state_dict())
    for _ in range(epochs):
        for index in torch.randperm(len(data), device=data.device).split(100):
            x = data[index]
            optimizer.zero_grad()
            loss(net(problem.seen(x)), x).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            score = problem.objective(forecast(net(problem.seen(valid)), problem.seen(valid)), valid).mean().item()
        if score < best:
            best, kept = score, copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)


def _tested(problem: Forecast, net: nn.Module, finish: Finish, method: str) -> dict[str, float]:
    """Errors of the point forecast and of samples on the test instances."""
    valid, test = problem.split("valid"), problem.split("test")
    raw, seen = net(problem.seen(test)), problem.seen(test)
    begin = time.perf_counter()
    y = finish(raw, seen)
    ms = 1e3 * (time.perf_counter() - begin) / len(test)
    errors = problem.target(valid) - finish(net(problem.seen(valid)), problem.seen(valid))
    draw = torch.Generator().manual_seed(0)
    picks = torch.randint(len(errors), (len(test), _SAMPLES), generator=draw).to(errors.device)
    samples = y.unsqueeze(1) + errors[picks]
    if method in (_RECONCILING, _THROUGH):
        every = seen.repeat_interleave(_SAMPLES, 0)
        samples = finish(samples.flatten(0, 1), every).unflatten(0, (len(test), _SAMPLES))
    elif not method.startswith("no"):
        samples = samples.clamp(min=0)  # not coherent any more
    target, mask = problem.target(test), problem.fixed(test)[0]
    score = sn.problems.crps(samples, target) / problem.scale
    square = ((y - target) / problem.scale).square()
    return {
        "error": square.mean().item(),
        "fixed": square[mask].mean().item() if mask.any() else 0.0,
        "violation": problem.constraints.violation(y, seen).max().item(),
        "crps": score.mean().item(),
        "ms": ms,
    }


def reconciling(problem: Forecast, forecasts: Tensor, target: Tensor) -> Finish:
    """Projection of forecasts in the metric of the variances of these forecasts' errors."""
    weights = (target - forecasts).var(0).reciprocal()
    return sn.SnareLayer(problem.constraints, weights=weights)


def mint(problem: Forecast, forecasts: Tensor, target: Tensor) -> Finish:
    """Reconciliation of forecasts by MinT, with the covariance of these forecasts' errors; it knows nothing of x."""
    methods = _mint_module()
    if methods is None:
        raise ImportError("MinT needs hierarchicalforecast: pip install hierarchicalforecast")
    solver = methods.MinTrace(method="mint_shrink", nonnegative=True)

    def reconcile(y: Tensor, x: Tensor) -> Tensor:
        columns = {"y_hat": y, "y_insample": target, "y_hat_insample": forecasts}
        with warnings.catch_warnings():  # it says that it makes matrices sparse, and that it cuts off at zero
            warnings.simplefilter("ignore")
            found = solver.fit_predict(
                S=problem.hierarchy.summing, **{name: tensor.T.cpu().numpy() for name, tensor in columns.items()}
            )
        return torch.from_numpy(np.ascontiguousarray(found["mean"].T)).to(y)

    return reconcile


def _mint_module() -> Any:
    """The methods of `hierarchicalforecast`; None where it is not installed."""
    try:
        return importlib.import_module("hierarchicalforecast.methods")
    except ImportError:
        return None
