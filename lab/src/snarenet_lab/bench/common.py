"""What the benchmarks share: clocks, memory readings, and the `Benchmark` that each of them returns."""

from __future__ import annotations

import ctypes
import json
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from snarenet.report.tables import Column, Table
from snarenet_lab.files import write_text

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark found, for people (terminal, Markdown) and for programs (JSON).

    Attributes:
        title: what was measured, in a line.
        columns: their headings.
        rows: texts, numbers or None (an empty cell); JSON keeps all digits of a number, people see three.
        command: what to type to get this table.
        hardware: the machine that it was measured on, see `hardware`.
        failure: why the numbers are not as they must be; "" if they are.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    command: str
    hardware: str
    failure: str = ""

    def records(self) -> list[dict[str, Any]]:
        """Every row, by the columns."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def table(self) -> Table:
        """The table; the first column is text."""
        first, *others = self.columns
        columns = [Column(first, first, "text"), *(Column(name, name, "brief") for name in others)]
        return Table(columns, self.records(), f"{self.title}; {self.hardware}")

    def to_json(self) -> str:
        """All of it as JSON text; every row is an object with the columns as keys."""
        content = {name: value for name, value in asdict(self).items() if name != "failure"}
        return json.dumps(content | {"rows": self.records()}, indent=1, ensure_ascii=False) + "\n"

    def write(self, folder: Path, name: str) -> None:
        """Write `folder/name.json` and `folder/name.md`."""
        page = f"{self.title}\n\n`{self.command}` on {self.hardware}.\n\n{self.table().markdown()}"
        for suffix, text in {"json": self.to_json(), "md": page}.items():
            write_text(folder / f"{name}.{suffix}", text)

    def show(self) -> None:
        """Print the table; as Markdown where rich is not installed."""
        table = self.table()
        try:
            from rich.console import Console
        except ImportError:
            print(table.title, table.markdown(), sep="\n\n")
            return
        console = Console()
        # a file or a pipe has no width of its own: give the columns room
        wide = console if console.is_terminal else Console(width=max(120, 15 * len(self.columns)))
        wide.print(table)


class Ledger:
    """What was measured so far, one JSON line each, so that a benchmark that was stopped goes on where it was.

    Args:
        file: where the lines are.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def get(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found for `key`, a description of all that decides the result; measured now if it is new."""
        text = self.file.read_text() if self.file.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # cut off by a kill
                continue
            if entry["key"] == key:
                return entry["found"]
        found = measure()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            torn = bool(text) and not text.endswith("\n")
            file.write("\n" * torn + json.dumps({"key": key, "found": found}) + "\n")
        return found


def synchronize(device: torch.device = _CPU) -> None:
    """Wait until a GPU has done what it was told; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[], object], repeats: int, device: torch.device = _CPU) -> float:
    """Median time of a call in milliseconds, after one that does not count; a GPU is waited for."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[1:])


class Peak:
    """How far the peak of memory rises above what was in use when this was made.

    On a GPU this is memory that torch allocated there; on a CPU the resident size of the process (Linux).
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device) / 2**20
        else:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:  # pages that are free but not given back would be used again without a trace
                trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # forget earlier peaks
            self.before = _resident_mib("VmRSS")

    def growth_mib(self) -> float:
        """The rise so far."""
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20 if on_gpu else _resident_mib("VmHWM")
        return peak - self.before


def peak_growth_mib(run: Callable[[], object], device: torch.device = _CPU) -> float:
    """How far the peak of memory rises while `run` runs."""
    peak = Peak(device)
    run()
    return peak.growth_mib()


def _resident_mib(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return float(line.split()[1]) / 1024


def command_line(item: str, device: torch.device, **options: Any) -> str:
    """What to type for an item with these options."""
    told = "".join(f" {name} {shlex.quote(str(value))}" for name, value in options.items())
    return f"snarenet bench {item} --device {device.type}" + (f" --set{told}" if told else "")


def hardware(device: torch.device = _CPU) -> str:
    """The machine, in a line."""
    version = f"torch {torch.__version__}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {version}"
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return f"{name}, {torch.get_num_threads()} threads, {version}"
