"""What pages of HTML have in common: style, skeleton, sections, figures. A page is one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape

from snarenet.report.figures import Picture
from snarenet.report.hover import overlay

STYLE = """
:root { color-scheme: light; }
body { max-width: 62rem; margin: 0 auto; padding: 1rem 1.2rem 3rem; background: #fff; color: #222;
       font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
       overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 1rem 0 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid #ddd; }
.lead { font-size: 1.1rem; padding: .6rem .9rem; border-left: 4px solid #3b6ea8; background: #f4f7fb; }
.quiet, figcaption { color: #555; font-size: .9rem; }
.grid { display: grid; gap: 1.2rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
        align-items: start; }
figure { margin: 0; max-width: 34rem; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; }
.drawing { position: relative; }
.marks { position: absolute; inset: 0; width: 100%; height: 100%; fill: transparent; }
.columns { columns: 3 17rem; column-gap: 2rem; }
.columns table { margin-bottom: 1.2rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; break-inside: avoid; }
.settings table:first-child { break-inside: auto; }
.results td { white-space: nowrap; }
caption { text-align: left; font-weight: 600; padding-bottom: .2rem; }
th, td { padding: .15rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
th { text-align: left; font-weight: 400; color: #555; padding-right: 1rem; }
td { text-align: right; font-variant-numeric: tabular-nums; }
code { font-size: .9em; background: #f3f3f3; padding: .1em .3em; }
a { color: #3b6ea8; }
.whole { white-space: nowrap; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } h2 { break-after: avoid; }
               .grid { grid-template-columns: 1fr 1fr; } .lead { background: none; } }
"""


def document(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page; its policy lets it run this script, if there is one, and load nothing.

    Args:
        title: of the window.
        body: what is in it.
        style: more than `STYLE`.
        script: JavaScript to run when the page is there.
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    if script:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        body += f"<script>{script}</script>\n"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{STYLE}{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def section(title: str, body: str, anchor: str = "") -> str:
    """A part of a page."""
    name = f' id="{escape(anchor)}"' if anchor else ""
    return f"<section{name}>\n<h2>{escape(title)}</h2>\n{body}\n</section>\n"


def prose(text: str) -> str:
    """A text in HTML: `words` as code, and no line break inside 1e-08 or 12 ms."""
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"-?[\d.]+(?:e[-+]\d+| (?:µs|ms|s|min|h)\b)", r'<span class="whole">\g<0></span>', coded)


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Names and what they stand for."""
    lines = (f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>' for label, text in rows)
    return f"<table><caption>{escape(title)}</caption>\n{chr(10).join(lines)}\n</table>\n"


def gallery(pictures: list[Picture | None]) -> str:
    """Figures side by side, as images with their own name space: ids of two SVGs in one page would clash."""
    found = [picture for picture in pictures if picture is not None]
    return f'<div class="grid">{"".join(map(figure, found))}</div>'


def figure(picture: Picture) -> str:
    """An image with its caption, and its values to hover over."""
    data = base64.b64encode(picture.svg.encode()).decode()
    image = f'<img alt="{escape(picture.alt)}" src="data:image/svg+xml;base64,{data}">'
    if picture.marks:
        image = f'<div class="drawing">{image}{overlay(picture.marks)}</div>'
    return f"<figure>{image}<figcaption>{prose(picture.caption)}</figcaption></figure>\n"
