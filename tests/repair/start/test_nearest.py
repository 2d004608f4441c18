"""The start near the orthogonal projection: against Pi-net run to the end, a closed form, and differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers import HardNetLayer, PiNetLayer
from snarenet.testing import assert_equal, draw

FINISH = sn.Annealed(1e-3, 0.1)


def polytope() -> sn.Constraints:
    """Inequalities from both sides and equalities in x."""
    A = 3 * draw(6, 10, seed=1)
    return sn.Linear(A, -1.0, 0.5) & sn.Linear(draw(2, 10, seed=2), equals=lambda x: x)


def simplex() -> sn.Constraints:
    return sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 10, dtype=torch.float64), equals=1.0)


Y, X = draw(20, 10, seed=3, scale=2), draw(20, 2, seed=4)


@pytest.mark.parametrize("constraints", [polytope(), simplex()], ids=["polytope", "simplex"])
class TestProjection:
    def test_many_iterations_reach_it(self, constraints: sn.Constraints) -> None:
        expected = PiNetLayer(constraints, tol=1e-11)(Y, X)
        solution = sn.repair(constraints, Y, X, start=sn.Nearest(500), damping=FINISH, tol=1e-9)
        assert solution.converged.all()
        assert torch.equal(solution.raw, Y)
        assert_equal(solution.value, expected, 1e-6)

    def test_few_iterations_come_close(self, constraints: sn.Constraints) -> None:
        expected = PiNetLayer(constraints, tol=1e-11)(Y, X)
        far, near = (
            (sn.repair(constraints, Y, X, start=start).value - expected).norm(dim=1).mean()
            for start in (None, sn.Nearest(20))
        )
        assert near < 0.1 * far

    def test_it_moves_no_two_points_apart(self, constraints: sn.Constraints) -> None:
        other = Y + 0.5 * draw(20, 10, seed=5)
        a, b = (sn.repair(constraints, y, X, start=sn.Nearest(300), damping=FINISH).value for y in (Y, other))
        assert ((a - b).norm(dim=1) <= (Y - other).norm(dim=1) * (1 + 1e-6)).all()

    def test_feasible_points_stay(self, constraints: sn.Constraints) -> None:
        inside = PiNetLayer(constraints, tol=1e-12)(Y, X)
        assert_equal(sn.repair(constraints, inside, X, start=sn.Nearest(20), damping=FINISH).value, inside, 1e-7)

    def test_samples_do_not_know_each_other(self, constraints: sn.Constraints) -> None:
        together = sn.repair(constraints, Y, X, start=sn.Nearest(20), damping=FINISH).value
        alone = sn.repair(constraints, Y[3:4], X[3:4], start=sn.Nearest(20), damping=FINISH).value
        assert_equal(alone, together[3:4], 1e-9)


WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 9.0, 1.0, 0.5, 2.0, 1.0, 16.0, 3.0], dtype=torch.float64)


class TestWeights:
    """Weights are a change of units: with z = sqrt(w) y the distance is the plain one."""

    def test_they_are_a_change_of_units(self) -> None:
        A, C, root = 3 * draw(6, 10, seed=1), draw(2, 10, seed=2), WEIGHTS.sqrt()
        scaled = sn.Linear(A / root, -1.0, 0.5) & sn.Linear(C / root, equals=lambda x: x)
        for count in (7, 500):
            options = {"start": sn.Nearest(count), "damping": FINISH, "max_steps": 0}
            found = sn.repair(polytope(), Y, X, weights=WEIGHTS, **options).value
            assert_equal(found * root, sn.repair(scaled, Y * root, X, **options).value, 1e-9)

    def test_boxes_obey_them(self) -> None:
        """Of the simplex: the point that minimises the weighted distance, by its optimality conditions."""
        layer = sn.SnareLayer(simplex(), damping=FINISH, start=sn.Nearest(2000), weights=WEIGHTS, tol=1e-10)
        y = layer(Y)
        force, inside = WEIGHTS * (y - Y), y > 1e-6  # one multiplier for all entries above 0, at least it for the rest
        level = (force * inside).sum(1) / inside.sum(1)
        assert ((force - level.unsqueeze(1)).abs() * inside).max() < 1e-5
        assert (force - level.unsqueeze(1)).min() > -1e-5

    def test_their_scale_does_not_matter(self) -> None:
        found = [
            sn.repair(polytope(), Y, X, start=sn.Nearest(9), damping=FINISH, weights=factor * WEIGHTS).value
            for factor in (1.0, 1e6)
        ]
        assert_equal(found[1], found[0], 1e-9)

    def test_other_weights_are_noticed(self) -> None:
        constraints, w = polytope(), WEIGHTS.clone()
        first = sn.repair(constraints, Y, X, start=sn.Nearest(9), damping=FINISH, weights=w).value
        plain = sn.repair(constraints, Y, X, start=sn.Nearest(9), damping=FINISH).value
        w.fill_(1.0)
        assert not torch.allclose(first, plain, atol=1e-3)
        assert_equal(sn.repair(constraints, Y, X, start=sn.Nearest(9), damping=FINISH, weights=w).value, plain, 1e-12)

    def test_they_move_and_save_with_the_layer(self) -> None:
        layer = sn.SnareLayer(polytope(), damping=FINISH, start=sn.Nearest(9), weights=WEIGHTS)
        other = sn.SnareLayer(polytope(), damping=FINISH, start=sn.Nearest(9), weights=torch.ones_like(WEIGHTS))
        other.load_state_dict(layer.state_dict())
        assert_equal(other(Y, X), layer(Y, X), 0.0)
        assert layer.float().weights.dtype == torch.float32
        assert "weights" not in sn.SnareLayer(polytope()).state_dict()

    @pytest.mark.parametrize(
        ("weights", "words"),
        [
            (WEIGHTS[:3], r"`weights` must have shape \(10\), but got .*3"),
            (-WEIGHTS, "`weights` must be positive"),
            (WEIGHTS * torch.inf, "`weights` must be positive and finite"),
            (WEIGHTS.clone().requires_grad_(), "`weights` must be a constant tensor"),
            (2.0, "`weights` must be a constant tensor"),
        ],
    )
    def test_bad_ones_are_refused(self, weights: Tensor, words: str) -> None:
        options: dict[str, Any] = {"start": sn.Nearest(5), "weights": weights}
        with pytest.raises(ValueError, match=words):
            sn.SnareLayer(polytope(), **options)
        with pytest.raises(ValueError, match=words):
            sn.repair(polytope(), Y, X, **options)


def test_scaling_a_row_changes_nothing() -> None:
    A, b = draw(6, 10, seed=1), 0.2 * torch.ones(6, dtype=torch.float64)
    factors = torch.tensor([1.0, 100.0, 0.01, 1.0, 5.0, 1.0], dtype=torch.float64)
    plain, scaled = (sn.Linear(A * f.unsqueeze(1), upper=b * f) for f in (torch.ones_like(factors), factors))
    options = {"start": sn.Nearest(15), "damping": FINISH, "max_steps": 0}
    assert_equal(sn.repair(scaled, Y, **options).value, sn.repair(plain, Y, **options).value, 1e-9)


@pytest.mark.parametrize("weights", [None, WEIGHTS[:5]], ids=["plain", "weighted"])
def test_gradients(weights: Tensor | None) -> None:
    """To predictions, inputs and bounds, through the iterations and the repair."""
    A, C = draw(3, 5, seed=1), draw(1, 5, seed=2)

    def outcome(y: Tensor, x: Tensor, upper: Tensor) -> Tensor:
        constraints = sn.Linear(A, -0.5, lambda _: upper.expand(4, -1)) & sn.Linear(C, equals=lambda x: x)
        return sn.repair(constraints, y, x, start=sn.Nearest(12), damping=FINISH, tol=1e-10, weights=weights).value

    y, x = draw(4, 5, seed=3, scale=2).requires_grad_(), draw(4, 1, seed=4).requires_grad_()
    upper = (draw(3, seed=5).abs() + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(outcome, (y, x, upper), atol=1e-5)


def test_without_matrices_other_rows_are_left_to_the_repair() -> None:
    """Next to functions only the linear rows count for such a start; without any, it is the prediction."""
    free = {"solver": sn.ConjugateGradients(), "max_steps": 0}
    disk = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), rows=1, upper=4.0)
    both = disk & sn.Linear(draw(2, 10, seed=2), equals=lambda x: x)
    start = sn.repair(both, Y, X, start=sn.Nearest(200), **free).value
    assert_equal(start, HardNetLayer(both.parts[1])(Y, X), 1e-6)  # for equalities alone, the closed form
    assert torch.equal(sn.repair(disk, Y, start=sn.Nearest(20), **free).value, Y)
    between = sn.Linear(draw(3, 10, seed=7), upper=0.1) & disk & sn.Linear(draw(2, 10, seed=2), equals=lambda x: x)
    together = between.parts[0] & between.parts[2]
    starts = (sn.repair(set, Y, X, start=sn.Nearest(20), **free).value for set in (between, together))
    assert_equal(*starts, 1e-12)


def test_relaxed_bounds_and_bad_predictions() -> None:
    y = Y.clone()
    y[2, 0] = torch.nan
    solution = sn.repair(polytope(), y, X, start=sn.Nearest(20), damping=FINISH, relax=0.3)
    assert solution.status[2] == sn.Status.NONFINITE
    good = [i for i in range(20) if i != 2]
    assert_equal(
        solution.value[good],
        sn.repair(polytope(), Y[good], X[good], start=sn.Nearest(20), damping=FINISH, relax=0.3).value,
        1e-9,
    )
    assert polytope().violation(solution.value[good], X[good]).max() <= 0.3 + 1e-7


def test_the_option_reaches_the_layer() -> None:
    config = sn.TrainConfig(start=20, weights="none", damping_start=1e-3, damping_ratio=0.1)
    problem = sn.problems.load("nclp", size=8, inequalities=3, equalities=2, instances=60)
    layer = config.build_layer(problem)
    assert layer.options.start == sn.Nearest(20)
    x = problem.split("test")
    y = draw(len(x), 8, seed=1, scale=2)
    expected = sn.repair(problem.constraints, y, x, start=sn.Nearest(20), damping=FINISH, rescue=True)
    assert torch.equal(layer(y, x), expected.value)
