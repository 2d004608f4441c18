"""`Origin`: the set that a solution is of, kept with it, from which `Solution.conflict` is computed when asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from snarenet.constraints.base import Constraints, Instance, largest, residual
from snarenet.constraints.maps.base import CHUNK
from snarenet.repair.conflict.conflict import Conflict, ConflictRow, SampleConflict
from snarenet.repair.conflict.farkas import Certificate, certify
from snarenet.repair.conflict.settle import polish, settle
from snarenet.repair.conflict.sides import sides
from snarenet.repair.options import Options
from snarenet.repair.precision import without_autocast
from snarenet.repair.scale import positive
from snarenet.solution import Solution, Status
from snarenet.tracing import tracing

_SLIGHT = 1e-6  # share of the pull below which a row does not count
_CHANGED = 1e-6  # relative difference of a violation by which a set is known to have changed


@dataclass(frozen=True, eq=False, repr=False)
class Origin:
    """What a solution was asked for: set, inputs without their history, relaxation and options."""

    constraints: Constraints
    x: Any
    relax: float | Tensor
    options: Options

    def __deepcopy__(self, memo: Any) -> Origin:
        return self  # it is only read

    def __reduce__(self) -> Any:
        return type(None), ()  # sets may hold functions, which cannot be saved: a loaded solution has none

    def conflict(self, solution: Solution, samples: Sequence[int] | None) -> Conflict:
        """Which rows keep the failed samples, or those of them that are named, from their sets."""
        failed = (~solution.converged).nonzero().squeeze(1)
        if samples is not None:
            failed = failed[torch.isin(failed, _numbers(samples, len(solution.status)).to(failed))]
        if not len(failed):
            return Conflict((), len(solution.status))
        value = solution.value.detach().to(torch.float64)
        with torch.no_grad(), without_autocast(value.device):
            finite = value.isfinite().all(1)
            start = torch.where(finite.unsqueeze(1), value, 0.0)
            instance = self.constraints.at(start, self.x).relaxed(self.relax).select(failed)
            start, finite = start[failed], finite[failed]
            _check_unchanged(instance, start, torch.where(finite, solution.violation[failed], torch.inf))
            point = settle(self.options, self.constraints, instance, start, finite)
            raw = solution.raw.detach().to(start)[failed]
            raw = torch.where(raw.isfinite(), raw, start) if raw.shape == start.shape else start
            found = []
            for k, sample in enumerate(failed.tolist()):
                status, one = Status(int(solution.status[sample])), torch.tensor([k], device=start.device)
                if bool(finite[k]):
                    points = _Points(raw[one], start[one], point[one])
                    found.append(self._judge(instance.select(one), points, sample, status))
                else:
                    found.append(SampleConflict(sample, status, value[sample], math.inf, (), math.nan))
        return Conflict(tuple(found), len(solution.status))

    def _judge(self, instance: Instance, points: _Points, sample: int, status: Status) -> SampleConflict:
        """What there is to say of an instance of one sample."""
        raw, start, z = points
        norms = instance.map.row_norms
        if self.options.krylov is not None:
            norms = partial(self.options.krylov.row_norms, instance.map)
        scale = positive(norms(start)).sqrt()  # those that the steps went by
        z = polish(instance, z, scale)
        g = instance.map.value(z)
        r = residual(g, instance.lower, instance.upper)
        worst = float(largest(r))
        if worst <= self.options.tol:
            return SampleConflict(sample, status, z[0], worst, (), 0.0, reached=True)
        r = r / scale
        length = norms(z)
        usual = torch.maximum(length, norms(raw)) / scale.square()
        stationarity = _cosine(instance.map.vjp(z, r / scale), torch.where(r != 0, usual, 0.0).sum().sqrt(), r)
        describe = _Describer(self.constraints, instance, g)
        certificate = _certificate(instance, z)
        disputed = () if certificate is None else describe.disputed(certificate, length[0].sqrt())
        return SampleConflict(sample, status, z[0], worst, describe.pulling(r[0]), stationarity, certificate, disputed)


class _Points(NamedTuple):
    """Where a sample was predicted, where its repair ended, and where that settled: (1, n) each."""

    raw: Tensor
    start: Tensor
    settled: Tensor


def remember(solution: Solution, constraints: Constraints, x: Any, relax: float | Tensor, options: Options) -> Solution:
    """The solution, which now knows what it is of; not where it is traced, as it would become part of a graph."""
    if not tracing():
        x, relax = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, (x, relax))
        solution.origin = Origin(constraints, x, relax, options)
    return solution


class _Describer:
    """Names the rows of an instance of one sample."""

    def __init__(self, constraints: Constraints, one: Instance, g: Tensor) -> None:
        self.lower, self.upper, self.g = one.lower[0], one.upper[0], g[0]
        kinds = [type(part).__name__ for part in constraints.parts]
        self.names: list[str] = []
        for k, (kind, part) in enumerate(zip(kinds, one.map.parts, strict=True)):
            prefix = kind if kinds.count(kind) == 1 else f"parts[{k}] {kind}"
            row = "y[{}]" if kind == "Box" else "row {}"
            self.names += [f"{prefix} {row.format(i)}" for i in range(part.rows)]

    def pulling(self, r: Tensor) -> tuple[ConflictRow, ...]:
        """The rows that are violated, the heaviest first, for residuals in rows of length 1."""
        shares = r.abs() / r.abs().sum()
        count = int((shares > _SLIGHT).sum())
        order = shares.argsort(descending=True, stable=True)[:count].tolist()
        return tuple(self.row(i, float(shares[i]), bool(r[i] > 0)) for i in order)

    def row(self, i: int, weight: float, above: bool) -> ConflictRow:
        lower, upper = float(self.lower[i]), float(self.upper[i])
        side, bound = ("upper", upper) if above else ("lower", lower)
        return ConflictRow(i, self.names[i], side, bound, float(self.g[i]), lower == upper, weight)

    def disputed(self, certificate: Certificate, length: Tensor) -> tuple[ConflictRow, ...]:
        """The rows of a certificate, with shares of its weights in rows of length 1."""
        weights = (certificate.upper + certificate.lower) * torch.where(length > 0, length, 1.0).cpu()
        used = weights.nonzero().squeeze(1).tolist()
        shares = weights / weights.sum()
        return tuple(self.row(i, float(shares[i]), bool(certificate.upper[i] > 0)) for i in used)


def _certificate(one: Instance, z: Tensor) -> Certificate | None:
    """A certificate that the set is empty, if one is found; none is sought for sets too large to be held densely."""
    if one.map.rows * z.shape[1] > CHUNK:
        return None
    return certify(sides(one, z), z[0].cpu().numpy(), one.map.rows)


def _cosine(force: Tensor, length: Tensor, r: Tensor) -> float:
    """|J'r| / (|J| |r|), 0 where J vanishes."""
    most = float(length * r.norm())
    return float(force.norm()) / most if most > 0 else 0.0


def _numbers(samples: Sequence[int], batch: int) -> Tensor:
    """Places in the batch, if they are."""
    numbers = torch.as_tensor(samples)
    whole = numbers.numel() == 0 or not (numbers.is_floating_point() or numbers.dtype == torch.bool)
    if numbers.ndim != 1 or not whole or bool(((numbers < 0) | (numbers >= batch)).any()):
        raise ValueError(f"`samples` must be whole numbers from 0 to {batch - 1}, but got {samples!r}")
    return numbers


def _check_unchanged(instance: Instance, y: Tensor, violation: Tensor) -> None:
    """Raise if the set is not the one that was violated so; infinite where that is not known."""
    now = largest(residual(instance.map.value(y), instance.lower, instance.upper))
    change = (now - violation).abs() > _CHANGED * violation
    if bool((change & violation.isfinite()).any()):
        raise RuntimeError(
            "the constraints, or the inputs x, have changed since this solution was computed: ask for its conflict "
            "before they change, or solve again"
        )
