"""Our repair against the field: time and memory, forward plus backward, until a batch obeys a tolerance.

Every method gets the same predictions, C^+ x + s N(0, I) on the paper's test inputs, in float64, and must bring the
worst sample to the tolerance. Where a method has a setting that decides its speed, some are tried and the fastest that
reaches the tolerance on these very inputs counts; ours keep theirs, but for how many steps are recorded. One that does
not reach it has its violation in place of a time. "Distance" is the mean of |y - y_hat|. Pi-net, cvxpylayers, qpth,
POUNCE, Moreau and KKT-HardNet look for the nearest point, which makes it smallest; SnareNet with `nearest` begins near
it; the others do not look. RAYEN takes sets that do not depend on x: in its setup all samples have the same input.

Memory is what building the method and one pass add at the peak: on a GPU to what torch has allocated, on a CPU to the
resident size of a new process; for the original Pi-net and KKT-HardNet, which JAX compiles before the clock starts,
what its compiler plans for a pass. Methods of packages that are missing are listed as such.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snarenet.damping import Annealed
from snarenet.layers import Layer, OptNetLayer, PiNetLayer, SnareLayer
from snarenet.problems import Problem, load
from snarenet.processes import scatter
from snarenet.repair import Nearest
from snarenet_lab.bench import kkt_hardnet, original
from snarenet_lab.bench.authors import repair_as_authors
from snarenet_lab.bench.common import Benchmark, Ledger, hardware, median_ms, peak_growth_mib, synchronize
from snarenet_lab.bench.rivals import enforce, moreau, pieces, pounce, qpth, rayen
from snarenet_lab.starts import start

COLUMNS = (
    *("problem", "noise", "violation to reach", "method", "ms", "times snarenet's", "MiB", "steps"),
    *("violation", "distance", "setting"),
)
TOLERANCES = (1e-6, 1e-8)
ORIGINAL = "Pi-net (JAX)"
_SECONDS, _FEW = 3.0, 3  # of passes on the clock, and how many there are at least

Repair = Callable[[Tensor, Tensor], tuple[Tensor, Any]]  # (y, x) -> the repaired y, and steps: a number or a tensor
Setting = float | None


@dataclass(frozen=True)
class Setup:
    """Inputs to repair: a family with its sizes, how many predictions, and their noise s; `fixed`: one x for all."""

    problem: str
    batch: int
    noise: float = 0.5
    sizes: dict[str, Any] = field(default_factory=dict)
    fixed: bool = False

    def load(self, device: torch.device) -> tuple[Problem, Tensor, Tensor]:
        """The problem, predictions that need a gradient, and inputs."""
        problem = load(self.problem, **self.sizes).to(device)
        y, x = start(problem, self.noise, self.batch)
        if self.fixed:
            centre = torch.linalg.pinv(pieces(problem)[-1]).T
            y, x = y + (x[:1] - x) @ centre, x[:1].expand_as(x).contiguous()
        return problem, y.requires_grad_(), x


SETUPS = (
    Setup("nclp", 200),
    Setup("nclp", 200, noise=2.0),
    Setup("qcqp", 100),
    Setup("qcqp", 100, fixed=True),
)


@dataclass(frozen=True)
class Method:
    """A way to repair.

    Attributes:
        build: makes the repair for a problem, a tolerance and a setting.
        settings: those to try.
        label: what a setting is called in the table.
        package: what must be installed, if not snarenet itself.
        linear: it takes linear constraints only.
        gpu: it is for GPUs only.
        cpu: it is for CPUs only.
        fixed: it takes sets that do not depend on x only.
        elsewhere: the module that calls it in a process of its own; `build` is then not used.
    """

    build: Callable[[Problem, float, Any], Repair] | None
    settings: Sequence[Setting] = (None,)
    label: str = ""
    package: str = ""
    linear: bool = False
    gpu: bool = False
    cpu: bool = False
    fixed: bool = False
    elsewhere: ModuleType | None = None


def _ours(**options: Any) -> Callable[[Problem, float, Setting], Repair]:
    given = {"start": None, "on_failure": "ignore", **options}
    return lambda problem, tol, _: _solve(SnareLayer(problem.constraints, tol=tol, **given))


def _solve(layer: Layer) -> Repair:
    def run(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        solution = layer.solve(y, x)
        return solution.value, solution.steps

    return run


def _recorded(*counts: int, linear: bool = False, **options: Any) -> Method:
    """Ours as a CUDA graph, with the best of some numbers of steps in it."""

    def build(problem: Problem, tol: float, count: Any) -> Repair:
        return _ours(record=count, **options)(problem, tol, None)

    return Method(build, counts, "steps recorded", linear=linear, gpu=True)


def _authors(problem: Problem, tol: float, damping: Any) -> Repair:
    return lambda y, x: repair_as_authors(problem.constraints, y, x, damping, tol)


QUICK = Annealed(1e-3, 0.1)
DEFAULTS = "snarenet"
METHODS: dict[str, Method] = {
    DEFAULTS: Method(_ours()),
    "snarenet, recorded": _recorded(16, 20, 24, 32, 40),
    "snarenet, damping 1e-3 · 0.1^k": Method(_ours(damping=QUICK)),
    "snarenet, the same, recorded": _recorded(4, 6, 8, 12, damping=QUICK),
    "snarenet, the same, nearest=20": Method(_ours(damping=QUICK, start=Nearest(20)), linear=True),
    "snarenet, the same, nearest=20, recorded": _recorded(4, 6, 8, linear=True, damping=QUICK, start=Nearest(20)),
    "the authors' layer": Method(_authors, (0.01,), "damping"),
    "the authors' layer, best damping": Method(_authors, (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-6), "damping"),
    ORIGINAL: Method(None, label="sigma", package="pinet", elsewhere=original),
    "Pi-net (ours)": Method(
        lambda problem, tol, sigma: _solve(PiNetLayer(problem.constraints, sigma=sigma, tol=tol, on_failure="ignore")),
        (0.14, 0.2, 0.28, 0.4),
        "sigma",
        linear=True,
    ),
    "cvxpylayers": Method(
        lambda problem, tol, _: _solve(OptNetLayer(problem.constraints, tol=tol, on_failure="ignore")),
        package="cvxpylayers",
    ),
    "qpth": Method(qpth, (1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12), "eps", "qpth", linear=True),
    "enforce-nn": Method(enforce, (1e-4, 1e-6, 1e-8, 1e-10, 1e-12), "smoothing", "enforce"),
    "POUNCE": Method(pounce, (1e-6, 1e-8), "tol", "pounce", cpu=True),
    "Moreau": Method(moreau, package="moreau"),
    "KKT-HardNet": Method(None, label="gn_reg", package="kkthn", elsewhere=kkt_hardnet),
    "RAYEN": Method(rayen, package="rayen", fixed=True),
}


class Pass(NamedTuple):
    """What a method achieved; None where it was not measured."""

    violation: float
    distance: float
    steps: int | None = None
    setting: Setting = None
    ms: float | None = None
    mib: float | None = None


class _Case:
    """A method with a setting, on inputs; `step` is one pass."""

    def __init__(self, setup: Setup, device: torch.device, method: Method, tol: float, setting: Setting) -> None:
        self.device, self.setting = device, setting
        self.problem, self.y, self.x = setup.load(device)
        assert method.build is not None
        self.build = partial(method.build, self.problem, tol, setting)
        self.repair: Repair | None = None

    def step(self) -> tuple[Tensor, Any]:
        """One pass: the repaired y, and steps; the gradient is in `y.grad`."""
        self.y.grad = None
        self.repair = self.repair or self.build()
        value, steps = self.repair(self.y, self.x)
        value.square().sum().backward()
        return value.detach(), steps

    def outcome(self) -> Pass:
        """What a pass achieves."""
        value, steps = self.step()
        violation = self.problem.constraints.violation(value, self.x).nan_to_num(torch.inf).max().item()
        most = int(steps.max()) if isinstance(steps, Tensor) else steps
        return Pass(violation, (value - self.y.detach()).norm(dim=1).mean().item(), most, self.setting)

    def timed(self, repeats: int) -> float:
        """Median milliseconds of so many passes, or of fewer if they are slow."""
        begin = time.perf_counter()
        self.step()
        synchronize(self.device)
        seconds = time.perf_counter() - begin
        return median_ms(self.step, min(repeats, max(_FEW, int(_SECONDS / seconds))), self.device)


def measure(
    device: torch.device,
    out: Path,
    setups: Sequence[Setup] = SETUPS,
    tolerances: Sequence[float] = TOLERANCES,
    methods: str | Sequence[str] = tuple(METHODS),
    problem: str | None = None,
    repeats: int = 21,
    memory: bool = True,
) -> Benchmark:
    """Measure the methods.

    Args:
        device: where.
        out: the folder of `field.jsonl`, which keeps what each method achieved: it is not measured again.
        setups: inputs to repair.
        tolerances: to reach.
        methods: names in `METHODS`, one or several.
        problem: of the setups, those of this family only.
        repeats: passes on the clock, fewer if they are slow.
        memory: measure that, too; on a CPU it takes a process for each row.
    """
    methods = (methods,) if isinstance(methods, str) else methods
    if unknown := set(methods) - set(METHODS):
        raise ValueError(f"`methods` are {'; '.join(METHODS)}, but got {'; '.join(sorted(unknown))}")
    rows: list[list[Any]] = []
    ledger, machine = Ledger(out / "field.jsonl"), hardware(device)
    for setup in (setup for setup in setups if problem in (None, setup.problem)):
        linear = len(pieces(load(setup.problem, **setup.sizes))) == 3
        chosen = [name for name in methods if _fits(METHODS[name], setup, linear, device)]
        passes: dict[tuple[float, str], Pass | str] = {}
        for name in chosen:
            key = {
                "method": name,
                **asdict(setup),
                "tolerances": list(tolerances),
                "memory": memory,
                "hardware": machine,
            }
            kept: list[Any] = ["not installed"] * len(tolerances)  # which may change, and is not kept
            if _installed(name):
                measured = partial(_passes, name, setup, device, tolerances, repeats, memory)
                kept = ledger.get(key, lambda call=measured: {"passes": call()})["passes"]
            for tol, found in zip(tolerances, kept, strict=True):
                passes[tol, name] = found if isinstance(found, str) else Pass(*found)
        for tol in tolerances:
            ours = passes.get((tol, DEFAULTS))
            base = None if not isinstance(ours, Pass) else ours.ms
            for name in chosen:
                rows.append([setup.problem, setup.noise, tol, name, *_cells(passes[tol, name], name, base)])
    title = "Forward and backward until the worst sample of a batch obeys a tolerance"
    return Benchmark(title, COLUMNS, rows, f"snarenet bench field --device {device.type}", hardware(device))


def _fits(method: Method, setup: Setup, linear: bool, device: torch.device) -> bool:
    here = not (method.cpu if device.type == "cuda" else method.gpu)
    return here and (linear or not method.linear) and (setup.fixed or not method.fixed)


def _installed(name: str) -> bool:
    method = METHODS[name]
    if method.elsewhere is not None:
        return method.elsewhere.interpreter() is not None
    return importlib.util.find_spec(method.package or "torch") is not None


def _passes(
    name: str, setup: Setup, device: torch.device, tolerances: Sequence[float], repeats: int, memory: bool
) -> Sequence[Pass | str]:
    """What a method achieves at each tolerance, or why it does not."""
    package = METHODS[name].package
    print(f"{setup.problem}: {name}", file=sys.stderr, flush=True)
    try:
        if METHODS[name].elsewhere is not None:
            return _elsewhere(METHODS[name], setup, device, tolerances, repeats)
        return [_best(name, setup, device, tol, repeats, memory) for tol in tolerances]
    except (RuntimeError, ValueError, AssertionError) as error:
        if not package:
            raise
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        return [f"failed: {last}"] * len(tolerances)  # the others are still of interest


def _best(name: str, setup: Setup, device: torch.device, tol: float, repeats: int, memory: bool) -> Pass:
    """The fastest setting that reaches the tolerance, or, if none does, the one that violates least."""
    method = METHODS[name]

    def attempt(setting: Setting) -> Pass:
        case = _Case(setup, device, method, tol, setting)
        found = case.outcome()
        return found._replace(ms=case.timed(repeats)) if found.violation <= tol else found

    found = [attempt(setting) for setting in method.settings]
    best = min(found, key=lambda p: (p.ms is None, p.violation if p.ms is None else p.ms))
    return best._replace(mib=_mib(name, setup, device, tol, best.setting)) if memory and best.ms is not None else best


def _mib(name: str, setup: Setup, device: torch.device, tol: float, setting: Setting) -> float:
    """By how much building and one pass raise the peak of memory."""
    if device.type == "cuda":
        gc.collect()
        return peak_growth_mib(_Case(setup, device, METHODS[name], tol, setting).step, device)
    ((_, mib),) = scatter(_peak_mib, {name: (name, setup, tol, setting)}, 1)
    return mib


def _peak_mib(task: tuple[str, Setup, float, Setting]) -> float:
    """The same on a CPU, for a new process."""
    name, setup, tol, setting = task
    cpu, method = torch.device("cpu"), METHODS[name]
    small = replace(setup, batch=2)
    _Case(small, cpu, method, tol, setting).step()  # loads libraries, so that they do not count
    return peak_growth_mib(_Case(setup, cpu, method, tol, setting).step)


def _elsewhere(
    method: Method, setup: Setup, device: torch.device, tolerances: Sequence[float], repeats: int
) -> list[Pass]:
    """A package in a process of its own, which chooses its setting: Pi-net's is chosen on validation inputs."""
    assert method.elsewhere is not None
    problem, y, x = setup.load(torch.device("cpu"))
    arrays = original_arrays(problem, setup.noise) | {"y": y.detach(), "x": x, "weights": torch.ones_like(y.detach())}
    options = {"tolerances": list(tolerances), "most": 2000, "repeats": repeats}
    plain = {key: tensor.numpy() for key, tensor in arrays.items()}
    found = method.elsewhere.call("project", plain, device.type, torch.get_num_threads(), **options)
    settings = np.broadcast_to(found[method.label], len(tolerances))
    passes = []
    for i, tol in enumerate(tolerances):
        violation, moved = float(found["violation"][i]), found["value"][i] - plain["y"]
        ms = 1e3 * float(found["seconds"][i]) if violation <= tol else None
        distance = float(((moved**2).sum(1) ** 0.5).mean())
        passes.append(Pass(violation, distance, int(found["count"][i]), float(settings[i]), ms, float(found["mib"][i])))
    return passes


def original_arrays(problem: Problem, noise: float, count: int = 50) -> dict[str, Tensor]:
    """What the original Pi-net asks for about a problem: its matrices, and validation inputs to choose sigma on."""
    *rows, upper, C = pieces(problem)
    x = problem.split("valid")[:count]
    draw = torch.randn(len(x), problem.size, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    valid = {"valid_x": x, "valid_y": x @ torch.linalg.pinv(C).T + noise * draw}
    return dict(zip(("A",) if len(rows) == 1 else ("H", "G"), rows, strict=True)) | {"upper": upper, "C": C} | valid


def _cells(found: Pass | str, name: str, base: float | None) -> list[Any]:
    """The cells of a row after the method's name."""
    if isinstance(found, str):
        return [found, *[None] * 6]
    ms = f"not reached: {found.violation:.0e}" if found.ms is None else found.ms
    ratio = found.ms / base if found.ms is not None and base is not None else None
    label = METHODS[name].label
    setting = f"{label} {found.setting:g}" if label and found.setting is not None else None
    return [ms, ratio, found.mib, found.steps, found.violation, found.distance, setting]
