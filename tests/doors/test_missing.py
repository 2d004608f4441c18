"""A door whose package is not installed says in a sentence what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("door", "module"),
    [
        ("botorch", "botorch.optim.initializers"),
        ("gymnasium", "gymnasium"),
        ("lightning", "lightning"),
        ("sklearn", "sklearn.base"),
    ],
)
def test_a_missing_extra_is_named(door: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"snarenet.doors.{door}", raising=False)
    with pytest.raises(ImportError, match=rf'pip install "snarenet\[{door}\]"'):
        importlib.import_module(f"snarenet.doors.{door}")
