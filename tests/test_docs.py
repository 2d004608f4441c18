"""The Python blocks of README and docs run, one after the other within a page, and links lead somewhere.

The `{code-cell}` blocks of the tutorials run when the site is built: `make docs`. The pages of the doors have a test of
their own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import snarenet as sn

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
WITH_CODE = [page for page in PAGES if "```python" in page.read_text() and page.parent.name != "doors"]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_pages_that_show_code() -> None:
    """A page that loses its code, or its fences, is noticed."""
    assert {"README.md", "docs/choosing.md", "docs/training.md", "docs/tutorials/8-gpus.md"} <= set(
        map(name, WITH_CODE)
    )


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": page.stem}
    for match in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        line = page.read_text()[: match.start(1)].count("\n")
        exec(compile("\n" * line + match[1], str(page), "exec"), names)
    assert "sn" in names


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("[0-9]*.md")), ids=name)
def test_a_lesson_runs_and_leads_on(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("---\nfile_format: mystnb\n")
    assert "```{code-cell} ipython3\n" in text
    assert "\n## Next\n" in text


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = set(re.findall(r"^\.\. auto(?:class|function|exception):: (?:[\w.]+\.)?(\w+)$", pages, re.MULTILINE))
    names = {name for name in sn.__all__ if not isinstance(getattr(sn, name), ModuleType)}
    assert names <= listed


def test_docstrings_become_restructured_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    sys.modules.pop("docstrings", None)
    from docstrings import convert  # pyright: ignore[reportMissingImports]

    lines = ["the same as $y^2$ of `x * y`, or 1 / scale**2:", "", "$$ a_i", "   = 1 $$", "", ">>> 2 ** 3", "8"]
    assert [line for line in convert(lines) if line] == [
        r"the same as :math:`y^2` of `x * y`, or 1 / scale\*\*2:",
        ".. math::",
        "   a_i = 1",
        ">>> 2 ** 3",
        "8",
    ]


def test_the_citation_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()
