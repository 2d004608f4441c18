"""GPU kernels in CUDA C++, compiled for the device when they are first needed; `linear.cu` and `curved.cu`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from snarenet.repair.kernels import nvrtc
from snarenet.solution import Status

VANISHING = 1e-8  # share of the mean squared length of rows that a vanishing row is given


def supported(tensor: Tensor) -> bool:
    """Can kernels run where this tensor is?"""
    return tensor.is_cuda and tensor.numel() > 0 and nvrtc.installed() and not torch.compiler.is_compiling()


def most_shared(tensor: Tensor) -> int:
    """Bytes of shared memory that a block may have."""
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin


@functools.cache
def load(name: str, dtype: torch.dtype, device: torch.device) -> nvrtc.Kernels:
    """The kernels of a file."""
    with torch.cuda.device(device):
        return nvrtc.Kernels(name, definitions(dtype))


def definitions(dtype: torch.dtype) -> list[str]:
    """What the sources leave to the compiler's options."""
    values: dict[str, object] = {"REAL": "double" if dtype == torch.float64 else "float"}
    values |= {"EPSILON": torch.finfo(dtype).eps, "VANISHING": VANISHING}
    values |= {"GOING": int(Status.MAX_STEPS), "CONVERGED": int(Status.CONVERGED)}
    values |= {"STALLED": int(Status.STALLED), "NONFINITE": int(Status.NONFINITE)}
    return [f"-D{name}={value}" for name, value in values.items()]
