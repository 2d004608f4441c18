"""Where kernels can run, what they are compiled with, and how they are loaded."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from snarenet.repair import scale
from snarenet.repair.gpu import nvrtc
from snarenet.repair.stopping import CONVERGED, GOING, NONFINITE, STALLED

SLICE = 16  # numbers that one thread of a block adds up at a time


def supported(tensor: Tensor) -> bool:
    """Can kernels run where this tensor is?"""
    return tensor.is_cuda and tensor.numel() > 0 and nvrtc.installed() and not torch.compiler.is_compiling()


def most_shared(tensor: Tensor) -> int:
    """Bytes of shared memory that a block may have."""
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin


def multiprocessors(tensor: Tensor) -> int:
    """How many of them the device has."""
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


@functools.cache
def load(source: str, dtype: torch.dtype, device: torch.device, **numbers: int) -> nvrtc.Kernels:
    """The kernels of a source file, compiled with the numbers of its Python side."""
    with torch.cuda.device(device):
        return nvrtc.Kernels(source, definitions(dtype, **numbers))


def definitions(dtype: torch.dtype, **numbers: int) -> list[str]:
    """What the sources leave to the compiler's options."""
    values: dict[str, object] = {"REAL": "double" if dtype == torch.float64 else "float"}
    values |= {"EPSILON": torch.finfo(dtype).eps, "VANISHING": scale.VANISHING, "SLICE": SLICE}
    values |= {"GOING": GOING, "CONVERGED": CONVERGED, "STALLED": STALLED, "NONFINITE": NONFINITE}
    return [f"-D{name}={value}" for name, value in (values | numbers).items()]


@functools.lru_cache(maxsize=64)
def constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these, made once: a copy to the device cannot be recorded."""
    return torch.tensor(values, dtype=dtype, device=device)
