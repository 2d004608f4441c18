"""C++ that is compiled on this machine when it is first needed, where there is a compiler.

What is built is kept in a folder of the user's, `SNARENET_CACHE` or ~/.cache/snarenet, under a name that follows from
the source, the compiler and the processor. Without a compiler, or with `SNARENET_NATIVE=0`, torch does the work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC")
_SECONDS = 120  # that a compiler may take: it needs two


@functools.cache
def library(source: Path) -> ctypes.CDLL | None:
    """The functions of a source file; None where nothing can be compiled."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or os.name != "posix" or os.environ.get("SNARENET_NATIVE") == "0":
        return None
    try:
        return ctypes.CDLL(str(_built(source, compiler)))
    except (OSError, subprocess.SubprocessError):  # no such compiler, an old one, no place to write, ...
        return None


def _built(source: Path, compiler: str) -> Path:
    """The shared library of a source file, built unless it is there already."""
    key = hashlib.sha256(source.read_bytes() + repr((compiler, _FLAGS, _processor())).encode()).hexdigest()[:16]
    found = _folder() / f"{source.stem}-{key}.so"
    if not found.exists():
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            built = f"{folder}/{found.name}"
            command = [*compiler.split(), *_FLAGS, str(source), "-o", built]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            os.replace(built, found)  # whole, whichever of several processes is first
    return found


def _processor() -> str:
    """What `-march=native` depends on: a home may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _folder() -> Path:
    """A folder that nobody but this user can write to: what lies in it is loaded and run."""
    folder = Path(os.environ.get("SNARENET_CACHE") or Path.home() / ".cache" / "snarenet") / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise OSError(f"{folder} must be a folder that only its owner, this user, can write to")
    return folder
