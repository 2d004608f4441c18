r"""Docstrings of the library, with `names` in single backticks and formulas in dollars, as reStructuredText.

A name in single backticks becomes a link where the reference has it and code where not, by Sphinx's default role; here
formulas become `:math:` and `.. math::`, and what else has a meaning in reStructuredText is escaped.
"""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(``[^`]+``|`[^`]+`)")
_DISPLAY = re.compile(r"^([ ]*)\$\$(.+?)\$\$[ ]*$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"\$([^$\n]+(?:\n[^$\n]+)?)\$")
_SPECIAL = re.compile(r"\*|\||(?<=\w)_(?!\w)")


def convert(lines: list[str]) -> list[str]:
    """The lines of a docstring; examples, which begin with >>>, stay as they are."""
    found: list[str] = []
    text: list[str] = []
    example = False
    for line in lines:
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            text.append(line)
            continue
        found += _prose(text)
        found, text = [*found, line], []
    return found + _prose(text)


def _prose(lines: list[str]) -> list[str]:
    return _formulas("\n".join(lines)).split("\n") if lines else []


def _formulas(text: str) -> str:
    text = _DISPLAY.sub(_display, text)
    parts = re.split(r"(^[ ]*\.\. math::\n(?:\n|[ ]+.*\n)*)", text, flags=re.MULTILINE)
    return "".join(part if k % 2 else _plain(part) for k, part in enumerate(parts))


def _display(match: re.Match[str]) -> str:
    indent, formula = match[1], " ".join(match[2].split())
    return f"\n{indent}.. math::\n\n{indent}   {formula}\n\n"


def _plain(text: str) -> str:
    """Text without displayed formulas: code is left alone, formulas are marked, the rest is escaped."""
    pieces = _CODE.split(text)
    for k in range(0, len(pieces), 2):
        inner = _INLINE.split(pieces[k])
        for j, piece in enumerate(inner):
            inner[j] = f":math:`{' '.join(piece.split())}`" if j % 2 else _SPECIAL.sub(r"\\\g<0>", piece)
        pieces[k] = "".join(inner)
    return "".join(pieces)


def _on_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = convert(lines)
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment, else napoleon takes what is before a colon for a type


def _on_signature(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any) -> Any:
    """No signature where fields are listed one by one."""
    if what == "class" and (name == "snarenet.TrainConfig" or name.startswith("snarenet.training.parts.")):
        return "", None
    return None


def setup(app: Any) -> dict[str, bool]:
    """Convert before napoleon reads the sections."""
    from sphinx.util.inspect import TypeAliasForwardRef

    TypeAliasForwardRef.__repr__ = lambda alias: alias.name  # in a union autodoc writes an alias by its repr
    app.connect("autodoc-process-signature", _on_signature)
    app.connect("autodoc-process-docstring", _on_docstring, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
