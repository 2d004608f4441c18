"""Speed and memory of one repair, forward plus backward, against the authors' layer; all in one run, outputs compared.

Starts are C^+ x + 0.5 N(0, I) on the paper's test inputs. Memory is what one pass adds at its peak: on a GPU to what
stays there between passes ("kept": cached matrices, recorded graphs), on a CPU to the resident size of a new process,
cached matrices included. "Difference" is the largest relative one, in value and gradient, from what a row must equal
after the same steps: the authors' layer, or, if recorded, the same repair without a recording.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Nonlinear
from snarenet.layers import SnareLayer
from snarenet.problems import Problem, load
from snarenet.processes import scatter
from snarenet.repair import repair
from snarenet.solution import Solution
from snarenet_lab.bench.authors import repair_as_authors
from snarenet_lab.bench.common import Benchmark, command_line, hardware, median_ms, peak_growth_mib
from snarenet_lab.bench.rivals import enforce, pieces
from snarenet_lab.starts import start

TOL = 1e-8
COLUMNS = "problem, method", "batch", "steps", "ms", "times faster", "MiB", "kept MiB", "violation", "difference"

# (y, x) -> the repaired y and its steps, of each sample or of all: nobody waits for a GPU to count them
Repair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | int]]
_NO_SIZES: dict[str, int] = {}


@dataclass(frozen=True)
class Trial:
    """A repair to measure, a row of the table.

    Attributes:
        name: the method.
        problem: the family.
        batch: how many predictions are repaired.
        build: makes the repair for a problem.
        like: makes what it must equal, if anything.
        repeats: passes on the clock.
        sizes: arguments of the family.
        backward: differentiate, too.
    """

    name: str
    problem: str
    batch: int
    build: Callable[..., Repair]
    like: Callable[..., Repair] | None = None
    repeats: int = 9
    sizes: dict[str, int] | None = None
    backward: bool = True

    @property
    def title(self) -> str:
        """The problem with its sizes, and what is done with it."""
        sizes = map(str, (self.sizes or _NO_SIZES).values())
        return " ".join([self.problem, *sizes]) + ("" if self.backward else ", forward only")


def ours(problem: Problem, steps: int | None = None, **options: Any) -> Repair:
    """`repair` with these options, to the tolerance, or with a fixed number of steps."""
    stop: dict[str, Any] = {"tol": TOL, "max_steps": 200} if steps is None else {"tol": 0.0, "max_steps": steps}

    return lambda y, x: _pair(repair(problem.constraints, y, x, start=None, **stop, **options))


def recorded(problem: Problem, record: int, **options: Any) -> Repair:
    """A `SnareLayer` with these options, recorded into a CUDA graph."""
    stop = {"tol": TOL, "max_steps": 200, "on_failure": "ignore"}
    layer = SnareLayer(problem.constraints, start=None, record=record, **stop, **options)
    return lambda y, x: _pair(layer.solve(y, x))


def authors(problem: Problem, steps: int | None = None) -> Repair:
    """The authors' layer."""
    return lambda y, x: repair_as_authors(
        problem.constraints, y, x, 0.01, TOL if steps is None else 0.0, 200 if steps is None else steps
    )


def as_function(problem: Problem) -> Repair:
    """QCQP given as one plain function, its Jacobian left to torch.func."""
    H, G, h, A = pieces(problem)

    def value(y: Tensor, x: Tensor) -> Tensor:
        return torch.cat([y.square() @ H.T + y @ G.T, y @ A.T], 1)

    constraints = Nonlinear(
        value,
        rows=len(H) + len(A),
        lower=lambda x: torch.cat([torch.full((len(x), len(H)), -torch.inf, dtype=x.dtype, device=x.device), x], 1),
        upper=lambda x: torch.cat([h.expand(len(x), -1), x], 1),
    )
    return lambda y, x: _pair(repair(constraints, y, x, start=None, tol=TOL))


def _pair(solution: Solution) -> tuple[Tensor, Tensor]:
    return solution.value, solution.steps


_AUTHORS, _SAME = "textbook, damping 0.01", "snarenet, all rows, damping 0.01"
_constant = partial(ours, rows="all", damping=0.01)


def trials_for(device: torch.device) -> list[Trial]:
    """What is measured on a device."""
    return _on_gpu() if device.type == "cuda" else _on_cpu()


def _on_cpu() -> list[Trial]:
    trials = [
        Trial(_AUTHORS, "nclp", 200, authors, repeats=3),
        Trial(_SAME, "nclp", 200, _constant, authors, 21),
        Trial("snarenet, defaults", "nclp", 200, ours, repeats=21),
        Trial(_AUTHORS, "qcqp", 100, authors, repeats=3),
        Trial(_SAME, "qcqp", 100, _constant, authors),
        Trial("snarenet, defaults", "qcqp", 100, ours),
        Trial("snarenet, defaults, as one function", "qcqp", 100, as_function),
    ]
    if importlib.util.find_spec("enforce"):
        trials.append(Trial("enforce-nn", "qcqp", 100, partial(enforce, tol=TOL, eps=1e-8), repeats=3))
    return trials


def _on_gpu() -> list[Trial]:
    def block(problem: str, batch: int, record: int, record_same: int, *sizes: int) -> list[Trial]:
        named = dict(zip(("size", "inequalities", "equalities"), sizes, strict=False)) or None
        shared = {"sizes": named, "problem": problem, "batch": batch}
        compared = not sizes and batch <= 200  # once for each family is enough
        return [
            Trial(_AUTHORS, build=authors, repeats=3, **shared),
            Trial(_SAME, build=_constant, like=authors if compared else None, **shared),
            Trial(
                f"{_SAME}, recorded",
                build=partial(recorded, record=record_same, rows="all", damping=0.01),
                like=_constant if compared else None,
                **shared,
            ),
            Trial("snarenet, defaults", build=ours, **shared),
            Trial(
                "snarenet, defaults, recorded",
                build=partial(recorded, record=record),
                like=ours if compared else None,
                **shared,
            ),
        ]

    trials = [
        *block("nclp", 200, 40, 60),
        *block("nclp", 200, 20, 20, 500, 450, 50),
        *block("nclp", 200, 28, 16, 1000, 950, 50),
        *block("qcqp", 100, 20, 80),
        *block("qcqp", 833, 20, 80),
        *block("qcqp", 100, 24, 190, 100, 100, 50),
    ]
    for problem, record in {"nclp": 40, "qcqp": 20}.items():
        trials.append(Trial("snarenet, defaults", problem, 833, ours, backward=False))
        trials.append(
            Trial("snarenet, defaults, recorded", problem, 833, partial(recorded, record=record), backward=False)
        )
    return trials


def measure(device: torch.device, out: Path, trials: Sequence[Trial] | None = None) -> Benchmark:
    """Measure these trials, else the usual ones; the first of a problem is what the others are compared with."""
    lines: list[list[Any]] = []
    baseline: dict[tuple[str, int], float] = {}
    for trial in trials_for(device) if trials is None else trials:
        steps, ms, memory, kept, violation, difference = _measured(trial, device)
        first = baseline.setdefault((trial.title, trial.batch), ms)
        label = f"{trial.title}: {trial.name}"
        lines.append([label, trial.batch, steps, ms, first / ms, memory, kept, violation, difference])
        print(*lines[-1], sep=" | ", file=sys.stderr, flush=True)
    title = f"One repair to a violation of {TOL:g}, forward and backward"
    return Benchmark(title, COLUMNS, lines, command_line("repair", device), hardware(device))


def _measured(trial: Trial, device: torch.device) -> tuple[int, float, float | None, float | None, float, float | None]:
    """Steps, milliseconds, MiB, MiB kept, violation and difference of a trial; the memory of the last one is free."""
    gc.collect()
    case = _Case(trial, device)
    _, _, steps, violation = case.outcome()
    if not violation <= TOL * (1 + 1e-6):  # rounding aside
        raise RuntimeError(f"{trial.title}: {trial.name} leaves a violation of {violation:.1e} instead of {TOL:g}")
    ms, memory, kept = case.timed()
    if device.type == "cpu":
        ((_, memory),) = scatter(_peak_mib, {trial.name: trial}, 1)
    return steps, ms, memory, kept, violation, _difference(trial, steps, device)


class _Case:
    """A trial's problem, predictions and inputs on a device, and its repair; `options` are those of `build`."""

    def __init__(self, trial: Trial, device: torch.device, build: Callable[..., Repair] | None = None, **options: Any):
        self.trial, self.device = trial, device
        self.problem = load(trial.problem, **(trial.sizes or _NO_SIZES)).to(device)
        self.y, self.x = start(self.problem, 0.5, trial.batch)
        self.y.requires_grad_(trial.backward)
        self.idle = _allocated(device)
        self.repair = (build or trial.build)(self.problem, **options)

    def step(self) -> tuple[Tensor, Tensor | int]:
        """One pass: value and steps; the gradient is in `y.grad`."""
        self.y.grad = None
        with torch.set_grad_enabled(self.trial.backward):
            value, steps = self.repair(self.y, self.x)
        if self.trial.backward:
            value.square().sum().backward()
        return value.detach(), steps

    def outcome(self) -> tuple[Tensor, Tensor, int, float]:
        """Value, gradient, steps and violation."""
        value, taken = self.step()
        steps = taken if isinstance(taken, int) else int(taken.max())
        violation = self.problem.constraints.violation(value, self.x).max().item()
        return value, value if self.y.grad is None else self.y.grad, steps, violation

    def timed(self) -> tuple[float, float | None, float | None]:
        """Median milliseconds of a pass; on a GPU, MiB that it adds at its peak, and MiB that stay after it."""
        if self.device.type == "cpu":
            return median_ms(self.step, self.trial.repeats), None, None
        self.step()
        self.y.grad = None
        kept = _allocated(self.device) - self.idle
        memory = peak_growth_mib(self.step, self.device)
        return median_ms(self.step, self.trial.repeats, self.device), memory, kept


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0


def _peak_mib(trial: Trial) -> float:
    """Growth of the peak resident size over one pass; for a new process."""
    cpu = torch.device("cpu")
    _Case(replace(trial, batch=2), cpu).step()  # loads libraries, so that they do not count
    case = _Case(trial, cpu)
    return peak_growth_mib(case.step)


def _difference(trial: Trial, steps: int, device: torch.device) -> float | None:
    """Largest relative difference in value and gradient from what the trial must equal, after as many steps."""
    if trial.like is None:
        return None
    fixed = {} if "recorded" in trial.name else {"steps": steps}
    mine, theirs = (_Case(trial, device, build, **fixed).outcome()[:2] for build in (trial.build, trial.like))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, theirs, strict=True))
