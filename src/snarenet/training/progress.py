"""What a user sees of training: a rich progress bar in a terminal, else a line now and then; and TensorBoard."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Callback = Callable[[dict[str, Any]], None]

_LINE_SECONDS = 10.0  # between two lines where there is no terminal


def describe(line: dict[str, Any]) -> str:
    """A line of metrics for people."""
    valid = line.get("valid") or {}
    gap = valid.get("gap")
    parts = [f"loss {line['loss']:.4f}"]
    if gap:
        parts.append(f"gap {gap['gmean']:.1e} (max {gap['max']:.1e})")
    elif valid:
        parts.append(f"objective {valid['objective']['mean']:.4f}")
    parts.append(f"violation {valid.get('violation', line['violation']):.0e}")
    parts.append(f"steps {line['steps']:.0f}")
    if "tight" in valid:
        parts.append(f"at bounds {valid['tight']:.0%}, moved {valid['distance']:.1f}")
    if line["relax"]:
        parts.append(f"ε {line['relax']:.1e}")
    if line.get("best", line["epoch"]) != line["epoch"]:
        parts.append(f"best in epoch {line['best']}")
    return " · ".join(parts)


@contextmanager
def progress(epochs: int, done: int, title: str, quiet: bool = False) -> Iterator[Callback]:
    """A callback that shows how far training is, unless quiet; give it every line of metrics."""
    if quiet:
        yield lambda line: None
        return
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield _lines(epochs, title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[numbers]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=epochs, completed=done, numbers="")
        last: dict[str, Any] = {}

        def show(line: dict[str, Any]) -> None:
            last.update(line)  # a validation stays visible until the next
            bar.update(task, completed=line["epoch"], numbers=describe(last))

        yield show


def _lines(epochs: int, title: str) -> Callback:
    last = time.monotonic() - _LINE_SECONDS

    def show(line: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_SECONDS or line["epoch"] == epochs:
            last = time.monotonic()
            say(f"{title}: epoch {line['epoch']}/{epochs} · {describe(line)}")

    return show


def say(sentence: str) -> None:
    """Tell a user something, where the progress is shown."""
    sys.stderr.write(f"{sentence}\n")  # at once: `print` lets another process in before the end of the line
    sys.stderr.flush()


@contextmanager
def pretraining(title: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A callback that shows how far a method's own training is; give it (steps done, steps in all)."""
    terminal = importlib.util.find_spec("rich") is not None and sys.stderr.isatty()
    label, last = f"{title}, its own training", time.monotonic()
    if not terminal or quiet:

        def show(done: int, total: int) -> None:
            nonlocal last
            if not quiet and (time.monotonic() - last >= _LINE_SECONDS or done == total):
                last = time.monotonic()
                say(f"{label}: step {done}/{total}")

        yield show
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def tensorboard(folder: Path) -> Callback:
    """A callback that writes the metrics for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError('TensorBoard is an extra: pip install "snarenet[tensorboard]"') from error
    writer = SummaryWriter(str(folder))

    def write(line: dict[str, Any]) -> None:
        for name, value in flatten(line):
            writer.add_scalar(name, value, line["epoch"])
        writer.flush()

    return write


def flatten(line: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a nested dictionary, with names joined by slashes."""
    for name, value in line.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
