"""The page of a training run: `write_report` turns a run folder into one HTML file that needs nothing else.

The page opens with the result in a sentence. Figures and tables follow; a part whose file is missing is replaced by a
sentence that names the command which makes it.
"""

from __future__ import annotations

import base64
import json
import re
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from snarenet import problems
from snarenet.report import figures
from snarenet.report.tables import duration, evaluation_groups, sentence
from snarenet.training import Run

_REPORT = "report.html"
_PURPOSES = {
    "config.json": "problem and configuration",
    "environment.json": "machine and versions",
    "metrics.jsonl": "one line for every epoch",
    "checkpoint.safetensors": "what training needs to go on",
    "model.safetensors": "weights of the finished model",
    "evaluation.json": "results on the test instances",
    "evaluation.npz": "results of every instance",
}
_STYLE = """
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
figure img { width: 100%; height: auto; }
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


class _Content(NamedTuple):
    """What a run folder holds; None for a file that is missing."""

    run: Run
    metrics: list[dict[str, Any]]
    environment: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    arrays: dict[str, np.ndarray] | None


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder, at once or not at all, and return its path."""
    run = Run.open(folder)
    found = (run.read_json("environment.json"), run.read_json("evaluation.json"), run.read_arrays("evaluation.npz"))
    run.write_text(_REPORT, _page(_Content(run, run.metrics(), *found)))
    return run.path / _REPORT


def _page(content: _Content) -> str:
    name = escape(str(content.run.problem_name or "a problem of your own"))
    sections = [part(content) for part in (_training, _instances, _results, _settings, _files)]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # a page that runs and loads nothing
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>snarenet: {name}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>{name}</h1>
{_about(content)}
<p class="lead">{_lead(content)}</p>
{"".join(sections)}
</main>
</body>
</html>
"""


def _about(content: _Content) -> str:
    """Where the run is from, in small print."""
    started = (content.environment or {}).get("started")
    sizes = [f"{key} {_text(value)}" for key, value in content.run.sizes.items()]
    parts = [
        f"run {content.run.path.resolve().name}",
        f"{', '.join(sizes)}" if sizes else "default sizes",
        f"started {started}" if started else "",
    ]
    return f'<p class="quiet">{escape(" · ".join(part for part in parts if part))}</p>'


def _lead(content: _Content) -> str:
    """The result in a sentence."""
    if content.evaluation is not None:
        return _prose(sentence(content.evaluation))
    return _missing("There is no evaluation yet", f"snarenet evaluate {content.run.path.resolve().name}")


def _training(content: _Content) -> str:
    """Learning curves."""
    if not content.metrics:
        return _section("Training", f"<p>{_missing('There are no metrics of the training', 'snarenet train')}</p>")
    last = content.metrics[-1]
    planned = content.run.config.epochs
    epochs = f"{last['epoch']} of {planned} epochs" if planned else f"{last['epoch']} epochs"
    steps = f", {last['step']:,} steps," if "step" in last else ""
    time = f" in {duration(last['seconds'])}" if "seconds" in last else ""
    text = f"Trained for {epochs}{steps}{time}."
    gap = figures.draw_gap_curve(content.metrics)
    if gap is None:
        text += " There is no validation gap, because there are no reference solutions to compare with."
    pictures = [
        figures.draw_loss(content.metrics),
        gap,
        figures.draw_violation_curve(content.metrics),
        figures.draw_schedules(content.metrics),
    ]
    return _section("Training", f"<p>{_prose(text)}</p>{_gallery(pictures)}")


def _instances(content: _Content) -> str:
    """Distributions over the test instances."""
    if content.arrays is None:
        command = f"snarenet evaluate {content.run.path.resolve().name}"
        missing = _missing("There are no results of single instances", command)
        return _section("Instances", f"<p>{missing}</p>")
    text, pictures = "", []
    gap, violation, steps, trajectory = map(content.arrays.get, ("gap", "violation", "steps", "trajectory"))
    if gap is not None and np.isfinite(gap).any():
        pictures.append(figures.draw_gaps(gap))
    else:
        text = "<p>There is no distribution of the gap, because there are no reference solutions to compare with.</p>"
    if violation is not None:
        pictures.append(figures.draw_violations(violation, (content.evaluation or {}).get("tol")))
    if steps is not None:
        pictures.append(figures.draw_steps(steps))
    if trajectory is not None:
        pictures.append(figures.draw_trajectories(trajectory, _obstacles(content.run)))
    return _section("Instances", text + _gallery(pictures))


def _obstacles(run: Run) -> np.ndarray | None:
    """The obstacles (K, 4) of the problem's constraints, if it is a known one and has any."""
    if run.problem_name not in problems.names():
        return None
    obstacles = getattr(problems.load(run.problem_name, **run.sizes).constraints, "obstacles", None)
    return None if obstacles is None else np.asarray(obstacles)


def _results(content: _Content) -> str:
    """Every number of the evaluation."""
    if content.evaluation is None:
        return ""  # the page's first sentence has said so
    tables = [_table(title, rows) for title, rows in evaluation_groups(content.evaluation).items()]
    return _section("Results", f'<div class="columns results">{"".join(tables)}</div>')


def _settings(content: _Content) -> str:
    """Configuration and environment."""
    tables = _table("Configuration", [(key, _text(value)) for key, value in content.run.config.to_dict().items()])
    if content.environment is None:
        tables += f"<p>{_missing('There is no record of the environment', 'snarenet train')}</p>"
    else:
        tables += _table("Environment", [(key, _text(value)) for key, value in content.environment.items()])
    return _section("Settings", f'<div class="columns settings">{tables}</div>')


def _files(content: _Content) -> str:
    """What else is in the folder."""
    rows = []
    for file in sorted(content.run.path.iterdir()):
        if file.name != _REPORT and not file.name.startswith("."):
            size = f"{file.stat().st_size / 1024:,.1f} KiB" if file.is_file() else "folder"
            link = f'<a href="{escape(quote(file.name))}">{escape(file.name)}</a>'
            purpose = _PURPOSES.get(file.name, "")
            rows.append(f'<tr><th scope="row">{link}</th><th>{purpose}</th><td>{size}</td></tr>')
    return _section("Files", f"<table>{''.join(rows)}</table>")


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>\n"


def _prose(text: str) -> str:
    """A text in HTML, with no line break inside 1e-08 or 12 ms."""
    return re.sub(r"-?[\d.]+(?:e[-+]\d+| (?:µs|ms|s|min|h)\b)", r'<span class="whole">\g<0></span>', escape(text))


def _missing(what: str, command: str) -> str:
    """A sentence in HTML on a part that is not there."""
    return f"{escape(what)}; <code>{escape(command)}</code> makes it."


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    lines = (f'<tr><th scope="row">{escape(label)}</th><td>{escape(text)}</td></tr>' for label, text in rows)
    return f"<table><caption>{escape(title)}</caption>\n{chr(10).join(lines)}\n</table>\n"


def _gallery(pictures: list[figures.Picture | None]) -> str:
    """Figures side by side, as images with their own name space: ids of two SVGs in one page would clash."""
    found = [picture for picture in pictures if picture is not None]
    return f'<div class="grid">{"".join(map(_figure, found))}</div>'


def _figure(picture: figures.Picture) -> str:
    data = base64.b64encode(picture.svg.encode()).decode()
    image = f'<img alt="{escape(picture.alt)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{_prose(picture.caption)}</figcaption></figure>\n"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
