"""A package that cannot share our environment: its script runs in an interpreter of its own, arrays go in files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def interpreter(module: str, variable: str) -> str | None:
    """The Python that `variable` of the environment names, or this one if it has the module; else None."""
    return os.environ.get(variable) or (sys.executable if importlib.util.find_spec(module) else None)


def run(
    python: str,
    script: Path,
    task: str,
    arrays: Mapping[str, np.ndarray],
    environment: Mapping[str, str],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What a task of a script makes of the arrays.

    The script imports nothing of ours, and is called with the task, two files and the settings as JSON: it reads arrays
    from the first, and writes what it finds to the second. An error of its own is a `RuntimeError` here.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source.npz"), Path(folder, "target.npz")
        np.savez(source, allow_pickle=False, **arrays)
        # as text: a script's own folder would come first in its path, where modules have names that others use
        command = [python, "-c", script.read_text(), task, str(source), str(target), json.dumps(settings)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
        if done.returncode:
            raise RuntimeError(f"{script.stem} failed in {python}: {done.stderr.strip()[-2000:]}")
        with np.load(target) as file:
            return dict(file)


def jax_environment(device: str, threads: int) -> dict[str, str]:
    """Variables for JAX: float64, this device and so many threads, beside torch."""
    return {
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": device,
        "NPROC": str(threads),  # XLA's threads
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the GPU is torch's, too
    }
