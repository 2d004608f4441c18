"""Links of pages to what is no page: a file of the repository is named, and the explorer is taken along.

`[the module](../src/snarenet/problems/mpc.py)` leads to the file where the repository is browsed. The site has no such
file, so there it says: the module (`src/snarenet/problems/mpc.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
EXPLORER = DOCS / "explorer"  # a page without Sphinx, of files of its own
PAGES = {"README.md": "index", "CHANGELOG.md": "changes", "CONTRIBUTING.md": "contributing"}  # those above docs/


class RepositoryLinks(SphinxPostTransform):
    """Takes links to files and folders before MyST, which knows pages and downloads alone."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """Replace those of one page."""
        page = DOCS / self.env.doc2path(self.env.docname, base=False)
        links = [node for kind in (pending_xref, download_reference) for node in self.document.findall(kind)]
        for node in links:
            if node.get("reftype") == "myst" and (target := _path(node, page)) is not None:
                self._lead(node, target)

    def _lead(self, node: nodes.Element, target: Path) -> None:
        assert self.app.builder is not None
        if target.is_relative_to(EXPLORER):
            up = "../" * self.env.docname.count("/")
            uri = f"{up}{target.relative_to(DOCS).as_posix()}"
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri) if target.exists() else node.children)
        elif target.parent == ROOT and target.name in PAGES:
            uri = self.app.builder.get_relative_uri(self.env.docname, PAGES[target.name])
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))
        elif target.exists() and not (target.is_file() and target.is_relative_to(DOCS)):  # those are downloads
            path = target.relative_to(ROOT).as_posix()
            name = nodes.literal(path, path)
            named = [*node.children, nodes.Text(" ("), name, nodes.Text(")")]
            node.replace_self(name if node.astext() == path else named)


def _path(node: nodes.Element, page: Path) -> Path | None:
    """Where a link of a page leads, if that is no page."""
    target = node["reftarget"].partition("#")[0]
    if node["refdomain"] == "doc":  # a page by its name, or, with an absolute path, a Markdown file outside docs
        return Path(f"{target}.md").resolve() if target.startswith("/") else None
    return (page.parent / target).resolve() if target else None


def _take_along(app: Any, error: Exception | None) -> None:
    if error is None and EXPLORER.is_dir() and app.builder.format == "html":
        shutil.copytree(
            EXPLORER, Path(app.outdir) / EXPLORER.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.md")
        )


def setup(app: Any) -> dict[str, bool]:
    """Replace links before they are resolved; copy the explorer when all else is written."""
    app.add_post_transform(RepositoryLinks)
    app.connect("build-finished", _take_along)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
