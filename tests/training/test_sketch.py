"""A run knows its problem's data again, also where they were rounded otherwise, and no other data."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems import Problem
from snarenet.training import run as runs
from snarenet.training.sketch import differences, exact, sketch

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 60}
OLD = Path(__file__).parent / "data" / "run-0.1"


def problem(seed: int = 2025) -> Problem:
    return sn.problems.load("nclp", **SIZES, seed=seed)


def name_of(family: Problem, end: str) -> str:
    return next(name for name in family.state_dict() if name.endswith(end))


def rounded(family: Problem) -> Problem:
    """The same data with other last digits."""
    noise = torch.Generator().manual_seed(0)
    for tensor in family.state_dict().values():
        if tensor.is_floating_point():
            steps = torch.randint(-4, 5, tensor.shape, generator=noise).to(tensor.dtype)
            tensor *= 1 + torch.finfo(tensor.dtype).eps * steps
    return family


@contextmanager
def another_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Families are computed with other last digits."""
    real = runs.load
    with monkeypatch.context() as patch:
        patch.setattr(runs, "load", lambda *args, **sizes: rounded(real(*args, **sizes)))
        yield


def fit(out: Path, family: Problem, epochs: int = 1, resume: Path | None = None) -> sn.Run:
    config = sn.TrainConfig(epochs=epochs, batch=25, width=8, schedule="constant", warmup=0.0)
    return sn.Trainer(config, out, quiet=True).fit(config.build(family), family, resume)


class TestSketch:
    def test_rounding_is_no_difference(self) -> None:
        assert not differences(sketch(problem()), sketch(rounded(problem())))
        assert exact(problem()) != exact(rounded(problem()))

    @pytest.mark.parametrize("kind", [torch.float32, torch.float64])
    def test_a_tensor_says_where_it_was_rounded(self, kind: torch.dtype) -> None:
        family = problem().to(kind)
        assert not differences(sketch(family), sketch(rounded(problem().to(kind))))

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda t: t.mul_(1.001), id="scaled"),
            pytest.param(lambda t: t[0].mul_(1.001), id="one entry"),
            pytest.param(lambda t: t.copy_(t.flip(0)), id="the other way round"),
            pytest.param(lambda t: t[-1].fill_(torch.inf), id="no bound"),
            pytest.param(lambda t: t[-1].fill_(torch.nan), id="no number"),
            pytest.param(lambda t: t.neg_(), id="another sign"),
        ],
    )
    def test_a_change_is_named(self, change) -> None:
        family = problem()
        name = name_of(family, "upper")
        change(family.state_dict()[name])
        assert differences(sketch(problem()), sketch(family)) == [f"NCLP.{name}"]

    def test_every_entry_counts(self) -> None:
        family, before = problem(), sketch(problem())
        for entry in family.inputs.view(-1):
            entry += 1e-4
            assert differences(before, sketch(family)) == ["NCLP.inputs"]
            entry -= 1e-4
        assert not differences(before, sketch(family))

    def test_another_class_is_another_problem(self) -> None:
        """Its objective may be another, though its tensors are the same."""
        family = problem()
        family.__class__ = type("Mine", (type(family),), {})
        assert "Mine.inputs" in differences(sketch(problem()), sketch(family))

    def test_infinite_entries_know_their_places_and_signs(self) -> None:
        def bounds(*entries: float) -> Problem:
            family = problem()
            family.register_buffer("bounds", torch.tensor(entries))
            return family

        one = sketch(bounds(torch.inf, 1.0, -torch.inf))
        assert not differences(one, sketch(bounds(torch.inf, 1.0, -torch.inf)))
        assert differences(one, sketch(bounds(-torch.inf, 1.0, torch.inf))) == ["NCLP.bounds"]

    def test_tensors_that_one_has_alone(self) -> None:
        family = problem()
        family.register_buffer("more", torch.ones(3, dtype=torch.int64))
        assert differences(sketch(problem()), sketch(family)) == ["NCLP.more"]
        assert differences(sketch(family), sketch(problem())) == ["NCLP.more"]

    @pytest.mark.parametrize(
        "tensor", [torch.zeros(0), torch.zeros(3), torch.ones(2, dtype=torch.complex128), torch.tensor([True, False])]
    )
    def test_any_kind_of_tensor(self, tensor: Tensor) -> None:
        family, other = problem(), problem()
        family.register_buffer("more", tensor)
        other.register_buffer("more", tensor.clone())
        assert not differences(sketch(family), sketch(other))
        other.more = torch.cat([tensor, tensor.new_ones(1)])
        assert differences(sketch(family), sketch(other)) == ["NCLP.more"]


class TestRuns:
    def test_loaded_and_resumed_on_another_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fit(tmp_path, problem())
        with another_machine(monkeypatch):
            model = sn.load_model(tmp_path)
        x = problem().split("test")
        torch.testing.assert_close(model(x), sn.load_model(tmp_path)(x), rtol=0, atol=1e-7)
        assert len(fit(tmp_path, rounded(problem()), 2, resume=tmp_path).metrics()) == 2

    def test_other_data_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fit(tmp_path, problem())
        monkeypatch.setattr(runs, "load", lambda *args, **sizes: problem(seed=1))
        with pytest.raises(sn.RunError, match=r"'nclp' are not the same .*: other numbers in NCLP.inputs, .*, \.\.\."):
            sn.load_model(tmp_path)
        with pytest.raises(sn.RunError, match=r"another problem \(nclp\): other numbers in NCLP.inputs, "):
            fit(tmp_path, problem(seed=1), 2, resume=tmp_path)


class TestFirstVersion:
    """Its folders have a hash of all bytes, which no other machine need agree with."""

    @pytest.fixture
    def old(self, tmp_path: Path) -> Path:
        return shutil.copytree(OLD, tmp_path / "run")

    def test_it_loads_with_a_warning_where_digits_differ(self, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with another_machine(monkeypatch), pytest.warns(UserWarning, match="noted the data of 'nclp' to the last"):
            assert not sn.load_model(old).training  # on any machine, unless it is rounded there just as at first

    def test_it_goes_on_with_no_problem_of_other_sizes(self, old: Path) -> None:
        run = sn.Run.open(old)
        with pytest.raises(sn.RunError, match=r"another problem \(nclp\): other numbers in all of it"):
            run.resume(run.config, problem())
