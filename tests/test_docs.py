"""The Python blocks of README and docs run, one after the other within a page, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


def test_pages_that_show_code() -> None:
    """A page that loses its code, or its fences, is noticed."""
    assert {"README.md", "choosing.md", "training.md"} <= {page.name for page in WITH_CODE}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    for match in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        line = page.read_text()[: match.start(1)].count("\n")
        exec(compile("\n" * line + match[1], str(page), "exec"), names)
    assert "sn" in names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
