"""The data of the problem families, bit for bit."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

import snarenet as sn


def fingerprint(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def test_nclp() -> None:
    problem = sn.problems.load("nclp")
    inequalities, equalities = problem.constraints.parts
    found = [fingerprint(t) for t in (problem.square, problem.sine, inequalities.A, equalities.A, problem.inputs)]
    assert found == ["2c753843b0b1b788", "3f3a91d4a89a2dd0", "ebe9753709ed12d7", "f136f5786c2b8ce6", "173dc3245e7bb272"]
    expected = torch.tensor([5.55938461, 6.48107344, 4.1242838], dtype=torch.float64)
    torch.testing.assert_close(inequalities.limit.upper[:3], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("inequalities", "G", "H", "h"),
    [
        (10, "8bf4dfbe82f8e9b0", "039b19f7406c8d6d", [2.25357712, 2.27992557, 2.30716097]),
        (50, "04b68e02a8d1b929", "56510a35dabb9fe6", [2.25055691, 2.29880901, 2.29228854]),
        (100, "86ff96c89c9a9468", "35bb3f36d2fe4a7c", [2.26905943, 2.2726562, 2.30810777]),
    ],
)
def test_qcqp(inequalities: int, G: str, H: str, h: list[float]) -> None:
    problem = sn.problems.load("qcqp", inequalities=inequalities)
    quadratic, linear = problem.constraints.parts
    found = [
        fingerprint(t) for t in (problem.square, problem.linear, linear.A, problem.inputs, quadratic.G, quadratic.H)
    ]
    assert found == ["c591a0647f381ba4", "722302bc62505b6a", "aa874e4357110c01", "c22443493112606e", G, H]
    torch.testing.assert_close(quadratic.limit.upper[:3], torch.tensor(h, dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["nclp", "qcqp", "ncqcqp", "ncqcqp-fast", "ncqcqp-hard"])
def test_every_optimisation_family(name: str) -> None:
    problem = sn.problems.load(name)
    assert [len(problem.split(name)) for name in ("train", "valid", "test")] == [8334, 833, 833]
    right = torch.linalg.pinv(problem.constraints.parts[1].A)
    y, x = problem.inputs @ right.T, problem.inputs
    assert problem.constraints.violation(y, x).max() < 1e-12  # the least-norm solution is feasible for every input
    assert problem.objective(y, x).shape == (10_000,)


def test_splits_are_contiguous() -> None:
    problem = sn.problems.load("nclp", size=4, inequalities=1, equalities=1, instances=1000)
    assert torch.equal(torch.cat([problem.split(name) for name in ("train", "valid", "test")]), problem.inputs)
    assert len(problem.split("test")) == 84
    with pytest.raises(ValueError, match="`name` must be 'train'"):
        problem.split("validation")
    assert not problem.eval().training  # a problem is a module, with a module's own `train`


def test_sizes_are_arguments() -> None:
    problem = sn.problems.load("ncqcqp", size=10, inequalities=4, equalities=3, instances=100, seed=1)
    assert problem.constraints.rows == 7
    assert problem.size == 10
    assert problem.inputs.shape == (100, 3)


def test_objectives() -> None:
    nclp = sn.problems.load("nclp", size=3, inequalities=1, equalities=1, instances=10)
    y = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, -1.0]], dtype=torch.float64)
    expected = 0.5 * (nclp.square * y[1] ** 2).sum() + (nclp.sine * y[1].sin()).sum()
    torch.testing.assert_close(nclp.objective(y, y), torch.stack([torch.zeros_like(expected), expected]))
    qcqp = sn.problems.load("qcqp", size=3, inequalities=1, equalities=1, instances=10)
    torch.testing.assert_close(
        qcqp.objective(y, y)[1], 0.5 * (qcqp.square * y[1] ** 2).sum() + (qcqp.linear * y[1]).sum()
    )


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("nclp", {"sise": 5}, "'sise' is no size of nclp, .*did you mean 'size'"),
        ("ncqcqp", {"equality": 5}, "did you mean 'equalities'"),
        ("nclp", {"size": 8.0}, "`size` of nclp must be of type int, but got 8.0"),
        ("nclp", {"size": True}, "`size` of nclp must be of type int, but got True"),
        ("nclp", {"instances": 0}, "`instances` must be a whole number, at least 1"),
        ("qcqp", {"equalities": 101}, "`equalities` must be at most `size` = 100"),
        ("qcqp", {"curvature": [1.0, 0.0]}, "`curvature` must be a finite range"),
        ("qcqp", {"curvature": [1.0]}, "`curvature` of qcqp must be of type"),
        ("cbf", {"seed": "8"}, "`seed` of cbf must be of type int | None, but got '8'"),
        ("cbf", {"dt": "8"}, "`dt` of cbf must be of type float"),
        ("cbf", {"instances": -1}, "`instances` must be a whole number, at least 1"),
    ],
    ids=str,
)
def test_wrong_sizes(name: str, sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sn.problems.load(name, **sizes)


def test_sizes_from_json() -> None:
    """A run folder keeps them so: a pair comes back as a list."""
    found = sn.problems.load("qcqp", size=6, equalities=2, inequalities=0, instances=3, curvature=[0, 0.1])
    assert found.inputs.shape == (3, 2)
    assert sn.problems.load("cbf", instances=4, horizon=1, seed=None).inputs.shape == (4, 6)


def test_a_float32_run_reports_what_is_returned() -> None:
    """Its violations are those of the float32 outputs, computed in float64."""
    problem = sn.problems.load("nclp", size=8, inequalities=3, equalities=2, instances=60).float()
    x = problem.split("train").float()
    torch.manual_seed(0)
    model = sn.ConstrainedModel(sn.MLP(x.shape[1], 8), sn.SnareLayer(problem.constraints, tol=1e-4))
    solution, outcome = model.solve(x), problem.run(model, x)
    assert solution.value.dtype == torch.float32
    assert solution.violation.max() > 0
    torch.testing.assert_close(outcome.violation, solution.violation, rtol=1e-9, atol=0)
    outcome.penalty.sum().backward()
