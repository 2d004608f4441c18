r"""`Supervised`: outputs that obey constraints and are near labels.

$$ \min_\theta \frac1N \sum_i \ell(\check y_i, t_i) \quad \text{s.t.} \quad
   l(x_i) \le g(\check y_i, x_i) \le u(x_i), \qquad
   \ell(y, t) = \frac1n \sum_j \Big( \frac{y_j - t_j}{\sigma_j} \Big)^2 $$

unless another loss is given, with $\sigma_j$ the deviation of target j in the data, so that 1 is the loss of one who
always says the mean. A target that is missing, NaN, is not scored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snarenet.constraints import Constraints
from snarenet.constraints.data import as_tensor, check_finite, describe
from snarenet.problems.base import Problem

Loss = Callable[[Tensor, Tensor], Tensor]


class Supervised(Problem):
    """Labelled data, for the trainer: `inputs` in it are x and its targets side by side, of which a model sees x.

    The data are split in their order, the last twelfth to test on, the one before it to choose weights by: shuffle
    what has no order in time.

    Args:
        constraints: the set that outputs obey, which sees x. Targets may be outside: noise moves them.
        x: (N, d) what outputs are predicted from.
        targets: (N, k) what they are compared with; NaN where one is missing.
        loss: (B,) of outputs (B, n) and targets (B, k), differentiable in the outputs; squared errors unless given.
        size: the n of outputs, where a loss compares them with targets of another size.
    """

    starts = 1

    def __init__(
        self, constraints: Constraints, x: Tensor, targets: Tensor, loss: Loss | None = None, size: int | None = None
    ) -> None:
        super().__init__()
        x, targets = check_finite("x", _data("x", x)), _data("targets", targets)
        if len(x) != len(targets):
            raise ValueError(f"`targets` must be as many as x, {len(x)}, but got {len(targets)}")
        self.features, self.size = x.shape[1], targets.shape[1] if size is None else size
        if loss is None and self.size != targets.shape[1]:
            raise ValueError(f"`targets` must have {self.size} columns, but got {describe(targets)}; or give a `loss`")
        if constraints.size not in (None, self.size):
            raise ValueError(f"`constraints` are on {constraints.size} outputs, but there are {self.size} of them")
        self.constraints, self.loss = constraints, loss
        self.register_buffer("inputs", torch.cat([x, targets], 1))
        spread = (targets - targets.nanmean(0)).square().nanmean(0).sqrt()
        self.register_buffer("deviation", torch.where(spread > 0, spread, 1.0))  # of one that never changes, or is not

    deviation: Tensor

    def targets(self, x: Tensor) -> Tensor:
        """(B, k) those of whole inputs."""
        return x[:, self.features :]

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        targets = self.targets(x)
        if self.loss is not None:
            return self.loss(y, targets)
        known = ~targets.isnan()
        error = torch.where(known, y - targets, 0.0) / self.deviation
        return error.square().sum(1) / known.sum(1).clamp(min=1)

    @property
    def solvable(self) -> bool:
        """No: targets are not known when outputs are asked for, and no solver gets closer to them."""
        return False


def _data(name: str, value: Tensor) -> Tensor:
    data = as_tensor(name, value).to(torch.float64)
    if data.ndim != 2:
        raise ValueError(f"`{name}` must have shape (N, {'d' if name == 'x' else 'k'}), but got {describe(data)}")
    if bool(data.isinf().any()):
        raise ValueError(f"`{name}` must be finite, but it holds infinity")
    return data
