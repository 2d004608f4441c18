"""The page of a training run: `write_report` turns a run folder into one HTML file that needs nothing else.

The page opens with the result in a sentence. Figures and tables follow; a part whose file is missing is replaced by a
sentence that names the command which makes it. `page.js` lets a reader pick an instance, and shows values under the
pointer; without JavaScript all the rest is there.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from snarenet import problems
from snarenet.report import figures
from snarenet.report.closeups import closeups
from snarenet.report.evaluation import evaluation_groups, sentence
from snarenet.report.html import document, gallery, prose, section, table
from snarenet.report.numbers import duration
from snarenet.training import Run
from snarenet.training.run import FILES

_SCRIPT = Path(__file__).with_name("page.js")
_STYLE = Path(__file__).with_name("page.css")


class _Content(NamedTuple):
    """What a run folder holds; None for a file that is missing."""

    run: Run
    metrics: list[dict[str, Any]]
    environment: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    arrays: dict[str, np.ndarray] | None


def write_report(folder: Path) -> Path:
    """Write the page into its run folder, at once or not at all, and return its path."""
    run = Run.open(folder)
    return run.save_report(_page(_Content(run, run.metrics(), run.environment(), run.summary(), run.instances())))


def _page(content: _Content) -> str:
    name = escape(str(content.run.problem_name or "a problem of your own"))
    sections = [part(content) for part in (_training, _instances, _closeups, _results, _settings, _files)]
    body = f"""<main>
<h1>{name}</h1>
{_about(content)}
<p class="lead">{_lead(content)}</p>
{"".join(sections)}
</main>
"""
    title = f"snarenet: {content.run.problem_name or 'a problem of your own'}"
    return document(title, body, *(file.read_text(encoding="utf-8") for file in (_STYLE, _SCRIPT)))


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
        return prose(sentence(content.evaluation))
    return _missing("There is no evaluation yet", f"snarenet evaluate {content.run.path.resolve().name}")


def _training(content: _Content) -> str:
    """Learning curves."""
    if not content.metrics:
        return section("Training", f"<p>{_missing('There are no metrics of the training', 'snarenet train')}</p>")
    last = content.metrics[-1]
    planned = content.run.config.epochs
    epochs = f"{last['epoch']} of {planned} epochs" if planned else f"{last['epoch']} epochs"
    steps = f", {last['step']:,} steps," if "step" in last else ""
    time = f" in {duration(last['seconds'])}" if "seconds" in last else ""
    kept = content.run.kept()
    text = f"Trained for {epochs}{steps}{time}." + (f" {kept.sentence()}" if kept else "")
    gap = figures.draw_gap_curve(content.metrics)
    if gap is None:
        text += " There is no validation gap, because there are no reference solutions to compare with."
    pictures = [
        figures.draw_loss(content.metrics),
        gap,
        figures.draw_violation_curve(content.metrics),
        figures.draw_schedules(content.metrics),
    ]
    return section("Training", f"<p>{prose(text)}</p>{gallery(pictures)}")


def _instances(content: _Content) -> str:
    """Distributions over the test instances."""
    if content.arrays is None:
        command = f"snarenet evaluate {content.run.path.resolve().name}"
        missing = _missing("There are no results of single instances", command)
        return section("Instances", f"<p>{missing}</p>")
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
        obstacles, goal = _scene(content.run)
        pictures.append(figures.draw_trajectories(trajectory, obstacles, goal=goal))
    return section("Instances", text + gallery(pictures))


def _closeups(content: _Content) -> str:
    """One instance after another."""
    arrays = content.arrays or {}
    if "closeup" in arrays:
        return section("One instance", closeups(arrays, (content.evaluation or {}).get("tol") or 0.0), "instance")
    if not arrays or "trajectory" in arrays:
        return ""  # as was said above, or a policy, whose instances are no single problems
    own = "evaluate(..., closeups=100)"
    command = f"snarenet evaluate {content.run.path.resolve().name}" if content.run.problem_name else own
    return section("One instance", f"<p>{_missing('No details of single instances were kept', command)}</p>")


def _scene(run: Run) -> tuple[np.ndarray | None, tuple[float, float]]:
    """The obstacles (K, 4) of the problem or its constraints, if it is a known one and has any; and the goal."""
    if run.problem_name not in problems.names():
        return None, (0.0, 0.0)
    problem = run.make_problem()
    obstacles = getattr(problem, "obstacles", getattr(problem.constraints, "obstacles", None))
    return None if obstacles is None else np.asarray(obstacles), getattr(problem, "goal", (0.0, 0.0))


def _results(content: _Content) -> str:
    """Every number of the evaluation."""
    if content.evaluation is None:
        return ""  # the page's first sentence has said so
    tables = [table(title, rows) for title, rows in evaluation_groups(content.evaluation).items()]
    return section("Results", f'<div class="columns results">{"".join(tables)}</div>')


def _settings(content: _Content) -> str:
    """Configuration and environment."""
    tables = table("Configuration", [(key, _text(value)) for key, value in content.run.config.to_dict().items()])
    if content.environment is None:
        tables += f"<p>{_missing('There is no record of the environment', 'snarenet train')}</p>"
    else:
        tables += table("Environment", [(key, _text(value)) for key, value in content.environment.items()])
    return section("Settings", f'<div class="columns settings">{tables}</div>')


def _files(content: _Content) -> str:
    """What else is in the folder."""
    rows = []
    for file in sorted(content.run.path.iterdir()):
        if file != content.run.report_path and not file.name.startswith("."):
            size = f"{file.stat().st_size / 1024:,.1f} KiB" if file.is_file() else "folder"
            link = f'<a href="{escape(quote(file.name))}">{escape(file.name)}</a>'
            purpose = FILES.get(file.name, "")
            rows.append(f'<tr><th scope="row">{link}</th><th>{purpose}</th><td>{size}</td></tr>')
    return section("Files", f"<table>{''.join(rows)}</table>")


def _missing(what: str, command: str) -> str:
    """A sentence in HTML on a part that is not there."""
    return f"{escape(what)}; <code>{escape(command)}</code> makes it."


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
