"""The collection of systems: every one has the shapes, derivatives and feasible points that it claims."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from snarenet_lab.bench.feasibility import TOLERANCE, Ipopt, Slsqp
from snarenet_lab.systems import SYSTEMS, System

NAMES = [system.name for system in SYSTEMS]
EACH = pytest.mark.parametrize("system", SYSTEMS, ids=NAMES)


def violation(system: System, y: np.ndarray) -> float:
    return system.constraints().violation(torch.from_numpy(y).unsqueeze(0)).item()


@EACH
def test_batched_and_finite(system: System) -> None:
    starts, size, rows = system.starts(), len(system.guess), system.rows()
    value, slope = system.value(starts), system.jacobian(starts)
    assert (starts.shape, value.shape, slope.shape) == ((7, size), (7, rows), (7, rows, size))
    torch.testing.assert_close(starts[:1], system.start, rtol=0, atol=0)
    assert starts.unique(dim=0).shape[0] == 7
    assert bool(value.isfinite().all() and slope.isfinite().all())  # also on the edge of a domain
    alone = torch.cat([system.value(start.unsqueeze(0)) for start in starts])
    torch.testing.assert_close(value, alone, rtol=1e-14, atol=0)
    lower, upper = system.constraints().bounds()
    assert bool((lower <= upper).all())


@EACH
def test_casadi_reads_the_same_function(system: System) -> None:
    solver = Slsqp(system)
    for y in system.starts():
        expected = system.value(y.unsqueeze(0))[0].numpy()
        scale = 1e-13 * (1 + np.abs(expected).max())
        np.testing.assert_allclose(solver.value(y.numpy()), expected[:, None], rtol=1e-10, atol=scale)
        expected = system.jacobian(y.unsqueeze(0))[0].numpy()
        scale = 1e-13 * (1 + np.abs(expected).max())
        np.testing.assert_allclose(solver.slope(y.numpy()), expected, rtol=1e-10, atol=scale)


@EACH
def test_feasible(system: System) -> None:
    start = system.start[0].numpy()
    assert violation(system, start) > TOLERANCE  # else there is nothing to find
    if system.point is not None:
        assert violation(system, np.array(system.point, dtype=float)) <= TOLERANCE
    else:
        found = (Ipopt(system, nearest)(start).y for nearest in (True, False))
        assert any(violation(system, y) <= TOLERANCE for y in found)


def test_halves() -> None:
    assert len(set(NAMES)) == len(SYSTEMS) >= 70
    assert sum(system.source == "Hock-Schittkowski" for system in SYSTEMS) >= 30
    held = sum(system.held_out for system in SYSTEMS)
    assert abs(len(SYSTEMS) - 2 * held) <= 5  # one for each group that begins with a system to develop on
    assert not SYSTEMS[0].held_out
    assert SYSTEMS[1].held_out


def test_starts_are_those_of_a_seed() -> None:
    system = next(system for system in SYSTEMS if system.name == "weak acid")
    torch.testing.assert_close(system.starts(), system.starts(), rtol=0, atol=0)
    assert system.starts(seeds=2, spreads=(0.5,)).shape == (3, 4)
    apart = (system.starts() - system.start).abs() / system.start  # in units of the variable
    assert 0.01 < apart[1:4].mean() < 0.2
    assert 0.3 < apart[4:].mean() < 2


def test_starts_stay_in_the_domain() -> None:
    system = next(system for system in SYSTEMS if system.name == "log beside its pole")
    low, _ = system.limits()
    assert bool((system.starts() >= low).all())
    assert bool((system.starts() == low).any())  # some were drawn outside


class TestSolvers:
    def test_least_change(self) -> None:
        """The disc of radius 2 from (3, 4)."""
        system = System("disc", "ours", lambda a, b: [a**2 + b**2], (3, 4), -np.inf, 4)
        for solver in (Ipopt(system, nearest=True), Slsqp(system)):
            np.testing.assert_allclose(solver(np.array([3.0, 4.0])).y, [1.2, 1.6], atol=1e-6)
            assert solver(np.array([3.0, 4.0])).steps > 0

    def test_more_equations_than_variables(self) -> None:
        system = next(system for system in SYSTEMS if system.name == "Beale")
        for solver in (Ipopt(system, nearest=True), Ipopt(system, nearest=False), Slsqp(system)):
            assert violation(system, solver(np.array([2.9, 0.45])).y) <= TOLERANCE
