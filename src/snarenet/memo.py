"""`Memo`: what was computed once, and holds as long as the tensors that it was computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Entry(NamedTuple):
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    contents: tuple[Tensor, ...]
    value: Any


class Memo:
    """What was computed from tensors that have not changed since; never saved, copied or moved."""

    def __init__(self) -> None:
        self._entries: dict[Any, _Entry] = {}

    def get(self, key: Any, sources: tuple[Tensor, ...], build: Callable[[], Any]) -> Any:
        """The result of `build()`, kept until one of `sources` is replaced or changes its contents."""
        entry = self._entries.get(key)
        if torch.compiler.is_compiling():  # a traced tensor has no version to compare
            return build() if entry is None else entry.value
        versions = tuple(source._version for source in sources)
        if entry is not None and all(a is b for a, b in zip(entry.sources, sources, strict=True)):
            if entry.versions == versions:
                return entry.value
            if all(torch.equal(a, b) for a, b in zip(entry.contents, sources, strict=True)):
                self._entries[key] = entry._replace(versions=versions)  # data-parallel training rewrites equal buffers
                return entry.value
        contents = tuple(source.detach().clone() for source in sources)
        if torch.is_inference_mode_enabled():  # tensors made there could not be differentiated with later
            with torch.inference_mode(False), torch.no_grad():
                value = build()
        else:
            value = build()
        self._entries[key] = _Entry(sources, versions, contents, value)
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Memo:
        return Memo()

    def __getstate__(self) -> dict[str, Any]:
        return {"_entries": {}}
