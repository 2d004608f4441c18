r"""NCLP: a non-convex objective under linear constraints,

$$ \min_y \tfrac12 y^\top Q y + p^\top \sin y \quad \text{s.t.} \quad A y \le b, \; C y = x, $$

with b so large that $y = C^+ x$ is feasible for every x in the cube $[-1, 1]^{m}$. All arrays come from one seed, in a
fixed order, so that results can be compared with the paper's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints import Linear
from snarenet.problems.base import uniform
from snarenet.problems.separable import Separable


class NCLP(Separable):
    """The family above; Q is diagonal."""

    starts = 1  # seven more improved none of the first 60 test instances by 1e-7: the constraints leave one optimum

    def __init__(
        self, size: int = 100, inequalities: int = 50, equalities: int = 50, instances: int = 10_000, seed: int = 2025
    ) -> None:
        super().__init__()
        self.check(size, inequalities, equalities, instances, seed)
        self.size = size
        draw = np.random.RandomState(seed)
        q, p = draw.random_sample(size), draw.random_sample(size)
        A, C = draw.normal(0, 1, (inequalities, size)), draw.normal(0, 1, (equalities, size))
        b = np.abs(A @ np.linalg.pinv(C)).sum(1)
        inputs = draw.uniform(-1, 1, (instances, equalities))
        self.store(inputs, square=q, sine=p)
        self.constraints = Linear(A, upper=b) & Linear(C, equals=lambda x: x)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        side = torch.ones_like(self.inputs[0])
        return uniform(count, -side, side, generator)
