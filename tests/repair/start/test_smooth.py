"""The nearest point of any smooth set: optimality conditions, a closed form, differences, and what fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulation import on_devices, use_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import snarenet as sn
from snarenet.memo import Memo
from snarenet.repair.choose import sparse_suits
from snarenet.repair.options import Options
from snarenet.repair.start import smooth
from snarenet.repair.start.nearest import approach, plan
from snarenet.testing import assert_equal, draw

N, LONG = 6, 90
WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 2.0, 1.0, 0.5], dtype=torch.float64)
Q = draw(2, N, N, seed=1)
Q = Q @ Q.mT / N + 0.3 * torch.eye(N, dtype=torch.float64)
Y, X = draw(24, N, seed=2), 0.3 * draw(24, 1, seed=3)


def shell() -> sn.Constraints:
    """Between two ellipsoids with whole matrices, on a plane for every x, and in a box."""
    plane = sn.Linear(draw(1, N, seed=4), equals=lambda x: x)
    return (
        sn.Quadratic(Q, lower=torch.tensor([0.8, -torch.inf]), upper=torch.tensor([1.0, 2.0])) & plane & sn.Box(-1, 1)
    )


def waves() -> sn.Constraints:
    """A function, bent everywhere, first a box."""
    A = draw(3, N, seed=5)

    def fn(y: Tensor, x: Tensor) -> Tensor:
        return torch.cat([(y.sin() @ A.T), y[:, :1] * y[:, 1:2] - x], 1)

    lower = torch.tensor([-0.3, -0.3, -torch.inf, 0.0], dtype=torch.float64)
    return sn.Box(-1.2, 1.2) & sn.Nonlinear(fn, 4, lower, [0.3, 0.3, 0.2, 0.0])


def factored() -> sn.Constraints:
    """A limit of low rank whose factor depends on x, and rows that do."""
    F, A = draw(N, 2, seed=6), draw(1, N, seed=7)
    ball = sn.Quadratic(factor=lambda x: F * (1 + x).unsqueeze(2), diagonal=torch.full((N,), 0.3), upper=0.5)
    return ball & sn.Linear(lambda x: A * (1 + x).unsqueeze(2), -0.2, 0.2)


def chain() -> sn.Constraints:
    """Products of neighbours: few entries a row, so that systems are on the pattern."""

    def fn(y: Tensor, x: Tensor) -> Tensor:
        return y[:, :-1] * y[:, 1:] + y[:, 1:].sin()

    return sn.Nonlinear(fn, LONG - 1, -0.4, 0.5) & sn.Box(-0.9, 1.0)


SMALL = {"shell": shell, "waves": waves, "factored": factored}
KINDS = pytest.mark.parametrize("kind", SMALL)


def case(kind: str) -> tuple[sn.Constraints, Tensor, Any]:
    return (chain(), draw(12, LONG, seed=8), draw(12, 1)) if kind == "chain" else (SMALL[kind](), Y, X)


def project(constraints: sn.Constraints, y: Tensor, x: Any, weights: Tensor | None = None, count: int = 20) -> Tensor:
    instance = constraints.at(y, x)
    return approach(Memo(), instance, y, plan(Memo(), Options(start=sn.Nearest(count)), instance), weights)


def found(constraints: sn.Constraints, y: Tensor, z: Tensor, x: Any) -> Tensor:
    return (z != y).any(1) | (constraints.violation(y, x) == 0)


def assert_optimal(constraints: sn.Constraints, y: Tensor, z: Tensor, x: Any, weights: Tensor | None = None) -> None:
    """Feasible, and the way back is a combination of normals of rows at their bounds, with the right signs."""
    assert constraints.violation(z, x).max() < 1e-8
    instance = constraints.at(z, x)
    value, J = instance.map.value(z), instance.map.jacobian(z).expand(len(z), -1, -1)
    for i in range(len(z)):
        high, low = value[i] > instance.upper[i] - 1e-8, value[i] < instance.lower[i] + 1e-8
        force = (y[i] - z[i]) * (1 if weights is None else weights)
        normals = J[i][high | low]
        multipliers = torch.linalg.lstsq(normals.T, force.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        assert_equal(normals.T @ multipliers, force, 1e-6)
        if torch.linalg.matrix_rank(normals) == len(normals):  # else multipliers are not unique
            equal = (instance.lower[i] == instance.upper[i])[high | low]
            assert (multipliers[high[high | low] & ~equal] > -1e-6).all()
            assert (multipliers[low[high | low] & ~equal] < 1e-6).all()


@pytest.mark.parametrize("kind", [*SMALL, "chain"])
class TestOptimality:
    def test_first_order_conditions(self, kind: str) -> None:
        constraints, y, x = case(kind)
        for weights in (None, WEIGHTS) if kind != "chain" else (None,):
            z = project(constraints, y, x, weights)
            ok = found(constraints, y, z, x)
            assert ok.double().mean() > 0.9
            assert_optimal(constraints, y[ok], z[ok], x[ok], weights)

    def test_never_farther_than_the_repair(self, kind: str) -> None:
        constraints, y, x = case(kind)
        plain, near = (sn.repair(constraints, y, x, start=start) for start in (None, sn.Nearest(20)))
        assert near.converged.all()
        assert ((near.value - y).norm(dim=1) <= (plain.value - y).norm(dim=1) * (1 + 1e-6)).all()

    def test_samples_do_not_know_each_other(self, kind: str) -> None:
        constraints, y, x = case(kind)
        together = project(constraints, y, x)
        for i in (0, 5):
            assert_equal(project(constraints, y[i : i + 1], x[i : i + 1]), together[i : i + 1], 1e-9)

    def test_their_scale_does_not_matter(self, kind: str) -> None:
        constraints, y, x = case(kind)
        weights = torch.linspace(1, 3, y.shape[1], dtype=torch.float64)
        assert_equal(project(constraints, y, x, 1e6 * weights), project(constraints, y, x, weights), 1e-8)


def test_on_the_pattern() -> None:
    """Sparse systems mix no samples but by the order of sums, and find what dense ones do."""
    constraints, y, x = case("chain")
    assert sparse_suits(constraints.at(y, x))
    together = project(constraints, y, x)
    for i in range(3):
        assert_equal(project(constraints, y[i : i + 1], x[i : i + 1]), together[i : i + 1], 1e-13)
    dense = sn.Nonlinear(constraints.parts[0].fn, LONG - 1, -0.4, 0.5, sparsity=None) & constraints.parts[1]
    assert_equal(together, project(dense, y, x), 1e-7)


@on_devices
def test_by_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interior-point steps, Newton's and the backward pass, on the pattern, by the kernels for sparse factors."""
    constraints, y, x = case("chain")
    found = []
    for kernels in (False, True):
        with monkeypatch.context() as patch:
            ran = use_kernels(patch, device, kernels)
            leaf = y.to(device).requires_grad_()
            z = project(constraints.to(device), leaf, x.to(device))
            (gradient,) = torch.autograd.grad(z.square().sum(), leaf)
            found.append((z.detach().cpu(), gradient.cpu()))
            assert {"factor", "solve", "push", "pull"} <= set(ran) or not kernels
    for plain, other in zip(*found, strict=True):
        assert_equal(other, plain, 1e-7)
    assert (found[0][0] != y).any(1).sum() >= 10


def test_a_sphere_has_a_closed_form() -> None:
    sphere = sn.Nonlinear(lambda y, x: y.norm(dim=1, keepdim=True), rows=1, equals=2.0)
    y = draw(50, 4, seed=9, scale=3)
    assert_equal(project(sphere, y, None), 2 * y / y.norm(dim=1, keepdim=True), 1e-9)


def test_the_nearest_positive_definite_matrix() -> None:
    """Clips the eigenvalues, in the metric that counts entries beside the diagonal twice."""
    k = 5
    i, j = torch.tril_indices(k, k)

    def matrices(y: Tensor) -> Tensor:
        lower = y.new_zeros(len(y), k, k).index_put((torch.arange(len(y))[:, None], i, j), y)
        return lower + lower.tril(-1).mT

    y = draw(40, len(i), seed=8)
    weights = torch.where(i == j, 1.0, 2.0).double()
    definite = sn.Nonlinear(lambda y, x: torch.linalg.eigvalsh(matrices(y)), k, lower=0.1)
    found = sn.repair(definite, y, weights=weights)
    assert found.converged.all()
    values, vectors = torch.linalg.eigh(matrices(y))
    nearest = ((vectors * values.clamp(min=0.1).unsqueeze(1)) @ vectors.mT)[:, i, j]
    torch.testing.assert_close(found.value, nearest, rtol=0, atol=1e-6)


def test_feasible_points_stay() -> None:
    z = project(shell(), Y, X)
    inside = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), rows=1, upper=100.0)
    y = z.clone().requires_grad_()
    same = project(inside, y, X)
    assert torch.equal(same, z)
    assert torch.equal(torch.autograd.grad(same.sum(), y)[0], torch.ones_like(z))


@KINDS
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_gradients(kind: str, weights: Tensor | None) -> None:
    constraints = SMALL[kind]()
    some = found(constraints, Y, project(constraints, Y, X, weights), X).nonzero().squeeze(1)[:3]
    y, x = Y[some].clone().requires_grad_(), X[some].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y, x: project(constraints, y, x, weights), (y, x), atol=1e-5)


def test_gradients_on_the_pattern() -> None:
    constraints, y, x = case("chain")
    y = y[:2].clone().requires_grad_()
    v = draw(2, LONG, seed=10)
    (gradient,) = torch.autograd.grad(project(constraints, y, x[:2]), y, v)
    for seed in (11, 12):
        t = draw(2, LONG, seed=seed)
        with torch.no_grad():
            ahead, back = (project(constraints, y + h * t, x[:2]) for h in (1e-6, -1e-6))
        assert_equal((gradient * t).sum(), ((ahead - back) / 2e-6 * v).sum(), 1e-5)


def test_gradients_of_bounds_and_learned_rows() -> None:
    A, y = draw(2, 4, seed=13).requires_grad_(), draw(4, 4, seed=14, scale=1.5)
    H, upper = draw(1, 4, 4, seed=15), torch.tensor([0.2, 0.1], dtype=torch.float64, requires_grad=True)
    H = (H @ H.mT + torch.eye(4)).requires_grad_()
    high = torch.full((4,), 0.3, dtype=torch.float64, requires_grad=True)

    def outcome(A: Tensor, H: Tensor, upper: Tensor, high: Tensor) -> Tensor:
        rows = sn.Nonlinear(
            lambda y, x: (y @ A.T).sin() + 0.2 * (y @ A.T).square(), rows=2, upper=lambda _: upper.expand(4, -1)
        )
        ball = sn.Quadratic(lambda _: H.expand(4, -1, -1, -1), upper=1.0)
        z = project(rows & sn.Box(-1.0, lambda _: high.expand(4, -1)) & ball, y, y)
        assert (z != y).any(1).all()
        return z

    assert torch.autograd.gradcheck(outcome, (A, H, upper, high), atol=1e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), reach=st.integers(1, 4), spread=st.sampled_from([0.1, 0.5, 1.0]))
def test_random_sparse_sets(seed: int, reach: int, spread: float) -> None:
    """Rows that couple a variable with one a few places on, about a point that obeys them: never worse."""
    factors, center = draw(LONG - reach, seed=seed), 0.5 * draw(1, LONG, seed=seed + 1)

    def fn(y: Tensor, x: Any) -> Tensor:
        return factors * y[:, :-reach] * y[:, reach:] + y[:, reach:].cos()

    value = fn(center, None)[0]
    rows = sn.Nonlinear(fn, LONG - reach, value - 0.1 * draw(LONG - reach, seed=seed + 2).abs(), value + 0.1)
    constraints = rows & sn.Box(-2.0, 2.0)
    y = center + spread * draw(4, LONG, seed=seed + 3)
    plain, near = (sn.repair(constraints, y, start=start) for start in (None, sn.Nearest(20)))
    ok = near.steps == 0  # the others did not settle
    if ok.any():
        assert_optimal(constraints, y[ok], near.value[ok], None)
    lost = ~found(constraints, y, project(constraints, y, None), None)
    assert torch.equal(near.status[lost], plain.status[lost])
    both = plain.converged & near.converged
    assert ((near.value - y).norm(dim=1) <= (plain.value - y).norm(dim=1) * (1 + 1e-6))[both].all()


class TestInRepair:
    def test_nothing_is_left_to_repair(self) -> None:
        solution = sn.repair(shell(), Y, X, start=sn.Nearest(20))
        assert solution.converged.all()
        assert (solution.steps == 0).double().mean() > 0.9
        assert torch.equal(solution.raw, Y)

    def test_what_is_not_found_is_the_plain_repair(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(smooth, "_SETTLING", 0)
        pair = []
        for start in (None, sn.Nearest(20)):
            y = Y.clone().requires_grad_()
            solution = sn.repair(shell(), y, X, start=start)
            pair.append((solution.value, torch.autograd.grad(solution.value.square().sum(), y)[0]))
        assert torch.equal(pair[0][0], pair[1][0])
        assert torch.equal(pair[0][1], pair[1][1])

    def test_an_empty_set(self) -> None:
        """The samples that no point obeys end as without a projection, and the others as without them."""
        ball = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), rows=1, upper=1.0)
        constraints = ball & sn.Linear(torch.eye(1, N, dtype=torch.float64), lower=lambda x: x)
        x = torch.where(torch.arange(len(Y)) % 3 == 0, 3.0, 0.2).unsqueeze(1).double()
        y = Y.clone().requires_grad_()
        solution, plain = sn.repair(constraints, y, x, start=sn.Nearest(20)), sn.repair(constraints, Y, x, start=None)
        assert torch.equal(solution.status, plain.status)
        assert (solution.converged == (x[:, 0] < 1)).all()
        assert solution.value.isfinite().all()
        assert torch.autograd.grad(solution.value.sum(), y)[0].isfinite().all()

    def test_no_samples_and_no_numbers(self) -> None:
        constraints = shell()
        assert sn.repair(constraints, Y[:0], X[:0], start=sn.Nearest(20)).value.shape == (0, N)
        y = Y.clone()
        y[3] = torch.nan
        solution = sn.repair(constraints, y, X, start=sn.Nearest(20))
        assert solution.status[3] == sn.Status.NONFINITE
        others = torch.arange(len(Y)) != 3
        assert_equal(solution.value[others], sn.repair(constraints, Y, X, start=sn.Nearest(20)).value[others], 1e-9)

    def test_single_precision(self) -> None:
        layer = sn.SnareLayer(shell(), start=sn.Nearest(20), tol=1e-4, dtype=torch.float32).float()
        y = layer(Y.float(), X.float())
        assert shell().violation(y.double(), X).max() <= 2e-4
        near = (y.double() - project(shell(), Y, X)).abs().amax(1) < 1e-2
        assert near.double().mean() > 0.8

    def test_a_compiled_layer_finds_the_same(self) -> None:
        layer = sn.SnareLayer(shell(), start=sn.Nearest(20))
        assert_equal(torch.compile(layer, backend="eager")(Y, X), layer(Y, X), 1e-10)


class TestValleys:
    """Outside an ellipse there are two points that are nearest to one on its long axis, or nearly so."""

    ellipse = sn.Nonlinear(lambda y, x: (y[:, :1] / 2).square() + y[:, 1:].square(), 1, 1.0)
    y = torch.tensor([[0.0, 0.1], [0.0, 0.1], [0.0, 0.1]], dtype=torch.float64)
    near = torch.tensor([[0.1, 0.6], [0.1, -0.6], [torch.nan, 0.0]], dtype=torch.float64)

    def seek(self, near: Tensor | None) -> Tensor:
        instance = self.ellipse.at(self.y, None)
        chosen = plan(Memo(), Options(start=sn.Nearest()), instance)
        return approach(Memo(), instance, self.y, chosen, near=near)

    def test_the_one_that_is_meant(self) -> None:
        up, down = [0.0, 1.0], [0.0, -1.0]
        assert_equal(self.seek(None), torch.tensor([up, up, up], dtype=torch.float64), 1e-8)
        assert_equal(self.seek(self.near), torch.tensor([up, down, up], dtype=torch.float64), 1e-8)

    def test_candidates_choose_it(self) -> None:
        """A step down a quadratic objective forgets the predictions; in which valley to look they still say."""
        best = torch.tensor([[0.0, 0.1], [0.0, -0.1]], dtype=torch.float64)

        def cost(y: Tensor, x: Tensor) -> Tensor:
            return (y - x).square().sum(1)

        y = torch.tensor([[0.1, 0.6, 0.1, -0.6]] * 2, dtype=torch.float64)
        own = sn.SnareLayer(self.ellipse, objective=cost, step=0.5)
        one, two = (own(part, best) for part in y.chunk(2, 1))
        layer = sn.BestOfLayer(self.ellipse, cost, 2, 0.5)
        assert_equal(one, torch.tensor([[0.0, 1.0]] * 2, dtype=torch.float64), 1e-8)
        assert_equal(two, torch.tensor([[0.0, -1.0]] * 2, dtype=torch.float64), 1e-8)
        assert_equal(layer(y, best), torch.tensor([[0.0, 1.0], [0.0, -1.0]], dtype=torch.float64), 1e-8)
        with torch.inference_mode():
            assert_equal(own(y.clone()[:, 2:], best.clone()), two, 1e-8)
        single = layer(y.float(), best.float())
        assert_equal(single, torch.tensor([[0.0, 1.0], [0.0, -1.0]]), 1e-5)


def test_rows_that_are_nearly_dependent() -> None:
    """Newton's steps shrink slowly there; every third one goes to the end of the series."""
    a = draw(50, 2, seed=1)
    y = torch.stack([a[:, 0], a[:, 1], (1 - a.square().sum(1)) / 0.3, a[:, 0].sin()], 1) + 0.003 * draw(50, 4, seed=2)

    def fn(y: Tensor, x: Tensor) -> Tensor:
        first = y[:, :2].square().sum(1, keepdim=True) + 0.3 * y[:, 2:3]
        return torch.cat([first, first + 3e-5 * (y[:, 3:] - y[:, :1].sin())], 1)

    rows = sn.Nonlinear(fn, 2, equals=1.0)
    z = project(rows, y, None)
    assert found(rows, y, z, None).all()
    assert_equal(z[:, 3], z[:, 0].sin(), 1e-6)
