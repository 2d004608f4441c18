"""CVXPY's expressions as functions of a batch: (y, x) -> (B, rows), with variables in y and parameters in x."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from snarenet.doors.atoms import rule_of
from snarenet.doors.layout import Layout, flatten, samples


class Step(NamedTuple):
    """What is done with values that were computed before, known by their places."""

    fn: Callable[..., Tensor]
    args: tuple[int, ...]


class Model:
    """Which variables are y, and which parameters are x, in which order."""

    def __init__(self, variables: Sequence[Any], parameters: Sequence[Any]) -> None:
        self.variables, self.parameters = list(variables), list(parameters)
        self.y = Layout("y", [v.name() for v in variables], [tuple(v.shape) for v in variables])
        self.x = Layout("x", [p.name() for p in parameters], [tuple(p.shape) for p in parameters])

    def example(self) -> Tensor:
        """An x (1, d), for what does not depend on it."""
        return torch.ones(1, self.x.size, dtype=torch.float64)

    def leaves(self) -> dict[int, int]:
        """The place of every variable and parameter, by CVXPY's number of it."""
        return {leaf.id: place for place, leaf in enumerate([*self.variables, *self.parameters])}


class Rows(nn.Module):
    """The entries of some expressions, column by column, one expression after the other.

    What expressions have in common is computed once. Constants are buffers, so that they move with the set.
    """

    def __init__(self, expressions: Sequence[Any], model: Model) -> None:
        super().__init__()
        self.y, self.x = model.y, model.x
        self.rows = sum(expression.size for expression in expressions)
        self.varies = any(expression.parameters() for expression in expressions)
        self.constants: list[str] = []
        self.steps: list[Step | str] = []  # a word is the name of a buffer
        self._places: dict[int, int] | None = {}  # of expressions, by their identity, while these are translated
        self._leaves: dict[Any, int] = model.leaves()
        self.results = [self._place(expression) for expression in expressions]
        self._places = None

    def forward(self, y: Tensor, x: Any = None) -> Tensor:
        values: list[Any] = [*self.y.split(y), *(self._split(x) if self.varies else self.x.names)]
        for step in self.steps:
            done = getattr(self, step) if isinstance(step, str) else step.fn(*(values[place] for place in step.args))
            values.append(done)
        rows = [flatten(values[place]) for place in self.results]
        batch = samples(y, *rows)
        return torch.cat([part.expand(batch, -1) for part in rows], 1)

    def _split(self, x: Any) -> list[Tensor]:
        if x is None:
            raise ValueError(f"the set has parameters, which are its `x`: {self.x}, but no x was given")
        return self.x.split(x)

    def _place(self, expression: Any) -> int:
        """Where the value of an expression will be; its steps are added if they are not there yet."""
        assert self._places is not None
        if (leaf := self._leaves.get(getattr(expression, "id", None))) is not None:
            return leaf
        if id(expression) not in self._places:
            if expression.is_constant() and not expression.parameters():
                step: Step | str = self._constant(expression)
            else:
                step = Step(rule_of(expression), tuple(self._place(arg) for arg in expression.args))
                if isinstance(step.fn, nn.Module):  # its tensors move with those of the set
                    self.add_module(f"step{len(self.steps)}", step.fn)
            self.steps.append(step)
            self._places[id(expression)] = len(self._leaves) + len(self.steps) - 1
        return self._places[id(expression)]

    def _constant(self, expression: Any) -> str:
        value = expression.value
        dense = value.toarray() if hasattr(value, "toarray") else np.asarray(value, dtype=float)
        name = f"constant{len(self.constants)}"
        self.constants.append(name)
        self.register_buffer(name, torch.from_numpy(dense.reshape(expression.shape).copy()).unsqueeze(0))
        return name
