"""Benchmarks: `snarenet bench ITEM`, or `python -m snarenet_lab.bench ITEM` where tyro is not installed.

An item is a module with `measure(device, out, **options) -> Benchmark`. What takes long is kept under `out` as it is
found, so that an item which was stopped goes on.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from snarenet.training import RunError
from snarenet_lab.bench.common import Benchmark, command_line

ITEMS = (
    "repair",
    "scaling",
    "growth",
    "field",
    "race",
    "parallel",
    "robustness",
    "collection",
    "damping",
    "settings",
    "matrix_free",
    "general",
    "nearest",
    "polish",
    "forecast",
    "portfolio",
)

__all__ = ["ITEMS", "Benchmark", "bench"]


def bench(item: str, device: torch.device, out: Path, **options: Any) -> dict[str, Benchmark]:
    """Measure an item, or all of them; print the tables and write them to ITEM.json and ITEM.md.

    A `RunError` says at the end what is not as it must be.

    Args:
        item: a name in `ITEMS`, or "all".
        device: where to measure.
        out: the folder of the files.
        options: those of the item's `measure`.
    """
    if item != "all" and item not in ITEMS:
        raise ValueError(f"`item` must be all or one of {', '.join(ITEMS)}, but got {item!r}")
    if item == "all" and options:
        raise ValueError(f"options belong to one item, but got {', '.join(options)} for all")
    found = {}
    for name in ITEMS if item == "all" else (item,):
        measure = import_module(f"snarenet_lab.bench.{name}").measure
        _check(name, measure, options)
        measured = measure(device, out, **options)
        found[name] = replace(measured, command=command_line(name, device, **options)) if options else measured
        found[name].write(out, name)
        found[name].show()
    failures = [f"{name}: {one.failure}" for name, one in found.items() if one.failure]
    if failures:
        raise RunError("; ".join(failures))
    return found


def _check(name: str, measure: Any, options: dict[str, Any]) -> None:
    """Raise if the item does not know an option."""
    parameters = inspect.signature(measure).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [parameter for parameter in parameters if parameter not in ("device", "out")]
    for option in options:
        if option not in known:
            raise ValueError(f"options of {name} are {', '.join(known) or 'none'}, but got {option!r}")
