"""AC optimal power flow: its equations, loads, inputs without a feasible point, and PGLib's own optima."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems import ACOPF
from snarenet.problems.arithmetic import Casadi
from snarenet.training.evaluate import at

TRIANGLE = str(Path(__file__).parent / "triangle.m")
F64 = torch.float64


def grid(case: str = TRIANGLE, **sizes: Any) -> ACOPF:
    problem = sn.problems.load("acopf", case=case, **({"instances": 60} | sizes))
    assert isinstance(problem, ACOPF)
    return problem


def around(problem: ACOPF, count: int = 4) -> Tensor:
    """(count, n) points near the flat start."""
    noise = torch.randn(count, problem.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    return problem.flat + 0.1 * noise


@pytest.mark.parametrize(("case", "off"), [("30_ieee", 0.3), ("57_ieee", 0.1)])
def test_no_rescue_from_far_away(case: str, off: float) -> None:
    """Newton's steps run away from there: one in forty did, before the damping was kept up."""
    problem = grid(case, instances=200)
    x = problem.split("test").double().repeat(3, 1)
    noise = torch.randn(len(x), problem.size, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert problem.typical is not None
    solution = sn.repair(problem.constraints, problem.typical.double() + off * noise, x, start=None, rescue=False)
    assert solution.converged.all()
    assert solution.steps.max() <= 40


@pytest.mark.parametrize(
    ("own", "asked", "found"),
    [(True, True, True), (True, "first", "first"), ("first", True, "first"), (False, True, False)],
)
def test_no_more_rescue_than_a_layer_has(own: Any, asked: Any, found: Any) -> None:
    layer = sn.SnareLayer(sn.Box(0.0, 1.0), rescue=own)
    with at(layer, 1e-6, 5, rescue=asked):
        assert layer.options.rescue == found
    assert layer.options.rescue == own


def test_one_attempt_of_the_rescue_in_training(tmp_path: Path) -> None:
    """A load may be out of a prediction's reach: all attempts in every step would not pay."""
    for problem, rescue in ((grid(), "first"), (sn.problems.load("nclp", size=8, equalities=2, instances=60), True)):
        config = sn.TrainConfig(epochs=1, batch=25, width=8, validate_every=1)
        model, seen = config.build(problem), set()
        layer = model.layer
        layer.register_solution_hook(lambda _, layer=layer, seen=seen: seen.add((layer.training, layer.options.rescue)))
        sn.Trainer(config, tmp_path / problem.name, quiet=True).fit(model, problem)
        assert seen == {(True, rescue), (False, True)}


def test_powers_balance() -> None:
    """Rows are S = V conj(Y V) with the admittance matrix of the grid, in complex numbers."""
    problem, g = grid(), grid().grid
    y, x = around(problem), problem.inputs[:4]
    assert problem.size == 2 * 3 + 2 * 2
    Y = torch.diag(torch.from_numpy(g.shunt))
    (f, t), part = g.ends, {ends: torch.from_numpy(v) for ends, v in g.admittances.items()}
    for k in range(3):
        for a, b, ends in ((f, f, "ff"), (f, t, "ft"), (t, f, "tf"), (t, t, "tt")):
            Y[a[k], b[k]] += part[ends][k]
    volts = torch.polar(y[:, 3:6], y[:, :3])
    generated = torch.zeros(4, 3, dtype=torch.complex128)
    generated[:, :2] = torch.complex(y[:, 6:8], y[:, 8:10])
    left = generated - volts * (volts @ Y.T).conj() - torch.complex(x[:, :3], x[:, 3:])
    rows = problem.constraints.value(y, x)
    torch.testing.assert_close(rows[:, :3], left.real)
    torch.testing.assert_close(rows[:, 3:6], left.imag)
    current = volts[:, f] * part["ff"] + volts[:, t] * part["ft"]
    torch.testing.assert_close(rows[:, 6:8], (volts[:, f] * current.conj()).abs().square()[:, :2])  # two are rated
    torch.testing.assert_close(rows[:, 10:12], y[:, [0, 0]] - y[:, [1, 2]])  # two have limits of the angle
    assert problem.constraints.rows == 12 + problem.size


def test_limits_and_cost() -> None:
    problem = grid()
    instance = problem.constraints.at(around(problem), problem.inputs[:4])
    inf = torch.inf
    torch.testing.assert_close(instance.upper[0, 6:10], torch.tensor([1.44, 0.81, 1.44, 0.81], dtype=F64))
    torch.testing.assert_close(instance.lower[0, 12:18], torch.tensor([0, -inf, -inf, 0.9, 0.9, 0.9], dtype=F64))
    torch.testing.assert_close(instance.upper[0, 12:18], torch.tensor([0, inf, inf, 1.1, 1.1, 1.1], dtype=F64))
    y = problem.flat.clone()
    y[6:8] = torch.tensor([0.5, 0.9])  # 50 and 90 MW at 0.01 p² + 10 p + 5 and 30 p + 7
    assert problem.objective(y[None], problem.inputs[:1]).item() == pytest.approx(25 + 500 + 5 + 2700 + 7)


def test_casadi_has_the_same_numbers() -> None:
    ca = pytest.importorskip("casadi")
    problem = grid()
    y, x = around(problem), problem.inputs[:4]
    points = ca.SX.sym("y", problem.size), ca.SX.sym("x", 6)
    function = ca.Function("both", points, problem.expressions(*points, Casadi()))
    for k in range(4):
        f, g = function(y[k].numpy(), x[k].numpy())
        assert float(f) == pytest.approx(problem.objective(y[k : k + 1], x[k : k + 1]).item(), rel=1e-13)
        torch.testing.assert_close(torch.from_numpy(g.full().ravel()), problem.constraints.value(y, x)[k, :12])


def test_uniform_loads() -> None:
    """A common factor and one per bus; active and reactive loads of a bus have the same."""
    problem = grid("14_ieee", instances=4000)
    loaded = problem.load != 0
    factor = problem.inputs[:, loaded] / problem.load[loaded]
    assert factor.min() >= 0.81
    assert factor.max() <= 1.21
    mean = factor.mean(1)  # nearly the common factor
    assert mean.min() < 0.93
    assert mean.max() > 1.07
    both = (problem.load[:14] != 0) & (problem.load[14:] != 0)
    ratio = problem.inputs[:, :14][:, both] / problem.inputs[:, 14:][:, both]
    torch.testing.assert_close(ratio, (problem.load[:14] / problem.load[14:])[both].expand_as(ratio))


def test_wide_loads() -> None:
    problem = grid("14_ieee", sampler="wide", instances=4000)
    loaded = problem.load != 0
    factor = problem.inputs[:, loaded] / problem.load[loaded]
    assert 0.6 * 0.85 <= factor.min() < 0.55
    assert 1.1 < factor.max() <= 1.15
    assert factor.mean().item() == pytest.approx(0.8, abs=0.01)


def test_loads_of_dc3() -> None:
    problem = grid("14_ieee", sampler="dc3", instances=20_000)
    p, q = problem.inputs[:, :14], problem.inputs[:, 14:]
    loaded = problem.load[:14] > 0
    factor = p[:, loaded] / problem.load[:14][loaded]
    assert 0.3 <= factor.min() < 0.31
    assert 1.69 < factor.max() <= 1.7
    assert factor.std().item() == pytest.approx(1.4 / 12**0.5, rel=0.02)  # uniform
    correlation = torch.corrcoef(factor.T)[0, 1:].mean().item()
    assert correlation == pytest.approx(6 / torch.pi * torch.asin(torch.tensor(0.25)).item(), abs=0.02)
    power_factor = p[:, loaded] / torch.hypot(p, q)[:, loaded]
    assert 0.8 <= power_factor.min() < 0.801
    assert power_factor.max() <= 1
    assert (q[:, 3] <= 0).all()  # bus 4 has a capacitive load


def test_the_same_seed_draws_the_same() -> None:
    assert torch.equal(grid(seed=3).inputs, grid(seed=3).inputs)
    assert not torch.equal(grid(seed=3).inputs, grid(seed=4).inputs)
    sample = grid().sample(5, torch.Generator().manual_seed(0))
    assert torch.equal(sample, grid().sample(5, torch.Generator().manual_seed(0)))
    assert sample.shape == (5, 6)


def test_the_typical_point_is_feasible() -> None:
    problem = grid("14_ieee")
    assert problem.constraints.violation(problem.typical[None], problem.load[None]).item() <= 1e-8
    assert problem.float().typical.dtype == torch.float32


def test_it_moves_copies_and_pickles() -> None:
    problem = grid("14_ieee")
    y, x = problem.typical.expand(2, -1), problem.inputs[:2]
    expected = problem.constraints.value(y, x)
    for other in (copy.deepcopy(problem), pickle.loads(pickle.dumps(problem))):
        assert torch.equal(other.constraints.value(y, x), expected)
    on_meta = copy.deepcopy(problem).to("meta")
    assert on_meta.constraints.value(y.to("meta"), x.to("meta")).device.type == "meta"
    single = problem.float().constraints.value(y.float(), x.float())
    torch.testing.assert_close(single, expected.float(), rtol=1e-4, atol=1e-4)


def test_repair_and_gradient() -> None:
    problem = grid("14_ieee")
    x = problem.inputs[:3]
    y = (problem.typical + 0.02 * torch.randn(3, problem.size, generator=torch.Generator().manual_seed(1))).double()
    y.requires_grad_()
    solution = sn.repair(problem.constraints, y, x)
    assert solution.converged.all()
    problem.objective(solution.value, x).sum().backward()
    assert y.grad is not None
    assert y.grad.isfinite().all()
    assert y.grad.abs().max() > 1.0


def test_inputs_without_a_feasible_point_are_left_out() -> None:
    """Generators give 300 MW and lines carry less than 210: loads of three times the nominal 140 MW have no point."""
    problem = grid(instances=40)
    problem.inputs[::4] *= 3
    impossible = problem.inputs[::4]
    kept = {name: problem.split(name) for name in ("train", "valid", "test")}
    left = {name: problem.infeasible(name) for name in kept}
    assert torch.equal(torch.cat(list(left.values())), impossible)
    assert sum(map(len, kept.values())) == 30
    assert torch.equal(kept["train"][:3], problem.inputs[1:4])


def test_starts_at_what_was_found_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point is within reach of 1: it spreads from input to input, and nobody begins twice at the same place."""
    from snarenet.problems import feasible

    tried: list[tuple[float, float]] = []

    def repair(_: Any, y: Tensor, x: Tensor, **__: Any) -> Any:
        tried.extend(zip(x[:, 0].tolist(), y[:, 0].tolist(), strict=True))
        near = (y - x).abs()[:, 0] <= 1
        return SimpleNamespace(value=torch.where(near.unsqueeze(1), x, y), converged=near)

    monkeypatch.setattr(feasible, "repair", repair)
    x = torch.tensor([[2.25], [0.5], [10.0], [1.375], [-10.0]], dtype=torch.float64)
    found = feasible.has_point(sn.Box(0.0, 1.0), torch.zeros(1, dtype=torch.float64), x, False)
    assert found.tolist() == [True, True, False, True, False]
    assert [start for input, start in tried if input == 10] == [0, 0.5, 1.375, 2.25]
    assert [start for input, start in tried if input == -10] == [0, 0.5]


def test_a_split_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from snarenet.problems import base

    calls: list[bool] = []
    search = base.has_point
    monkeypatch.setattr(base, "has_point", lambda *a, rescue: (calls.append(rescue), search(*a, rescue))[1])
    problem = grid(instances=24)
    for _ in range(2):
        for name in ("train", "test"):
            problem.split(name)
            problem.infeasible(name)
    assert calls == [False, True]  # what is dropped from training by mistake costs nothing


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"sampler": "normal"}, "`sampler` must be one of uniform, wide, dc3, but got 'normal'"),
        ({"case": 14}, "`case` of acopf must be of type str, but got 14"),
        ({"instances": 0}, "`instances` must be a whole number"),
    ],
    ids=str,
)
def test_wrong_sizes(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sn.problems.load("acopf", **sizes)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.m"):
        grid("nowhere.m")
