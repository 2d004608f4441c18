"""Tables inside pages: what stands between two markers is written by a program, from files beside the page.

    <!-- table: NAME -->
    <!-- end -->

`write_pages` fills every marker of a folder of pages, and makes the pages and figures of the results anew; `stale` says
what would change. Numbers are kept in `data/` and `results/` of that folder, so a text cannot disagree with them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from snarenet_lab.files import write_text
from snarenet_lab.report.documents import drawn, figure_file, mark, texts
from snarenet_lab.report.page_tables import TABLES
from snarenet_lab.report.results_page import read_results

_BLOCK = re.compile(r"<!-- table: (?P<name>[^\n]*?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)
_OPEN = re.compile(r"<!-- table: ([^\n]*?) -->")


def write_pages(folder: Path) -> list[Path]:
    """Write what has changed in a folder of pages; returns those files."""
    changed = stale(folder)
    for path, text in changed.items():
        write_text(path, text)
    return list(changed)


def stale(folder: Path) -> dict[Path, str]:
    """The files of a folder of pages that do not say what its data say, with what they should hold."""
    made = {path: fill(path.read_text(), folder) for path in sorted(folder.glob("*.md"))}
    results = folder / "results"
    old: dict[Path, str] = {}
    for item in read_results(results):
        made |= {results / name: text for name, text in texts(item, results).items()}
        figures = {results / figure_file(item, spec): spec for spec in item.figures}
        old |= {path: drawn(spec) for path, spec in figures.items() if mark(spec) not in _read(path)}
    return {path: text for path, text in made.items() if _read(path) != text} | old


def fill(page: str, folder: Path, tables: Mapping[str, Callable[[Path], str]] = TABLES) -> str:
    """The page with every table made anew."""
    found = [match["name"] for match in _BLOCK.finditer(page)]
    if found != _OPEN.findall(page):
        raise ValueError(f"every `<!-- table: NAME -->` needs an `<!-- end -->`: {_OPEN.findall(page)}, {found}")
    unknown = [name for name in found if name not in tables]
    if unknown:
        raise ValueError(f"tables are {', '.join(tables)}, but a page asks for {', '.join(unknown)}")
    return _BLOCK.sub(
        lambda match: f"<!-- table: {match['name']} -->\n{tables[match['name']](folder)}<!-- end -->", page
    )


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
