"""torch.compile and torch.export."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

import snarenet as sn
from snarenet.testing import draw

A, C = draw(3, 6, seed=1), draw(2, 6, seed=2)
x, other = draw(5, 2, seed=3), draw(8, 2, seed=4)
SETS = {
    "constant": lambda: sn.Linear(A.clone(), upper=0.5) & sn.Linear(C.clone(), equals=lambda x: x),
    "box": lambda: sn.Box(-1.0, 1.0) & sn.Linear(C, equals=lambda x: 0.1 * x),
    "quadratic": lambda: sn.Quadratic(0.1 * A, A, upper=0.5) & sn.Linear(C.clone(), equals=lambda x: x),
    "factored": lambda: sn.Quadratic(factor=0.3 * C.T, diagonal=A[:1] ** 2, upper=0.5) & sn.Box(-1.0, 1.0),
    "l1 ball": lambda: sn.L1Ball(0.1, lambda x: 0.5 + x[:, :1].abs()) & sn.Linear(C.clone(), equals=0.1),
    "variation": lambda: sn.L1Ball(0.1, lambda x: 0.5 + x[:, :1].abs(), A) & sn.Box(-1.0, 1.0),
    "function": lambda: sn.Nonlinear(lambda y, x: y.sin() @ A.T + x[:, :1], rows=3, lower=-0.5, upper=0.5),
    "many rows": lambda: sn.Nonlinear(lambda y, x: torch.cat([y**2, y**3], 1) + x[:, :1], rows=12, upper=2.0),
}

QUICK = ("constant", "box", "quadratic", "function")
LATER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("factored", "l1 ball", "variation", "many rows")]


def model(kind: str, **options) -> sn.ConstrainedModel:
    torch.manual_seed(0)
    layer = sn.SnareLayer(SETS[kind](), **{"start": None, "max_steps": 20, **options})
    return sn.ConstrainedModel(sn.MLP(2, 6, width=8).double(), layer)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


WEIGHTS = torch.linspace(1, 3, 6, dtype=torch.float64)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_constant_rows_train_without_a_graph_break(weights: torch.Tensor | None) -> None:
    m = model("constant", weights=weights)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    expected, actual = m(x), compiled(x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    parameters = list(m.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(expected.square().sum(), parameters),
        torch.autograd.grad(actual.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-10)


def test_a_compiled_layer_keeps_up_with_its_constraints() -> None:
    """Moved or loaded constraints are seen by a layer that is compiled afterwards."""
    source = model("constant")
    with torch.no_grad():
        for part in source.layer.constraints.parts:
            part.A.mul_(0.5)
    target = model("constant")
    target.load_state_dict(source.state_dict())
    with torch.no_grad():
        actual = torch.compile(target, fullgraph=True, backend="eager")(x)
    assert target.layer.constraints.violation(actual, x).max() <= 1e-8


@pytest.mark.parametrize("kind", [*QUICK, *LATER])
def test_inference_without_a_graph_break(kind: str) -> None:
    m = model(kind)
    with torch.no_grad():
        actual = torch.compile(m, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(actual, m(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["constant", pytest.param("quadratic", marks=pytest.mark.slow)])
def test_a_start_at_the_projection(kind: str) -> None:
    m = model(kind, start=sn.Nearest(14), weights=WEIGHTS)
    with torch.no_grad():
        actual = torch.compile(m, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(actual, m(x), rtol=0, atol=1e-9)
    exported = torch.export.export(m.eval(), (x,), strict=False).module()
    torch.testing.assert_close(exported(x), m(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["box", "function"])
def test_steps_in_a_metric(kind: str) -> None:
    options = {"damping": 0.1, "max_steps": 2, "rescue": False, "on_failure": "ignore"}  # few steps, for a small graph
    m = model(kind, weights=WEIGHTS, **options).eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(m, fullgraph=True, backend="eager")(x), m(x), rtol=0, atol=1e-10)
        assert (model(kind, **options)(x) - m(x)).abs().max() > 1e-3
    program = torch.export.export(m, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},))
    torch.testing.assert_close(program.module()(other), m(other), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["box", "quadratic", "function"])
def test_training_any_set(kind: str) -> None:
    """Other sets leave the graph for the repair and come back; gradients are the same."""
    m = model(kind)
    actual = torch.compile(m, backend="eager")(x)
    parameters = list(m.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(m(x).square().sum(), parameters),
        torch.autograd.grad(actual.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-10)


def test_the_first_call_is_compiled() -> None:
    """The compiler, not loaded before, loads what leaves its graph: one break, and nothing is compiled again."""
    code = """
import sys, torch, snarenet as sn
assert "snarenet.repair.eager" not in sys.modules
layer = sn.SnareLayer(sn.Nonlinear(lambda y, x: y.sin(), rows=3, upper=0.5), dtype=torch.float64, start=None)
y = torch.linspace(-3, 3, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
compiled = torch.compile(layer, backend="eager")
values = [compiled(y, y)]
frames = dict(torch._dynamo.utils.counters["frames"])
values += [compiled(y, y), layer(y, y)]
assert frames["ok"] > 1 and frames == torch._dynamo.utils.counters["frames"], frames
assert "snarenet.repair.eager" in sys.modules
assert values[0].equal(values[1]) and values[0].equal(values[2])
gradients = [torch.autograd.grad(value.square().sum(), y)[0] for value in values]
assert gradients[0].equal(gradients[1]) and gradients[0].equal(gradients[2])
reasons = torch._dynamo.utils.counters["graph_break"]
assert len(reasons) == 1 and "torch.compiler.disable" in next(iter(reasons)), reasons
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", [*QUICK, *LATER[:2]])
def test_export_for_inference(kind: str) -> None:
    """Exported once, run for another batch size, saved and loaded."""
    m = model(kind, damping=sn.Annealed(0.1, 0.1), max_steps=7).eval()  # few steps, for a small graph
    program = torch.export.export(m, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},))
    torch.testing.assert_close(program.module()(other), m(other), rtol=0, atol=1e-10)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.export.load(buffer).module()(x), m(x), rtol=0, atol=1e-10)


@pytest.mark.slow
def test_inductor() -> None:
    m = model("constant")
    torch.testing.assert_close(torch.compile(m, fullgraph=True)(x), m(x), rtol=0, atol=1e-10)
