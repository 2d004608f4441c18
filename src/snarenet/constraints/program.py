"""`Program`: a function of one sample as straight-line arithmetic, run for a batch by compiled C++ (`program.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet import native
from snarenet.constraints.recording import CONSTANT, Nodes

_SOURCE = Path(__file__).with_suffix(".cpp")
_SUFFIX = {torch.float64: "f64", torch.float32: "f32"}
Array = np.ndarray[Any, Any]


def usable(like: Tensor) -> bool:
    """Can programs work on such a tensor?"""
    return like.device.type == "cpu" and like.dtype in _SUFFIX and native.library(_SOURCE) is not None


class _Code(ctypes.Structure):
    """As in program.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("slots", "constants", "instructions", "outputs", "inputs")),
        *((name, ctypes.c_void_p) for name in ("constant", "instruction", "output", "width")),
    ]


class Program:
    """Outputs as functions of inputs.

    Args:
        nodes: what was recorded.
        inputs: the nodes of the inputs, an array of them for each tensor.
        outputs: the nodes that are asked for.
    """

    def __init__(self, nodes: Nodes, inputs: Sequence[Array], outputs: Array) -> None:
        constants, instructions, slots, output = _compiled(nodes, inputs, outputs.ravel())
        width = np.array([part.size for part in inputs], np.int64)
        self.instructions = len(instructions)
        self._arrays = constants, instructions, output, width  # kept, as the code has only their addresses
        sizes = (slots, len(constants), len(instructions), len(output), len(width))
        self._code = _Code(*sizes, *(array.ctypes.data for array in self._arrays))

    def __call__(self, *inputs: Tensor) -> Tensor:
        """(outputs, B) for inputs (B, ...), the first of which says the dtype."""
        like = inputs[0]
        given = [part.detach().to(like.dtype).contiguous() for part in inputs]
        found = like.new_empty(len(self._arrays[2]), len(like))
        library = native.library(_SOURCE)
        assert library is not None
        pointers = (ctypes.c_void_p * len(given))(*(part.data_ptr() for part in given))
        function = library[f"run_{_SUFFIX[like.dtype]}"]
        function(ctypes.byref(self._code), ctypes.c_int64(len(like)), pointers, ctypes.c_void_p(found.data_ptr()))
        return found


def _compiled(nodes: Nodes, inputs: Sequence[Array], outputs: Array) -> tuple[Array, Array, int, Array]:
    """Constants, instructions, the number of slots, and the slots of the outputs."""
    kind, first, second = (array[: nodes.count].tolist() for array in (nodes.kind, nodes.first, nodes.second))
    last = [-1] * nodes.count  # the last operation that needs a node; those of outputs are never free
    for node in set(outputs.tolist()):
        last[node] = nodes.count
    for node in reversed(range(nodes.count)):
        if kind[node] >= 0 and last[node] >= 0:
            for argument in (first[node], second[node]):
                last[argument] = max(last[argument], node)
    constants = [node for node in range(nodes.count) if kind[node] == CONSTANT and last[node] >= 0]
    order = [*constants, *(node for part in inputs for node in part.ravel().tolist())]
    slot = {node: place for place, node in enumerate(order)}
    free, instructions, slots = list[int](), list[tuple[int, int, int, int]](), len(order)
    for node in range(nodes.count):
        if kind[node] < 0 or last[node] < 0:
            continue
        a, b = first[node], second[node]
        arguments = slot[a], slot[b]
        for argument in {a, b}:
            if last[argument] == node and kind[argument] >= 0:
                free.append(slot[argument])
        if free:
            slot[node] = free.pop()
        else:
            slot[node], slots = slots, slots + 1
        instructions.append((kind[node], slot[node], *arguments))
    return (
        nodes.value[np.array(constants, np.int64)].astype(np.float64),
        np.array(instructions, np.int32).reshape(-1, 4),
        slots,
        np.array([slot[node] for node in outputs.tolist()], np.int32),
    )
