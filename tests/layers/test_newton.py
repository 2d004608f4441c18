"""DC3 with equalities that are functions: completion by Newton's method, its derivative, and what steps leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers import DC3Layer
from snarenet.layers.newton import Around, NewtonCompletion
from snarenet.problems import ACOPF, MPC
from snarenet.testing import draw

TRIANGLE = str(Path(__file__).parents[1] / "problems" / "triangle.m")
F64 = torch.float64


def sphere() -> sn.Constraints:
    """|y| = x and y_1 + y_2 = 1 in space, with y <= 0.9 beside."""
    ball = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True) - x.square(), rows=1, equals=0.0)
    return ball & sn.Linear(torch.tensor([[1.0, 1.0, 0.0]], dtype=F64), equals=1.0) & sn.Box(-3.0, 0.9)


AROUND = Around(torch.tensor([0.5, 0.5, 0.9], dtype=F64), torch.tensor([1.2], dtype=F64))
X = torch.tensor([[1.2], [1.25], [1.1]], dtype=F64)


class TestCompletion:
    def test_equalities_hold_and_partial_variables_stay(self) -> None:
        constraints = sphere()
        completion = NewtonCompletion(constraints, AROUND)
        assert (completion.rows, completion.count(3)) == (2, 1)
        partial = draw(3, 1, scale=0.05)
        y = completion.begin(partial, constraints.at(torch.zeros(3, 3, dtype=F64), X))
        torch.testing.assert_close(y.norm(dim=1, keepdim=True), X)
        torch.testing.assert_close(y[:, :2].sum(1), torch.ones(3, dtype=F64))
        free = completion.order[:1]
        torch.testing.assert_close(y[:, free], AROUND.y[free] + partial)

    def test_gradients_are_implicit(self) -> None:
        constraints = sphere()
        completion = NewtonCompletion(constraints, AROUND)

        def function(partial: Tensor, x: Tensor) -> Tensor:
            return completion.begin(partial, constraints.at(torch.zeros(3, 3, dtype=F64), x))

        inputs = draw(3, 1, scale=0.05).requires_grad_(), X.clone().requires_grad_()
        torch.autograd.gradcheck(function, inputs, atol=1e-6)

    def test_the_tangent_is_the_derivative(self) -> None:
        constraints = sphere()
        completion = NewtonCompletion(constraints, AROUND)
        instance = constraints.at(torch.zeros(3, 3, dtype=F64), X)
        partial, direction = draw(3, 1, scale=0.05), draw(3, 1, seed=1)
        y = completion.begin(partial, instance)
        tangent = completion.tangent(y, instance)
        ahead, behind = (completion.begin(partial + e * direction, instance) for e in (1e-6, -1e-6))
        torch.testing.assert_close(tangent.lift(direction), (ahead - behind) / 2e-6, rtol=0, atol=1e-8)
        w = draw(3, 3, seed=2)
        both = (tangent.lift(direction) * w).sum(1), (direction * tangent.reduce(w)).sum(1)
        torch.testing.assert_close(*both)
        moved = completion.move(y, direction * 1e-2, tangent, instance)
        torch.testing.assert_close(moved, completion.begin(partial - direction * 1e-2, instance))

    def test_where_it_applies(self) -> None:
        assert NewtonCompletion.applies(sphere(), AROUND)
        linear = sn.Linear(torch.tensor([[1.0, 1.0, 0.0]], dtype=F64), equals=1.0) & sn.Box(-3.0, 0.9)
        assert not NewtonCompletion.applies(linear, AROUND)
        layer = DC3Layer(linear, around=AROUND)
        assert type(layer.completion).__name__ == "Completion"

    def test_the_wrong_size(self) -> None:
        with pytest.raises(ValueError, match="`size` must be 3, as the typical point has it, but got 4"):
            NewtonCompletion(sphere(), AROUND).count(4)


def test_steps_reach_the_inequalities() -> None:
    """The box cuts off y_3 > 0.9; steps along the circle bring it back, on the equalities all the way."""
    constraints = sphere()
    layer = DC3Layer(constraints, around=AROUND, train_steps=60, test_steps=60, tol=1e-6)
    y = torch.full((3, 1), 0.1, dtype=F64)
    start = layer.completion.begin(y, constraints.at(y.new_zeros(3, 3), X))
    assert constraints.violation(start, X)[1] > 0.05
    solution = layer.solve(y, X)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value.norm(dim=1, keepdim=True), X)


@pytest.mark.parametrize("partial", [torch.tensor([0, 1]), torch.tensor([], dtype=torch.long)])
def test_the_wrong_number_of_partial_variables(partial: Tensor) -> None:
    with pytest.raises(ValueError, match="`partial` must name 1 variables, as 2 equalities leave them, but names"):
        DC3Layer(sphere(), partial=partial, around=AROUND)


def test_power_flow() -> None:
    """DC3's own example: given what generators do, voltages follow; fixed variables are equalities, too."""
    problem = ACOPF(TRIANGLE, instances=8)
    around = Around(problem.typical, problem.load)
    layer = DC3Layer(problem.constraints, around=around, tol=1e-5, on_failure="ignore")
    assert layer.completion.rows == 7  # six balances and the angle of the reference
    x = problem.inputs
    y = (0.02 * draw(8, layer.predictions(problem.size))).requires_grad_()
    solution = layer.train().solve(y, x)
    balance = problem.constraints.value(solution.value, x)[:, :6]
    assert balance.abs().max() < 1e-9
    assert solution.value[:, 0].abs().max() < 1e-12
    problem.objective(solution.value, x).sum().backward()
    assert y.grad is not None
    assert y.grad.isfinite().all()


def test_plans() -> None:
    problem = MPC(6, instances=5)
    around = Around(problem.typical, problem.inputs[0])
    layer = DC3Layer(problem.constraints, partial=problem.partial, around=around, on_failure="ignore")
    assert layer.completion.rows == 18
    y = layer(torch.zeros(5, 12, dtype=F64), problem.inputs)
    assert problem.constraints.value(y, problem.inputs)[:, :18].abs().max() < 1e-9


def test_training_gives_it_a_typical_point(tmp_path: Path) -> None:
    problem = sn.problems.load("mpc", horizon=4, instances=40)
    config = sn.TrainConfig.recipe("best", "mpc", method="dc3", epochs=1, width=8, batch=20)
    model = config.build(problem)
    assert isinstance(model.layer.completion, NewtonCompletion)
    run = sn.Trainer(config, tmp_path / "run").fit(model, problem)
    summary = sn.evaluate(run.load_model(problem), problem).summary
    assert summary["eq"]["max"] < 1e-6
