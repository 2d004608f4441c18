"""Training a constrained model in Lightning, and logging the repairs of any module."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import snarenet as sn
from snarenet.testing import draw

lightning = pytest.importorskip("lightning", reason="the extra lightning is not installed")

from snarenet.doors.lightning import ConstrainedModule, Feasibility  # noqa: E402

A = draw(2, 6, seed=1)


def simplex() -> sn.Constraints:
    return sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 6), equals=1.0)


def objective(y: Tensor, x: Tensor) -> Tensor:
    return (y - x @ A).square().sum(1)


def loader(count: int = 64, seed: int = 3) -> DataLoader:
    return DataLoader(TensorDataset(draw(count, 2, seed=seed)), batch_size=32)


def model(**options: Any) -> sn.ConstrainedModel:
    torch.manual_seed(0)
    return sn.ConstrainedModel(sn.MLP(2, 6, width=16), sn.SnareLayer(simplex(), **options))


def trainer(folder: Path, *callbacks: Any, epochs: int = 2) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, default_root_dir=folder, callbacks=list(callbacks), **quiet
    )


@pytest.fixture(autouse=True)
def _few_workers():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*num_workers.*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def test_it_trains_and_says_how_repairs_went(tmp_path: Path) -> None:
    module, callback = ConstrainedModule(model(), objective, lr=1e-2), Feasibility()
    run = trainer(tmp_path, callback, epochs=15)
    run.validate(module, loader(seed=4), verbose=False)
    before = run.callback_metrics["val_loss"].item()
    run.fit(module, loader(), loader(seed=4))
    found = {name: value.item() for name, value in run.callback_metrics.items()}
    assert found["val_loss"] < 0.8 * before
    for stage in ("train", "val"):
        assert found[f"{stage}_converged"] == 1.0
        assert found[f"{stage}_violation"] <= 1e-8
        assert found[f"{stage}_steps"] >= 0
        assert 0.1 < found[f"{stage}_tight"] < 0.9
        assert 0 <= found[f"{stage}_stuck"] < 0.9
    (outputs,) = run.predict(module, DataLoader(draw(8, 2, seed=5), batch_size=8))
    assert simplex().violation(outputs).max() <= 1e-8
    assert not callback.handles
    assert not module.model.layer._solution_hooks


def test_what_is_logged_is_what_solve_says(tmp_path: Path) -> None:
    module, data = ConstrainedModule(model(), objective), loader()
    run = trainer(tmp_path, Feasibility())
    run.test(module, data, verbose=False)
    with torch.no_grad():
        solution = module.model.eval().solve(torch.cat([x for (x,) in data]))
    assert run.callback_metrics["test_violation"] == pytest.approx(solution.violation.max().item(), rel=1e-6)
    assert run.callback_metrics["test_steps"] == pytest.approx(solution.steps.double().mean().item())
    at_bounds = ((solution.value <= 1e-5) | (solution.value >= 1 - 2e-5)).double().mean().item()
    assert run.callback_metrics["test_tight"] == pytest.approx(at_bounds)


class Own(lightning.LightningModule):
    """A module of somebody's, with a layer somewhere inside, called like any other."""

    def __init__(self, layer: sn.SnareLayer) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"net": nn.Linear(2, 6).double(), "repair": layer})

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.body["repair"](self.body["net"](batch[0])).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_no_failure_is_silent(tmp_path: Path) -> None:
    """Even where a layer is told to ignore them."""
    torch.manual_seed(0)
    empty = sn.Box(torch.zeros(6), torch.ones(6)) & sn.Linear(torch.ones(1, 6), equals=7.0)
    module = Own(sn.SnareLayer(empty, on_failure="ignore", rescue=False))
    run = trainer(tmp_path, Feasibility(), epochs=1)
    with pytest.warns(sn.RepairWarning, match="in epoch 0, train, 64 of 64 samples were not repaired"):
        run.fit(module, loader())
    assert run.callback_metrics["train_converged"] == 0.0
    assert run.callback_metrics["train_violation"] > 0.1


def test_a_module_without_a_layer(tmp_path: Path) -> None:
    class Plain(Own):
        def __init__(self) -> None:
            super(Own, self).__init__()
            self.net = nn.Linear(2, 6)

    with pytest.raises(ValueError, match="expected a module with a SnareLayer inside, but Plain has none"):
        trainer(tmp_path, Feasibility()).fit(Plain(), loader())
