"""`write_whole`: a file is written whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file, and put it in the place of `path`; an error leaves what was there and no debris."""
    draft = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".new", delete=False) as file:
            draft = file.name
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, 0o666 & ~_umask())  # a temporary file is for its owner only; what it becomes is not
        os.replace(draft, path)
    except BaseException:
        if draft is not None:
            with contextlib.suppress(OSError):
                os.unlink(draft)
        raise


def remove_drafts(path: Path) -> None:
    """Remove what kills have left of earlier attempts to write `path`; nobody may be writing it."""
    for draft in path.parent.glob(f".{path.name}.*.new"):
        draft.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
