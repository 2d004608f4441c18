"""`sketch`: what a run notes of its problem's data, and `differences`: whether a problem still has them.

Data that are computed have other last digits on another machine, since sums are rounded in another order there. A hash
of their bytes would lock a run to the machine that trained it; a few numbers are compared with room for rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from snarenet.problems import Problem

Sketch: TypeAlias = dict[str, dict[str, float]]
_NUMBERS = {"entries", "largest", "product", "infinite", "rounding"}
_LEAST = 1e-12  # rounding of sums of whole numbers, of the largest entry
_STRIDE, _PERIOD = 2654435761, 2**32  # 2^32 divided by the golden ratio: multiples of it are spread evenly


def sketch(problem: Problem) -> Sketch:
    """A few numbers of every tensor of the problem's data, by its name behind that of the problem's class."""
    return {f"{type(problem).__name__}.{name}": _of(tensor) for name, tensor in problem.state_dict().items()}


def whole(noted: Mapping[str, Mapping[str, float | None] | None]) -> bool:
    """Has a sketch that was read from a file every number of every tensor?"""
    return all(numbers and numbers.keys() == _NUMBERS and None not in numbers.values() for numbers in noted.values())


def differences(noted: Sketch, found: Sketch) -> list[str]:
    """The names of the tensors that differ by more than rounding, or are in one of both alone."""
    names = dict.fromkeys([*noted, *found])
    return [name for name in names if name not in noted or name not in found or not _same(noted[name], found[name])]


def exact(problem: Problem) -> str:
    """A hash of all bytes of the data, which runs of the first versions noted instead."""
    digest = hashlib.sha256(type(problem).__name__.encode())
    for name, tensor in sorted(problem.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _of(tensor: Tensor) -> dict[str, float]:
    """Entries, the largest, two products with a fixed sequence, which see their order, and the share of rounding."""
    tensor = tensor.detach().cpu()
    rounding = torch.finfo(tensor.dtype).eps ** 0.5 if tensor.is_floating_point() or tensor.is_complex() else _LEAST
    entries = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1)
    places = torch.arange(1, len(entries) + 1)
    sequence = (places * _STRIDE % _PERIOD).double() / _PERIOD + 0.5  # none is next to 0
    finite = entries.isfinite()
    kept = torch.where(finite, entries, 0.0)
    kinds = torch.where(finite, 0.0, torch.where(entries.isnan(), 2.0, entries.sign()))
    largest = kept.abs().max().item() if len(entries) else 0.0
    return {
        "entries": len(entries),
        "largest": largest,
        "product": torch.dot(sequence, kept / (largest or 1.0)).item(),
        "infinite": torch.dot(sequence, kinds).item(),
        "rounding": rounding,
    }


def _same(noted: Mapping[str, float], found: Mapping[str, float]) -> bool:
    if noted["entries"] != found["entries"]:
        return False
    room = max(noted["rounding"], found["rounding"])
    rooms = {
        "largest": room * found["largest"],
        **dict.fromkeys(("product", "infinite"), room * max(found["entries"], 1) ** 0.5),
    }
    return all(abs(noted[name] - found[name]) <= most for name, most in rooms.items())
