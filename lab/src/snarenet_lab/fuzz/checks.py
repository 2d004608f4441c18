"""What must be true of every case; each check says what is wrong with one, or nothing.

What is said of an output is computed again, in float64 and without the library. Two results that rounding may drive
apart are compared by what rounding does drive apart: the same sample, moved by its last digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from snarenet import Solution, Status
from snarenet_lab.fuzz.case import Case
from snarenet_lab.fuzz.outcome import Outcome, cotangent, first, measure, run, solved

_ROUNDING = 64  # units of the precision that two ways to compute a gradient may differ by, in the sizes of its terms
_COPIES = 4  # of a sample, moved by rounding, that show what rounding does to it
_STEEP = 1e15  # gradients from which on float32 may be too little for the numbers on their way
_STEP = 1e-5  # of finite differences, in the sizes of the entries
_OTHER_STEPS = (1e-3, 1e-4, 1e-6, 1e-7, 1e-8)  # those that a gradient must contradict as well to be called wrong


def errors(seen: Outcome) -> str | None:
    """Mistakes are refused by an error that names the argument; nothing else is refused, and nothing breaks."""
    case, error = seen.case, seen.error
    if error is None:
        return f"a mistake in `{case.wrong}` was not noticed" if case.wrong else None
    said = f"{type(error).__name__}: {error}"
    if not isinstance(error, ValueError | TypeError):
        return said
    if case.wrong and _sound(case):
        return (
            None if re.search(rf"`{case.wrong}`", str(error)) else f"an error without a word of `{case.wrong}`: {said}"
        )
    if case.method not in ("repair", "snare"):  # others take fewer kinds of sets, and say which
        return None if re.search(r"constraint|rows|`\w+", str(error)) else f"an error that names nothing: {said}"
    return None if re.search(r"`\w+", str(error)) and not _sound(case) else f"refused: {said}"


def _sound(case: Case) -> bool:
    """Are all matrices finite, and all bounds numbers in order?"""
    for part in case.parts:
        given = [datum.at(case.x, len(case.y)) for name, datum in part.data.items() if name in "AHG"]
        lower, upper = part.bounds(case.x, len(case.y))
        ordered = bool((lower <= upper).all()) and bool((lower < math.inf).all()) and bool((upper > -math.inf).all())
        if not ordered or not all(bool(matrix.isfinite().all()) for matrix in given):
            return False
    return True


def statuses(seen: Outcome) -> str | None:
    """CONVERGED, if and only if the violation is at most the tolerance, or what the precision can hold of it."""
    s, tol = solved(seen), seen.case.options.get("tol", 1e-8)
    holds = s.violation <= s.allowance.clamp(min=tol)
    wrong = first(holds != s.converged)
    if wrong is not None:
        return f"sample {wrong} is {_name(s, wrong)}, but violates {s.violation[wrong]:g} at a tolerance of {tol:g}"
    broken = first(~seen.case.y.isfinite().all(1) & (s.status != Status.NONFINITE))
    return None if broken is None else f"sample {broken} is not finite, but {_name(s, broken)}"


def violations(seen: Outcome) -> str | None:
    """The violation and what rounding excuses are those of what is returned."""
    s, case = solved(seen), seen.case
    found = measure(case, s.value)
    finite = case.y.isfinite().all(1)
    same = (s.violation == found.worst) | ((s.violation - found.worst).abs() <= found.rounding)
    wrong = first(finite & ~same)
    if wrong is not None:
        return f"sample {wrong} violates {found.worst[wrong]:g}, but the solution says {s.violation[wrong]:g}"
    most = found.held if case.rounds else torch.zeros_like(found.held)
    wrong = first(s.allowance > most)
    if wrong is not None:
        return f"sample {wrong} is excused {s.allowance[wrong]:g}, but rounding makes {most[wrong]:g} of it"
    return None


def finite_values(seen: Outcome) -> str | None:
    """Numbers in, numbers out, unless the precision cannot hold them, which the status says."""
    s, y = solved(seen), seen.case.y
    lost = y.isfinite().all(1) & ~s.value.isfinite().all(1)
    if s.value.dtype == torch.float32:
        lost = lost & (s.status != Status.NONFINITE)
    wrong = first(lost)
    return None if wrong is None else f"sample {wrong} was finite and became {s.value[wrong].tolist()}"


def not_worse(seen: Outcome) -> str | None:
    """No output violates more than its prediction did, beyond rounding; without a tolerance nobody looks."""
    s, case = solved(seen), seen.case
    if case.options.get("tol", 1e-8) == 0:
        return None
    before, after = measure(case, case.y), measure(case, s.value)
    rounding = after.held + before.held if case.rounds else after.rounding + before.rounding
    allowed = torch.maximum(before.worst, torch.tensor(case.options.get("tol", 1e-8))) + rounding
    wrong = first(s.value.isfinite().all(1) & (after.worst > allowed))
    if wrong is None:
        return None
    return f"sample {wrong} violated {before.worst[wrong]:g} and now {after.worst[wrong]:g}, {_name(s, wrong)}"


def finite_gradients(seen: Outcome) -> str | None:
    """The gradient of every finite sample is finite, and so are those of shared tensors if all samples are.

    Less than float64 may be too little to hold a gradient, and then it is infinite.
    """
    s, gradients = solved(seen), seen.gradients or {}
    good = _usable(seen.case)
    if seen.case.options.get("dtype") == torch.float32:  # which a path that fails may leave, where gradients explode
        good = good & s.converged
        if not all(bool(_numbers(gradient).all()) for gradient in gradients.values()):  # a rescued path failed at first
            good = good & ~(_steepness(seen.case.to_float64()) >= _STEEP)
    if seen.case.options.get("tol", 1e-8) == 0:  # without a tolerance nobody stops a path that leaves all numbers
        good = good & (s.status != Status.NONFINITE)
    for name in [name for name in ("y", "x") if name in gradients]:
        wrong = first(good & ~_numbers(gradients[name]).all(1))
        if wrong is not None:
            return f"the gradient of {name}[{wrong}] is {gradients[name][wrong].tolist()}, {_name(s, wrong)}"
    if bool(good.all()):
        for name, gradient in gradients.items():
            if not bool(_numbers(gradient).all()):
                return f"the gradient of {name} is not finite"
    return None


def _steepness(case: Case) -> Tensor:
    """(B,) the largest entry of the gradient of each prediction."""
    gradients = run(case).gradients or {}
    return gradients.get("y", torch.zeros_like(case.y)).abs().amax(1)


def _numbers(gradient: Tensor) -> Tensor:
    return gradient.isfinite() if gradient.dtype == torch.float64 else ~gradient.isnan()


def independence(seen: Outcome) -> str | None:
    """A sample alone ends where it ends beside others, with the same gradient."""
    if len(seen.case.y) < 2:
        return None
    i, alone = seen.alone
    if not bool(_usable(seen.case)[i]):
        return None
    if alone.solution is None:
        return f"sample {i} alone: {alone.error!r}" if _sound(alone.case) else None
    apart = _apart(seen, i, alone, 0)
    least = 1e-9 if seen.case.in_float64 else 1e-4
    if not bool(solved(seen).converged[i]):  # a path that fails amplifies rounding
        least = 1e-2
    if apart > least and apart > 100 * _spread(alone, solved(seen).status[i]):
        together = _name(solved(seen), i)
        return f"sample {i} alone is {_name(alone.solution, 0)}, in its batch {together}, apart by {apart:g}"
    return None


def _apart(a: Outcome, i: int, b: Outcome, j: int) -> float:
    """How far apart two outcomes of a sample are, relative to their sizes; infinite if they ended differently."""
    s, t = solved(a), solved(b)
    if s.status[i] != t.status[j]:
        return math.inf
    value, other = s.value[i].detach().double(), t.value[j].detach().double()
    size = (value.abs() + other.abs()).amax().item()
    apart = [_share((value - other).abs().amax().item(), size)]
    if s.status[i] == Status.CONVERGED:  # of a path that failed rounding may decide which point was the best
        # where rows hold y, its gradient is what is left of the cotangent when nearly all of it is taken away
        left = _ROUNDING * _unit(b.case) * cotangent(b.case).abs().amax() * b.case.y[j].abs().amax().double()
        for one, two in zip(_sensitivities(a, i), _sensitivities(b, j), strict=True):
            largest = (one.abs() + two.abs()).amax().item()
            gap = ((one - two).abs().amax() - left).clamp(min=0).item()
            apart.append(_share(gap, largest + 1e-3 * size))
    return math.inf if any(math.isnan(share) for share in apart) else max(apart)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else part


def _sensitivities(seen: Outcome, i: int) -> list[Tensor]:
    """The gradients of a sample's y and x, each entry times its size; zero if nothing in the batch moved."""
    leaves = [(name, leaf) for name, leaf in (("y", seen.case.y), ("x", seen.case.x)) if leaf is not None]
    found = [(seen.gradients or {}).get(name, torch.zeros_like(leaf)) for name, leaf in leaves]
    return [(gradient[i] * leaf[i].abs()).double() for gradient, (_, leaf) in zip(found, leaves, strict=True)]


def _spread(alone: Outcome, status: Tensor) -> float:
    """How far rounding drives a sample from itself; infinite if it can end in this status, or in none for sure."""
    case, work = alone.case, alone.case.options.get("dtype", torch.float64)
    y = case.y.to(torch.promote_types(case.y.dtype, torch.float32))  # that of the output
    unit = _unit(case)
    size, worst = y.double().abs() + solved(alone).value.detach().abs(), 0.0
    names = [f"{name}{k}" for k, part in enumerate(case.parts) for name in part.data if name in "AHG"]
    for k in range(1, 1 + _COPIES):
        copy = replace(case, y=(y.double() + 2 * unit * _signs(y, k) * size).to(y.dtype))
        if work != torch.float64:  # which rounds the matrices, too; linear rows have the same systems wherever y is
            matrices = {name: case.tensor(name) for name in names}
            copy = copy.moved({name: _signs(matrix, k) * matrix for name, matrix in matrices.items()}, unit)
        moved = run(copy)
        if moved.solution is None or int(moved.solution.status) != int(status):
            return math.inf
        worst = max(worst, _apart(alone, 0, moved, 0))
    return worst


def _unit(case: Case) -> float:
    """The rounding of the repair or of its output, whichever is coarser."""
    output = torch.promote_types(case.y.dtype, torch.float32)
    return max(torch.finfo(dtype).eps for dtype in (output, case.options.get("dtype", torch.float64)))


def _signs(like: Tensor, k: int) -> Tensor:
    """Random signs, others for each k."""
    return torch.cos(k * torch.arange(1.0, 1 + like.numel(), dtype=torch.float64)).reshape(like.shape).sign()


def differences(seen: Outcome) -> str | None:
    """The gradient of a sample that converged is that of finite differences, in float64, where its path is smooth."""
    s = solved(seen)
    if not len(s.status) or "solver" in seen.case.options:  # which solves to a tolerance that differences see
        return None
    damping = seen.case.options.get("damping")
    if damping is not None and not getattr(damping, "relative", False) and _largest(seen.case) > 1e4:
        return None  # beside squares of long rows the damping is lost, and a system may be singular to rounding
    i, alone = seen.alone
    if not bool(s.converged[i]) or not int(s.steps[i]) or not bool(_usable(alone.case).all()):
        return None
    said = _compare(alone if alone.case.in_float64 else run(alone.case.to_float64()))
    return None if said is None else f"sample {i}: {said}"


def _largest(case: Case) -> float:
    """The largest entry of all matrices."""
    sizes = [datum.value.abs() for part in case.parts for name, datum in part.data.items() if name in "AHG"]
    return max((size.max().item() for size in sizes if size.numel()), default=0.0)


def _usable(case: Case) -> Tensor:
    """(B,) true where y and x are finite."""
    finite = case.y.isfinite().all(1)
    return finite if case.x is None else finite & case.x.isfinite().all(1)


def _compare(seen: Outcome) -> str | None:
    """The derivative along one random direction, of all leaves together; nothing if differences cannot tell."""
    case = seen.case
    if seen.solution is None or not bool(seen.solution.converged[0]):
        return None
    direction = {name: _direction(case.tensor(name)) for name in seen.gradients or {}}
    expected, size = _along(seen, direction)
    if not math.isfinite(size):
        return None
    coarse, fine = (_slopes(seen, direction, h) for h in (_STEP, _STEP / 2))
    if coarse is None or fine is None:
        return None
    least = 1e-6 * (seen.solution.value.abs() * cotangent(case).abs()).sum().item()
    known = max(abs(fine.mean), 1e-3 * size, least)
    if abs(coarse.mean - fine.mean) > 1e-5 * known or fine.kink > 1e-2 * known:
        return None
    if abs(fine.mean - expected) <= 1e-3 * known:
        return None
    for h in (-_STEP / 2, _STEP / 2):  # a gradient that jumps belongs to a path on which rounding decides
        beside = run(case.moved(direction, h))
        if abs(_along(beside, direction)[0] - expected) > 1e-2 * known:
            return None
    # kinks nearer than a step, or rounding in numbers that were large on the way, are seen by no single step
    other = [found for h in _OTHER_STEPS if (found := _slopes(seen, direction, h)) is not None]
    if any(abs(found.mean - expected) <= 1e-3 * known and found.kink <= 1e-2 * known for found in other):
        return None
    return f"the derivative is {fine.mean:.9g}, but the gradient says {expected:.9g}"


class _Slopes(NamedTuple):
    """Of finite differences, to both sides."""

    ahead: float
    behind: float

    @property
    def mean(self) -> float:
        return (self.ahead + self.behind) / 2

    @property
    def kink(self) -> float:
        return abs(self.ahead - self.behind)


def _slopes(seen: Outcome, direction: dict[str, Tensor], h: float) -> _Slopes | None:
    """Those along a direction; nothing if the path takes another number of steps there."""
    here, found = solved(seen), []
    for step in (h, -h):
        moved = run(seen.case.moved(direction, step), gradient=False).solution
        if moved is None or not bool(moved.converged[0]) or moved.steps[0] != here.steps[0]:
            return None
        found.append(((moved.value - here.value) * cotangent(seen.case)).sum().item() / step)
    return _Slopes(*found)


def _along(seen: Outcome, direction: dict[str, Tensor]) -> tuple[float, float]:
    """The gradient's product with a direction, and the sum of its terms' sizes."""
    terms = [(g * direction[name]).flatten() for name, g in (seen.gradients or {}).items()]
    return sum(term.sum().item() for term in terms), sum(term.abs().sum().item() for term in terms)


def _direction(leaf: Tensor) -> Tensor:
    """Random signs and sizes, in the sizes of the entries."""
    numbers = torch.cos(1.0 + torch.arange(leaf.numel(), dtype=torch.float64).square()).reshape(leaf.shape)
    return numbers * leaf.abs().nan_to_num(0.0, 0.0, 0.0)


def _name(solution: Solution, i: int) -> str:
    return Status(int(solution.status[i])).name


Check = Callable[[Outcome], str | None]
OF_EVERY_METHOD: tuple[Check, ...] = (statuses, violations, finite_values)
OF_A_REPAIR: tuple[Check, ...] = (*OF_EVERY_METHOD, not_worse, finite_gradients, independence, differences)


def defect(case: Case, checks: tuple[Check, ...] | None = None) -> tuple[Check, str] | None:
    """The first check that fails, and what it says."""
    seen = run(case)
    if said := errors(seen):
        return errors, said
    if seen.solution is None:
        return None
    suits = OF_A_REPAIR if case.method in ("repair", "snare") else OF_EVERY_METHOD
    for check in suits if checks is None else (check for check in checks if check in suits):
        if said := check(seen):
            return check, said
    return None
