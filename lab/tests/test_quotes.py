"""Numbers in prose: each sentence here is written with what the stored results say now, and must stand in its page."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from snarenet.report.numbers import short
from snarenet_lab.report.results import Row
from snarenet_lab.report.results_page import read_results

ROOT = Path(__file__).parents[2]


@cache
def rows(item: str, sheet: str = "") -> list[Row]:
    """The rows of an item's tables, or of one of them."""
    (results,) = [results for results in read_results(ROOT / "docs" / "results") if results.item == item]
    return [row for table in results.sheets if sheet in ("", table.key) for row in table.rows]


def cell(item: str, label: str, source: str, key: str = "gap_gmean", sheet: str = "") -> float:
    """The mean in a cell of a reproduction's table."""
    (row,) = [row for row in rows(item, sheet) if (row.label, row.source) == (label, source)]
    mean = row.cells[key].mean
    assert mean is not None
    return mean


@cache
def table(name: str) -> list[dict[str, Any]]:
    """The rows of `data/NAME.json`."""
    return json.loads((ROOT / "docs" / "data" / f"{name}.json").read_text())["rows"]


def entry(name: str, column: str, **where: str) -> Any:
    """What `data/NAME.json` has in a column of the only row with these texts, which may have wildcards."""
    (row,) = [row for row in table(name) if all(fnmatchcase(row[key], text) for key, text in where.items())]
    return row[column]


def per_cent(text: str, digits: int = 1) -> str:
    """'0.00077 %' with so many digits."""
    return f"{float(text.removesuffix(' %')):.{digits}g} %"


def few(*values: float) -> list[str]:
    return [short(value, 2) for value in values]


BEST, OURS = "SnareNet, tol 1e-8", "?*snarenet*"
TEXTBOOK, SAME = ("nclp: textbook, damping 0.01", "nclp: snarenet, all rows, damping 0.01")


def repairs(column: str, method: str) -> float:
    return entry("bench-repair-cpu", column, **{"problem, method": method})


def general(column: str, problem: str, method: str) -> float:
    return entry("bench-general-cpu", column, problem=problem, method=method)


def found(setting: str) -> str:
    return f"{int(entry('bench-collection-cpu', 'all', setting=setting).split(' / ')[0]):,}"


def inequalities(count: int, source: str, key: str) -> float:
    return cell("inequalities", "SnareNet", source, key, f"qcqp-{count}")


def active_over_all(family: str, key: str) -> float:
    active, every = (cell("rows", f"{family}, {which} rows, μ = 0.001", "best", key) for which in ("active", "all"))
    return active / every


def above_the_paper(box: int) -> float:
    """By how many per cent the objective of our policy from a box is above that of the paper's."""
    ours, paper = (cell("cbf", "SnareNet", source, "objective", f"box-{box}") for source in ("parity", "paper"))
    return 100 * (ours / paper - 1)


def least_of_paper(item: str) -> float:
    """The least gap of the paper's rows."""
    return min(row.cells["gap_gmean"].mean or 1 for row in rows(item) if row.source == "paper")


def says(page: str, sentence: str, *values: Any) -> None:
    """The page has the sentence, with these values."""
    assert sentence.format(*values) in " ".join((ROOT / page).read_text().split())


def test_readme() -> None:
    says(
        "README.md",
        "about {:.0f} times faster than a textbook version on two CPU cores, in {:.0f} MiB instead of {:.1f} GiB",
        round(repairs("times faster", SAME), -1),
        repairs("MiB", SAME),
        repairs("MiB", TEXTBOOK) / 1024,
    )
    says(
        "README.md",
        "The paper's best on this problem is {}. With five seeds and a larger network on a GPU {}, and {} under 50 "
        "curved constraints, where the paper's is {}:",
        *few(least_of_paper("damping"), cell("nclp", BEST, "best")),
        *few(*(cell("qcqp", BEST, source) for source in ("best", "paper"))),
    )
    power, plans = (entry(name, "mean gap", who=OURS, what=what) for name, what in (("acopf", "118 *"), ("mpc", "*")))
    says("README.md", "with 118 buses and all limits on the mean gap is {} on 500 unseen loads", per_cent(power))
    says("README.md", "plans of a vehicle past an obstacle are {} off the best on 833 unseen starts", per_cent(plans))


def test_inequalities() -> None:
    says(
        "docs/results.md",
        "SnareNet under 50 of them is where the paper is, largest gap {:.3f}, there {:.3f}; under 10 ours is {:.0f} "
        "times closer than the paper's row",
        *(inequalities(50, source, "gap_max") for source in ("parity", "paper")),
        inequalities(10, "paper", "gap_gmean") / inequalities(10, "parity", "gap_gmean"),
    )
    says(
        "docs/results.md",
        "ours is ahead of it ({:.3f}, largest {:.3f}; the paper's {:.3f}, {:.3f})",
        *(inequalities(100, source, key) for source in ("parity", "paper") for key in ("gap_gmean", "gap_max")),
    )


def test_results() -> None:
    says(
        "docs/results.md",
        "after the 1,000 epochs of the warm-up table its gap is {} without, {} with soft epochs and {} with AdaRel, "
        "where the best of the paper's rows has {}.",
        *few(*(cell("warmup", f"annealed, {warmup}", "parity") for warmup in ("none", "soft", "AdaRel"))),
        *few(least_of_paper("warmup")),
    )
    says(
        "docs/results.md",
        "with a proximity term active rows train about as well as all rows on NCLP, and to a gap {:.1f} times as large "
        "on QCQP (the largest: {:.1f} times), in about half the steps",
        *(active_over_all("qcqp", key) for key in ("gap_gmean", "gap_max")),
    )
    assert active_over_all("nclp", "gap_gmean") == pytest.approx(1, abs=0.2)
    for family in ("nclp", "qcqp"):
        assert active_over_all(family, "steps") == pytest.approx(0.5, abs=0.15)
    says("docs/results.md", "SnareNet {:.0f} % above from box 1 and {:.0f} % from box 2", *map(above_the_paper, (1, 2)))


def test_performance() -> None:
    says(
        "docs/performance.md",
        "the repair finds a feasible point more often than IPOPT does: from {} starts, IPOPT from {}, or {} with two "
        "attempts.",
        *map(found, ("rescue", "IPOPT, least change", "IPOPT, the better")),
    )
    sparse, dense = (
        general("one thread: share of IPOPT's", "AC-OPF 118", method) for method in ("snarenet", "snarenet, dense")
    )
    says(
        "docs/performance.md",
        "A sample of AC-OPF on 118 buses takes {:.0f} % of IPOPT's solve on one thread, where dense systems take "
        "{:.0f} times as long as IPOPT;",
        100 * sparse,
        dense,
    )


def test_applications() -> None:
    polished = entry("acopf", "mean gap", who=OURS, what="300 *every result polished")
    says("docs/power.md", "Polished as well, they are {} off in the mean", polished)
    says("docs/control.md", "The largest gap is {}", entry("mpc", "largest gap", who=OURS))


def test_methods() -> None:
    names = ("Pi-net", "SnareNet, nearest=0", "SnareNet, nearest=20*", "SnareNet")
    says(
        "docs/methods.md",
        "at equal epochs on NCLP its gap is {}. That showed us what our repair lacked: without a start near the "
        "projection (`nearest=0`) it reached {}, with 20 iterations {}, and with 35 that weigh the variables by the "
        "curvature of the objective {}",
        *(entry("compare-nclp", "gap gmean", method=name).split(" ± ")[0] for name in names),
    )
