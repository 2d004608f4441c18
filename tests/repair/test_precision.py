"""What is said of a repair is true of what it returns, in every precision."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.constraints.maps import function
from snarenet.layers import METHODS, build
from snarenet.repair.options import Options
from snarenet.testing import draw

pytestmark = pytest.mark.filterwarnings("ignore::snarenet.solution.PrecisionWarning")

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
A, C, H = draw(4, 10, seed=1), draw(2, 10, seed=2), draw(3, 10, seed=3)
Y, X = draw(20, 10, seed=4, scale=3), draw(20, 2, seed=5)
SETS = {
    "linear": lambda: sn.Linear(A, upper=0.1) & sn.Linear(C, equals=lambda x: x),
    "box": lambda: sn.Box(-0.3, 0.7) & sn.Linear(C, equals=lambda x: x / 10),
    "quadratic": lambda: sn.Quadratic(H.square(), H, upper=0.7) & sn.Linear(C, equals=lambda x: x / 10),
    "function": lambda: sn.Nonlinear(
        lambda y, x: (y @ A.T.to(y) / 10).sinh() + x[:, :1], rows=4, lower=-0.7, upper=1.1
    ),
    "sparse": lambda: sn.Linear((A * (A > 0)).to_sparse(), upper=0.1) & sn.Box(-1.0, 1.1),
    "large numbers": lambda: sn.Linear(1e6 * A, equals=3.3e6),
}


def precise(constraints: sn.Constraints, value: Tensor, x: Tensor | None) -> Tensor:
    """(B, rows) what a returned value violates, in float64."""
    return constraints.residual(value.double(), x).abs()


def check(solution: sn.Solution, constraints: sn.Constraints, x: Tensor | None, tol: float) -> None:
    """Violations are those of the value, and CONVERGED means the tolerance, or what float32 can hold."""
    r = precise(constraints, solution.value.detach(), x)
    worst = r.amax(1)
    finite = worst.isfinite()
    assert solution.violation.dtype == torch.float64
    torch.testing.assert_close(solution.violation[finite], worst[finite], rtol=1e-6, atol=1e-13)
    assert (solution.violation[~finite] == torch.inf).all()
    done = solution.converged
    assert (worst[done] <= solution.allowance[done].clamp(min=tol)).all()
    assert (worst[~done & finite] > tol).all()
    assert not ((worst <= tol) & (solution.allowance > 0)).any()
    if solution.value.dtype == torch.float64:
        assert not solution.allowance.any()
    else:  # each row for itself, by the formula: no more than an ulp of float32 in each entry
        instance = constraints.at(solution.value.detach().double(), x)
        J = instance.map.jacobian(solution.value.detach().double()).abs().expand(len(r), -1, -1)
        held = torch.finfo(torch.float32).eps * (J @ solution.value.detach().double().abs().unsqueeze(-1)).squeeze(-1)
        assert (r[done] <= held[done].clamp(min=tol) * (1 + 1e-9)).all()


class TestRule:
    @pytest.mark.parametrize("kind", SETS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("tol", [1e-4, 1e-6, 1e-8, 1e-10])
    def test_of_what_is_returned(self, kind: str, dtype: torch.dtype, tol: float) -> None:
        """Whatever converges in float64 does in float32, and nothing is said that is not so of the value."""
        constraints, x = SETS[kind](), X.to(dtype)
        layer = sn.SnareLayer(constraints, tol=tol, on_failure="raise")
        if kind == "large numbers" and dtype == torch.float64:
            tol = layer.tol = max(tol, 1e-6)  # float64 holds no more of rows of this size
        solution = layer.solve(Y.to(dtype), x)
        assert solution.converged.all()
        assert solution.value.dtype == torch.promote_types(dtype, torch.float32)
        check(solution, constraints, x, tol)

    def test_a_tolerance_that_float32_holds_is_kept(self) -> None:
        """Half of it is left for rounding, so that no sample ends a little over it."""
        constraints = SETS["linear"]()
        for tol in (1e-4, 1e-5):
            solution = sn.repair(constraints, Y.float(), X.float(), tol=tol)
            assert solution.converged.all()
            assert not solution.allowance.any()
            assert precise(constraints, solution.value, X.float()).max() <= tol

    def test_the_readme(self) -> None:
        for seed in range(3):
            torch.manual_seed(seed)
            constraints = sn.Linear(torch.randn(20, 50), upper=torch.ones(20))
            constraints = constraints & sn.Linear(torch.randn(10, 50), equals=lambda x: x)
            model = sn.ConstrainedModel(sn.MLP(10, 50), sn.SnareLayer(constraints, tol=1e-6, on_failure="raise"))
            x = torch.rand(256, 10)
            solution = model.solve(x)
            assert precise(constraints, solution.value.detach(), x).max() <= 1e-6
            assert solution.describe() == "all 256 samples converged."

    def test_more_than_rounding_is_not_excused(self) -> None:
        solution = sn.repair(SETS["linear"](), Y.float(), X.float(), start=None, max_steps=3)
        assert (solution.status == sn.Status.MAX_STEPS).all()
        assert not solution.allowance.any()
        assert solution.violation.min() > 1e-4

    def test_an_empty_set_stalls(self) -> None:
        empty = sn.Linear(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), lower=[1.0, -3.0], upper=[2.0, 0.0])
        assert (sn.repair(empty, torch.zeros(3, 2)).status == sn.Status.STALLED).all()

    def test_no_tolerance_no_allowance(self) -> None:
        """tol=0 asks for steps."""
        solution = sn.repair(SETS["linear"](), Y.float(), X.float(), tol=0.0, max_steps=60)
        assert not solution.converged.any()
        assert not solution.allowance.any()

    def test_a_float32_repair_of_float64_predictions_is_judged_in_float64(self) -> None:
        constraints = SETS["linear"]()
        solution = sn.repair(constraints, Y, X, tol=1e-5, dtype=torch.float32)
        assert solution.value.dtype == torch.float64
        worst = precise(constraints, solution.value, X).amax(1)
        torch.testing.assert_close(solution.violation, worst, rtol=1e-6, atol=1e-13)
        assert solution.converged.all()
        assert (worst <= solution.allowance.clamp(min=1e-5)).all()

    def test_rows_far_larger_than_what_y_moves(self) -> None:
        """A repair in float32 rounds g and its bound, too: 1e6 + y is known to 0.06."""
        constraints = sn.Nonlinear(lambda y, x: 1e6 + y, rows=2, lower=1e6 + 1, upper=1e6 + 2)
        solution = sn.repair(constraints, torch.zeros(3, 2), tol=1e-4, dtype=torch.float32)
        assert solution.converged.all()
        assert (precise(constraints, solution.value, None).amax(1) <= solution.allowance.clamp(min=1e-4)).all()


class TestOverflow:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_values_that_the_dtype_cannot_hold(self, dtype: torch.dtype) -> None:
        for upper in (2e39, None):
            solution = sn.repair(sn.Box([0.0, 1e39], [1.0, upper or torch.inf]), torch.zeros(2, 2, dtype=dtype))
            assert (solution.status == sn.Status.NONFINITE).all()
            assert (solution.violation == torch.inf).all()
        with pytest.raises(sn.RepairError, match="NONFINITE"):
            sn.SnareLayer(sn.Box(1e39, 2e39), on_failure="raise")(torch.zeros(2, 3, dtype=dtype))

    def test_half_precision_holds_what_float32_does(self) -> None:
        """1e6 is infinite in float16; the result is not in float16."""
        solution = sn.repair(sn.Box(1e6, 2e6), torch.zeros(2, 3, dtype=torch.float16))
        assert solution.converged.all()
        assert torch.equal(solution.value, torch.full((2, 3), 1e6))

    def test_float64_holds_it(self) -> None:
        assert sn.repair(sn.Box(1e39, 2e39), torch.zeros(2, 3, dtype=torch.float64), tol=1e30).converged.all()


class TestWarning:
    def test_it_names_what_can_be_held_and_the_way_out(self) -> None:
        with pytest.warns(sn.PrecisionWarning, match=r"float32.* 1e-10 here, but 1e-0[56].*y\.double\(\)") as warned:
            sn.repair(SETS["linear"](), Y.float(), X.float(), tol=1e-10)
        assert [warning.filename for warning in warned] == [__file__]

    def test_what_it_names_can_be_held(self) -> None:
        with pytest.warns(sn.PrecisionWarning) as warned:
            sn.repair(SETS["quadratic"](), Y.float(), X.float())
        held = float(str(warned[0].message).split("tol=")[-1].rstrip("."))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert sn.repair(SETS["quadratic"](), Y.float(), X.float(), tol=held).converged.all()

    def test_once(self) -> None:
        """In a loop, the same line says it once, whatever the batch."""
        layer = sn.SnareLayer(SETS["box"](), on_failure="raise")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            for seed in range(5):
                layer(draw(20, 10, seed=seed).float(), X.float())
        assert [warning.category for warning in seen] == [sn.PrecisionWarning]

    @pytest.mark.parametrize("tol", [1e-4, 1e-8])
    def test_silence_where_nothing_is_wrong(self, tol: float) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            sn.SnareLayer(SETS["linear"](), tol=tol)(Y, X)
            sn.SnareLayer(SETS["linear"](), tol=1e-4)(Y.float(), X.float())
            sn.SnareLayer(SETS["linear"](), on_failure="ignore")(Y.float(), X.float())
        assert [str(warning.message) for warning in seen] == []

    def test_the_solution_describes_it(self) -> None:
        solution = sn.repair(SETS["linear"](), Y.float(), X.float())
        count = int((solution.allowance > 0).sum())
        assert count > 0
        assert f"all 20 samples converged, {count} of them to what float32 can hold" in solution.describe()
        assert f"{solution.violation.max():.2e}" in solution.describe()


class TestHalf:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_gradients_reach_a_network_in_half_precision(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        model = sn.ConstrainedModel(sn.MLP(2, 10, width=8).to(dtype), sn.SnareLayer(SETS["linear"](), tol=1e-5))
        solution = model.solve(X.to(dtype))
        assert solution.value.dtype == torch.float32
        assert solution.raw.dtype == dtype
        check(solution, model.layer.constraints, X.to(dtype), 1e-5)
        solution.value.square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.net.parameters())

    def test_as_good_as_from_float32(self) -> None:
        half = Y.bfloat16()
        for kind in SETS:
            found, expected = (sn.repair(SETS[kind](), y, X.float()).value for y in (half, half.float()))
            assert torch.equal(found, expected)


class TestAutocast:
    @pytest.mark.parametrize("dtype", [None, torch.float32], ids=["in float64", "in float32"])
    @pytest.mark.parametrize("kind", ["linear", "box", "quadratic", "function"])
    def test_it_changes_nothing_inside(self, kind: str, dtype: torch.dtype | None) -> None:
        """Values and gradients are those of the same predictions without it, even if differentiated inside it."""
        constraints, found = SETS[kind](), []
        layer = sn.SnareLayer(constraints, tol=1e-4, dtype=dtype)
        for on in (False, True):
            y = Y.float().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                solution = layer.solve(y, X.float())
                solution.value.square().sum().backward()
                assert torch.is_autocast_enabled("cpu") == on
            found.append((solution.value.detach(), solution.violation, y.grad))
        assert all(torch.equal(plain, inside) for plain, inside in zip(*found, strict=True))

    def test_a_network_under_autocast(self) -> None:
        torch.manual_seed(0)
        net, layer = sn.MLP(2, 10, width=8), sn.SnareLayer(SETS["linear"](), tol=1e-5, on_failure="raise")
        with torch.autocast("cpu", torch.bfloat16):
            y = net(X.float())
            solution, behind = layer.solve(y, X.float()), sn.ConstrainedModel(net, layer)(X.float())
        assert y.dtype == torch.bfloat16
        assert solution.value.dtype == torch.float32
        assert torch.equal(solution.value, behind)
        check(solution, layer.constraints, X.float(), 1e-5)

    def test_bounds_that_a_network_computes(self) -> None:
        """x may come out of autocast in half precision, and a float32 module takes it."""
        torch.manual_seed(0)
        bound = nn.Linear(2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            x = nn.Linear(2, 2)(X.float())
            solution = sn.SnareLayer(sn.Linear(A, upper=bound), tol=1e-4, on_failure="raise").solve(Y.float(), x)
        assert x.dtype == torch.bfloat16
        over = solution.value.double() @ A.T - bound(x.float()).double()
        assert over.max() <= 1e-4


class TestMethods:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("method", METHODS)
    def test_every_method_says_what_is_so(self, method: str, dtype: torch.dtype) -> None:
        if method == "optnet" and importlib.util.find_spec("cvxpylayers") is None:
            pytest.skip("needs cvxpylayers")
        constraints, x = SETS["linear"](), X.to(dtype)
        for tol in (1e-4, 1e-6, 1e-8):
            layer = build(method, constraints, 2, 10, tol=tol, on_failure="ignore")
            if method == "hproj":
                layer.pretrain(X, steps=5)
            y = Y[:, : layer.predictions(10)].to(dtype)
            solution = layer.eval().solve(y, x)
            assert solution.value.dtype == torch.promote_types(dtype, torch.float32)
            check(solution, constraints, x, tol)
            if method in ("snare", "hardnet", "hardnet++", "pinet"):
                assert solution.converged.all()

    @pytest.mark.parametrize("method", ["snare", "soft", "hardnet", "hardnet++", "pinet", "fsnet", "dc3"])
    def test_overflow(self, method: str) -> None:
        layer = build(method, sn.Linear(torch.eye(2, dtype=torch.float64), lower=1e39), 1, 2, on_failure="ignore")
        solution = layer.eval().solve(torch.full((3, 2), 0.5))
        assert (solution.status != sn.Status.CONVERGED).all()
        overflown = ~solution.value.isfinite().all(1)
        assert (solution.status[overflown] == sn.Status.NONFINITE).all()
        assert bool(overflown.all()) or method in ("soft", "fsnet", "dc3")


class TestMagnitudes:
    @pytest.mark.parametrize("kind", SETS)
    def test_they_are_those_of_the_jacobian(self, kind: str) -> None:
        map = SETS[kind]().at(Y, X).map
        expected = torch.einsum("bij,bj->bi", map.jacobian(Y).abs().expand(20, -1, -1), Y.abs())
        torch.testing.assert_close(map.magnitudes(Y), expected)

    def test_without_a_jacobian(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Too large to form: estimated from products, above what rounding does and below the sum of all sizes."""
        map = SETS["function"]().at(Y, X).map
        exact = map.magnitudes(Y)
        monkeypatch.setattr(function, "CHUNK", 8)
        monkeypatch.setattr(type(map), "jacobian", lambda *_: pytest.fail("forms a Jacobian"))
        estimate = map.magnitudes(Y)
        assert (estimate > exact / 4).all()
        assert (estimate < exact * 8).all()
        y = Y.float().double()
        moved = (map.value(Y) - map.value(y)).abs() / torch.finfo(torch.float32).eps
        assert (moved <= estimate / 2).all()


def test_what_a_repair_aims_at() -> None:
    assert Options(tol=1e-6).aim(torch.float64) == 1e-6
    assert Options(tol=1e-6).aim(torch.float32) == 5e-7
    assert Options(tol=1e-4, dtype=torch.float32).aim(torch.float32) == 1e-4
    assert Options(tol=2e-15).aim(torch.float32) == 8 * torch.finfo(torch.float64).eps
    assert Options(tol=0.0).aim(torch.float32) == 0.0


@pytest.mark.parametrize("kind", ["linear", "box", "quadratic", "function"])
def test_a_compiled_repair_is_judged_alike(kind: str) -> None:
    """It cannot look at who needs an allowance, and computes it for all."""
    torch._dynamo.reset()
    layer = sn.SnareLayer(SETS[kind](), start=None, max_steps=30, on_failure="ignore")
    with torch.no_grad():
        plain = layer.solve(Y.float(), X.float())
        found = torch.compile(layer.solve, fullgraph=True, backend="eager")(Y.float(), X.float())
    assert plain.converged.all()
    assert torch.equal(found.status, plain.status)
    check(found, layer.constraints, X.float(), layer.tol)
