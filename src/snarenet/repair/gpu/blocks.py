"""Kernels that take a few samples a block; `blocks.cuh` is their other half."""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.repair.gpu import launching, nvrtc

MOST_ROWS = 128  # with more, all samples together make better use of a matrix than a few
THREADS = 512  # of a block
_BLOCKS = 264  # to aim at: two for each multiprocessor of a large GPU
# the arrays that a kernel keeps in shared memory, each with a number for every sample and row of the block
_ARRAYS = {"forward": 6, "backward": 4, "approach": 6, "approach_back": 6}


def load(source: str, dtype: torch.dtype, device: torch.device) -> nvrtc.Kernels:
    """The kernels of a source file."""
    return launching.load(source, dtype, device, **{f"{name.upper()}_ARRAYS": n for name, n in _ARRAYS.items()})


def launch(source: str, name: str, first: Tensor, *arguments: nvrtc.Argument) -> None:
    """Launch a kernel for the samples in `first` (B, rows), its first tensor; `arguments` are the others."""
    batch, rows = first.shape
    samples = next((count for count in (1, 2) if batch <= count * _BLOCKS), 4)  # of a block
    numbers = samples * (_ARRAYS[name] * rows + max(THREADS, launching.SLICE))
    program = load(source, first.dtype, first.device)
    shared = numbers * first.element_size()
    program.launch(f"{name}{samples}", -(-batch // samples), THREADS, shared, [rows, batch, first, *arguments])
