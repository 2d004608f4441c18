"""Files are written whole or not at all, with the rights that any new file of the user gets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from snarenet import files
from snarenet.files import write_whole


def test_written_in_place_of_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"before, and longer")
    write_whole(tmp_path / "file", lambda file: file.write(b"after"))
    assert (tmp_path / "file").read_bytes() == b"after"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there_and_no_debris(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(file) -> None:
        file.write(b"half")
        raise error

    (tmp_path / "file").write_bytes(b"before")
    with pytest.raises(error):
        write_whole(tmp_path / "file", fail)
    assert (tmp_path / "file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_the_umask_decides_who_may_read(tmp_path: Path, umask: int, mode: int) -> None:
    code = """
import pathlib, runpy, sys
write_whole = runpy.run_path(sys.argv[1])["write_whole"]  # without torch, to be quick
write_whole(pathlib.Path(sys.argv[2]), lambda file: None)
"""
    subprocess.run([sys.executable, "-c", code, files.__file__, str(tmp_path / "file")], check=True, umask=umask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_the_umask_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the process: set for a moment, another thread's files would be open to all."""
    touched = []
    monkeypatch.setattr(os, "umask", lambda mask: touched.append(mask) or 0o022)
    write_whole(tmp_path / "file", lambda file: file.write(b"1"))
    assert touched == []


def test_threads_that_write_one_file(tmp_path: Path) -> None:
    """Whoever is last wins, with all that it wrote."""
    texts = [bytes([65 + k]) * 100_000 for k in range(8)]
    threads = [
        threading.Thread(target=write_whole, args=(tmp_path / "file", lambda file, text=text: file.write(text)))
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
