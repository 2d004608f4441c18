"""A problem whose solutions and multipliers are known in closed form, and its evaluation in a run folder.

    min 1/2 |y - x|^2   s.t.   y_0 + y_1 + y_2 = 0,   -1 <= y <= 1,      x = (t, 0, 0), predicted as it is.

With nu for the equality and mu for the box, y - x + nu + mu = 0. For |t| <= 3/2 the box is inactive: nu = t/3. Beyond,
y = s (1, -1/2, -1/2) with s the sign of t, nu = s/2, and mu_0 = t - 3s/2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import snarenet as sn
from snarenet.training import Evaluation

T = np.array([0.3, 3.0, -3.0, -1.2, 2.5])
GAP = np.array([0.1, 0.4, 0.2, -0.3, 0.3])  # what the references leave; a reference of its own is missing below
TOL = 1e-9


class Projection(sn.Problem):
    def __init__(self, t: np.ndarray = T) -> None:
        super().__init__()
        self.constraints = sn.Linear(torch.ones(1, 3, dtype=torch.float64), equals=0.0) & sn.Box(-1.0, 1.0)
        self.size, self.inputs = 3, torch.zeros(12 * len(t), 3, dtype=torch.float64)
        self.inputs[-len(t) :, 0] = torch.as_tensor(t)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (y - x).square().sum(1)


def optimum(t: float) -> tuple[np.ndarray, np.ndarray]:
    """(y, multipliers of the four rows)."""
    if abs(t) <= 1.5:
        return np.array([t, 0, 0]) - t / 3, np.array([t / 3, 0, 0, 0])
    s = np.sign(t)
    return s * np.array([1, -0.5, -0.5]), np.array([s / 2, t - 1.5 * s, 0, 0])


def evaluation(closeups: int = 100, problem: Projection | None = None, gap: np.ndarray | None = GAP) -> Evaluation:
    problem = problem or Projection()
    model = sn.ConstrainedModel(
        torch.nn.Identity(), sn.SnareLayer(problem.constraints, start=sn.Nearest(), tol=TOL)
    ).double()
    best = None
    if gap is not None:
        x = problem.split("test")
        y = torch.tensor(np.stack([optimum(t)[0] for t in x[:, 0].tolist()]))
        best = problem.objective(y, x) - torch.tensor(gap)
    return sn.evaluate(model, problem, reference=best, timed=False, closeups=closeups)


def write_folder(path: Path, found: Evaluation) -> Path:
    """A run folder that was evaluated."""
    run = sn.Run.create(path, sn.TrainConfig(), Projection())
    run.save_evaluation(*found)
    return path
