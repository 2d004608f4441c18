"""Tables inside pages: filled from data, never typed; the pages of this repository say what their data say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from snarenet_lab.report.page_tables import TABLES
from snarenet_lab.report.pages import fill, stale, write_pages
from snarenet_lab.report.provenance import read_notes
from snarenet_lab.report.results_page import read_results

DOCS = Path(__file__).parents[2] / "docs"
MADE = ("methods.md", "performance.md", "results.md")  # pages whose tables are all made


class TestThisRepository:
    def test_pages_say_what_the_data_say(self) -> None:
        assert [path.relative_to(DOCS).as_posix() for path in stale(DOCS)] == [], "run `make docs-tables`"

    @pytest.mark.parametrize("page", MADE)
    def test_no_table_is_typed(self, page: str) -> None:
        text = re.sub(r"<!-- table: .*?<!-- end -->", "", (DOCS / page).read_text(), flags=re.DOTALL)
        assert [line for line in text.splitlines() if line.startswith("|")] == []

    def test_every_table_has_a_place(self) -> None:
        asked = [name for page in MADE for name in re.findall(r"<!-- table: (.*?) -->", (DOCS / page).read_text())]
        assert sorted(asked) == sorted(TABLES)

    def test_every_number_says_where_it_is_from(self) -> None:
        for file in (DOCS / "data").glob("*.json"):
            content = json.loads(file.read_text())
            assert content["command"] or content["note"], file.name

    def test_no_line_of_prose_is_long(self) -> None:
        pages = [*DOCS.glob("*.md"), *DOCS.glob("results/*.md")]
        lines = [(page.name, line) for page in pages for line in page.read_text().splitlines()]
        whole = ("|", "![", "snarenet ")  # tables, captions and commands cannot be broken
        assert [(page, line) for page, line in lines if len(line) > 400 and not line.startswith(whole)] == []

    def test_notes_are_about_rows_that_are_there(self) -> None:
        notes, found = read_notes(DOCS / "results"), {item.item: item for item in read_results(DOCS / "results")}
        for item, several in notes.items():
            rows = [row for sheet in found[item].sheets for row in sheet.rows]
            assert [note.note for note in several if not any(map(note.is_about, rows))] == []


class TestPages:
    TABLES = {"a": lambda folder: f"| {folder.name} |\n"}  # noqa: RUF012
    PAGE = "before\n<!-- table: a -->\nold\n\nolder\n<!-- end -->\nafter\n"

    def test_fill(self, tmp_path: Path) -> None:
        filled = fill(self.PAGE, tmp_path / "docs", self.TABLES)
        assert filled == "before\n<!-- table: a -->\n| docs |\n<!-- end -->\nafter\n"
        assert fill(filled, tmp_path / "docs", self.TABLES) == filled
        assert fill("no table\n", tmp_path) == "no table\n"

    def test_mistakes(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="tables are a, but a page asks for b"):
            fill(self.PAGE.replace("table: a", "table: b"), tmp_path, self.TABLES)
        with pytest.raises(ValueError, match="needs an `<!-- end -->`"):
            fill("<!-- table: a -->\n<!-- table: a -->\n<!-- end -->", tmp_path, self.TABLES)

    def test_what_changes_in_the_data_changes_in_the_pages(self, tmp_path: Path) -> None:
        docs = tmp_path / "docs"
        shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("*.svg.tmp"))
        file = docs / "data" / "bench-repair-cpu.json"
        content = json.loads(file.read_text())
        content["rows"][0]["ms"] = 123456.0
        file.write_text(json.dumps(content))
        assert write_pages(docs) == [docs / "performance.md"]
        assert "| 123,456 |" in (docs / "performance.md").read_text()
        assert write_pages(docs) == []
        results = docs / "results" / "nclp.json"
        results.write_text(results.read_text().replace('"title": "Non-convex programs', '"title": "Programs', 1))
        assert [path.name for path in write_pages(docs)] == ["nclp.md"]
