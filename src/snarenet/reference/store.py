"""Results on disk: one file per chunk of instances, named by a hash of all that the result depends on.

A file is written whole or not at all, so a run that was killed goes on where it stopped; a file that cannot be read is
treated as missing; a folder that cannot be written costs a warning, never the run.
"""

from __future__ import annotations

import os
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from snarenet.files import write_whole
from snarenet.reference.program import Array


class Chunk(NamedTuple):
    """What is kept of k instances: value (k, n), kkt (k,) and seconds (k,)."""

    value: Array
    kkt: Array
    seconds: Array


class Store:
    """A folder of chunks.

    Args:
        folder: where; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @staticmethod
    def default() -> Path:
        """The folder `reference` in $SNARENET_CACHE, or in ~/.cache/snarenet."""
        return Path(os.environ.get("SNARENET_CACHE") or Path.home() / ".cache" / "snarenet") / "reference"

    def load(self, key: str, count: int, size: int) -> Chunk | None:
        """The chunk of this key, with `count` instances of `size` unknowns; None if there is no such file."""
        if self.folder is None:
            return None
        try:
            with np.load(self.folder / f"{key}.npz", allow_pickle=False) as file:
                chunk = Chunk(*(file[name] for name in Chunk._fields))
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error):
            return None
        fits = [part.shape for part in chunk] == [(count, size), (count,), (count,)]
        return chunk if fits and all(part.dtype == np.float64 for part in chunk) else None

    def save(self, key: str, chunk: Chunk) -> None:
        """Write a chunk; the first failure warns and ends the writing."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / f"{key}.npz", lambda file: np.savez(file, **chunk._asdict()))
        except OSError as error:
            warnings.warn(f"reference solutions are not kept in {self.folder}: {error}", stacklevel=4)
            self.folder = None
