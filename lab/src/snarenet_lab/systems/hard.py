"""Small systems of ours, each with one thing that breaks simple methods, named in `source`.

Rows whose derivative is zero at the start; stationary points of symmetry; rows and variables of sizes from 1e-8 to 1e8;
Jacobians that are singular at the solution; functions that end at a bound; saturation.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, sqrt
from typing import Any

from snarenet_lab.systems.applications import hanging_chain, path, planar_arm
from snarenet_lab.systems.base import INF, System, reaching


def _diode_ladder(*y: Any) -> list[Any]:
    """Node voltages of a ladder of 1 kΩ and diodes under 5 V: currents in mA."""
    v = (5.0, *y)
    into = [v[i] - v[i + 1] for i in range(3)]
    out = [*into[1:], 0.0]
    return [a - b - 1e-9 * ((w / 0.02585).exp() - 1) for a, b, w in zip(into, out, y, strict=True)]


def _weak_acid(h: Any, oh: Any, ha: Any, a: Any) -> list[Any]:
    """Acetic acid, 0.1 mol in a litre of water: concentrations from 1e-11 to 1e-1, rows scaled to their sizes."""
    return [1e14 * h * oh - 1, 1e5 * h * a - 1.75 * ha, ha + a - 0.1, 1e3 * (h - oh - a)]


def _weak_acid_logs(*y: Any) -> list[Any]:
    """The same in decimal logarithms."""
    h, oh, ha, a = ((2.302585092994046 * v).exp() for v in y)
    return [y[0] + y[1] + 14, y[0] + y[3] - y[2] + 4.75696, 10 * (ha + a - 0.1), 1e3 * (h - oh - a)]


def _tanh_chain(*y: Any) -> list[Any]:
    """Each variable drives the next through tanh, which the start saturates."""
    return [b - 2 * (3 * a).tanh() for a, b in pairwise(y)] + [(y[0] / 5).tanh() + (y[-1] / 5).tanh()]


def _gibbs(*y: Any) -> list[Any]:
    """Entropy of a distribution, its sum and its mean."""
    return [-sum(v * v.log() for v in y), sum(y), sum(k * v for k, v in enumerate(y))]


def _robertson(a: Any, b: Any, c: Any) -> list[Any]:
    """Robertson's three reactions in a steady state with inflow: rates from 0.04 to 3e7."""
    return [-0.04 * a + 1e4 * b * c + 0.01, 0.04 * a - 1e4 * b * c - 3e7 * b**2, a + b + c - 1]


def _linkage(*y: Any) -> list[Any]:
    """The joint of two bars of length 1 between (0, 0) and (2, 0): where they lie in line, J is singular."""
    return [y[0] ** 2 + y[1] ** 2 - 1, (y[0] - 2) ** 2 + y[1] ** 2 - 1]


def _product(*y: Any) -> Any:
    """All multiplied."""
    total = y[0]
    for v in y[1:]:
        total = total * v
    return total


_ZERO, _SYMMETRY, _SCALE = "zero at the start", "symmetric stationary point", "scales"
_SINGULAR, _DOMAIN, _SATURATED = "singular solution", "domain", "saturation"

HARD = [
    System("product of two from 0", _ZERO, lambda a, b: [a * b - 1], (0, 0), point=(1, 1)),
    System("product of four from 0", _ZERO, lambda *y: [_product(*y) - 1], (0,) * 4, point=(1,) * 4),
    System("sphere from its centre", _ZERO, lambda *y: [sum(v**2 for v in y) - 4], (0,) * 5, point=(2, 0, 0, 0, 0)),
    System(
        "sphere and plane from 0",
        _ZERO,
        lambda a, b, c: [a**2 + b**2 + c**2 - 9, a + b + c],
        (0,) * 3,
        point=(3 / sqrt(2), -3 / sqrt(2), 0),
    ),
    System("cube root from 0", _ZERO, lambda a, b: [a**3 - 8, a * b - 2], (0, 0), point=(2, 1)),
    System("one row asleep", _ZERO, lambda a, b, c: [a - 1, a * b * c - 1, b - c**2], (0,) * 3, point=(1, 1, 1)),
    System("forms of degree six", _ZERO, lambda a, b: [a**6 + b**6 - 1, a**2 * b - 0.5], (0.01, 0.01)),
    System("hyperbola from its axis", _SYMMETRY, lambda a, b: [a**2 - b**2 - 1], (0, 1), point=(1, 0)),
    System(
        "ring from the centre of its hole", _SYMMETRY, lambda a, b: [(a - 1) ** 2 + b**2], (1, 0), 4, 9, point=(3.5, 0)
    ),
    System(
        "between two discs",
        _SYMMETRY,
        lambda a, b: [(a - 1) ** 2 + b**2, (a + 1) ** 2 + b**2],
        (0, 0),
        4,
        INF,
        point=(0, 2),
    ),
    System("double well", _SYMMETRY, lambda a, b: [(a**2 - 1) ** 2 + b**2], (0, 0.5), -INF, 0.01, point=(1, 0)),
    System(
        "saddle of a cubic", _SYMMETRY, lambda a, b: [a**3 - 3 * a * b**2 - 2, a * b], (0, 1), point=(2 ** (1 / 3), 0)
    ),
    System(
        "three points that coincide",
        _SYMMETRY,
        lambda a, b, c, d: [a**2 + b**2, c**2 + d**2, (a - c) ** 2 + (b - d) ** 2],
        (0,) * 4,
        1,
        4,
        point=(1, 0, 0, 1),
    ),
    reaching(
        "stretched arm, target on its line",
        _SYMMETRY,
        planar_arm,
        (0, 0, 0),
        (1.0471975511965976, -2.0943951023931953, 1.0471975511965976),
    ),
    System(
        "straight chain, too short",
        _SYMMETRY,
        hanging_chain(4, 3.0),
        (0.75, 1.5, 2.25, 0, 0, 0),
        1,
        1,
        point=(0.5, 1.5, 2.5, sqrt(0.75), sqrt(0.75), sqrt(0.75)),
    ),
    System(
        "path through the centre of a disc",
        _SYMMETRY,
        lambda *y: path(*(v + 0.2 * (k % 2) for k, v in enumerate(y))),
        tuple(v for k in range(1, 8) for v in (k, 0)),
        (*(-INF,) * 8, *(4.0,) * 7),
        (*(2.5,) * 8, *(INF,) * 7),
    ),
    System(
        "rows of 1e-8 and 1e8", _SCALE, lambda a, b: [1e-8 * a**2 - 1, 1e8 * (b**3 + b - 2)], (1, 0), point=(1e4, 1)
    ),
    System(
        "a row whose slope grows from 1e-8 to 1e8",
        _SCALE,
        lambda a, b: [(18 * a).exp() * 1e-8 - b, a + b - 1 - exp(18) * 1e-8],
        (0, 0),
        point=(1, exp(18) * 1e-8),
    ),
    System(
        "variables of 1e6 and 1e-6",
        _SCALE,
        lambda a, b: [a * b - 1, 1e-6 * a + 1e6 * b - 2.5],
        (1, 1),
        point=(2e6, 5e-7),
    ),
    System(
        "sizes from 1e-6 to 1e6",
        _SCALE,
        lambda *y: [
            *((10.0 ** (6 - 3 * k) * v) ** 2 + 10.0 ** (3 - 3 * k) * w - 2 for k, (v, w) in enumerate(pairwise(y))),
            1e-6 * y[4] * (1 + 1e6 * y[0]) - 2,
        ],
        (0,) * 5,
        point=(1e-6, 1e-3, 1, 1e3, 1e6),
    ),
    System("weak acid", _SCALE, _weak_acid, (1e-7, 1e-7, 0.1, 1e-7), box=(0, 1)),
    System("weak acid in logarithms", _SCALE, _weak_acid_logs, (-7, -7, -1, -7)),
    System("Robertson's reactions", _SCALE, _robertson, (1, 0, 0), box=(0, 1)),
    System("diode ladder", _SCALE, _diode_ladder, (0, 0, 0)),
    System(
        "Rosenbrock, 1e8 steep",
        _SCALE,
        lambda a, b: [1e4 * (b - a**2), 1 - a, 1e8 * (a - b) ** 2],
        (-1.2, 1),
        point=(1, 1),
    ),
    System("two bars in line", _SINGULAR, _linkage, (0.5, 0.5), point=(1, 0)),
    System(
        "discs that touch", _SINGULAR, lambda a, b: [a**2 + b**2, (a - 2) ** 2 + b**2], (3, 3), -INF, 1, point=(1, 0)
    ),
    System("parabolas that touch", _SINGULAR, lambda a, b: [b - a**2, b + a**4], (1, 1), point=(0, 0)),
    System("cusp", _SINGULAR, lambda a, b: [a**3 - b**2, a + b], (2, -1), (0, -INF), (0, 0), point=(0, 0)),
    System(
        "logarithms",
        _DOMAIN,
        lambda a, b: [a.log() + b.log(), a + b],
        (1, 1),
        (2, -INF),
        (INF, 6),
        box=(1e-6, INF),
        point=(3, 3),
        domain=True,
    ),
    System(
        "log beside its pole",
        _DOMAIN,
        lambda a, b: [a.log() + a - 1, (1 + b).log() - a],
        (1e-3, -0.999),
        box=((1e-9, -1 + 1e-9), INF),
        point=(1, exp(1) - 1),
        domain=True,
    ),
    System(
        "square roots",
        _DOMAIN,
        lambda a, b, c: [a.sqrt() + b.sqrt() + c.sqrt(), a + b + c, a * b],
        (4, 0.01, 0.01),
        (3, -INF, 0.5),
        (INF, 3.2, INF),
        box=(1e-8, INF),
        point=(1, 1, 1),
        domain=True,
    ),
    System(
        "entropy from a corner",
        _DOMAIN,
        _gibbs,
        (0.9999, *(1e-5,) * 5),
        (1.6, 1, 2),
        (INF, 1, 2),
        box=(1e-9, 1),
        domain=True,
    ),
    System(
        "powers and quotients",
        _DOMAIN,
        lambda a, b, c: [a**0.5 * b**-1.5, b / c + c**0.25, a * c],
        (0.1, 5, 0.1),
        (2, -INF, 1),
        (INF, 2, 20),
        box=(1e-6, 100),
        point=(4, 1, 1),
        domain=True,
    ),
    System("chain of tanh", _SATURATED, _tanh_chain, (6, -6, 6, -6, 6), point=(0,) * 5),
    System(
        "sum of saturated sigmoids",
        _SATURATED,
        lambda *y: [sum((4 * (v - k)).tanh() for k, v in enumerate(y)), sum(y)],
        (-4,) * 4,
        (2, -INF),
        (2, 12),
        point=(6, 6, 6, -6),
    ),
    System(
        "well of a Gaussian",
        _SATURATED,
        lambda a, b: [(-(a**2) - b**2).exp(), a - b],
        (3, 2),
        (0.5, -1),
        (INF, 1),
        point=(0, 0),
    ),
]
