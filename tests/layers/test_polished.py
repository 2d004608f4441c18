"""What a layer does, in eval mode, with samples that only the rescue reaches: polished, or begun again elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.repair import repair_with

# A disk that must be left, in a box: from its centre no direction leads out, so that only the rescue does, at random.
RING = sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), lower=1.0) & sn.Box(-3.0, 3.0)
Y = torch.tensor([[0.0, 0.0], [0.1, 0.0], [-2.0, -1.0]], dtype=torch.float64)
X = torch.tensor([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)


def along(y: Tensor, x: Tensor) -> Tensor:
    """Least at a corner of the box, (-3, -3)."""
    return (y * x).sum(1)


def layer(polishes: Any = "rescued", **options: Any) -> sn.SnareLayer:
    made = sn.SnareLayer(RING, start=None, objective=along, step=None, **options).eval()
    made.polishes = polishes
    return made


def solve(made: sn.SnareLayer, y: Tensor = Y, x: Tensor = X) -> sn.Solution:
    with torch.no_grad():
        return made.solve(y, x)


class TestPolish:
    def test_rescued_samples_alone(self) -> None:
        plain, found = solve(layer("none")), solve(layer())
        assert plain.converged.all()
        assert torch.equal(found.value[1:], plain.value[1:])
        torch.testing.assert_close(found.value[0], torch.full((2,), -3.0, dtype=torch.float64), rtol=0, atol=1e-3)
        assert found.converged.all()
        assert torch.equal(found.violation, RING.violation(found.value))

    def test_all(self) -> None:
        found = solve(layer("all"))
        assert found.converged.all()
        torch.testing.assert_close(found.value, torch.full((3, 2), -3.0, dtype=torch.float64), rtol=0, atol=1e-3)

    def test_not_where_gradients_are_asked_for(self) -> None:
        made, plain = layer("all"), solve(layer("none"))
        y = Y.clone().requires_grad_()
        assert torch.equal(made.solve(y, X).value, plain.value)
        assert torch.equal(made.train().solve(Y, X).value, plain.value)

    def test_not_without_the_rescue(self) -> None:
        found = solve(layer("all", rescue=False, on_failure="ignore"))
        assert found.converged.tolist() == [False, True, True]
        assert torch.equal(found.value[1:], solve(layer("none")).value[1:])

    def test_single_precision(self) -> None:
        """A status speaks of what is returned."""
        found = solve(layer("all", tol=1e-5), Y.float(), X.float())
        assert found.value.dtype == torch.float32
        assert found.converged.all()
        assert RING.violation(found.value.double()).max() <= 1e-5

    def test_the_rescue_looks_where_the_repair_looked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a step down the objective: in the valley of the prediction."""
        calls: list[dict[str, Any]] = []

        def noted(options: Any, *given: Any, **named: Any) -> sn.Solution:
            calls.append({"rescue": options.rescue, "known": given[5], **named})
            found = repair_with(options, *given, **named)
            failed = torch.full_like(found.status, int(sn.Status.MAX_STEPS))
            return found if options.rescue else found._replace(status=failed)

        monkeypatch.setattr("snarenet.layers.snare.repair_with", noted)
        solve(sn.SnareLayer(RING, start=None, objective=along, step=0.1, on_failure="ignore").eval(), Y[1:], X[1:])
        first, second = calls
        assert (first["rescue"], second["rescue"]) == (False, True)
        assert torch.equal(first["near"], Y[1:])
        assert torch.equal(second["near"], Y[1:])
        assert (second["known"].status == sn.Status.MAX_STEPS).all()

    def test_no_samples(self) -> None:
        assert solve(layer("all"), Y[:0], X[:0]).value.shape == (0, 2)

    def test_a_set_of_these_samples_alone(self) -> None:
        """Bounds with an entry a sample cannot be had for some of them: all stay where the rescue led."""
        radii = torch.tensor([[1.0], [1.0], [4.0]], dtype=torch.float64)
        ring = sn.Quadratic(torch.ones(1, 2), torch.zeros(1, 2), lower=radii) & sn.Box(-3.0, 3.0)
        made = sn.SnareLayer(ring, start=None, objective=along, step=None).eval()
        found = solve(made)
        assert found.converged.all()
        made.polishes = "none"
        assert torch.equal(found.value, solve(made).value)

    def test_the_best_of_several_has_another_candidate(self) -> None:
        made = sn.BestOfLayer(RING, along, 2, start=None).eval()
        found = solve(made, torch.cat([Y[:1], Y[1:2]], 1), X[:1])
        assert torch.equal(found.value, solve(layer("none"), Y[1:2], X[1:2]).value)


class TestTypical:
    """A set to which nothing leads from afar."""

    typical = torch.tensor([2.0], dtype=torch.float64)

    @staticmethod
    def walled() -> sn.Constraints:
        """[1.5, 2.5]; elsewhere g is flat, and does not say where the set is."""
        g = lambda y, x: torch.where((y - 2).abs() < 0.5, 1 + 0.1 * (y - 2), 0.0 * y - 1)  # noqa: E731
        return sn.Nonlinear(g, 1, 0.0)

    def test_nothing_else_led_there(self) -> None:
        y = torch.tensor([[-5.0], [2.1], [torch.nan]], dtype=torch.float64)
        lost = sn.SnareLayer(self.walled(), start=None, on_failure="ignore").eval()
        assert lost.solve(y).converged.tolist() == [False, True, False]
        found = sn.SnareLayer(self.walled(), start=None, typical=self.typical, on_failure="ignore").eval()
        solution = found.solve(y)
        assert solution.converged.tolist() == [True, True, False]
        assert torch.equal(solution.value[:2], torch.tensor([[2.0], [2.1]], dtype=torch.float64))
        assert torch.equal(solution.raw[:2], y[:2])
        assert solution.status[2] == sn.Status.NONFINITE
        assert (solution.steps >= lost.solve(y).steps).all()

    def test_not_in_training_and_not_without_the_rescue(self) -> None:
        y = torch.tensor([[-5.0]], dtype=torch.float64)
        made = sn.SnareLayer(self.walled(), start=None, typical=self.typical, on_failure="ignore")
        assert not made.train().solve(y).converged.any()
        made.options = sn.SnareLayer(self.walled(), start=None, rescue=False).options
        assert not made.eval().solve(y).converged.any()

    def test_bad_input(self) -> None:
        with pytest.raises(ValueError, match=r"`typical` must have shape \(2\), but got shape \(3,\)"):
            sn.SnareLayer(sn.Box(torch.zeros(2), torch.ones(2)), typical=torch.zeros(3))
