"""The same answers on a GPU: every case of the conformance suite, values and gradients, against the CPU."""

from __future__ import annotations

import pytest
import test_sets
import torch

import snarenet as sn
from snarenet.testing import ConstraintsSuite, assert_equal, draw, on_tensors

SUITES = [
    suite for suite in vars(test_sets).values() if isinstance(suite, type) and issubclass(suite, ConstraintsSuite)
]
# closures keep their CPU tensors, so only sets that own all their data can move
MOVABLE = [suite for suite in SUITES if suite.__name__ in {
    "TestLinearConstant", "TestLinearPerSample", "TestLinearOfX", "TestLinearLearned", "TestMoreRowsThanVariables",
    "TestBox", "TestBoxWithCoupling", "TestQuadraticDiagonal", "TestQuadraticWhole", "TestQuadraticWholePerSample",
    "TestQuadraticLearned", "TestQuadraticFactored", "TestQuadraticFactoredPerSample", "TestQuadraticFactoredLearned",
    "TestQuadraticDiagonalAlone", "TestQuadraticWholeLearned", "TestL1Ball", "TestL1BallOfX", "TestL1BallPerSample",
    "TestL1BallWithMatrix", "TestNonlinearModule", "TestSubclass",
}]  # fmt: skip


CAPTURING = {
    "TestLinearTwoSided", "TestManyNonlinearRows", "TestQuadraticOfX", "TestQuadraticFactoredOfX",
    "TestQuadraticWholeOfX", "TestNonlinearTrigonometric", "TestL1BallWithMatrixOfX",
    "TestNonlinearClosure", "TestNonlinearWithJacobian", "TestNonlinearWithJacobianAndClosure",
}  # fmt: skip


def test_no_suite_is_forgotten() -> None:
    assert {suite.__name__ for suite in MOVABLE} | CAPTURING == {suite.__name__ for suite in SUITES} - {
        "ConstraintsSuite"
    }


@pytest.mark.gpu
@pytest.mark.parametrize("suite", MOVABLE, ids=lambda suite: suite.__name__)
@pytest.mark.parametrize("rows", ["auto", "all"])
def test_equal_to_cpu(suite: type[ConstraintsSuite], rows: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        case = suite().case()
        constraints = case.constraints.to(device)
        y = case.y.to(device).requires_grad_()
        x = on_tensors(lambda leaf: leaf.to(device).requires_grad_(), case.x)  # noqa: B023
        solution = sn.repair(constraints, y, x, rows=rows, tol=1e-9, rescue=True)
        assert solution.converged.all()
        leaves = [y, *(p for p in constraints.parameters())]
        grads = torch.autograd.grad((solution.value * draw(*y.shape, seed=9).to(device)).sum(), leaves)
        results.append([solution.value.detach().cpu(), *(g.cpu() for g in grads)])
    for a, b in zip(*results, strict=True):
        assert_equal(b, a, 1e-8)


@pytest.mark.gpu
def test_layer_moves_with_its_spectrum() -> None:
    layer = sn.SnareLayer(sn.Linear(draw(3, 6), upper=0.5)).to("cuda")
    assert layer(draw(4, 6, seed=1).cuda()).device.type == "cuda"
    with pytest.raises(ValueError, match="move them"):
        layer(draw(4, 6, seed=1))
