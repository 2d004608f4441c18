"""`Table`: numbers under headings, for a terminal or a document. They keep all digits until they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from snarenet.report.numbers import DASH, brief, count, duration, number, percent, short

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Style = Literal["text", "short", "number", "brief", "percent", "seconds", "count"]

_WRITERS: dict[Style, Callable[[float | None], str]] = {
    "text": str,
    "short": short,
    "number": number,
    "brief": brief,
    "percent": percent,
    "seconds": duration,
    "count": count,
}


@dataclass(frozen=True)
class Column:
    """A quantity.

    Attributes:
        key: its name in a row.
        label: the heading.
        style: how its numbers are written; columns of "text" are on the left.
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

    def write(self, value: Any) -> str:
        """A value of this column as text: a number in its style, a text as it is, a dash for None."""
        if value is None:
            return DASH
        return _WRITERS[self.style](value) if isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    Attributes:
        columns: the quantities.
        rows: numbers and texts, by the keys of the columns; what is None or missing is a dash.
        title: what it shows.
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    title: str = ""

    def filled(self) -> Table:
        """The table without columns that no row fills."""
        used = [column for column in self.columns if any(row.get(column.key) is not None for row in self.rows)]
        return replace(self, columns=used)

    def texts(self) -> list[list[str]]:
        """The cells of every row, as text."""
        return [[column.write(row.get(column.key)) for column in self.columns] for row in self.rows]

    def markdown(self) -> str:
        """The table for a document; headings of several lines become one."""
        return markdown([column.heading.replace("\n", " ") for column in self.columns], self.texts())

    def __rich__(self) -> RichTable:
        """The table for a terminal: `rich.print(table)`. Numbers are never broken, several words where they must."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        for column in self.columns:
            if column.style == "text":
                table.add_column(column.heading, overflow="fold", min_width=8)
            else:
                words = any(" " in value for row in self.rows if isinstance(value := row.get(column.key), str))
                table.add_column(column.heading, justify="right", overflow="fold", no_wrap=not words)
        for line in self.texts():
            table.add_row(*map(Text, line))
        return table


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    whole = [headings, ["---"] * len(headings), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in whole) + "\n"
