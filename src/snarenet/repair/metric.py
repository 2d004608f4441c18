r"""`Metric`: the variables in which a repair takes its steps, if distances are measured by weights W.

With $z = W^{1/2} y$, that is $y = s z$ with $s = W^{-1/2}$, a plain step on z is one in the metric of W on y:

$$ y \leftarrow y - W^{-1} J^\top w, \qquad (J W^{-1} J^\top + \lambda D)\, w = r, \qquad
   D_{ii} = J_i W^{-1} J_i^\top, $$

of all steps that reduce the violation as much, the one with the least $\|d\|_W$. So engines need not know of it: maps
change their units (`constraints/maps/scaled.py`), rows and bounds keep theirs, and what was found is taken back. Only
ratios of weights matter: the largest counts as 1, so that no row is shorter in z than in y (the loop holds short rows
to a stricter tolerance).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from snarenet.constraints.maps import Map, scaled
from snarenet.memo import Memo
from snarenet.repair.options import Options, check_weights
from snarenet.repair.stopping import inner_tolerance, slack


class Metric:
    """A change of variables.

    Attributes:
        scale: (n,) s, in the precision of the repair; at least 1.
        units: (n,) the same with a mean square of 1. What is dear to move is large in z, and would hide how far the
            others have to go: a distance on z is compared with the size of y, in units of s.
        memo: keeps what is computed once in these variables.
    """

    def __init__(self, weights: Tensor, dtype: torch.dtype) -> None:
        squares = weights.detach().to(torch.float64)
        scale = (squares.max() / squares).sqrt()
        self.scale, self.units = scale.to(dtype), (scale / scale.square().mean().sqrt()).to(dtype)
        self.memo = Memo()

    def map(self, given: Map) -> Map:
        """The same rows on z."""
        return scaled(given, self.scale, self.memo)

    def into(self, y: Tensor) -> Tensor:
        """z of y (B, n)."""
        if y.device != self.scale.device:
            raise ValueError(f"`weights` are on {self.scale.device}, but `y` is on {y.device}: move them with .to()")
        return y / self.scale

    def back(self, z: Tensor, y: Tensor) -> Tensor:
        """y of z, where it began at y: an entry that did not move is the same to the last bit."""
        moved = z * self.scale
        return moved + torch.where(z == y / self.scale, y - moved, 0.0).detach()

    def stricter(self, options: Options) -> Options:
        """Options for an engine on z, which leave room for what rounding does to a residual on the way back."""
        tol = max(inner_tolerance(options.tol, slack(options.dtype)), min(options.tol, options.finest))
        return options if tol == options.tol else replace(options, tol=tol)

    def __str__(self) -> str:
        return f"by `weights`, the largest {float(self.scale.max().square()):.3g} times the least"


def metric_of(
    options: Options, memo: Memo, weights: Tensor | None, size: int | None, power: float = 1.0
) -> Metric | None:
    """The metric of the repair's steps for y of `size` entries, made and checked once; None for plain distances.

    It is that of a `power` of the weights.
    """
    check_weights(weights)
    if weights is None:
        return None

    def build() -> Metric:
        check_weights(weights, size, numbers=True)
        return Metric(weights.detach().pow(power), options.dtype)

    return memo.get(("metric", size, options.dtype, power), (weights,), build)
