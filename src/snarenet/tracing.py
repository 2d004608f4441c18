"""Is this call traced? What is compiled, exported or recorded must not look at values."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def tracing() -> bool:
    """Is this call compiled, exported or recorded into a CUDA graph, so that it must not look at values?"""
    if torch.compiler.is_compiling():
        return True
    return capturing()


def capturing() -> bool:
    """Is this call recorded into a CUDA graph?"""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def without_grad() -> AbstractContextManager[Any]:
    """torch.no_grad(), except while a model is exported: an exported graph should not switch modes."""
    return nullcontext() if torch.compiler.is_exporting() else torch.no_grad()


def to_onnx() -> bool:
    """Is this call exported to ONNX, which knows no factorisations and rounds Python's numbers to float32?"""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
