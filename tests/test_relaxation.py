"""AdaRel: what is measured, how it decays, and that it survives an interruption."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import snarenet as sn
from snarenet.testing import draw

A = draw(3, 4, seed=1)


def model(dropout: float = 0.0) -> sn.ConstrainedModel:
    torch.manual_seed(0)
    net = sn.MLP(2, 4, width=8, dropout=dropout, batch_norm=bool(dropout)).double()
    return sn.ConstrainedModel(net, sn.SnareLayer(sn.Linear(A, upper=-0.1)))


x = draw(50, 2, seed=2)


def test_measures_the_largest_violation_of_each_constraint() -> None:
    m, relaxation = model(), sn.AdaptiveRelaxation(epochs=10)
    expected = torch.relu(m.net(x) @ A.T + 0.1).amax(0).detach()
    torch.testing.assert_close(relaxation.measure(m, x), expected)
    torch.testing.assert_close(relaxation.measure(m, x.split(7)), expected)
    torch.testing.assert_close(relaxation.at(0), expected)


def test_a_quantile_instead_of_the_largest() -> None:
    m, relaxation = model(), sn.AdaptiveRelaxation(epochs=10, quantile=0.5)
    violations = torch.relu(m.net(x) @ A.T + 0.1).detach()
    expected = torch.quantile(violations, 0.5, dim=0, interpolation="higher")
    torch.testing.assert_close(relaxation.measure(m, x), expected)


def test_per_sample() -> None:
    m, relaxation = model(), sn.AdaptiveRelaxation(epochs=10, per_sample=True)
    assert relaxation.measure(m, x).shape == (50, 3)
    index = torch.tensor([4, 9])
    torch.testing.assert_close(relaxation.at(5, index), torch.relu(m.net(x[index]) @ A.T + 0.1).detach() / 2)
    with pytest.raises(ValueError, match="`index` must name"):
        relaxation.at(5)
    m(x[index], relax=relaxation.at(5, index))


def test_measuring_leaves_the_model_as_it_was() -> None:
    """Eval mode: no dropout, no update of running statistics; and training mode afterwards."""
    m = model(dropout=0.5)
    before = {name: tensor.clone() for name, tensor in m.state_dict().items()}
    first = sn.AdaptiveRelaxation(5).measure(m, x)
    assert torch.equal(first, sn.AdaptiveRelaxation(5).measure(m, x))
    assert m.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in m.state_dict().items())


@pytest.mark.parametrize("decay", ["linear", "cosine", "harmonic"])
def test_decays_continuously_from_one_to_zero(decay: str) -> None:
    relaxation = sn.AdaptiveRelaxation(epochs=20, decay=decay, start=5)
    factors = [relaxation.factor(epoch) for epoch in range(30)]
    assert factors[:6] == [1.0] * 6
    assert all(a > b for a, b in pairwise(factors[5:26]))
    assert factors[25:] == [0.0] * 5
    assert relaxation.factor(25 - 1e-9) < 1e-7  # no jump at the end
    assert relaxation.at(25) == 0.0


def test_linear_is_the_papers() -> None:
    relaxation = sn.AdaptiveRelaxation(epochs=500)
    assert relaxation.factor(100) == pytest.approx(0.8)


def test_none_at_all() -> None:
    assert sn.AdaptiveRelaxation(epochs=0).at(0) == 0.0


def test_goes_on_after_an_interruption() -> None:
    m, relaxation = model(), sn.AdaptiveRelaxation(epochs=10)
    relaxation.measure(m, x)
    holder = nn.ModuleDict({"model": m, "relaxation": relaxation})
    fresh = nn.ModuleDict({"model": model(), "relaxation": sn.AdaptiveRelaxation(epochs=10)})
    fresh.load_state_dict(holder.state_dict())
    assert torch.equal(fresh["relaxation"].at(3), relaxation.at(3))
    finished = sn.AdaptiveRelaxation(epochs=10)
    finished.load_state_dict(relaxation.state_dict())  # the state of a finished run loads as well
    assert finished.at(10) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": -1}, "`epochs` and `start`"),
        ({"epochs": 1, "decay": "cubic"}, "`decay` must be one of"),
        ({"epochs": 1, "quantile": 2.0}, "`quantile` must be between"),
        ({"epochs": 1, "quantile": 0.5, "per_sample": True}, "leave it at 1"),
    ],
)
def test_bad_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        sn.AdaptiveRelaxation(**arguments)


def test_use_before_measuring() -> None:
    with pytest.raises(RuntimeError, match="call `measure`"):
        sn.AdaptiveRelaxation(5).at(0)
    with pytest.raises(ValueError, match="no batch"):
        sn.AdaptiveRelaxation(5).measure(model(), [])


def test_a_network_that_is_already_broken() -> None:
    m = model()
    with torch.no_grad():
        m.net[0].weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="not all finite"):
        sn.AdaptiveRelaxation(5).measure(m, x)
    assert m.training


def test_measured_as_in_training_it_holds_what_the_first_step_predicts() -> None:
    """In eval mode batch norm starts as the identity, and shrinks what training will predict."""
    torch.manual_seed(0)
    net = sn.MLP(2, 4, width=8, batch_norm=True).double()
    m = sn.ConstrainedModel(net, sn.SnareLayer(sn.Linear(A, upper=-0.1)))
    relaxation = sn.AdaptiveRelaxation(epochs=10)
    x = draw(50, 2, scale=0.1)
    batches = x.tensor_split(5)
    violations = torch.cat([torch.relu(net.train()(batch) @ A.T + 0.1) for batch in batches]).detach()
    assert (violations > relaxation.measure(m.eval(), x)).any()
    assert (violations <= relaxation.measure(m.eval(), batches, training=True) + 1e-12).all()
    assert not m.training
