"""Rows that outlive their runs, what they are worth beside the paper's, and notes on where they are from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from snarenet_lab.experiments.stored import better, held, with_stored, with_stored_figures
from snarenet_lab.report.agreement import agreement
from snarenet_lab.report.documents import remarks, write_results
from snarenet_lab.report.provenance import notes_on, read_notes
from snarenet_lab.report.results import Cell, Results, Row, Sheet


def trained(epochs: int, values: dict[int, float], label: str = "A", source: str = "parity") -> Row:
    """A row of two quantities: a value for each seed, and that value times ten."""
    cells = {"gap": Cell.of([*values.values()]), "time": Cell.of([10 * value for value in values.values()])}
    cells = cells if values else {}
    return Row(label, source, cells, len(values), 5, tuple(values), f"--epochs {epochs}", epochs, 100)  # pyright: ignore


def results(*rows: Row, **changes: object) -> Results:
    found = Results("nclp", "NCLP", "About.", (Sheet("t", "T: test", (), rows),), main=("gap", "mean gap"))
    return replace(found, **changes)  # pyright: ignore


class TestStored:
    def test_without_runs_the_stored_row_stays(self) -> None:
        old = replace(trained(100, {1: 2.0}), planned=1)
        assert better(trained(100, {}), old) == replace(old, planned=5)
        assert better(trained(200, {}), old) == replace(old, planned=5)
        assert better(trained(100, {1: 3.0}), None).cells["gap"].mean == 3.0

    def test_more_epochs_win_even_with_fewer_seeds(self) -> None:
        few, many = trained(45, {1: 9.0, 2: 9.0, 3: 9.0}), trained(100, {1: 2.0})
        assert better(many, few) == better(few, many) == many
        assert better(few, many).count == "1 of 5"

    def test_seeds_of_the_same_training_come_together(self) -> None:
        old, new = trained(100, {1: 2.0, 2: 4.0}), trained(100, {2: 6.0, 3: 7.0})
        found = better(new, old)
        assert found.seeds == (2, 3, 1)
        assert found.cells["gap"] == Cell.of([6.0, 7.0, 2.0])
        assert found.cells["time"].values == (60.0, 70.0, 20.0)
        assert found.count == "3 of 5"
        plain = replace(new, cells={"gap": new.cells["gap"]}, seeds=(1, 2))  # without the times
        assert better(plain, old).cells["time"].values == (20.0, 40.0)
        assert [*better(replace(plain, seeds=(2, 3)), old).cells] == ["gap"]
        other = replace(old, command="--epochs 100 --width 8")  # another training
        assert better(new, other) == new

    def test_another_training_takes_no_seeds_away(self) -> None:
        old = replace(trained(100, {1: 2.0, 2: 4.0, 3: 5.0}), command="--epochs 100 --width 8")
        assert better(trained(100, {4: 6.0}), old) == old
        assert better(trained(100, {4: 6.0, 5: 7.0, 1: 8.0}), old).seeds == (4, 5, 1)

    def test_what_a_row_holds_is_not_trained_again(self) -> None:
        row = trained(100, {1: 2.0, 2: 4.0})
        assert held(row, 100, "--epochs 100", (1, 2, 3)) == {1, 2}
        assert held(row, 100, "--epochs 100 --width 8", (1, 2, 3)) == set()  # seeds of two trainings make no row
        assert held(row, 100, "--epochs 100 --width 8", (1, 2)) == {1, 2}
        assert held(row, 200, "--epochs 200", (1, 2)) == set()

    def test_tables(self) -> None:
        paper = Row("A", "paper", {"gap": Cell(1.0)})
        measured, solver = Row("M", "measured", {"gap": Cell(1.0)}), Row("A", "solver", {"gap": Cell(0.0)})
        stored = results(replace(paper, cells={"gap": Cell(5.0)}), trained(45, {1: 9.0}), measured, solver)
        new = Sheet("t", "T", (), (paper, trained(100, {}), trained(60, {}, "B")))
        (found,) = with_stored([new], stored)
        assert [(row.label, row.source, row.done) for row in found.rows] == [
            ("A", "paper", 0), ("A", "parity", 1), ("A", "solver", 0), ("B", "parity", 0), ("M", "measured", 0)
        ]  # fmt: skip
        assert found.rows[0] == paper  # the paper's are typed in the code
        assert with_stored([new], None) == [new]

    def test_series_of_figures(self) -> None:
        old = results(figures=({"name": "f", "series": [{"label": "a", "x": 1}, {"label": "b", "x": 1}]},))
        new = {"name": "f", "series": [{"label": "b", "x": 2}]}
        assert with_stored_figures([new], old) == [
            {"name": "f", "series": [{"label": "b", "x": 2}, {"label": "a", "x": 1}]}
        ]
        assert with_stored_figures([], old) == [*old.figures]
        assert with_stored_figures([new], None) == [new]


class TestAgreement:
    PAPER = Row("A", "paper", {"gap": Cell(2.0, 0.5)})

    def test_is_judged_by_the_papers_spread(self) -> None:
        assert agreement(results(self.PAPER, trained(100, {1: 2.9, 2: 2.9}))) == [
            "Within two standard deviations of the paper (mean gap): A (2.9; the paper's 2 ± 0.5)."
        ]
        assert agreement(results(self.PAPER, trained(100, {1: 3.1}))) == [
            "Further from the paper than two of its standard deviations (mean gap): A (3.1; the paper's 2 ± 0.5)."
        ]
        assert agreement(results(self.PAPER, trained(45, {1: 642.0}))) == [
            "Not comparable, for want of epochs (mean gap): A (642 after 45 of 100 epochs; the paper's 2 ± 0.5)."
        ]
        alone = replace(self.PAPER, cells={"gap": Cell(2.0)})
        assert agreement(results(alone, trained(100, {1: 3.1})))[0].startswith("The paper has one seed")

    def test_no_number_stands_for_what_diverged(self) -> None:
        (found,) = agreement(results(self.PAPER, trained(100, {1: 3.1, 2: 1e40})))
        assert found.endswith("A (1 of 2 seeds diverged; the paper's 2 ± 0.5).")

    def test_rows_with_the_same_numbers_are_said_once(self) -> None:
        labels = ("S, tol 1e-4", "S, tol 1e-6")
        rows = [replace(self.PAPER, label=label) for label in labels]
        rows += [trained(100, {1: 2.0}, label) for label in labels]
        assert agreement(results(*rows))[0].endswith(": S, tol 1e-4, 1e-6 (2; the paper's 2 ± 0.5).")

    def test_only_parity_is_judged(self) -> None:
        assert agreement(results(self.PAPER, trained(100, {1: 9.0}, source="best"))) == []
        assert agreement(results(self.PAPER, trained(100, {1: 9.0}), main=("", ""))) == []


class TestProvenance:
    NOTES = (
        {"note": "For all."},
        {"note": "For some.", "labels": ["A*"], "source": "parity", "epochs": 45, "command": "--epochs 45"},
        {"note": "For none.", "labels": ["B"]},
        {"note": "Nor of this command.", "command": "--epochs 46"},
    )

    def write(self, folder: Path, notes: object) -> None:
        (folder / "provenance.json").write_text(json.dumps({"nclp": notes}))

    def test_notes_are_about_rows(self, tmp_path: Path) -> None:
        found = results(TestAgreement.PAPER, trained(45, {1: 9.0}))
        assert notes_on(found, tmp_path) == []
        self.write(tmp_path, self.NOTES)
        assert notes_on(found, tmp_path) == ["For all.", "For some."]
        assert notes_on(results(trained(100, {1: 9.0})), tmp_path) == ["For all."]  # a row in its place
        assert notes_on(replace(found, item="qcqp"), tmp_path) == []
        assert notes_on(results(TestAgreement.PAPER), tmp_path) == []  # never about the paper's

    def test_they_are_among_the_remarks(self, tmp_path: Path) -> None:
        self.write(tmp_path, self.NOTES)
        found = results(trained(45, {1: 9.0}), remarks=("First.",), origin={"command": "snarenet"})
        assert remarks(found, tmp_path) == ["First.", "For all.", "For some."]
        write_results(found, tmp_path)
        assert "- First.\n- For all.\n- For some.\n" in (tmp_path / "nclp.md").read_text()
        assert Results.read(json.loads((tmp_path / "nclp.json").read_text())) == found  # and not stored twice

    def test_mistakes(self, tmp_path: Path) -> None:
        self.write(tmp_path, [{"text": "?"}])
        with pytest.raises(ValueError, match="must hold a list of notes for every item"):
            read_notes(tmp_path)
