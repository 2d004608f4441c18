r"""Cost of one repair, forward plus backward, against the size of the problem, beside the limits of the device.

NCLP with n variables, n - 50 inequalities and 50 equalities, so m = n rows, batch B. With the spectrum of the rows at
hand a step is one product with an m by m matrix each way, so K steps take at least

$$ t_{\text{flop}} = K \cdot 2 \cdot \frac{2 B m^2}{\text{flop/s}}, \qquad
   t_{\text{byte}} = K \cdot 2 \cdot \frac{8 (m^2 + 2 B m)}{\text{byte/s}}. $$

"First call" includes what is computed once, such as the spectrum. Memory is what one pass adds at its peak: on a GPU to
what stays there between passes ("kept"), on a CPU what the first call adds to the resident size.
`python -m snarenet_lab.bench.growth FOLDER` draws `FOLDER/growth.svg` from `FOLDER/growth.json`, where the machine that
measured has no matplotlib.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snarenet import ConjugateGradients
from snarenet.problems import load
from snarenet.repair import repair
from snarenet.report.figures import canvas, log_axis, to_svg
from snarenet_lab.bench.common import Benchmark, Ledger, command_line, hardware, median_ms, peak_growth_mib, synchronize
from snarenet_lab.files import write_text
from snarenet_lab.starts import start

EQUALITIES, TOL = 50, 1e-8
METHODS: dict[str, dict[str, Any]] = {
    "cached spectrum": {"rows": "all"},  # also where the default, for the sake of its conditioning, would not
    "conjugate gradients": {"solver": ConjugateGradients()},
}
_PEAKS = {"H200": (67e12, 4.8e12)}  # float64 flop/s of the tensor cores, byte/s of the memory
COLUMNS = (
    "variables", "method", "steps", "converged", "violation", "first call s", "ms", "flop limit ms", "byte limit ms",
    "MiB", "kept MiB", "problem",
)  # fmt: skip


def measure(
    device: torch.device,
    out: Path,
    sizes: Sequence[int] | None = None,
    methods: Sequence[str] = tuple(METHODS),
    batch: int = 200,
    repeats: int = 3,
    equalities: int = EQUALITIES,
    flops: float | None = None,
    bandwidth: float | None = None,
) -> Benchmark:
    """Measure what is not in `out/growth.jsonl` yet, and draw `out/growth.svg`.

    Args:
        device: where.
        out: the folder.
        sizes: numbers of variables; 1,000 to 10,000 on a GPU and 100 to 400 on a CPU unless given.
        methods: names in `METHODS`.
        batch: how many predictions are repaired.
        repeats: passes on the clock.
        equalities: of the problem.
        flops: float64 operations a second that the device can do; if not given, known for an H200, else measured.
        bandwidth: bytes a second that it can move, likewise.
    """
    chosen = ((1000, 2000, 5000, 10_000) if device.type == "cuda" else (100, 200, 400)) if sizes is None else sizes
    machine, ledger, rows = hardware(device), Ledger(out / "growth.jsonl"), []
    peaks = _peaks(device, flops, bandwidth)
    for size in chosen:
        for method in methods:
            key = {"size": size, "method": method, "batch": batch, "equalities": equalities, "hardware": machine}
            found = ledger.get(key, lambda n=size, m=method: _pass(n, m, batch, repeats, equalities, device))
            flop_ms, byte_ms = _limits(size, batch, found.get("steps"), *peaks)
            quality = map(found.get, ("steps", "converged", "violation", "first", "ms"))
            row = [size, method, *quality, flop_ms, byte_ms, *map(found.get, ("mib", "kept", "problem"))]
            print(*row, sep=" | ", file=sys.stderr, flush=True)
            rows.append(row)
    title = f"One repair on NCLP, batch {batch}, beside {peaks[0] / 1e12:.3g} Tflop/s and {peaks[1] / 1e12:.3g} TB/s"
    table = Benchmark(title, COLUMNS, rows, command_line("growth", device), machine)
    try:
        _draw(rows, title, out / "growth.svg")
    except ImportError as error:
        print(f"No figure: {error}", file=sys.stderr)
    return table


def _pass(size: int, method: str, batch: int, repeats: int, equalities: int, device: torch.device) -> dict[str, Any]:
    """Time and memory of a pass; a word on the problem where memory does not suffice."""
    gc.collect()
    torch.cuda.empty_cache()  # what the size before left in pieces; nothing without a GPU
    instances = 13 * batch  # at least `batch` of them are test instances, a twelfth
    sizes = {"size": size, "inequalities": size - equalities, "equalities": equalities, "instances": instances}
    problem = load("nclp", **sizes).to(device)
    y, x = start(problem, 0.5, batch)
    y.requires_grad_()
    last: dict[str, Any] = {}

    def step() -> None:
        y.grad = None
        solution = repair(problem.constraints, y, x, start=None, tol=TOL, max_steps=200, **METHODS[method])
        solution.value.square().sum().backward()
        last["solution"] = solution

    def kept() -> float:
        last.clear()
        y.grad = None
        return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0

    try:
        before, begin = kept(), time.perf_counter()
        memory = peak_growth_mib(step, device)
        synchronize(device)
        first = time.perf_counter() - begin
        solution = last["solution"]
        found = {
            "first": first,
            "steps": int(solution.steps.max()),
            "converged": solution.converged.double().mean().item(),
            "violation": solution.violation.max().item(),
        }
        del solution
        on_gpu, stays = device.type == "cuda", kept() - before
        found |= {"kept": stays, "mib": peak_growth_mib(step, device)} if on_gpu else {"kept": None, "mib": memory}
        return found | {"ms": median_ms(step, repeats, device)}
    except torch.OutOfMemoryError:
        return {"problem": "out of memory"}


def _limits(rows: int, batch: int, steps: int | None, flops: float, bandwidth: float) -> tuple[float | None, ...]:
    """Least milliseconds by operations and by bytes, see above."""
    if steps is None:
        return None, None
    operations, numbers = 4 * steps * batch * rows**2, 2 * steps * (rows**2 + 2 * batch * rows)
    return 1e3 * operations / flops, 1e3 * 8 * numbers / bandwidth


def _peaks(device: torch.device, flops: float | None, bandwidth: float | None) -> tuple[float, float]:
    """flop/s and byte/s: as given, or known, or those of a large product and of a large copy."""
    if flops and bandwidth:
        return flops, bandwidth
    known = next((peaks for name, peaks in _PEAKS.items() if name in hardware(device)), None) or _tried(device)
    return flops or known[0], bandwidth or known[1]


def _tried(device: torch.device) -> tuple[float, float]:
    """flop/s of a large product and byte/s of a large copy."""
    n = 2048
    a, b = (torch.ones(n, n, dtype=torch.float64, device=device) for _ in range(2))
    long, there = (torch.ones(2**24, dtype=torch.float64, device=device) for _ in range(2))
    product, copy = median_ms(lambda: a @ b, 3, device), median_ms(lambda: there.copy_(long), 3, device)
    return 2e3 * n**3 / product, 2e3 * 8 * len(long) / copy


def _draw(rows: Sequence[Sequence[Any]], title: str, file: Path) -> None:
    """Milliseconds against variables on log axes: a line for every method, and the two limits of the first method."""
    lines: list[dict[str, Any]] = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    done = [line for line in lines if line["ms"] is not None]
    methods = list(dict.fromkeys(line["method"] for line in done))
    with canvas((5.4, 3.8)) as figure:
        axes = figure.subplots()
        drawn = []
        for method, mark in zip(methods, "os^v", strict=False):
            mine = [line for line in done if line["method"] == method]
            axes.plot([line["variables"] for line in mine], [line["ms"] for line in mine], f"{mark}-", label=method)
            drawn += [line["ms"] for line in mine]
        first = [line for line in done if line["method"] == methods[0]] if methods else []
        for limit, style in {"flop limit": "--", "byte limit": ":"}.items():
            values = [line[f"{limit} ms"] for line in first]
            name = f"{limit} of {methods[0]}"
            axes.plot([line["variables"] for line in first], values, style, color="0.4", label=name)
            drawn += values
        log_axis(axes, "y", np.array(drawn), "0")
        sizes = sorted({line["variables"] for line in done})
        axes.set(xscale="log", xticks=sizes, xticklabels=[f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set(xlabel="variables n, as many rows (count)", ylabel="forward and backward (ms)")
        figure.suptitle(title, fontsize=8)
        figure.legend(loc="outside lower center", ncols=2)
        picture = to_svg(figure)
    write_text(file, picture)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    saved = json.loads((folder / "growth.json").read_text())
    _draw([list(row.values()) for row in saved["rows"]], saved["title"], folder / "growth.svg")
