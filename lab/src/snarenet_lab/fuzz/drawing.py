"""`draw(seed, index)`: a random case of any kind, the same one every time.

Most sets have a point by construction, others contradict themselves; rows may be short or long by twelve orders of
magnitude, dependent, more than the variables, one-sided, free or equalities.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers import METHODS
from snarenet_lab.fuzz.case import Case, Datum, Part

_FORMULAS = (  # rows of a nonlinear set: entire, bounded, with a domain, with kinks and poles, flat in places
    "(y @ A.T).exp()",
    "(y @ A.T).sinh()",
    "(y @ A.T).sin()",
    "(y @ A.T).tanh()",
    "(y @ A.T) ** 3 + y @ A.T",
    "(y @ A.T) ** 4",
    "(y @ A.T) * y[:, :1]",
    "(y.square() @ A.T.abs()).sqrt()",
    "((y @ A.T).square() + 1).log()",
    "(y @ A.T).abs()",
    "(y @ A.T).log()",
    "1 / (y @ A.T)",
    "(y @ A.T).relu()",
)
_WITH_X = ("(y @ A.T).exp() + x[:, :1]", "(y @ A.T) * x[:, :1]", "(y @ A.T + x[:, :1]).sin()", "(y * x[:, :1]) @ A.T")
_MISTAKES: dict[str, dict[str, Any]] = {  # options that the library has to refuse, by what it has to name
    "tol": {"tol": -1.0},
    "max_steps": {"max_steps": 1.5},
    "relax": {"relax": -0.5},
    "rows": {"rows": "some"},
    "start": {"start": "far"},
    "weights": {"weights": torch.tensor([-1.0], dtype=torch.float64)},
    "dtype": {"dtype": torch.float16},
    "damping": {"damping": "small"},
    "solver": {"solver": "direct"},
}


@dataclass(frozen=True)
class _Shape:
    """What all parts of a case share."""

    batch: int
    n: int
    z: Tensor  # (B, n) points that the set holds, unless it contradicts itself
    x: Tensor | None
    columns: Tensor  # (n,) what a variable is multiplied with in linear rows
    profile: str  # plain, or which scales vary
    contradicts: bool


class _Draw(random.Random):
    """Random numbers, and tensors of them."""

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.getrandbits(62))
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def chance(self, share: float) -> bool:
        return self.random() < share

    def magnitudes(self, *shape: int, most: float = 12.0) -> Tensor:
        """10**u, u uniform in [-most, most]."""
        generator = torch.Generator().manual_seed(self.getrandbits(62))
        return 10 ** ((2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * most)


def draw(seed: int, index: int) -> Case:
    """Case number `index`."""
    d = _Draw(f"{seed}/{index}")
    shape = _shape(d)
    kinds = ("linear", "linear", "quadratic", "quadratic", "box", "nonlinear")
    if d.chance(0.2):  # a set of constant rows has an engine of its own
        kinds = ("linear",)
    parts = tuple(_part(d, d.choice(kinds), shape) for _ in range(d.choice((1, 1, 2, 2, 3))))
    case = Case(parts, _predictions(d, shape), shape.x)
    if d.chance(0.08):
        return _of_a_layer(d, case)
    options = _options(d, case)
    if d.chance(0.02):
        wrong = d.choice(sorted(_MISTAKES))
        return Case(parts, case.y, case.x, {**options, **_MISTAKES[wrong]}, wrong=wrong)
    return Case(parts, case.y, case.x, options)


def _shape(d: _Draw) -> _Shape:
    batch, n = d.choice((0, 1, 2, 3, 8, 32, 64, 128, 128)), d.choice((1, 2, 2, 3, 3, 4, 6, 9))
    profile = d.choice(("plain", "plain", "plain", "rows", "columns", "all", "level"))
    x = d.normal(batch, d.choice((1, 2))) if d.chance(0.5) else None
    if x is not None:
        x = x.to(d.choice((torch.float64, torch.float64, torch.float32, torch.bfloat16)))
        if batch and d.chance(0.04):
            x[d.randrange(batch), 0] = d.choice((torch.nan, torch.inf, -torch.inf, 1e30))
    most = {"columns": 6.0, "all": 3.0}.get(profile, 0.0)  # they are squared in curved rows
    columns = d.magnitudes(n, most=most)
    size = d.choice((0.0, 1.0, 1.0, 1.0, 30.0))
    z = size * d.normal(batch, n) / columns
    return _Shape(batch, n, z, x, columns, profile, d.chance(0.15))


def _predictions(d: _Draw, shape: _Shape) -> Tensor:
    far = d.choice((0.0, 1e-6, 0.1, 1.0, 1.0, 1.0, 1.0, 30.0, 1e6))
    y = shape.z + far * d.normal(shape.batch, shape.n) / shape.columns
    if d.chance(0.03):
        y = torch.zeros_like(y)
    y = y.to(d.choice((torch.float64,) * 6 + (torch.float32,) * 2 + (torch.bfloat16, torch.float16)))
    if shape.batch and d.chance(0.06):
        y[d.randrange(shape.batch), d.randrange(shape.n)] = d.choice((torch.nan, torch.inf, -torch.inf))
    return y


def _part(d: _Draw, kind: str, shape: _Shape) -> Part:
    """A set of the kind."""
    least = 0 if d.chance(0.1) else 1
    rows = shape.n if kind == "box" else d.choice((least, 1, 1, 2, 3, shape.n, shape.n + 1, 2 * shape.n))
    data: dict[str, Datum] = {}
    formula = ""
    if kind in ("linear", "nonlinear"):
        data["A"] = _matrix(d, rows, shape, kind)
    if kind == "nonlinear":
        formula = d.choice(_WITH_X if shape.x is not None and d.chance(0.5) else _FORMULAS)
        if shape.profile in ("rows", "all"):
            formula = f"{d.magnitudes(1).item()!r} * ({formula})"
    if kind == "quadratic":
        given = d.choice(("H", "G", "HG", "HG"))
        if "H" in given:
            data["H"] = _hessians(d, rows, shape)
        if "G" in given:
            data["G"] = _matrix(d, rows, shape, kind)
    bounds = _bounds(d, Part(kind, rows, data, formula), shape)
    return Part(kind, rows, {**data, **bounds}, formula)


def _row_scales(d: _Draw, rows: int, shape: _Shape) -> Tensor:
    if shape.profile in ("rows", "all"):
        return d.magnitudes(rows, most=12.0 if shape.profile == "rows" else 6.0)
    return d.magnitudes(1).expand(rows) if shape.profile == "level" else d.magnitudes(rows, most=0.5)


def _matrix(d: _Draw, rows: int, shape: _Shape, kind: str) -> Datum:
    """(rows, n), of full rank or not, with its scales."""
    A = d.normal(rows, shape.n)
    ill = d.choice(("", "", "", "rank", "twice", "zero", "unit"))
    if ill == "rank" and rows:
        rank = d.randrange(1, min(rows, shape.n) + 1)
        A = d.normal(rows, rank) @ d.normal(rank, shape.n)
    elif ill == "twice" and rows > 1:
        A[1:] = A[:1] * d.normal(rows - 1, 1)
    elif ill == "zero" and rows:
        A[d.randrange(rows)] = 0
    elif ill == "unit":
        A = A.sign()
    if kind == "nonlinear":
        return Datum(A * shape.columns, learned=d.chance(0.3))
    A = A * shape.columns * _row_scales(d, rows, shape).unsqueeze(1)
    return _datum(d, A, shape, sparse=kind == "linear")


def _hessians(d: _Draw, rows: int, shape: _Shape) -> Datum:
    """Diagonals (rows, n) or whole matrices (rows, n, n), convex or not."""
    scales, columns = _row_scales(d, rows, shape), shape.columns
    if d.chance(0.5):
        H = d.normal(rows, shape.n) * columns.square() * scales.unsqueeze(1)
        # per sample, (B, n, n) would be read as whole matrices
        return _datum(d, H.abs() if d.chance(0.5) else H, shape, per_sample=rows != shape.n)
    F = d.normal(rows, shape.n, shape.n)
    F = F @ F.mT if d.chance(0.5) else F
    return _datum(d, F * columns.unsqueeze(1) * columns * scales.reshape(-1, 1, 1), shape)


def _datum(d: _Draw, value: Tensor, shape: _Shape, per_sample: bool = True, sparse: bool = False) -> Datum:
    """The value for all samples, one for each near it, or a function of x with it at zero."""
    way, learned = d.choice(("shared", "shared", "shared", "sample", "function")), d.chance(0.2)
    if way == "sample" and per_sample:
        factors = 1 + 0.3 * d.normal(shape.batch, *value.shape)
        return Datum(value * factors, per_sample=True, learned=learned)
    if way == "function" and shape.x is not None:
        return Datum(value, slope=0.3 * value * d.normal(*value.shape), learned=learned)
    sparse = sparse and way == "shared" and d.chance(0.1)
    return Datum(value, learned=learned and not sparse, sparse=sparse)


def _bounds(d: _Draw, part: Part, shape: _Shape) -> dict[str, Datum]:
    """Bounds about the values at z, or anywhere: for all samples, for each, or functions of x."""
    g = part.value(shape.z, shape.x).nan_to_num(0.0, 1e300, -1e300)
    g = g if len(g) else g.new_zeros(1, part.rows)  # an empty batch has bounds as well
    size = g.abs().amax(0)
    width = torch.where(size > 0, size, 1.0) * d.choice((1e-9, 0.1, 1.0, 1.0))
    if shape.contradicts:
        g = g + 3 * width * d.normal(*g.shape)
    shared, learned, moves = d.chance(0.5), d.chance(0.4), shape.x is not None and d.chance(0.3)
    slope = 0.1 * width * d.normal(part.rows) if shared and moves else None

    def bound(values: Tensor) -> Datum:
        values = values if shared else values[: shape.batch]
        return Datum(values, slope, per_sample=not shared, learned=learned)

    if part.kind != "box" and d.chance(0.3):
        return {"equals": bound(g[0] if shared else g)}
    low, high = (g.amin(0), g.amax(0)) if shared else (g, g)
    if shape.contradicts and shared:
        low, high = high, high + width
    lower, upper = low - width * d.normal(part.rows).abs(), high + width * d.normal(part.rows).abs()
    free = [d.normal(part.rows) > d.choice((10.0, 10.0, 0.5)) for _ in range(2)]
    lower, upper = torch.where(free[0], -torch.inf, lower), torch.where(free[1], torch.inf, upper)
    sides = d.choice((("lower", "upper"), ("lower", "upper"), ("lower",), ("upper",)))
    found = {name: bound(value) for name, value in (("lower", lower), ("upper", upper)) if name in sides}
    if part.kind == "box":
        none = {"lower": torch.full_like(width, -torch.inf), "upper": torch.full_like(width, torch.inf)}
        found = {name: found.get(name, Datum(value)) for name, value in none.items()}
    return found


def _options(d: _Draw, case: Case) -> dict[str, Any]:
    """What is asked of a repair; half of the cases ask for little."""
    few = d.chance(0.5)

    def maybe(share: float) -> bool:
        return d.chance(share / 4 if few else share)

    found: dict[str, Any] = {}
    if maybe(0.7):
        found["damping"] = d.choice(_DAMPINGS)
    if maybe(0.5):
        found["rows"] = d.choice(("all", "active"))
    if maybe(0.6):
        found["tol"] = d.choice((1e-6, 1e-4, 1e-2, 1e-10, 1e-13, 0.0))
    if d.chance(0.7):  # paths that fail take all of them
        found["max_steps"] = d.choice((0, 1, 5, 20, 40, 40, 40, 200))
    if maybe(0.5):
        found["rescue"] = True
    if maybe(0.3):
        found["start"] = d.choice((None, sn.Nearest(1), sn.Nearest(10), sn.Nearest(40)))
        if d.chance(0.5):
            found["weights"] = d.magnitudes(case.y.shape[1], most=d.choice((1.0, 6.0)))
    if maybe(0.3):
        relax = d.normal(*d.choice(((), (case.rows,), (len(case.y), case.rows)))).abs()
        found["relax"] = relax if relax.ndim else relax.item()
    if maybe(0.1):
        found["solver"] = sn.ConjugateGradients(max_iterations=50)
    if maybe(0.3):
        found["store_factors"] = d.chance(0.5)
    if maybe(0.3):
        found["dtype"] = torch.float32
        if found.get("tol", 1e-8):
            found["tol"] = d.choice((1e-3, 1e-5))
    if "weights" not in found and maybe(0.5):
        found["weights"] = d.magnitudes(case.y.shape[1], most=d.choice((0.5, 2.0, 6.0)))
    return found


_DAMPINGS = (
    0.01,
    sn.Constant(0.0),
    sn.Constant(1e-6, relative=True),
    sn.Annealed(1e-3, 0.1),
    sn.Annealed(1.0, 0.5, 1e-8, relative=False),
    sn.Adaptive(),
    sn.Adaptive(),
    sn.Adaptive(relative=False),
)


def _of_a_layer(d: _Draw, case: Case) -> Case:
    """The same through one of the other methods."""
    others = ("optnet", "dc3", "hproj")  # these need extras, or predict less
    method = d.choice([name for name in METHODS if name not in others])
    return Case(case.parts, case.y, case.x, {"tol": 1e-6, "max_steps": 20, "on_failure": "ignore"}, method)
