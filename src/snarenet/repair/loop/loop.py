r"""`Loop`: the plain engine. Any constraints, any damping, any device; what a step is, either way, says `spaces.py`.

$$ y \leftarrow y - J^\top w, \qquad (J J^\top + \lambda_k D)\, w = r, $$
$$ r = \mathrm{relu}(g - u) - \mathrm{relu}(l - g) $$

A sample stops when its own max |r| is at most the tolerance, and is never moved again. One that does not get there ends
at the best point that it saw, the one with the least max |r|. The steps are not unrolled: the loop writes them to a
tape (`tape.py`), which is read backward.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from snarenet.constraints.base import largest, residual
from snarenet.damping import Damping
from snarenet.repair.engine import Batch, Description, Engine, Outcome
from snarenet.repair.foresight import Rows
from snarenet.repair.loop.spaces import OutputSpace, Space
from snarenet.repair.loop.steps import Step, Trial
from snarenet.repair.loop.tape import StepTape
from snarenet.repair.stopping import (
    CONVERGED,
    GOING,
    NONFINITE,
    all_go_on,
    idle,
    inner_tolerance,
    judge,
    looks,
    ran_away,
    settle,
    strictness,
)
from snarenet.tracing import tracing


class Loop(Engine):
    """Takes steps in a space.

    Args:
        space: where to iterate, and how a step is made and pulled back.
        damping: the rule of the damping.
        tol: the tolerance.
        max_steps: limit on steps.
    """

    keeps_best = True
    name = "plain loop"

    def __init__(self, space: Space, damping: Damping, tol: float, max_steps: int) -> None:
        self.space, self.damping, self.tol, self.max_steps = space, damping, tol, max_steps
        self.traceable, self.paced = space.traceable, damping.paced and space.curved
        self.foresees = self.paced and space.selects

    def describe(self, batch: Batch) -> Description:
        live = self._begin(batch, eager=True)
        _, (used, *_), saved = self._trial(live)
        where, system = self.space.describe(live.position, used, live.level)
        kept = [used, *(leaf for leaf in tree_leaves(saved) if leaf is not None)]
        return Description(f"{self.name} {where}", system, sum(leaf.nbytes for leaf in kept) / len(batch.y))

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        return self.space.tensors(y)

    def detached(self, leaves: dict[int, Tensor]) -> Loop:
        return type(self)(self.space.detached(leaves), self.damping, self.tol, self.max_steps)

    def run(self, batch: Batch, taped: bool) -> tuple[Outcome, StepTape | None]:
        """Run the loop.

        In eager mode samples that stop leave the batch, and the loop ends with the last one. A compiled or recorded
        loop cannot choose: it takes all `max_steps` steps and freezes the samples that have stopped.
        """
        eager, tape = not tracing(), StepTape(self.space, batch.learns_bounds) if taped else None
        live = self._begin(batch, eager)
        whole = live.write(())
        stopped = eager and (len(batch.y) == 0 or not bool((live.status == GOING).all()))
        for k in range(self.max_steps):
            if stopped:
                whole = live.write(whole)
                live = live.select((live.status == GOING).nonzero().squeeze(1))
                if not len(live.status):
                    break
            live, stopped = self._step(k, live, eager, tape)
        position, status, steps, lasts = live.write(whole)
        if tape is not None and not eager:
            tape.mask(lasts)
        elif tape is not None and bool((status != CONVERGED).any()):
            tape.lasts = lasts
        return Outcome(self.space.finish(batch.y, position), status, steps), tape

    def _begin(self, batch: Batch, eager: bool) -> Live:
        """Everybody before the first step."""
        y, lower, upper, finite = batch
        space, damping, position = self.space, self.damping, self.space.start(y)
        value = space.value(position)
        r = residual(value, lower, upper)
        worst = largest(r)
        status = judge(worst, self.tol, broken=~finite | ~(worst < math.inf), stalled=None)
        strict = strictness(space.scales().expand_as(r), self.tol) if damping.relative else None
        if strict is not None and eager and bool((strict == 1).all()):
            strict = None
        distance = _distance(space, position, r) if self.paced else None
        level, steps = damping.first(y, distance), torch.zeros_like(status)
        best = position, worst, steps, torch.full_like(worst, math.inf)
        start = position, r, worst, level, status, steps
        return Live(None, space, lower, upper, lower == upper, strict, *start, *best, value if self.foresees else None)

    def _step(self, k: int, s: Live, eager: bool, tape: StepTape | None) -> tuple[Live, bool]:
        """Everybody after step k, and whether somebody stopped."""
        step = self._trial(s)
        after, moved, stopped = self._look(k, s, step, eager)
        if tape is not None:
            below = s.space.below(s.residual, step.saved) if tape.bounds else None
            if below is not None and step.rows.low is not None:
                below = below | step.rows.low
            tape.steps.append(Step(s.samples, step.rows.used, below, s.level, moved, step.saved))
        return after, stopped

    def _trial(self, s: Live) -> Trial:
        """The next step."""
        rows = Rows((s.residual != 0) | s.pinned, s.residual)
        if self.foresees and s.value is not None:
            assert isinstance(s.space, OutputSpace)
            assert isinstance(s.level, Tensor)
            return s.space.step_ahead(s.position, rows, s.level, s.value, s.lower, s.upper)
        position, saved = s.space.step(s.position, s.residual, rows.used, s.level)
        return Trial(position, rows, saved)

    def _look(self, k: int, s: Live, step: Trial, eager: bool) -> tuple[Live, Tensor | None, bool]:
        """Where step k led: everybody after it, who moved (None for all), and whether somebody stopped."""
        tol, (trial, rows, saved) = inner_tolerance(self.tol, s.space.slack), step
        value = s.space.value(trial)
        r = residual(value, s.lower, s.upper)
        worst = largest(r if s.strictness is None else r * s.strictness)
        stalled, gain, unseen, pace = s.space.stationary(rows.residual, s.level, saved), None, None, None
        if self.damping.searches:
            gain, unseen = _gain(s, step, r)
        if self.paced:
            pace = _gain(s, step, r)[0], _distance(s.space, s.position, rows.residual)
        moved, status, stopped = None, s.status, False
        look = self._looks(k, s)
        if not (eager and gain is None and not look and all_go_on(worst, tol, stalled)):
            if stalled is not None and eager and bool(stalled.any()):
                stalled = stalled & s.space.flat(s.position, s.residual)
            stalled = _any(stalled, unseen, idle(s.best, s.mark) if look else None)
            moved, status = settle(s.status, s.worst, worst, gain, stalled, tol)
            stopped = eager and not bool((status == GOING).all())
            if eager and bool(moved.all()):
                moved = None
            else:
                trial, r = (torch.where(moved.unsqueeze(1), *pair) for pair in ((trial, s.position), (r, s.residual)))
                worst = torch.where(moved, worst, s.worst)
                value = value if s.value is None else torch.where(moved.unsqueeze(1), value, s.value)
        level = self.damping.following(k, s.level, *(pace or (gain,)))
        mark = s.best if look else s.mark
        steps = s.steps + (1 if eager else (s.status == GOING))
        seen = worst if s.strictness is None else largest(r)
        best = (trial, seen, steps) if self.tol == 0 else s.better(trial, seen, steps, eager)
        value = None if s.value is None else value
        return Live(*s[:6], trial, r, worst, level, status, steps, *best, mark, value), moved, stopped

    def _looks(self, k: int, s: Live) -> bool:
        """Is it time to look at the progress of samples?"""
        return self.tol > 0 and not s.space.steady and looks(k, self.damping, s.level)


class Live(NamedTuple):
    """The samples at work and where they stand; a sample is going while its status is GOING."""

    samples: Tensor | None  # their places in the batch; None for the whole batch
    space: Space
    lower: Tensor
    upper: Tensor
    pinned: Tensor  # rows that are equalities
    strictness: Tensor | None  # factors on the residual before it is compared with the tolerance
    position: Tensor
    residual: Tensor
    worst: Tensor
    level: float | Tensor  # the damping of the next step
    status: Tensor
    steps: Tensor
    best_position: Tensor  # the one with the least violation so far
    best: Tensor  # its largest violation
    best_steps: Tensor  # the steps that led to it
    mark: Tensor  # the least violation when the progress was looked at
    value: Tensor | None  # (b, rows) g at the position, if steps are looked at before they are taken

    def select(self, keep: Tensor) -> Live:
        """Some of these samples."""
        samples = keep if self.samples is None else self.samples[keep]
        rest: Any = (tensor[keep] if isinstance(tensor, Tensor) else tensor for tensor in self[2:])
        return Live(samples, self.space.select(keep), *rest)

    def better(self, position: Tensor, seen: Tensor, steps: Tensor, eager: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(best_position, best, best_steps) after so many steps to a position where the largest violation is `seen`."""
        better = seen < self.best
        if eager and bool(better.all()):  # the common case
            return position, seen, steps
        best_position = torch.where(better.unsqueeze(1), position, self.best_position)
        return best_position, torch.where(better, seen, self.best), torch.where(better, steps, self.best_steps)

    def write(self, whole: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(position, status, steps, steps that led there) of the whole batch, with these samples brought up to date."""
        done = self.status == CONVERGED
        position = torch.where(done.unsqueeze(1), self.position, self.best_position)
        lost = ran_away(self.position, self.worst, self.best_position, self.best)
        status = torch.where(lost & ~done, NONFINITE, self.status)
        mine = (position, status, self.steps, torch.where(done, self.steps, self.best_steps))
        if self.samples is None:
            return mine
        return tuple(old.index_copy(0, self.samples, new) for old, new in zip(whole, mine, strict=True))


def _any(*masks: Tensor | None) -> Tensor | None:
    """(B,) true where one of the masks is; None if there is none."""
    given = [mask for mask in masks if mask is not None]
    return functools.reduce(torch.logical_or, given) if given else None


def _distance(space: Space, position: Tensor, residual: Tensor) -> Tensor:
    """(B,) how far away the bounds are, by the lengths of their rows, in sizes of the position."""
    away = largest(residual / space.scales().sqrt())
    size = space.size(position)
    return torch.where(size > 0, away / size, math.inf)


def _gain(s: Live, step: Trial, r: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) actual over predicted decrease of the squared residual, and whether rounding would hide the latter."""
    trial, rows, saved = step
    before, after = s.space.merit(rows.residual, saved), s.space.merit(r, saved)
    foreseen = torch.where(rows.used, s.space.predict(s.position, trial, rows.residual, saved), 0.0)
    predicted = (before - s.space.merit(foreseen, saved)).abs()  # a step that a box cuts short may foresee an increase
    return (before - after) / predicted, predicted <= 8 * torch.finfo(r.dtype).eps * before
