r"""`Recorded`: the derivatives of a function as programs, recorded once from what autograd does.

- the Jacobian on its pattern, from the seeds of its colours: what they multiply by zero is left out, so each entry
  costs what belongs to it and nothing else;
- the pullback $\nabla_y (\sum_j \langle a_j, J t_j \rangle + \langle q, g \rangle)$ of a step;
- the gradient of weighted squared lengths of rows, $\nabla_y \sum_i w_i \lVert J_i \rVert^2$.

Tensors of x with a row for each sample are inputs, everything else is a constant. A function may hold what changes
(weights that are learned), so the value that the program of the Jacobian has beside it is compared with the function's
at every use, and the Jacobian now and then with that of autograd (a backward pass of the user's own may leave torch);
once they differ, the programs are not used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from snarenet.constraints.program import Program, usable
from snarenet.constraints.recording import Array, Recorder, UnrecordableError
from snarenet.constraints.sparsity import Colouring

Pairs = Sequence[tuple[Tensor, Tensor]]


class Recordable(Protocol):
    """What is needed of a map."""

    x: Any
    rows: int

    def value(self, y: Tensor) -> Tensor:
        """g(y)."""
        ...

    def with_x(self, x: Any) -> Recordable:
        """The same function of another x."""
        ...


class Recorded:
    """The programs of one function, for one colouring; each is recorded when first needed.

    Args:
        function: the function.
        y: (B, n) whose first sample is recorded.
        colouring: that of its Jacobian.
    """

    def __init__(self, function: Recordable, y: Tensor, colouring: Colouring) -> None:
        self.colouring, self.shapes = colouring, _shapes(function, y)
        self._size = torch.zeros(function.rows, dtype=y.dtype)  # of each row: what its rounding is measured by
        self._programs: dict[Any, Program | None] = {}
        self._hindrance = ""  # why there is no program
        self._good = True

    def suits(self, function: Recordable, y: Tensor, colouring: Colouring) -> bool:
        """Are these the programs of such a call?"""
        return self.colouring is colouring and self.shapes == _shapes(function, y)

    def describe(self, function: Recordable, y: Tensor) -> str:
        """Is the Jacobian recorded, or what keeps it from that?"""
        if self.values(function, y) is not None:
            return "recorded"
        return f"not recorded: {self._hindrance}" if self._good else "no longer recorded: the function has changed"

    def values(self, function: Recordable, y: Tensor) -> Tensor | None:
        """(B, nnz) the entries of J(y), the batch as the fastest axis in memory; None without a program."""
        found = self._run(_jacobian, function, y)
        if found is None:
            return None
        values, value = found[: -function.rows].T, found[-function.rows :].T
        self._good = self._agree(value, function.value(y), values, y)
        return values if self._good else None

    def confirm(self, values: Tensor, true: Tensor) -> bool:
        """Are values of the program those of autograd? If not, a derivative does more than what was recorded."""
        size = true.abs().amax(1, keepdim=True)
        close = (values - true).abs() <= torch.finfo(true.dtype).eps ** 0.5 * size
        self._good = bool((close | ~true.isfinite()).all())
        return self._good

    def pullback(self, function: Recordable, y: Tensor, pairs: Pairs, weights: Tensor) -> Tensor | None:
        """The gradient in y (B, n) of sum_j <a_j, J(y) t_j> + <weights, g(y)>; None without a program."""
        given = (part for side in zip(*pairs, strict=True) for part in side)
        found = self._run(_pullback, function, y, *given, weights)
        return None if found is None else found.T

    def pull_norms(self, function: Recordable, y: Tensor, weights: Tensor, scale: Tensor | None) -> Tensor | None:
        """The gradient in y (B, n) of <weights, squared lengths of rows of J diag(scale)>; None without a program."""
        squares = torch.ones_like(y) if scale is None else scale.square().expand_as(y)
        found = self._run(_norms, function, y, weights, squares)
        return None if found is None else found.T

    def _run(self, what: Any, function: Recordable, y: Tensor, *given: Tensor) -> Tensor | None:
        """(outputs, B) of a program, or None for a function that has none."""
        if not self._good or not usable(y):
            return None
        key = what, len(given)
        if key not in self._programs:
            try:
                with torch.enable_grad():
                    self._programs[key] = what(Recorder(), function, y, self.colouring, len(given))
            except Exception as error:  # autograd may do what has no rule, and says itself what is wrong
                self._programs[key], self._hindrance = None, str(error)
        program = self._programs[key]
        return None if program is None else program(y, *_inputs(function.x), *given)

    def _agree(self, value: Tensor, true: Tensor, values: Tensor, y: Tensor) -> bool:
        """Is the recorded value that of the function, but for rounding?"""
        slack, apart = torch.finfo(y.dtype).eps ** 0.75, (value - true).abs()
        checked = true.isfinite()
        if bool((~checked | (apart <= slack * (self._size + true.abs()))).all()):
            return True
        size = self.colouring.pattern.times(values.abs(), y.abs())
        self._size = torch.maximum(self._size, torch.where(checked & size.isfinite(), size, 0.0).amax(0))
        return bool((~checked | (apart <= slack * (size + true.abs()))).all())


def _inputs(x: Any) -> list[Tensor]:
    """The tensors of x: those with a dimension have a row for each sample."""
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim]


def _shapes(function: Recordable, y: Tensor) -> tuple[Any, ...]:
    return y.shape[1:], *(leaf.shape[1:] for leaf in _inputs(function.x))


class _Sample:
    """The first sample of a function, several times, with its y and x as inputs.

    Attributes:
        y: (count, n), the same inputs in every row.
        value: g there, with its graph.
    """

    def __init__(self, recorder: Recorder, function: Recordable, y: Tensor, count: int) -> None:
        self.recorder, self.inputs = recorder, list[Array]()
        self.y = self.track(y, count).requires_grad_()
        tracked = tree_map(lambda leaf: self._tracked(leaf, count), function.x)
        with recorder:
            self.value = function.with_x(tracked).value(self.y)
        if not self.value.requires_grad:
            raise UnrecordableError("a value without a derivative")

    def _tracked(self, leaf: Any, count: int) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        if not leaf.is_floating_point():
            raise UnrecordableError("an x of whole numbers")
        return self.track(leaf, count)

    def track(self, tensor: Tensor, count: int) -> Tensor:
        """The first row of a tensor as a new input, in as many rows."""
        first = tensor[:1].detach().to(torch.float64)
        self.inputs.append(self.recorder.nodes.inputs(tuple(first.shape[1:])))
        return self.recorder.track(first.repeat(count, *[1] * (first.ndim - 1)), self.inputs[-1])

    def new(self, *shape: int) -> Tensor:
        """A new input of one dimension less, each row its own."""
        tensor = torch.ones(shape, dtype=torch.float64, device="cpu")
        nodes = [self.recorder.nodes.inputs(shape[1:]) for _ in range(shape[0])]
        self.inputs += nodes
        return self.recorder.track(tensor, np.stack(nodes))

    def program(self, *outputs: Tensor) -> Program:
        """The program of outputs."""
        found = np.concatenate([self.recorder.read(output).ravel() for output in outputs])
        return Program(self.recorder.nodes, self.inputs, found)


def _grad(output: Tensor | list[Tensor], source: Tensor, cotangent: Tensor | list[Tensor], create: bool) -> Tensor:
    (found,) = torch.autograd.grad(output, source, cotangent, create_graph=create, allow_unused=True)
    if found is None:
        raise UnrecordableError("a value that does not depend on y")
    return found


def _entries(sample: _Sample, colouring: Colouring, create: bool) -> Tensor:
    """(nnz,) the entries of J, by the seeds of its colours."""
    seeds, colour = colouring.seeds(sample.y)
    pattern, source, output = colouring.pattern, sample.y, sample.value
    if not colouring.by_rows:
        source = torch.zeros_like(sample.value).requires_grad_()
        output = _grad(sample.value, sample.y, source, create=True)
        if not output.requires_grad:
            raise UnrecordableError("a Jacobian without a graph")
    J = _grad(output, source, seeds, create)
    return J[colour, pattern.col if colouring.by_rows else pattern.row]


def _jacobian(recorder: Recorder, function: Recordable, y: Tensor, colouring: Colouring, given: int) -> Program:
    """(y, x) -> the entries of J, and g."""
    sample = _Sample(recorder, function, y, colouring.count)
    with recorder:
        entries = _entries(sample, colouring, create=False)
    return sample.program(entries, sample.value[0])


def _pullback(recorder: Recorder, function: Recordable, y: Tensor, colouring: Colouring, given: int) -> Program:
    """(y, x, a_1, ..., t_1, ..., q) -> the gradient of sum_j <a_j, J t_j> + <q, g>."""
    count = given // 2
    sample = _Sample(recorder, function, y, count)
    a, t, q = (sample.new(*shape) for shape in ((count, function.rows), (count, y.shape[1]), (1, function.rows)))
    with recorder:
        pulled = _grad(sample.value, sample.y, a, create=True)
        outputs, cotangents = [sample.value[:1]], [q]
        if pulled.requires_grad:
            outputs, cotangents = [*outputs, pulled], [*cotangents, t]
        found = _grad(outputs, sample.y, cotangents, create=False).sum(0)
    return sample.program(found)


def _norms(recorder: Recorder, function: Recordable, y: Tensor, colouring: Colouring, given: int) -> Program:
    """(y, x, w, v) -> the gradient of the squared lengths of rows, weighted by w, their columns by v."""
    sample = _Sample(recorder, function, y, colouring.count)
    w, v = sample.new(1, function.rows), sample.new(1, y.shape[1])
    with recorder:
        entries = _entries(sample, colouring, create=True)
        if not entries.requires_grad:
            raise UnrecordableError("a Jacobian that does not depend on y")
        total = (w[0, colouring.pattern.row] * v[0, colouring.pattern.col] * entries * entries).sum()
        found = _grad(total, sample.y, torch.ones_like(total), create=False).sum(0)
    return sample.program(found)
