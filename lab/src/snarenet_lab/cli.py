"""`snarenet compare | reproduce | bench | fuzz`: entry points of `snarenet.commands`, whose arguments tyro reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from rich.console import Console
from tyro.conf import Positional, arg

from snarenet.cli import Device, Engine, Size, find_device, find_reference, say
from snarenet.layers import METHODS
from snarenet.problems import load, names
from snarenet_lab import bench as benchmarks
from snarenet_lab import fuzz as searching
from snarenet_lab.experiments import compare as comparing
from snarenet_lab.experiments import reproduce as reproducing
from snarenet_lab.options import literal
from snarenet_lab.report.comparison import terminal_table
from snarenet_lab.report.results_page import write_results_page

_NO_SIZES: dict[str, Size] = {}
_NO_CHANGES: dict[str, str] = {}
Jobs = Annotated[int | None, arg(help="runs at a time; 1, or as many as the cluster has room for")]


def reproduce(
    items: Annotated[Positional[tuple[str, ...]], arg(help=f"all, or some of {', '.join(reproducing.ITEMS)}")],
    budget: Annotated[
        Literal["smoke", "standard", "paper"], arg(help="minutes on a CPU, a night on a GPU, or the paper's epochs")
    ] = "smoke",
    seeds: Annotated[int, arg(help="runs of each setting; the first five seeds are the paper's")] = 5,
    out: Annotated[Path, arg(help="folder of runs and results; what is there goes on")] = Path("reproduction"),
    jobs: Jobs = None,
    cluster: Annotated[str | None, arg(help="train on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT")] = None,
    stack_seeds: Annotated[bool, arg(help="train the seeds of a setting as one, where possible")] = False,
    share: Annotated[float | None, arg(help="of the paper's epochs, for parity; the budget's unless given")] = None,
    only: Annotated[tuple[str, ...], arg(help="train for rows of these labels alone, such as DC3 'SnareNet*'")] = (),
    train: Annotated[bool, arg(help="train and measure what is missing; else make tables of what is there")] = True,
    engine: Engine = "ipopt",
    device: Device = "auto",
) -> None:
    """Do tables and figures of the paper again: its numbers, our runs of its recipe and our best, side by side.

    What was stopped goes on with the same command; nothing is done twice.

    Examples:
        snarenet reproduce nclp qcqp
        snarenet reproduce all --budget paper --device cuda --jobs 5
        snarenet reproduce ncqcqp --budget standard --share 1 --only DC3 HProj
    """
    where = str(find_device(device))
    options = {"device": where, "jobs": jobs, "cluster": cluster, "stacked": stack_seeds, "engine": engine}
    for found in reproducing.reproduce(items, budget, seeds, out, share=share, only=only, train=train, **options):
        say(f"{found.item}: {out / found.item}.md")
        for remark in found.remarks:
            say(f"  {remark}")
    try:
        say(f"The report is {write_results_page(out)}")
    except ImportError as error:
        say(f"No report: {error}", error=True)


def compare(
    problem: Annotated[Positional[str], arg(help=f"one of {', '.join(names())}")],
    methods: Annotated[tuple[str, ...], arg(help="which; all unless given")] = tuple(METHODS),
    seeds: Annotated[int, arg(help="runs of each method")] = 3,
    epochs: Annotated[int, arg(help="epochs of a run; of OptNet a tenth, of FSNet a fifth; see --set")] = 10,
    recipe: Annotated[Literal["best", "paper"], arg(help="how to train")] = "best",
    changes: Annotated[
        dict[str, str], arg(name="set", help="other settings, for all or for one: --set width 800 dc3.penalty 1")
    ] = _NO_CHANGES,
    tol: Annotated[float | None, arg(help="tolerance in the test; each method's own unless given")] = None,
    out: Annotated[Path | None, arg(help="folder; comparisons/PROBLEM unless given. What is there goes on")] = None,
    jobs: Jobs = None,
    cluster: Annotated[
        str | None,
        arg(help="train and solve on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT; its nodes must share --out"),
    ] = None,
    sizes: Annotated[dict[str, Size], arg(help="sizes of the problem")] = _NO_SIZES,
    engine: Engine = "ipopt",
    classical: Annotated[bool, arg(help="also time IPOPT, Clarabel and SLSQP")] = True,
    device: Device = "auto",
    stack_seeds: Annotated[bool, arg(help="train the seeds of a method as one, where possible")] = False,
) -> None:
    """Train every method on a problem, and put them side by side with classical solvers: a table and a figure.

    A comparison that was stopped goes on with the same command.

    Examples:
        snarenet compare nclp
        snarenet compare qcqp --methods snare dc3 --seeds 1 --epochs 50 --set dc3.penalty 1
    """
    chosen = {name: literal(value) for name, value in changes.items()}
    plan = comparing.Plan(problem, sizes, methods, seeds, epochs, recipe, chosen, tol)
    family, folder = load(problem, **sizes), out or Path("comparisons") / problem
    plan.jobs(family)  # what is wrong with the settings is said before the references are computed
    reference = find_reference(family, "test", engine, cluster)
    where = str(find_device(device))
    contenders, remarks = comparing.compare(
        plan,
        folder,
        device=where,
        workers=jobs,
        cluster=cluster,
        reference=None if reference is None else reference.objective,
        classical=classical,
        stacked=stack_seeds,
    )
    Console().print(terminal_table(contenders))
    for remark in remarks:
        say(remark)
    say(f"Table and figure are in {folder}")


def bench(
    item: Annotated[Positional[str], arg(help=f"all, or one of {', '.join(benchmarks.ITEMS)}")],
    device: Device = "auto",
    out: Annotated[Path, arg(help="folder of the tables ITEM.json and ITEM.md; what is there goes on")] = Path("bench"),
    options: Annotated[
        dict[str, str], arg(name="set", help="options of the item, as in: --set epochs 50")
    ] = _NO_CHANGES,
) -> None:
    """Measure speed, memory and scaling, next to the authors' layer and to others; print the tables and keep them.

    Examples:
        snarenet bench repair --device cpu
        snarenet bench field --set problem nclp methods "('snarenet','qpth')"
    """
    chosen = {name: literal(value) for name, value in options.items()}
    benchmarks.bench(item, find_device(device), out, **chosen)
    say(f"The tables are in {out}")


def fuzz(
    samples: Annotated[int, arg(help="rows of batches to repair")] = 100_000,
    seed: Annotated[int, arg(help="of all cases; another one makes others")] = 0,
    seconds: Annotated[float | None, arg(help="time limit; none unless given")] = None,
    only: Annotated[int | None, arg(help="do the case of this number again, and no other")] = None,
    most: Annotated[int, arg(help="defects after which to stop")] = 10,
) -> None:
    """Search for what breaks the promises of a repair: random sets, scales, precisions and options.

    A defect is printed as Python that reproduces it; the exit code is 1 if there is one.

    Examples:
        snarenet fuzz --samples 1000000 --seed 1
        snarenet fuzz --only 17
    """
    torch.set_num_threads(1)  # batches are small
    search = searching.fuzz(samples, seed, seconds, only, most, report=lambda line: print(line, flush=True))
    say(search.describe())
    if search.defects:
        raise SystemExit(1)
