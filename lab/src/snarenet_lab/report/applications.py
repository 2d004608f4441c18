"""`python -m snarenet_lab.report.applications acopf|mpc RUN ... --docs docs`: runs beside what the field has published.

Writes `data/NAME.json`, a row for each problem and length of training, the mean over its seeds, under the anchors. What
is there already stays, unless there is a new row of the same problem: folders of runs are large and may go. And it
draws `figures/NAME.svg` from the first run: a grid before and after the repair, or plans beside IPOPT's. Without a run
there are the anchors alone, and what is drawn is the repair of a point that no network has learned.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snarenet.problems import ACOPF, MPC, load
from snarenet.reference import solve
from snarenet.repair import repair
from snarenet.report.numbers import duration, percent, short
from snarenet.report.scenes import draw_grid, draw_plans
from snarenet.training import Run
from snarenet_lab.files import write_text

_KEYS = ("who", "what", "mean gap", "largest gap", "violation", "feasible", "time of an instance")
_OURS, _POLISHED = "**snarenet**", "; every result polished"
_PUBLISHED = "taken from its paper or result files"
_MEASURED = "measured with its published code and weights"

# Relative gaps to IPOPT's optimum; see the pages for what each leaves out.
ANCHORS: dict[str, list[tuple[str | None, ...]]] = {
    "acopf": [
        ("HProj", "118 buses, branch limits off", "0.30 %", "17 %", "1e-5", None, "47 ms"),
        ("network and exact projection", "118 buses, branch limits off", "0.24 %", None, "2.9e-5", None, "182 ms"),
        ("HProj", "30 buses", "1.74 %", "5.4 %", None, None, None),
        ("DC3", "57 buses, branch limits off", "0.3 %", None, "0.15 uncorrected", None, None),
        ("hard-constrained network (arXiv 2602.06255)", "118 buses", "< 1 %", None, "1e-4", None, "1/40 of a solver's"),
        ("CANOS, HH-MPNN", "to 10,000 buses", "< 1 %", None, "not hard", None, "33 to 65 ms"),
        ("IPOPT, one core", "57 / 118 buses, all limits", "0", "0", "1e-8", None, "17 / 49 ms"),
    ],
    "mpc": [
        ("HardNet++, 500 projections", "20 steps", "1.37 %", "18 %", "5.8e-2", None, None),
        ("DC3", "20 steps", "13.6 %", "122 %", "6.6e-2", None, None),
        ("soft penalty", "20 steps", "24.8 %", "123 %", "0.21", None, None),
        ("IPOPT, one core", "20 steps", "0", "0", "1e-8", None, "16 ms"),
    ],
}
_NOTES = {"acopf": _PUBLISHED, "mpc": _MEASURED}
_TITLES = {"acopf": "AC optimal power flow", "mpc": "A unicycle's plan past a keep-out zone"}


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each problem and length of training: mean gaps of its runs, the largest of all, median times."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        content = (run.sizes, run.config.epochs, run.config.batch, run.config.polish)
        settings.setdefault(json.dumps(content, sort_keys=True), []).append(run)
    return [_row(several) for several in settings.values()]


def _row(runs: Sequence[Run]) -> dict[str, Any]:
    found = [(run.summary(), run.instances()) for run in runs]
    if missing := [str(run.path) for run, both in zip(runs, found, strict=True) if None in both]:
        raise ValueError(f"there is no evaluation in {', '.join(missing)}: snarenet evaluate RUN")
    each = [(summary, arrays) for summary, arrays in found if summary is not None and arrays is not None]
    gaps = [arrays["gap"] / np.abs(arrays["objective"] - arrays["gap"]) for _, arrays in each]
    summary = each[0][0]
    feasible = [one["feasible"]["1e-08"] for one, _ in each]
    left_out = f"; {summary['infeasible']} without a feasible point" if summary.get("infeasible") else ""
    config = runs[0].config
    seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}, {config.epochs} epochs of batches of {config.batch}"
    if all(run.metrics() for run in runs):
        seeds += f", {duration(float(np.median([_seconds(run) for run in runs])))} on {_device(runs[0])}"
    polished = _POLISHED if config.polish == "all" else ""
    cells = (
        _OURS,
        f"{_setting(runs[0])}; {seeds}{polished}",
        _percent(float(np.mean([np.nanmean(gap) for gap in gaps]))),
        _percent(float(np.max([np.nanmax(gap) for gap in gaps]))),
        short(max(one["violation"] for one, _ in each)),
        f"{percent(min(feasible))} of {summary['instances']}{left_out}",
        duration(float(np.median([one["seconds"]["model"] for one, _ in each]))),
    )
    return dict(zip(_KEYS, cells, strict=True))


def _seconds(run: Run) -> float:
    """Of training."""
    return run.metrics()[-1]["seconds"]


def _device(run: Run) -> str:
    found = (run.environment() or {}).get("device", "cpu")
    return f"an {found}" if found.startswith("NVIDIA") else "a CPU"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _setting(run: Run) -> str:
    """What was solved, in the words of the anchors."""
    problem = run.make_problem()
    if isinstance(problem, ACOPF):
        return f"{problem.grid.buses} buses, all limits, {problem.sampler} loads"
    assert isinstance(problem, MPC)
    return f"{problem.horizon} steps"


def write(name: str, runs: Sequence[Run], docs: Path) -> None:
    """The table's data and the figure."""
    anchors = [dict(zip(_KEYS, anchor, strict=True)) for anchor in ANCHORS[name]]
    file, new = docs / "data" / f"{name}.json", rows(runs)
    stored = json.loads(file.read_text())["rows"] if runs and file.exists() else []
    done = {_problem(row) for row in new}
    kept = [row for row in stored if row["who"] == _OURS and _problem(row) not in done]
    content = {
        "title": _TITLES[name],
        "command": f"python -m snarenet_lab.report.applications {name} RUN ...",
        "note": f"Rows of others: {_NOTES[name]}. Ours: runs of `snarenet train {name}`, test instances.",
        "columns": list(_KEYS),
        "rows": anchors + sorted(new + kept, key=_size, reverse=True),
    }
    write_text(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    draw = draw_power if name == "acopf" else draw_control
    write_text(docs / "figures" / f"{name}.svg", draw(runs[0] if runs else None))


def _problem(row: dict[str, Any]) -> tuple[str, bool]:
    """What a row is about: the problem, and whether every result was polished."""
    what = row["what"]
    return what.partition(";")[0], what.endswith(_POLISHED)


def _size(row: dict[str, Any]) -> int:
    """The number that its problem begins with."""
    return int(row["what"].split()[0].replace(",", ""))


@torch.no_grad()
def draw_power(run: Run | None) -> str:
    """A grid before and after the repair, for the first test instance."""
    problem = load("acopf", instances=40) if run is None else run.load_problem()
    assert isinstance(problem, ACOPF)
    x = problem.split("test")[:1]
    if run is None:
        noise = torch.randn(1, problem.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        solution = repair(problem.constraints, problem.typical + 0.02 * noise, x, rescue=True)
    else:
        solution = run.load_model(problem).solve(x)
    return draw_grid(problem, {"prediction": solution.raw[0], "repaired": solution.value[0]}, x[0]).svg


@torch.no_grad()
def draw_control(run: Run | None) -> str:
    """Plans beside IPOPT's, for the first test instances."""
    problem = load("mpc", instances=200) if run is None else run.load_problem()
    assert isinstance(problem, MPC)
    x = problem.split("test")[:12]
    if run is None:
        name, plans = "an arc, repaired", repair(problem.constraints, problem.typical.expand(len(x), -1), x).value
    else:
        name, plans = "network and repair", run.load_model(problem).solve(x).value
    best = solve(problem, x, workers=1).value
    return draw_plans(problem, {name: problem.paths(plans, x), "IPOPT": problem.paths(best, x)}).svg


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the data and the figure of an application."""
    parser = argparse.ArgumentParser(prog="python -m snarenet_lab.report.applications", description=__doc__)
    parser.add_argument("name", choices=list(ANCHORS))
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, evaluated")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder with data/ and figures/ in it")
    asked = parser.parse_args(arguments)
    write(asked.name, [Run.open(path) for path in asked.runs], asked.docs)


if __name__ == "__main__":
    main()
