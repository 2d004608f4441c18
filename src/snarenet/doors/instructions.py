"""CasADi's SX functions in torch: the list of scalar instructions, sorted so that many are done at once.

An instruction's *level* is one more than the highest of what it needs. All instructions of one level that do the same
are one operation on columns: the values so far are (B, k), its arguments are columns of it, and its results are added
to them. Sums, differences and products with numbers are joined to linear combinations first, however long: a sum of a
thousand terms is one operation, not a thousand levels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from snarenet.doors.layout import samples

ONE = 0  # the node of the number 1, of which every constant is a multiple; the nodes of the inputs follow
_LINEAR = {"ADD": (1.0, 1.0), "SUB": (1.0, -1.0), "NEG": (-1.0,), "TWICE": (2.0,), "ASSIGN": (1.0,)}


def _truth(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A comparison, whose result is 0 or 1."""
    return lambda a, *b: fn(a, *b).to(torch.promote_types(a.dtype, b[0].dtype) if b else a.dtype)


_SAME_NAME = (
    *("mul", "div", "pow", "exp", "expm1", "log", "log1p", "sqrt", "hypot", "erf", "erfinv"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("floor", "ceil", "fmod", "sign", "copysign"),
)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name.upper(): getattr(torch, name) for name in _SAME_NAME},
    **{name.upper(): _truth(getattr(torch, name)) for name in ("lt", "le", "eq", "ne")},
    "NOT": _truth(lambda a: a == 0),
    "AND": _truth(lambda a, b: (a != 0) & (b != 0)),
    "OR": _truth(lambda a, b: (a != 0) | (b != 0)),
    "IF_ELSE_ZERO": lambda a, b: torch.where(a != 0, b, 0.0),
    "CONSTPOW": torch.pow,
    "SQ": torch.square,
    "FABS": torch.abs,
    "INV": torch.reciprocal,
    "FMIN": torch.minimum,
    "FMAX": torch.maximum,
    "REMAINDER": lambda a, b: a - b * torch.round(a / b),
    "LIFT": lambda a, b: a,
    "PRINTME": lambda a, b: a,
}


class Instruction(NamedTuple):
    """What is done with nodes; a constant has a number."""

    name: str
    args: tuple[int, ...]
    number: float = 0.0


def names(ca: Any, function: Any) -> list[str]:
    """What each instruction does, by CasADi's name for it without OP_."""
    known = {getattr(ca, name): name.removeprefix("OP_") for name in dir(ca) if name.startswith("OP_")}
    return [known.get(function.instruction_id(k), "?") for k in range(function.n_instructions())]


def read(ca: Any, function: Any) -> tuple[int, list[Instruction], list[int]]:
    """How many nodes are inputs, with the number 1; the instructions, a node each; the nodes of the first output."""
    begins = [1]
    for i in range(function.n_in()):
        begins.append(begins[-1] + function.nnz_in(i))
    work: dict[int, int] = {}
    made: list[Instruction] = []
    outputs = [ONE] * function.nnz_out(0)
    for k, name in enumerate(names(ca, function)):
        source, target = function.instruction_input(k), function.instruction_output(k)
        if name == "INPUT":
            work[target[0]] = begins[source[0]] + source[1]
        elif name == "OUTPUT":
            if target[0] == 0:
                outputs[target[1]] = work[source[0]]
        else:
            if name != "CONST" and name not in _LINEAR and name not in FUNCTIONS:
                raise NotImplementedError(f"there is no translation to torch of CasADi's `OP_{name}`, in: {function}")
            number = function.instruction_constant(k) if name == "CONST" else 0.0
            made.append(Instruction(name, tuple(work[place] for place in source), number))
            work[target[0]] = begins[-1] + len(made) - 1
    return begins[-1], made, outputs


class Joined:
    """The instructions with their sums joined.

    Attributes:
        sums: node -> {node: factor} of linear combinations; a constant is a multiple of the number 1.
        functions: node -> its instruction, of all others.
    """

    def __init__(self, inputs: int, instructions: list[Instruction], outputs: list[int]) -> None:
        self.sums: dict[int, dict[int, float]] = {}
        self.functions: dict[int, Instruction] = {}
        self._uses = Counter(arg for instruction in instructions for arg in instruction.args) + Counter(outputs)
        for node, instruction in enumerate(instructions, inputs):
            terms = self._terms(instruction)
            if terms is None:
                self.functions[node] = instruction
            else:
                self.sums[node] = terms

    def number(self, node: int) -> float | None:
        """The value of a constant; None for any other node."""
        terms = self.sums.get(node)
        return terms[ONE] if terms is not None and list(terms) == [ONE] else None

    def _terms(self, instruction: Instruction) -> dict[int, float] | None:
        """The linear combination that an instruction is; None if it is none."""
        name, args, number = instruction
        if name == "CONST":
            return {ONE: number}
        if name in _LINEAR:
            return self._combined(list(zip(args, _LINEAR[name], strict=True)))
        numbers = [self.number(arg) for arg in args]
        if name == "MUL" and numbers[0] is not None:
            return self._combined([(args[1], numbers[0])])
        if name == "MUL" and numbers[1] is not None:
            return self._combined([(args[0], numbers[1])])
        if name == "DIV" and numbers[1]:
            return self._combined([(args[0], 1 / numbers[1])])
        return None

    def _combined(self, parts: list[tuple[int, float]]) -> dict[int, float]:
        """The sum of nodes times factors; a combination that nobody else uses is taken over."""
        taken = sorted((self._scaled(node, factor) for node, factor in parts), key=len, reverse=True)
        total = taken[0]
        for other in taken[1:]:
            for node, factor in other.items():
                total[node] = total.get(node, 0.0) + factor
        return total

    def _scaled(self, node: int, factor: float) -> dict[int, float]:
        terms = self.sums.get(node)
        if terms is None or (self._uses[node] > 1 and self.number(node) is None):
            return {node: factor}
        if factor == 1 and self._uses[node] == 1:
            return terms
        return {inner: factor * value for inner, value in terms.items()}

    def args(self, node: int) -> list[int]:
        """The nodes that must be computed before this one: of a function, all but numbers."""
        if node in self.sums:
            return list(self.sums[node])
        return [arg for arg in self.functions[node].args if self.number(arg) is None]


class Combinations(nn.Module):
    """Linear combinations of columns."""

    columns: Tensor
    factors: Tensor
    targets: Tensor

    def __init__(self, sums: list[dict[int, float]], place: dict[int, int]) -> None:
        super().__init__()
        self.count = len(sums)
        terms = [(place[node], factor, target) for target, terms in enumerate(sums) for node, factor in terms.items()]
        columns, factors, targets = zip(*terms, strict=True)
        self.register_buffer("columns", torch.tensor(columns), persistent=False)
        self.register_buffer("factors", torch.tensor(factors, dtype=torch.float64), persistent=False)
        self.register_buffer("targets", torch.tensor(targets), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        terms = values.index_select(1, self.columns) * self.factors
        return values.new_zeros(len(values), self.count).index_add(1, self.targets, terms)


class Same(nn.Module):
    """One function of many columns, or of columns and numbers.

    Args:
        fn: the function.
        operands: for every argument of it a list of columns, or of numbers.
    """

    def __init__(self, fn: Callable[..., Tensor], operands: list[list[int] | list[float]]) -> None:
        super().__init__()
        self.fn, self.count = fn, len(operands)
        for k, operand in enumerate(operands):
            kind = torch.float64 if isinstance(operand[0], float) else torch.int64
            self.register_buffer(f"operand{k}", torch.tensor(operand, dtype=kind), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        operands = [getattr(self, f"operand{k}") for k in range(self.count)]
        taken = [o if o.is_floating_point() else values.index_select(1, o) for o in operands]
        return self.fn(*taken).expand(len(values), -1)


class Program(nn.Module):
    """(y, x) -> (B, rows), the first output of an SX function of (y, p).

    Args:
        ca: CasADi.
        function: of y (n,) or of y and p (d,), whose first output is dense.
    """

    outputs: Tensor

    def __init__(self, ca: Any, function: Any) -> None:
        super().__init__()
        self.size = function.nnz_in(0)
        self.parameters_size = function.nnz_in(1) if function.n_in() > 1 else 0
        inputs, instructions, outputs = read(ca, function)
        self.rows = len(outputs)
        self.levels = nn.ModuleList()
        place = self._schedule(Joined(inputs, instructions, outputs), inputs, outputs)
        self.register_buffer(
            "outputs", torch.tensor([place[node] for node in outputs], dtype=torch.int64), persistent=False
        )

    def forward(self, y: Tensor, x: Any = None) -> Tensor:
        parts = [y]
        if self.parameters_size:
            if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != self.parameters_size:
                came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"`x`, the parameters, must have shape (B, {self.parameters_size}), but got {came}")
            parts.append(x)
        batch = samples(*parts)
        values = torch.cat([y.new_ones(batch, 1), *(part.expand(batch, -1) for part in parts)], 1)
        for level in self.levels:
            values = torch.cat([values, *(operation(values) for operation in level)], 1)  # pyright: ignore
        return values.index_select(1, self.outputs)

    def _schedule(self, joined: Joined, inputs: int, outputs: list[int]) -> dict[int, int]:
        """Sort what the outputs need into levels; the column of every node."""
        place = {node: node for node in range(inputs)}
        for groups in _levels(joined, inputs, outputs):
            operations = nn.ModuleList()
            for (name, *_), nodes in groups.items():
                operations.append(_operation(joined, name, nodes, place))
                place.update({node: len(place) + k for k, node in enumerate(nodes)})
            self.levels.append(operations)
        return place


def _levels(joined: Joined, inputs: int, outputs: list[int]) -> list[dict[tuple[Any, ...], list[int]]]:
    """The nodes that are needed, level by level, those together that do the same."""
    needed = set(outputs)
    for node in sorted([*joined.sums, *joined.functions], reverse=True):
        if node in needed:
            needed.update(joined.args(node))
    level = dict.fromkeys(range(inputs), 0)
    found: list[dict[tuple[Any, ...], list[int]]] = []
    for node in sorted(needed - set(level)):
        level[node] = 1 + max((level[arg] for arg in joined.args(node)), default=0)
        while len(found) < level[node]:
            found.append({})
        found[level[node] - 1].setdefault(_key(joined, node), []).append(node)
    return found


def _key(joined: Joined, node: int) -> tuple[Any, ...]:
    """What nodes have in common that are one operation: the function, and which arguments are numbers."""
    if node in joined.sums:
        return ("sum",)
    name, args, _ = joined.functions[node]
    numbers = [joined.number(arg) for arg in args]
    if name in ("POW", "CONSTPOW") and numbers[1] is not None:
        return ("power", numbers[1])
    return (name, *(number is None for number in numbers))


def _operation(joined: Joined, name: str, nodes: list[int], place: dict[int, int]) -> nn.Module:
    if name == "sum":
        return Combinations([joined.sums[node] for node in nodes], place)
    args = [joined.functions[node].args for node in nodes]
    if name == "power":  # with a number for an exponent: a column would have a derivative, log of what may be negative
        exponent = float(joined.number(args[0][1]) or 0.0)
        return Same(lambda t: torch.pow(t, exponent), [[place[base] for base, _ in args]])
    operands = [[_operand(joined, arg, place) for arg in column] for column in zip(*args, strict=True)]
    return Same(FUNCTIONS[name], operands)  # pyright: ignore[reportArgumentType]


def _operand(joined: Joined, arg: int, place: dict[int, int]) -> int | float:
    number = joined.number(arg)
    return place[arg] if number is None else float(number)
