"""Formulas as MathML, which browsers draw by themselves: no script, no font, nothing from elsewhere."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

_LOG = logging.getLogger(__name__)

# commands that the converter of docutils does not know, in those that it does
_SPELLINGS = ((r"\\(big|Big)\b(?=\s*[(\[|])", r"\\\1l"), (r"\\(big|Big)\b(?=\s*[)\]])", r"\\\1r"), (r"\\texttt\b", r"\\mathtt"))


def to_mathml(tex: str, block: bool, where: nodes.Node | None = None) -> str:
    """The formula as MathML; one that cannot be converted is shown as it was written, with a warning."""
    for spelling, known in _SPELLINGS:
        tex = re.sub(spelling, known, tex)
    try:
        return tex2mathml(tex, as_block=block)
    except MathError as error:
        _LOG.warning("formula: %s", error, location=where)
        return f"<code>{nodes.unescape(tex)}</code>"


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
