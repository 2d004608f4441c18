"""Layers: one file a method, one interface; `METHODS` knows them by name."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from snarenet.constraints import Constraints
from snarenet.layers.base import Layer
from snarenet.layers.best_of import BestOfLayer
from snarenet.layers.dc3 import DC3Layer
from snarenet.layers.fsnet import FSNetLayer
from snarenet.layers.hardnet import HardNetLayer, HardNetPlusPlusLayer
from snarenet.layers.hproj import HProjLayer
from snarenet.layers.optnet import OptNetLayer
from snarenet.layers.pinet import PiNetLayer
from snarenet.layers.snare import SnareLayer
from snarenet.layers.soft import SoftLayer

__all__ = [
    "METHODS",
    "BestOfLayer",
    "DC3Layer",
    "FSNetLayer",
    "HProjLayer",
    "HardNetLayer",
    "HardNetPlusPlusLayer",
    "Layer",
    "OptNetLayer",
    "PiNetLayer",
    "SnareLayer",
    "SoftLayer",
    "build",
    "layer_class",
]

METHODS: dict[str, type[Layer]] = {
    "snare": SnareLayer,
    "soft": SoftLayer,
    "dc3": DC3Layer,
    "hardnet": HardNetLayer,
    "hardnet++": HardNetPlusPlusLayer,
    "optnet": OptNetLayer,
    "hproj": HProjLayer,
    "pinet": PiNetLayer,
    "fsnet": FSNetLayer,
}


def layer_class(method: str) -> type[Layer]:
    """The layer of a method, by its name in `METHODS`."""
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, but got {method!r}{hint}")
    return METHODS[method]


def build(method: str, constraints: Constraints, inputs: int, size: int, seed: int = 0, **settings: Any) -> Layer:
    """The layer of a method for constraints on outputs of `size` entries, given inputs x of `inputs` entries.

    Args:
        method: a name in `METHODS`.
        constraints: the set to obey; a method that cannot handle it says so.
        inputs: entries of an input x.
        size: entries of an output y.
        seed: of what a method chooses at random.
        settings: other arguments of the method's layer.
    """
    kind = layer_class(method)
    asked = inspect.signature(kind).parameters
    known = {name: value for name, value in {"inputs": inputs, "size": size, "seed": seed}.items() if name in asked}
    return kind(constraints, **known, **settings)  # pyright: ignore[reportCallIssue]
