"""`Case`: a set, predictions and options, written as a few lines of Python; what is printed is what is run.

The formula of every set stands here a second time, without the library, so that what the library says of an output can
be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from snarenet import ConjugateGradients, Damping, Nearest, Solution

_HEAD = """\
from functools import partial
from math import inf, nan

import torch

import snarenet as sn

t = partial(torch.tensor, dtype=torch.float64)
"""
_CLASSES = {"linear": "Linear", "quadratic": "Quadratic", "box": "Box", "nonlinear": "Nonlinear"}


@dataclass(frozen=True)
class Datum:
    """A matrix or bound: the same for all samples, one for each, or a function of x.

    Attributes:
        value: (*shape), or (B, *shape) if it is one for each sample.
        slope: (*shape) what the first entry of x is multiplied with and added; None if x does not matter.
        per_sample: does `value` have a row for each sample?
        learned: does it need a gradient?
        sparse: is it handed over as a sparse tensor?
    """

    value: Tensor
    slope: Tensor | None = None
    per_sample: bool = False
    learned: bool = False
    sparse: bool = False

    def lines(self, name: str) -> list[str]:
        """The definitions of its tensors."""
        end = ".requires_grad_()" if self.learned else ".to_sparse()" if self.sparse else ""
        first = f"{name} = {written(self.value)}{end}"
        return [first] if self.slope is None else [first, f"d{name} = {written(self.slope)}{end}"]

    def text(self, name: str) -> str:
        """What is handed over."""
        if self.slope is None:
            return name
        return f"lambda x: {name} + x[:, :1{', None' * (self.slope.ndim - 1)}] * d{name}"

    def at(self, x: Tensor | None, batch: int) -> Tensor:
        """(B, *shape) what it is for every sample."""
        if self.per_sample:
            return self.value
        value = self.value.expand(batch, *self.value.shape)
        if self.slope is None or x is None:
            return value
        return value + x.double()[:, 0].reshape(-1, *[1] * self.slope.ndim) * self.slope

    def only(self, rows: list[int]) -> Datum:
        """That of some of the rows."""
        slope = None if self.slope is None else self.slope[rows]
        return replace(self, value=self.value[:, rows] if self.per_sample else self.value[rows], slope=slope)

    def absolute(self) -> Datum:
        """That of the absolute values."""
        return replace(self, value=self.value.abs(), slope=None if self.slope is None else self.slope.abs())

    def select(self, index: list[int]) -> Datum:
        """That of some of the samples."""
        return replace(self, value=self.value[index]) if self.per_sample else self


@dataclass(frozen=True)
class Part:
    """A set of one kind.

    Attributes:
        kind: linear, quadratic, box or nonlinear.
        rows: how many rows it has.
        data: matrices and bounds, by the names of the arguments; of a nonlinear set, A is inside its formula.
        formula: of a nonlinear set: an expression in y, x and A.
    """

    kind: str
    rows: int
    data: dict[str, Datum]
    formula: str = ""

    def lines(self, k: int) -> list[str]:
        """Python that builds it as S{k}."""
        found = [line for name, datum in self.data.items() for line in datum.lines(f"{name}{k}")]
        given = [f"{name}={datum.text(f'{name}{k}')}" for name, datum in self.data.items()]
        if self.kind == "nonlinear":
            formula = self.formula.replace("A", f"A{k}.to(y)")
            given = [f"lambda y, x: {formula}", f"rows={self.rows}", *given[1:]]
        return [*found, f"S{k} = sn.{_CLASSES[self.kind]}({', '.join(given)})"]

    def value(self, y: Tensor, x: Tensor | None) -> Tensor:
        """g(y, x): (B, rows), for y in float64."""
        data = {name: datum.at(x, len(y)) for name, datum in self.data.items()}
        if self.kind == "box":
            return y
        if self.kind == "linear":
            return torch.einsum("bmn,bn->bm", data["A"], y)
        if self.kind == "nonlinear":
            inputs = None if x is None else x.double()
            return eval(self.formula, {"y": y, "x": inputs, "A": self.data["A"].value, "torch": torch})
        g = y.new_zeros(len(y), self.rows)
        if "G" in data:
            g = g + torch.einsum("bmn,bn->bm", data["G"], y)
        if "H" in data:
            H = data["H"]
            g = g + torch.einsum("bmn,bn,bn->bm" if H.ndim == 3 else "bmjn,bn,bj->bm", H, y, y)
        return g

    def bounds(self, x: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
        """(B, rows) each."""
        pair = []
        for name, none in (("lower", -torch.inf), ("upper", torch.inf)):
            datum = self.data.get("equals", self.data.get(name))
            pair.append(torch.full((batch, self.rows), none).double() if datum is None else datum.at(x, batch))
        return pair[0], pair[1]

    def only(self, rows: list[int]) -> Part:
        """The set of some of the rows."""
        return replace(self, rows=len(rows), data={name: datum.only(rows) for name, datum in self.data.items()})

    def absolute(self) -> Part:
        """The set of the absolute values of its data."""
        return replace(self, data={name: datum.absolute() for name, datum in self.data.items()})

    def select(self, index: list[int]) -> Part:
        """The set of some of the samples."""
        return replace(self, data={name: datum.select(index) for name, datum in self.data.items()})


@dataclass(frozen=True)
class Case:
    """A batch to repair.

    Attributes:
        parts: the sets that must hold together.
        y: (B, n) predictions, in any precision.
        x: (B, d) inputs, in any precision; None if there are none.
        options: arguments of the method.
        method: "repair", or the name of a layer.
        wrong: the argument that a mistake was made in, if one was: the library has to say so.
    """

    parts: tuple[Part, ...]
    y: Tensor
    x: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    method: str = "repair"
    wrong: str = ""

    def source(self) -> str:
        """Python that builds and repairs it."""
        lines = [line for k, part in enumerate(self.parts) for line in part.lines(k)]
        lines.append(f"S = {' & '.join(f'S{k}' for k in range(len(self.parts)))}")
        lines.append(f"y = {written(self.y)}.requires_grad_()")
        needs_grad = "" if self.x is None else ".requires_grad_()"
        lines.append(f"x = {'None' if self.x is None else written(self.x)}{needs_grad}")
        given = "".join(f", {name}={written(value)}" for name, value in self.options.items())
        if self.method == "repair":
            lines.append(f"solution = sn.repair(S, y, x{given})")
        else:
            inputs = 0 if self.x is None else self.x.shape[1]
            lines.append(f"layer = sn.layers.build({self.method!r}, S, {inputs}, {self.y.shape[1]}{given})")
            lines.append("solution = layer.solve(y, x)")
        return _HEAD + "\n".join(lines) + "\n"

    def run(self) -> tuple[Solution, dict[str, Tensor]]:
        """What the library makes of it, and the tensors that need gradients, by name."""
        found: dict[str, Any] = {}
        exec(compile(self.source(), "<case>", "exec"), found)
        leaves = {name: v for name, v in found.items() if isinstance(v, Tensor) and v.is_leaf and v.requires_grad}
        return found["solution"], leaves

    def value(self, y: Tensor) -> Tensor:
        """g(y, x): (B, rows), for y in float64, without the library."""
        return torch.cat([part.value(y, self.x) for part in self.parts], 1)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """(lower, upper), each (B, rows), with `relax`."""
        lower, upper = zip(*(part.bounds(self.x, len(self.y)) for part in self.parts), strict=True)
        relax = self.options.get("relax", 0.0)
        relax = relax.double() if isinstance(relax, Tensor) else relax
        return torch.cat(lower, 1) - relax, torch.cat(upper, 1) + relax

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def in_float64(self) -> bool:
        """Is everything in float64: the repair, its output and the inputs?"""
        return not self.rounds and (self.x is None or self.x.dtype == torch.float64)

    @property
    def rounds(self) -> bool:
        """Is the output rounded to less than float64, on the way or at the end?"""
        return {self.y.dtype, self.options.get("dtype", torch.float64)} != {torch.float64}

    def to_float64(self) -> Case:
        """The case with nothing rounded to less."""
        options = {name: value for name, value in self.options.items() if name != "dtype"}
        return replace(self, y=self.y.double(), x=None if self.x is None else self.x.double(), options=options)

    def select(self, index: list[int]) -> Case:
        """The case of some of the samples."""
        options = {
            name: value[index] if isinstance(value, Tensor) and value.ndim == 2 else value
            for name, value in self.options.items()
        }
        x = None if self.x is None else self.x[index]
        return replace(self, parts=tuple(p.select(index) for p in self.parts), y=self.y[index], x=x, options=options)

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name in the source."""
        if name in ("y", "x"):
            found = getattr(self, name)
        else:
            datum = self.parts[int(name[-1])].data[name[:-1].lstrip("d")]
            found = datum.slope if name.startswith("d") else datum.value
        assert isinstance(found, Tensor)
        return found

    def moved(self, direction: dict[str, Tensor], h: float) -> Case:
        """The case with its tensors moved by h times a direction."""
        at = {name: self.tensor(name) + h * step for name, step in direction.items()}
        parts = [
            replace(
                part,
                data={
                    name: replace(
                        datum,
                        value=at.get(f"{name}{k}", datum.value),
                        slope=at.get(f"d{name}{k}", datum.slope),  # pyright: ignore[reportArgumentType]
                    )
                    for name, datum in part.data.items()
                },
            )
            for k, part in enumerate(self.parts)
        ]
        return replace(self, parts=tuple(parts), y=at.get("y", self.y), x=at.get("x", self.x))


def written(value: object) -> str:
    """Python that makes the value."""
    if isinstance(value, Tensor):
        shape = f".reshape{tuple(value.shape)}" if value.numel() == 0 else ""
        numbers = value.detach().to_dense().tolist() if value.numel() else []
        if value.dtype == torch.float64:
            return f"t({numbers!r}){shape}"
        return f"torch.tensor({numbers!r}, dtype={value.dtype}){shape}"
    return f"sn.{value!r}" if isinstance(value, Damping | ConjugateGradients | Nearest) else repr(value)
