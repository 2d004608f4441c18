"""An item's results as files: ITEM.json holds all of them; ITEM.md, .csv, .tex and ITEM-*.svg are made of it.

A figure ends with a mark, a hash of what it was drawn from, so that one of other data is found without drawing.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from snarenet_lab.files import write_text
from snarenet_lab.report.agreement import agreement
from snarenet_lab.report.plots import draw
from snarenet_lab.report.provenance import notes_on
from snarenet_lab.report.results import Results, latex, long_csv, markdown


def write_results(results: Results, folder: Path) -> None:
    """Write ITEM.json, .md, .csv, .tex, and, where matplotlib is installed, ITEM-*.svg."""
    write_text(folder / f"{results.item}.json", json.dumps(results.to_dict(), indent=1, ensure_ascii=False))
    for spec in results.figures:
        try:
            write_text(folder / figure_file(results, spec), drawn(spec))
        except ImportError:
            break  # the page says so
    for name, text in texts(results, folder).items():
        write_text(folder / name, text)


def figure_file(results: Results, spec: Mapping[str, Any]) -> str:
    """The name of a figure's file."""
    return f"{results.item}-{spec['name']}.svg"


def drawn(spec: Mapping[str, Any]) -> str:
    """A figure as SVG, with its mark."""
    return f"{draw(spec).rstrip()}\n{mark(spec)}\n"


def mark(spec: Mapping[str, Any]) -> str:
    """What says of which data a figure was drawn."""
    return f"<!-- of {hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]} -->"


def read_item(folder: Path, item: str) -> Results | None:
    """The results of an item, if its file is there."""
    file = folder / f"{item}.json"
    return Results.read(json.loads(file.read_text())) if file.exists() else None


def texts(results: Results, folder: Path) -> dict[str, str]:
    """The files of an item that are text, by name."""
    return {
        f"{results.item}.md": _page(results, folder),
        f"{results.item}.csv": long_csv(results.sheets),
        f"{results.item}.tex": "\n".join(map(latex, results.sheets)),
    }


def remarks(results: Results, folder: Path) -> list[str]:
    """What a reader should know: what is missing, how it compares with the paper, where rows are from."""
    return [*results.remarks, *agreement(results), *notes_on(results, folder)]


def wrapped(text: str, indent: str = "") -> str:
    """Prose in lines of 120 characters, all but the first indented."""
    lines = textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def _page(results: Results, folder: Path) -> str:
    figures = []
    for spec in results.figures:
        name = figure_file(results, spec)
        there = (folder / name).exists()
        figures.append(f"![{spec['caption']}]({name})\n" if there else f"No figure {name}: it needs matplotlib.\n")
    listed = "".join(wrapped(f"- {remark}", "  ") for remark in remarks(results, folder))
    parts = [
        f"# {results.title}\n",
        wrapped(results.about),
        *(markdown(replace(sheet, note=wrapped(sheet.note).rstrip("\n"))) for sheet in results.sheets),
        *figures,
        *([listed] if listed else []),
        f"```sh\n{results.origin['command']}\n```\n",
    ]
    return "\n".join(parts)
