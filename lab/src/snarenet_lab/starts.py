"""Predictions to repair, near the set or far from it, for experiments and benchmarks alike."""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.constraints import Linear
from snarenet.problems import Problem


def start(problem: Problem, sigma: float, batch: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Predictions C^+ x + sigma N(0, I) for the test inputs x, and x: C^+ x solves the equalities C y = x.

    The problem is one whose equalities are the second and last part of its constraints: NCLP and all QCQP.
    """
    equalities = problem.constraints.parts[-1]
    if not isinstance(equalities, Linear) or not isinstance(equalities.A, Tensor):
        raise ValueError(f"`problem` must end with linear equalities, but {problem.name or 'this one'} does not")
    x = problem.split("test")[:batch]
    right = torch.linalg.pinv(equalities.A)
    noise = torch.randn(len(x), problem.size, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return x @ right.T + sigma * noise.to(x.device), x
