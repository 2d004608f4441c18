"""`Linear` with a sparse A: the same as with a dense one, and never dense on the matrix-free route."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.constraints import sparse
from snarenet.testing import Case, ConstraintsSuite, assert_equal, draw, gradients

BATCH = 5


def thin(rows: int, size: int, seed: int = 0) -> Tensor:
    """A dense matrix with about a third of its entries, and none in its last row."""
    A = draw(rows, size, seed=seed) * (draw(rows, size, seed=seed + 100) > 0.4)
    A[-1] = 0.0
    return A


def few(rows: int, size: int, entries: int = 5) -> Tensor:
    """A sparse matrix with so many entries in each row."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(0, size, (rows, entries), generator=generator)
    values = torch.randn(rows, entries, generator=generator, dtype=torch.float64)
    indices = torch.stack([torch.arange(rows).repeat_interleave(entries), columns.flatten()])
    return torch.sparse_coo_tensor(indices, values.flatten(), (rows, size), check_invariants=True)


class TestInequalities(ConstraintsSuite):
    def case(self) -> Case:
        A = thin(6, 8)[:5]
        upper = -0.3 * torch.ones(5, dtype=torch.float64)
        return Case(
            sn.Linear(A.to_sparse_coo(), upper=upper),
            formula=lambda y, x: y @ A.T,
            upper=lambda x: upper,
            y=draw(BATCH, 8, seed=5, scale=2),
        )

    def test_copy_and_state_dict(self) -> None:
        case = self.case()
        layer = sn.SnareLayer(case.constraints)
        expected = layer(case.y)
        assert set(layer.state_dict()) == {"constraints.A.values", "constraints.A.indices", *BOUNDS}
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(case.y), expected)
        twin.constraints.A.values.mul_(1.5)
        assert not torch.equal(twin(case.y), expected)
        twin.load_state_dict(layer.state_dict())
        assert torch.equal(twin(case.y), expected)


BOUNDS = {"constraints.limit.lower", "constraints.limit.upper"}


class TestStack(ConstraintsSuite):
    """Sparse equalities, with a bound from x, beside a dense quadratic and a sparse inequality."""

    def case(self) -> Case:
        C, A, H, G = thin(4, 9)[:3], thin(4, 9, seed=1)[:3], 0.2 * draw(2, 9, seed=2).square(), draw(2, 9, seed=3)
        constraints = (
            sn.Linear(C.to_sparse_csr(), equals=lambda x: x)
            & sn.Quadratic(H, G, upper=1.5)
            & sn.Linear(A.to_sparse_csc(), lower=-0.4, upper=0.4)
        )
        limits = torch.tensor([1.5] * 2 + [0.4] * 3, dtype=torch.float64)
        low = torch.tensor([-torch.inf] * 2 + [-0.4] * 3, dtype=torch.float64)
        return Case(
            constraints,
            formula=lambda y, x: torch.cat([y @ C.T, y.square() @ H.T + y @ G.T, y @ A.T], 1),
            lower=lambda x: torch.cat([x, low.expand(len(x), 5)], 1),
            upper=lambda x: torch.cat([x, limits.expand(len(x), 5)], 1),
            y=draw(BATCH, 9, seed=5, scale=1.5),
            x=draw(BATCH, 3, seed=6, scale=0.5),
        )

    def test_copy_and_state_dict(self) -> None:
        case = self.case()
        twin = copy.deepcopy(sn.SnareLayer(case.constraints))
        assert torch.equal(twin(case.y, case.x), sn.SnareLayer(case.constraints)(case.y, case.x))


@pytest.mark.parametrize("rows", ["auto", "all", "active"])
@pytest.mark.parametrize("solver", ["auto", sn.ConjugateGradients(tol=1e-13)], ids=["direct", "free"])
@pytest.mark.parametrize("equal", [False, True])
def test_equal_to_dense(rows: str, solver: object, equal: bool) -> None:
    """Values, and gradients of y and of the bounds; by default on both routes the same rows are used."""
    A = thin(7, 12)[:6]
    found = []
    for matrix in (A, A.to_sparse_coo()):
        y, bound = draw(BATCH, 12, seed=1, scale=2).requires_grad_(), draw(BATCH, 6, seed=2).requires_grad_()
        bounds = {"equals" if equal else "upper": lambda b: b}
        solution = sn.repair(sn.Linear(matrix, **bounds), y, bound, rows=rows, solver=solver, tol=1e-10)
        assert solution.converged.all()
        found.append((solution.value, *gradients(solution.value, [y, bound])))
    for sparse_result, dense_result in zip(found[1], found[0], strict=True):
        assert_equal(sparse_result, dense_result, 1e-8)


def test_values_can_be_differentiated_in_every_mode() -> None:
    A, y = thin(4, 6), draw(3, 6, seed=1).requires_grad_()
    constraints = sn.Linear(A.to_sparse_coo(), upper=0.0)
    assert torch.autograd.gradcheck(constraints.value, y, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(constraints.residual, y)
    _, pull = torch.func.vjp(constraints.value, y.detach())
    torch.testing.assert_close(pull(torch.ones(3, 4, dtype=torch.float64))[0], A.sum(0).expand(3, 6))


def test_duplicates_add_up_and_integers_become_floats() -> None:
    A = torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1, 2, 4], (2, 3), check_invariants=True)
    y = torch.tensor([[1.0, 10.0, 100.0]], dtype=torch.float64)
    assert sn.Linear(A, upper=0.0).value(y).tolist() == [[30.0, 400.0]]


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "dia"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "bool"])
def test_of_scipy(layout: str, dtype: str) -> None:
    scipy = pytest.importorskip("scipy.sparse")
    A, y = thin(6, 8).round(), draw(BATCH, 8, seed=5)
    given = scipy.coo_matrix(A.numpy().astype(dtype)).asformat(layout)
    expected = torch.from_numpy(A.numpy().astype(dtype).astype("float64"))
    constraints = sn.Linear(given, upper=0.5)
    assert_equal(constraints.value(y), y @ expected.T, 1e-12)
    given.data[:] = 0  # the set keeps numbers of its own
    assert_equal(constraints.value(y), y @ expected.T, 1e-12)


def test_precision_follows() -> None:
    constraints = sn.Linear(thin(4, 6).to_sparse_csr(), upper=0.0).to(torch.float32)
    assert constraints.A.values.dtype == torch.float32
    assert constraints.A.indices.dtype == torch.int64
    assert constraints.value(draw(2, 6)).dtype == torch.float64
    assert constraints.value(draw(2, 6).float()).dtype == torch.float32


def test_what_cannot_be() -> None:
    A = thin(3, 4).to_sparse_coo()
    with pytest.raises(ValueError, match="sparse `A` must be constant"):
        sn.Linear(A.clone().requires_grad_(), upper=0.0)
    with pytest.raises(ValueError, match=r"`A` must have shape \(m, n\)"):
        sn.Linear(torch.stack([A, A]), upper=0.0)
    with pytest.raises(ValueError, match="`A` must be finite"):
        sn.Linear((thin(3, 4) * torch.nan).to_sparse_coo(), upper=0.0)
    with pytest.raises(ValueError, match="expected bounds with 3 entries"):
        sn.Linear(A, upper=[0.0, 1.0])
    with pytest.raises(TypeError, match=r"`A\(x\)` must be dense"):
        sn.Linear(lambda x: A, upper=torch.zeros(3)).value(draw(2, 4), draw(2, 1))
    with pytest.raises(TypeError, match="`H` must be dense"):
        sn.Quadratic(A, draw(3, 4), upper=0.0)


def test_too_large_to_be_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A direct route says what to do; the matrix-free one never makes it dense, whatever the rows are."""
    monkeypatch.setattr(sparse, "_DENSE", 10)
    A = few(20, 60)
    y = draw(2, 60, seed=1)
    for bounds in ({"upper": -0.1}, {"equals": 0.3}):
        constraints = sn.Linear(A, **bounds)
        assert constraints.constant_rows.all()
        for rows in ("auto", "all", "active"):
            solution = sn.SnareLayer(constraints, rows=rows, solver=sn.ConjugateGradients()).solve(y)
            assert solution.converged.all()
            with pytest.raises(ValueError, match=r"use `solver=ConjugateGradients\(\)`"):
                sn.repair(constraints, y, rows=rows)


def test_exported() -> None:
    A, y = thin(5, 8)[:4], draw(3, 8, seed=1)
    layer = sn.SnareLayer(sn.Linear(A.to_sparse_csr(), upper=-1.0), max_steps=20)
    exported = torch.export.export(layer, (y,)).module()
    torch.testing.assert_close(exported(y), layer(y), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", ["auto", "all", "active"])
def test_matrix_free_is_never_dense(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("made dense")

    monkeypatch.setattr(sparse.SparseMatrix, "to_dense", refuse)
    constraints = sn.Linear(few(20, 60), equals=0.3) & sn.Linear(few(10, 60, entries=3), upper=-0.1)
    layer = sn.SnareLayer(constraints, rows=rows, solver=sn.ConjugateGradients())
    assert constraints.violation(layer(draw(2, 60, seed=1))).max() <= 1e-8
