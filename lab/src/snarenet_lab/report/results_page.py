"""The page of a reproduction: `write_results_page` turns a folder of results (ITEM.json) into one HTML file.

The paper's rows are marked as such. Tables can be sorted, and taken along as LaTeX or CSV; every row names its command.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from snarenet.report.html import document, gallery, prose, section
from snarenet.report.html import table as small_table
from snarenet.report.tables import Column
from snarenet.training.run import RunError
from snarenet_lab.files import write_text
from snarenet_lab.report.documents import read_item, remarks
from snarenet_lab.report.plots import pictures
from snarenet_lab.report.results import MEANING, Results, Row, Sheet, latex, wide_csv

_REPORT = "report.html"
_ORDER = (
    "nclp", "qcqp", "ncqcqp", "damping", "inequalities", "warmup", "soft", "cbf", "scaling", "theory", "rows"
)  # fmt: skip
_STYLE = """
body { max-width: 76rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
nav a { margin-right: .9rem; white-space: nowrap; }
.scroll { overflow-x: auto; border: 1px solid #e4e4e4; max-height: 80vh; }
.numbers { width: auto; min-width: 100%; font-size: .82rem; border-collapse: separate; border-spacing: 0; }
.numbers th, .numbers td { padding: .2rem .55rem; white-space: nowrap; background: #fff; }
.numbers thead th { position: sticky; top: 0; z-index: 2; background: #f4f7fb; color: #222; font-weight: 600;
                    cursor: pointer; white-space: normal; min-width: 4.6rem; vertical-align: bottom; }
.numbers th:first-child { position: sticky; left: 0; z-index: 1; color: #222; border-right: 1px solid #ddd;
                          white-space: normal; min-width: 9.5rem; max-width: 14rem; }
.numbers .first td, .numbers .first th { border-top: 1px solid #bbb; }
.numbers thead th:first-child { z-index: 3; }
.numbers thead th::after { content: " \\2195"; color: #9ab; font-weight: 400; }
.numbers thead th[aria-sort=ascending]::after { content: " \\2191"; color: #222; }
.numbers thead th[aria-sort=descending]::after { content: " \\2193"; color: #222; }
.numbers .from { text-align: left; }
.paper td, .paper th { background: #f3f1ea; font-style: italic; }
.tag { font-style: normal; font-size: .75rem; padding: 0 .35rem; border-radius: .5rem; color: #fff; }
.tag.paper { background: #6b6556; } .tag.parity { background: #3b6ea8; } .tag.best { background: #c1440e; }
.tag.solver, .tag.measured { background: #1b7837; }
.take { margin: .4rem 0; font-size: .9rem; } .take a { margin-right: 1rem; }
.grid { margin-top: 1.2rem; }
details { margin: .3rem 0; font-size: .9rem; } summary { cursor: pointer; color: #3b6ea8; }
pre { overflow-x: auto; background: #f6f6f6; padding: .6rem; font-size: .78rem; white-space: pre; }
.open { border-left: 4px solid #c1440e; padding: .2rem .9rem .2rem 1.8rem; }
@media (max-width: 40rem) { body { padding: .6rem .7rem 2rem; } .numbers { font-size: .76rem; }
                            .numbers th:first-child { min-width: 6.2rem; max-width: 6.2rem; } }
@media print { .scroll { overflow: visible; max-height: none; } .take, details { display: none; } }
"""
_SCRIPT = """
document.querySelectorAll("table.numbers thead th").forEach(function (head) {
  function sort() {
    var table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    var down = head.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("thead th").forEach(function (other) { other.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    function key(row) {
      var cell = row.cells[column], value = cell.dataset.value;
      return value === undefined ? cell.textContent : value === "" ? null : parseFloat(value);
    }
    Array.from(body.rows).sort(function (a, b) {
      var x = key(a), y = key(b);
      if (x === null || y === null) return (x === null) - (y === null);
      var order = typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true });
      return down ? -order : order;
    }).forEach(function (row) { body.appendChild(row); });
  }
  head.addEventListener("click", sort);
  head.addEventListener("keydown", function (event) { if (event.key === "Enter") sort(); });
});
"""


def write_results_page(folder: Path) -> Path:
    """Write `report.html` into a folder of results, and return its path."""
    found = read_results(folder)
    if not found:
        raise RunError(f"{folder} holds no run, and no results of `snarenet reproduce` (nclp.json ...)")
    write_text(folder / _REPORT, _page(found, folder))
    return folder / _REPORT


def read_results(folder: Path) -> list[Results]:
    """The results in a folder, in the order of the paper."""
    found = []
    for name in _ORDER:
        try:
            results = read_item(folder, name)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{folder / name}.json was not written by this version of snarenet: {error}") from error
        found += [] if results is None else [results]
    return found


def _page(found: list[Results], folder: Path) -> str:
    links = "".join(f'<a href="#{escape(item.item)}">{escape(item.item)}</a>' for item in found)
    rows = sum(len(sheet.rows) for item in found for sheet in item.sheets)
    budgets = ", ".join(dict.fromkeys(str(item.origin.get("budget", "?")) for item in found))
    legend = "".join(
        f'<li><span class="tag {source}">{source}</span> {prose(text)}</li>' for source, text in MEANING.items()
    )
    body = f"""<main>
<h1>The paper, done again</h1>
<p class="quiet">{escape(folder.resolve().name)} · budget {escape(budgets)} · {len(found)} items, {rows} rows</p>
<p class="lead">Tables and figures of the SnareNet paper: its own numbers, our runs of its recipe, and our best, side by
side. A click on a heading sorts a table.</p>
<ul class="quiet">{legend}</ul>
<nav>{links}</nav>
{"".join(_item(item, folder) for item in found)}
</main>
"""
    return document("snarenet: the paper, done again", body, _STYLE, _SCRIPT)


def _item(item: Results, folder: Path) -> str:
    listed = "".join(f"<li>{prose(remark)}</li>" for remark in remarks(item, folder))
    parts = [
        f"<p>{prose(item.about)}</p>",
        f'<ul class="open">{listed}</ul>' if listed else "",
        *(_table(item, sheet) for sheet in item.sheets),
        gallery([picture for spec in item.figures for picture in pictures(spec)]),
        _origin(item),
    ]
    return section(item.title, "\n".join(parts), item.item)


def _table(item: Results, sheet: Sheet) -> str:
    columns = sheet.table().columns
    head = "".join(f'<th scope="col" tabindex="0">{escape(column.heading)}</th>' for column in columns)
    used, labels = sheet.used(), [None, *(row.label for row in sheet.rows)]
    pairs = zip(sheet.rows, labels, strict=False)
    lines = "\n".join(_line(row, used, row.label != before, sheet.trained) for row, before in pairs)
    name = f"{item.item}-{sheet.key}"
    files = {"CSV": ("csv", wide_csv(sheet), "text/csv"), "LaTeX": ("tex", latex(sheet), "text/plain")}
    take = "".join(
        f'<a download="{escape(name)}.{suffix}" href="data:{kind};charset=utf-8,{quote(text)}">{label}</a>'
        for label, (suffix, text, kind) in files.items()
    )
    commands = "\n".join(f"{row.label}, {row.source}: {row.command}" for row in sheet.rows if row.command)
    return "\n".join(
        [
            f"<h3>{escape(sheet.title)}</h3>",
            f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead>',
            f"<tbody>\n{lines}\n</tbody></table></div>",
            f'<p class="quiet">{prose(sheet.note)}</p>' if sheet.note else "",
            f'<p class="take">Take it along: {take}</p>',
            f"<details><summary>LaTeX to copy</summary><pre>{escape(latex(sheet))}</pre></details>",
            f"<details><summary>Commands of these rows, first seed</summary><pre>{escape(commands)}</pre></details>"
            if commands
            else "",
        ]
    )


def _line(row: Row, columns: Sequence[Column], first: bool, trained: bool) -> str:
    cells = []
    for column in columns:
        cell = row.cell(column)
        value = "" if cell.mean is None else repr(cell.mean)
        cells.append(f'<td data-value="{value}">{escape(cell.write(column))}</td>')
    tag = f'<td class="from"><span class="tag {row.source}">{row.source}</span></td>'
    kind = " ".join(["paper"] * (row.source == "paper") + ["first"] * first)
    count = f'<td data-value="{row.done}">{escape(row.count)}</td>'
    if trained:
        count += f'<td data-value="{row.epochs or ""}">{escape(row.effort)}</td>'
    return f'<tr class="{kind}"><th scope="row">{escape(row.label)}</th>{tag}{count}{"".join(cells)}</tr>'


def _origin(item: Results) -> str:
    """Command and environment."""
    origin = dict(item.origin)
    command = f"<p>The numbers of this item: <code>{escape(str(origin.pop('command', '')))}</code></p>"
    machines: dict[str, Any] = origin.pop("trained on", {})
    environment: dict[str, Any] = origin.pop("environment", {})
    rows = [(str(key), str(value)) for key, value in {**origin, **environment}.items()]
    rows += [(f"trained on {machine}", f"{count} runs") for machine, count in machines.items()]
    return f"{command}<details><summary>Environment</summary>{small_table('', rows)}</details>"
