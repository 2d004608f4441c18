"""The command line; rich and tyro are imported only here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from snarenet.constraints import Constraints, Nonlinear
from snarenet.layers import SnareLayer
from snarenet.problems import load
from snarenet.repair import repair
from snarenet.report.figures import draw_repair_paths


def demo(
    out: Annotated[Path, tyro.conf.arg(help="folder for the figure")] = Path("demo"),
    instances: Annotated[int, tyro.conf.arg(help="how many NCLP instances to repair")] = 1000,
    seed: Annotated[int, tyro.conf.arg(help="seed of the random predictions")] = 0,
) -> None:
    """Repair random predictions onto two sets, and draw the repair of one of them.

    The sets are the paper's Example 1, the intersection of two disks, and the feasible sets of random NCLP instances:
    50 linear inequalities and 50 equalities on 100 variables.
    """
    generator = torch.Generator().manual_seed(seed)
    disks, nclp = two_disks(), load("nclp")
    predictions = 2 * torch.randn(instances, 2, generator=generator, dtype=torch.float64)
    table = Table(title="Random predictions, repaired to 1e-8")
    for heading in ("constraints", "samples", "violation before", "after", "steps (most)", "per sample"):
        table.add_column(heading, justify="left" if heading == "constraints" else "right")
    table.add_row("two disks", *_measure(disks, predictions))
    x = nclp.inputs[:instances]
    y = torch.randn(len(x), nclp.size, generator=generator, dtype=torch.float64)
    table.add_row("NCLP", *_measure(nclp.constraints, y, x))
    console = Console()
    console.print(table)
    file = out / "two_disks.png"
    try:
        paths = torch.stack([repair(disks, predictions[:24], max_steps=k).value for k in range(25)])
        draw_repair_paths(disks, paths, file, "Repair onto the intersection of two disks")
    except ImportError as error:
        console.print(f"No figure: {error}", markup=False)
    else:
        console.print(f"The repair paths on the two disks are drawn in {file}", markup=False)


def two_disks() -> Constraints:
    """Example 1 of the paper: disks of radius 3/2 around (-1, 0) and (1, 0)."""
    return Nonlinear(
        lambda y, x: torch.stack([(y[:, 0] + 1) ** 2 + y[:, 1] ** 2, (y[:, 0] - 1) ** 2 + y[:, 1] ** 2], 1),
        rows=2,
        upper=2.25,
    )


def _measure(constraints: Constraints, y: Tensor, x: Any = None) -> tuple[str, ...]:
    """A row of the table: samples, violation before and after, steps, time per sample."""
    layer = SnareLayer(constraints)
    layer.solve(y, x)  # warm up
    begin = time.perf_counter()
    solution = layer.solve(y, x)
    seconds = time.perf_counter() - begin
    return (
        str(len(y)),
        f"{constraints.violation(y, x).max():.1e}",
        f"{solution.violation.max():.1e}",
        f"{int(solution.steps.median())} ({int(solution.steps.max())})",
        f"{1e6 * seconds / max(len(y), 1):.0f} µs",
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the arguments name."""
    tyro.extras.subcommand_cli_from_dict(
        {"demo": demo}, prog="snarenet", description="Neural networks that obey hard constraints.", args=arguments
    )
