"""`ConstraintsSuite`: what every constraint set must do. A test class supplies a `Case` and inherits every test.

The reference is the set's formula, written out by hand in the case; Jacobians and gradients of the reference come from
plain autograd, and its repair is the textbook's.
"""

from __future__ import annotations

import copy
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from snarenet.constraints import Constraints
from snarenet.damping import Adaptive, Annealed, Constant, Damping
from snarenet.layers import SnareLayer
from snarenet.linalg import ConjugateGradients
from snarenet.repair import Rows, Start, repair
from snarenet.solution import PrecisionWarning
from snarenet.testing.case import Bound, Case, assert_equal, draw, gradients, on_tensors
from snarenet.testing.textbook import autograd_jacobian, textbook_repair

# each with its rule, in the textbook's words
_DAMPINGS: list[tuple[Damping, Callable[[int], float]]] = [
    (Constant(0.01), lambda k: 0.01),
    (Annealed(10.0, 0.5, 1e-6, own_pace=False), lambda k: max(1e-6, 10 * 0.5**k)),
    (Annealed(3.0, 0.4, 1e-4, relative=False), lambda k: max(1e-4, 3 * 0.4**k)),
]
_GRADCHECKED: list[dict[str, Any]] = [
    {"start": None},
    {"start": None, "rows": "all", "damping": 0.1},
    {"start": None, "damping": Adaptive()},
    {},
]


class ConstraintsSuite:
    """Inherit, and define `case`."""

    steps = 6  # of the comparison with the textbook; enough to change the active rows

    @abstractmethod
    def case(self) -> Case:
        """The set to test, fresh at every call."""

    def test_value(self) -> None:
        case = self.case()
        if case.formula is None:
            raise SkipTest("the case has no formula of its own")
        assert_equal(case.constraints.value(case.y, case.x), case.value(case.y, case.x), 1e-13, "value")

    def test_bounds(self) -> None:
        case = self.case()
        instance, (lower, upper) = case.constraints.at(case.y, case.x), case.bounds(case.x)
        assert_equal(instance.lower, lower, 1e-13, "lower bounds")
        assert_equal(instance.upper, upper, 1e-13, "upper bounds")

    def test_jacobian(self) -> None:
        case = self.case()
        expected = autograd_jacobian(lambda y: case.value(y, case.x))(case.y)
        assert_equal(case.constraints.jacobian(case.y, case.x).expand(expected.shape), expected, 1e-12, "jacobian")

    def test_products_with_the_jacobian(self) -> None:
        case = self.case()
        map = case.constraints.at(case.y, case.x).map
        J = autograd_jacobian(lambda y: case.value(y, case.x))(case.y)
        t, w = draw(*case.y.shape, seed=1), draw(len(case.y), map.rows, seed=2)
        fresh, formed = map.linearize(case.y), map.linearize(case.y)
        assert_equal(formed.jacobian.expand(J.shape), J, 1e-12, "linearize(y).jacobian")
        for Jt in (map.jvp(case.y, t), fresh.jvp(t), formed.jvp(t)):
            assert_equal(Jt, torch.einsum("bmn,bn->bm", J, t), 1e-12, "J t")
        for Jw in (map.vjp(case.y, w), fresh.vjp(w), formed.vjp(w)):
            assert_equal(Jw, torch.einsum("bmn,bm->bn", J, w), 1e-12, "J'w")
        assert_equal(map.row_norms(case.y), J.square().sum(-1), 1e-12, "row norms")

    def test_pullback(self) -> None:
        case = self.case()
        y, x, leaves = case.differentiable()
        map = case.constraints.at(y, x).map
        a, t, q = draw(len(y), map.rows, seed=1), draw(*y.shape, seed=2), draw(len(y), map.rows, seed=3)
        J = autograd_jacobian(lambda z: case.value(z, x))(y)
        total = torch.einsum("bm,bmn,bn->", a, J, t) + (q * case.value(y, x)).sum()
        expected = torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True)
        wanted = map.tensors(y)
        in_y, *found = map.pullback(y, [(a, t)], q, wanted)
        assert_equal(torch.zeros_like(y) if in_y is None else in_y, _or_zero(expected[0], y), 1e-11, "pullback in y")
        known = [(tensor, gradient) for tensor, gradient in zip(wanted, found, strict=True) if gradient is not None]
        rest: Any = [None] * len(leaves)
        if known:
            tensors, cotangents = zip(*known, strict=True)
            rest = torch.autograd.grad(tensors, leaves, cotangents, allow_unused=True)
        for leaf, actual, want in zip(leaves[1:], rest[1:], expected[1:], strict=True):
            assert_equal(_or_zero(actual, leaf), _or_zero(want, leaf), 1e-11, "pullback in x and tensors")

    def test_residual_and_violation(self) -> None:
        case = self.case()
        g, (lower, upper) = case.value(case.y, case.x), case.bounds(case.x)
        for relax in (0.0, 0.3):
            expected = torch.relu(g - upper - relax) - torch.relu(lower - relax - g)
            assert_equal(case.constraints.residual(case.y, case.x, relax), expected, 1e-13, "residual")
        violation = (torch.relu(g - upper) + torch.relu(lower - g)).amax(1)
        assert_equal(case.constraints.violation(case.y, case.x), violation, 1e-13, "violation")
        assert violation.max() > 0, "a case must start infeasible, but its `y` violates nothing"

    def test_repair_equals_textbook(self) -> None:
        """Values and all gradients, step by step, to 1e-8."""
        for rule, schedule in _DAMPINGS:
            for rows in ("all", "active"):
                self._compare_with_textbook(rule, schedule, rows, weighted=False)

    def test_repair_in_a_metric_equals_textbook(self) -> None:
        """The same with steps in the metric of weights."""
        for (rule, schedule), rows in zip(_DAMPINGS, ("all", "active", "active"), strict=True):
            self._compare_with_textbook(rule, schedule, rows, weighted=True)

    def _compare_with_textbook(
        self, rule: Damping, schedule: Callable[[int], float], rows: Rows, weighted: bool
    ) -> None:
        case = self.case()
        y, x, leaves = case.differentiable()
        weights = draw(y.shape[1], seed=5).exp() if weighted else None
        options: dict[str, Any] = {"tol": 0, "max_steps": self.steps, "weights": weights}
        ours = repair(case.constraints, y, x, start=None, damping=rule, rows=rows, **options).value
        value = lambda z: case.value(z, x)  # noqa: E731
        expected, _ = textbook_repair(
            value, autograd_jacobian(value), *case.bounds(x), y, damping=schedule, relative=rule.relative,
            active=rows == "active", **options,
        )  # fmt: skip
        assert_equal(ours, expected, what=f"repair with {rule}, rows={rows!r}")
        for actual, want in zip(gradients(ours, leaves), gradients(expected, leaves), strict=True):
            assert_equal(actual, want, what=f"gradients with {rule}, rows={rows!r}")

    def test_gradcheck(self) -> None:
        for options in _GRADCHECKED:
            case = self.case()
            y, x, _ = case.differentiable()
            leaves, spec = tree_flatten(x)
            places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

            def run(y: Tensor, *rest: Tensor) -> Tensor:
                new = dict(zip(places, rest, strict=False))  # noqa: B023
                x = tree_unflatten([new.get(i, leaf) for i, leaf in enumerate(leaves)], spec)  # noqa: B023
                return repair(case.constraints, y, x, tol=1e-10, max_steps=self.steps, **options).value  # noqa: B023

            inputs = (y, *(leaves[i] for i in places), *case.tensors)
            fast = not options  # a search for the nearest point takes longer than the few steps of the others
            found = torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-5, rtol=1e-4, fast_mode=fast)
            assert found, options

    def test_defaults_reach_the_set(self) -> None:
        case = self.case()
        solution = SnareLayer(case.constraints, tol=1e-10, on_failure="ignore").solve(case.y, case.x)
        assert solution.converged.all(), solution.describe()
        g, (lower, upper) = case.value(solution.value, case.x), case.bounds(case.x)
        assert ((g <= upper + 1e-10) & (g >= lower - 1e-10)).all(), "what converged is not in the set"

    def test_a_feasible_sample_is_not_moved(self) -> None:
        case = self.case()
        first = repair(case.constraints, case.y, case.x, tol=1e-9, rescue=True)
        again = repair(case.constraints, first.value, case.x, tol=1e-9)
        assert torch.equal(again.value, first.value)
        assert not again.steps.any()

    def test_the_same_answer_in_any_batch(self) -> None:
        case = self._unbatched()
        starts: list[tuple[Start, float]] = [(None, 1e-12), ("auto", 1e-9)]  # a fixed point is one up to rounding
        for start, close in starts:
            whole, batch = repair(case.constraints, case.y, case.x, start=start).value, len(case.y)
            for i in range(batch):
                alone = repair(case.constraints, *case.pick([i]), start=start).value
                assert_equal(alone, whole[[i]], close, f"sample {i}, alone and in its batch")
            many = [i % batch for i in range(1000)]
            found = repair(case.constraints, *case.pick(many), start=start).value
            assert_equal(found, whole[many], close, "in a batch of 1000")

    def test_empty_batch(self) -> None:
        case = self._unbatched()
        y, x = case.pick([])
        y.requires_grad_()
        solution = SnareLayer(case.constraints).solve(y, x)
        assert solution.value.shape == y.shape
        assert solution.status.shape == (0,)
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.shape == y.shape

    def test_matrix_free_route_agrees(self) -> None:
        case = self.case()
        y, x, leaves = case.differentiable()
        damping = Annealed(floor=1e-3, relative=False)
        options: dict[str, Any] = {"start": None, "damping": damping, "rows": "active", "tol": 0}
        direct = repair(case.constraints, y, x, max_steps=5, **options).value
        free = repair(case.constraints, y, x, max_steps=5, solver=ConjugateGradients(tol=1e-14), **options).value
        assert_equal(free, direct, 1e-9, "repair by conjugate gradients")
        for actual, want in zip(gradients(free, leaves), gradients(direct, leaves), strict=True):
            assert_equal(actual, want, 1e-7, "gradients by conjugate gradients")

    def test_factors_may_be_kept_or_not(self) -> None:
        case = self.case()
        y, x, leaves = case.differentiable()
        kept, again = (
            gradients(repair(case.constraints, y, x, start=None, rows="active", store_factors=store).value, leaves)
            for store in (True, False)
        )
        for a, b in zip(kept, again, strict=True):
            assert_equal(a, b, 1e-12)

    def test_float32_in_float32_out(self) -> None:
        case = self.case()
        y, x = case.y.float().requires_grad_(), on_tensors(_single, case.x)
        with warnings.catch_warnings():  # float32 may hold less than the tolerance: that is the point
            warnings.simplefilter("ignore", PrecisionWarning)
            solution = repair(case.constraints, y, x)
        assert solution.value.dtype == torch.float32
        assert solution.converged.all(), solution.describe()
        assert (solution.violation <= solution.allowance.clamp(min=1e-8)).all()
        size = max(1.0, case.value(case.y, case.x).abs().max().item())
        assert solution.violation.max() < 1e-4 * size  # what float32 can hold
        solution.value.sum().backward()
        assert y.grad is not None
        assert y.grad.dtype == torch.float32

    def test_pure_float32(self) -> None:
        case = self.case()
        y, x = case.y.float(), on_tensors(_single, case.x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            solution = repair(case.constraints, y, x, tol=1e-4, dtype=torch.float32, rescue=True)
        assert solution.converged.all(), solution.describe()
        assert solution.violation.dtype == torch.float64

    def test_copy_and_state_dict(self) -> None:
        case = self.case()
        layer = SnareLayer(case.constraints)
        expected = layer(case.y, case.x).detach()
        if any(tensor.grad_fn for tensor in case.constraints.state_dict(keep_vars=True).values()):
            raise SkipTest("the set holds the results of computations, which torch does not copy")
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(case.y, case.x), expected), "a copy differs"
        for tensor in twin.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.5).add_(0.1)
        twin.load_state_dict(layer.state_dict())
        assert torch.equal(twin(case.y, case.x), expected), "what was saved and loaded differs"

    def _unbatched(self) -> Case:
        case = self.case()
        if case.batched:
            raise SkipTest("the set holds data of its own batch")
        return case


def _or_zero(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if gradient is None else gradient


def _single(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.is_floating_point() else leaf


def check(
    constraints: Constraints,
    y: Tensor,
    x: Any = None,
    *,
    formula: Callable[[Tensor, Any], Tensor] | None = None,
    lower: Bound | None = None,
    upper: Bound | None = None,
) -> None:
    """Run the whole suite on a set by hand; an AssertionError names every check that failed. See `Case`.

    Example:
        >>> import snarenet as sn
        >>> from snarenet.testing import check, draw
        >>> check(sn.Box(0.0, 1.0), draw(4, 3, scale=2), lower=0.0, upper=1.0)
    """
    case = Case(constraints, y, x, formula, lower, upper)

    class Suite(ConstraintsSuite):
        def case(self) -> Case:
            return case

    failed = {}
    for name in (name for name in dir(Suite) if name.startswith("test_")):
        try:
            getattr(Suite(), name)()
        except SkipTest:
            continue
        except Exception as error:
            failed[name.removeprefix("test_")] = f"{type(error).__name__}: {error}"
    if failed:
        found = "\n".join(f"- {name}: {message}" for name, message in failed.items())
        raise AssertionError(f"`{type(constraints).__name__}` failed {len(failed)} checks:\n{found}")
