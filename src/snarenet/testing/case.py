"""`Case`: a set, predictions that violate it, and the same set written out; and how results are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from snarenet.constraints import Constraints

Bound = float | Tensor | Callable[[Any], Any]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64 that are the same every time."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Case:
    """A set and its formula.

    Attributes:
        constraints: the set.
        y: (B, n) predictions that violate it, in float64.
        x: its inputs, in float64.
        formula: g(y, x), written out, of the same tensors as the set, by operations that autograd knows. Without it the
            set's own `value` is believed, and only its derivatives and repairs are checked.
        lower: l(x) once more: a number, a tensor that broadcasts to (B, rows), or a function of x. Without `lower` and
            `upper` the set's own bounds are believed; one of them alone means that there is no other bound.
        upper: u(x), likewise.
        tensors: tensors inside g or the bounds that need a gradient.
        hidden: tensors that g depends on through an earlier computation, which finite differences would not repeat.
        batched: do data that belong to a sample sit in the set itself, so that it only fits its own batch?
    """

    constraints: Constraints
    y: Tensor
    x: Any = None
    formula: Callable[[Tensor, Any], Tensor] | None = None
    lower: Bound | None = None
    upper: Bound | None = None
    tensors: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    batched: bool = False

    def __post_init__(self) -> None:
        self.y = self.constraints.check(self.y).detach()
        if self.y.dtype != torch.float64:
            raise TypeError(f"`y` must be in float64, so that derivatives can be compared, but got {self.y.dtype}")

    def value(self, y: Tensor, x: Any) -> Tensor:
        """g(y, x): (B, rows), by the formula if there is one."""
        return self.constraints.value(y, x) if self.formula is None else self.formula(y, x)

    def bounds(self, x: Any) -> tuple[Tensor, Tensor]:
        """(l(x), u(x)), each (B, rows), as they are written out."""
        if self.lower is None and self.upper is None:
            instance = self.constraints.at(self.y, x)
            return instance.lower, instance.upper
        rows = self.value(self.y, self.x).shape
        lower = -torch.inf if self.lower is None else self.lower
        upper = torch.inf if self.upper is None else self.upper
        return _at(lower, x, self.y).expand(rows), _at(upper, x, self.y).expand(rows)

    def differentiable(self) -> tuple[Tensor, Any, list[Tensor]]:
        """y and x as leaves that need gradients, and all such leaves."""
        y = self.y.clone().requires_grad_()
        x = on_tensors(lambda leaf: leaf.detach().clone().requires_grad_(leaf.is_floating_point()), self.x)
        inputs = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return y, x, [y, *inputs, *self.tensors, *self.hidden]

    def pick(self, index: list[int]) -> tuple[Tensor, Any]:
        """y and x of some of the samples."""
        return self.y[index], on_tensors(lambda leaf: leaf[index] if leaf.ndim else leaf, self.x)


def _at(bound: Bound, x: Any, like: Tensor) -> Tensor:
    value: Any = bound(x) if callable(bound) and not isinstance(bound, Tensor) else bound
    return value if isinstance(value, Tensor) else like.new_tensor(value)


def on_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with the function applied to its tensors."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The gradients of a fixed random combination of `output`, zero where it does not depend on a leaf."""
    weights = draw(*output.shape, seed=99)
    if not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad((weights * output).sum(), leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]


def assert_equal(actual: Tensor, expected: Tensor, tolerance: float = 1e-8, what: str = "") -> None:
    """Equal relative to the size of the expected tensor."""
    scale = max(1e-3, expected.abs().max().item() if expected.numel() else 0.0)
    message = (lambda found: f"{what}: {found}") if what else None
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale, msg=message)
