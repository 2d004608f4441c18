"""Shared fixtures: one thread per worker, seeded generators, and the devices at hand."""

from __future__ import annotations

import pytest
import torch

collect_ignore_glob = ["src/snarenet/doors/*"]  # no doctests there, but packages that take seconds to import

torch.set_num_threads(1)  # two workers on two cores; small sizes gain nothing from threads


def pytest_configure(config: pytest.Config) -> None:
    """A test that lets a repair fail must expect it. (In pyproject.toml this would import the package too early.)"""
    config.addinivalue_line("filterwarnings", "error::snarenet.solution.RepairWarning")


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param
