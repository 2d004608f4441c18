"""CUDA C++ compiled at run time: NVRTC and the driver, through NVIDIA's `cuda.bindings`, which torch brings along."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float


@functools.cache
def installed() -> bool:
    """Are the bindings there?"""
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # not even `cuda`
        return False


class Kernels:
    """The kernels of a source file, for the current device.

    Args:
        name: of the file beside this one; its kernels are `extern "C"`.
        options: for the compiler, such as "-DREAL=double".
    """

    def __init__(self, name: str, options: Sequence[str]) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream().synchronize()  # makes sure that there is a context to load into
        image = _compile(name, options)
        self._module = _checked(driver.cuModuleLoadData(image))
        self._functions: dict[str, Any] = {}

    def launch(
        self, name: str, blocks: int, threads: int, shared: int, arguments: Sequence[Tensor | int | float]
    ) -> None:
        """Launch a kernel on the current stream; `shared` is its dynamic shared memory in bytes.

        An int becomes an `int`, a float a `double` and a tensor a pointer.
        """
        from cuda.bindings import driver

        if name not in self._functions:
            function = _checked(driver.cuModuleGetFunction(self._module, name.encode()))
            most = torch.cuda.get_device_properties().shared_memory_per_block_optin
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, attribute, most))
            self._functions[name] = function
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        types = tuple(
            ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_double if isinstance(a, float) else ctypes.c_int
            for a in arguments
        )
        stream = torch.cuda.current_stream().cuda_stream
        _checked(
            driver.cuLaunchKernel(
                self._functions[name], blocks, 1, 1, threads, 1, 1, shared, stream, (values, types), 0
            )
        )


def folder() -> Path:
    """Where the sources are."""
    return Path(__file__).parent


def _compile(name: str, options: Sequence[str]) -> bytes:
    """The machine code of a source file for the current device."""
    from cuda.bindings import nvrtc

    text = (folder() / f"{name}.cu").read_bytes()
    major, minor = torch.cuda.get_device_capability()
    program = _checked(nvrtc.nvrtcCreateProgram(text, f"{name}.cu".encode(), 0, [], []))
    arguments = [option.encode() for option in (f"-arch=sm_{major}{minor}", "-std=c++17", f"-I{folder()}", *options)]
    result = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)[0]
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{name}.cu could not be compiled for this GPU:\n{log.decode()}")
    image = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, image))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return image


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its error code, if that is zero."""
    code, *found = answer
    if int(code) != 0:
        raise RuntimeError(f"CUDA reports {code!r}")
    return found[0] if found else None
