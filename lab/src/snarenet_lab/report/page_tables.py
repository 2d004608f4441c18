"""The tables of the documentation: each a function of the folder that holds `data/` and `results/`, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from statistics import fmean
from typing import Any

from snarenet.report.numbers import DASH, brief, duration, percent, short
from snarenet.report.tables import Column, Table, markdown
from snarenet_lab.report.agreement import Verdict, grouped, verdicts
from snarenet_lab.report.documents import read_item
from snarenet_lab.report.results import Cell, Results, Row
from snarenet_lab.report.results_page import read_results

_FAMILIES = {"nclp": "NCLP", "qcqp": "convex QCQP-50", "ncqcqp": "`ncqcqp`"}
_SCALING = (
    "variables", "constraints", "epochs run", "seconds for 1,000 epochs", "paper's seconds", "times faster", "MiB",
    "paper's GB", "steps in training", "most steps in test", "paper's steps", "feasible to 1e-8",
)  # fmt: skip
_GENERAL = (
    "problem", "variables", "rows", "ms", "one thread: ms", "IPOPT ms", "share of IPOPT's",
    "one thread: share of IPOPT's", "steps, most", "in the set", "MiB", "near: ms", "near: steps, most",
)  # fmt: skip
_GENERAL_GPU = (
    "problem", "variables", "rows", "samples", "forward: ms", "ms", "step: ms", "near: step: ms", "steps, most",
    "near: steps, most", "in the set", "MiB",
)  # fmt: skip
_RIVALS = ("Pi-net", "HardNet++", "FSNet", "DC3", "HardNet", "OptNet", "Soft + projection", "HProj")
_STARTS = ("at the prediction", "at the projection")
_NOTHING = 1e-8  # a relative gap that is the solver's own error
_OF_PAPER = ("DC3", "HardNet", "HProj", "OptNet")


def stored(name: str, folder: Path) -> str:
    """A table as `data/NAME.json` holds it: texts as they are, numbers with three digits."""
    content = json.loads((folder / "data" / f"{name}.json").read_text())
    return _table(content["columns"], content["rows"])


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    first, *others = columns
    shown = [Column(first, first, "text"), *(Column(name, name, "brief") for name in others)]
    return Table(shown, rows).filled().markdown()


def compared(name: str, folder: Path) -> str:
    """Methods on a problem, means over their seeds, from what `snarenet compare` wrote: `data/compare-NAME.json`."""
    rows = []
    for method in json.loads((folder / "data" / f"compare-{name}.json").read_text())["rows"]:
        mean = partial(_mean, method["runs"])
        cells = {"method": method["label"].replace("SnareNet", "**SnareNet**"), "budget": method["budget"]}
        if method["runs"][0]["gap"]:
            gap = mean("gap", "relative")
            cells |= {"mean gap": f"{100 * gap:.2g} %" if gap > _NOTHING else "0 %"}
            cells |= {"at the optimum": percent(mean("gap", "optimal"))}
        else:
            cells |= {"error": brief(mean("objective", "mean"))}
        cells |= {"feasible to 1e-8": percent(mean("feasible", "1e-08"))}
        cells |= {"time of an instance": duration(mean("seconds", "model")), "training": duration(mean("training"))}
        rows.append(cells)
    return _table(list(rows[0]), rows)


def _mean(runs: Sequence[dict[str, Any]], *keys: str) -> float:
    """The mean of an entry of the runs' summaries, of those that have it: one seed of a method is timed."""
    found: list[Any] = [reduce(getitem, keys, run) for run in runs]
    return fmean(value for value in found if value is not None)


def scaling(folder: Path) -> str:
    """All sizes, and the one that all rows serve better."""
    plain, every = (
        json.loads((folder / "data" / f"bench-scaling{kind}-h200.json").read_text())["rows"]
        for kind in ("", "-all-rows")
    )
    rows = []
    for row in plain:
        again = [other for other in every if all(other[key] == row[key] for key in ("variables", "constraints"))]
        rows += [row, *(other | {"constraints": f"{other['constraints']:,}, `rows all`"} for other in again)]
    percents = [row | {"variables": brief(row["variables"]), _SCALING[-1]: percent(row[_SCALING[-1]])} for row in rows]
    return _table(_SCALING, percents)


def general(folder: Path) -> str:
    """Sets as users write them against IPOPT, a row for each problem and method; mean and most of the steps."""
    named = [row | {"problem": f"{row['problem']}: {row['method']}"} for row in _general(folder, "cpu")]
    return _table(_GENERAL, named)


def general_on_a_gpu(folder: Path) -> str:
    """The same on a GPU, of our repair alone."""
    return _table(_GENERAL_GPU, _general(folder, "h200"))


def _general(folder: Path, machine: str) -> list[dict[str, Any]]:
    """The rows of a bench, with mean and most of the steps in one cell."""
    rows = []
    for row in json.loads((folder / "data" / f"bench-general-{machine}.json").read_text())["rows"]:
        far, near = (f"{brief(row[f'{at}mean steps'])}, {brief(row[f'{at}most steps'])}" for at in ("", "near: "))
        shown = {"in the set": percent(row["in the set"]), "steps, most": far, "near: steps, most": near}
        rows.append(row | shown)
    return rows


def collection(folder: Path) -> str:
    """From how many starts each setting finds a point of the set; the names of failures have a table of their own."""
    content = json.loads((folder / "data" / "bench-collection-cpu.json").read_text())
    return _table(content["columns"][:-1], content["rows"])


def collection_failures(folder: Path) -> str:
    """The systems that the rescue or IPOPT does not solve from the standard start."""
    content = json.loads((folder / "data" / "bench-collection-cpu.json").read_text())
    names = {row["setting"]: row[content["columns"][-1]].split("; ") for row in content["rows"]}
    ours, rival = ([name for name in names[setting] if name] for setting in ("rescue", "IPOPT, the better"))
    lines = {
        "the rescue alone": [name for name in ours if name not in rival],
        "IPOPT alone": [name for name in rival if name not in ours],
        "both": [name for name in ours if name in rival],
    }
    return markdown(
        ["not solved by", "systems", "which"],
        [[who, str(len(which)), "; ".join(which) or DASH] for who, which in lines.items()],
    )


def field(machine: str, folder: Path, fixed: bool = False) -> str:
    """Milliseconds of every package for every start and tolerance, beside those of our defaults; `fixed`: one x."""
    lines = (folder / "data" / f"bench-field-{machine}.jsonl").read_text().splitlines()
    cases: dict[tuple[str, float, float], dict[str, Any]] = {}
    for line in map(json.loads, lines):
        key = line["key"]
        if key.get("fixed", False) == fixed:
            for tol, found in zip(key["tolerances"], line["found"]["passes"], strict=True):
                cases.setdefault((key["problem"], key["noise"], tol), {})[key["method"]] = found
    methods = dict.fromkeys(method for case in cases.values() for method in case)
    head = ["ms (times the first row)", *(_case(*case) for case in cases), "distance", "MiB"]
    body = []
    for method in methods:
        cells = [_times(case.get(method), next(iter(case.values()))) for case in cases.values()]
        near = [
            case[method] for (_, noise, tol), case in cases.items() if (noise, tol) == (0.5, 1e-8) and method in case
        ]
        far, memory = ([found[place] for found in near if not isinstance(found, str)] for place in (1, 5))
        body.append([method, *cells, ", ".join(f"{x:.2f}" for x in far), ", ".join(brief(x) for x in memory)])
    return markdown(head, body)


def _case(problem: str, noise: float, tol: float) -> str:
    return f"{'NCLP' if problem == 'nclp' else 'QCQP-50'}, s = {noise:g}, to {short(tol, 1)}"


def _times(found: Any, first: Any) -> str:
    """A time, and how many of the first it is."""
    if found is None:
        return ""
    if isinstance(found, str) or found[4] is None:
        return "failed" if isinstance(found, str) else f"not reached: {found[0]:.0e}"
    return brief(found[4]) + (f" ({brief(found[4] / first[4], 2)})" if found is not first else "")


def against_paper(folder: Path) -> str:
    """The competitors' gaps: the paper's, and those of `snarenet compare`."""
    rows = []
    for family in ("nclp", "qcqp"):
        results, name = _results(folder, family), _FAMILIES[family]
        compared = json.loads((folder / "data" / f"compare-{family}.json").read_text())["rows"]
        ours = {row["method"]: f"{row['gap gmean']}, {row['budget']}" for row in compared}
        paper = {row.label: row.cells["gap_gmean"] for row in results.sheets[0].rows if row.source == "paper"}
        gap = Column("gap_gmean", "")
        rows.append([f"{name}, the paper", *(paper.get(m, Cell()).write(gap) for m in _OF_PAPER)])
        rows.append([f"{name}, here", *(ours.get(m, DASH) for m in _OF_PAPER)])
    return markdown(["", *_OF_PAPER], rows)


def items(folder: Path) -> str:
    """How far every item of the reproduction is, and whether it agrees with the paper."""
    rows = []
    for results in read_results(folder / "results"):
        best, parity = (_rows(results, source) for source in ("best", "parity"))
        long = [row for row in parity if row.done and row.epochs >= row.paper_epochs]
        judged = [verdict for verdict in verdicts(results) if verdict.agrees is not None]
        counts = (
            (_complete(best), best),
            (long, parity),
            (_complete(long), parity),
            ([verdict for verdict in judged if verdict.agrees], judged),
        )
        found = [f"{len(some)} of {len(every)}" if every else DASH for some, every in counts]
        rows.append([_link(results), *found])
    head = [
        "item",
        "our rows with all seeds",
        "rows of the paper's recipe with all of its epochs",
        "and with all seeds",
        "within two standard deviations of the paper, of those that it has one for",
    ]
    return markdown(head, rows)


def parity(folder: Path) -> str:
    """Every row of the paper's recipe beside the paper's own, in the main quantity of its table."""
    rows = [
        [_link(results), name, verdict.row.count, verdict.row.effort, *_judged(verdict)]
        for results in read_results(folder / "results")
        for name, (verdict, *_) in grouped(verdicts(results)).items()
    ]
    return markdown(["item", "row", "seeds", "epochs", "ours", "the paper's", "agrees"], rows)


def _judged(verdict: Verdict) -> list[str]:
    """Our number, the paper's, and whether they agree; a dash if the paper has one seed, and no deviation."""
    agrees = {True: "yes", False: "no" if verdict.whole else "no, too few epochs", None: DASH}[verdict.agrees]
    return [verdict.ours_written, verdict.theirs_written, agrees]


def _complete(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.done == row.planned]


def _link(results: Results) -> str:
    return f"[{results.item}](results/{results.item}.md)"


def gaps(folder: Path) -> str:
    """The main result: the geometric mean of the gap and the largest, by method and family."""
    known = {family: _rows(_results(folder, family)) for family in _FAMILIES}
    lines = [("the paper's SnareNet", "SnareNet, tol 1e-8", "paper"), ("**ours**", "SnareNet, tol 1e-8", "best")]
    lines += [("**ours**, fresh inputs", "SnareNet, fresh inputs", "best"), *((m, m, "best") for m in _RIVALS)]
    body = []
    for name, label, source in lines:
        found = [[row for row in rows if (row.label, row.source) == (label, source)] for rows in known.values()]
        body.append([name, *(_gap(rows[0]) if rows else DASH for rows in found)])
    return markdown(["", *_FAMILIES.values()], body)


def starts(folder: Path) -> str:
    """What the start brings: the recipe `best` with simpler ones, and as it is."""
    stored = json.loads((folder / "data" / "starts-h200.json").read_text())["rows"]
    body = []
    for family, title in _FAMILIES.items():
        (ours,) = [row for row in _rows(_results(folder, family), "best") if row.label == "SnareNet, tol 1e-8"]
        found = {row["start"]: row for row in stored if row["family"] == family}
        body.append([title, *(_stored_gap(found.get(start)) for start in _STARTS), _gap(ours)])
    return markdown(["", *_STARTS, "at the projection of a step down the objective"], body)


def _stored_gap(stored: dict[str, Any] | None) -> str:
    if stored is None:
        return DASH
    cells = {key: Cell.of(stored[key]) for key in ("gap_gmean", "gap_max")}
    return _gap(Row("", "best", cells, len(stored["seeds"]), epochs=stored["epochs"]))


def _gap(row: Row) -> str:
    """A gap with its deviation, the largest, and what must be known with it: epochs, missing seeds, feasibility."""
    mean, most = row.cells.get("gap_gmean", Cell()), row.cells.get("gap_max", Cell())
    if mean.mean is None:
        return DASH
    kept, feasible = row.cells.get("kept", Cell(1.0)).mean, row.cells.get("feasible", Cell()).mean
    notes = [f"{row.effort} epoch{'s' if row.epochs > 1 else ''}"] if row.epochs else []
    notes += [f"{row.count} seeds"] if row.done != row.planned and row.planned else []
    notes += [f"{percent(feasible)} feasible to 1e-4"] if kept is not None and kept < 1 and feasible is not None else []
    spread = f" ± {short(mean.spread, 1)}" if mean.spread else ""
    return f"{short(mean.mean, 2)}{spread} ({short(most.mean, 2)})" + (f"; {', '.join(notes)}" if notes else "")


def _rows(results: Results, source: str = "") -> list[Row]:
    return [row for sheet in results.sheets for row in sheet.rows if source in ("", row.source)]


def _results(folder: Path, item: str) -> Results:
    found = read_item(folder / "results", item)
    if found is None:
        raise FileNotFoundError(f"{folder / 'results' / item}.json is not there")
    return found


_STORED = (
    "ablation-h200", "acopf", "bench-damping-cpu", "bench-forecast-cpu", "bench-growth-h200", "bench-matrix-free-cpu",
    "bench-nearest-cpu", "bench-parallel-cpu", "bench-polish-cpu", "bench-portfolio-cpu", "bench-portfolio-h200",
    "bench-race", "bench-repair-cpu", "bench-repair-h200", "bench-robustness-cpu", "bench-settings-cpu", "compare-nclp",
    "compare-qcqp", "matrix-free-starts-cpu", "methods", "mpc", "training-steps-h200",
)  # fmt: skip
_COMPARED = ("acopf", "forecast", "mpc", "portfolio")
_PLAIN = {name: partial(stored, name) for name in _STORED} | {f"compare-{n}": partial(compared, n) for n in _COMPARED}
TABLES: dict[str, Callable[[Path], str]] = _PLAIN | {
    "against-paper": against_paper,
    "collection": collection,
    "collection-failures": collection_failures,
    "field-cpu": partial(field, "cpu"),
    "field-core": partial(field, "core"),
    "field-core-fixed": partial(field, "core", fixed=True),
    "field-h200": partial(field, "h200"),
    "gaps": gaps,
    "general": general,
    "general-h200": general_on_a_gpu,
    "items": items,
    "parity": parity,
    "scaling": scaling,
    "starts": starts,
}
