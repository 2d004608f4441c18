"""From how many starts is a point of the set found? Every setting of the repair, IPOPT and SLSQP on `SYSTEMS`.

A system is tried from its standard start, and from three starts at 10 % and three at 100 % of its size around it, in
float64. A success is a y that violates no bound by more than 1e-6, as the set itself says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import snarenet as sn
from snarenet.reference.program import digest
from snarenet_lab.bench.common import Benchmark, Ledger, command_line, hardware
from snarenet_lab.bench.feasibility import TOLERANCE, Ipopt, Slsqp, Solver
from snarenet_lab.systems import SYSTEMS, System

OURS, RIVAL = "rescue", "IPOPT, the better"
REPAIRS: dict[str, dict[str, Any]] = {
    "paper": {"rows": "all", "damping": 0.01, "max_steps": 200},  # as many steps as its authors take
    "defaults": {},
    "adaptive damping": {"rows": "active", "damping": sn.Adaptive()},
    OURS: {"rescue": True},
}
SOLVERS: dict[str, Callable[[System], Solver]] = {
    "IPOPT, least change": lambda system: Ipopt(system, nearest=True),
    "IPOPT, no objective": lambda system: Ipopt(system, nearest=False),
    "SLSQP, least change": Slsqp,
}
_PARTS = ("development", "held out", "all", "standard start", "10 % around", "100 % around")
COLUMNS = ("setting", *_PARTS, "median steps", "most steps", "CPU seconds", "fails from the standard start")


class Tries(NamedTuple):
    """What a setting led to from the starts of one system: successes and steps, both (B,), and the CPU's seconds."""

    reached: Tensor
    steps: Tensor
    seconds: float


def measure(
    device: torch.device, out: Path, only: str | Sequence[str] | None = None, seeds: int = 3, solvers: bool = True
) -> Benchmark:
    """Try all settings on all systems; the rescue must reach as many as IPOPT does.

    Args:
        device: where the repairs run; the solvers run on the CPU.
        out: what the solvers found is kept in collection.jsonl there; the repairs are made anew.
        only: names of systems, one or several; all of them unless given.
        seeds: starts to draw at each distance.
        solvers: also IPOPT and SLSQP?
    """
    systems, ledger = _chosen(only), Ledger(out / "collection.jsonl")
    found: dict[str, list[Tries]] = {}
    for setting in (*REPAIRS, *SOLVERS) if solvers else REPAIRS:
        if setting in REPAIRS:
            found[setting] = [_repair(system, seeds, device, REPAIRS[setting]) for system in systems]
        else:
            found[setting] = [_solve(system, seeds, setting, ledger) for system in systems]
        print(setting, _share([tries.reached for tries in found[setting]]), sep=" | ", file=sys.stderr, flush=True)
    if solvers:
        least, free = (found[name] for name in list(SOLVERS)[:2])
        found[RIVAL] = [_better(a, b) for a, b in zip(least, free, strict=True)]
    rows = [_row(setting, systems, tries, seeds) for setting, tries in found.items()]
    title = f"{len(systems)} nonlinear systems from {1 + 2 * seeds} starts each, to {TOLERANCE:g}"
    return Benchmark(title, COLUMNS, rows, command_line("collection", device), hardware(device), _behind(found))


def _chosen(only: str | Sequence[str] | None) -> Sequence[System]:
    """The systems of these names."""
    known = {system.name: system for system in SYSTEMS}
    names = known if only is None else (only,) if isinstance(only, str) else only
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"`only` must be names in SYSTEMS, such as {SYSTEMS[0].name!r}, but got {', '.join(unknown)}")
    return [known[name] for name in names]


def _repair(system: System, seeds: int, device: torch.device, options: dict[str, Any]) -> Tries:
    """A repair from all starts of a system."""
    starts, constraints = system.starts(seeds), system.constraints()
    begin = time.process_time()
    with torch.no_grad():
        solution = sn.repair(constraints.to(device), starts.to(device), start=None, tol=TOLERANCE, **options)
    seconds = time.process_time() - begin
    reached = constraints.to("cpu").violation(solution.value.cpu()) <= TOLERANCE
    return Tries(reached, solution.steps.cpu(), seconds)


def _solve(system: System, seeds: int, setting: str, ledger: Ledger) -> Tries:
    """A solver from all starts of a system, once for as long as both stay as they are."""
    starts, constraints = system.starts(seeds), system.constraints()

    def run() -> dict[str, Any]:
        begin = time.process_time()
        solver = SOLVERS[setting](system)
        ends = [solver(start.numpy()) for start in starts]
        seconds = time.process_time() - begin
        y = torch.stack([torch.from_numpy(end.y) for end in ends])
        reached = constraints.violation(y) <= TOLERANCE
        return {"reached": reached.tolist(), "steps": [end.steps for end in ends], "seconds": seconds}

    parts = (starts, system.value(starts), *system.bounds(), *system.limits())
    key = {"system": system.name, "setting": setting, "digest": digest(*(part.numpy() for part in parts)).hex()[:16]}
    found = ledger.get(key, run)
    return Tries(torch.tensor(found["reached"]), torch.tensor(found["steps"]), found["seconds"])


def _better(a: Tries, b: Tries) -> Tries:
    """Both tried: a success is one of either, and steps are those of the shorter way, or of both where both failed."""
    either = a.reached | b.reached
    shorter = torch.where(
        a.reached & b.reached, torch.minimum(a.steps, b.steps), torch.where(a.reached, a.steps, b.steps)
    )
    return Tries(either, torch.where(either, shorter, a.steps + b.steps), a.seconds + b.seconds)


def _row(setting: str, systems: Sequence[System], tries: Sequence[Tries], seeds: int) -> list[Any]:
    """A setting's rates, steps and failures."""
    held = [system.held_out for system in systems]
    reached = [one.reached for one in tries]
    halves = [[r for r, h in zip(reached, held, strict=True) if h == half] for half in (False, True)]
    around = [slice(0, 1), slice(1, 1 + seeds), slice(1 + seeds, None)]
    shares = [_share(part) for part in (*halves, reached, *([r[place] for r in reached] for place in around))]
    steps = torch.cat([one.steps[one.reached] for one in tries])
    middle, most = (int(steps.median()), int(steps.max())) if len(steps) else (None, None)
    failures = [system.name for system, r in zip(systems, reached, strict=True) if not r[0]]
    return [setting, *shares, middle, most, sum(one.seconds for one in tries), "; ".join(failures)]


def _share(reached: Sequence[Tensor]) -> str:
    """Successes of tries."""
    total = torch.cat([*reached, torch.zeros(0, dtype=torch.bool)])
    return f"{int(total.sum())} / {len(total)}"


def _behind(found: dict[str, list[Tries]]) -> str:
    """Why the numbers are not as they must be: IPOPT is ahead of the rescue."""
    ours, rival = (sum(int(one.reached.sum()) for one in found.get(name, [])) for name in (OURS, RIVAL))
    return f"the rescue reaches {ours} sets, IPOPT {rival}" if ours < rival else ""
