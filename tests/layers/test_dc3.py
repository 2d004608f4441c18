"""Completion and DC3: equalities to rounding, steps as in a loop written out, what the choice of variables does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.layers.completion import Completion, random_order
from snarenet.layers.dc3 import DC3Layer
from snarenet.testing import assert_equal, draw, gradients

A, C, H, G = draw(4, 7, seed=1), draw(3, 7, seed=2), draw(2, 7, seed=3).abs(), draw(2, 7, seed=4)
X = draw(5, 3, seed=5)
PARTIAL = draw(5, 4, seed=6, scale=2)


def equalities() -> sn.Constraints:
    return sn.Linear(C[:2].clone(), equals=lambda x: x[:, :2]) & sn.Linear(C[2:].clone(), equals=lambda x: x[:, 2:])


def linear() -> sn.Constraints:
    return equalities() & sn.Linear(A.clone(), lower=-0.5, upper=0.5)


def curved() -> sn.Constraints:
    """Inequalities between two blocks of equalities."""
    return sn.Linear(C[:1], equals=lambda x: x[:, :1]) & sn.Quadratic(H, G, upper=1.0) & sn.Linear(
        C[1:], equals=lambda x: x[:, 1:]
    )  # fmt: skip


def function() -> sn.Constraints:
    return equalities() & sn.Nonlinear(lambda y, x: (y * y.roll(1, 1)).sum(1, keepdim=True), rows=1, upper=x_squared)


def x_squared(x: Tensor) -> Tensor:
    return 0.1 * x.square().sum(1, keepdim=True)


SETS = {"linear": linear, "curved": curved, "function": function}


def quiet(constraints: sn.Constraints, **options) -> DC3Layer:
    return DC3Layer(constraints, on_failure="ignore", **options)


class TestCompletion:
    def test_equalities_hold_and_partial_variables_stay(self) -> None:
        completion = Completion(linear())
        y = completion.complete(PARTIAL, X)
        assert_equal(y @ C.T, X, 1e-12)
        assert torch.equal(y[:, completion.order[:4]], PARTIAL)
        assert sorted(completion.order.tolist()) == list(range(7))

    def test_lift_and_reduce_are_the_derivative(self) -> None:
        completion = Completion(linear())
        P = torch.func.jacrev(lambda p: completion.complete(p[None], X[:1])[0])(PARTIAL[0])
        direction, gradient = draw(5, 4, seed=7), draw(5, 7, seed=8)
        assert_equal(completion.lift(direction), direction @ P.T, 1e-12)
        assert_equal(completion.reduce(gradient), gradient @ P, 1e-12)
        assert_equal(completion.lift(direction) @ C.T, torch.zeros(5, 3, dtype=torch.float64), 1e-9)

    def test_right_side_and_remaining_rows(self) -> None:
        completion = Completion(curved())
        instance = curved().at(draw(5, 7), X)
        rest = completion.remaining(instance)
        y = draw(5, 7, seed=9)
        assert torch.equal(completion.right_side(instance), X)
        assert_equal(rest.map.value(y), y.square() @ H.T + y @ G.T, 1e-13)
        assert rest.upper.shape == (5, 2)
        assert (rest.upper == 1).all()

    def test_pivoting_is_well_conditioned_where_chance_is_not(self) -> None:
        """Seven of ten columns nearly agree: most choices of three are nearly singular, and are drawn again."""
        columns = torch.cat([draw(3, 1, seed=1) + 1e-3 * draw(3, 7, seed=2), draw(3, 3, seed=3)], 1)
        constraints = sn.Linear(columns, equals=1.0)

        def condition(order: Tensor) -> float:
            return torch.linalg.cond(columns[:, order[-3:]]).item()

        best = min(torch.linalg.cond(columns[:, list(c)]).item() for c in torch.combinations(torch.arange(10), 3))
        chances = [condition(random_order(columns, seed, math.inf)) for seed in range(9)]
        assert condition(Completion(constraints).order) <= 2 * best
        assert sorted(chances)[4] > 100 * best
        assert max(chances) > 1000
        assert max(condition(Completion(constraints, "random", seed).order) for seed in range(9)) <= 1000

    def test_the_scale_of_an_equality_means_nothing(self) -> None:
        scale = torch.tensor([[1e-6], [1.0], [1e6]], dtype=torch.float64)
        scaled = Completion(sn.Linear(scale * C, equals=0.0))
        assert torch.equal(scaled.order, Completion(sn.Linear(C, equals=0.0)).order)

    def test_random_choices_follow_their_seed(self) -> None:
        orders = [Completion(linear(), "random", seed).order for seed in (1, 1, 2)]
        assert torch.equal(orders[0], orders[1])
        assert not torch.equal(orders[0], orders[2])
        assert_equal(Completion(linear(), "random", 1).complete(PARTIAL, X) @ C.T, X, 1e-12)

    def test_without_equalities_nothing_changes(self) -> None:
        """A learned matrix, one per sample, and two bounds are no equalities to complete."""
        learned = sn.Linear(nn.Parameter(C.clone()), equals=0.0)
        several = sn.Linear(C.expand(5, 3, 7), equals=0.0)
        for constraints in (sn.Box(0.0, 1.0), learned, several, sn.Linear(C, lower=0.0, upper=0.0)):
            completion, y = Completion(constraints), draw(5, 7)
            assert completion.count(7) == 7
            assert completion.right_side(constraints.at(y)).shape == (5, 0)
            assert completion.complete(y, y[:, :0]) is completion.lift(y) is completion.reduce(y) is y

    def test_dependent_equalities(self) -> None:
        for rows in (torch.cat([C, C[:1] + C[1:2]]), torch.cat([C, 0 * C[:1]]), draw(8, 7)):
            with pytest.raises(ValueError, match=f"independent equalities, but only . of {len(rows)} rows are"):
                Completion(sn.Linear(rows, equals=0.0))
        with pytest.raises(ValueError, match="none of 1000 random choices"):
            Completion(sn.Linear(1e-6 * C, equals=0.0), "random")


def loop(constraints: sn.Constraints, order: Tensor, p: Tensor, x: Tensor, step: float | str, steps: int) -> Tensor:
    """DC3 of one sample, by plain autograd in the partial variables."""
    free, tied = order[:4], order[4:]

    def complete(p: Tensor) -> Tensor:
        y = p.new_zeros(len(p), 7).index_copy(1, free, p)
        return y.index_copy(1, tied, torch.linalg.solve(C[:, tied], (x - p @ C[:, free].T).T).T)

    velocity = torch.zeros_like(p)
    for _ in range(steps):
        r = constraints.residual(complete(p), x)
        r = torch.where(r.abs() > 1e-9, r, 0.0)  # of equalities only rounding is left
        if not r.any():
            break
        (gradient,) = torch.autograd.grad(r.square().sum(), p, create_graph=True)
        if step == "auto":
            rows = [torch.autograd.grad(r[0, i], p, create_graph=True)[0] for i in range(r.shape[1])]
            J = torch.cat(rows)  # of the violated rows in the partial variables; zero for the others
            length = gradient.norm() / (2 * gradient @ J.T @ J).norm()
        else:
            length = step
        velocity = length * gradient + 0.5 * velocity
        p = p - velocity
    return complete(p)


@pytest.mark.parametrize("name", SETS)
class TestSteps:
    def test_equalities_hold_to_rounding(self, name: str) -> None:
        for layer in (quiet(SETS[name]()), quiet(SETS[name]()).eval()):
            solution = layer.solve(PARTIAL, X)
            assert_equal(solution.value @ C.T, X, 1e-12)
            assert_equal(solution.raw, layer.completion.complete(PARTIAL, X), 1e-14)

    @pytest.mark.parametrize("step", [1e-3, "auto"])
    def test_values_and_gradients_equal_a_plain_loop(self, name: str, step: float | str) -> None:
        constraints = SETS[name]()
        layer = quiet(constraints, step=step, train_steps=3, tol=0.0)
        p, x = PARTIAL.clone().requires_grad_(), X.clone().requires_grad_()
        samples = zip(p.split(1), x.split(1), strict=True)
        expected = torch.cat([loop(constraints, layer.completion.order, *sample, step, 3) for sample in samples])
        actual = layer(p, x)
        assert (actual - layer.solve(p, x).raw).abs().amax(1).max() > 1e-3
        assert_equal(actual, expected, 1e-10)
        for ours, theirs in zip(gradients(actual, [p, x]), gradients(expected, [p, x]), strict=True):
            assert_equal(ours, theirs, 1e-8)

    @pytest.mark.parametrize("step", [1e-3, "auto"])
    def test_gradcheck(self, name: str, step: float | str) -> None:
        layer = quiet(SETS[name](), step=step, train_steps=4)
        inputs = PARTIAL.clone().requires_grad_(), X.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda p, x: layer(p, x), inputs, atol=1e-5, rtol=1e-4)

    def test_violations_fall(self, name: str) -> None:
        """Without momentum, every step of the length 1/L lowers F on these sets."""
        layers = [quiet(SETS[name](), momentum=0.0, train_steps=k) for k in range(8)]
        F = torch.stack([layer.constraints.residual(layer(PARTIAL, X), X).square().sum(1) for layer in layers])
        assert (F[0] > 0.1).any()
        assert (F[1:] <= F[:-1] + 1e-20).all()
        assert (F[-1] < 0.2 * F[0] + 1e-20).all()


class TestLayer:
    def test_one_halfspace_in_one_step(self) -> None:
        """1/L is exact for a single row: the first step projects onto it; without equalities DC3 sees all of y."""
        layer = DC3Layer(sn.Linear(torch.tensor([[3.0, 4.0]]), upper=5.0))
        solution = layer.solve(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        torch.testing.assert_close(solution.value, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
        assert solution.steps.tolist() == [1, 0]
        assert solution.converged.all()

    def test_gradients_reach_bounds_and_matrices(self) -> None:
        matrix, bound = A.clone().requires_grad_(), torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)

        def run(matrix: Tensor, bound: Tensor) -> Tensor:
            constraints = sn.Linear(C, equals=0.1) & sn.Linear(lambda x: matrix, upper=lambda x: bound.expand(5, 4))
            return quiet(constraints, train_steps=3)(PARTIAL, X)

        assert torch.autograd.gradcheck(run, (matrix, bound), atol=1e-5, rtol=1e-4)

    def test_more_steps_in_eval_mode_have_no_gradient(self) -> None:
        """They move the value only."""
        layer = quiet(function(), train_steps=1, test_steps=30)
        p, x = PARTIAL.clone().requires_grad_(), X.clone().requires_grad_()
        training, testing = layer.solve(p, x), layer.eval().solve(p, x)
        assert training.steps.max() == 1
        assert 1 < testing.steps.max() <= 31
        assert testing.violation.max() < 0.1 * training.violation.max()
        split, joined = (quiet(function(), momentum=0.0, train_steps=k, test_steps=2 - k).eval() for k in (1, 2))
        assert_equal(split(p, x), joined(p, x), 1e-12)  # they go on from where the first ones ended
        for ours, theirs in zip(*(gradients(found.value, [p, x]) for found in (testing, training)), strict=True):
            assert torch.equal(ours, theirs)

    def test_a_sample_stops_at_its_tolerance(self) -> None:
        layer = DC3Layer(linear(), test_steps=500, tol=1e-3).eval()
        first = layer.solve(PARTIAL, X)
        assert first.violation.max() <= 1e-3
        assert len(set(first.steps.tolist())) > 1
        again = layer.solve(first.value[:, layer.completion.order[:4]], X)
        assert not again.steps.any()
        torch.testing.assert_close(again.value, first.value, rtol=0, atol=1e-12)

    def test_relaxation_widens_inequalities_only(self) -> None:
        layer = DC3Layer(linear(), train_steps=500)
        value = layer(PARTIAL, X, relax=0.4)
        residual = layer.constraints.residual(value, X).abs()
        assert residual[:, :3].max() < 1e-12
        assert 0.3 < residual.max() <= 0.4 + 1e-4

    def test_failures_are_reported(self) -> None:
        with pytest.warns(sn.RepairWarning, match=r"MAX_STEPS.*max_steps=20"):
            DC3Layer(linear(), step=1e-13)(PARTIAL, X)

    def test_predictions(self) -> None:
        assert DC3Layer(linear()).predictions(7) == 4
        assert DC3Layer(sn.Box(0.0, 1.0)).predictions(7) == 7
        with pytest.raises(ValueError, match=r"`size` must be 7.*but got 8"):
            DC3Layer(linear()).predictions(8)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"step": 0.0}, "`step` must be 'auto' or a number > 0, but got 0.0"),
            ({"step": "fast"}, "`step` must be 'auto' or a number > 0, but got 'fast'"),
            ({"momentum": 1.0}, "`momentum` must be at least 0 and less than 1, but got 1.0"),
            ({"train_steps": -1}, "`train_steps` must be a whole number >= 0, but got -1"),
            ({"test_steps": 2.5}, "`test_steps` must be a whole number >= 0, but got 2.5"),
            ({"partial": "best"}, "`partial` must be 'pivoted' or 'random', but got 'best'"),
            ({"tol": -1.0}, "`tol` must be a finite number >= 0, but got -1.0"),
        ],
    )
    def test_wrong_options(self, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            DC3Layer(linear(), **options)

    def test_the_choice_of_variables_is_saved(self) -> None:
        layer, other = quiet(linear()), quiet(linear(), partial="random")
        assert not torch.equal(other.completion.order, layer.completion.order)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(PARTIAL, X), layer(PARTIAL, X))
        assert sum("A" in key.split(".") for key in layer.state_dict()) == 3  # nothing is saved twice

    def test_a_moved_layer_obeys_its_rounded_equalities(self) -> None:
        layer = quiet(linear()).float()
        assert_equal(layer(PARTIAL, X) @ C.float().double().T, X, 1e-12)
