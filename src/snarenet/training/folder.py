"""`Folder`: files of tensors, arrays, JSON and text, written whole or not at all, and checked when they are read.

Tensors carry a SHA-256 of their names, types, shapes and bytes, and of the numbers beside them; zip archives of arrays
have checksums of their own. What cannot be read, or is not what it was when it was written, ends in a `RunError` that
names the file.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snarenet.files import write_whole


class RunError(RuntimeError):
    """Something is wrong with a run folder; the message is one sentence for people."""


class Folder:
    """A folder with files of a few kinds.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_tensors(self, name: str, tensors: dict[str, Tensor], state: dict[str, Any] | None = None) -> None:
        """Write tensors to a safetensors file, with some numbers in its header."""
        from safetensors.torch import save

        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        text = json.dumps(state or {})
        self._write(name, lambda file: file.write(save(plain, {"state": text, "sha256": _digest(plain, text)})))

    def read_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and numbers of a safetensors file; one of the first version has no checksum."""
        from safetensors import safe_open

        path = self.path / name
        if not path.exists():
            raise RunError(f"{self.path} has no {name}")
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata()
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            state = json.loads(header["state"])
            if not isinstance(state, dict):
                raise TypeError(f"its state is {brief(state)}")
            if header.get("sha256", (found := _digest(tensors, header["state"]))) != found:
                raise ValueError("its content is not what was written: the checksum differs")
        except Exception as error:  # whatever the readers make of damaged bytes
            raise RunError(f"{path} is damaged or not a checkpoint of snarenet: {words(error)}") from error
        return tensors, state

    def write_json(self, name: str, content: object) -> None:
        """Write a JSON file."""
        self.write_text(name, json.dumps(content, indent=1))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file, if it is there."""
        text = self.read_text(name)
        if text is None:
            return None
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{self.path / name} must hold JSON, but it does not: {error}") from error
        if not isinstance(content, dict):
            raise RunError(f"{self.path / name} must hold a JSON object, but it holds {brief(content)}")
        return content

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        self._write(name, lambda file: file.write(text.encode()))

    def read_text(self, name: str) -> str | None:
        """A text file, if it is there."""
        path = self.path / name
        try:
            return path.read_bytes().decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RunError(f"{path} is damaged: it is not text ({error})") from error

    def write_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        """Write arrays to an npz file."""
        self._write(name, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))

    def read_arrays(self, name: str) -> dict[str, np.ndarray] | None:
        """The arrays of an npz file, if it is there."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as archive:  # numpy does not read on to the checksums
                if (bad := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {bad} differs")
            with np.load(path, allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except Exception as error:  # whatever the readers make of damaged bytes
            raise RunError(f"{path} is damaged or not a file of arrays: {words(error)}") from error

    def _write(self, name: str, write: Callable[[Any], object]) -> None:
        path = self.path / name
        try:
            write_whole(path, write)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}; what was saved before is intact") from error


def _digest(tensors: Mapping[str, Tensor], state: str) -> str:
    """A hash of all that a file of tensors holds."""
    digest = hashlib.sha256(state.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def words(error: BaseException, most: int = 300) -> str:
    """What an error says, in one line of at most so many characters."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= most else f"{said[:most]} ..."


def brief(value: object) -> str:
    """A value read from JSON, in at most 40 characters or so."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]} ..."
