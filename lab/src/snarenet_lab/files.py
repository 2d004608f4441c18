"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

from snarenet.files import write_whole


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(text.encode()))
