"""Tables inside pages: filled from data, never typed; the pages of this repository say what their data say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from snarenet_lab.report.documents import write_results
from snarenet_lab.report.page_tables import TABLES, compared, items, parity
from snarenet_lab.report.pages import fill, stale, write_pages
from snarenet_lab.report.provenance import read_notes
from snarenet_lab.report.results import Cell, Results, Row, Sheet
from snarenet_lab.report.results_page import read_results

DOCS = Path(__file__).parents[2] / "docs"
MADE = (  # pages whose tables are all made
    "control.md",
    "forecasts.md",
    "methods.md",
    "performance.md",
    "portfolios.md",
    "power.md",
    "results.md",
)


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
        whole = ("|", "![", "$", "`snarenet ")  # tables, captions, formulas and commands cannot be broken
        for page in (*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")):
            if page.name == "CHANGELOG.md":  # a line a change
                continue
            text = re.sub(r"^\s*```.*?^\s*```|^\s*\$\$.*?\$\$$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
            lines = [line for line in text.splitlines() if not line.strip().startswith(whole)]
            assert [line for line in lines if len(line) > 120] == [], page.name

    def test_notes_are_about_rows_that_are_there(self) -> None:
        notes, found = read_notes(DOCS / "results"), {item.item: item for item in read_results(DOCS / "results")}
        for item, several in notes.items():
            rows = [row for sheet in found[item].sheets for row in sheet.rows]
            assert [note.note for note in several if not any(map(note.is_about, rows))] == []


class TestTables:
    """Of results made up for the purpose."""

    @pytest.mark.parametrize(
        ("gaps", "quality"),
        [
            ([{"relative": 0.01, "optimal": 0.5}, {"relative": 0.03, "optimal": 1.0}], "2 % | 75%"),
            ([{"relative": -1e-9, "optimal": 1.0}, {"relative": 1e-9, "optimal": 1.0}], "0 % | 100%"),
            ([None, None], "3"),
        ],
    )
    def test_methods_compared(self, tmp_path: Path, gaps: list[dict[str, float] | None], quality: str) -> None:
        """Means over the seeds, of errors where there are no gaps; one seed is timed."""
        same = {"feasible": {"1e-08": 1.0}, "training": 60.0}
        runs = [same | {"gap": gap, "objective": {"mean": 2.0 + 2 * k}} for k, gap in enumerate(gaps)]
        runs = [run | {"seconds": {"model": time}} for run, time in zip(runs, (1e-3, None), strict=True)]
        content = {"rows": [{"label": "SnareNet", "budget": "one epoch", "runs": runs}]}
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "compare-x.json").write_text(json.dumps(content))
        shown = compared("x", tmp_path).splitlines()[-1]
        assert shown == f"| **SnareNet** | one epoch | {quality} | 100% | 1 ms | 60 s |"

    def write(self, folder: Path, *rows: Row, name: str = "nclp", main: tuple[str, str] = ("gap", "gap")) -> None:
        (folder / "results").mkdir(exist_ok=True)
        found = Results(name, "T", "A.", (Sheet("t", "T: test", (), rows),), origin={"command": "c"}, main=main)
        write_results(found, folder / "results")

    def test_rows_beside_the_papers(self, tmp_path: Path) -> None:
        def ours(label: str, values: list[float], epochs: int = 100) -> Row:
            return Row(
                label, "parity", {"gap": Cell.of(values)}, len(values), 2, (1, 2)[: len(values)], "", epochs, 100
            )

        paper = [Row(label, "paper", {"gap": Cell(2.0, 0.5)}, 5) for label in ("A, tol 1", "A, tol 2", "B", "C")]
        best = Row("A, tol 1", "best", {"gap": Cell.of([1.0])}, 1, 2)
        rows = [ours("A, tol 1", [2.9, 2.9]), ours("A, tol 2", [2.9, 2.9]), ours("B", [9.0]), ours("C", [2.0], 10)]
        self.write(tmp_path, *paper, *rows, best)
        lines = parity(tmp_path).splitlines()[2:]
        assert lines == [
            "| [nclp](results/nclp.md) | A, tol 1, 2 | 2 | 100 | 2.9 | 2 ± 0.5 | yes |",
            "| [nclp](results/nclp.md) | B | 1 of 2 | 100 | 9 | 2 ± 0.5 | no |",
            "| [nclp](results/nclp.md) | C | 1 of 2 | 10 of 100 | 2 | 2 ± 0.5 | yes |",
        ]
        (line,) = items(tmp_path).splitlines()[2:]
        assert line == "| [nclp](results/nclp.md) | 0 of 1 | 3 of 4 | 2 of 4 | 3 of 4 |"

    def test_one_seed_is_not_judged(self, tmp_path: Path) -> None:
        paper, row = Row("A", "paper", {"gap": Cell(2.0)}), Row("A", "parity", {"gap": Cell(9.0)}, 1, 1, (1,), "", 5, 9)
        self.write(tmp_path, paper, row)
        assert parity(tmp_path).splitlines()[-1].endswith("| 1 | 5 of 9 | 9 | 2 | – |")
        assert items(tmp_path).splitlines()[-1].endswith("| – | 0 of 1 | 0 of 1 | – |")


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

    def test_figures_of_other_data_are_drawn_again(self, tmp_path: Path) -> None:
        docs = tmp_path / "docs"
        shutil.copytree(DOCS, docs)
        file = docs / "results" / "damping.json"
        content = json.loads(file.read_text())
        content["figures"][0]["series"][0]["y"][0] *= 2
        file.write_text(json.dumps(content))
        (changed,) = write_pages(docs)
        assert changed.name == f"damping-{content['figures'][0]['name']}.svg"
        assert changed.read_text() != (DOCS / "results" / changed.name).read_text()
        assert write_pages(docs) == []
