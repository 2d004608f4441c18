"""One thread for linear algebra while small systems are solved: on these, threads only wait for each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from snarenet.reference.program import need

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit libraries that are loaded already by threadpoolctl, and CasADi's and new processes by the environment."""
    need("scipy.optimize")  # loaded now, it gets its threads back at the end
    before = {name: os.environ.get(name) for name in _VARIABLES}
    with need("threadpoolctl").threadpool_limits(1):
        os.environ.update(dict.fromkeys(_VARIABLES, "1"))
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
