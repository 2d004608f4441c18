"""Notes on where rows are from, which no program can know: `provenance.json` in a folder of results.

It is written by hand, read here, and never written by a program. By item, each note names the rows that it is about:

    {"nclp": [{"source": "parity", "labels": ["DC3", "HProj"], "epochs": 150, "note": "Trained on a CPU core."}]}

`labels` may hold wildcards; `command` is a part of the row's command; `source`, `labels`, `epochs` and `command` may be
left out. A note whose rows are gone, since others have taken their place, is gone with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from snarenet_lab.report.results import Results, Row

FILE = "provenance.json"


@dataclass(frozen=True)
class Note:
    """A note, and the rows that it is about.

    Attributes:
        note: sentences.
        source: of the rows; "" for any.
        labels: of the rows, with wildcards.
        epochs: of the rows; 0 for any.
        command: what the rows' commands hold, such as "--relax-mode eval"; "" for any.
    """

    note: str
    source: str = ""
    labels: tuple[str, ...] = ("*",)
    epochs: int = 0
    command: str = ""

    def is_about(self, row: Row) -> bool:
        """Is it about this row?"""
        return (
            row.source != "paper"
            and self.source in ("", row.source)
            and self.epochs in (0, row.epochs)
            and self.command in row.command
            and any(fnmatchcase(row.label, label) for label in self.labels)
        )


def read_notes(folder: Path) -> dict[str, list[Note]]:
    """The notes of a folder of results, by item."""
    file = folder / FILE
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
        return {item: list(map(_read, notes)) for item, notes in content.items()}
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} must hold a list of notes for every item, see {__name__}, but: {error}") from error


def _read(note: dict[str, Any]) -> Note:
    fields: dict[str, Any] = note | {"labels": tuple(note.get("labels", ["*"]))}
    return Note(**fields)


def notes_on(results: Results, folder: Path) -> list[str]:
    """The notes about rows that are there."""
    rows = [row for sheet in results.sheets for row in sheet.rows]
    return [note.note for note in read_notes(folder).get(results.item, []) if any(map(note.is_about, rows))]
