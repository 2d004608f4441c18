"""`torch.onnx.export`: an exported layer gives the same outputs in onnxruntime."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.linalg import add_to_diagonal, cholesky_ex, dense, triangular_solve
from snarenet.testing import draw

A, C, y = draw(2, 4, seed=1), draw(1, 4, seed=2), draw(5, 4, seed=3, scale=2)
SETS = {
    "constant": lambda: sn.Linear(A, upper=0.5) & sn.Linear(C, equals=0.1),
    "box and equalities": lambda: sn.Box(-1.0, 1.0) & sn.Linear(C, equals=0.1),
    "quadratic": lambda: sn.Quadratic(0.1 * A, A, upper=0.5) & sn.Linear(C, equals=0.1),
    "factored": lambda: sn.Quadratic(factor=0.2 * A.T, diagonal=0.1 * C**2, upper=0.5) & sn.Box(-1.0, 1.0),
    "l1 ball": lambda: sn.L1Ball(0.1 * C[0], 0.5) & sn.Linear(C, equals=0.1),
    "variation": lambda: sn.L1Ball(0.1, 0.5, A) & sn.Box(-1.0, 1.0),
    "function": lambda: sn.Nonlinear(lambda y, x: y.sin() @ A.T, rows=2, lower=-0.5, upper=0.5),
    "more rows than variables": lambda: sn.Nonlinear(lambda y, x: torch.cat([y, y @ C.T], 1), rows=5, upper=1.0),
}

QUICK = ("constant", "quadratic", "function")  # the others in the slow tests: a minute


def run(layer: sn.SnareLayer, *inputs: Tensor, **options) -> list[Tensor]:
    """The layer's outputs in onnxruntime."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime", "1.29", reason="older ones lack operations in float64")
    program = torch.onnx.export(layer, (y,), dynamo=True, verbose=False, **options)
    assert program is not None
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    name = session.get_inputs()[0].name
    return [torch.from_numpy(session.run(None, {name: data.numpy()})[0]) for data in inputs]


def few_steps(constraints: sn.Constraints, weights: Tensor | None = None) -> sn.SnareLayer:
    return sn.SnareLayer(
        constraints, sn.Annealed(0.1, 0.1), max_steps=4, rescue=False, on_failure="ignore", weights=weights, start=None
    ).eval()


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in SETS]
)
def test_the_same_outputs(kind: str) -> None:
    layer = few_steps(SETS[kind]())
    (found,) = run(layer, y)
    torch.testing.assert_close(found, layer(y), rtol=0, atol=1e-9)
    assert layer.constraints.violation(found).max() < 1e-3 < layer.constraints.violation(y).max()


@pytest.mark.parametrize("kind", ["constant", "box and equalities"])
def test_steps_in_a_metric(kind: str) -> None:
    layer = few_steps(SETS[kind](), torch.tensor([1.0, 3.0, 0.5, 2.0]))
    (found,) = run(layer, y)
    torch.testing.assert_close(found, layer(y), rtol=0, atol=1e-9)
    assert (found - few_steps(SETS[kind]())(y)).abs().max() > 1e-3


def test_a_batch_of_another_size() -> None:
    layer, other = few_steps(SETS["box and equalities"]()), draw(3, 4, seed=4, scale=2)
    (found,) = run(layer, other, dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    torch.testing.assert_close(found, layer(other), rtol=0, atol=1e-9)


def test_a_start_at_the_projection() -> None:
    constraints = sn.Quadratic(torch.ones(1, 4), upper=1.0)
    layer = sn.SnareLayer(constraints, max_steps=1, rescue=False, on_failure="ignore", start=sn.Nearest(8)).eval()
    (found,) = run(layer, y)
    torch.testing.assert_close(found, y / y.norm(dim=1, keepdim=True).clamp(min=1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 12])
def test_a_factorisation_of_sums_and_products(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX has no Cholesky factors: the ones that take their place solve the same systems."""
    W, rhs = draw(3, size, size + 2, seed=1), draw(3, size, seed=2)
    matrix = add_to_diagonal(W @ W.mT, 0.1)
    expected = torch.linalg.solve(matrix, rhs)
    monkeypatch.setattr(dense, "to_onnx", lambda: True)
    factor, code = cholesky_ex(matrix)
    assert not code.any()
    torch.testing.assert_close(triangular_solve(factor, rhs), expected, rtol=1e-10, atol=1e-12)
    if size:
        assert cholesky_ex(-matrix)[1].all()
