r"""The general case: sets as users write them, repaired forward and backward, against IPOPT's solve of the problem.

AC optimal power flow, a controller's plan, a portfolio, an arm (`general_problems`). IPOPT solves some instances first,
each on one thread; one that it does not solve is left out. A prediction is an optimum and noise,

$$ \hat y = y^\ast + s \, \sigma \odot N(0, I), $$

with the standard deviation $\sigma$ of every variable over the optima, at least a thousandth of its range: s = 0.5, as
before training, and s = 0.01, as after it. Where a batch has more samples than there are optima, these are used again
with other noise.

"Dense" is `Nonlinear(..., sparsity=None)`; enforce-nn has dense systems of all variables and inequalities. Both take
smaller batches of large problems, for their memory, and are left out where their matrices have more than `dense` rows
or columns. Time and memory are per sample. That of one thread is its time on the processor, as IPOPT's is, which other
work on the machine does not lengthen; memory is what one pass adds at its peak. Samples are in the set if they violate
no row by more than 1e-8, recomputed. On a GPU there are, beside them, the forward pass alone, and a step of training
per batch of 200, both recorded: `SnareLayer(record=K)` with as many steps as the batch needs.

What IPOPT found is kept in `OUT/general-ipopt.jsonl` and what was measured in `OUT/general.jsonl`: remove the latter to
measure a new version. `python -m snarenet_lab.bench.general FOLDER` draws `FOLDER/general.svg` from
`FOLDER/general.json`.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snarenet as sn
from snarenet.constraints.compiled import at_once
from snarenet.constraints.maps import FunctionMap
from snarenet.reference.program import digest
from snarenet.reference.threads import one_thread
from snarenet.report.figures import BLUE, GREEN, ORANGE, canvas, log_axis, to_svg
from snarenet_lab.bench.common import Benchmark, Ledger, command_line, hardware, median_ms, peak_growth_mib, synchronize
from snarenet_lab.bench.general_problems import FORMS, General, Ipopt, acopf, arm, portfolio, unicycle
from snarenet_lab.bench.rivals import enforce_any
from snarenet_lab.files import write_text

TOL, FAR, NEAR = 1e-8, 0.5, 0.01
_FLOOR = 1e-3  # of a variable's range: the least deviation
_STEP = 200  # samples of a training step on a GPU
_FEW, _ROOM = 8, 2**20  # samples in a batch of those who form dense matrices: these, or as many as have so many entries
_SECONDS = 10.0  # of passes on the clock: slow ones are fewer
_SPARE = 2  # steps that a recording may need more than the repair itself
_MOST = 500  # iterations of IPOPT: those that find a point need some tens
_SMOOTHINGS = (1e-6, 1e-8, 1e-10)  # of enforce-nn, the first that gets there
OURS, DENSE, RIVAL, IPOPT = "snarenet", "snarenet, dense", "enforce-nn", "IPOPT"
_COLOURS = {OURS: BLUE, DENSE: ORANGE, RIVAL: "#7b5ea7", IPOPT: GREEN}
COLUMNS = (
    *("problem", "variables", "rows", "method", "samples", "ms", "one thread: ms", "IPOPT ms"),
    *("share of IPOPT's", "one thread: share of IPOPT's", "mean steps", "most steps", "in the set", "violation", "MiB"),
    *("near: ms", "near: mean steps", "near: most steps", "near: in the set", "IPOPT's steps", "unsolved by IPOPT"),
    *("forward: ms", "step: ms", "near: step: ms"),
)
Repair = Callable[[Tensor, Tensor], tuple[Tensor, Any]]  # (y, x) -> the repaired y, and steps: a number or a tensor


@dataclass(frozen=True)
class Case:
    """A problem, how many of its instances IPOPT solves, and how many predictions are repaired at a time.

    Attributes:
        build: makes the problem.
        instances: few where IPOPT takes seconds.
        batch: on a CPU.
        on_gpu: on a GPU.
    """

    build: Callable[[], General]
    instances: int = 50
    batch: int = 50
    on_gpu: int = 1000


CASES: dict[str, Case] = {
    **{f"AC-OPF {buses}": Case(partial(acopf, f"{buses}_ieee")) for buses in (30, 57, 118)},
    "AC-OPF 300": Case(partial(acopf, "300_ieee"), 16, 16),  # half of the instances have no feasible point
    "AC-OPF 1354": Case(partial(acopf, "1354_pegase"), 6, 4, 100),  # 100 MiB a sample
    **{f"unicycle {horizon}": Case(partial(unicycle, horizon), 16, 16) for horizon in (10, 20, 30, 100, 300)},
    **{f"portfolio, {form}": Case(partial(portfolio, 200, form)) for form in FORMS},
    "arm": Case(arm),
}


def measure(
    device: torch.device,
    out: Path,
    only: str | Sequence[str] | None = None,
    batch: int | None = None,
    repeats: int = 3,
    dense: int = 800,
    instances: int | None = None,
) -> Benchmark:
    """Measure what is not in `out/general.jsonl` yet, and draw `out/general.svg`; the repair must leave no sample out.

    Args:
        device: where the repairs run; IPOPT runs on the CPU.
        out: the folder.
        only: names in `CASES` or beginnings of them, one or several; all unless given.
        batch: how many predictions are repaired; by the case unless given.
        repeats: passes on the clock, fewer if they are slow.
        dense: the most rows or columns of those who form dense matrices; 0 for none of them.
        instances: how many IPOPT solves; by the case unless given.
    """
    ledger, solved = Ledger(out / "general.jsonl"), Ledger(out / "general-ipopt.jsonl")
    machine, rows = hardware(device), []
    for name in _chosen(only):
        case = CASES[name]
        try:
            problem = case.build()
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        optima = Optima(problem, instances or case.instances, solved)
        count = batch or (case.on_gpu if device.type == "cuda" else case.batch)
        for method in _methods(problem, optima, dense):
            size = min(count, max(_FEW, _ROOM // optima.entries[method])) if method in optima.entries else count
            key = {"case": name, "method": method, "batch": size, "optima": optima.digest, "hardware": machine}
            found = ledger.get(key, partial(_measured, method, problem, optima.start, size, repeats, device))
            rows.append(_row(name, method, size, found, optima))
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    title = f"Repair to {TOL:g}, forward and backward, a sample, against IPOPT's solve of the problem"
    table = Benchmark(title, COLUMNS, rows, command_line("general", device), machine)
    table = replace(table, failure=_left(table.records()))
    try:
        draw(table.records(), out / "general.svg")
    except ImportError as error:
        print(f"No figure: {error}", file=sys.stderr)
    return table


def _left(rows: Sequence[dict[str, Any]]) -> str:
    """Why the numbers are not as they must be: IPOPT finds a point of every set, so must we."""
    missed = [
        f"{1 - row[column]:.0%} of {row['problem']}, {place}"
        for row in rows
        for column, place in (("in the set", "half a deviation off"), ("near: in the set", "near"))
        if row["method"] == OURS and row[column] is not None and row[column] < 1
    ]
    return f"the repair leaves samples outside: {'; '.join(missed)}" if missed else ""


def _chosen(only: str | Sequence[str] | None) -> list[str]:
    """The cases of these names, or families of cases."""
    asked = tuple(CASES) if only is None else (only,) if isinstance(only, str) else tuple(only)
    family = {name: re.split("[ ,]", name)[0] for name in CASES}
    if unknown := [name for name in asked if name not in family and name not in family.values()]:
        raise ValueError(f"`only` must be of {'; '.join(CASES)}, but got {'; '.join(unknown)}")
    return [name for name in CASES if name in asked or family[name] in asked]


class Optima:
    """IPOPT's solutions of some instances, and predictions around them.

    Args:
        problem: what is solved.
        asked: how many instances are drawn.
        ledger: keeps what was found.
    """

    def __init__(self, problem: General, asked: int, ledger: Ledger) -> None:
        x = problem.draw(asked, torch.Generator().manual_seed(0))
        rows, box = problem.bounds(x[0])
        parts = (x, problem.typical, problem.constraints.value(problem.typical.expand(asked, -1), x), rows, box)
        self.digest = digest(*(part.numpy() for part in parts)).hex()[:16]
        found = ledger.get({"problem": problem.name, "digest": self.digest}, partial(_solve, problem, x))
        solved = torch.tensor(found["success"])
        self.x, self.y = x[solved], torch.tensor(found["y"], dtype=torch.float64)[solved]
        self.unsolved = int((~solved).sum())
        self.ms, self.steps = (
            float(np.median(np.array(found[name])[solved.numpy()])) if solved.any() else math.nan
            for name in ("ms", "iterations")
        )
        width = box[:, 1] - box[:, 0]
        least = _FLOOR * torch.where(width.isfinite(), width, 1.0)  # free variables are radians and metres
        self.spread = self.y.std(0).clamp_min(least) if len(self.y) > 1 else least
        self.shape = len(self.spread), len(rows)
        sides = rows[rows[:, 0] != rows[:, 1]].isfinite().sum() + box.isfinite().sum()
        self.columns = len(self.spread) + int(sides)  # of enforce-nn's systems
        self.entries = {DENSE: math.prod(self.shape), RIVAL: self.columns**2}

    def start(self, batch: int, offset: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """Predictions (B, n) so many deviations off optima, and their inputs."""
        index = torch.arange(batch) % len(self.y)
        noise = torch.randn(batch, self.shape[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return (self.y[index] + offset * self.spread * noise).to(device), self.x[index].to(device)


def _solve(problem: General, x: Tensor) -> dict[str, Any]:
    """What IPOPT finds for inputs (N, d), one after the other on one thread."""
    with one_thread():
        solver = Ipopt(problem, max_iter=_MOST)
        print(f"{problem.name}: IPOPT solves {len(x)} instances", file=sys.stderr, flush=True)
        found = [solver(one) for one in x]
    return {
        "y": [one.y.tolist() for one in found],
        "success": [one.success for one in found],
        "iterations": [one.iterations for one in found],
        "ms": [1e3 * one.seconds for one in found],
    }


def _methods(problem: General, optima: Optima, dense: int) -> list[str]:
    """Those that can take the problem."""
    if not len(optima.y):
        return []
    fits = max(optima.shape) <= dense
    instance = problem.constraints.at(*optima.start(2, FAR, torch.device("cpu")))
    sparse = any(isinstance(part, FunctionMap) and part.pattern is not None for part in instance.map.parts)
    rival = importlib.util.find_spec("enforce") is not None
    return [OURS] + [DENSE] * (fits and sparse) + [RIVAL] * (rival and optima.columns <= dense)


def _repair(method: str, constraints: sn.Constraints, y: Tensor, x: Tensor, setting: float | None) -> Repair:
    """A method for these predictions and inputs."""
    if method == RIVAL:
        assert setting is not None
        return enforce_any(constraints, y, x, TOL, setting)

    def run(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        solution = sn.repair(constraints, y, x, start=None, tol=TOL, rescue=True)  # as `SnareLayer` does
        return solution.value, solution.steps

    return run


class _Pass:
    """Forward and backward of a method from predictions at some distance; called, it makes one pass."""

    def __init__(self, method: str, constraints: sn.Constraints, start: tuple[Tensor, Tensor]) -> None:
        self.constraints, (self.y, self.x) = constraints, start
        self.y.requires_grad_()
        self.found: tuple[Tensor, Any] = self.y, 0
        for setting in _SMOOTHINGS if method == RIVAL else (None,):
            self.repair = _repair(method, constraints, self.y, self.x, setting)
            with at_once():  # else a function is compiled in a pass that is timed
                self()
            if self.outcome()["inside"] == 1.0:
                break

    def __call__(self) -> None:
        """One pass."""
        self.y.grad = None
        value, steps = self.repair(self.y, self.x)
        value.square().sum().backward()
        self.found = value.detach(), steps

    def outcome(self) -> dict[str, Any]:
        """What the last pass achieved."""
        value, steps = self.found
        violation = self.constraints.violation(value, self.x).nan_to_num(torch.inf)
        taken = torch.as_tensor(steps, dtype=torch.float64)
        return {
            "inside": (violation <= TOL).double().mean().item(),
            "violation": violation.max().item(),
            "mean": taken.mean().item(),
            "most": int(taken.max()),
        }

    def ms(self, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Median milliseconds a sample of so many passes, or of fewer if they are slow."""
        times: list[float] = []
        while len(times) < repeats and sum(times) < _SECONDS:
            synchronize(self.y.device)
            begin = clock()
            self()
            synchronize(self.y.device)
            times.append(clock() - begin)
        return 1e3 * statistics.median(times) / len(self.y)

    def ms_of_one_thread(self, repeats: int) -> float:
        """The same of one thread, in time on the processor, as IPOPT's."""
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.ms(repeats, time.thread_time)
        finally:
            torch.set_num_threads(count)


def _measured(
    method: str,
    problem: General,
    start: Callable[..., tuple[Tensor, Tensor]],
    size: int,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    """What a method takes from far and from near."""
    constraints = deepcopy(problem.constraints).to(device)
    if method == DENSE:
        for part in constraints.parts:
            if isinstance(part, sn.Nonlinear):
                part.structure = None  # as `sparsity=None` has it
    try:
        far = _Pass(method, constraints, start(size, FAR, device))
        gc.collect()
        mib = peak_growth_mib(far, device) / size
        found = {"far": far.outcome(), "ms": far.ms(repeats), "mib": mib}
        if device.type == "cpu":
            found["one"] = far.ms_of_one_thread(repeats)
        near = _Pass(method, constraints, start(size, NEAR, device))
        found |= {"near": near.outcome() | {"ms": near.ms(repeats)}}
        if device.type == "cuda" and method == OURS:
            steps = (_recorded(constraints, start(min(size, _STEP), off, device), repeats) for off in (FAR, NEAR))
            forward = _recorded(constraints, start(size, FAR, device), repeats, backward=False) / size
            found |= dict(zip(("step", "near step"), steps, strict=True)) | {"forward": forward}
        return found
    except torch.OutOfMemoryError:
        return {}


def _recorded(constraints: sn.Constraints, given: tuple[Tensor, Tensor], repeats: int, backward: bool = True) -> float:
    """Milliseconds of a recorded layer for a batch, with the number of steps that is fastest.

    Sums are rounded otherwise in a recording: with as many as the repair takes, a sample may be left to repair again.
    """
    y, x = given
    steps = max(1, int(sn.repair(constraints, y, x, start=None, tol=TOL, rescue=True).steps.max()))
    y.requires_grad_(backward)

    def measure(record: int) -> float:
        layer = sn.SnareLayer(constraints, tol=TOL, start=None, record=record)

        def run() -> None:
            value = layer(y, x)
            if backward:
                y.grad = None
                value.square().sum().backward()

        run()
        return median_ms(run, max(repeats, 5), y.device)

    with torch.set_grad_enabled(backward):
        return min(measure(steps + spare) for spare in range(_SPARE + 1))


def _row(name: str, method: str, size: int, found: dict[str, Any], optima: Optima) -> list[Any]:
    """The cells; empty ones for what did not fit into memory, and no time for who reached nothing."""
    far, near = found.get("far", {}), found.get("near", {})
    times = [found.get(name) if far.get("inside") else None for name in ("ms", "one")]
    shares = [None if ms is None else ms / optima.ms for ms in times]
    cells = [name, *optima.shape, method, size, *times, optima.ms, *shares]
    cells += [*map(far.get, ("mean", "most", "inside", "violation")), found.get("mib")]
    cells += map(near.get, ("ms", "mean", "most", "inside"))
    cells += [optima.steps, optima.unsolved]
    return [*cells, *map(found.get, ("forward", "step", "near step"))]


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Milliseconds a sample against variables on log axes: a colour for every method, a mark for every family.

    Of one thread, as IPOPT's are, where that was measured.
    """
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(re.split("[ ,]", row["problem"])[0], []).append(row)
    used = {row["method"] for row in rows} | {IPOPT}
    with canvas((5.6, 4.2)) as figure:
        axes, drawn = figure.subplots(), []
        for (family, mine), mark in zip(families.items(), "os^D", strict=False):
            axes.plot([], [], mark, color="0.4", label=family)
            for method in used:
                points = _points(mine, method)
                # the portfolio's are one problem in several forms
                axes.plot(*points.T, mark, ls="" if family == "portfolio" else "-", color=_COLOURS[method], ms=4.5)
                drawn.append(points)
        for method in (name for name in _COLOURS if name in used):
            axes.plot([], [], color=_COLOURS[method], label=method)
        sizes, costs = np.concatenate(drawn).T
        log_axis(axes, "x", sizes, "0")
        log_axis(axes, "y", costs, "0")
        axes.set(xlabel="variables (count)", ylabel="time of a sample (ms)")
        figure.legend(loc="outside lower center", ncols=4)
        picture = to_svg(figure)
    write_text(file, picture)


def _points(rows: Sequence[dict[str, Any]], method: str) -> np.ndarray[Any, Any]:
    """(k, 2) variables and milliseconds of a method in a family."""
    if method == IPOPT:
        found = {(row["variables"], row["IPOPT ms"]) for row in rows}
    else:
        mine = [row for row in rows if row["method"] == method]
        found = {(row["variables"], row["one thread: ms"] or row["ms"]) for row in mine}
    return np.array(sorted(point for point in found if point[1] is not None)).reshape(-1, 2)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(json.loads((folder / "general.json").read_text())["rows"], folder / "general.svg")
