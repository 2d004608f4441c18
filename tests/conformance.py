"""What every constraint set must do. A set's test class supplies a `Case` and inherits every test.

The reference is the set's formula, written out by hand in the case; Jacobians and gradients of the reference come from
plain autograd, and its repair is the textbook's.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from textbook import autograd_jacobian, textbook_repair
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import snarenet as sn

BATCH = 5


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers that are the same every time."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Case:
    """A set and its formula.

    Attributes:
        constraints: the set.
        formula: g(y, x), written out; it must use the same tensors as the set.
        lower: l(x), a tensor that broadcasts to (B, rows).
        upper: u(x), likewise.
        y: (B, n) predictions that violate it.
        x: its inputs.
        tensors: tensors inside g or the bounds that need a gradient.
        hidden: tensors that g depends on through an earlier computation, which finite differences would not repeat.
        batched: do data that belong to a sample sit in the set itself, so that it only fits its own batch?
    """

    constraints: sn.Constraints
    formula: Callable[[Tensor, Any], Tensor]
    lower: Callable[[Any], Tensor]
    upper: Callable[[Any], Tensor]
    y: Tensor
    x: Any = None
    tensors: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    batched: bool = False

    def differentiable(self) -> tuple[Tensor, Any, list[Tensor]]:
        """y and x as leaves that need gradients, and all such leaves."""
        y = self.y.clone().requires_grad_()
        x = on_tensors(lambda leaf: leaf.clone().requires_grad_(), self.x)
        return y, x, [y, *(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)), *self.tensors, *self.hidden]

    def bounds(self, x: Any) -> tuple[Tensor, Tensor]:
        rows = self.formula(self.y, self.x).shape
        return self.lower(x).expand(rows), self.upper(x).expand(rows)

    def pick(self, index: list[int]) -> tuple[Tensor, Any]:
        return self.y[index], on_tensors(lambda leaf: leaf[index], self.x)


def on_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = draw(*output.shape, seed=99)
    found = torch.autograd.grad((weights * output).sum(), leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    """Equal relative to the size of the expected tensor."""
    scale = max(1e-3, expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


DAMPINGS = {
    "constant": (sn.Constant(0.01), lambda k: 0.01),
    "annealed": (sn.Annealed(10.0, 0.5, 1e-6), lambda k: max(1e-6, 10 * 0.5**k)),
    "annealed-absolute": (sn.Annealed(3.0, 0.4, 1e-4, relative=False), lambda k: max(1e-4, 3 * 0.4**k)),
}


class Conformance:
    """Inherit, and define `case`."""

    steps = 6  # of the comparison with the textbook; enough to change the active rows

    @abstractmethod
    def case(self) -> Case: ...

    def test_value(self) -> None:
        case = self.case()
        assert_equal(case.constraints.value(case.y, case.x), case.formula(case.y, case.x), 1e-13)

    def test_jacobian(self) -> None:
        case = self.case()
        expected = autograd_jacobian(lambda y: case.formula(y, case.x))(case.y)
        assert_equal(case.constraints.jacobian(case.y, case.x).expand(expected.shape), expected, 1e-12)

    def test_products_with_the_jacobian(self) -> None:
        case = self.case()
        map = case.constraints.at(case.y, case.x).map
        J = autograd_jacobian(lambda y: case.formula(y, case.x))(case.y)
        t, w = draw(*case.y.shape, seed=1), draw(BATCH, map.rows, seed=2)
        fresh, formed = map.linearize(case.y), map.linearize(case.y)
        assert_equal(formed.jacobian.expand(J.shape), J, 1e-12)
        for Jt in (map.jvp(case.y, t), fresh.jvp(t), formed.jvp(t)):
            assert_equal(Jt, torch.einsum("bmn,bn->bm", J, t), 1e-12)
        for Jw in (map.vjp(case.y, w), fresh.vjp(w), formed.vjp(w)):
            assert_equal(Jw, torch.einsum("bmn,bm->bn", J, w), 1e-12)
        assert_equal(map.row_norms(case.y), J.square().sum(-1), 1e-12)

    def test_pullback(self) -> None:
        case = self.case()
        y, x, leaves = case.differentiable()
        map = case.constraints.at(y, x).map
        a, t, q = draw(BATCH, map.rows, seed=1), draw(*y.shape, seed=2), draw(BATCH, map.rows, seed=3)
        J = autograd_jacobian(lambda z: case.formula(z, x))(y)
        expected = torch.autograd.grad(
            torch.einsum("bm,bmn,bn->", a, J, t) + (q * case.formula(y, x)).sum(),
            leaves,
            allow_unused=True,
            retain_graph=True,
        )
        wanted = map.tensors(y)
        found = map.pullback(y, [(a, t)], q, wanted)
        assert_equal(torch.zeros_like(y) if found[0] is None else found[0], expected[0], 1e-11)
        rest = (
            torch.autograd.grad(
                [w for w, f in zip(wanted, found[1:], strict=True) if f is not None],
                leaves,
                [f for f in found[1:] if f is not None],
                allow_unused=True,
            )
            if any(f is not None for f in found[1:])
            else [None] * len(leaves)
        )
        for actual, want in zip(rest[1:], expected[1:], strict=True):
            if want is not None and want.abs().max() > 0:
                assert actual is not None
                assert_equal(actual, want, 1e-11)

    def test_residual_and_violation(self) -> None:
        case = self.case()
        g, (lower, upper) = case.formula(case.y, case.x), case.bounds(case.x)
        for relax in (0.0, 0.3):
            expected = torch.relu(g - upper - relax) - torch.relu(lower - relax - g)
            assert_equal(case.constraints.residual(case.y, case.x, relax), expected, 1e-13)
        violation = (torch.relu(g - upper) + torch.relu(lower - g)).amax(1)
        assert_equal(case.constraints.violation(case.y, case.x), violation, 1e-13)
        assert violation.max() > 0.1, "a case must start infeasible"

    @pytest.mark.parametrize("damping", DAMPINGS)
    @pytest.mark.parametrize("rows", ["all", "active"])
    def test_repair_equals_textbook(self, damping: str, rows: str) -> None:
        """Values and all gradients, step by step, to 1e-8."""
        case = self.case()
        rule, schedule = DAMPINGS[damping]
        y, x, leaves = case.differentiable()
        ours = sn.repair(case.constraints, y, x, damping=rule, rows=rows, tol=0, max_steps=self.steps)
        lower, upper = case.bounds(x)
        value = lambda z: case.formula(z, x)  # noqa: E731
        expected, _ = textbook_repair(
            value, autograd_jacobian(value), lower, upper, y, damping=schedule, relative=rule.relative,
            active=rows == "active", tol=0, max_steps=self.steps,
        )  # fmt: skip
        assert_equal(ours.value, expected)
        for actual, want in zip(gradients(ours.value, leaves), gradients(expected, leaves), strict=True):
            assert_equal(actual, want)

    @pytest.mark.parametrize("options", [{}, {"rows": "all", "damping": 0.1}, {"damping": sn.Adaptive()}], ids=str)
    def test_gradcheck(self, options: dict[str, Any]) -> None:
        case = self.case()
        y, x, _ = case.differentiable()
        spec = torch.utils._pytree.tree_structure(x)
        inputs = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]

        def run(y: Tensor, *rest: Tensor) -> Tensor:
            x = torch.utils._pytree.tree_unflatten(rest[: len(inputs)], spec) if inputs else None
            return sn.repair(case.constraints, y, x, tol=1e-10, max_steps=self.steps, **options).value

        assert torch.autograd.gradcheck(run, (y, *inputs, *case.tensors), eps=1e-6, atol=1e-5, rtol=1e-4)

    def test_defaults_reach_the_set(self) -> None:
        case = self.case()
        solution = sn.SnareLayer(case.constraints, tol=1e-10).solve(case.y, case.x)
        assert solution.converged.all()
        g, (lower, upper) = case.formula(solution.value, case.x), case.bounds(case.x)
        assert ((g <= upper + 1e-10) & (g >= lower - 1e-10)).all()

    def test_a_feasible_sample_is_not_moved(self) -> None:
        case = self.case()
        first = sn.repair(case.constraints, case.y, case.x, tol=1e-9, rescue=True)
        again = sn.repair(case.constraints, first.value, case.x, tol=1e-9)
        assert torch.equal(again.value, first.value)
        assert not again.steps.any()

    def test_the_same_answer_in_any_batch(self) -> None:
        case = self.case()
        if case.batched:
            pytest.skip("the set holds data of its own batch")
        whole = sn.repair(case.constraints, case.y, case.x).value
        for i in range(BATCH):
            alone = sn.repair(case.constraints, *case.pick([i])).value[0]
            torch.testing.assert_close(alone, whole[i], rtol=0, atol=1e-12)
        many = [i % BATCH for i in range(1000)]
        torch.testing.assert_close(sn.repair(case.constraints, *case.pick(many)).value, whole[many], rtol=0, atol=1e-12)

    def test_empty_batch(self) -> None:
        case = self.case()
        if case.batched:
            pytest.skip("the set holds data of its own batch")
        y, x = case.pick([])
        y.requires_grad_()
        solution = sn.SnareLayer(case.constraints).solve(y, x)
        assert solution.value.shape == y.shape
        assert solution.status.shape == (0,)
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.shape == y.shape

    def test_matrix_free_route_agrees(self) -> None:
        case = self.case()
        y, x, leaves = case.differentiable()
        options = {"damping": sn.Annealed(floor=1e-3, relative=False), "rows": "active", "tol": 0, "max_steps": 5}
        direct = sn.repair(case.constraints, y, x, **options).value
        free = sn.repair(case.constraints, y, x, solver=sn.ConjugateGradients(tol=1e-14), **options).value
        assert_equal(free, direct, 1e-9)
        for actual, want in zip(gradients(free, leaves), gradients(direct, leaves), strict=True):
            assert_equal(actual, want, 1e-7)

    def test_factors_may_be_kept_or_not(self) -> None:
        case = self.case()
        y, x, leaves = case.differentiable()
        kept, again = (
            gradients(sn.repair(case.constraints, y, x, rows="active", store_factors=store).value, leaves)
            for store in (True, False)
        )
        for a, b in zip(kept, again, strict=True):
            assert_equal(a, b, 1e-12)

    def test_float32_in_float32_out(self) -> None:
        case = self.case()
        y, x = case.y.float().requires_grad_(), on_tensors(Tensor.float, case.x)
        solution = sn.repair(case.constraints, y, x)
        assert solution.value.dtype == torch.float32
        assert solution.converged.all()
        assert solution.violation.max() < 1e-4  # what float32 can hold
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.dtype == torch.float32

    def test_pure_float32(self) -> None:
        case = self.case()
        y, x = case.y.float(), on_tensors(Tensor.float, case.x)
        solution = sn.repair(case.constraints, y, x, tol=1e-4, dtype=torch.float32, rescue=True)
        assert solution.converged.all()
        assert solution.violation.dtype == torch.float32

    def test_copy_and_state_dict(self) -> None:
        case = self.case()
        layer = sn.SnareLayer(case.constraints)
        expected = layer(case.y, case.x).detach()
        if not any(tensor.grad_fn for tensor in case.constraints.state_dict(keep_vars=True).values()):
            twin = copy.deepcopy(layer)
            assert torch.equal(twin(case.y, case.x), expected)
            for tensor in twin.state_dict().values():
                tensor.mul_(1.5).add_(0.1)
            twin.load_state_dict(layer.state_dict())
            assert torch.equal(twin(case.y, case.x), expected)
