"""`Sheet` and `Results`: the paper's numbers beside ours, as data, and as Markdown, LaTeX and CSV.

A cell is a mean over seeds with its standard deviation, and the value of every seed. All of it goes to JSON and back.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, Literal

from snarenet.report.numbers import DASH, short
from snarenet.report.tables import Column, Table
from snarenet.report.tables import markdown as markdown_table

Source = Literal["paper", "parity", "best", "solver", "measured"]

MEANING: dict[Source, str] = {
    "paper": "what the paper prints",
    "parity": "our run of the paper's recipe",
    "best": "our run of the recipe `best`",
    "solver": "a classical solver, run by us",
    "measured": "measured by us, without training",
}


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

    def write(self, column: Column) -> str:
        """The cell as text: 8.03e-2 ± 5.8e-3."""
        if self.mean is None:
            return self.text or DASH
        text = column.write(self.mean)
        if not self.spread or column.style in ("percent", "count"):
            return text
        if column.style != "short":
            return f"{text} ± {column.write(self.spread)}"
        return f"{text} ± " + (f"{self.spread:.2g}" if 0.1 <= self.spread < 100 else short(self.spread, 2))


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
        epochs: of its training; 0 without.
        paper_epochs: of the paper's training of this row; 0 where there is none.
    """

    label: str
    source: Source
    cells: Mapping[str, Cell]
    done: int = 0
    planned: int = 0
    seeds: tuple[int, ...] = ()
    command: str = ""
    epochs: int = 0
    paper_epochs: int = 0

    def cell(self, column: Column) -> Cell:
        """Its cell in a column; an empty one where it has none."""
        return self.cells.get(column.key, Cell())

    @property
    def count(self) -> str:
        """How many seeds, in words: 5, or 3 of 5."""
        if not self.planned:
            return str(self.done) if self.done else "–"
        return str(self.done) if self.done == self.planned else f"{self.done} of {self.planned}"

    @property
    def effort(self) -> str:
        """How many epochs, in words: 1,500, or 45 of 1,500 where the paper has more."""
        if not self.epochs or not self.done:
            return DASH
        return f"{self.epochs:,}" + (f" of {self.paper_epochs:,}" if self.paper_epochs > self.epochs else "")


_FIRST = (Column("method", "method", "text"), Column("source", "source", "text"), Column("seeds", "seeds", "text"))
_EPOCHS = Column("effort", "epochs", "text")


@dataclass(frozen=True)
class Sheet:
    """Rows under quantities, the paper's beside ours: a table as data.

    Attributes:
        key: its name among the sheets of an item.
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
        return [c for c in self.columns if any(row.cell(c).write(c) != DASH for row in self.rows)]

    def table(self) -> Table:
        """As text: method, source, seeds and, if there was training, epochs; then the columns that some row fills."""
        used = self.used()
        rows = [
            {"method": row.label, "source": row.source, "seeds": row.count, "effort": row.effort}
            | {c.key: row.cell(c).write(c) for c in used}
            for row in self.rows
        ]
        return Table((*_FIRST, *([_EPOCHS] if self.trained else []), *used), rows, self.title)

    @property
    def trained(self) -> bool:
        """Does a row say for how many epochs it was trained?"""
        return any(row.effort != DASH for row in self.rows)

    @staticmethod
    def read(content: Mapping[str, Any]) -> Sheet:
        """The sheet that `asdict` made JSON of."""
        rows = []
        for row in content["rows"]:
            cells = {key: Cell(**cell | {"values": tuple(cell["values"])}) for key, cell in row["cells"].items()}
            rows.append(Row(**row | {"cells": cells, "seeds": tuple(row["seeds"])}))
        return Sheet(**dict(content) | {"columns": tuple(Column(**c) for c in content["columns"]), "rows": tuple(rows)})


@dataclass(frozen=True)
class Results:
    """What an item of the paper came to.

    Attributes:
        item: its name.
        title: what it is.
        about: sentences on what was done, and how it differs from the paper.
        sheets: its tables.
        figures: specifications that `snarenet_lab.report.plots` draws.
        remarks: what could not be finished, and why; what is missing.
        origin: budget, seeds, command and environment.
        main: the key and the name of the quantity in which our runs of the paper's recipe are compared with the paper;
            both empty if they are not.
    """

    item: str
    title: str
    about: str
    sheets: tuple[Sheet, ...] = ()
    figures: tuple[Mapping[str, Any], ...] = ()
    remarks: tuple[str, ...] = ()
    origin: Mapping[str, Any] = field(default_factory=dict)
    main: tuple[str, str] = ("", "")

    def to_dict(self) -> dict[str, Any]:
        """All of it, for a file, where sheets are called tables."""
        return {"tables" if name == "sheets" else name: value for name, value in asdict(self).items()}

    @staticmethod
    def read(content: Mapping[str, Any]) -> Results:
        """The results that `to_dict` made JSON of."""
        parts = {name: value for name, value in content.items() if name != "tables"}
        parts |= {name: tuple(content[name]) for name in ("figures", "remarks", "main")}
        return Results(**parts, sheets=tuple(Sheet.read(table) for table in content["tables"]))


def markdown(sheet: Sheet) -> str:
    """The sheet for a document; the paper's rows are in italics."""
    table = sheet.table()
    pairs = zip(sheet.rows, table.texts(), strict=True)
    lines = [[f"*{cell}*" if row.source == "paper" else cell for cell in line] for row, line in pairs]
    text = markdown_table([column.heading for column in table.columns], lines)
    return f"**{sheet.title}**\n\n{text}" + (f"\n{sheet.note}\n" if sheet.note else "")


def wide_csv(sheet: Sheet) -> str:
    """The sheet for a spreadsheet: mean and standard deviation of every column, unrounded."""
    used = sheet.used()
    head = [name for column in used for name in (column.heading, f"{column.heading}, standard deviation")]
    body = []
    for row in sheet.rows:
        found = [row.cell(column) for column in used]
        numbers = [part for cell in found for part in (cell.text if cell.mean is None else cell.mean, cell.spread)]
        body.append([row.label, row.source, row.done or "", row.epochs or "", *numbers])
    return csv_text([["method", "source", "seeds", "epochs", *head], *body])


def long_csv(sheets: Sequence[Sheet]) -> str:
    """Every number of every seed, unrounded, one a line; of the paper its means."""
    body: list[list[Any]] = [["table", "method", "source", "quantity", "seed", "value"]]
    for sheet in sheets:
        for row in sheet.rows:
            for column in sheet.columns:
                cell = row.cell(column)
                start = [sheet.key, row.label, row.source, column.heading]
                if len(row.seeds) == len(cell.values) > 0:
                    body += [[*start, seed, value] for seed, value in zip(row.seeds, cell.values, strict=True)]
                elif cell.mean is not None:
                    body.append([*start, "", cell.mean])
    return csv_text(body)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as comma-separated values."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def latex(sheet: Sheet) -> str:
    """The sheet for a paper that uses booktabs, with means and deviations under one power of ten."""
    used = sheet.used()
    epochs = ["Epochs"] if sheet.trained else []
    head = " & ".join(["Method", "Source", "Seeds", *epochs, *(_tex(column.heading) for column in used)])
    body = []
    for index, row in enumerate(sheet.rows):
        if index and row.label != sheet.rows[index - 1].label:
            body.append(r"\midrule")
        effort = [_tex(row.effort)] if sheet.trained else []
        cells = [_tex(row.label), row.source, _tex(row.count), *effort, *(_tex_cell(row.cell(c), c) for c in used)]
        body.append(" & ".join(cells) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(' '.join([sheet.title + '.', sheet.note]).strip())}}}",
            rf"\begin{{tabular}}{{lll{'c' * (len(epochs) + len(used))}}}",
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


def _tex_cell(cell: Cell, column: Column) -> str:
    if cell.mean is None or column.style != "short" or cell.mean == 0 or not math.isfinite(cell.mean):
        return _tex(cell.write(column))
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
