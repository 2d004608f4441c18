"""What training tells a layer of polishing and of a typical point, and what is validated and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers.base import Polish
from snarenet.training import Run, evaluate


class Ring(sn.Problem):
    """Least x'y in a box outside of a disk; the network's first predictions are in its centre."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.constraints = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), 1, 1.0) & sn.Box(-3.0, 3.0)
        draw = torch.Generator().manual_seed(0)
        self.register_buffer("inputs", 1 + torch.rand(60, 2, generator=draw, dtype=torch.float64))

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return (y * x).sum(1)


def config(**fields: Any) -> sn.TrainConfig:
    return sn.TrainConfig(epochs=1, batch=20, width=4, validate_every=1, **fields)


def test_the_layer_is_told(tmp_path: Path) -> None:
    problem = Ring()
    for polish in ("none", "rescued", "all"):
        layer = config(polish=polish).build(problem).layer
        assert layer.polishes == polish
        assert isinstance(layer, sn.SnareLayer)
        assert layer.objective == problem.objective
    run = sn.Trainer(config(polish="all"), tmp_path, quiet=True).fit(config(polish="all").build(problem), problem)
    assert run.load_model(problem).layer.polishes == "all"
    with pytest.raises(ValueError, match="`polish` must be"):
        config(polish="some")


def test_other_methods_and_candidates_polish_nothing() -> None:
    assert config(polish="all", method="soft").build(Ring()).layer.polishes == "none"
    assert config(polish="all", candidates=2).build(Ring()).layer.polishes == "none"


def test_a_loaded_layer_knows_the_typical_point(tmp_path: Path) -> None:
    problem = Ring()
    model = config().build(problem)
    assert isinstance(model.layer, sn.SnareLayer)
    assert model.units is not None
    assert torch.equal(model.layer.typical, model.units.centre)
    sn.Trainer(config(), tmp_path, quiet=True).fit(model, problem)
    again = Run.open(tmp_path).load_model(problem)
    assert torch.equal(again.layer.typical, model.units.centre)
    assert model.units.centre.abs().min() > 0
    assert config(standardise=False).build(problem).layer.typical is None


@pytest.mark.parametrize(("polish", "validated"), [("all", "rescued"), ("rescued", "rescued"), ("none", "none")])
def test_weights_are_chosen_by_what_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, polish: Polish, validated: Polish
) -> None:
    """But for samples that are polished though they needed no rescue: there the network hardly matters."""
    seen: list[str] = []
    problem, model = Ring(), config(polish=polish).build(Ring())
    run = problem.run

    def noted(model: Any, x: Tensor, relax: Any = None) -> Any:
        seen.append(model.layer.polishes if not model.training else "training")
        return run(model, x, relax)

    monkeypatch.setattr(problem, "run", noted)
    sn.Trainer(config(polish=polish), tmp_path, quiet=True).fit(model, problem)
    assert set(seen) == {"training", validated}
    assert model.layer.polishes == polish


def test_an_evaluation_polishes() -> None:
    problem, model = Ring(), config(polish="all").build(Ring())
    seen: list[str] = []
    run = problem.run

    def noted(model: Any, x: Tensor, relax: Any = None) -> Any:
        seen.append(model.layer.polishes)
        return run(model, x, relax)

    problem.run = noted
    plain, polished = (evaluate(model, problem, polish=polish, timed=False).summary for polish in ("none", None))
    assert seen == ["none", "all"]
    assert model.layer.polishes == "all"
    assert polished["objective"]["mean"] < plain["objective"]["mean"] - 0.01
    assert polished["feasible"]["1e-08"] == 1


def test_a_loaded_run_looks_for_no_feasible_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes minutes on large grids, and the units are among the tensors that are read."""
    monkeypatch.setattr(Ring, "always_feasible", False)
    monkeypatch.setattr(Ring, "typical", torch.tensor([2.0, 0.0], dtype=torch.float64))
    problem, again = Ring(), Ring()
    model = config().build(problem)
    sn.Trainer(config(), tmp_path, quiet=True).fit(model, problem)
    monkeypatch.setattr(again, "_has_point", None)  # whoever looks fails
    x = problem.split("test")
    assert torch.equal(Run.open(tmp_path).load_model(again)(x), model(x))
