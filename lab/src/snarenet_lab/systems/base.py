r"""`System`: find y with $l \le g(y) \le u$ from a given start. The g is written once, for us and for IPOPT.

A function of the collection takes the variables one by one and returns its rows one by one, in operators and methods
(`y.exp()`, `y.sqrt()`, ...) that torch's tensors share with CasADi's symbols.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet.reference.program import need

INF = math.inf
Numbers = float | Sequence[float]  # one for each row or variable, or one for all


@dataclass(frozen=True, eq=False)
class System:
    """A nonlinear feasibility problem.

    Attributes:
        name: what it is called.
        source: where it is from.
        fn: the variables to the rows, see above.
        guess: the standard start, a number for each variable.
        lower: bounds of the rows; equations g(y) = 0 unless given, as most systems are.
        upper: likewise.
        box: bounds of the variables, if there are any.
        point: a point of the set to 1e-6, where one is known; a solver must show the others to be feasible.
        domain: are the rows defined within the box alone? Then starts drawn at random are moved into it.
        held_out: is it kept for judging settings, which were found on the other half?
    """

    name: str
    source: str
    fn: Callable[..., Sequence[Any]]
    guess: Sequence[float]
    lower: Numbers = 0.0
    upper: Numbers = 0.0
    box: tuple[Numbers, Numbers] | None = None
    point: Sequence[float] | None = None
    domain: bool = False
    held_out: bool = False

    @property
    def start(self) -> Tensor:
        """(1, n) the standard start."""
        return torch.tensor([self.guess], dtype=torch.float64)

    def starts(self, seeds: int = 3, spreads: Sequence[float] = (0.1, 1.0)) -> Tensor:
        """(1 + seeds * len(spreads), n) the standard start, and around it some that are drawn with these spreads.

        The unit is the variable's size at the start; where that is 0, the size of the others, or 1.
        """
        start = self.start
        sizes = start.abs()
        typical = sizes[sizes > 0].mean() if bool((sizes > 0).any()) else 1.0
        unit = torch.where(sizes > 0, sizes, typical)
        rng = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        noise = torch.randn(seeds * len(spreads), len(self.guess), generator=rng, dtype=torch.float64)
        drawn = start + torch.tensor(spreads, dtype=torch.float64).repeat_interleave(seeds).unsqueeze(1) * unit * noise
        if self.domain:
            drawn = drawn.clamp(*self.limits())
        return torch.cat([start, drawn])

    def rows(self) -> int:
        """How many rows g has."""
        return len(self.fn(*self.start.unbind(1)))

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the rows, each (m,)."""
        return _spread(self.lower, self.rows()), _spread(self.upper, self.rows())

    def limits(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the variables, each (n,); infinite where there are none."""
        low, high = self.box or (-INF, INF)
        return _spread(low, len(self.guess)), _spread(high, len(self.guess))

    def value(self, y: Tensor) -> Tensor:
        """(B, m) the rows g at y (B, n)."""
        return torch.stack(list(self.fn(*y.unbind(1))), 1)

    def jacobian(self, y: Tensor) -> Tensor:
        """(B, m, n) its derivative, by rows: forward mode is 15 times slower where operations are many and small."""
        value, pull, *_ = torch.func.vjp(self.value, y)
        weights = torch.eye(value.shape[1], dtype=y.dtype, device=y.device).unsqueeze(1).expand(-1, len(y), -1)
        return torch.func.vmap(lambda w: pull(w)[0], out_dims=1)(weights)

    def constraints(self) -> sn.Constraints:
        """The set, for a repair."""
        lower, upper = self.bounds()
        fn, jacobian = (lambda y, x: self.value(y)), (lambda y, x: self.jacobian(y))
        rows = sn.Nonlinear(fn, self.rows(), lower, upper, jacobian=jacobian)
        return rows if self.box is None else rows & sn.Box(*self.limits())


def reaching(
    name: str,
    source: str,
    fn: Callable[..., Sequence[Any]],
    guess: Sequence[float],
    point: Sequence[float],
    **more: Any,
) -> System:
    """The system fn(y) = fn(point)."""
    aim = torch.stack(list(fn(*torch.tensor(point, dtype=torch.float64)))).tolist()
    return System(name, source, fn, guess, aim, aim, point=point, **more)


def between(first: float, y: Sequence[Any], *last: float) -> list[Any]:
    """The variables with the values that are known at their ends."""
    return [first, *y, *last]


def angle(y: Any, x: Any) -> Any:
    """The angle of the vector (x, y); the one function that the two have by no common name."""
    return torch.atan2(y, x) if isinstance(y, Tensor) else need("casadi").atan2(y, x)


def _spread(numbers: Numbers, count: int) -> Tensor:
    """(count,) the numbers."""
    return torch.as_tensor(numbers, dtype=torch.float64).expand(count).clone()
