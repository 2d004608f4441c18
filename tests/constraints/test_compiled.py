"""Functions as programs of torch.compile: the same results, one version for all batches, and a way back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.constraints.compiled import Compiled, _agree, _Program
from snarenet.constraints.maps import FunctionMap
from snarenet.constraints.structure import Structure

F64 = torch.float64
SIZE = 66  # enough variables for a pattern to be looked for


def wave(y: Tensor, x: Any) -> Tensor:
    """Neighbours, with `where`, indices and a product over time."""
    bent = torch.where(y > 0, y.sin(), 0.5 * y)
    index = torch.arange(SIZE - 1, device=y.device)
    return y[:, 1:] - x["gain"] * bent[:, index] + 0.1 * x["offset"][:, :1]


def chain(compile: Any = True, fn: Callable[[Tensor, Any], Tensor] = wave, **options: Any) -> sn.Nonlinear:
    return sn.Nonlinear(fn, rows=SIZE - 1, equals=0.0, compile=compile, **options)


def draw(batch: int, seed: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64).to(dtype)  # noqa: E731
    return new(batch, SIZE), {"gain": 0.5 + 0.1 * new(batch, 1), "offset": new(batch, 2)}


def repaired(constraints: sn.Constraints, batch: int) -> list[Tensor | None]:
    """The value, and the gradients of a function of it in y and x."""
    y, x = draw(batch, seed=batch)
    leaves = [y.requires_grad_(), *(t.requires_grad_() for t in x.values())]
    solution = sn.repair(constraints, y, x, start=None)
    assert bool(solution.converged.all())
    return [solution.value.detach(), *torch.autograd.grad(solution.value.sin().sum(), leaves)]


def versions(constraints: sn.Nonlinear) -> dict[str, int]:
    assert constraints.compiled is not None
    return {function.__name__: p.versions for function, p in constraints.compiled._programs.items()}


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made as ever, but run as they are: to compile one takes seconds."""
    if "slow" not in request.keywords:
        monkeypatch.setattr("snarenet.constraints.compiled._BACKEND", "aot_eager")


@pytest.fixture(scope="module")
def compiled() -> sn.Nonlinear:
    """One set for several tests."""
    return chain()


class TestSame:
    def test_repair_of_any_batch_by_one_version(self, compiled: sn.Nonlinear) -> None:
        """The loop drops samples, so batches of all sizes come."""
        plain = chain(False)
        for batch in (5, 9, 1, 2):
            for mine, exact in zip(repaired(compiled, batch), repaired(plain, batch), strict=True):
                torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
        assert versions(compiled) == {"_products": 1, "_value": 1, "_pullback": 1}
        assert str(compiled.compiled) == "compiled"
        assert "; compiled" in str(sn.explain(compiled, *draw(3)))

    @pytest.mark.slow
    def test_by_the_compiler_itself(self) -> None:
        constraints = chain()
        for mine, exact in zip(repaired(constraints, 3), repaired(chain(False), 3), strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
        assert str(constraints.compiled) == "compiled"

    def test_products(self, compiled: sn.Nonlinear) -> None:
        y, x = draw(4)
        map, plain = compiled.at(y, x).map, chain(False).at(y, x).map
        v, w = torch.randn_like(y), torch.randn(4, SIZE - 1, dtype=F64)
        with torch.no_grad():
            assert isinstance(map, FunctionMap)
            assert isinstance(plain, FunctionMap)
            mine, exact = map.products(y), plain.products(y)
            torch.testing.assert_close(mine.jvp(v), exact.jvp(v), rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(mine.vjp(w), exact.vjp(w), rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(map.jacobian(y), plain.jacobian(y), rtol=1e-13, atol=1e-13)
        assert versions(compiled)["_product"] == 2  # with J and with its transpose

    def test_rows_that_are_nothing_but_rounding(self) -> None:
        """At a solution equalities of large terms are their rounding alone, which another order of sums changes."""
        large = torch.tensor([[1e4, -3e4, 0.0], [2e4, 1e4, 0.0]], dtype=F64)
        rounding = torch.tensor([[0.0, 0.0, 2e-11], [0.0, 0.0, -1e-11]], dtype=F64)
        assert _agree(large + rounding, large)
        assert not _agree(large + 1e4 * rounding, large)
        assert not _agree(torch.where(large == 0, torch.nan, large), large)

    def test_a_few_samples_at_a_time(self, compiled: sn.Nonlinear, monkeypatch: pytest.MonkeyPatch) -> None:
        y, x = draw(5)
        with torch.no_grad():
            whole = compiled.at(y, x).map.jacobian(y)
            monkeypatch.setattr("snarenet.constraints.compiled._CACHED", 1)
            torch.testing.assert_close(compiled.at(y, x).map.jacobian(y), whole, rtol=1e-14, atol=1e-14)

    def test_with_a_graph_it_is_left_to_autograd(self, compiled: sn.Nonlinear) -> None:
        y, x = draw(2)
        before = versions(compiled)
        assert torch.autograd.gradcheck(lambda y: compiled.residual(y, x), y.requires_grad_())
        assert versions(compiled) == before

    def test_inside_another_program(self) -> None:
        """A layer that is compiled whole has the function in its own graph."""
        ring = sn.Nonlinear(lambda y, x: y.norm(dim=1, keepdim=True), rows=1, lower=1.0, upper=2.0, compile=True)
        layer = sn.SnareLayer(ring, start=None, max_steps=3, on_failure="ignore", rescue=False)
        y = 3 * draw(3)[0][:, :3]
        with torch.no_grad():
            found = torch.compile(layer, fullgraph=True, backend="eager")(y)
        assert versions(ring) == {}
        torch.testing.assert_close(found, layer(y))

    def test_inside_transforms_and_modes(self, compiled: sn.Nonlinear) -> None:
        y, x = draw(3)
        exact = chain(False).value(y, x)
        one = lambda y, gain, offset: compiled.value(y[None], {"gain": gain[None], "offset": offset[None]})[0]  # noqa: E731
        with torch.no_grad():
            torch.testing.assert_close(torch.func.vmap(one)(y, x["gain"], x["offset"]), exact)
        with torch.inference_mode():
            torch.testing.assert_close(compiled.value(y, x), exact)
        assert compiled.value(y[:0], {name: t[:0] for name, t in x.items()}).shape == (0, SIZE - 1)


class TestGradients:
    def test_gradcheck_of_a_small_set(self) -> None:
        """Dense Jacobian, curved rows beside a box, x that needs a gradient."""
        curved = sn.Nonlinear(lambda y, x: (y * y).sum(1, keepdim=True) * x, rows=1, equals=2.0, compile=True)
        constraints = curved & sn.Box(-3.0, 3.0)
        generator = torch.Generator().manual_seed(0)
        y = torch.randn(2, 3, generator=generator, dtype=F64).requires_grad_()
        x = (1 + torch.rand(2, 1, generator=generator, dtype=F64)).requires_grad_()
        assert torch.autograd.gradcheck(lambda y, x: sn.repair(constraints, y, x).value, (y, x))
        assert str(curved.compiled) == "compiled"

    def test_parameters_of_the_function(self) -> None:
        """Their gradients come from plain autograd; values and products are compiled."""

        class Rows(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(0.7, dtype=F64))

            def forward(self, y: Tensor, x: Any) -> Tensor:
                return y.square().sum(1, keepdim=True) * self.scale

        found = []
        for compile in (False, True):
            rows = Rows()
            constraints = sn.Nonlinear(rows, rows=1, equals=1.0, compile=compile)
            y = draw(3)[0][:, :4].clone().requires_grad_()
            sn.repair(constraints, y, start=None).value.sin().sum().backward()
            found.append((y.grad, rows.scale.grad))
        for mine, exact in zip(*found, strict=True):
            assert mine is not None
            torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
        assert versions(constraints)["_value"] == 1
        assert "_pullback" not in versions(constraints)

    def test_a_tensor_twice_in_x(self) -> None:
        fn = lambda y, x: y * x[0] + x[1].square()  # noqa: E731
        y, t = torch.randn(2, 3, 2, dtype=F64)
        t.requires_grad_()
        weights = torch.randn(3, 2, dtype=F64)
        found = []
        for compiled in (None, Compiled(True, 2)):
            map = FunctionMap(fn, [t, t], 2, compiled=compiled).detached(leaves := {})
            with torch.no_grad():
                found.append(map.pullback(y, [(weights, y)], weights, tuple(leaves.values())))
        for mine, exact in zip(*found, strict=True):
            torch.testing.assert_close(mine, exact)


class TestWayBack:
    @pytest.mark.parametrize(
        "line",
        [
            pytest.param(lambda v: v if float(v.sum()) > 1e9 else 1.0 * v, id="branch on values"),
            pytest.param(lambda v: v + torch.from_numpy(v.detach().numpy() * 0), id="numpy"),
            pytest.param(lambda v: torch.stack([v[b] for b in range(v.shape[0])]), id="size of the batch"),
        ],
    )
    def test_functions_that_do_not_compile(self, line: Callable[[Tensor], Tensor]) -> None:
        """The same result, whether or not they do, and a reason where not."""
        found = []
        for compile in (False, True):
            constraints = chain(compile, lambda y, x: line(wave(y, x)))
            found.append(repaired(constraints, 3))
        for mine, exact in zip(*found, strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
        told = str(constraints.compiled)
        assert told == "compiled" or "compiled: " in told

    def test_a_reason_is_told_once_and_nothing_is_tried_again(self) -> None:
        def fn(y: Tensor, x: Any) -> Tensor:
            if float(y.sum()) > 1e9:
                raise AssertionError
            return y[:, :2]

        constraints = sn.Nonlinear(fn, rows=2, upper=0.0, compile=True)
        with torch.no_grad():
            constraints.value(torch.ones(3, 4))
            assert constraints.compiled is not None
            (program,) = constraints.compiled._programs.values()
            program.compiled = None  # to call it would be an error
            assert constraints.value(torch.ones(3, 4)).shape == (3, 2)
        told = str(constraints.compiled)
        assert told.startswith("not compiled: ")
        assert "\n" not in told

    def test_what_differs_is_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A compiler that is wrong by a millionth."""
        wrong = lambda self, graph, inputs: (  # noqa: E731
            setattr(self, "versions", self.versions + 1),
            lambda *args: [out * (1 + 1e-6) for out in graph(*args)],
        )[1]
        monkeypatch.setattr(_Program, "_count", wrong)
        constraints = sn.Nonlinear(lambda y, x: y.sin(), rows=2, equals=0.0, compile=True)
        y = torch.rand(3, 2, dtype=F64)
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(constraints.value(y), y.sin())
        assert "differs" in str(constraints.compiled)

    def test_an_error_of_the_function_is_its_own(self) -> None:
        constraints = sn.Nonlinear(lambda y, x: y[:, :3], rows=2, equals=0.0, compile=True)
        with torch.no_grad(), pytest.raises(ValueError, match=r"must return shape \(2, 2\)"):
            constraints.value(torch.rand(2, 4))

    def test_x_with_other_things_than_tensors(self) -> None:
        constraints = sn.Nonlinear(lambda y, x: y * x["power"], rows=2, equals=0.0, compile=True)
        with torch.no_grad():
            assert torch.equal(constraints.value(torch.ones(2, 2), {"power": 3}), 3 * torch.ones(2, 2))
        assert "holds a int" in str(constraints.compiled)


class TestAsked:
    def test_what_may_be_asked(self) -> None:
        with pytest.raises(ValueError, match="`compile` must be True, False or"):
            chain("always")
        assert chain(False).compiled is None

    def test_auto_is_for_gpus(self) -> None:
        constraints = chain("auto")
        y, x = draw(2)
        with torch.no_grad():
            constraints.value(y, x)
        assert versions(constraints) == {}
        assert sn.explain(constraints, y, x).parts[0].compiled == ""

    def test_what_the_function_sees_may_change(self) -> None:
        """A number and a tensor that a closure holds are guarded."""
        state = {"factor": 2.0, "shift": torch.ones(2, dtype=F64)}
        constraints = sn.Nonlinear(lambda y, x: y * state["factor"] + state["shift"], rows=2, equals=0.0, compile=True)
        y = torch.rand(3, 2, dtype=F64)
        with torch.no_grad():
            for factor in (2.0, 3.0):
                state.update(factor=factor, shift=torch.full((2,), factor, dtype=F64))
                for _ in range(2):
                    torch.testing.assert_close(constraints.value(y), y * factor + factor)

    def test_copies_compile_for_themselves(self) -> None:
        constraints = Compiled(True, 3)
        constraints._programs[print] = None  # pyright: ignore
        for twin in (copy.deepcopy(constraints), pickle.loads(pickle.dumps(constraints))):
            assert (twin.ask, twin.rows, twin._programs) == (True, 3, {})

    def test_other_precisions(self, compiled: sn.Nonlinear) -> None:
        y, x = draw(3, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(compiled.value(y, x), chain(False).value(y, x), rtol=1e-5, atol=1e-5)

    def test_more_sets_than_a_code_may_have_versions(self) -> None:
        """The limit of torch.compile is for each code; every set has code of its own."""
        y = torch.rand(3, 2, dtype=F64)
        with torch.no_grad():
            for k in range(12):
                constraints = sn.Nonlinear(lambda y, x, k=k: y * k + y.sin(), rows=2, equals=0.0, compile=True)
                torch.testing.assert_close(constraints.value(y), y * k + y.sin())
                torch.testing.assert_close(constraints.value(y), y * k + y.sin())
                assert str(constraints.compiled) == "compiled"


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("by_rows", [False, True])
def test_lengths_of_rows_by_the_compiled_pullback(by_rows: bool, scaled: bool) -> None:
    """Their gradient is that of autograd, whichever side of J has the fewer colours."""

    def columns(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([y.sin() * x, y.square() - y.roll(1, 1)], 1)

    def rows(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (y.sin() * y.roll(1, 1) * x).unflatten(1, (-1, 10)).sum(2)

    count = 7 if by_rows else 140
    constraints = sn.Nonlinear(rows if by_rows else columns, count, equals=0.0, compile=True)
    generator = torch.Generator().manual_seed(0)
    y, x = (torch.rand(3, n, dtype=F64, generator=generator) for n in (70, 1))
    map = constraints.at(y, x).map
    assert isinstance(map, FunctionMap)
    assert isinstance(map.structure, Structure)
    assert map.pattern is not None
    assert map.structure.colouring(70).by_rows is by_rows
    weights, at = torch.rand(3, count, dtype=F64, generator=generator), y.clone().requires_grad_()
    scale = 0.5 + torch.rand(70, dtype=F64, generator=generator) if scaled else None
    (expected,) = torch.autograd.grad((weights * map.row_norms(at, scale)).sum(), at)
    with torch.no_grad():
        found = map.of_y_alone()._compiled_norms(y, weights, scale)  # pyright: ignore[reportAttributeAccessIssue]
    assert str(constraints.compiled) == "compiled"
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
