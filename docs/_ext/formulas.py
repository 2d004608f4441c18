"""Formulas as MathML, which browsers draw by themselves: no script, nothing to load, and it works offline."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

_LOG = logging.getLogger(__name__)

# what the converter of docutils does not know, in what it does
_SPELLINGS = (
    (r"\\(big|Big)\b(?=\s*[(\[])", r"\\\1l"),
    (r"\\(big|Big)\b(?=\s*[)\]])", r"\\\1r"),
    (r"\\texttt\b", r"\\mathtt"),
    (r"\\dots\b", r"\\ldots"),
    (r"\\([td]?frac)(\d)(\d)", r"\\\1{\2}{\3}"),
)


def to_mathml(tex: str, block: bool, where: nodes.Node | None = None) -> str:
    """The formula as MathML; one that cannot be converted is shown as it was written, with a warning."""
    for spelling, known in _SPELLINGS:
        tex = re.sub(spelling, known, tex)
    try:
        found = tex2mathml(tex, as_block=block)
    except MathError as error:
        _LOG.warning("formula: %s", error, location=where)
        return f"<code>{escape(tex)}</code>"
    if not re.search(r"\\left|\{cases\}", tex):  # fences grow only where TeX says so
        found = re.sub(r'<mo(?: class="math(?:open|close)")?>([{}‖])</mo>', r'<mo stretchy="false">\1</mo>', found)
    return found


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(to_mathml(node.astext(), block=False, where=node))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{to_mathml(node.astext(), block=True, where=node)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Offer `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
