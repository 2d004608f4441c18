"""A step down the objective before the repair: where it leads, its gradient, and what it leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.optimum import polish

BENDS = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cost(y: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (BENDS * y.square()).sum(1) + (x * y).sum(1)


def quartic(y: Tensor, x: Tensor) -> Tensor:
    return (y - x).pow(4).sum(1)


def simplex() -> sn.Constraints:
    return sn.Linear(torch.ones(1, 3, dtype=torch.float64), equals=1.0) & sn.Box(0.0, None)


def layer(**options: object) -> sn.SnareLayer:
    options = {"weights": BENDS, "objective": cost, "start": sn.Nearest(200)} | options
    return sn.SnareLayer(simplex(), **options)  # pyright: ignore


def test_it_is_the_optimum_where_the_weights_are_the_curvature() -> None:
    x = 3 * draw(50, 3)
    found = layer().solve(10 * draw(50, 3, seed=1), x)
    slope = BENDS * found.value + x  # at the optimum equal in all variables that are not zero, and no lower elsewhere
    least = torch.where(found.value > 1e-6, slope, torch.inf).amin(1, keepdim=True)
    assert found.converged.all()
    assert (slope >= least - 1e-6).all()
    assert torch.where(found.value > 1e-6, slope - least, 0.0).max() < 1e-6


def test_errors_shrink_where_the_weights_exceed_the_curvature() -> None:
    x, best = 3 * draw(50, 3), layer()
    optimum = best(torch.zeros(50, 3, dtype=torch.float64), x)
    y = optimum + draw(50, 3, seed=1)
    without, step = sn.SnareLayer(simplex(), weights=BENDS, start=sn.Nearest(200)), layer(weights=1.25 * BENDS)
    far = ((without(y, x) - optimum).square() @ BENDS).sqrt()
    near = ((step(y, x) - optimum).square() @ BENDS).sqrt()
    assert (near <= 0.21 * ((y - optimum).square() @ BENDS).sqrt() + 1e-6).all()
    assert near.mean() < 0.3 * far.mean()


def test_half_a_step_is_one_with_twice_the_weights() -> None:
    y, x = draw(5, 3), draw(5, 3, seed=1)
    torch.testing.assert_close(layer(step=0.5)(y, x), layer(weights=2 * BENDS)(y, x))


def test_the_gradient() -> None:
    x = draw(4, 3)
    own = sn.SnareLayer(simplex(), objective=quartic, step=0.05)
    y = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: own(y, x), y)
    (gradient,) = torch.autograd.grad(own(y, x)[:, 0].sum(), y)
    assert gradient.abs().max() > 1e-3


def test_the_prediction_is_told_as_it_was() -> None:
    y, x = draw(5, 3), draw(5, 3, seed=1)
    assert torch.equal(layer().solve(y, x).raw, y)
    assert "down the objective" in str(layer().explain(y, x))
    assert "down the objective" not in str(layer(step=0.0).explain(y, x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type) -> None:
    y, x, own = draw(5, 3), draw(5, 3, seed=1), layer()
    with mode():
        found = own(y, x)
    torch.testing.assert_close(found.clone(), own(y, x))


def test_a_single_precision_prediction() -> None:
    y, x = draw(5, 3), draw(5, 3, seed=1)
    found = layer(tol=1e-6)(y.float(), x.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), layer()(y, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("f", [torch.log, torch.sqrt])
def test_outside_the_domain_of_the_objective(f: Callable[[Tensor], Tensor]) -> None:
    """There a prediction is repaired as it is, though log has a formula for its derivative, and no NaN gets through."""
    own, plain = sn.SnareLayer(simplex(), objective=lambda y, x: -f(y).sum(1), step=0.1), sn.SnareLayer(simplex())
    y = torch.tensor([[-0.1, 0.5, 0.9], [0.2, 0.3, 0.9]], dtype=torch.float64).requires_grad_()
    found = own.solve(y, None)
    torch.testing.assert_close(found.value[:1], plain(y[:1]))
    assert (found.value[1] - plain(y[1:])[0]).abs().max() > 0.01
    assert found.converged.all()
    (gradient,) = torch.autograd.grad(found.value[:, 1].sum(), y)
    torch.testing.assert_close(gradient[:1], torch.autograd.grad(plain(y)[0, 1], y)[0][:1])
    assert gradient.isfinite().all()


def test_none_and_an_empty_batch() -> None:
    y, x = draw(5, 3), draw(5, 3, seed=1)
    plain = sn.SnareLayer(simplex(), weights=BENDS, start=sn.Nearest(200))
    assert torch.equal(layer(step=0.0)(y, x), plain(y, x))
    assert layer()(y[:0], x[:0]).shape == (0, 3)
    assert plain.step is None
    assert not plain.descends


def test_it_is_kept_with_a_model() -> None:
    own, other = layer(step=0.25), layer(step=0.0)
    other.load_state_dict(own.state_dict())
    y, x = draw(5, 3), draw(5, 3, seed=1)
    assert torch.equal(other(y, x), own(y, x))
    assert torch.equal(copy.deepcopy(own)(y, x), own(y, x))


def test_the_best_of_several() -> None:
    y, x = draw(5, 6), draw(5, 3, seed=1)
    best = sn.BestOfLayer(simplex(), quartic, 2, 0.05)
    own = sn.SnareLayer(simplex(), objective=quartic, step=0.05)
    each = torch.stack([quartic(own(part, x), x) for part in y.chunk(2, 1)])
    torch.testing.assert_close(quartic(best(y, x), x), each.amin(0))


@pytest.mark.parametrize("step", [-1.0, float("inf"), torch.ones(2)])
def test_wrong_steps(step: float | Tensor) -> None:
    with pytest.raises(ValueError, match="`step` must be a number >= 0 and finite"):
        layer(step=step)


@pytest.mark.slow
def test_exported() -> None:
    y, x = draw(5, 3), draw(5, 3, seed=1)
    own = layer().eval()
    program = torch.export.export(own, (y, x)).module()
    torch.testing.assert_close(program(y, x), own(y, x))


@pytest.mark.gpu
def test_recorded() -> None:
    """A recording steps down the objective as well, and so does what is done about samples that need more steps."""
    ring = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), 1, lower=1.0, upper=2.0).cuda()
    y, x = 3 * draw(50, 3).cuda(), draw(50, 3, seed=1).cuda()
    for record in (1, 30):
        own, other = (
            sn.SnareLayer(ring, objective=quartic, step=0.01, start=None, record=count).cuda() for count in (record, 0)
        )
        found, wanted = own.solve(y, x), other.solve(y, x)
        assert torch.equal(found.raw, y)
        torch.testing.assert_close(found.value, wanted.value)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda y, x: cost(y, x).unsqueeze(1), r"shape \(4, 1\)"),
        (lambda y, x: cost(y, x).sum(), r"shape \(\)"),
        (lambda y, x: 3.0, "float"),
    ],
    ids=["a column", "a sum", "a number"],
)
def test_an_objective_of_another_shape_is_refused(wrong: Callable[[Tensor, Tensor], Tensor], what: str) -> None:
    """Wherever a user's objective comes in: the step, the choice of the best, polishing, and a problem."""
    y, x, message = draw(4, 3), draw(4, 3, seed=1), rf"`objective\(y, x\)` must return shape \(4,\).* but got {what}"

    class Own(sn.Problem):
        def __init__(self) -> None:
            super().__init__()
            self.constraints, self.inputs, self.size = simplex(), x, 3

        def objective(self, y: Tensor, x: Tensor) -> Tensor:
            return wrong(y, x)

    for call in (
        lambda: layer(objective=wrong)(y, x),
        lambda: polish(wrong, simplex(), y, x),
        lambda: Own().run(sn.ConstrainedModel(torch.nn.Identity(), sn.SnareLayer(simplex())), x),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"`objective\(y, x\)` must return shape \(8,\)"):
        sn.BestOfLayer(simplex(), wrong, count=2)(draw(4, 6), x)
