"""`write_whole`: a file is written whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file, and put it in the place of `path`; an error leaves what was there and no debris."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    try:
        with open(draft, "x+b") as file:  # a temporary file would be for its owner only; here the user's umask decides
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def remove_drafts(path: Path) -> None:
    """Remove what kills have left of earlier attempts to write `path`; nobody may be writing it."""
    for draft in path.parent.glob(f".{path.name}.*.new"):
        draft.unlink(missing_ok=True)
