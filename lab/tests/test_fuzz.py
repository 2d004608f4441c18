"""The search finds nothing in the library as it is, and finds what is planted; what it prints is what it ran."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.constraints import base as sets
from snarenet.constraints.maps import LinearMap, QuadraticMap
from snarenet.repair.loop.spaces import ConstraintSpace, OutputSpace
from snarenet.repair.loop.steps import Pulled
from snarenet_lab.fuzz import checks, fuzz
from snarenet_lab.fuzz.__main__ import main
from snarenet_lab.fuzz.case import Case, Datum, Part
from snarenet_lab.fuzz.checks import defect
from snarenet_lab.fuzz.drawing import draw
from snarenet_lab.fuzz.outcome import run
from snarenet_lab.fuzz.shrinking import shrink

repairs = importlib.import_module("snarenet.repair.repair")  # the package has a function of this name


def t(numbers: list[Any]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def nothing(line: str) -> None:
    pass


def test_nothing_is_found() -> None:
    """The short version of `make fuzz`."""
    search = fuzz(samples=3000, seed=0, report=nothing)
    assert search.samples >= 3000
    assert [str(one) for one in search.defects] == []


def test_a_case_is_the_same_every_time() -> None:
    for index in range(20):
        assert draw(1, index).source() == draw(1, index).source()
    assert draw(1, 0).source() != draw(2, 0).source()


def test_every_kind_is_drawn() -> None:
    cases = [draw(0, index) for index in range(400)]
    assert {part.kind for case in cases for part in case.parts} == {"linear", "quadratic", "box", "nonlinear"}
    assert {case.y.dtype for case in cases} == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    assert {len(case.y) for case in cases} >= {0, 1, 2, 128}
    sizes = [
        datum.value.abs().max().item()
        for c in cases
        for p in c.parts
        for n, datum in p.data.items()
        if n == "A" and datum.value.numel()
    ]
    assert min(size for size in sizes if size) < 1e-9
    assert max(sizes) > 1e9
    statuses = torch.cat([seen.solution.status for case in cases[:60] if (seen := run(case)).solution is not None])
    assert set(statuses.tolist()) == {int(status) for status in sn.Status}
    assert (statuses == sn.Status.CONVERGED).double().mean() > 0.5


DISK = Case(
    (
        Part("quadratic", 2, {"H": Datum(t([[1.0, 2.0], [0.5, 1.0]])), "upper": Datum(t([1.0, 9.0]), learned=True)}),
        Part("linear", 1, {"A": Datum(t([[1.0, 1.0]]), slope=t([[0.1, 0.2]])), "lower": Datum(t([0.5]))}),
    ),
    t([[3.0, 1.0], [0.2, 4.0], [0.1, -2.0]]),
    t([[0.3], [-0.2], [0.4]]),
    {"start": None, "rows": "active"},
)
SHORT = replace(DISK, options={"start": None, "tol": 1e-5, "dtype": torch.float32})
POLYGON = Case(
    (Part("linear", 2, {"A": Datum(t([[1.0, 2.0], [1.0, -1.0]])), "upper": Datum(t([1.0, 0.5]), learned=True)}),),
    t([[3.0, 1.0], [0.2, 4.0], [3.0, -2.0]]),
    options={"start": None},  # faults are planted in its steps
)


def test_what_is_printed_is_what_was_run() -> None:
    found: dict[str, Any] = {}
    exec(DISK.source(), found)
    assert torch.equal(found["solution"].value, DISK.run()[0].value)
    H, A = t([[1.0, 2.0], [0.5, 1.0]]), t([[1.0, 1.0]])
    y, x = DISK.y, DISK.x
    assert x is not None
    expected = torch.cat([y.square() @ H.T, (y * (A + x * t([[0.1, 0.2]]))).sum(1, keepdim=True)], 1)
    torch.testing.assert_close(DISK.value(y), expected)


def flipped(real: Callable[..., Any]) -> Callable[..., Any]:
    """A repair that says of its first sample what is not so."""

    def planted(*arguments: Any) -> sn.Solution:
        solution = real(*arguments)
        status = solution.status.clone()
        status[:1] = torch.where(status[:1] == sn.Status.CONVERGED, int(sn.Status.STALLED), int(sn.Status.CONVERGED))
        return solution._replace(status=status)

    return planted


def before_rounding(real: Callable[..., Any]) -> Callable[..., Any]:
    """A repair whose value is not the one that was judged."""

    def planted(*arguments: Any) -> sn.Solution:
        solution = real(*arguments)
        return solution._replace(value=solution.value * (1 + 1e-6))

    return planted


def wrong_sign(real: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose bounds get the gradient of the other direction."""

    def planted(*arguments: Any) -> Pulled:
        pulled = real(*arguments)
        return pulled._replace(rows=-pulled.rows)

    return planted


def a_little_off(real: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose rows get 1 % too much."""

    def planted(*arguments: Any) -> Pulled:
        pulled = real(*arguments)
        return pulled._replace(rows=1.01 * pulled.rows)

    return planted


def no_number(real: Callable[..., Any]) -> Callable[..., Any]:
    """A step back to nowhere."""

    def planted(*arguments: Any) -> Pulled:
        pulled = real(*arguments)
        return pulled._replace(cotangent=pulled.cotangent * torch.nan)

    return planted


def unmasked(real: Callable[..., Any]) -> Callable[..., Any]:
    """A step back in which satisfied rows take part."""

    def planted(self: Any, step: Any, *rest: Any) -> Pulled:
        return real(self, step._replace(used=torch.ones_like(step.used)), *rest)

    return planted


def of_the_batch(real: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is damped by how many others there are."""

    def planted(self: Any, position: Tensor, residual: Tensor, *rest: Any) -> Any:
        return real(self, position, residual * (1 - 1e-3 * len(position)), *rest)

    return planted


def half(real: Callable[..., Any]) -> Callable[..., Any]:
    """Rows whose Jacobian is fine but whose value is not."""
    return lambda self, y: real(self, y) * 0.5


PLANTED = [
    ("statuses", POLYGON, repairs, "_repair", flipped),
    ("violations", POLYGON, repairs, "_repair", before_rounding),
    ("differences", POLYGON, ConstraintSpace, "pull_step", wrong_sign),
    ("differences", DISK, OutputSpace, "pull_step", wrong_sign),
    ("differences", DISK, OutputSpace, "pull_step", unmasked),
    ("differences", DISK, OutputSpace, "pull_step", a_little_off),
    ("finite_gradients", DISK, OutputSpace, "pull_step", no_number),
    ("finite_gradients", SHORT, OutputSpace, "pull_step", no_number),
    ("independence", DISK, OutputSpace, "step", of_the_batch),
    ("violations", POLYGON, LinearMap, "value", half),
    ("violations", DISK, QuadraticMap, "value", half),
]


@pytest.mark.parametrize(
    ("check", "case", "where", "name", "fault"),
    PLANTED,
    ids=[f"{p[0]}-{p[3]}-{p[4].__name__}-{k}" for k, p in enumerate(PLANTED)],
)
def test_a_planted_fault_is_found(
    check: str, case: Case, where: Any, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert defect(case) is None
    monkeypatch.setattr(where, name, fault(getattr(where, name)))
    found = defect(case)
    assert found is not None
    assert found[0].__name__ == check


def test_kinks_nearer_than_a_step_are_no_defect() -> None:
    """Inside a band of 2e-10 the first entry moves freely, outside it does not: steps of 1e-5 see only the latter."""
    band = {"lower": Datum(t([0.01 - 1e-10, -1e3])), "upper": Datum(t([0.01 + 1e-10, 1.0]))}
    rows = Part("linear", 2, {"A": Datum(t([[1.0, 0.0, 0.0], [0.0, 1.0, 2.0]])), **band})
    case = Case((rows,), t([[0.01, 3.0, 1.0]]), options={"rows": "all"})
    seen = run(case)
    assert seen.gradients is not None
    direction = {"y": t([[0.01 * math.cos(1), 3 * math.cos(2), math.cos(5)]])}
    assert defect(case) is None
    coarse, fine = (checks._slopes(seen, direction, h) for h in (1e-5, 1e-8))
    assert coarse is not None
    assert fine is not None
    said = (seen.gradients["y"] * direction["y"]).sum().item()
    assert abs(fine.mean - said) < 1e-6
    assert abs(coarse.mean - said) > 2e-3


@pytest.mark.parametrize(("amount", "fine"), [(1e-15, True), (1e-10, False)])
def test_what_cancels_in_a_gradient_may_be_rounding(amount: float, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that hold y, from far away: the gradient is 1 - 1, times predictions of a million."""
    rows = replace(POLYGON.parts[0], data={"A": POLYGON.parts[0].data["A"], "equals": Datum(t([1.0, 0.5]))})
    case = replace(POLYGON, parts=(rows,), y=1e6 * POLYGON.y)
    real = ConstraintSpace.pull_finish

    def of_the_batch(self: Any, y: Tensor, *rest: Any) -> Any:
        found, others = real(self, y, *rest)
        return found + amount * len(y), others

    monkeypatch.setattr(ConstraintSpace, "pull_finish", of_the_batch)
    assert (checks.independence(run(case)) is None) == fine


def test_gradients_that_float32_cannot_hold_are_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step back that is as steep as on a path that fails leaves float32, but not float64."""
    real = OutputSpace.pull_step

    def steep(*arguments: Any) -> Pulled:
        pulled = real(*arguments)
        return pulled._replace(cotangent=1e10 * pulled.cotangent)

    monkeypatch.setattr(OutputSpace, "pull_step", steep)
    seen = run(SHORT)
    assert seen.gradients is not None
    assert not seen.gradients["y"].isfinite().all()
    assert checks.finite_gradients(seen) is None


def test_a_crash_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(value: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
        raise IndexError("planted")

    monkeypatch.setattr(sets, "residual", broken)
    monkeypatch.setattr(repairs, "residual", broken)
    found = defect(DISK)
    assert found is not None
    assert found[1] == "IndexError: planted"
    small = shrink(replace(DISK, options={"rows": "active", "rescue": True}), found[0], seconds=5)
    assert len(small.parts) == 1
    assert len(small.y) <= 1
    assert small.options == {}
    assert "lambda" not in small.source()


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--seed", "0", "--only", "2"])
    assert stop.value.code == 0
    assert "samples in 1 cases: no defect." in capsys.readouterr().out
    monkeypatch.setattr(repairs, "_repair", flipped(repairs._repair))
    monkeypatch.setattr("snarenet_lab.fuzz.shrink", lambda case, check: case)
    with pytest.raises(SystemExit) as stop:
        main(["--seed", "0", "--samples", "100", "--most", "1"])
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert "of seed 0, statuses: sample 0 is" in printed
    assert "solution = sn.repair(S, y, x" in printed


def test_a_mistake_that_nobody_notices_is_a_defect() -> None:
    found = defect(replace(POLYGON, wrong="tol"))
    assert found is not None
    assert "`tol` was not noticed" in found[1]
    assert defect(replace(POLYGON, wrong="tol", options={"tol": -1.0})) is None
