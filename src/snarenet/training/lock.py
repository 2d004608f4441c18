"""`hold`: a run folder belongs to one training at a time.

The lock is the kernel's (`flock`) on a file in the folder. It ends with the process that holds it, however that ends:
after a kill there is nothing to clear away.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from snarenet.training.folder import RunError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_FILE = ".lock"


@contextmanager
def hold(folder: str | Path) -> Iterator[None]:
    """Keep every other training out of a folder; an error if one is in it.

    Where a folder cannot be locked, on Windows and on some network disks, a warning says so.
    """
    path, handle = Path(folder) / _FILE, None
    try:
        handle = _take(path)
    except BlockingIOError:
        holder = _holder(path)
        raise RunError(f"{folder} is in use by {holder}: wait until that ends, or choose another folder") from None
    except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error}): let no other training write to it", stacklevel=3)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                path.unlink()  # while it is still held: `_take` sees that the file it had opened is gone
            os.close(handle)


def _take(path: Path) -> int:
    """An open file with the lock on it; BlockingIOError if another has it."""
    if fcntl is None:
        raise OSError("this system has no flock")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open(path, handle):
                os.truncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed it meanwhile: there may be a new one


def _is_open(path: Path, handle: int) -> bool:
    """Is this the file that is open, and not one that has come in its place?"""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Who has the lock, as its file says."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip() or "another process"
    return "another process"
