"""`SafeActions`: repair every action of a Gymnasium environment before it is executed.

    a = argmin |a - â|  so that  l(x) <= g(a, x) <= u(x),  low <= a <= high

with the agent's action â, x taken from the state in which it acts, and the bounds of the action space. What is judged
is what is executed, within the action space and in its dtype. So the repair goes to bounds that are tightened by the
tolerance, and, where rounding to float32 would break one, once more by what rounding can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from snarenet.constraints import Box, Constraints
from snarenet.constraints.base import Instance
from snarenet.layers import SnareLayer
from snarenet.repair.conflict import remember
from snarenet.repair.precision import judge
from snarenet.solution import RepairError, RepairWarning, Solution, Status, warn

try:
    import gymnasium
except ImportError as error:
    raise ImportError('`SafeActions` needs Gymnasium: pip install "snarenet[gymnasium]"') from error

Fallback = Callable[[Any, np.ndarray, Solution], Any]


class SafeActions(gymnasium.Wrapper):
    """An environment that executes no action outside a set; the nearest action in it takes its place.

    `info["safe_action"]` of every step says whether it `intervened`, at which `distance`, with which `status`, and what
    was `executed` with which `violation`. The agent sees the action space as it was, and the repair as a part of the
    environment. Wrap an environment before it is vectorised.

    Args:
        env: an environment whose actions are a `Box` of float32 or float64. Its bounds are kept as well.
        constraints: the set of actions, flattened to (1, n), that are allowed at x.
        context: function of the unwrapped environment that returns x before each step: an array, a tensor or a pytree
            of them, without a batch dimension. None: x is the last observation. An observation in float32 is not
            the state: where digits matter take x from the environment.
        on_failure: what to do where no allowed action was found: "raise" a `RepairError`; "warn" or "ignore", and
            execute the action with the least violation; or a function (environment, action, solution) that returns
            the action to execute, such as a backup controller.
        tol: largest violation that counts as allowed.
        **options: of `SnareLayer`, such as `weights` and `start`.

    Attributes:
        steps: how many actions were executed.
        interventions: how many of them were not those of the agent.
        failures: how many times no allowed action was found.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        constraints: Constraints,
        context: Callable[[Any], Any] | None = None,
        *,
        on_failure: Literal["raise", "warn", "ignore"] | Fallback = "raise",
        tol: float = 1e-8,
        **options: Any,
    ) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, gymnasium.spaces.Box) or space.dtype not in (np.float32, np.float64):
            raise TypeError(f"`env` must have actions in a Box of float32 or float64, but got {space}")
        if not callable(on_failure) and on_failure not in ("raise", "warn", "ignore"):
            raise ValueError(f"`on_failure` must be 'raise', 'warn', 'ignore' or a function, but got {on_failure!r}")
        self._range = tuple(torch.from_numpy(bound.reshape(1, -1).copy()) for bound in (space.low, space.high))
        self.constraints = Box(*(bound[0].to(torch.float64) for bound in self._range)) & constraints
        self.layer = SnareLayer(_Inside(self.constraints), tol=tol, on_failure="ignore", **options).eval()
        self.context, self.on_failure = context, on_failure
        self.steps = self.interventions = self.failures = 0
        self._seen: Any = None

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; counts go on."""
        self._seen, info = self.env.reset(**arguments)
        return self._seen, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Execute the nearest allowed action."""
        safe, told = self.safe(action)
        self._seen, reward, terminated, truncated, info = self.env.step(safe)
        self.steps += 1
        self.interventions += told["intervened"]
        return self._seen, reward, terminated, truncated, {**info, "safe_action": told}

    def safe(self, action: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """The action to execute in place of this one, and what is told about it; nothing is executed."""
        space = self.env.action_space
        asked = np.asarray(action, space.dtype).reshape(space.shape)
        x = tree_map(_batched, self._seen if self.context is None else self.context(self.unwrapped))
        y = torch.from_numpy(asked.reshape(1, -1).copy())
        status, violation = Status.CONVERGED, self._violation(y, x)
        executed = asked
        if not violation <= self.layer.tol:  # also where it is not a number
            solution = self._repair(y, x)
            status, executed = Status(int(solution.status)), solution.value.numpy().reshape(space.shape)
            if status is not Status.CONVERGED:
                executed = np.asarray(self._fall_back(asked, executed, solution), space.dtype).reshape(space.shape)
            violation = self._violation(torch.from_numpy(executed.reshape(1, -1)), x)
        told = {
            "intervened": not np.array_equal(asked, executed),
            "distance": float(np.linalg.norm((executed.astype(np.float64) - asked).ravel())),
            "status": status.name,
            "violation": violation,
            "executed": executed,
        }
        return executed, told

    def _violation(self, y: Tensor, x: Any) -> float:
        with torch.no_grad():
            return self.constraints.violation(y.to(torch.float64), x).item()

    def _repair(self, y: Tensor, x: Any) -> Solution:
        """The repair of y (1, n) to a value that can be executed."""
        tol = self.layer.tol
        solution = self._inside(y, x, torch.tensor(tol, dtype=torch.float64))
        if not bool(solution.converged):  # the set may be as thin as the tolerance
            return self._inside(y, x, torch.tensor(0.0, dtype=torch.float64))
        if float(solution.violation) > tol:  # by rounding
            reached = solution.value.to(torch.float64)
            margin = tol + torch.finfo(y.dtype).eps * self.constraints.at(reached, x).map.magnitudes(reached)
            again = self._inside(y, x, margin)
            solution = again if bool(again.converged) else solution
        return solution

    def _inside(self, y: Tensor, x: Any, margin: Tensor) -> Solution:
        """The repair to bounds tightened by a margin, clipped to the action space, and judged by the true bounds."""
        with torch.no_grad():
            found = self.layer.repair(y, (x, margin), 0.0)
            value = torch.clamp(found.value, *self._range)
            instance = self.constraints.at(value.to(torch.float64), x)
        verdict = judge(instance, value, self.layer.tol, torch.float64, found.status)
        return remember(found._replace(value=value, **verdict._asdict()), self.constraints, x, 0.0, self.layer.options)

    def _fall_back(self, asked: np.ndarray, nearest: np.ndarray, solution: Solution) -> Any:
        self.failures += 1
        if callable(self.on_failure):
            return self.on_failure(self.unwrapped, asked, solution)
        message = f"no allowed action was found after {self.steps} steps: {solution.describe()}"
        if self.on_failure == "raise":
            raise RepairError(message, solution)
        if self.on_failure == "warn":
            warn(message, RepairWarning)
        return nearest


class _Inside(Constraints):
    """A set with its inequalities tightened by a margin m, where they are that wide; its x is the pair (x, m)."""

    def __init__(self, inner: Constraints) -> None:
        super().__init__()
        self.inner, self.rows, self.size = inner, inner.rows, inner.size

    def value(self, y: Tensor, x: Any = None) -> Tensor:
        return self.inner.value(y, x[0])

    def bounds(self, x: Any = None) -> tuple[Tensor, Tensor]:
        x, margin = x
        return _tightened(*self.inner.bounds(x), margin)

    def at(self, y: Tensor, x: Any = None) -> Instance:
        x, margin = x
        instance = self.inner.at(y, x)
        lower, upper = _tightened(instance.lower, instance.upper, margin)
        return instance._replace(lower=lower, upper=upper)


def _tightened(lower: Tensor, upper: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
    margin = torch.where(upper - lower > 2 * margin, margin, 0.0)
    return lower + margin, upper - margin


def _batched(leaf: Any) -> Tensor:
    """A batch of one, in float64, of a number, an array or a tensor."""
    return torch.as_tensor(leaf).detach().to("cpu", torch.float64).unsqueeze(0)
