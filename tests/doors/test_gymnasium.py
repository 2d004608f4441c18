"""`SafeActions`: no step of an environment violates, whoever acts."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn

gymnasium = pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")

from snarenet.doors.gymnasium import SafeActions  # noqa: E402

TIME, RADIUS, BRAKE = 0.1, 1.0, 0.9


class Around(gymnasium.Env):
    """A double integrator in the plane that wants to be at (-3, 0), behind a disk at the origin.

    position += TIME velocity + TIME² / 2 action, velocity += TIME action, with |action_i| <= 1.
    """

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, dtype: type = np.float32) -> None:
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), dtype)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time, self.state = 0, np.array([3.0, self.np_random.uniform(-1, 1), -1.0, 0.0])
        return self.state.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        self.before, self.action = self.state, action.astype(np.float64)
        position, velocity = self.state[:2], self.state[2:]
        position = position + TIME * velocity + TIME**2 / 2 * self.action
        self.state, self.time = np.concatenate([position, velocity + TIME * self.action]), self.time + 1
        cost = np.linalg.norm(position - [-3.0, 0.0]) + 0.1 * np.linalg.norm(velocity)
        return self.state.astype(np.float32), -float(cost), False, self.time >= 100, {}


def clearance(a: Tensor, x: Tensor) -> Tensor:
    """A discrete barrier: after the step, the way to the disk is as long as it takes to brake."""
    position = x[:, :2] + TIME * x[:, 2:] + TIME**2 / 2 * a
    distance = position.square().sum(1, keepdim=True).sqrt()
    closing = torch.relu(-(position * (x[:, 2:] + TIME * a)).sum(1, keepdim=True) / distance)
    return distance - RADIUS - closing.square() / (2 * BRAKE)


def barrier() -> sn.Constraints:
    return sn.Nonlinear(clearance, rows=1, lower=0.0)


def state(env: Around) -> np.ndarray:
    return env.state


class Witness(gymnasium.Wrapper):
    """Inside the filter: the worst of what the environment was really given, and how near it came."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.worst, self.nearest, self.executed = 0.0, np.inf, 0

    def step(self, action: np.ndarray) -> tuple:
        result, env = self.env.step(action), self.unwrapped
        value = clearance(torch.from_numpy(env.action)[None], torch.from_numpy(env.before)[None]).item()
        outside = np.abs(env.action).max() - 1.0
        self.worst, self.executed = max(self.worst, -value, outside), self.executed + 1
        self.nearest = min(self.nearest, np.linalg.norm(env.state[:2]))
        return result


def towards_goal(env: gymnasium.Env, generator: np.random.Generator) -> np.ndarray:
    """A random policy that wants to go through the disk."""
    push = np.array([-3.0, 0.0]) - env.unwrapped.state[:2]
    noise = generator.normal(size=2)
    return np.clip(push / np.linalg.norm(push) + noise, -1, 1).astype(env.action_space.dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("start", "steps"), [(None, 1000), ("auto", 200)])
def test_no_step_of_a_random_policy_violates(dtype: type, start: Any, steps: int) -> None:
    witness, generator = Witness(Around(dtype)), np.random.default_rng(0)
    env = SafeActions(witness, barrier(), state, start=start)
    env.reset(seed=0)
    told = []
    for _ in range(steps):
        *_, truncated, info = env.step(towards_goal(env, generator))
        told.append(info["safe_action"])
        if truncated:
            env.reset()
    assert witness.executed == env.steps == steps
    assert witness.worst <= 1e-8
    assert max(one["violation"] for one in told) <= 1e-8
    assert 1.0 - 1e-8 <= witness.nearest < 1.2  # it came near, and was kept out
    assert steps / 20 < env.interventions == sum(one["intervened"] for one in told) < steps
    assert all((one["distance"] > 0) == one["intervened"] for one in told)
    assert env.failures == 0
    assert {one["status"] for one in told} == {"CONVERGED"}


def test_without_the_filter_it_does() -> None:
    env, generator = Witness(Around()), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(100):
        env.step(towards_goal(env, generator))
    assert env.worst > 0.1
    assert env.nearest < 0.9


def test_no_step_of_ppo_violates() -> None:
    stable_baselines3 = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")
    witness = Witness(Around())
    env = SafeActions(witness, barrier(), state)
    agent = stable_baselines3.PPO("MlpPolicy", env, n_steps=256, n_epochs=2, seed=0, device="cpu")
    agent.learn(1024)
    assert witness.executed == env.steps == 1024
    assert env.interventions > 20
    assert witness.worst <= 1e-8


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_nearest_allowed_action(dtype: type) -> None:
    """On a disk of radius 1/2 it is the projection; an action of the space that is allowed stays as it is."""
    env = SafeActions(Around(dtype), sn.Quadratic(torch.ones(1, 2), upper=0.25))
    env.reset(seed=0)
    executed, told = env.safe(np.array([0.8, 0.6]))
    assert executed.dtype == dtype
    np.testing.assert_allclose(executed, [0.4, 0.3], atol=3e-7 if dtype == np.float32 else 1e-8)
    assert told["violation"] <= 1e-8
    assert told["distance"] == pytest.approx(0.5, abs=1e-6)
    allowed = np.array([0.25, -0.25], dtype)
    executed, told = env.safe(allowed)
    assert np.array_equal(executed, allowed)
    assert not told["intervened"]


def test_x_is_the_observation_unless_given() -> None:
    env = SafeActions(Around(np.float64), sn.Box(None, lambda x: x[:, [1, 1]] / 4))
    seen, _ = env.reset(seed=1)
    executed, _ = env.safe(np.ones(2))
    np.testing.assert_allclose(executed, seen[1] / 4, rtol=0, atol=2e-8)


class TestNoAllowedAction:
    nowhere = sn.Linear(torch.ones(1, 2), lower=5.0)  # the largest sum of actions is 2

    def env(self, on_failure: Any) -> SafeActions:
        env = SafeActions(Around(np.float64), self.nowhere, on_failure=on_failure)
        env.reset(seed=0)
        return env

    def test_raises(self) -> None:
        env = self.env("raise")
        with pytest.raises(sn.RepairError, match=r"no allowed action.*STALLED") as caught:
            env.step(np.zeros(2))
        assert env.steps == 0
        assert "Linear row 0 (>= 5)" in str(caught.value.solution.conflict())

    def test_warns_and_violates_least(self) -> None:
        env = self.env("warn")
        with pytest.warns(sn.RepairWarning, match="no allowed action"):
            *_, info = env.step(np.zeros(2))
        told = info["safe_action"]
        np.testing.assert_allclose(told["executed"], 1.0, atol=1e-6)
        assert told["violation"] == pytest.approx(3.0, abs=1e-5)
        assert told["status"] == "STALLED"

    def test_a_backup_controller(self) -> None:
        env = self.env(lambda env, action, solution: [-0.5, 0.5])
        *_, info = env.step(np.zeros(2))
        assert info["safe_action"]["executed"].tolist() == [-0.5, 0.5]
        assert (env.steps, env.failures) == (1, 1)

    def test_an_action_that_is_no_number(self) -> None:
        with pytest.raises(sn.RepairError, match="NONFINITE"):
            self.env("raise").step(np.array([np.nan, 0.0]))


def test_equalities_hold_to_what_the_action_space_can_hold() -> None:
    env = SafeActions(Around(), sn.Linear([[1.0, 0.3]], equals=0.1))
    env.reset(seed=0)
    _, told = env.safe(np.array([0.7, 0.2]))
    assert told["status"] == "CONVERGED"
    assert told["violation"] <= 1e-7


@pytest.mark.parametrize(("dtype", "worst"), [(np.float64, 1e-8), (np.float32, 2e-7)])
def test_a_set_as_thin_as_the_tolerance(dtype: type, worst: float) -> None:
    """Both rows are inequalities, with no room for a margin: what is executed is judged all the same."""
    env = SafeActions(Around(dtype), sn.Linear([[1.0, 0.3], [1.0, 0.3]], lower=[0.1, -9.0], upper=[9.0, 0.1]))
    env.reset(seed=0)
    executed, told = env.safe(np.array([0.7, 0.2]))
    assert told["status"] == "CONVERGED"
    assert told["violation"] == pytest.approx(abs(executed.astype(np.float64) @ [1.0, 0.3] - 0.1), abs=1e-12)
    assert told["violation"] <= worst


def test_what_it_cannot_take() -> None:
    with pytest.raises(TypeError, match=r"Box of float32 or float64, but got Discrete"):
        SafeActions(gymnasium.make("CartPole-v1"), barrier())
    with pytest.raises(ValueError, match=r"`on_failure` must be 'raise'.* but got 'last'"):
        SafeActions(Around(), barrier(), on_failure="last")
