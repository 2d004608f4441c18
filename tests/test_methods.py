"""Every method behind one interface: on every family that it claims, from the configuration to a loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import snarenet as sn
from snarenet.layers import METHODS, HProjLayer, build

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
# what each method can do; the others refuse
CLAIMS = {
    "nclp": set(METHODS),
    "qcqp": set(METHODS) - {"hardnet", "pinet"},
    "ncqcqp": set(METHODS) - {"hardnet", "pinet", "optnet"},
    "cbf": {"snare", "soft", "dc3", "hardnet++", "fsnet"},
}
# that never leave a violation behind, at these sizes
EXACT = {"snare", "soft", "hardnet", "hardnet++", "optnet", "pinet"}


def family(name: str) -> sn.problems.Problem:
    return sn.problems.load(name, instances=60, horizon=0.06) if name == "cbf" else sn.problems.load(name, **SIZES)


@pytest.fixture(autouse=True)
def short_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HProjLayer.SETTINGS["fair"], "pretrain_steps", 30)


CASES = [(name, method) for name, methods in CLAIMS.items() for method in METHODS if method in methods]


@pytest.mark.filterwarnings("ignore::snarenet.solution.RepairWarning")
@pytest.mark.parametrize(("name", "method"), CASES, ids=["-".join(case) for case in CASES])
def test_trains_evaluates_and_loads(tmp_path: Path, name: str, method: str) -> None:
    if method == "optnet":
        pytest.importorskip("cvxpylayers")
    problem = family(name)
    config = sn.TrainConfig.recipe("best", name, method=method, epochs=1, width=8, batch=40)
    model = config.build(problem)
    before = [p.detach().clone() for p in model.net.parameters()]
    run = sn.Trainer(config, tmp_path, quiet=True).fit(model, problem)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.net.parameters(), strict=True))
    x = problem.split("test")
    value = model(x)
    assert value.shape == (len(x), problem.size)
    assert value.isfinite().all()
    assert torch.equal(sn.load_model(tmp_path)(x), value)
    assert model(x[:0]).shape == (0, problem.size)
    half = model(x.float())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), value, rtol=1e-2, atol=1e-2)
    summary = sn.evaluate(model, problem, timed=False).summary
    if method in EXACT and name != "cbf":
        assert summary["converged"] == 1.0
        assert summary["violation"] <= max(model.layer.tol, 1e-6)
    assert run.config.method == method


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("qcqp", "hardnet", "HardNet repairs linear constraints only, but got Quadratic"),
        ("qcqp", "pinet", "only, but got Quadratic"),
        ("ncqcqp", "optnet", "OptNet needs H >= 0"),
    ],
)
def test_what_a_method_cannot_do_it_refuses(name: str, method: str, message: str) -> None:
    if method == "optnet":
        pytest.importorskip("cvxpylayers")
    with pytest.raises(ValueError, match=message):
        sn.TrainConfig(method=method).build(family(name))


def test_names_and_settings() -> None:
    constraints = family("nclp").constraints
    with pytest.raises(ValueError, match="did you mean 'hardnet'"):
        build("hardnett", constraints, 2, 8)
    assert build("dc3", constraints, 2, 8, "paper", "qcqp").step == 1e-13
    assert build("dc3", constraints, 2, 8, "paper", "nclp").step == 1e-7
    assert build("dc3", constraints, 2, 8).step == "auto"
    assert sn.TrainConfig.recipe("best", "nclp", method="dc3").penalty == 10.0
    paper = sn.TrainConfig.recipe("paper", "nclp", method="hardnet")
    assert (paper.relaxation, paper.relax_epochs, paper.setting) == ("soft", 100, "paper")
    assert all(kind.title for kind in METHODS.values())


def test_a_relaxation_needs_predictions_in_the_set_of_outputs(tmp_path: Path) -> None:
    problem, config = family("nclp"), sn.TrainConfig(method="dc3", relaxation="soft", relax_epochs=1, epochs=1)
    with pytest.raises(ValueError, match="`relaxation` must be 'none' for DC3"):
        sn.Trainer(config, tmp_path, quiet=True).fit(config.build(problem), problem)
