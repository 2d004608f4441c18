"""Details of single instances: what an evaluation keeps of them, and that a page embeds the same numbers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from projections import GAP, TOL, Projection, T, evaluation, optimum, write_folder

import snarenet as sn
from snarenet.report import write_report
from snarenet.report.closeups import closeups, details
from snarenet.training import Evaluation
from snarenet.training.closeups import choose

pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
ORDER = [1, 4, 2, 0, 3]  # of GAP, the largest first


def embedded(page: str) -> list[dict[str, Any]]:
    [data] = re.findall(r'<script type="application/json" id="closeups">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


@pytest.fixture(scope="module")
def found() -> Evaluation:
    return evaluation()


class Zero(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.0 * x


class TestEvaluation:
    def test_multipliers_in_closed_form(self, found: Evaluation) -> None:
        assert found.arrays["closeup"].tolist() == ORDER
        for k, i in enumerate(ORDER):
            value, multipliers = optimum(T[i])
            np.testing.assert_allclose(found.arrays["closeup_value"][k], value, atol=1e-8)
            np.testing.assert_allclose(found.arrays["closeup_multiplier"][k], multipliers, atol=1e-7)
        assert found.arrays["closeup_residual"].max() < 1e-7

    def test_rows_before_and_after(self, found: Evaluation) -> None:
        np.testing.assert_array_equal(found.arrays["closeup_prediction"][:, 0], T[ORDER])
        np.testing.assert_array_equal(found.arrays["closeup_before"][:, :2], np.stack([T, T], 1)[ORDER])
        np.testing.assert_allclose(found.arrays["closeup_after"][:, 0], 0, atol=TOL)
        assert found.arrays["closeup_lower"].tolist() == [[0, -1, -1, -1]] * 5
        assert found.arrays["closeup_upper"].tolist() == [[0, 1, 1, 1]] * 5

    def test_an_output_that_is_no_optimum_has_a_residual(self) -> None:
        problem = Projection(np.array([3.0]))
        model = sn.ConstrainedModel(Zero(), sn.SnareLayer(problem.constraints)).double()
        arrays = sn.evaluate(model, problem, timed=False, closeups=1).arrays
        # At y = 0 only the equality is active: grad f = (-3, 0, 0) leaves (-2, 1, 1), relative to 3.
        np.testing.assert_allclose(arrays["closeup_multiplier"], [[1, 0, 0, 0]], atol=1e-9)
        np.testing.assert_allclose(arrays["closeup_residual"], 2 / 3)

    def test_without_references_by_distance(self) -> None:
        arrays = evaluation(gap=None).arrays
        assert arrays["closeup"].tolist() == [1, 2, 4, 3, 0]

    def test_an_unknown_gap_comes_last(self) -> None:
        arrays = evaluation(gap=np.array([0.1, np.nan, 0.2, -0.3, 0.3])).arrays
        assert arrays["closeup"].tolist() == [4, 2, 0, 3, 1]

    def test_only_if_asked_for(self) -> None:
        assert not [name for name in evaluation(closeups=0).arrays if name.startswith("closeup")]

    @pytest.mark.parametrize(("total", "count"), [(833, 100), (101, 100), (7, 3), (5, 1), (4, 4), (3, 9)])
    def test_choice(self, total: int, count: int) -> None:
        ranks = choose(total, count)
        assert len(ranks) == min(total, count) == len(set(ranks.tolist()))
        assert ranks[: max(1, count // 5)].tolist() == list(range(min(total, max(1, count // 5))))
        assert (np.diff(ranks) > 0).all()
        assert count == 1 or ranks[-1] == total - 1

    def test_without_scipy(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setitem(sys.modules, "scipy.optimize", None)
        found = evaluation()
        assert np.isnan(found.arrays["closeup_multiplier"]).all()
        page = write_report(write_folder(tmp_path, found)).read_text()
        assert "they need scipy" in page
        assert embedded(page)[0]["residual"] is None


class TestPage:
    def test_embeds_the_evaluation(self, found: Evaluation, tmp_path: Path) -> None:
        page = write_report(write_folder(tmp_path, found)).read_text()
        data, arrays = embedded(page), found.arrays
        assert [(one["instance"], one["rank"]) for one in data] == [(i, k + 1) for k, i in enumerate(ORDER)]
        for k, (i, one) in enumerate(zip(ORDER, data, strict=True)):
            for name in ("gap", "objective", "violation", "steps"):
                assert one[name] == pytest.approx(arrays[name][i], rel=1e-4), name
            assert one["gap"] == pytest.approx(GAP[i], abs=1e-6)
            for j, before, after, moved in one["moves"]:
                assert before == pytest.approx(arrays["closeup_prediction"][k, j], rel=1e-4)
                assert after == pytest.approx(arrays["closeup_value"][k, j], rel=1e-4, abs=1e-12)
                assert moved == pytest.approx(after - before, abs=1e-4)
            value, multipliers = optimum(T[i])
            assert one["distance"] == pytest.approx(np.linalg.norm(value - [T[i], 0, 0]), rel=1e-4)
            told = multipliers[: 1 + (abs(T[i]) > 1)]  # the first of the box if the prediction violates it
            assert {row[0]: row[-1] for row in one["rows"]} == pytest.approx(dict(enumerate(told)), rel=1e-4, abs=1e-7)

    def test_rows_of_one_instance(self, found: Evaluation) -> None:
        below = details(found.arrays, ORDER.index(2), TOL)  # t = -3
        equality, box = below["rows"]
        assert equality == [0, 0.0, 0.0, -3.0, -3.0, pytest.approx(0, abs=TOL), "equal", pytest.approx(-0.5)]
        assert box == [1, -1.0, 1.0, -3.0, -2.0, pytest.approx(-1), "lower", pytest.approx(-1.5)]
        assert below["predicted"] == 3.0
        assert below["counts"] == {"moves": 3, "rows": 2, "violated": 2, "active": 2}
        assert below["moves"][0] == [0, -3.0, pytest.approx(-1), pytest.approx(2)]

    def test_a_violation_within_the_tolerance_is_none(self, found: Evaluation) -> None:
        assert details(found.arrays, ORDER.index(2), 2.5)["counts"]["violated"] == 1

    def test_stays_small(self) -> None:
        rng = np.random.default_rng(0)
        k, n, m = 100, 100, 300
        wide = {name: rng.normal(size=(k, m)) for name in ("before", "after", "multiplier")}
        wide |= {"lower": wide["after"], "upper": wide["after"] + 1}
        arrays = {f"closeup_{name}": values for name, values in wide.items()} | {
            **{f"closeup_{name}": rng.normal(size=(k, n)) for name in ("prediction", "value")},
            **{"closeup": np.arange(k), "closeup_rank": np.arange(k), "closeup_residual": rng.random(k)},
            **{name: rng.random(k) for name in ("gap", "objective", "violation", "steps")},
        }
        assert len(closeups(arrays, TOL)) < 1.2e6
        one = details(arrays, 0, TOL)
        assert (len(one["moves"]), len(one["rows"]), one["counts"]["rows"]) == (60, 60, 300)
        moves = np.abs([move[-1] for move in one["moves"]])
        assert (np.diff(moves) <= 0).all()

    def test_says_what_makes_them(self, tmp_path: Path) -> None:
        page = write_report(write_folder(tmp_path, evaluation(closeups=0))).read_text()
        assert "<code>evaluate(..., closeups=100)</code> makes it." in page

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"closeup_value": np.zeros((5, 2))}, "'closeup_value' must have the shape (5, 3), but has (5, 2)"),
            ({"closeup_rank": np.zeros(4)}, "'closeup_rank' must have the shape (5,), but has (4,)"),
            ({"closeup_after": np.zeros(5)}, "'closeup_after' must have the shape"),
            ({"closeup": np.arange(1, 6)}, "'closeup' must name some of 5 instances, but is"),
            ({"closeup_lower": None}, "'closeup_lower' is missing"),
        ],
    )
    def test_details_that_do_not_fit(
        self, found: Evaluation, tmp_path: Path, change: dict[str, Any], said: str
    ) -> None:
        arrays = {name: array for name, array in (found.arrays | change).items() if array is not None}
        folder = write_folder(tmp_path, Evaluation(found.summary, arrays))
        with pytest.raises(sn.RunError, match=re.escape(said)):
            write_report(folder)
