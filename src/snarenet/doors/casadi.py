"""CasADi's functions as a set: lower <= g(y, p) <= upper, with p as x.

g is expanded to scalar instructions, and these are translated to torch (`instructions.py`). CasADi says which rows are
affine in y: those become `Box` and `Linear`, the others `Nonlinear`, with the pattern of their Jacobian.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, reduce
from operator import and_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints, Linear, Nonlinear
from snarenet.doors import opti
from snarenet.doors.coefficients import Coefficient
from snarenet.doors.extras import need
from snarenet.doors.inequalities import bounded
from snarenet.doors.instructions import Program, names

_LEAST, _DENSE = 16, 0.25  # fewer variables, or a larger share of nonzeros, and a Jacobian is better dense
_STEPS = {
    "FLOOR",
    "CEIL",
    "SIGN",
    "COPYSIGN",
    "FMOD",
    "REMAINDER",
    "LT",
    "LE",
    "EQ",
    "NE",
    "NOT",
}  # slopes are constant


def constraints(g: Any, lower: Any, upper: Any, variables: Any = None, parameters: Any = None) -> Constraints:
    """The set of all y between the bounds; see `Constraints.from_casadi`."""
    ca = need("casadi")
    if isinstance(g, ca.Opti):
        variables, parameters = g.x, g.p
        g, lower, upper = opti.rows(ca, g)
    model = _Model(ca, g, variables, parameters)
    low, high = (_bound(ca, *side, model.rows) for side in (("lower", lower, -np.inf), ("upper", upper, np.inf)))
    equal, free = low == high, (low == -np.inf) & (high == np.inf)
    found: list[Constraints] = []
    for kind, make in (("fixed", _fixed), ("affine", _affine), ("curved", _curved)):
        for equality in (False, True):
            chosen = np.flatnonzero((model.kinds == kind) & (equal == equality) & ~free)
            if len(chosen):
                sides = torch.from_numpy(low[chosen]), torch.from_numpy(high[chosen])
                found += make(model, chosen.tolist(), *sides, equality)
    if not found:
        raise ValueError("`g` must have a row with a bound, but it has none: give `lower`, `upper` or both")
    return reduce(and_, found)


def function(f: Any, variables: Any = None, parameters: Any = None) -> nn.Module:
    """(y, x) -> (B, rows) in torch, from what `Constraints.from_casadi` takes as g: an objective, say."""
    ca = need("casadi")
    return _Model(ca, f, variables, parameters).program()


class _Model:
    """g(y, p) as expressions of SX, each of them one column."""

    def __init__(self, ca: Any, g: Any, variables: Any, parameters: Any) -> None:
        self.ca = ca
        function, count = _function(ca, g, variables, parameters)
        sizes = [function.numel_in(i) for i in range(function.n_in())]
        self.size, known = sum(sizes[:count]), sum(sizes[count:])
        self.y, self.p = ca.SX.sym("y", self.size), ca.SX.sym("p", known)
        pieces = ca.vertsplit(ca.vertcat(self.y, self.p), [0, *np.cumsum(sizes).tolist()])
        shaped = [ca.reshape(piece, *function.size_in(i)) for i, piece in enumerate(pieces)]
        self.g = ca.densify(ca.vec(function.expand().call(shaped)[0]))
        self.rows = self.g.numel()

    @cached_property
    def kinds(self) -> np.ndarray[Any, Any]:
        """(rows,) "fixed" for rows that are affine in y with constant coefficients, "affine", or "curved"."""
        curved = np.array(self.ca.which_depends(self.g, self.y, 2, True), dtype=bool)
        if self._has_steps(np.flatnonzero(~curved).tolist()):
            curved |= [self._has_steps([row]) for row in range(self.rows)]
        slopes = self.ca.jacobian(self.g, self.y)
        varies = np.zeros(self.rows, dtype=bool)
        if self.p.numel() and slopes.nnz():
            entries = np.array(self.ca.which_depends(slopes.nz[:], self.p, 1, True), dtype=bool)
            varies[np.array(slopes.sparsity().row())[entries]] = True
        return np.where(curved, "curved", np.where(varies, "affine", "fixed"))

    def _has_steps(self, rows: list[int]) -> bool:
        """Is there a function with steps in these rows? They have constant slopes, but are not affine."""
        return bool(_STEPS & set(names(self.ca, self.ca.Function("g", [self.y, self.p], [self.g[rows]]))))

    def program(self, rows: list[int] | None = None) -> Program:
        """Some rows in torch."""
        g = self.g if rows is None else self.g[rows]
        inputs = [self.y, self.p] if self.p.numel() else [self.y]
        return Program(self.ca, self.ca.Function("g", inputs, [g]))

    def offset(self, rows: list[int]) -> Tensor | Coefficient:
        """What affine rows are at y = 0."""
        g = self.g[rows]
        if not self.p.numel() or not self.ca.depends_on(g, self.p):
            return _numbers(self.ca.Function("b", [self.y, self.p], [g])(0, 0)).flatten()
        return Coefficient(self.program(rows), self.size, 0)

    def matrix(self, rows: list[int]) -> Tensor:
        """The constant coefficients of y in affine rows."""
        return _numbers(self.ca.evalf(self.ca.jacobian(self.g[rows], self.y)))

    def pattern(self, rows: list[int]) -> Tensor | None:
        """Where the Jacobian of some rows may be nonzero; None where it is small or dense."""
        pattern = self.ca.jacobian_sparsity(self.g[rows], self.y)
        if self.size < _LEAST or pattern.nnz() > _DENSE * pattern.numel():
            return None
        places = torch.tensor(pattern.get_triplet())
        return torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), pattern.shape, check_invariants=True)


def _function(ca: Any, g: Any, variables: Any, parameters: Any) -> tuple[Any, int]:
    """g as a function, and how many of its inputs are variables."""
    if isinstance(g, ca.Function):
        if g.n_in() not in (1, 2):
            raise ValueError(f"`g` must be a function of y, or of (y, p), but it has {g.n_in()} inputs")
        return g, 1
    if isinstance(g, Mapping):
        g, variables, parameters = g["g"], g["x"], g.get("p")
    if variables is None:
        raise ValueError("give `variables`, the symbols that are y, with an expression `g`")
    y, p = (_symbols(leaves) for leaves in (variables, parameters))
    function = ca.Function("g", [*y, *p], [g], {"allow_free": True})
    if function.has_free():
        raise ValueError(
            "`variables` and `parameters` must hold all symbols of `g`, but they lack "
            f"{', '.join(map(str, function.get_free()))}"
        )
    return function, len(y)


def _symbols(leaves: Any) -> list[Any]:
    return [] if leaves is None else list(leaves) if isinstance(leaves, list | tuple) else [leaves]


def _numbers(matrix: Any) -> Tensor:
    return torch.from_numpy(np.array(matrix.full() if hasattr(matrix, "full") else matrix, dtype=float))


def _bound(ca: Any, name: str, given: Any, missing: float, rows: int) -> np.ndarray[Any, Any]:
    """(rows,) a bound in numbers."""
    given = missing if given is None else given
    array = given.full() if isinstance(given, ca.DM) else np.asarray(given, dtype=float)
    if array.size not in (1, rows):
        raise ValueError(f"`{name}` must be a number or have {rows} entries, a row of `g` each, but got {array.shape}")
    return np.broadcast_to(array.ravel(order="F"), rows)


class _Shifted(nn.Module):
    """Bounds on A y from those on A y + b(x): bound - b, each with a sign, one after the other."""

    bounds: Tensor
    signs: Tensor

    def __init__(self, offset: Tensor | Coefficient, *bounds: tuple[Tensor, float]) -> None:
        super().__init__()
        self.offset = offset if isinstance(offset, nn.Module) else None
        self.register_buffer("bounds", torch.stack([bound for bound, _ in bounds]), persistent=False)
        self.register_buffer("signs", torch.tensor([[sign] for _, sign in bounds]).to(bounds[0][0]), persistent=False)

    def forward(self, x: Any) -> Tensor:
        assert self.offset is not None
        return self.of(self.offset(x))

    def of(self, b: Tensor) -> Tensor:
        """Those at the offsets b (B, rows)."""
        return (self.signs * (self.bounds - b.unsqueeze(1))).flatten(1)


def _shifted(offset: Tensor | Coefficient, *bounds: tuple[Tensor, float]) -> Tensor | _Shifted:
    shifted = _Shifted(offset, *bounds)
    return shifted.of(offset.unsqueeze(0))[0] if isinstance(offset, Tensor) else shifted


def _fixed(model: _Model, rows: list[int], lower: Tensor, upper: Tensor, equality: bool) -> list[Constraints]:
    """A y + b(x) with A constant."""
    A, offset = model.matrix(rows), model.offset(rows)
    if equality:
        return [Linear(A, equals=_shifted(offset, (upper, 1.0)))]
    return bounded(torch.cat([A, -A]), _shifted(offset, (upper, 1.0), (lower, -1.0)))


def _affine(model: _Model, rows: list[int], lower: Tensor, upper: Tensor, equality: bool) -> list[Constraints]:
    """A(x) y + b(x)."""
    A, offset = Coefficient(model.program(rows), model.size, 1), model.offset(rows)
    high = _shifted(offset, (upper, 1.0))
    found = Linear(A, equals=high) if equality else Linear(A, _shifted(offset, (lower, 1.0)), high)
    found.rows, found.size = len(rows), model.size
    return [found]


def _curved(model: _Model, rows: list[int], lower: Tensor, upper: Tensor, equality: bool) -> list[Constraints]:
    bounds: dict[str, Any] = {"equals": upper} if equality else {"lower": lower, "upper": upper}
    found = Nonlinear(model.program(rows), len(rows), **bounds, sparsity=model.pattern(rows))
    found.size = model.size
    return [found]
