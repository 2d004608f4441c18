"""Tables of results in every format, figures from their specifications, and the page of a reproduction."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

import snarenet as sn
from snarenet.report.numbers import short
from snarenet.report.tables import Column
from snarenet_lab.report import plots
from snarenet_lab.report.plots import LINE_OF, axis, curve, curves, draw, panels, paths, pictures, points
from snarenet_lab.report.results import Cell, Results, Row, Sheet, latex, long_csv, markdown, wide_csv
from snarenet_lab.report.results_page import write_results_page

COLUMNS = (
    Column("gap", "gap, gmean"),
    Column("share", "feasible", "percent"),
    Column("time", "time", "seconds"),
    Column("count", "violations", "count", "per instance"),
    Column("empty", "never there"),
)


def sheet() -> Sheet:
    paper = Row("DC3", "paper", {"gap": Cell(0.0803, 0.0058), "time": Cell(text="> 86400 s")}, 5)
    cells = {"gap": Cell.of([1e-4, 3e-4]), "share": Cell.of([1.0, 0.5]), "time": Cell.of([0.002, 0.002])}
    ours = Row("DC3", "best", cells | {"count": Cell(2.5)}, 2, 3, (7, 8), "snarenet train nclp", 45, 1500)
    other = Row("50 % & more <i>", "best", {"gap": Cell(0.0)}, 1, 1, (7,))
    return Sheet("test", "A table", COLUMNS, (paper, ours, other), "A note.")


def results() -> Results:
    figure = panels("metrics", "Numbers", sheet(), ["gap", "share"])
    origin = {
        "command": "snarenet reproduce nclp",
        "budget": "smoke",
        "environment": {"torch": "2.13"},
        "trained on": {"cpu": 2},
    }
    return Results("nclp", "NCLP", "What was <b>done</b>.", (sheet(),), (figure,), ("One run failed.",), origin)


class TestCells:
    def test_mean_and_sample_deviation(self) -> None:
        cell = Cell.of([1.0, 3.0, None])
        assert (cell.mean, cell.values) == (2.0, (1.0, 3.0))
        assert cell.spread == pytest.approx(2**0.5)
        assert Cell.of([None]) == Cell()
        assert Cell.of([4.0]) == Cell(4.0, None, (4.0,))
        assert Cell.of([1.0, float("inf")]).spread is None

    @pytest.mark.parametrize(
        ("style", "cell", "text"),
        [
            ("short", Cell(0.0803, 0.0058), "8.03e-2 ± 5.8e-3"),
            ("short", Cell(79.6, 113.3), "79.6 ± 1.1e2"),
            ("short", Cell(-12.7, 9.39), "-12.7 ± 9.4"),
            ("short", Cell(0.0), "0"),
            ("percent", Cell(0.5, 0.2), "50%"),
            ("seconds", Cell(0.186, 0.074), "186 ms ± 74 ms"),
            ("number", Cell(4060.0), "4060"),
            ("count", Cell(14.5, 0.7), "14.5"),
            ("short", Cell(), "–"),
            ("seconds", Cell(text="> 86400 s"), "> 86400 s"),
        ],
    )
    def test_text(self, style: Any, cell: Cell, text: str) -> None:
        assert cell.write(Column("x", "x", style)) == text

    def test_short_keeps_three_digits(self) -> None:
        for value in (1.23e-16, 0.0123, 1.23, 12.3, 123.0, 1230.0):
            assert float(short(value)) == pytest.approx(value, rel=5e-3)


class TestFormats:
    def test_json_and_back(self) -> None:
        before = results()
        assert Results.read(json.loads(json.dumps(before.to_dict()))) == before

    def test_markdown(self) -> None:
        lines = markdown(sheet()).splitlines()
        assert (
            lines[2]
            == "| method | source | seeds | epochs | gap, gmean | feasible | time | violations (per instance) |"
        )
        assert lines[4] == "| *DC3* | *paper* | *5* | *–* | *8.03e-2 ± 5.8e-3* | *–* | *> 86400 s* | *–* |"
        assert lines[5].startswith("| DC3 | best | 2 of 3 | 45 of 1,500 | 2.00e-4 ± 1.4e-4 | 75% | 2 ms |")
        assert lines[-1] == "A note."

    def test_csv_of_means(self) -> None:
        paper, ours, _ = csv.DictReader(io.StringIO(wide_csv(sheet())))
        assert float(paper["gap, gmean, standard deviation"]) == 0.0058
        assert paper["time"] == "> 86400 s"
        assert float(ours["gap, gmean"]) == pytest.approx(2e-4)

    def test_csv_of_seeds(self) -> None:
        lines = list(csv.DictReader(io.StringIO(long_csv([sheet()]))))
        gaps = [(x["source"], x["seed"], float(x["value"])) for x in lines if x["quantity"] == "gap, gmean"]
        assert gaps == [("paper", "", 0.0803), ("best", "7", 1e-4), ("best", "8", 3e-4), ("best", "", 0.0)]

    def test_latex(self) -> None:
        text = latex(sheet())
        assert r"DC3 & paper & 5 & -- & $(8.03 \pm 0.58) \times 10^{-2}$ & -- & $>$ 86400 s & --" in text
        assert r"50 \% \& more $<$i$>$ & best" in text
        assert text.count(r"\midrule") == 2  # under the head, and between two methods
        assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1]


def words(svg: str) -> str:
    """The text in a drawing, which matplotlib keeps as comments beside its shapes."""
    return " ".join(re.findall(r"<!-- (.*?) -->", svg))


class TestFigures:
    SERIES = ({"label": "constant", "x": [1, 2, 3], "y": [1e-1, 1e-2, 1e-4], "names": ["a", "b", "c"]},)

    def specs(self) -> list[dict[str, Any]]:
        lines = [
            curve("the paper", [1, 10], [1e-3, 0.0], LINE_OF["paper"]),
            curve("ours", [1, 10], [1e-5, 1e-8], "bold"),
        ]
        way = {"label": "nominal", "paths": [[[0.0, 1.0], [1.0, 0.0]]], "plain": True}
        return [
            panels("p", "Panels", sheet(), ["gap", "share"]),
            curves("c", "Curves", axis("epoch", True), axis("gap (units)", True), lines, marked=True),
            points("s", "Points", axis("steps (count)"), axis("gap", True), self.SERIES, {"the paper's best": 4e-3}),
            paths("t", "Paths", [way], [(0.0, 0.0, 1.0, 2.0)]),
        ]

    def test_every_kind_is_drawn_the_same_from_json(self) -> None:
        for spec in self.specs():
            drawing = draw(json.loads(json.dumps(spec)))
            ElementTree.fromstring(drawing)
            assert drawing == draw(spec)

    def test_labels_and_legends(self) -> None:
        expected = [
            ("DC3", "gap, gmean", "feasible", "the paper", "ours, best"),
            ("epoch", "gap (units)", "the paper", "ours", "≤ 0"),
            ("steps (count)", "constant", "the paper's best", "a", "b", "c"),
            ("obstacle", "nominal", "goal", "units of length"),
        ]
        for spec, labels in zip(self.specs(), expected, strict=True):
            text = words(draw(spec))
            for label in labels:
                assert label in text, (spec["kind"], label)

    def test_a_page_has_a_picture_for_each_panel(self) -> None:
        found = pictures(self.specs()[0])
        assert [picture.caption.partition(";")[0] for picture in found] == ["Gap, gmean", "Feasible"]
        assert len(pictures(self.specs()[1])) == 1

    def test_far_numbers_are_arrows(self) -> None:
        rows = [Row(str(k), "best", {"gap": Cell(10.0**-k)}) for k in range(6)]
        near = Sheet("t", "t", COLUMNS, tuple(rows))
        far = Sheet("t", "t", COLUMNS, (*rows, Row("far", "parity", {"gap": Cell(1e34)})))
        assert "arrow" not in pictures(panels("p", "P", near, ["gap"]))[0].caption
        assert "an arrow is a number far beyond the frame" in pictures(panels("p", "P", far, ["gap"]))[0].caption

    def test_names_hide_no_point_and_no_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[Any] = []
        monkeypatch.setattr(plots, "to_svg", lambda figure: kept.append(figure) or "")
        x = [10, 10.5, 11, 11, 60, 61]
        near = {"label": "near", "x": x, "y": [1e-2, 1.1e-2, 1e-2, 1.2e-2, 1e-3, 1e-3], "names": list("abcdef")}
        draw(points("s", "Points", axis("steps"), axis("gap", True), [near], {}))
        (figure,) = kept
        axes = figure.axes[0]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 6
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
            for point in zip(near["x"], near["y"], strict=True):
                assert not box.contains(*axes.transData.transform(point))


class Page(HTMLParser):
    """The page as a reader meets it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.rows: list[tuple[str, list[str]]] = []
        self.text, self._open = "", []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append((known.get("class") or "", []))
        self.links += [known[key] or "" for key in ("href", "src") if key in known]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]):
            self.text += data
        if any(tag in ("td", "th") for tag in self._open) and data.strip():
            self.rows[-1][1].append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    (folder / "nclp.json").write_text(json.dumps(results().to_dict()))
    return write_results_page(folder)


class TestPage:
    def test_says_whose_numbers_they_are(self, page: Path) -> None:
        read = Page(page.read_text())
        lines = {(cells[0], cells[1]): kind for kind, cells in read.rows if len(cells) > 3}
        assert "paper" in lines["DC3", "paper"]
        assert "paper" not in lines["DC3", "best"]
        for text in (
            "8.03e-2 ± 5.8e-3",
            "2 of 3",
            "45 of 1,500",
            "One run failed.",
            "snarenet reproduce nclp",
            "snarenet train nclp",
            "2.13",
        ):
            assert text in read.text

    def test_needs_nothing_else(self, page: Path) -> None:
        read = Page(page.read_text())
        assert all(link.startswith(("data:", "#")) for link in read.links)
        assert "b" not in read.tags
        assert "i" not in read.tags  # what is not ours is escaped
        assert "What was <b>done</b>." in read.text
        assert "default-src 'none'" in page.read_text()

    def test_tables_to_take_along(self, page: Path) -> None:
        found = {link.partition(",")[0]: unquote(link.partition(",")[2]) for link in Page(page.read_text()).links}
        assert found["data:text/csv;charset=utf-8"] == wide_csv(sheet())
        assert found["data:text/plain;charset=utf-8"] == latex(sheet())
        assert latex(sheet()) in Page(page.read_text()).text

    def test_a_folder_without_results(self, tmp_path: Path) -> None:
        with pytest.raises(sn.RunError, match="holds no run"):
            write_results_page(tmp_path)
        (tmp_path / "nclp.json").write_text('{"item": "nclp"}')
        with pytest.raises(sn.RunError, match=r"nclp\.json was not written by this version"):
            write_results_page(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")
class TestBrowser:
    def browse(self, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", *options, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    def test_a_click_sorts(self, page: Path, tmp_path: Path) -> None:
        click = "<script>var h = document.querySelectorAll('thead th')[4]; h.click();%s</script></body>"
        found = []
        for more in ("", "h.click();"):
            changed = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", click % more)
            copy = tmp_path / "copy.html"
            copy.write_text(changed)
            rows = Page(self.browse(copy, "--dump-dom").stdout).rows
            found.append([cells[4] for _, cells in rows[1:4]])
        assert found[0] == ["0", "2.00e-4 ± 1.4e-4", "8.03e-2 ± 5.8e-3"]
        assert found[1] == found[0][::-1]

    def test_the_policy_knows_the_script(self, page: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy.html"
        copy.write_text(
            page.read_text().replace("document.querySelectorAll", "window.x = 1; document.querySelectorAll", 1)
        )
        for file, refused in ((page, False), (copy, True)):
            said = self.browse(file, "--dump-dom", "--enable-logging=stderr").stderr
            assert ("Content Security Policy" in said) == refused

    @pytest.mark.parametrize("width", [500, 1280])  # Chromium's windows are no narrower than 500
    def test_nothing_is_wider_than_the_window(self, page: Path, tmp_path: Path, width: int) -> None:
        measure = "<script>document.title = 'w' + document.documentElement.scrollWidth;</script></body>"
        copy = tmp_path / "copy.html"
        copy.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", measure))
        size = re.search(r"<title>w(\d+)", self.browse(copy, "--dump-dom", f"--window-size={width},900").stdout)
        assert size is not None
        assert int(size[1]) <= width
