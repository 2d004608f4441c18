"""Compiled factors, and what happens where nothing can be compiled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from snarenet import native
from snarenet.linalg import SparseNormal, simplicial
from snarenet.linalg.simplicial import SimplicialFactor
from snarenet.testing import assert_equal, draw

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
BATCH, ROWS, COLUMNS = 11, 30, 40  # two groups of samples, one of them with room left


def system(form: str, dtype: torch.dtype = torch.float64) -> tuple[SparseNormal, tuple[torch.Tensor, ...]]:
    """A sparse system and its data."""
    pattern = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) < 0.1
    row, col = pattern.nonzero(as_tuple=True)
    normal = SparseNormal(row, col, (ROWS, COLUMNS), form)  # pyright: ignore[reportArgumentType]
    damping, weights = (draw(BATCH, size, seed=size).abs() + 0.01 for size in (ROWS, COLUMNS))
    active = draw(BATCH, ROWS, seed=3) > -1
    data = (draw(BATCH, len(row), seed=1).to(dtype), damping.to(dtype), weights.to(dtype), active)
    return normal, data


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", ["dual", "primal"])
def test_a_sample_does_not_depend_on_its_batch(form: str, dtype: torch.dtype) -> None:
    normal, data = system(form, dtype)
    rhs, v = draw(BATCH, ROWS, seed=5).to(dtype), draw(BATCH, COLUMNS, seed=6).to(dtype)
    together = normal.factor(*data)
    assert isinstance(together.gram.core, SimplicialFactor)
    for i in range(BATCH):
        alone, chosen = normal.factor(*(part[i : i + 1] for part in data)), together[torch.tensor([i])]
        for factor in (alone, chosen):
            assert torch.equal(factor.solve(rhs[i : i + 1]), together.solve(rhs)[i : i + 1])
            assert torch.equal(factor.push(v[i : i + 1]), together.push(v)[i : i + 1])
            assert torch.equal(factor.pull(rhs[i : i + 1]), together.pull(rhs)[i : i + 1])


@needs_compiler
@pytest.mark.parametrize("form", ["dual", "primal"])
def test_the_same_as_by_torch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    normal, data = system(form)
    rhs = draw(BATCH, ROWS, 3, seed=5)
    compiled = normal.factor(*data)
    solved, pushed = compiled.solve(rhs), compiled.push(draw(BATCH, COLUMNS, seed=6))
    monkeypatch.setattr(native, "library", lambda source: None)
    plain = normal.factor(*data)
    assert not isinstance(plain.gram.core, SimplicialFactor)
    assert_equal(solved, plain.solve(rhs), 1e-12)
    assert_equal(pushed, plain.push(draw(BATCH, COLUMNS, seed=6)), 1e-14)


@needs_compiler
def test_one_that_is_singular_says_so_and_disturbs_nobody() -> None:
    normal, (values, damping, *_) = system("dual")
    solid = normal.gram.compiled.factor(values.T.contiguous(), damping)
    damping[4] = -100.0
    found = normal.gram.compiled.factor(values.T.contiguous(), damping)
    assert found.info.nonzero().flatten().tolist() == [4]
    others = torch.arange(BATCH) != 4
    assert torch.equal(found.numbers.mT.flatten(0, 1)[:BATCH][others], solid.numbers.mT.flatten(0, 1)[:BATCH][others])


class TestLibrary:
    def load(self) -> object:
        return native.library.__wrapped__(simplicial._SOURCE)

    @needs_compiler
    def test_it_is_built_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
        assert self.load() is not None
        (built,) = (tmp_path / "native").iterdir()
        before = built.stat().st_mtime_ns
        assert self.load() is not None
        assert [path.stat().st_mtime_ns for path in (tmp_path / "native").iterdir()] == [before]

    @pytest.mark.parametrize(
        ("name", "value"), [("CXX", "false"), ("CXX", "/no/such/compiler"), ("SNARENET_NATIVE", "0")]
    )
    def test_torch_does_the_work(self, name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
        monkeypatch.setenv(name, value)
        assert self.load() is None

    @needs_compiler
    def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
        assert self.load() is not None
        (tmp_path / "native").chmod(0o777)
        assert self.load() is None
