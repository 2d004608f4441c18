"""AMPL's .nl files, as Pyomo (`model.write("model.nl")`) and JuMP (`write_to_file`) write them; CasADi reads them."""

from __future__ import annotations

import re
from functools import reduce
from operator import and_
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from snarenet.constraints import Box, Constraints
from snarenet.doors import casadi
from snarenet.doors.extras import need


class Model(NamedTuple):
    """What is in a file.

    Attributes:
        constraints: the set: bounds on variables as a `Box`, then the rows, see `Constraints.from_casadi`.
        objective: (y, x) -> (B,), what the model minimises; of one that is maximised, the negative.
        start: (n,) the point that the file suggests to start from.
        names: of the variables, from the .col file beside it; none where there is no such file.
    """

    constraints: Constraints
    objective: nn.Module
    start: Tensor
    names: tuple[str, ...]


class _Objective(nn.Module):
    """The only row of a function."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, y: Tensor, x: Any = None) -> Tensor:
        return self.function(y)[:, 0]


def read(path: str | PathLike[str]) -> Model:
    """Read a model. Its numbers are constants, so that the set does not depend on x."""
    ca, file = need("casadi"), Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"`path` must be a .nl file, but there is no file {file}")
    built = _built(ca, file)
    if any(built.discrete):
        raise NotImplementedError(f"{file.name} has {sum(built.discrete)} integer variables, which are not taken")
    lower, upper, start = (
        torch.tensor(list(numbers), dtype=torch.float64) for numbers in (built.x_lb, built.x_ub, built.x_init)
    )
    found: list[Constraints] = [Box(lower, upper)] if bool((lower.isfinite() | upper.isfinite()).any()) else []
    if len(built.g):
        found.append(casadi.constraints(ca.vertcat(*built.g), built.g_lb, built.g_ub, built.x))
    if not found:
        raise ValueError(f"{file.name} has neither a constraint nor a bound")
    names = file.with_suffix(".col")
    return Model(
        reduce(and_, found),
        _Objective(casadi.function(ca.MX(built.f), built.x)),
        start,
        tuple(names.read_text().splitlines()) if names.is_file() else (),
    )


def _built(ca: Any, file: Path) -> Any:
    """The model that CasADi reads; it cannot skip comments, which Pyomo writes for `symbolic_solver_labels`."""
    builder = ca.NlpBuilder()
    content = file.read_bytes()
    if not content.startswith(b"g"):  # a binary file, which has none
        builder.import_nl(str(file))
        return builder
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "model.nl"
        plain.write_bytes(re.sub(rb"[ \t]*#[^\n]*", b"", content))
        builder.import_nl(str(plain))
    return builder
