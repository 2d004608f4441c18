"""What a recorded step is told: how many repair steps, and what becomes of a recording that was spoiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import snarenet as sn
from snarenet.training import step
from snarenet.training.distributed import Group
from snarenet.training.step import Stepper, Totals, recordable


def stepper(**changes: Any) -> Stepper:
    """One that would record, as on a GPU."""
    family = sn.problems.load("nclp", size=8, inequalities=3, equalities=2, instances=40)
    config = sn.TrainConfig(width=8, **changes)
    made = Stepper(config.build(family), family, config, Group())
    made.records, made.record = True, 30
    return made


def test_steps_follow_what_is_needed() -> None:
    made = stepper(max_steps=40)
    made._recorded["exact"] = None  # pyright: ignore
    made.review_record(failed=0.0, steps=19.0)  # 29 would do
    assert made.record == 30
    assert made._recorded
    made.review_record(failed=0.0, steps=4.0)
    assert made.record == 8  # no fewer
    assert not made._recorded
    made.review_record(failed=0.05, steps=8.0)
    assert made.record == 12
    made = stepper(max_steps=40)
    made.record = 39
    made.review_record(failed=0.05, steps=39.0)
    assert made.record == 40


def test_samples_that_more_steps_do_not_help_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 samples one is lost, and one was rescued after 100 steps; the others need at most 10."""
    made, x = stepper(), sn.problems.load("nclp", size=8, inequalities=3, equalities=2, instances=40).inputs[:20]
    outcome = made.problem.run(made.model, x)
    taken, reached = torch.arange(20) // 2 + 1, torch.ones(20, dtype=torch.bool)
    taken[:2], reached[0] = torch.tensor([600, 130]), False
    changed = outcome._replace(steps=taken, converged=reached)
    monkeypatch.setattr(type(made.problem), "run", lambda *_: changed)
    made.choose_record(x)
    assert made.record == 15
    assert made.lost == pytest.approx(0.1)
    made.review_record(failed=0.105, steps=15.0)
    assert made.record == 15
    made.review_record(failed=0.12, steps=15.0)
    assert made.record == 23


def test_steps_that_did_not_help_are_not_kept() -> None:
    """Every tenth sample fails, with more steps as without."""
    made = stepper(max_steps=100)
    made.review_record(failed=0.1, steps=6.0)
    assert made.record == 45
    made.review_record(failed=0.095, steps=6.0)
    assert made.record == 9
    made.review_record(failed=0.1, steps=6.0)
    assert made.record == 9
    made.review_record(failed=0.15, steps=6.0)  # others
    assert made.record == 14
    made.review_record(failed=0.1, steps=9.0)
    assert made.record == 14


def test_steps_of_nearly_all() -> None:
    """Of 100 samples a seed two need many steps, and half fail after more."""
    made, family = Totals(torch.device("cpu"), 2), stepper().problem
    outcome = family.run(stepper().model, family.inputs[:1].repeat(200, 1))
    taken, reached = torch.full((200,), 4), torch.ones(200, dtype=torch.bool)
    taken[:2], taken[100:150], reached[100:150] = 70, 90, False
    made.add(outcome.cost, outcome._replace(steps=taken, converged=reached))
    assert made.usual_steps() == pytest.approx(4, abs=2)
    assert made.line(Group(), 1)["steps"] == 90


def test_steps_that_were_asked_for_stay() -> None:
    made = stepper(record=30)
    made.review_record(failed=0.5, steps=4.0)
    assert made.record == 30


@pytest.mark.parametrize("spoiled", [0, 2, 3])
def test_a_recording_that_was_spoiled_is_made_again(spoiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tries = stepper(), []

    def record(*_: Any) -> str:
        tries.append(None)
        if len(tries) <= spoiled:
            try:
                raise ValueError("the cause")
            except ValueError:
                raise RuntimeError("what followed")  # noqa: B904
        return "recorded"

    monkeypatch.setattr(step, "_Recording", record)
    x = made.problem.inputs[:4]
    if spoiled == 3:
        with pytest.warns(UserWarning, match="steps take longer than they could.*the cause"):
            assert made._recording(x, 0.0, False) is None
        assert not made.records
    else:
        assert made._recording(x, 0.0, False) == "recorded"
        assert made._recording(x, 0.0, False) == "recorded"
        assert len(tries) == spoiled + 1


@pytest.mark.parametrize(
    ("family", "changes", "recorded"),
    [
        ("nclp", {}, True),
        ("nclp", {"record": 0}, False),
        ("nclp", {"method": "dc3"}, False),
        ("nclp", {"method": "dc3", "record": 5}, True),
        ("nclp", {"method": "fsnet", "record": 5}, False),
        ("mpc", {}, False),  # the nearest point is sought by a search that looks at values
        ("mpc", {"start": "none"}, True),
        ("mpc", {"record": 5}, True),
    ],
)
def test_what_is_recorded(family: str, changes: dict[str, Any], recorded: bool) -> None:
    small = {"size": 8, "inequalities": 3, "equalities": 2} if family == "nclp" else {"horizon": 3}
    problem = sn.problems.load(family, instances=40, **small)
    config = sn.TrainConfig(**changes)
    assert recordable(config, config.build_layer(problem), problem) == recorded
