"""`snarenet demo | train | evaluate | report | compare | reproduce | bench`. tyro is imported only here."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from tyro.conf import OmitArgPrefixes, Positional, arg

from snarenet.bench import ITEMS, bench
from snarenet.constraints import Constraints, Nonlinear
from snarenet.experiments.compare import Plan, compare
from snarenet.experiments.reproduce import ITEMS as PAPER_ITEMS
from snarenet.experiments.reproduce import reproduce
from snarenet.layers import METHODS
from snarenet.problems import Problem, load, names
from snarenet.problems.base import Split
from snarenet.reference import Reference, solve
from snarenet.repair import repair
from snarenet.report.comparison import terminal_table
from snarenet.report.figures import draw_repair_paths
from snarenet.report.page import write_report
from snarenet.report.results_page import write_results_page
from snarenet.report.tables import evaluation_table
from snarenet.training import Run, RunError, TrainConfig, Trainer, default_folder, evaluate
from snarenet.training import tensorboard as write_tensorboard

Engine = Annotated[
    Literal["ipopt", "clarabel", "slsqp", "gurobi", "none"], arg(help="reference solver; none for no gap")
]
_NO_SIZES: dict[str, int] = {}
_NO_CHANGES: dict[str, str] = {}
Device = Annotated[str, arg(help="where to train: auto, cpu, cuda, cuda:1 ...")]


def train(
    problem: Annotated[Positional[str], arg(help=f"one of {', '.join(names())}")],
    config: OmitArgPrefixes[TrainConfig],
    recipe: Annotated[Literal["best", "paper"], arg(help="defaults of the options below")] = "best",
    out: Annotated[Path | None, arg(help="run folder; runs/PROBLEM-TIME unless given")] = None,
    resume: Annotated[Path | None, arg(help="go on with the run in this folder")] = None,
    sizes: Annotated[
        dict[str, int], arg(help="sizes of the problem, as in: --sizes inequalities 100 box 2")
    ] = _NO_SIZES,
    engine: Engine = "ipopt",
    device: Device = "auto",
    tensorboard: Annotated[bool, arg(help="also write metrics for TensorBoard to RUN/tensorboard")] = False,
) -> None:
    """Train a model on a problem, then evaluate it on the test instances.

    A run that was stopped goes on with `--resume FOLDER` and the same options.
    """
    family = _load(problem, sizes, device)
    folder = resume or out or default_folder(family)
    callbacks = [write_tensorboard(folder / "tensorboard")] if tensorboard else []
    trainer = Trainer(config, folder, callbacks=callbacks, reference=_objective(_reference(family, "valid", engine)))
    try:
        run = trainer.fit(config.build(family), family, resume)
    except KeyboardInterrupt:
        raise RunError(f"stopped; go on with the same command and --resume {folder}") from None
    if _leads():
        _evaluate(run, family, "test", config.test_tol, engine)
        _say(f"The run is in {run.path}; draw it with: snarenet report {run.path}")


def evaluate_run(
    run: Annotated[Positional[Path], arg(help="run folder")],
    tol: Annotated[float | None, arg(help="tolerance of the repair; that of the run unless given")] = None,
    split: Annotated[Literal["train", "valid", "test"], arg(help="which instances")] = "test",
    engine: Engine = "ipopt",
    device: Device = "auto",
) -> None:
    """Evaluate a trained model at any tolerance, next to a reference solver."""
    opened = Run.open(run)
    problem = opened.load_problem().to(_device(device))
    _evaluate(opened, problem, split, opened.config.test_tol if tol is None else tol, engine)


def report(folder: Annotated[Positional[Path], arg(help="folder of a run, or of `snarenet reproduce`")]) -> None:
    """Draw a run, or all results of a reproduction: one HTML page with figures and numbers."""
    is_run = Run.exists(folder)
    _say(f"The report is {write_report(folder) if is_run else write_results_page(folder)}")


def reproduce_paper(
    items: Annotated[Positional[tuple[str, ...]], arg(help=f"all, or some of {', '.join(PAPER_ITEMS)}")],
    budget: Annotated[
        Literal["smoke", "standard", "paper"], arg(help="minutes on a CPU, a night on a GPU, or the paper's epochs")
    ] = "smoke",
    seeds: Annotated[int, arg(help="runs of each setting; the first five seeds are the paper's")] = 5,
    out: Annotated[Path, arg(help="folder of runs and results; what is there goes on")] = Path("reproduction"),
    jobs: Annotated[int | None, arg(help="runs at a time; 1, or as many as the cluster has room for")] = None,
    cluster: Annotated[str | None, arg(help="train on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT")] = None,
    stack_seeds: Annotated[bool, arg(help="train the seeds of a setting as one, where possible")] = False,
    share: Annotated[float | None, arg(help="of the paper's epochs, for parity; the budget's unless given")] = None,
    train: Annotated[bool, arg(help="train and measure what is missing; else make tables of what is there")] = True,
    engine: Engine = "ipopt",
    device: Device = "auto",
) -> None:
    """Do tables and figures of the paper again: its numbers, our runs of its recipe and our best, side by side.

    What was stopped goes on with the same command; nothing is done twice.
    """
    where = str(_device(device))
    options = {"device": where, "jobs": jobs, "cluster": cluster, "stacked": stack_seeds, "engine": engine}
    for found in reproduce(items, budget, seeds, out, share=share, train=train, **options):
        _say(f"{found.item}: {out / found.item}.md")
        for remark in found.remarks:
            _say(f"  {remark}")
    try:
        _say(f"The report is {write_results_page(out)}")
    except ImportError as error:
        _say(f"No report: {error}", error=True)


def compare_methods(
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
    jobs: Annotated[int | None, arg(help="runs at a time; 1, or as many as the cluster has room for")] = None,
    cluster: Annotated[
        str | None,
        arg(help="train and solve on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT; its nodes must share --out"),
    ] = None,
    sizes: Annotated[dict[str, int], arg(help="sizes of the problem")] = _NO_SIZES,
    engine: Engine = "ipopt",
    classical: Annotated[bool, arg(help="also time IPOPT, Clarabel and SLSQP")] = True,
    device: Device = "auto",
    stack_seeds: Annotated[bool, arg(help="train the seeds of a method as one, where possible")] = False,
) -> None:
    """Train every method on a problem, and put them side by side with classical solvers: a table and a figure.

    A comparison that was stopped goes on with the same command.
    """
    literal = {name: _literal(value) for name, value in changes.items()}
    plan = Plan(problem, sizes, methods, seeds, epochs, recipe, literal, tol)
    family, folder = _load(problem, sizes, "cpu"), out or Path("comparisons") / problem
    plan.jobs(family)  # what is wrong with the settings is said before the references are computed
    reference = _objective(_reference(family, "test", engine, cluster))
    where = str(_device(device))
    rows, remarks = compare(
        plan,
        folder,
        device=where,
        workers=jobs,
        cluster=cluster,
        reference=reference,
        classical=classical,
        stacked=stack_seeds,
    )
    Console().print(terminal_table(rows))
    for remark in remarks:
        _say(remark)
    _say(f"Table and figure are in {folder}")


def benchmark(
    item: Annotated[Positional[str], arg(help=f"all, or one of {', '.join(ITEMS)}")],
    device: Device = "auto",
    out: Annotated[Path, arg(help="folder of the tables ITEM.json and ITEM.md; what is there goes on")] = Path("bench"),
    options: Annotated[
        dict[str, str], arg(name="set", help="options of the item, as in: --set epochs 50")
    ] = _NO_CHANGES,
) -> None:
    """Measure speed, memory and scaling, next to the authors' layer and to others; print the tables and keep them."""
    bench(item, _device(device), out, **{name: _literal(value) for name, value in options.items()})
    _say(f"The tables are in {out}")


def demo(
    out: Annotated[Path, arg(help="folder for the run, its report and the figure")] = Path("demo"),
    epochs: Annotated[int, arg(help="epochs of training")] = 60,
    sizes: Annotated[dict[str, int], arg(help="sizes of the NCLP problem")] = _NO_SIZES,
    seed: Annotated[int, arg(help="seed of training and of the random predictions")] = 0,
) -> None:
    """Draw a repair on two disks; train NCLP, compare it with IPOPT, and write a report.

    NCLP has 100 variables, 50 linear inequalities, 50 equalities and a non-convex objective: the paper's first problem.
    """
    figure = draw_demo(out / "two_disks.png", seed)
    run_folder = _unused(out / "nclp")
    problem = _load("nclp", sizes, "cpu")
    config = TrainConfig.recipe("best", "nclp", epochs=epochs, seed=seed)
    trainer = Trainer(config, run_folder, reference=_objective(_reference(problem, "valid", "ipopt")))
    run = trainer.fit(config.build(problem), problem)
    _evaluate(run, problem, "test", config.test_tol, "ipopt")
    _say(f"How a repair moves: {figure}")
    _say(f"The report is {write_report(run.path)}")


def draw_demo(file: Path, seed: int) -> Path:
    """Draw random predictions and their repairs onto Example 1 of the paper, two disks of radius 3/2."""
    disks: Constraints = Nonlinear(
        lambda y, x: torch.stack([(y[:, 0] + 1) ** 2 + y[:, 1] ** 2, (y[:, 0] - 1) ** 2 + y[:, 1] ** 2], 1),
        rows=2,
        upper=2.25,
    )
    predictions = 2 * torch.randn(24, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    paths = torch.stack([repair(disks, predictions, max_steps=k).value for k in range(25)])
    draw_repair_paths(disks, paths, file, "Repair onto the intersection of two disks")
    return file


def _evaluate(run: Run, problem: Problem, split: Split, tol: float, engine: str) -> None:
    """Evaluate the run's model, keep and print what was found."""
    model = run.load_model(problem)
    reference = _reference(problem, split, engine)
    seconds = None if reference is None else reference.seconds.double().mean().item()
    found = evaluate(
        model,
        problem,
        split,
        tol=tol,
        reference=_objective(reference),
        reference_seconds=seconds,
        engine=None if reference is None else engine,
    )
    run.save_evaluation(*found)
    Console().print(evaluation_table([(problem.name, found.summary)]))


def _leads() -> bool:
    """Is this the only process, or the first that torchrun started?"""
    return os.environ.get("RANK", "0") == "0"


def _load(name: str, sizes: dict[str, int], device: str) -> Problem:
    return load(name, **sizes).to(_device(device))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"`device` {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def _reference(problem: Problem, split: Split, engine: str, cluster: str | None = None) -> Reference | None:
    """Optimal values of a split, with a progress bar; None where there is no solver for the problem."""
    if engine == "none" or not problem.solvable or not _leads():
        return None
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{engine}, {split} instances")
        try:
            return solve(
                problem,
                problem.split(split),
                engine,
                cluster=cluster,
                progress=lambda k, n: bar.update(task, completed=k, total=n),
            )
        except ImportError as error:
            _say(f"No optimality gap: {error}", error=True)
            return None


def _objective(reference: Reference | None) -> torch.Tensor | None:
    return None if reference is None else reference.objective


def _literal(text: str) -> object:
    """A Python number or name, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _unused(folder: Path) -> Path:
    """The folder, or folder-2, folder-3 ... if it is taken: nothing that a user made is overwritten."""
    k, free = 1, folder
    while free.exists():
        k += 1
        free = folder.with_name(f"{folder.name}-{k}")
    return free


def _say(sentence: str, error: bool = False) -> None:
    Console(stderr=error).print(sentence, markup=False, highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name; what a user did wrong is said in a sentence, with exit code 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    commands = {
        "demo": demo,
        "train": _with_defaults(arguments),
        "evaluate": evaluate_run,
        "report": report,
        "compare": compare_methods,
        "reproduce": reproduce_paper,
        "bench": benchmark,
    }
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog="snarenet", description="Neural networks that obey hard constraints.", args=arguments
        )
    except KeyboardInterrupt:
        _say("snarenet: stopped", error=True)
        raise SystemExit(130) from None
    except (RunError, ValueError, ImportError, OSError) as error:
        _say(f"snarenet: {error}", error=True)
        raise SystemExit(1) from None


def _with_defaults(arguments: list[str]) -> Callable[..., None]:
    """`train` with the defaults of the recipe and problem that the arguments name, so that --help shows them."""
    glance = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    glance.add_argument("--recipe", choices=["best", "paper"], default="best")
    glance.add_argument("--method", default="snare")
    glance.add_argument("names", nargs="*")
    try:
        seen = glance.parse_known_args(arguments)[0]
    except (SystemExit, argparse.ArgumentError):
        seen = argparse.Namespace(recipe="best", method="snare", names=[])
    problem = next((name for name in seen.names[1:] if name in names()), "")
    method = seen.method if seen.method in METHODS else "snare"  # what is wrong with it, `TrainConfig` says later
    return partial(train, config=TrainConfig.recipe(seen.recipe, problem, method=method))
