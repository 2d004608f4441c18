"""`start=`: what "auto" chooses, that it is safe, and the older spellings."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.memo import Memo
from snarenet.repair.metric import metric_of
from snarenet.repair.options import Options
from snarenet.repair.start import nearest, smooth
from snarenet.repair.start.nearest import plan
from snarenet.testing import assert_equal, draw

N = 6
Y, X = draw(9, N, seed=1, scale=2), 0.3 * draw(9, 1, seed=2)
A, C = draw(3, N, seed=3), draw(1, N, seed=4)
WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 9.0, 1.0, 0.5], dtype=torch.float64)


def wave(y: Tensor, x: Any) -> Tensor:
    return (y + 0.3 * y.sin()) @ A.T.to(y) + x


def chain(count: int) -> sn.Constraints:
    """Constant rows, each between neighbours."""
    A = torch.eye(count, dtype=torch.float64)[:-1] - torch.eye(count, dtype=torch.float64)[1:]
    return sn.Linear(A.to_sparse(), -0.1, 0.1) & sn.Box(-1.0, 1.0)


LONG = 160


def smooth_sequences(order: int) -> sn.Linear:
    """Differences of an order are small."""
    return sn.Linear(torch.eye(LONG, dtype=torch.float64).diff(n=order, dim=0), -1e-3, 1e-3)


SETS = {
    "clipping": lambda: sn.Box(-0.5, lambda x: 0.5 + x.square().expand(-1, N)),
    "admm": lambda: sn.Linear(A, -0.5, 0.5) & sn.Linear(C, equals=lambda x: x) & sn.Box(-2.0, 2.0),
    "active set": lambda: sn.Quadratic(A.abs() / 4, A, upper=0.5) & sn.Linear(C, equals=lambda x: x),
    "smooth": lambda: sn.Nonlinear(wave, rows=3, lower=-0.5, upper=0.5) & sn.Box(-2.0, 2.0),
}
KINDS = pytest.mark.parametrize("kind", SETS)
FINISH = sn.Annealed(1e-3, 0.1)


def chosen(constraints: sn.Constraints, y: Tensor = Y, x: Any = X, **options: Any) -> nearest.Plan:
    return plan(Memo(), Options(**options), constraints.at(y, x))


class TestChoice:
    @KINDS
    def test_by_structure(self, kind: str) -> None:
        constraints = SETS[kind]()
        assert chosen(constraints).method == chosen(constraints, start=sn.Nearest()).method == kind
        assert chosen(constraints, start=None).method == "none"

    def test_rows_that_depend_on_x(self) -> None:
        rows = sn.Linear(lambda x: A * (1 + x).unsqueeze(2), upper=0.1)
        assert chosen(rows).method == "active set"

    def test_large_sparse_sets_form_no_dense_matrix(self) -> None:
        y = draw(2, 600)
        assert chosen(chain(600), y, None).method == "smooth"
        assert chosen(chain(60), y[:, :60], None).method == "admm"

    @pytest.mark.parametrize("order", [2, 3])
    def test_sparse_rows_that_are_nearly_dependent(self, order: int) -> None:
        """Differences of a high order have hardly any independent direction left, if there are many."""
        rows = smooth_sequences(order)
        y = draw(3, LONG)
        assert chosen(rows, y, None)[:2] == ("smooth", 40)
        assert chosen(rows & sn.Box(-3.0, 3.0), y, None).method == "smooth"
        assert chosen(rows, y, None, start=sn.Nearest(7)).iterations == 7
        assert chosen(sn.Linear(rows.A[:20, :23], -1.0, 1.0), y[:, :23], None).method == "admm"
        assert chosen(sn.Linear(rows.A + 1e-9, -1.0, 1.0), y, None).method == "admm"
        weights = 0.5 + draw(LONG, seed=1).abs()
        metric = metric_of(Options(), Memo(), weights, LONG)
        assert plan(Memo(), Options(), rows.at(y), metric).method == "smooth"
        assert plan(Memo(), Options(), rows.at(y), recorded=True).method == "admm"

    def test_limits_over_time(self) -> None:
        """On speed and acceleration: the more times, the nearer to dependence, and ADMM would end outside."""
        for times, method in ((30, "admm"), (120, "smooth")):
            step, unit = 2 * torch.pi / times, torch.eye(times, dtype=torch.float64)
            speed, acceleration = unit.diff(dim=0), unit.diff(n=2, dim=0)
            rows = sn.Linear(speed, -1.2 * step, 1.2 * step) & sn.Linear(acceleration, -1.5 * step**2, 1.5 * step**2)
            y = (step * torch.arange(times).double()).sin() + 0.3 * draw(20, times)
            assert chosen(rows, y, None).method == method
            assert sn.repair(rows, y).converged.all()

    @pytest.mark.parametrize("start", ["auto", sn.Nearest(), sn.Nearest(7)])
    def test_iterations(self, start: Any) -> None:
        usual = {"admm": 35, "active set": 26, "smooth": 20}
        asked = None if start == "auto" or start.iterations == "auto" else start.iterations
        for kind, count in usual.items():
            assert chosen(SETS[kind](), start=start).iterations == (asked or count)

    def test_the_damping_suits_the_start(self) -> None:
        for start in ("auto", sn.Nearest(20)):
            assert chosen(SETS["admm"](), start=start).damping == FINISH
        for start in (sn.Nearest(5), None):
            assert chosen(SETS["admm"](), start=start).damping == sn.Annealed()
        for kind in ("clipping", "active set", "smooth"):
            assert chosen(SETS[kind]()).damping == sn.Annealed()
        assert chosen(SETS["admm"](), damping=sn.Constant(0.3)).damping == sn.Constant(0.3)

    def test_without_matrices_or_recorded(self) -> None:
        for kind in SETS:
            free = chosen(SETS[kind](), solver=sn.ConjugateGradients()).method
            assert free == ("clipping" if kind == "clipping" else "none")
            recorded = plan(Memo(), Options(), SETS[kind]().at(Y, X), recorded=True)
            assert recorded.method == ("none" if kind == "smooth" else kind)
            assert not recorded.looks


@KINDS
class TestAuto:
    def test_the_nearest_point(self, kind: str) -> None:
        """As an orthogonal projection: what is nearest to it along the way back is itself."""
        constraints = SETS[kind]()
        solution = sn.repair(constraints, Y, X)
        assert solution.converged.all()
        plain = sn.repair(constraints, Y, X, start=None)
        assert ((solution.value - Y).norm(dim=1) <= (plain.value - Y).norm(dim=1) * (1 + 1e-6)).all()
        beyond = solution.value + 0.1 * (Y - solution.value)
        assert_equal(sn.repair(constraints, beyond, X).value, solution.value, 1e-3 if kind == "admm" else 1e-6)

    def test_gradients(self, kind: str) -> None:
        y, x = Y[:3].clone().requires_grad_(), X[:3].clone().requires_grad_()
        for weights in (None, WEIGHTS):
            run = lambda y, x: sn.repair(SETS[kind](), y, x, tol=1e-10, weights=weights).value  # noqa: B023, E731
            assert torch.autograd.gradcheck(run, (y, x), atol=1e-5)

    def test_what_is_in_the_set_stays(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """To the last bit, with the gradient of the identity, and without a search; within the tolerance too."""
        constraints = SETS[kind]()
        inside = sn.repair(constraints, Y, X, tol=1e-9).value.detach()
        monkeypatch.setattr(nearest, "_towards", None)
        monkeypatch.setattr(smooth, "_find", None)
        y = inside.clone().requires_grad_()
        solution = sn.repair(constraints, y, X)
        assert torch.equal(solution.value, inside)
        assert torch.equal(torch.autograd.grad(solution.value.sum(), y)[0], torch.ones_like(y))

    def test_some_in_the_set(self, kind: str) -> None:
        constraints = SETS[kind]()
        inside, some = sn.repair(constraints, Y, X).value, torch.arange(len(Y)) % 2 == 0
        mixed = torch.where(some.unsqueeze(1), inside, Y)
        assert_equal(sn.repair(constraints, mixed, X).value, inside, 1e-7)

    def test_batches(self, kind: str) -> None:
        constraints = SETS[kind]()
        whole = sn.repair(constraints, Y, X).value
        assert_equal(sn.repair(constraints, Y[4:5], X[4:5]).value, whole[4:5], 1e-9)
        y = Y[:0].clone().requires_grad_()
        empty = sn.repair(constraints, y, X[:0]).value
        assert empty.shape == (0, N)
        assert torch.autograd.grad(empty.sum(), y)[0].shape == (0, N)
        broken = torch.where(torch.arange(len(Y)).unsqueeze(1) == 2, torch.nan, Y)
        solution = sn.repair(constraints, broken, X)
        assert solution.status[2] == sn.Status.NONFINITE
        others = torch.arange(len(Y)) != 2
        assert_equal(solution.value[others], whole[others], 1e-9)

    def test_single_precision(self, kind: str) -> None:
        """Also inside autocast, which leaves gradients alone."""
        layer, found = sn.SnareLayer(SETS[kind](), tol=1e-4, dtype=torch.float32), []
        for on in (False, True):
            y = Y.float().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                solution = layer.solve(y, X.float())
                solution.value.square().sum().backward()
            found.append((solution.value.detach(), y.grad))
        assert solution.converged.all()
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        exact = sn.repair(SETS[kind](), Y, X).value
        assert (found[0][0] - exact).abs().max() < 1e-2

    def test_an_empty_set(self, kind: str) -> None:
        """Samples without a point keep their status and do not disturb the others."""
        row, x = torch.eye(1, N, dtype=torch.float64), torch.where(torch.arange(len(Y)) % 3 == 0, 9.0, 0.1).double()
        constraints = SETS[kind]() & sn.Linear(row, lower=lambda x: x) & sn.Linear(row.clone(), upper=1.0)
        y, x = Y.clone().requires_grad_(), x.unsqueeze(1)
        solution, plain = (
            sn.repair(constraints, y, x, rescue=True),
            sn.repair(constraints, Y, x, start=None, rescue=True),
        )
        assert torch.equal(solution.status, plain.status)
        assert (solution.violation <= 1.1 * plain.violation + 1e-6).all()  # a sum of squares is least, not the largest
        assert torch.autograd.grad(solution.value.sum(), y)[0].isfinite().all()

    def test_compiled(self, kind: str) -> None:
        if kind in ("clipping", "admm"):
            pytest.skip("nothing leaves the graph")
        torch._dynamo.reset()
        layer = sn.SnareLayer(SETS[kind](), max_steps=4)  # few, for a small graph
        y = Y.clone().requires_grad_()
        found = [torch.compile(layer, backend="eager")(y, X), layer(y, X)]
        assert_equal(*found, 1e-10)
        assert_equal(*(torch.autograd.grad(value.square().sum(), y)[0] for value in found), 1e-8)

    def test_exported(self, kind: str) -> None:
        start = sn.Nearest(4) if kind in ("admm", "active set") else "auto"  # few, for a small graph
        layer = sn.SnareLayer(SETS[kind](), start=start, max_steps=3, rescue=False, on_failure="ignore").eval()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            exported = torch.export.export(layer, (Y, X), strict=False).module()
        assert any("cannot be exported" in str(one.message) for one in told) == (kind == "smooth")
        if kind == "smooth":
            layer = sn.SnareLayer(layer.constraints, start=None, max_steps=3, rescue=False, on_failure="ignore")
        assert_equal(exported(Y, X), layer(Y, X), 1e-8)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("weights", [None, 0.5 + draw(LONG, seed=9).abs()], ids=["plain", "weights"])
def test_the_nearest_smooth_sequence(order: int, weights: Tensor | None) -> None:
    """No step of the repair is left to do, and the force (y - z) W leads away from all other points of the set."""
    y = draw(12, LONG, seed=5).cumsum(1).requires_grad_()
    found = sn.repair(smooth_sequences(order), y, weights=weights)
    assert found.converged.all()
    assert (found.steps == 0).all()
    W = torch.ones(LONG, dtype=torch.float64) if weights is None else weights / weights.mean()
    z, force = found.value.detach(), W * (y - found.value).detach()
    work = force @ z.T - (force * z).sum(1, keepdim=True)  # of the force on the way to another point
    assert work.max() <= 1e-5 * force.norm(dim=1).max()

    d, v, h = draw(*y.shape, seed=6), draw(*y.shape, seed=7), 1e-6
    (slope,) = torch.autograd.grad((v * found.value).sum(), y)
    there, back = (sn.repair(smooth_sequences(order), y.detach() + s * h * d, weights=weights).value for s in (1, -1))
    assert_equal((slope * d).sum(1), (v * (there - back)).sum(1) / (2 * h), 1e-3)


def test_a_start_that_leads_nowhere_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not reach the set from there is repaired as without it; not where the start was asked for."""
    away = lambda memo, chosen, weights, instance, y: y * torch.nan  # noqa: E731
    monkeypatch.setattr(nearest, "_towards", away)
    constraints = SETS["admm"]()
    plain = sn.repair(constraints, Y, X, start=None)
    solution = sn.repair(constraints, Y, X)
    assert torch.equal(solution.value, plain.value)
    assert solution.converged.all()
    assert not sn.repair(constraints, Y, X, start=sn.Nearest()).converged.any()


def test_saddles_are_left_to_the_other_search() -> None:
    """Indefinite Hessians: fixed points of the active set whose gradient is not exact."""
    constraints = sn.Quadratic(draw(3, N, seed=1, scale=0.3), draw(3, N, seed=2), upper=0.2)
    y = draw(8, N, seed=3, scale=2)
    assert torch.autograd.gradcheck(lambda y: sn.repair(constraints, y).value, (y.requires_grad_(),), atol=1e-5)


def test_the_restoring_repair_has_the_metric() -> None:
    """From a point that only moved what is cheap; with everything else at hand it would be far in the metric."""
    sphere = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), rows=1, upper=1.0)
    weights = torch.tensor([1.0, 1.0, 1e6], dtype=torch.float64)
    y = torch.tensor([[2.0, 1.0, 0.9]], dtype=torch.float64)
    solution = sn.repair(sphere, y, weights=weights)
    force, z = weights * (y - solution.value), solution.value
    assert_equal(force / z, (force / z)[:, :1].expand_as(z), 1e-5)  # W (y - z) is a multiple of the normal z


class TestSpellings:
    def test_nearest_is_deprecated(self) -> None:
        constraints = SETS["admm"]()
        for old, new in ((7, sn.Nearest(7)), (0, None)):
            words = f"`nearest` is deprecated: write `start={'sn.Nearest.7.' if old else None}`"
            with pytest.warns(DeprecationWarning, match=words):
                found = sn.repair(constraints, Y, X, nearest=old)
            assert_equal(found.value, sn.repair(constraints, Y, X, start=new).value, 0.0)
            with pytest.warns(DeprecationWarning, match=words):
                assert sn.SnareLayer(constraints, nearest=old).options.start == new
            with pytest.warns(DeprecationWarning, match=words):
                assert sn.explain(constraints, Y, X, nearest=old) == sn.explain(constraints, Y, X, start=new)
        with pytest.raises(ValueError, match="give `start` alone"):
            sn.repair(constraints, Y, X, start=None, nearest=3)
        for wrong in (-1, 1.5, True):
            with pytest.raises(ValueError, match="`nearest` must be a whole number >= 0"):
                sn.SnareLayer(constraints, nearest=wrong)

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="`start` must be 'auto', None or Nearest"):
            sn.repair(SETS["admm"](), Y, X, start="nearest")  # pyright: ignore
        for wrong in (0, -1, 2.5, "all"):
            with pytest.raises(ValueError, match="`iterations` must be a whole number >= 1"):
                sn.Nearest(wrong)  # pyright: ignore
        with pytest.raises(TypeError, match="`damping` must be 'auto'"):
            sn.SnareLayer(SETS["admm"](), damping="annealed")  # pyright: ignore

    def test_a_scale_is_a_weight(self) -> None:
        constraints, scale = SETS["smooth"](), WEIGHTS.rsqrt()
        expected = sn.repair(constraints, Y, X, weights=scale.pow(-2)).value
        assert torch.equal(sn.repair(constraints, Y, X, scale=scale).value, expected)
        layer = sn.SnareLayer(constraints, scale=scale, rescue=False)
        assert torch.equal(layer(Y, X), expected)
        assert_equal(layer.weights, WEIGHTS, 1e-12)
        assert sn.explain(constraints, Y, X, scale=scale).metric == layer.explain(Y, X).metric != ""
        with pytest.raises(ValueError, match="`weights` and `scale` say the same"):
            sn.SnareLayer(constraints, scale=scale, weights=WEIGHTS)
        for wrong, words in (
            (2.0, "must be a constant tensor"),
            (-scale, "must be positive"),
            (scale[:2], "`weights`"),
        ):
            with pytest.raises(ValueError, match=words):
                sn.repair(constraints, Y, X, scale=wrong)  # pyright: ignore
