"""The page of a run: its numbers, what it does without some of them, and its figures."""

from __future__ import annotations

import base64
import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snarenet as sn
from snarenet.report import evaluation_table, figures, sentence, write_report
from snarenet.report.evaluation import evaluation_groups, feasible_at, times_faster

SCRIPT = Path(figures.__file__).with_name("page.js")
OBSTACLES = [(-5, 5, 2, 1.41), (-1, 3, 0.25, 1.41), (-9, 2, 1, 1)]


def evaluation(gap: np.ndarray, violation: np.ndarray, steps: np.ndarray, tol: float = 1e-8) -> dict[str, Any]:
    """What `snarenet evaluate` says of the instances, computed from their results."""
    known = gap[np.isfinite(gap)]
    gaps = None
    if len(known):
        gaps = {
            "gmean": float(np.exp(np.log(known.clip(1e-16)).mean())),
            "mean": float(known.mean()),
            "max": float(known.max()),
            "median": float(np.median(known)),
            "q90": float(np.quantile(known, 0.9)),
            "q99": float(np.quantile(known, 0.99)),
            "negative": float((known < 0).mean()),
            "relative": float(known.mean() / 11.6),
            "instances": len(known),
        }
    errors = {"max": float(violation.max()), "gmean": 1e-16, "mean": float(violation.mean())}
    return {
        "tol": tol,
        "split": "test",
        "instances": len(gap),
        "objective": {"mean": -11.615, "max": -9.25},
        "gap": gaps,
        "ineq": errors,
        "eq": errors,
        "violations": 0.0,
        "feasible": {f"1e-{k:02d}": float((violation <= 10.0**-k).mean()) for k in range(1, 13)},
        "steps": {"median": float(np.median(steps)), "max": int(steps.max())},
        "converged": float((violation <= tol).mean()),
        "seconds": {"model": 1.5e-5, "reference": 0.012 if gaps else None, "engine": "ipopt"},
    }


def epoch_record(epoch: int, epochs: int, result: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl; losses fall, the relaxation ends after a third of the epochs."""
    done = epoch / epochs
    valid = {"objective": result["objective"], "gap": result["gap"], "ineq": result["ineq"], "eq": result["eq"]}
    if result["gap"]:
        shrink = 1 + 500 * np.exp(-8 * done)
        valid["gap"] = {key: result["gap"][key] * shrink for key in ("gmean", "max")}
    return {
        "epoch": epoch,
        "step": 42 * epoch,
        "loss": -11.6 + 40 * np.exp(-10 * done) + (900 if epoch == 1 < epochs else 0),
        "objective": -11.6 + 30 * np.exp(-10 * done),
        "violation": 5 * max(0.0, 1 - 3 * done) + 9e-9,
        "steps": 32.0,
        "relax": 5 * max(0.0, 1 - 3 * done),
        "lr": 5e-4 * (1 + np.cos(np.pi * done)),
        "seconds": 2.3 * epoch,
        **({"valid": valid} if epoch % 5 == 0 or epochs == 1 else {}),
    }


def write_run(
    folder: Path,
    name: str = "nclp",
    epochs: int = 10,
    gap: np.ndarray | None = None,
    violation: np.ndarray | None = None,
    sizes: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    **arrays: np.ndarray,
) -> Path:
    """A run folder as training and evaluation leave it."""
    rng = np.random.default_rng(0)
    gap = 10 ** rng.normal(-3, 0.5, 50) if gap is None else gap
    violation = 10 ** rng.uniform(-9.9, -8.01, len(gap)) if violation is None else violation
    steps = rng.integers(28, 40, len(gap))
    result = evaluation(gap, violation, steps)
    config = sn.TrainConfig(epochs=epochs).to_dict()
    environment = {"python": "3.11.7", "torch": "2.13.0", "device": "cpu", "git": "53753e0", "started": "2030-01-02"}
    files = {
        "config.json": {"problem": {"name": name, "sizes": sizes or {}}, "config": config},
        "environment.json": environment,
        "evaluation.json": result,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    lines = [json.dumps(epoch_record(epoch, epochs, result)) for epoch in range(1, epochs + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    objective = rng.normal(-11.6, 1, len(gap))
    np.savez(folder / "evaluation.npz", objective=objective, gap=gap, violation=violation, steps=steps, **arrays)
    for file in leave_out:
        (folder / file).unlink()
    return folder


class Page(HTMLParser):
    """A page as a reader meets it: its text, its images with their alt texts, and where it links to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.text, self.images, self.links, self.tags, self._open = "", [], [], set(), []
        self.scripts: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "img", "input"):
            self._open.append(tag)
        for key, value in attrs:
            if key in ("src", "href"):
                self.links.append(value)
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._open[-1:] != ["style"]:
            self.text += data

    def drawing(self, alt: str) -> str:
        """The SVG of the one image whose alt text contains `alt`."""
        [image] = [image for image in self.images if alt in image["alt"]]
        return base64.b64decode(image["src"].split(",", 1)[1]).decode()


def report(folder: Path, **options: Any) -> Page:
    return Page(write_report(write_run(folder, **options)))


def words(svg: str) -> str:
    """The text in a drawing, which matplotlib keeps as comments beside its shapes."""
    return " ".join(re.findall(r"<!-- (.*?) -->", svg))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A whole page, drawn once."""
    return report(tmp_path_factory.mktemp("run"))


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures are made, and kept in this list, but not rendered, which takes a second a page."""
    made: list[Any] = []
    monkeypatch.setattr(figures, "to_svg", lambda figure: made.append(figure) or "<svg/>")
    return made


def bars(figure: Any) -> list[list[tuple[float, float]]]:
    """Left edge and height of the bars of a histogram, group by group."""
    return [[(bar.get_x(), bar.get_height()) for bar in group] for group in figure.axes[0].containers]


def totals(figure: Any) -> list[float]:
    return [sum(height for _, height in group) for group in bars(figure)]


class TestPage:
    @pytest.mark.usefixtures("blank")
    def test_says_the_numbers(self, tmp_path: Path) -> None:
        gap = np.array([1e-4, 1e-2, 1e-3, 1e-3])
        page = report(tmp_path / "first", gap=gap, sizes={"size": 100}, violation=np.array([1e-9, 2e-9, 9e-9, 2e-7]))
        for number in (
            "1.00e-3",
            "1.00e-2",
            "75%",
            "800 times faster than ipopt (12 ms)",
            "15 µs",
            "-11.62",
            "2.00e-7",
        ):
            assert number in page.text
        assert "Trained for 10 of 10 epochs, 420 steps, in 23 s." in page.text
        for setting in ("run first", "damping_ratio", "2.13.0", "53753e0", "2030-01-02", "size 100"):
            assert setting in page.text
        assert page.text.index("On 4 test instances") < page.text.index("Training")

    def test_needs_nothing_else(self, page: Page) -> None:
        files = {"config.json", "environment.json", "evaluation.json", "evaluation.npz", "metrics.jsonl"}
        assert {link for link in page.links if not link.startswith("data:image/svg+xml;base64,")} == files
        assert not page.tags & {"link", "iframe"}
        assert page.scripts == [SCRIPT.read_text(encoding="utf-8")]
        assert "://" not in page.scripts[0].replace("http://www.w3.org/2000/svg", "")  # a name, which nobody asks for
        assert len(page.images) == 7
        for image in page.images:
            assert image["alt"].endswith(".")
            ET.fromstring(base64.b64decode(image["src"].split(",", 1)[1]))

    def test_labels_every_axis(self, page: Page) -> None:
        labels = {
            "training loss": ("epoch", "(units of the objective)"),
            "validation gap": ("epoch", "(units of the objective)"),
            "of the violation": ("epoch", "(units of the constraints)"),
            "learning rate": ("epoch", "(of the bounds)", "rate (per step)"),
            "of the gaps": ("(units of the objective)", "instances (count)"),
            "largest violation": ("(units of the constraints)", "instances (count)"),
            "of the steps": ("steps of the repair (count)", "instances (count)"),
        }
        for alt, expected in labels.items():
            text = words(page.drawing(alt))
            assert all(label in text for label in expected), (alt, text)

    @pytest.mark.usefixtures("blank")
    def test_escapes_strings(self, tmp_path: Path) -> None:
        page = report(tmp_path / "<i>run</i>", name="<script>alert(1)</script>")
        assert page.scripts == [SCRIPT.read_text(encoding="utf-8")]
        assert "i" not in page.tags
        assert "<script>alert(1)</script>" in page.text

    def test_is_the_same_every_time(self, tmp_path: Path) -> None:
        run = write_run(tmp_path)
        assert write_report(run).read_bytes() == write_report(run).read_bytes()

    @pytest.mark.usefixtures("blank")
    def test_replaces_the_old_page_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = write_report(write_run(tmp_path))
        before, names = file.read_bytes(), sorted(tmp_path.iterdir())

        def fail(*_: Any) -> None:
            raise OSError(28, "disk full")

        (tmp_path / "environment.json").unlink()
        monkeypatch.setattr("os.replace", fail)
        with pytest.raises(sn.RunError, match="disk full"):
            write_report(tmp_path)
        assert file.read_bytes() == before
        assert sorted(tmp_path.iterdir()) == [name for name in names if name.name != "environment.json"]


@pytest.mark.usefixtures("blank")
class TestMissingParts:
    @pytest.mark.parametrize(
        ("file", "command", "images"),
        [
            ("environment.json", "snarenet train", 7),
            ("metrics.jsonl", "snarenet train", 3),
            ("evaluation.json", "snarenet evaluate lonely", 7),
            ("evaluation.npz", "snarenet evaluate lonely", 4),
        ],
    )
    def test_names_the_command_that_makes_it(self, tmp_path: Path, file: str, command: str, images: int) -> None:
        page = report(tmp_path / "lonely", leave_out=(file,))
        assert f"{command} makes it." in page.text
        assert len(page.images) == images
        assert file not in page.links

    def test_only_a_config(self, tmp_path: Path) -> None:
        rest = ("environment.json", "metrics.jsonl", "evaluation.json", "evaluation.npz")
        page = report(tmp_path, leave_out=rest)
        assert page.text.count("makes it.") == 4
        assert "damping_ratio" in page.text

    def test_a_folder_without_config_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(sn.RunError, match=r"holds no run: it has no config\.json"):
            write_report(tmp_path)

    def test_a_broken_file_is_named(self, tmp_path: Path) -> None:
        (write_run(tmp_path) / "evaluation.json").write_text('{"tol": ')
        with pytest.raises(sn.RunError, match=r"evaluation\.json must hold JSON"):
            write_report(tmp_path)

    def test_without_a_reference(self, tmp_path: Path) -> None:
        page = report(tmp_path, gap=np.full(5, np.nan))
        assert "the mean objective is -11.62, with no reference to compare it to" in page.text
        assert "no validation gap" in page.text
        assert "no distribution of the gap" in page.text
        assert "Gap to the reference" not in page.text
        assert "faster" not in page.text
        assert len(page.images) == 5


class TestMetrics:
    @pytest.mark.usefixtures("blank")
    def test_a_line_cut_short_is_left_out(self, tmp_path: Path) -> None:
        file = write_run(tmp_path, epochs=3) / "metrics.jsonl"
        file.write_text(file.read_text() + '{"epoch": 4, "st')
        text = Page(write_report(tmp_path)).text
        assert "Trained for 3 of 3 epochs" in text

    def test_numbers_that_are_not_finite(self) -> None:
        bad = {"epoch": 2, "loss": float("nan"), "objective": float("inf"), "violation": float("nan")}
        picture = figures.draw_loss([{"epoch": 1, "loss": 1.0}, bad])
        assert picture.caption.endswith("epochs whose loss is not finite: 1.")
        assert picture.alt.endswith("at the end 1.00.")
        assert "no finite values" not in words(picture.svg)
        assert "no finite values" in words(figures.draw_violation_curve([bad]).svg)

    def test_json_may_say_nan(self, tmp_path: Path, blank: list[Any]) -> None:
        file = write_run(tmp_path, epochs=2) / "metrics.jsonl"
        file.write_text(file.read_text() + '{"epoch": 3, "loss": NaN, "violation": Infinity, "seconds": 200}\n')
        assert "Trained for 3 of 2 epochs in 3 min 20 s." in Page(write_report(tmp_path)).text

    @pytest.mark.parametrize("epochs", [1, 2])
    def test_one_epoch_is_a_point(self, blank: list[Any], epochs: int) -> None:
        figures.draw_loss([{"epoch": k, "loss": 2.0 * k, "objective": 3.0} for k in range(1, 1 + epochs)])
        loss, objective = blank[0].axes[0].lines
        assert (loss.get_marker(), loss.get_linestyle()) == ((".", "None") if epochs == 1 else ("None", "-"))
        assert list(loss.get_ydata()) == [2.0, 4.0][:epochs]
        assert list(objective.get_ydata()) == [3.0] * epochs

    def test_first_losses_do_not_flatten_the_rest(self, blank: list[Any]) -> None:
        metrics = [{"epoch": k, "loss": 1e4 if k == 1 else 1.0, "objective": 0.0} for k in range(1, 101)]
        assert figures.draw_loss(metrics).caption.endswith("values above the frame: 1.")
        low, high = blank[0].axes[0].get_ylim()
        assert low < 0 < 1 < high < 2

    def test_zero_has_a_place_on_the_log_axis(self) -> None:
        metrics = [{"epoch": k, "violation": 0.0} for k in (1, 2)]
        picture = figures.draw_violation_curve(metrics)
        assert "0" in words(picture.svg).split()
        assert "at the end 0." in picture.alt
        gaps = [{"epoch": k, "valid": {"gap": {"gmean": 1e-16, "max": -1e-6}}} for k in (1, 2)]
        curve = figures.draw_gap_curve(gaps)
        assert curve is not None
        assert "≤ 0" in words(curve.svg)


class TestDistributions:
    def test_every_gap_is_counted(self, blank: list[Any]) -> None:
        gap = np.array([1e-3, 1e-3, 2e-2, 0.0, -1e-5, -3e-4, np.nan])
        caption = figures.draw_gaps(gap).caption
        assert caption.endswith("2 of 6 gaps are negative, the lowest -3.00e-4; instances without a reference: 1.")
        assert totals(blank[0]) == [4, 2]
        above, below = bars(blank[0])
        assert (pytest.approx(1e-3), 2) in above
        assert min(above)[0] < 1e-6  # the place of zero is left of the smallest gap
        assert min(below)[0] == pytest.approx(1e-5)

    @pytest.mark.parametrize("value", [0.0, 1e-3, 1.0, 5e-324, 1e308])
    def test_equal_gaps(self, blank: list[Any], value: float) -> None:
        figures.draw_gaps(np.full(3, value))
        assert totals(blank[0]) == [3]

    @pytest.mark.parametrize(
        ("violation", "within", "above"),
        [([0.0, 0.0], 2, 0), ([0.0, 1e-8, 1.1e-8], 2, 1), ([np.nan, np.inf, 1e-9], 1, 0), ([1.0], 0, 1), ([], 0, 0)],
    )
    def test_violations_against_the_tolerance(
        self, blank: list[Any], violation: list[float], within: int, above: int
    ) -> None:
        caption = figures.draw_violations(np.array(violation), 1e-8).caption
        assert f"{within} of {len(violation)} are within the tolerance 1e-08" in caption
        assert totals(blank[0]) == [count for count in (within, above) if count]
        [line] = blank[0].axes[0].lines
        assert list(line.get_xdata()) == [1e-8, 1e-8]
        low, high = blank[0].axes[0].get_xlim()
        assert low < 1e-8 < high

    @pytest.mark.parametrize("steps", [[3], [0, 0, 1], list(range(500))])
    def test_steps(self, blank: list[Any], steps: list[int]) -> None:
        caption = figures.draw_steps(np.array(steps)).caption
        counts, edges, _ = blank[0].axes[0].patches[0].get_data()
        assert counts.sum() == len(steps)
        assert len(counts) <= 40
        assert edges[0] < min(steps)
        assert edges[-1] > max(steps)
        assert caption.endswith(f"from {min(steps)} to {max(steps)}.")


class TestTrajectories:
    def path(self, count: int = 6) -> np.ndarray:
        start = np.random.default_rng(0).uniform(-8, -5, (count, 1, 5))
        return start * np.linspace(1, 0.1, 20)[None, :, None]

    def test_obstacles_of_the_problem(self, tmp_path: Path, blank: list[Any]) -> None:
        gap, sizes = np.full(6, np.nan), {"box": 2, "instances": 12}
        page = report(tmp_path, name="cbf", sizes=sizes, gap=gap, trajectory=self.path())
        drawn = [(*patch.center, patch.width / 2, patch.height / 2) for patch in blank[-1].axes[0].patches]
        assert drawn == OBSTACLES
        assert "Trajectories of 6 of 6 instances among 3 obstacles." in page.text

    @pytest.mark.usefixtures("blank")
    def test_a_problem_of_ones_own(self, tmp_path: Path) -> None:
        assert "Trajectories of 6 of 6 instances." in report(tmp_path, name="", trajectory=self.path()).text

    @pytest.mark.usefixtures("blank")
    def test_draws_a_choice_of_many(self) -> None:
        assert "Trajectories of 5 of 40 instances." in figures.draw_trajectories(self.path(40), most=5).caption


class TestFigures:
    def test_leave_nothing_behind(self, tmp_path: Path) -> None:
        import matplotlib
        import matplotlib.pyplot as plt

        open_before, settings, backend = plt.get_fignums(), dict(matplotlib.rcParams), plt.get_backend()
        report(tmp_path)
        assert plt.get_fignums() == open_before
        assert dict(matplotlib.rcParams) == settings
        assert plt.get_backend() == backend

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ImportError, match=r'pip install "snarenet\[plots\]"'):
            report(tmp_path)


class TestTables:
    def result(self, **changes: Any) -> dict[str, Any]:
        return evaluation(np.array([1e-4, 1e-2]), np.array([1e-9, 1e-9]), np.array([30, 34])) | changes

    def test_sentence(self) -> None:
        assert sentence(self.result()) == (
            "On 2 test instances the gap to the ipopt reference is 1.00e-3 (geometric mean; 1.00e-2 at most), "
            "100% are feasible to 1e-08 after 32 steps (median; 34 at most), "
            "and one instance in a batch of 2 takes 15 µs, 800 times faster than ipopt (12 ms)."
        )

    def test_sentence_of_a_part(self) -> None:
        assert sentence({"split": "valid", "objective": {"mean": 4060.0}}) == (
            "On validation instances the mean objective is 4060, with no reference to compare it to."
        )
        assert sentence({}) == "The evaluation holds no results."

    def test_negative_gaps_are_said(self) -> None:
        result = self.result()
        assert "; 1.5% negative)" in sentence(result | {"gap": result["gap"] | {"negative": 0.015}})

    def test_slower_than_the_reference(self) -> None:
        slow = self.result(seconds={"model": 0.02, "reference": 0.01, "engine": None})
        assert times_faster(slow) == 0.5
        assert "2 times slower than the reference solver (10 ms)" in sentence(slow)

    @pytest.mark.parametrize(("tol", "found"), [(1e-4, ("1e-04", 0.75)), (3e-5, ("1e-04", 0.75)), (1.0, None)])
    def test_feasible_at_the_next_looser_tolerance(self, tol: float, found: tuple[str, float] | None) -> None:
        shares = {"1e-01": 1.0, "1e-04": 0.75, "1e-06": 0.5}
        assert feasible_at({"tol": tol, "feasible": shares}) == found

    def test_groups_hold_every_number(self) -> None:
        groups = evaluation_groups(self.result())
        assert dict(groups["Gap to the reference"])["geometric mean"] == "1.00e-3"
        assert dict(groups["Repair and time"])["ipopt per instance"] == "12 ms"
        assert [label for label, _ in groups["Feasible instances"]] == [f"to 1e-{k:02d}" for k in range(1, 13)]
        assert evaluation_groups({}) == {}

    def test_table_of_several_runs(self) -> None:
        from rich.console import Console

        lone = self.result(gap=None, seconds={"model": 2e-3, "reference": None, "engine": None})
        table = evaluation_table([("[b]first", self.result()), ("lone", lone), ("bare", {})])
        console = Console(width=80)  # nothing is cut on a narrow screen
        with console.capture() as capture:
            console.print(table)
        rows = [line.split() for line in capture.get().splitlines()]
        rest = ["1.00e-9", "100%", "1e-08", "32"]
        assert ["[b]first", "1.00e-3", "1.00e-2", "–", *rest, "15", "µs", "800"] in rows
        assert ["lone", "–", "–", "-11.62", *rest, "2", "ms", "–"] in rows
        assert ["bare", *["–"] * 9] in rows

    def test_table_leaves_empty_columns_out(self) -> None:
        headings = [column.label for column in evaluation_table([("run", self.result())]).columns]
        assert "mean\nf(y)" not in headings
        assert len(headings) == 9
