"""`snarenet demo | train | evaluate | report`, and the commands of installed packages. tyro is imported only here.

A package adds a command as an entry point of the group `snarenet.commands`, a function whose arguments tyro reads, and
the report of a folder that is no run as one of the group `snarenet.reports`, a function of the folder that returns the
path of the page. snarenet-lab, in the folder `lab` of the repository, does both.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from tyro.conf import OmitArgPrefixes, Positional, arg

from snarenet.constraints import Constraints, Nonlinear
from snarenet.layers import METHODS
from snarenet.layers.base import Polish
from snarenet.problems import ACOPF, MPC, Problem, load, names
from snarenet.problems.base import Split
from snarenet.reference import Reference, overlooked, solve
from snarenet.repair import repair
from snarenet.report.evaluation import evaluation_table
from snarenet.report.figures import draw_repair_paths
from snarenet.report.page import write_report
from snarenet.training import Run, RunError, TrainConfig, Trainer, default_folder, evaluate
from snarenet.training import tensorboard as write_tensorboard

Engine = Annotated[
    Literal["ipopt", "clarabel", "slsqp", "gurobi", "none"], arg(help="reference solver; none for no gap")
]
Size = int | float | str
_NO_SIZES: dict[str, Size] = {}
_DEMOS: dict[str, tuple[dict[str, Size], int]] = {  # sizes and epochs for a few minutes on two cores
    "nclp": ({}, 60),
    "acopf": ({"case": "30_ieee", "instances": 1200}, 20),
    "mpc": ({"horizon": 20, "instances": 2400}, 20),
}
_CLOSEUPS = 100  # instances whose details the report shows
Device = Annotated[str, arg(help="where to train: auto, cpu, cuda, cuda:1 ...")]

LAB = ("compare", "reproduce", "bench", "fuzz")  # commands of snarenet-lab
_MISSING = "snarenet-lab, which is not installed; in a clone of the repository: pip install ./lab"


def train(
    problem: Annotated[Positional[str], arg(help=f"one of {', '.join(names())}")],
    config: OmitArgPrefixes[TrainConfig],
    recipe: Annotated[Literal["best", "paper"], arg(help="defaults of the options below")] = "best",
    out: Annotated[Path | None, arg(help="run folder; runs/PROBLEM-TIME unless given")] = None,
    resume: Annotated[Path | None, arg(help="go on with the run in this folder")] = None,
    sizes: Annotated[
        dict[str, Size], arg(help="sizes of the problem, as in: --sizes inequalities 100, or: --sizes case 57_ieee")
    ] = _NO_SIZES,
    engine: Engine = "ipopt",
    device: Device = "auto",
    tensorboard: Annotated[bool, arg(help="also write metrics for TensorBoard to RUN/tensorboard")] = False,
) -> None:
    """Train a model on a problem, then evaluate it on the test instances.

    A run that was stopped goes on with `--resume FOLDER` and the same options. `--help-verbose` explains each option.

    Examples:
        snarenet train nclp --epochs 20 --out runs/first
        snarenet train nclp --epochs 20 --resume runs/first
        snarenet train acopf --sizes case 57_ieee sampler uniform --device cuda
    """
    family = _load(problem, sizes, device)
    folder = resume or out or default_folder(family)
    model, trainer = config.build(family), Trainer(config, folder)
    if _leads():
        trainer.check(model, family, resume)  # before the reference solver, which may take minutes
    if tensorboard:
        trainer.callbacks = [write_tensorboard(folder / "tensorboard")]
    trainer.reference = _objective(find_reference(family, "valid", engine))
    try:
        run = trainer.fit(model, family, resume)
    except KeyboardInterrupt:
        raise RunError(f"stopped; go on with the same command and --resume {folder}") from None
    if _leads():
        _evaluate(run, family, "test", config.test_tol, engine)
        say(f"The run is in {run.path}; draw it with: snarenet report {run.path}")


def evaluate_run(
    run: Annotated[Positional[Path], arg(help="run folder")],
    tol: Annotated[float | None, arg(help="tolerance of the repair; that of the run unless given")] = None,
    split: Annotated[Literal["train", "valid", "test"], arg(help="which instances")] = "test",
    polish: Annotated[Polish | None, arg(help="whose results to polish; as the run says unless given")] = None,
    engine: Engine = "ipopt",
    device: Device = "auto",
) -> None:
    """Evaluate a trained model at any tolerance, next to a reference solver.

    Examples:
        snarenet evaluate runs/first
        snarenet evaluate runs/first --tol 1e-8 --engine none
    """
    opened = Run.open(run)
    tol = opened.config.test_tol if tol is None else tol
    opened.config.options(tol)  # says what is wrong with it before the reference solver begins
    problem = opened.load_problem().to(find_device(device))
    _evaluate(opened, problem, split, tol, engine, polish)


def report(folder: Annotated[Positional[Path], arg(help="folder of a run, or of `snarenet reproduce`")]) -> None:
    """Draw a run, or all results of a reproduction: one HTML page with figures and numbers.

    Examples:
        snarenet report runs/first
        snarenet report reproduction
    """
    writers = [write_report] if Run.exists(folder) else list(_installed("snarenet.reports").values())
    if not writers:
        raise RunError(f"{folder} holds no run; the report of a reproduction is made by {_MISSING}")
    for write in writers:
        say(f"The report is {write(folder)}")


def demo(
    out: Annotated[Path, arg(help="folder for the run, its report and the figure")] = Path("demo"),
    problem: Annotated[Literal["nclp", "acopf", "mpc"], arg(help="the paper's first, a grid, a vehicle")] = "nclp",
    epochs: Annotated[int | None, arg(help="epochs of training; by the problem unless given")] = None,
    sizes: Annotated[dict[str, Size], arg(help="sizes of the problem")] = _NO_SIZES,
    seed: Annotated[int, arg(help="seed of training and of the random predictions")] = 0,
) -> None:
    """Draw what a repair does; train a problem, compare it with IPOPT, and write a report.

    NCLP has 100 variables, 50 linear inequalities, 50 equalities and a non-convex objective; the figure is of two
    disks. `acopf` is optimal power flow on 30 buses, `mpc` the plan of a vehicle around an ellipse.

    Examples:
        snarenet demo
        snarenet demo --problem mpc --out demo --epochs 5
    """
    small, most = _DEMOS[problem]
    family = _load(problem, small | sizes, "cpu")
    config = TrainConfig.recipe("best", problem, epochs=most if epochs is None else epochs, seed=seed)
    figure = draw_demo(out / "two_disks.png", seed) if problem == "nclp" else None
    trainer = Trainer(config, _unused(out / problem), reference=_objective(find_reference(family, "valid", "ipopt")))
    run = trainer.fit(config.build(family), family)
    _evaluate(run, family, "test", config.test_tol, "ipopt")
    say(f"How a repair moves: {figure or _draw_scene(run, family)}")
    say(f"The report is {write_report(run.path)}")


def _draw_scene(run: Run, problem: Problem) -> Path:
    """A grid before and after the repair, or plans beside IPOPT's."""
    from snarenet.report.scenes import draw_grid, draw_plans

    x = problem.split("test")[:12]
    with torch.no_grad():
        solution = run.load_model(problem).solve(x)
    if isinstance(problem, ACOPF):
        picture = draw_grid(problem, {"prediction": solution.raw[0], "repaired": solution.value[0]}, x[0])
    else:
        assert isinstance(problem, MPC)
        best = solve(problem, x, workers=1).value
        ways = {"network": solution.raw, "repaired": solution.value, "IPOPT": best}
        picture = draw_plans(problem, {name: problem.paths(y, x) for name, y in ways.items()})
    file = run.path / "scene.svg"
    file.write_text(picture.svg)
    return file


def draw_demo(file: Path, seed: int) -> Path:
    """Draw random predictions and their repairs onto Example 1 of the paper, two disks of radius 3/2."""
    disks: Constraints = Nonlinear(
        lambda y, x: torch.stack([(y[:, 0] + 1) ** 2 + y[:, 1] ** 2, (y[:, 0] - 1) ** 2 + y[:, 1] ** 2], 1),
        rows=2,
        upper=2.25,
    )
    predictions = 2 * torch.randn(24, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    paths = torch.stack([repair(disks, predictions, start=None, max_steps=k).value for k in range(25)])
    draw_repair_paths(disks, paths, file, "Repair onto the intersection of two disks")
    return file


def _evaluate(run: Run, problem: Problem, split: Split, tol: float, engine: str, polish: Polish | None = None) -> None:
    """Evaluate the run's model, keep and print what was found."""
    model = run.load_model(problem)
    reference = find_reference(problem, split, engine)
    seconds = None if reference is None else reference.seconds.double().mean().item()
    found = evaluate(
        model,
        problem,
        split,
        tol=tol,
        reference=_objective(reference),
        reference_seconds=seconds,
        engine=None if reference is None else engine,
        polish=polish,
        closeups=_CLOSEUPS,
    )
    run.save_evaluation(*found)
    Console().print(evaluation_table([(problem.name, found.summary)]))
    if found.summary["infeasible"]:
        say(_about_infeasible(problem, split, None if reference is None else engine))


def _about_infeasible(problem: Problem, split: Split, engine: str | None) -> str:
    """What is said of inputs that were left out, confirmed by the reference solver if there is one."""
    count = len(problem.infeasible(split))
    said = f"{count} of {count + len(problem.split(split))} instances have no feasible point and are left out"
    if engine is None:
        return said
    missed = overlooked(problem, split, engine)
    return f"{said}, though {engine} finds one for {missed}" if missed else f"{said}; {engine} finds none either"


def _leads() -> bool:
    """Is this the only process, or the first that torchrun started?"""
    return os.environ.get("RANK", "0") == "0"


def _load(name: str, sizes: dict[str, Size], device: str) -> Problem:
    return load(name, **sizes).to(find_device(device))


def find_device(name: str) -> torch.device:
    """The device of this name; "auto" for a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"`device` {name!r} cannot be used here: {str(error).splitlines()[0]}") from error


def find_reference(problem: Problem, split: Split, engine: str, cluster: str | None = None) -> Reference | None:
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
            say(f"No optimality gap: {error}", error=True)
            return None


def _objective(reference: Reference | None) -> torch.Tensor | None:
    return None if reference is None else reference.objective


def _unused(folder: Path) -> Path:
    """The folder, or folder-2, folder-3 ... if it is taken: nothing that a user made is overwritten."""
    k, free = 1, folder
    while free.exists():
        k += 1
        free = folder.with_name(f"{folder.name}-{k}")
    return free


def say(sentence: str, error: bool = False) -> None:
    """Print a sentence as it is."""
    Console(stderr=error).print(sentence, markup=False, highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name; what a user did wrong is said in a sentence, with exit code 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    own = {"demo": demo, "train": _with_defaults(arguments), "evaluate": evaluate_run, "report": report}
    command, about = arguments[0] if arguments else "", "Neural networks that obey hard constraints."
    try:
        commands = own if command in own else own | _installed("snarenet.commands")
        missing = [] if command in own else [name for name in LAB if name not in commands]
        if command in missing:
            raise ImportError(f"{command} is a command of {_MISSING}")
        if missing:
            about += f" {', '.join(missing)}: commands of {_MISSING}."
        about += "\n\nExamples:\n    snarenet demo\n    snarenet train nclp --epochs 20\n    snarenet train --help"
        if command in commands:  # by itself: among others tyro's errors name a field that only tyro knows
            about, short = _about(commands[command]), command == "train"  # whose options fill three screens
            shown = {"prog": f"snarenet {command}", "description": about, "compact_help": short}
            tyro.cli(commands[command], args=arguments[1:], **shown)
        else:
            tyro.extras.subcommand_cli_from_dict(commands, prog="snarenet", description=about, args=arguments)
    except KeyboardInterrupt:
        say("snarenet: stopped", error=True)
        raise SystemExit(130) from None
    except (RunError, ValueError, ImportError, OSError, FloatingPointError, MemoryError) as error:
        say(f"snarenet: {error}", error=True)
        raise SystemExit(1) from None
    except RuntimeError as error:
        if not re.search("alloc|out of memory|overflow", str(error)):
            raise
        say(f"snarenet: not enough memory for this: {str(error).splitlines()[0]}", error=True)
        raise SystemExit(1) from None


def _installed(group: str) -> dict[str, Callable[..., Any]]:
    """The functions that installed packages add to a group of entry points."""
    return {entry.name: entry.load() for entry in entry_points(group=group)}


def _about(command: Callable[..., Any]) -> str:
    """The docstring of a command with its examples, which tyro leaves out: a paragraph a line, an example a line."""
    text = inspect.getdoc(command.func if isinstance(command, partial) else command) or ""
    words, _, examples = text.partition("\nExamples:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in words.strip().split("\n\n")]
    return "\n\n".join([*paragraphs, f"Examples:\n{examples}"] if examples else paragraphs)


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
