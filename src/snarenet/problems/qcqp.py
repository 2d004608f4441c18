r"""QCQP: a quadratic objective under quadratic inequalities and linear equalities, convex or not,

$$ \min_y \tfrac12 y^\top Q y + p^\top y \quad \text{s.t.} \quad y^\top H_i y + G_i y \le h_i, \; A y = x, $$

with h so large that $y = A^+ x$ is feasible for every input of the data set. The diagonal of H_i is drawn between two
numbers: both >= 0 gives a convex set, a negative lower one a non-convex set.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints import Linear, Quadratic
from snarenet.problems.base import uniform
from snarenet.problems.separable import Separable


class QCQP(Separable):
    """The family above; Q is diagonal."""

    def __init__(
        self,
        size: int = 100,
        inequalities: int = 50,
        equalities: int = 50,
        curvature: tuple[float, float] = (0.0, 0.1),
        instances: int = 10_000,
        seed: int = 2025,
    ) -> None:
        super().__init__()
        self.check(size, inequalities, equalities, instances, seed)
        if not -math.inf < curvature[0] <= curvature[1] < math.inf:
            raise ValueError(f"`curvature` must be a finite range (low, high), but got {curvature!r}")
        self.size = size
        draw = np.random.RandomState(seed)
        q, p = 0.5 * draw.random_sample(size), draw.uniform(-1, 1, size)
        A = draw.uniform(-1, 1, (equalities, size))
        inputs = draw.uniform(-0.5, 0.5, (instances, equalities))
        G = draw.uniform(-1, 1, (inequalities, size))
        H = draw.uniform(*curvature, (inequalities, size))
        right = np.linalg.pinv(A)
        radius = np.linalg.norm(inputs, axis=1).max()
        bend = np.linalg.norm(np.einsum("ji,mj,jk->mik", right, H, right), ord=2, axis=(1, 2))
        h = bend * radius**2 + np.linalg.norm(G @ right, axis=1) * radius + 0.1
        self.store(inputs, square=q, linear=p)
        self.convex = curvature[0] >= 0
        # `ncqcqp`: eight are more than enough. `ncqcqp-hard`: one misses the best of 32 in 23 % of the instances, eight
        # in 12 %, sixteen in 7 %.
        self.starts = 1 if self.convex else 8
        self.constraints = Quadratic(H, G, upper=h) & Linear(A, equals=lambda x: x)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        side = 0.5 * torch.ones_like(self.inputs[0])
        return uniform(count, -side, side, generator)
