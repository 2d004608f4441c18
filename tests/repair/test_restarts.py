"""`restarts=`: samples that are stuck beside a set of several pieces begin elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.repair import repair as function
from snarenet.repair.rescue import Attempt, attempts, elsewhere
from snarenet.testing import assert_equal, draw

Y = torch.tensor([[-0.05, 0.3], [0.9, -0.2], [0.02, -0.4], [-2.5, 0.1]], dtype=torch.float64)
KINDS = pytest.mark.parametrize("start", [None, "auto"])


@pytest.fixture(autouse=True)
def _one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rescue's random moves would find another piece by themselves."""
    few = lambda *given: attempts(*given)[:2]  # noqa: E731
    monkeypatch.setitem(function.__globals__, "attempts", few)


def pieces(limit: Any = 0.8) -> sn.Constraints:
    """Two pieces of a line about -2 and 1, with a valley between them where a repair is stuck, in a strip."""

    def fn(y: Tensor, x: Any) -> Tensor:
        a = y[:, :1]
        hills = (-3 * (a - 1) ** 2).exp() + (-3 * (a + 2) ** 2).exp() + 0.5 * (-20 * a**2).exp()
        return torch.cat([hills - limit, y[:, 1:]], 1)

    return sn.Nonlinear(fn, 2, lower=[0.0, -0.5])


@KINDS
class TestRestarts:
    def test_what_is_stuck_gets_out(self, start: Any) -> None:
        first = sn.repair(pieces(), Y, start=start, rescue=True)
        assert first.converged.tolist() == [False, True, True, True]
        found = sn.repair(pieces(), Y, start=start, rescue=True, restarts=3)
        assert found.converged.all()
        assert pieces().violation(found.value).max() <= 1e-8
        assert torch.equal(found.value[1:], first.value[1:])  # these are left as they are
        assert torch.equal(found.steps[1:], first.steps[1:])
        assert found.steps[0] > first.steps[0]

    def test_the_nearest_counts(self, start: Any) -> None:
        """The first restart finds the far piece, the second the near one; others find no nearer point."""
        found = [sn.repair(pieces(), Y, start=start, rescue=True, restarts=k).value[0, 0] for k in (1, 2, 4)]
        assert found[0] < -1 < 0.7 < found[1]
        assert_equal(found[2], found[1], 1e-6)
        if start == "auto":  # of the far piece, the end that is nearer
            assert_equal(found[0], torch.tensor(-1.7272708599).double(), 1e-6)

    def test_reproducible_and_alone(self, start: Any) -> None:
        options: dict[str, Any] = {"start": start, "rescue": True, "restarts": 3}
        whole = sn.repair(pieces(), Y, **options)
        assert torch.equal(sn.repair(pieces(), Y, **options).value, whole.value)
        for i in range(len(Y)):
            assert_equal(sn.repair(pieces(), Y[i : i + 1], **options).value, whole.value[i : i + 1], 1e-9)

    def test_gradients(self, start: Any) -> None:
        limit = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

        def run(y: Tensor, limit: Tensor) -> Tensor:
            return sn.repair(pieces(limit), y, start=start, rescue=True, restarts=3, tol=1e-11).value

        assert torch.autograd.gradcheck(run, (Y[:2].clone().requires_grad_(), limit), atol=1e-5)


def test_an_empty_set_stays_empty() -> None:
    found = sn.repair(pieces(3.0), Y, rescue=True, restarts=2)
    assert not found.converged.any()
    plain = sn.repair(pieces(3.0), Y, rescue=True)
    assert (found.violation <= plain.violation).all()


def test_moves_have_the_size_of_their_variables() -> None:
    y = torch.tensor([[100.0, 0.01], [1.0, -50.0]], dtype=torch.float64)
    moves = torch.stack([(elsewhere(k, y) - y) / y.abs().clamp(min=1) for k in range(200)])
    assert_equal(moves[:, 0], moves[:, 1], 1e-12)
    assert ((moves.std(0) - 1).abs() < 0.2).all()
    assert len({tuple(move.flatten().tolist()) for move in moves}) == 200


def test_the_option() -> None:
    layer = sn.SnareLayer(pieces(), restarts=3)
    assert layer.options.restarts == 3
    assert layer(Y).isfinite().all()
    assert "and 3 restarts" in sn.explain(pieces(), Y, rescue=True, restarts=3).rescue
    assert sn.explain(pieces(), Y, restarts=1).rescue == "1 restart"
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="`restarts` must be a whole number >= 0"):
            sn.repair(pieces(), Y, restarts=wrong)
    assert isinstance(attempts(layer.options, pieces().at(Y), False)[0], Attempt)


def test_nothing_to_restart() -> None:
    box, y = sn.Box(0.0, 1.0), draw(5, 3, seed=1)
    assert torch.equal(sn.repair(box, y, restarts=5).value, y.clamp(0, 1))
