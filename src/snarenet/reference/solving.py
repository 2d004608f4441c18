"""`solve`: reference solutions of a problem, chunk by chunk, on all cores, each chunk kept as soon as it is done."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snarenet.constraints.base import Instance
from snarenet.constraints.data import describe
from snarenet.problems.base import Problem, Split
from snarenet.processes import scatter, scatter_over
from snarenet.reference.engines import Clarabel, Engine, Gurobi, Slsqp
from snarenet.reference.expressed import Expressed, Family, disagreement
from snarenet.reference.ipopt import Ipopt
from snarenet.reference.program import RESIDUAL, VIOLATION, Array, Program, digest
from snarenet.reference.reading import Autograd, Lagrangian, boxed_rows, read_structure, why_not_convex
from snarenet.reference.rows import array
from snarenet.reference.store import Chunk, Store
from snarenet.reference.threads import one_thread

ENGINES: dict[str, type[Engine]] = {"ipopt": Ipopt, "clarabel": Clarabel, "slsqp": Slsqp, "gurobi": Gurobi}
_ASKED = 50  # inputs without a feasible point that a solver is asked about: it takes long to give up
CHUNK = 64  # instances; about a second's work, so a run that is killed loses little
_FORMAT = 2  # of what is kept; raise it when the meaning of a file changes


class Reference(NamedTuple):
    """The best solutions found, one for every input.

    Attributes:
        value: (N, n) solutions y, in float64; where `ok` is false, the last iterate of the solver.
        objective: (N,) f(y, x); NaN where `ok` is false.
        ok: (N,) true where y is feasible to 1e-8 with a KKT residual of at most 1e-6.
        violation: (N,) the largest violation of a constraint.
        kkt: (N,) the KKT residual, see `snarenet.reference.program`.
        seconds: (N,) time in the solver for one start, on average.
    """

    value: Tensor
    objective: Tensor
    ok: Tensor
    violation: Tensor
    kkt: Tensor
    seconds: Tensor


def solve(
    problem: Problem,
    x: Tensor | None = None,
    engine: str = "ipopt",
    *,
    starts: int | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    cache: Path | str | Literal[False] | None = None,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> Reference:
    """Solve min f(y, x) subject to the constraints for every x, and check each solution.

    The same call again reads the results from disk, and a call that was killed goes on where it stopped.

    Args:
        problem: the problem. "clarabel" and "gurobi" need the objective of a `Separable` problem, and rows that are
            linear, quadratic or those of an `L1Ball`; all of it may depend on x. "ipopt" and "slsqp" take any, with
            derivatives by torch, but are several times faster where there is such a structure, or the problem has
            `expressions`.
        x: (N, d) inputs; the test inputs unless given.
        engine: "ipopt"; "clarabel" or "gurobi" for convex problems; "slsqp".
        starts: how many points to start from, of which the best solution counts: the problem's `guesses`; without any,
            the shortest solution of the linear equalities; further ones add N(0, I) to the first. `problem.starts`
            unless given.
        workers: processes; as many as cores unless given. 1 stays in this process, as functions of your own always do.
            A script that uses more must call `solve` under `if __name__ == "__main__":`.
        cluster: address of a Ray cluster to solve on, with up to `workers` processes, or as many as it has room for;
            see `snarenet.processes.scatter_over`. The results are kept by this process: no disk need be shared.
        cache: folder for the results; $SNARENET_CACHE or ~/.cache/snarenet unless given; False for none.
        progress: called with (instances done, instances in all) after each chunk.
        seed: of the further starts.

    Returns:
        Solutions in the order of x, on its device; a warning says how many are not `ok`.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {', '.join(ENGINES)}, but got {engine!r}")
    starts = problem.starts if starts is None else starts
    for name, number in {"starts": starts, "workers": workers}.items():
        if number is not None and number < 1:
            raise ValueError(f"`{name}` must be at least 1, but got {number}")
    x = problem.split("test") if x is None else x
    if not isinstance(x, Tensor) or x.ndim != problem.inputs.ndim or x.shape[1:] != problem.inputs.shape[1:]:
        expected = ", ".join(["N", *map(str, problem.inputs.shape[1:])])
        raise ValueError(f"`x` must have shape ({expected}), but got {describe(x)}")
    x = x.detach().to(problem.inputs.device, torch.float64)
    noise = np.random.default_rng(seed).standard_normal((starts - 1, problem.size))
    store = Store(None if cache is False else Store.default() if cache is None else Path(cache))
    with one_thread():
        tasks = _tasks(problem, x, engine, noise)
        chunks = _run(tasks, store, workers, cluster, progress or (lambda done, total: None))
    return _check(problem, x, chunks)


@dataclass(frozen=True)
class Task:
    """A chunk of k instances to solve; numpy all through where the programs are `Structured`.

    Attributes:
        programs: one for each instance, or the same k times.
        engine: its name.
        lower: (k, m) lower bounds.
        upper: (k, m) upper bounds.
        noise: (starts - 1, n) what further starts add to the first.
        guesses: (k, n) where to start, at most as many as starts; none for the program's own start.
    """

    programs: tuple[Program, ...]
    engine: str
    lower: Array
    upper: Array
    noise: Array
    guesses: Array

    def key(self) -> str:
        """A hash of all that the solutions depend on."""
        options = json.dumps([_FORMAT, self.engine, dict(ENGINES[self.engine].options)])
        programs = [program.digest() for program in dict.fromkeys(self.programs)]
        numbers = digest(self.lower, self.upper, self.noise, *([self.guesses] if len(self.guesses) else []))
        return hashlib.sha256(b"".join([options.encode(), *programs, numbers])).hexdigest()


def _tasks(problem: Problem, x: Tensor, engine: str, noise: Array) -> list[Task]:
    """The instances in chunks, after a check that the engine is there and can solve them."""
    instance = problem.feasible_set.at(x.new_zeros(len(x), problem.size), x)
    programs, lower, upper = _read(problem, x, instance, engine)
    guesses = None if problem.guesses is None else problem.guesses[: len(noise) + 1]
    points = np.empty((0, problem.size)) if guesses is None else guesses.detach().double().cpu().numpy()
    parts = [slice(first, first + CHUNK) for first in range(0, len(x), CHUNK)]
    return [Task(tuple(programs[part]), engine, lower[part], upper[part], noise, points) for part in parts]


def _read(problem: Problem, x: Tensor, instance: Instance, engine: str) -> tuple[Sequence[Program], Array, Array]:
    """A program for each input, with bounds (N, m): by its structure where it has one, else by its functions."""
    kind, name = ENGINES[engine], problem.name or type(problem).__name__
    read = read_structure(problem, instance, x)
    if isinstance(read, str):
        if kind.structured:
            raise ValueError(f'`engine` {engine!r} cannot read the problem {name!r}: {read}; use engine="ipopt"')
        return _functions(problem, x, instance, name), array(instance.lower), array(instance.upper)
    reason = why_not_convex(*read) if kind.convex else None
    if reason:
        raise ValueError(
            f'`engine` {engine!r} solves convex problems only, but {name!r} is not: {reason}; use engine="ipopt"'
        )
    for program in read.programs[:1]:
        kind(program)  # a missing package is reported here, not by a worker
    return read


def _functions(problem: Problem, x: Tensor, instance: Instance, name: str) -> Sequence[Program]:
    """Programs by CasADi where the family is written for it, else by autograd."""
    if type(problem).expressions is not Problem.expressions and len(x):
        family = Family.of(problem, boxed_rows(instance.map))
        if reason := disagreement(problem, family, x[:1]):
            raise ValueError(f"the problem {name!r} contradicts itself: {reason}")
        return [Expressed(family, one) for one in x.cpu().numpy().copy()]
    lagrangian = Lagrangian(problem)
    each = (torch.tensor([i], device=x.device) for i in range(len(x)))
    return [Autograd(problem, x[index], instance.select(index), lagrangian) for index in each]


def _run(
    tasks: list[Task], store: Store, workers: int | None, cluster: str | None, progress: Callable[[int, int], None]
) -> list[Chunk]:
    """The chunks of all tasks, from the store or solved now."""
    total, done = sum(len(task.programs) for task in tasks), 0
    chunks: dict[int, Chunk] = {}
    keys = ["" if store.folder is None else task.key() for task in tasks]
    for i, task in enumerate(tasks):
        kept = store.load(keys[i], len(task.programs), task.noise.shape[1])
        if kept is not None:
            chunks[i] = kept
            done += len(task.programs)
    if done:
        progress(done, total)
    missing = {i: task for i, task in enumerate(tasks) if i not in chunks}
    portable = all(program.portable for task in missing.values() for program in task.programs)
    for i, chunk in _solved(missing, workers, cluster) if portable else _solved(missing, 1, None):
        store.save(keys[i], chunk)
        chunks[i] = chunk
        done += len(chunk.kkt)
        progress(done, total)
    return [chunks[i] for i in range(len(tasks))]


def _solved(missing: dict[int, Task], workers: int | None, cluster: str | None) -> Iterable[tuple[int, Chunk]]:
    """(key, chunk) of each task, in any order."""
    if cluster is not None and missing:
        return scatter_over(cluster, solve_chunk, missing, workers)
    side_by_side = min(workers or os.cpu_count() or 1, len(missing))
    if side_by_side > 1:
        return scatter(solve_chunk, missing, side_by_side)
    return ((i, solve_chunk(task)) for i, task in missing.items())


def solve_chunk(task: Task) -> Chunk:
    """Solve the instances of a task one after another."""
    make, current, rows = ENGINES[task.engine], task.programs[0], []
    engine = make(current)
    for program, lower, upper in zip(task.programs, task.lower, task.upper, strict=True):
        if program is not current:
            engine, current = engine if engine.turn_to(program) else make(program), program
        rows.append(_solve_instance(program, engine, lower, upper, task))
    value, kkt, seconds = zip(*rows, strict=True)
    return Chunk(np.array(value), np.array(kkt), np.array(seconds))


def _solve_instance(
    program: Program, engine: Engine, lower: Array, upper: Array, task: Task
) -> tuple[Array, float, float]:
    """(value, kkt, seconds) of the best start: the lowest objective that passes the check, else the least violation."""
    more = program.size - task.noise.shape[1]  # variables that lift rows, zero at first
    given, noise = (np.pad(points, ((0, 0), (0, more))) for points in (task.guesses, task.noise))
    guesses = given if len(given) else program.least_norm(lower, upper)[None]
    found, seconds = [], 0.0
    for start in (*guesses, *(guesses[0] + noise[len(guesses) - 1 :])):
        begin = time.perf_counter()
        y = engine(start, lower, upper)
        seconds += time.perf_counter() - begin
        y = engine.finish(y, lower, upper)
        violation = program.violation(y, lower, upper)
        kkt = program.kkt_residual(y, lower, upper, engine.multipliers)
        ok = violation <= VIOLATION and kkt <= RESIDUAL
        found.append((not ok, program.objective(y) if ok else violation, y, kkt))
    _, _, y, kkt = min(found, key=lambda candidate: candidate[:2])
    return y[: task.noise.shape[1]], kkt, seconds / len(found)


def _check(problem: Problem, x: Tensor, chunks: Iterable[Chunk]) -> Reference:
    """The chunks as one result; objective and violation are the problem's own, not those of its numpy image."""
    empty = Chunk(np.empty((0, problem.size)), np.empty(0), np.empty(0))
    parts = (np.concatenate(part) for part in zip(empty, *chunks, strict=True))
    value, kkt, seconds = (torch.from_numpy(part).to(x.device) for part in parts)
    with torch.no_grad():
        violation = problem.feasible_set.violation(value, x).nan_to_num(torch.inf, posinf=torch.inf)
        objective = problem.objective(value, x)
    ok = (violation <= VIOLATION) & (kkt <= RESIDUAL) & objective.isfinite()
    failed = int((~ok).sum())
    if failed:
        warnings.warn(
            f"{failed} of {len(ok)} instances have no reference solution: the solver found no feasible KKT point for "
            "them; their objective is NaN",
            stacklevel=3,
        )
    return Reference(value, objective.where(ok, torch.nan), ok, violation, kkt, seconds)


def overlooked(problem: Problem, split: Split, engine: str = "ipopt", **options: Any) -> int:
    """How many inputs of a split were left out though the solver finds a feasible point; of the first 50 left out."""
    x = problem.infeasible(split)[:_ASKED]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no solution is what is expected
        found = solve(problem, x, engine, starts=1, **options)
    return int((found.violation <= VIOLATION).sum())
