"""Tables of results: the paper's numbers beside ours, as data, and as Markdown, LaTeX and CSV.

A cell is a mean over seeds with its standard deviation, and the value of every seed. All of it goes to JSON and back.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, Literal

from snarenet.report.tables import duration, percent

Source = Literal["paper", "parity", "best", "solver", "measured"]
Style = Literal["short", "number", "percent", "seconds", "count"]

MEANING: dict[Source, str] = {
    "paper": "what the paper prints",
    "parity": "our run of the paper's recipe",
    "best": "our run of the recipe `best`",
    "solver": "a classical solver, run by us",
    "measured": "measured by us, without training",
}


@dataclass(frozen=True)
class Column:
    """A quantity.

    Attributes:
        key: its name in a row's cells.
        label: the heading.
        style: how its numbers are written.
        unit: what it is measured in; "" for numbers without, and where the style says it.
    """

    key: str
    label: str
    style: Style = "short"
    unit: str = ""

    @property
    def heading(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class Cell:
    """A number: its mean and standard deviation over seeds, the value of each, or a text where there is no number."""

    mean: float | None = None
    spread: float | None = None
    values: tuple[float, ...] = ()
    text: str = ""

    @staticmethod
    def of(values: Sequence[float | None]) -> Cell:
        """The cell of some seeds' values; the standard deviation is the sample's (n - 1), as in the paper."""
        known = tuple(float(value) for value in values if value is not None)
        if not known:
            return Cell()
        finite = all(map(math.isfinite, known))
        return Cell(fmean(known), stdev(known) if len(known) > 1 and finite else None, known)


@dataclass(frozen=True)
class Row:
    """A method in one setting, or a row of the paper.

    Attributes:
        label: its name.
        source: whose numbers these are.
        cells: by the keys of the columns.
        done: how many seeds are in it.
        planned: how many there should be.
        seeds: the seeds that are done, in the order of the cells' values.
        command: what to type for the first of them.
    """

    label: str
    source: Source
    cells: Mapping[str, Cell]
    done: int = 0
    planned: int = 0
    seeds: tuple[int, ...] = ()
    command: str = ""

    @property
    def count(self) -> str:
        """How many seeds, in words: 5, or 3 of 5."""
        if not self.planned:
            return str(self.done) if self.done else "–"
        return str(self.done) if self.done == self.planned else f"{self.done} of {self.planned}"


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
        key: its name among the tables of an item.
        title: what it shows.
        columns: the quantities.
        rows: in the order of the paper, rows of one label together.
        note: sentences that a reader needs to read it rightly.
    """

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""

    def used(self) -> list[Column]:
        """The columns that some row fills."""
        return [column for column in self.columns if any(write(row.cells, column) != "–" for row in self.rows)]

    @staticmethod
    def read(content: Mapping[str, Any]) -> Table:
        """The table that `asdict` made JSON of."""
        rows = []
        for row in content["rows"]:
            cells = {key: Cell(**cell | {"values": tuple(cell["values"])}) for key, cell in row["cells"].items()}
            rows.append(Row(**row | {"cells": cells, "seeds": tuple(row["seeds"])}))
        return Table(**dict(content) | {"columns": tuple(Column(**c) for c in content["columns"]), "rows": tuple(rows)})


@dataclass(frozen=True)
class Results:
    """What an item of the paper came to.

    Attributes:
        item: its name.
        title: what it is.
        about: sentences on what was done, and how it differs from the paper.
        tables: its tables.
        figures: specifications that `snarenet.report.plots` draws.
        remarks: what could not be finished, and why; what is missing.
        origin: budget, seeds, command and environment.
    """

    item: str
    title: str
    about: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    remarks: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for a file."""
        return asdict(self)

    @staticmethod
    def read(content: Mapping[str, Any]) -> Results:
        """The results that `to_dict` made JSON of."""
        parts: dict[str, Any] = {name: tuple(content[name]) for name in ("figures", "remarks")}
        parts["tables"] = tuple(Table.read(table) for table in content["tables"])
        return Results(**dict(content) | parts)


def short(value: float) -> str:
    """Three digits and a short exponent, or none.

    >>> short(0.0803), short(8.81), short(0.0), short(597.0), short(2.5e-13)
    ('8.03e-2', '8.81', '0', '597', '2.50e-13')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return _exponent(f"{value:.2e}") if not 1 <= abs(value) < 1000 else f"{value:#.3g}".rstrip(".")


def _exponent(text: str) -> str:
    return text.replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")


def plain(value: float) -> str:
    """Four digits, with an exponent only for tiny and huge numbers."""
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else short(value)


_WRITE: dict[Style, Callable[[float], str]] = {
    "short": short,
    "number": plain,
    "percent": percent,
    "seconds": duration,
    "count": lambda value: f"{value:g}" if value == round(value) else f"{value:.1f}",
}


def write(cells: Mapping[str, Cell], column: Column) -> str:
    """A cell as text: 8.03e-2 ± 5.8e-3."""
    cell = cells.get(column.key, Cell())
    if cell.mean is None:
        return cell.text or "–"
    text = _WRITE[column.style](cell.mean)
    if not cell.spread or column.style in ("percent", "count"):
        return text
    if column.style != "short":
        return f"{text} ± {_WRITE[column.style](cell.spread)}"
    return f"{text} ± " + (f"{cell.spread:.2g}" if 0.1 <= cell.spread < 100 else _exponent(f"{cell.spread:.1e}"))


def headings(table: Table) -> list[str]:
    """The headings of all columns, those of method, source and seeds first."""
    return ["method", "source", "seeds", *(column.heading for column in table.used())]


def lines(table: Table) -> list[list[str]]:
    """The cells under them, as text."""
    used = table.used()
    return [[row.label, row.source, row.count, *(write(row.cells, c) for c in used)] for row in table.rows]


def markdown(table: Table) -> str:
    """The table for a document; the paper's rows are in italics."""
    body = [[f"*{cell}*" if row.source == "paper" else cell for cell in line] for row, line in _pairs(table)]
    whole = [headings(table), ["---"] * len(headings(table)), *body]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in whole)
    return f"**{table.title}**\n\n{text}\n" + (f"\n{table.note}\n" if table.note else "")


def wide_csv(table: Table) -> str:
    """The table for a spreadsheet: mean and standard deviation of every column, unrounded."""
    used = table.used()
    head = [name for column in used for name in (column.heading, f"{column.heading}, standard deviation")]
    body = []
    for row in table.rows:
        found = [row.cells.get(column.key, Cell()) for column in used]
        numbers = [part for cell in found for part in (cell.text if cell.mean is None else cell.mean, cell.spread)]
        body.append([row.label, row.source, row.done or "", *numbers])
    return _csv([["method", "source", "seeds", *head], *body])


def long_csv(tables: Sequence[Table]) -> str:
    """Every number of every seed, unrounded, one a line; of the paper its means."""
    body: list[list[Any]] = [["table", "method", "source", "quantity", "seed", "value"]]
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                cell = row.cells.get(column.key, Cell())
                start = [table.key, row.label, row.source, column.heading]
                if len(row.seeds) == len(cell.values) > 0:
                    body += [[*start, seed, value] for seed, value in zip(row.seeds, cell.values, strict=True)]
                elif cell.mean is not None:
                    body.append([*start, "", cell.mean])
    return _csv(body)


def latex(table: Table) -> str:
    """The table for a paper that uses booktabs, with means and deviations under one power of ten."""
    used = table.used()
    head = " & ".join(["Method", "Source", "Seeds", *(_tex(column.heading) for column in used)])
    body = []
    for index, row in enumerate(table.rows):
        if index and row.label != table.rows[index - 1].label:
            body.append(r"\midrule")
        cells = [_tex(row.label), row.source, _tex(row.count), *(_tex_cell(row.cells, c) for c in used)]
        body.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(' '.join([table.title + '.', table.note]).strip())}}}",
            rf"\begin{{tabular}}{{lll{'c' * len(used)}}}",
            r"\toprule",
            head + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _pairs(table: Table) -> list[tuple[Row, list[str]]]:
    return list(zip(table.rows, lines(table), strict=True))


def _csv(rows: list[list[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _tex_cell(cells: Mapping[str, Cell], column: Column) -> str:
    cell = cells.get(column.key, Cell())
    if cell.mean is None or column.style != "short" or cell.mean == 0 or not math.isfinite(cell.mean):
        return _tex(write(cells, column))
    power = math.floor(math.log10(abs(cell.mean)))
    power = 0 if power == 0 else power
    scaled = f"{cell.mean / 10**power:.2f}"
    if cell.spread is not None:
        scaled = rf"{scaled} \pm {cell.spread / 10**power:.2f}"
    if power == 0:
        return f"${scaled}$"
    return rf"$({scaled}) \times 10^{{{power}}}$" if cell.spread is not None else rf"${scaled} \times 10^{{{power}}}$"


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "λ": r"$\lambda$", "µ": r"$\mu$",
    "–": "--", "·": r"$\cdot$", "ᵏ": r"$^k$", "σ": r"$\sigma$", "μ": r"$\mu$", "≤": r"$\leq$", "−": "$-$",
    "ŷ": r"$\hat y$", "Π": r"$\Pi$", "×": r"$\times$", "<": r"$<$", ">": r"$>$", "⁺": "$^+$",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
