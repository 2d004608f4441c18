"""The CUDA kernels on a CPU: their sources compiled as C++, see emulation.h. Slow; for tests without a GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from snarenet.repair.gpu import blocks, launching, nvrtc, rows, sparse, stepping
from snarenet.repair.gpu.nvrtc import Argument

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Emulation:
    """Has the interface of `nvrtc.Kernels`."""

    def __init__(self, name: str, options: Sequence[str], ran: list[str]) -> None:
        self.library, self.ran = ctypes.CDLL(_build(name, tuple(options))), ran

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: Sequence[Argument]) -> None:
        self.ran.append(name)
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values))
        answer = self.library.launch(name.encode(), blocks, threads, shared, pointers)
        assert answer == 0, ("wrote beyond its shared memory", "no such kernel")[answer - 1]


def _value(argument: Argument) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_double:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_double(argument)


@functools.cache
def _build(name: str, options: tuple[str, ...]) -> str:
    """The shared library of a source file, kept from one test run to the next."""
    header, source = Path(__file__).with_suffix(".h"), nvrtc.folder() / f"{name}.cu"
    included = sorted(nvrtc.folder().glob("*.cuh"))
    text = b"".join(path.read_bytes() for path in (header, *included, source))
    key = hashlib.sha256(text + repr(options).encode()).hexdigest()[:16]
    library = cache() / f"{key}.so"
    if not library.exists():
        code = "".join(path.read_text() for path in (*included, source) if path.name in _includes(source))
        names = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(', code)
        names += [f"{base}{s}" for base in re.findall(r"(\w+)##S\(", code) for s in (1, 2, 4)]
        entries = " ".join(f"ENTRY({kernel})" for kernel in names if f"{kernel}##S" not in code)
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-pthread", "-x", "c++"]
        command += [
            "-Wno-unknown-pragmas",
            str(header),
            f'-DSOURCE="{source}"',
            f"-DENTRIES={entries}",
            f"-I{nvrtc.folder()}",
            *options,
        ]
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            done = subprocess.run([*command, "-o", f"{folder}/emulation.so"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(f"{folder}/emulation.so", library)  # whole, whichever of several processes is first
    return str(library)


def cache() -> Path:
    """A folder that nobody but this user can write to: what lies in it is loaded and run."""
    folder = Path(os.environ.get("SNARENET_CACHE") or Path.home() / ".cache" / "snarenet") / "emulation"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    assert private, f"{folder} must be a folder that only its owner, this user, can write to"
    return folder


def _includes(source: Path) -> set[str]:
    """The names of a source file and of all that it includes."""
    found = {source.name}
    for name in re.findall(r'#include "(\w+\.cuh)"', source.read_text()):
        found |= _includes(source.with_name(name))
    return found


def emulate(patch: pytest.MonkeyPatch, threads: int = 4) -> list[str]:
    """From now on the kernels run, emulated; the names of those that ran are in the list."""
    ran: list[str] = []

    @functools.cache
    def load(name: str, dtype: torch.dtype, device: torch.device, **numbers: int) -> Emulation:
        return Emulation(name, launching.definitions(dtype, **numbers), ran)

    patch.setattr(launching, "supported", lambda tensor: tensor.numel() > 0 and not torch.compiler.is_compiling())
    patch.setattr(launching, "most_shared", lambda tensor: 2**20)
    patch.setattr(launching, "multiprocessors", lambda tensor: 2**10)
    patch.setattr(rows, "THREADS", threads)
    patch.setattr(blocks, "THREADS", threads)
    patch.setattr(sparse, "THREADS", threads)
    patch.setattr(sparse, "WARP", 1)
    patch.setattr(stepping, "THREADS", threads)
    patch.setattr(launching, "load", load)
    return ran


on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
on_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_compiler, id="emulated"), pytest.param("cuda", marks=on_a_gpu)]
)


def use_kernels(patch: pytest.MonkeyPatch, device: str, on: bool = True) -> list[str]:
    """Kernels from now on, emulated on a CPU, or none at all; the names of those that ran are in the list."""
    if on and device == "cpu":
        return emulate(patch)
    ran: list[str] = []
    if not on:
        patch.setattr(launching, "supported", lambda tensor: False)
        return ran
    launch = nvrtc.Kernels.launch

    def noted(self: nvrtc.Kernels, name: str, *rest) -> None:
        ran.append(name)
        launch(self, name, *rest)

    patch.setattr(nvrtc.Kernels, "launch", noted)
    return ran
