"""The rescue: what is tried for samples that did not converge, one attempt after the other.

Where there are weights, equal ones are tried first: a metric that suits the objective may be a bad one to reach the set
in. Another metric has other points at which no step helps, so the next two go on from the best point so far, with equal
weights and with the inverse of their fourth roots: what was dear is cheap. Where the damping went at a pace of its own,
its schedule is next. Every attempt after that keeps to the box and searches for its damping (`loop/bounded.py`). The
first three begin at the start of the repair, and differ in how rows are weighed and in how bold the first step is; the
others at the best point so far, moved a little at random, since a stationary point may be one of symmetry alone. Random
directions come from a fixed seed and are the same for all samples: what becomes of one never depends on its batch.

Where nearly dependent rows bar each other's way, so that each step mends one and breaks its neighbours, interior-point
steps with all rows (`start/interior.py`) get through. They begin at the prediction and lead to the nearest point: for
certain where all rows are linear, which is why they come first there, and last elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snarenet.constraints import Instance
from snarenet.damping import Adaptive, Annealed
from snarenet.repair.options import Options


@dataclass(frozen=True)
class Attempt:
    """One more way to the set.

    Attributes:
        scaled: weigh rows by their lengths at each step; else all alike.
        damping: where the search for the damping begins; None for no search, but the schedule of the repair.
        kick: how far to move from the best point, in units of each variable's size; None to begin at the start.
        power: of the weights, in whose metric it is; with another one than 1 it is otherwise as the repair was.
        straight: by interior-point steps to the nearest point; nothing else of this counts then.
    """

    scaled: bool = True
    damping: float | None = 1.0
    kick: float | None = None
    power: float = 1.0
    straight: bool = False

    def options(self, asked: Options) -> Options:
        """What this attempt asks of a repair that was asked for so."""
        if self.power != 1:
            return asked
        if self.damping is not None:
            return replace(asked, damping=Adaptive(self.damping), rows="active")
        assert isinstance(asked.rule, Annealed)
        return replace(asked, damping=replace(asked.rule, own_pace=False))


_OTHER_METRICS = tuple(Attempt(damping=None, kick=kick, power=power) for kick, power in ((None, 0), (0, 0), (0, -0.25)))
_SCHEDULE = Attempt(damping=None)  # slower and steadier than a pace of its own
ATTEMPTS = (
    Attempt(),
    Attempt(scaled=False),  # long and short rows may differ for a reason
    Attempt(damping=1e-6),  # nearly Newton's step, where a careful one creeps into a corner
    Attempt(kick=0.01),
    Attempt(kick=0.1),
    Attempt(kick=1.0),
)
_STRAIGHT = (Attempt(straight=True),)


def attempts(options: Options, instance: Instance, weighted: bool) -> tuple[Attempt, ...]:
    """What may help: where all rows are linear, a stationary point is already one of least violation."""
    straight = _STRAIGHT if options.krylov is None and options.tol else ()
    first = straight if instance.map.linear else ()
    first += _OTHER_METRICS if weighted and not instance.map.linear else ()
    first += (_SCHEDULE,) if options.rule.paced and not instance.map.diagonal_hessian else ()
    short = instance.map.linear or options.krylov is not None
    found = first + (ATTEMPTS[:1] if short else ATTEMPTS + straight)
    return found[:1] if options.rescue == "first" else found


def elsewhere(k: int, y: Tensor) -> Tensor:
    """Where restart k begins: predictions (B, n) moved at random, each variable by about its size or 1."""
    return _moved(y, 1.0, len(ATTEMPTS) + k)


def begin(attempt: Attempt, start: Tensor, best: Tensor) -> Tensor:
    """Where the attempt begins, from the start of the repair and the best point so far."""
    if not attempt.kick:
        return start if attempt.kick is None else best
    return _moved(best, attempt.kick, ATTEMPTS.index(attempt))


def _moved(y: Tensor, kick: float, seed: int) -> Tensor:
    """y (B, n) moved in a direction that belongs to the seed, the same for all samples."""
    draw = torch.Generator().manual_seed(seed)
    direction = torch.randn(y.shape[1], generator=draw, dtype=torch.float64).to(y)
    return y + kick * y.abs().clamp(min=1) * direction
