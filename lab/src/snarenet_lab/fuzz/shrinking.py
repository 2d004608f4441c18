"""`shrink`: a smaller case with the same defect, found by leaving things out for as long as it stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from snarenet_lab.fuzz.case import Case, Datum, Part
from snarenet_lab.fuzz.checks import Check, defect

_SECONDS = 20.0  # that a defect is worth


def shrink(case: Case, check: Check, seconds: float = _SECONDS) -> Case:
    """The smallest case found in so many seconds that the check still speaks of."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(case):
            if time.monotonic() > end:
                return case
            found = defect(candidate, (check,))
            if found is not None and found[0] is check:
                case, smaller = candidate, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them, those with the least first."""
    yield from _fewer_samples(case)
    for k in range(len(case.parts) if len(case.parts) > 1 else 0):
        yield _without_relax(replace(case, parts=case.parts[:k] + case.parts[k + 1 :]))
    for name in case.options:
        yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    for k, part in enumerate(case.parts):
        for simpler in _simpler_parts(part):
            whole = replace(case, parts=(*case.parts[:k], simpler, *case.parts[k + 1 :]))
            yield whole if simpler.rows == part.rows else _without_relax(whole)
    if case.x is not None and not any("x" in text for part in case.parts for text in part.lines(0)):
        yield replace(case, x=None)
    if case.y.dtype != torch.float64:
        yield replace(case, y=case.y.double())
    for digits in (1, 3):
        rounded = _rounded(case.y, digits)
        if not torch.equal(rounded, case.y.nan_to_num()):
            yield replace(case, y=rounded)


def _without_relax(case: Case) -> Case:
    """Rows were left out, so that a `relax` for each of them no longer fits."""
    relax = case.options.get("relax")
    if not isinstance(relax, Tensor):
        return case
    return replace(case, options={key: value for key, value in case.options.items() if key != "relax"})


def _fewer_samples(case: Case) -> Iterator[Case]:
    batch = list(range(len(case.y)))
    half = len(batch) // 2
    if half:
        yield from (case.select(some) for some in (batch[:half], batch[half:]))
    if 2 < len(batch) <= 8:
        yield from (case.select(batch[:i] + batch[i + 1 :]) for i in batch)


def _simpler_parts(part: Part) -> Iterator[Part]:
    if part.kind != "box" and part.rows > 1:
        yield from (part.only([i for i in range(part.rows) if i != j]) for j in range(part.rows))
    for name, datum in part.data.items():
        for simpler in _simpler_data(datum):
            yield replace(part, data={**part.data, name: simpler})


def _simpler_data(datum: Datum) -> Iterator[Datum]:
    if datum.slope is not None:
        yield replace(datum, slope=None)
    if datum.learned or datum.sparse:
        yield replace(datum, learned=False, sparse=False)
    if datum.per_sample and len(datum.value):
        yield replace(datum, value=datum.value[0], per_sample=False)
    for digits in (1, 3):
        rounded = _rounded(datum.value, digits)
        if not torch.equal(rounded, datum.value):
            yield replace(datum, value=rounded)


def _rounded(value: Tensor, digits: int) -> Tensor:
    """To so many significant digits."""
    numbers = [float(f"{number:.{digits - 1}e}") for number in value.double().flatten().tolist()]
    return torch.tensor(numbers, dtype=torch.float64).reshape(value.shape).to(value.dtype)
