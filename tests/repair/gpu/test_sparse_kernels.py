"""Sparse systems by kernels against dense ones; emulated on a CPU, with `-m gpu` on a GPU."""

from __future__ import annotations

import math
import sys
from typing import Literal

import pytest
import torch
from emulation import on_devices, use_kernels
from torch import Tensor

import snarenet as sn
from snarenet.constraints.sparsity import Pattern
from snarenet.linalg import SparseNormal, sparse_normal
from snarenet.repair.gpu import launching, sparse
from snarenet.repair.gpu.sparse import KernelSystems, kernel_systems
from snarenet.testing import assert_equal, draw

pytestmark = on_devices
FORMS = ("dual", "primal")


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    use_kernels(monkeypatch, device)


def systems(rows: int, columns: int, form: str, seed: int = 0, density: float = 0.1) -> KernelSystems:
    pattern = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < density
    row, col = pattern.nonzero(as_tuple=True)
    return KernelSystems(SparseNormal(row, col, (rows, columns), form))  # pyright: ignore[reportArgumentType]


def data(of: KernelSystems, batch: int, device: str, damping: float = 1.0, seed: int = 0) -> tuple[Tensor, ...]:
    """Nonzeros, dampings, inverse weights with some fixed variables, rows in use."""
    (m, n), generator = of.normal.shape, torch.Generator().manual_seed(seed)
    uniform = [torch.rand(batch, k, generator=generator, dtype=torch.float64) for k in (m, n, n, m)]
    weights = torch.where(uniform[2] < 0.2, 0.0, 0.1 + uniform[1])
    found = draw(batch, len(of.normal.row), seed=seed), damping * (0.5 + uniform[0]), weights, uniform[3] < 0.7
    return tuple(tensor.to(device) for tensor in found)


def matrix(of: KernelSystems, values: Tensor, damping: Tensor, weights: Tensor, active: Tensor) -> Tensor:
    """J W^-1 J' + diag(damping), with a row of the identity where one is not in use."""
    J = values.new_zeros(len(values), *of.normal.shape)
    J[:, of.normal.row, of.normal.col] = values
    J = torch.where(active.unsqueeze(2), J, 0.0)
    return J * weights.unsqueeze(1) @ J.mT + torch.diag_embed(torch.where(active, damping, 1.0))


@pytest.mark.parametrize("form", FORMS)
def test_exact_systems_need_no_damping(device: str, form: str) -> None:
    of = systems(30, 40, form)
    values, damping, weights, active = data(of, 3, device)
    exact = of.exact
    assert isinstance(exact, KernelSystems)
    assert exact.normal.form == "dual"
    given, rhs = (values, 1e-14 * damping, weights + 0.1, active), draw(3, 30).to(device)
    expected = torch.linalg.solve(matrix(of, *given), rhs)
    assert (exact.factor(*given).solve(rhs) - expected).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns", "density"), [(30, 40, 0.08), (50, 20, 0.2), (9, 60, 0.5), (12, 12, 0.0)])
def test_equal_to_dense(device: str, form: str, rows: int, columns: int, density: float) -> None:
    for seed, damping in enumerate((1e2, 1.0, 1e-2)):
        of = systems(rows, columns, form, seed, density)
        given, rhs = data(of, 3, device, damping, seed), draw(3, rows, seed=seed + 1).to(device)
        expected = torch.linalg.solve(matrix(of, *given), rhs)
        assert (of.factor(*given).solve(rhs) - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_products(device: str, form: str) -> None:
    of = systems(20, 30, form)
    values, damping, weights, active = data(of, 3, device)
    factor = of.factor(values, damping, weights, active)
    J = values.new_zeros(3, 20, 30)
    J[:, of.normal.row, of.normal.col] = values
    J = torch.where(active.unsqueeze(2), J, 0.0)
    v, w = draw(3, 30, seed=1).to(device), draw(3, 20, seed=2).to(device)
    assert_equal(factor.push(v), (J @ v.unsqueeze(2)).squeeze(2), 1e-13)
    assert_equal(factor.pull(w), (J.mT @ w.unsqueeze(2)).squeeze(2), 1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_a_small_damping_costs_no_digits(device: str, form: str) -> None:
    """The residual is no worse than that of a dense factor."""
    of = systems(60, 80, form, density=0.05)
    given, rhs = data(of, 3, device, 1e-8), draw(3, 60, seed=3).to(device)
    A = matrix(of, *given)
    residual = (A @ of.factor(*given).solve(rhs).unsqueeze(2)).squeeze(2) - rhs
    dense = (A @ torch.linalg.solve(A, rhs).unsqueeze(2)).squeeze(2) - rhs
    assert residual.norm() <= 100 * dense.norm() + 1e-13 * rhs.norm()


@pytest.mark.parametrize("form", FORMS)
def test_without_weights_and_masks(device: str, form: str) -> None:
    of = systems(20, 30, form)
    values, damping, weights, active = data(of, 2, device)
    plain = matrix(of, values, damping, torch.ones_like(weights), torch.ones_like(active))
    rhs = draw(2, 20, seed=4).to(device)
    assert_equal(of.factor(values, damping).solve(rhs), torch.linalg.solve(plain, rhs), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_single_precision(device: str, form: str) -> None:
    of = systems(30, 40, form)
    values, damping, weights, active = data(of, 3, device)
    rhs = draw(3, 30, seed=1).to(device)
    expected = torch.linalg.solve(matrix(of, values, damping, weights, active), rhs)
    found = of.factor(values.float(), damping.float(), weights.float(), active).solve(rhs.float())
    assert found.dtype == torch.float32
    assert_equal(found.double(), expected, 1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_samples_do_not_know_of_each_other(device: str, form: str) -> None:
    of = systems(30, 40, form)
    given, rhs = data(of, 5, device, 1e-3), draw(5, 30, seed=1).to(device)
    factor = of.factor(*given)
    together = factor.solve(rhs)
    assert torch.equal(together, of.factor(*given).solve(rhs))
    places = torch.tensor([3, 1], device=device)
    assert torch.equal(of.factor(*(t[places] for t in given)).solve(rhs[places]), together[places])
    assert torch.equal(factor[places].solve(rhs[places]), together[places])
    assert factor[places].info.tolist() == [0, 0]
    turned = factor.replaced(places, of.factor(*(t[places.flip(0)] for t in given)))
    assert torch.equal(turned.solve(rhs)[places], of.factor(*(t[places.flip(0)] for t in given)).solve(rhs[places]))
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    assert factor[nobody].solve(rhs[nobody]).shape == (0, 30)


@pytest.mark.parametrize("form", FORMS)
def test_a_broken_sample_stays_alone(device: str, form: str) -> None:
    of = systems(15, 20, form, 11, 0.2)
    values, damping, weights, _ = data(of, 4, device)
    rhs = draw(4, 15, seed=2).to(device)
    expected = of.factor(values, damping, weights).solve(rhs)
    values[2, 3] = math.nan
    factor = of.factor(values, damping, weights)
    assert factor.info.bool().tolist() == [False, False, True, False]
    good = torch.tensor([0, 1, 3])
    assert torch.equal(factor.solve(rhs)[good], expected[good])
    assert not factor.solve(rhs)[2].isfinite().any()


def test_a_singular_sample_is_shifted_alone(device: str) -> None:
    """Two equal rows without damping: the others keep their bits, this one gets a solution all the same."""
    pattern = torch.rand(12, 30, generator=torch.Generator().manual_seed(12)) < 0.3
    pattern[5] = pattern[4]
    row, col = pattern.nonzero(as_tuple=True)
    of = KernelSystems(SparseNormal(row, col, (12, 30), "dual"))
    values, damping, weights, active = data(of, 3, device)
    damping, active, rhs = torch.zeros_like(damping), torch.ones_like(active), draw(3, 12, seed=3).to(device)
    expected = of.factor(values, damping, weights, active).solve(rhs)
    values[1, row == 5] = values[1, row == 4]
    rhs[1, 5] = rhs[1, 4]
    factor = of.factor(values, damping, weights, active)
    assert factor.info.tolist() == [0, 0, 0]
    found = factor.solve(rhs)
    assert torch.equal(found[::2], expected[::2])
    residual = matrix(of, values, damping, weights, active)[1] @ found[1] - rhs[1]
    assert residual.norm() <= 1e-6 * rhs[1].norm()


@pytest.mark.parametrize("form", FORMS)
def test_what_is_in_shared_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch, device: str, form: str) -> None:
    of = systems(30, 40, form)
    given, rhs = data(of, 3, device), draw(3, 30, seed=1).to(device)
    expected, seen = of.factor(*given).solve(rhs), set[tuple[int, int]]()
    for memory in (0, *range(2048, 96 * 1024, 1024)):
        monkeypatch.setattr(launching, "most_shared", lambda tensor, memory=memory: memory)
        places = of.inside(rhs, True, False), of.inside(rhs, False, True)
        if places not in seen:
            assert torch.equal(of.factor(*given).solve(rhs), expected)
        seen.add(places)
    assert len(seen) > 4  # nothing, everything, and between


def test_threads_that_share_sums(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """With fronts that are all of them a block's, of few pivots or of many."""
    monkeypatch.setattr(sparse, "_TEAMS", {})
    for threads, (rows, columns, density) in ((4, (30, 40, 0.08)), (64, (9, 60, 0.5)), (64, (30, 40, 0.08))):
        monkeypatch.setattr(sparse, "THREADS", threads if device == "cpu" else max(sparse.WARP, 4 * threads))
        of = systems(rows, columns, "dual", density=density)
        given, rhs = data(of, 2, device), draw(2, rows, seed=1).to(device)
        assert_equal(of.factor(*given).solve(rhs), torch.linalg.solve(matrix(of, *given), rhs), 1e-11)


@pytest.mark.parametrize("teams", [{3: 1, 6: 2}, {6: 2}, {3: 1}, {100: 1}])
def test_teams_of_warps(monkeypatch: pytest.MonkeyPatch, device: str, teams: dict[int, int]) -> None:
    """Fronts of a level side by side, each taken by one warp or by several; the result is that of other teams."""
    if device == "cpu":
        monkeypatch.setattr(sparse, "THREADS", 8)  # warps of one thread
    expected = systems(40, 60, "primal")
    monkeypatch.setattr(sparse, "_TEAMS", teams)
    of = systems(40, 60, "primal")
    given, rhs = data(of, 2, device), draw(2, 40, seed=1).to(device)
    assert_equal(of.factor(*given).solve(rhs), expected.factor(*given).solve(rhs), 1e-12)
    assert_equal(of.factor(*given).solve(rhs), torch.linalg.solve(matrix(of, *given), rhs), 1e-11)


def test_a_large_factor_has_more_threads(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    small = systems(30, 40, "dual")
    monkeypatch.setattr(sparse, "_LARGE", 10)
    large = systems(30, 40, "dual")
    assert large.threads == 2 * small.threads
    given, rhs = data(small, 2, device), draw(2, 30, seed=1).to(device)
    assert_equal(large.factor(*given).solve(rhs), small.factor(*given).solve(rhs), 1e-12)


def test_explained(device: str) -> None:
    constraints = sn.Nonlinear(lambda y, x: y[:, 1:] - y[:, :-1].sin(), 99, equals=0.0).to(device)
    found = sn.explain(constraints, draw(3, 100, seed=1).to(device))
    assert found.engine.startswith("loop with a kernel a step on y")
    assert found.system.startswith("sparse Cholesky factors, dual, 99 x 99 a sample: ")
    assert found.system.endswith(" entries, a block of threads a sample")


def test_a_pattern_is_analysed_once(device: str) -> None:
    pattern = Pattern.of(torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.5)
    assert kernel_systems(pattern) is kernel_systems(pattern)
    assert kernel_systems(pattern).normal is sparse_normal(pattern)


def test_what_makes_factors_again_is_loaded_before(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A recording can load no kernels, and its way back may have to make factors that an earlier call could keep."""
    constraints = sn.Nonlinear(lambda y, x: y[:, 1:] - y[:, :-1].sin(), 99, equals=0.0).to(device)
    load, names = launching.load, set[str]()

    def noted(source: str, *rest, **numbers: int):
        names.add(source)
        return load(source, *rest, **numbers)

    monkeypatch.setattr(launching, "load", noted)
    sn.repair(constraints, draw(3, 100, seed=1).to(device), start=None)
    assert names == {"stepping", "sparse"}


@pytest.mark.parametrize("rows", ["active", "all"])
def test_a_recording_freezes_samples_that_have_stopped(
    monkeypatch: pytest.MonkeyPatch, device: str, rows: Literal["active", "all"]
) -> None:
    """It takes all steps with all samples, as this does on any device; the plain loop has the same result."""
    width = lambda x: 0.05 + x.square().expand(-1, 69)  # noqa: E731
    ties = lambda y, x: y[:, 1:].sin() + y[:, 1:] - y[:, :-1].square() / 2 - x  # noqa: E731
    constraints = (sn.Nonlinear(ties, 69, lambda x: -width(x), width) & sn.Box(-0.3, 1.0)).to(device)
    y, x = draw(4, 70, seed=1).to(device), 0.1 * draw(4, 1, seed=2).to(device)
    y[0] *= 1e-3  # needs fewer steps than the others
    y.requires_grad_()
    x.requires_grad_()
    found = []
    for recorded in (True, False):
        monkeypatch.setattr(sys.modules["snarenet.repair.loop.loop"], "tracing", lambda recorded=recorded: recorded)
        solution = sn.repair(constraints, y, x, rows=rows, start=None, tol=1e-4, max_steps=60)
        assert solution.converged.all()
        assert solution.steps.min() < solution.steps.max()
        found.append([solution.value, solution.steps, *torch.autograd.grad(solution.value.sin().sum(), [y, x])])
        monkeypatch.setattr(launching, "supported", lambda tensor: False)
    for a, b in zip(*found, strict=True):
        assert_equal(a.double(), b.double(), 1e-9)
