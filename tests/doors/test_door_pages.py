"""The Python of docs/doors runs, block after block within a page; a page whose package is not installed is skipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGES = sorted((Path(__file__).parents[2] / "docs/doors").glob("*.md"))
NEEDS = {"export": "onnxruntime"}  # other pages have the name of their package


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


WITH_CODE = [pytest.param(page, id=page.stem) for page in PAGES if blocks(page)]


def test_every_door_shows_code() -> None:
    assert [page.name for page in PAGES if not blocks(page) and page.name != "index.md"] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*num_workers", "ignore:.*does not have many workers")
@pytest.mark.parametrize("page", WITH_CODE)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(NEEDS.get(page.stem, page.stem), reason=f"the extra of {page.name} is not installed")
    if page.stem == "gymnasium":
        pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)
    assert "sn" in names
