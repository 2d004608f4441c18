"""Packages that not everybody has installed."""

from __future__ import annotations

import importlib
from typing import Any


def need(package: str) -> Any:
    """The package, or an error that says how to install it; the extra has its name."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f'this door needs {package}: pip install "snarenet[{package}]"') from error
