"""Nonlinear equations and least-squares systems: Moré, Garbow and Hillstrom's, and others that solvers are tested on.

Moré, Garbow, Hillstrom: Testing Unconstrained Optimization Software, ACM TOMS 7 (1981), with the starts given there.
Where a least-squares problem has no zero residual, every row must be about as small as it is at the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, pi, sqrt
from typing import Any

from snarenet_lab.systems.base import System, angle, between, reaching

_MEYER = (
    34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872,
)  # fmt: skip
_KOWALIK = (
    (0.1957, 4), (0.1947, 2), (0.1735, 1), (0.16, 0.5), (0.0844, 0.25), (0.0627, 0.167), (0.0456, 0.125),
    (0.0342, 0.1), (0.0323, 0.0833), (0.0235, 0.0714), (0.0246, 0.0625),
)  # fmt: skip
_GAUSS = (0.0009, 0.0044, 0.0175, 0.054, 0.1295, 0.242, 0.3521, 0.3989)
_GAUSS = (*_GAUSS, *_GAUSS[-2::-1])


def _mgh(name: str, fn: Callable[..., Sequence[Any]], guess: Sequence[float], **more: Any) -> System:
    return System(name, "Moré-Garbow-Hillstrom", fn, guess, **more)


def _band(width: float) -> dict[str, float]:
    return {"lower": -width, "upper": width}


def _helical_valley(a: Any, b: Any, c: Any) -> list[Any]:
    return [10 * (c - 10 * angle(b, a) / (2 * pi)), 10 * ((a**2 + b**2).sqrt() - 1), c]


def _box_three(a: Any, b: Any, c: Any) -> list[Any]:
    t = [0.1 * i for i in range(1, 11)]
    return [(-s * a).exp() - (-s * b).exp() - c * (exp(-s) - exp(-10 * s)) for s in t]


def _powell_singular(*y: Any) -> list[Any]:
    rows = []
    for a, b, c, d in zip(*(y[k::4] for k in range(4)), strict=True):
        rows += [a + 10 * b, sqrt(5) * (c - d), (b - 2 * c) ** 2, sqrt(10) * (a - d) ** 2]
    return rows


def _wood(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
    return [
        10 * (b - a**2), 1 - a, sqrt(90) * (d - c**2), 1 - c, sqrt(10) * (b + d - 2), (b - d) / sqrt(10),
    ]  # fmt: skip


def _biggs(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> list[Any]:
    t = [0.1 * i for i in range(1, 14)]
    data = [exp(-s) - 5 * exp(-10 * s) + 3 * exp(-4 * s) for s in t]
    return [c * (-s * a).exp() - d * (-s * b).exp() + f * (-s * e).exp() - y for s, y in zip(t, data, strict=True)]


def _watson(*y: Any) -> list[Any]:
    rows = []
    for i in range(1, 30):
        t = i / 29
        slope = sum(j * t ** (j - 1) * v for j, v in enumerate(y) if j)
        rows.append(slope - sum(t**j * v for j, v in enumerate(y)) ** 2 - 1)
    return [*rows, y[0], y[1] - y[0] ** 2 - 1]


def _rosenbrock(*y: Any) -> list[Any]:
    return [row for a, b in zip(y[::2], y[1::2], strict=True) for row in (10 * (b - a**2), 1 - a)]


def _variably_dimensioned(*y: Any) -> list[Any]:
    total = sum(j * (v - 1) for j, v in enumerate(y, 1))
    return [*(v - 1 for v in y), total, total**2]


def _trigonometric(*y: Any) -> list[Any]:
    n, total = len(y), sum(v.cos() for v in y)
    return [n - total + i * (1 - v.cos()) - v.sin() for i, v in enumerate(y, 1)]


def _brown_almost_linear(*y: Any) -> list[Any]:
    n, product = len(y), y[0]
    for v in y[1:]:
        product = product * v
    return [*(v + sum(y) - (n + 1) for v in y[:-1]), product - 1]


def _discrete_boundary_value(*y: Any) -> list[Any]:
    h, padded = 1 / (len(y) + 1), between(0.0, y, 0.0)
    return [
        2 * padded[i] - padded[i - 1] - padded[i + 1] + h**2 * (padded[i] + i * h + 1) ** 3 / 2
        for i in range(1, len(y) + 1)
    ]


def _discrete_integral(*y: Any) -> list[Any]:
    n, h = len(y), 1 / (len(y) + 1)
    t = [h * j for j in range(1, n + 1)]
    cubes = [(v + s + 1) ** 3 for v, s in zip(y, t, strict=True)]
    return [
        y[i]
        + h / 2 * (1 - t[i]) * sum(t[j] * cubes[j] for j in range(i + 1))
        + h / 2 * t[i] * sum((1 - t[j]) * cubes[j] for j in range(i + 1, n))
        for i in range(n)
    ]


def _broyden_tridiagonal(*y: Any) -> list[Any]:
    padded = between(0.0, y, 0.0)
    return [(3 - 2 * v) * v - padded[i] - 2 * padded[i + 2] + 1 for i, v in enumerate(y)]


def _broyden_banded(*y: Any) -> list[Any]:
    return [
        v * (2 + 5 * v**2) + 1 - sum(w * (1 + w) for j, w in enumerate(y) if i - 5 <= j <= i + 1 and j != i)
        for i, v in enumerate(y)
    ]


def _chebyquad(*y: Any) -> list[Any]:
    """Mean of the shifted Chebyshev polynomials less their integrals."""
    x = [2 * v - 1 for v in y]
    before, now, rows = [1.0] * len(y), x, []
    for i in range(1, len(y) + 1):
        rows.append(sum(now) / len(y) + (1 / (i**2 - 1) if i % 2 == 0 else 0.0))
        before, now = now, [2 * v * b - a for v, a, b in zip(x, before, now, strict=True)]
    return rows


def _meyer(a: Any, b: Any, c: Any) -> list[Any]:
    return [a * (b / (45 + 5 * i + c)).exp() - y for i, y in enumerate(_MEYER, 1)]


MORE_GARBOW_HILLSTROM = [
    _mgh("Rosenbrock", _rosenbrock, (-1.2, 1), point=(1, 1)),
    _mgh(
        "Freudenstein and Roth",
        lambda a, b: [-13 + a + ((5 - b) * b - 2) * b, -29 + a + ((b + 1) * b - 14) * b],
        (0.5, -2),
        point=(5, 4),
    ),
    _mgh("Powell badly scaled", lambda a, b: [1e4 * a * b - 1, (-a).exp() + (-b).exp() - 1.0001], (0, 1)),
    _mgh("Brown badly scaled", lambda a, b: [a - 1e6, b - 2e-6, a * b - 2], (1, 1), point=(1e6, 2e-6)),
    _mgh(
        "Beale",
        lambda a, b: [1.5 - a * (1 - b), 2.25 - a * (1 - b**2), 2.625 - a * (1 - b**3)],
        (1, 1),
        point=(3, 0.5),
    ),
    _mgh(
        "Jennrich and Sampson",
        lambda a, b: [2 + 2 * i - (i * a).exp() - (i * b).exp() for i in range(1, 11)],
        (0.3, 0.4),
        **_band(8.0),
    ),
    _mgh("helical valley", _helical_valley, (-1, 0, 0), point=(1, 0, 0)),
    _mgh(
        "Gaussian",
        lambda a, b, c: [a * (-b * ((7 - i) / 2 - c) ** 2 / 2).exp() - y for i, y in enumerate(_GAUSS)],
        (0.4, 1, 0),
        **_band(6e-5),
    ),
    _mgh("Meyer", _meyer, (0.02, 4000, 250), **_band(6.0)),
    _mgh("Box three-dimensional", _box_three, (0, 10, 20), point=(1, 10, 1)),
    _mgh("Powell singular", _powell_singular, (3, -1, 0, 1), point=(0,) * 4),
    _mgh("Wood", _wood, (-3, -1, -3, -1), point=(1,) * 4),
    _mgh(
        "Kowalik and Osborne",
        lambda a, b, c, d: [y - a * (u**2 + u * b) / (u**2 + u * c + d) for y, u in _KOWALIK],
        (0.25, 0.39, 0.415, 0.39),
        **_band(0.012),
    ),
    _mgh("Biggs EXP6", _biggs, (1, 2, 1, 1, 1, 1), point=(1, 10, 1, 5, 4, 3)),
    _mgh("Watson, n = 6", _watson, (0,) * 6, **_band(0.03)),
    _mgh("extended Rosenbrock, n = 10", _rosenbrock, (-1.2, 1) * 5, point=(1,) * 10),
    _mgh("extended Powell singular, n = 8", _powell_singular, (3, -1, 0, 1) * 2, point=(0,) * 8),
    _mgh(
        "variably dimensioned, n = 10",
        _variably_dimensioned,
        tuple(1 - j / 10 for j in range(1, 11)),
        point=(1,) * 10,
    ),
    _mgh("trigonometric, n = 10", _trigonometric, (0.1,) * 10, point=(0,) * 10),
    _mgh("Brown almost linear, n = 10", _brown_almost_linear, (0.5,) * 10, point=(1,) * 10),
    _mgh(
        "discrete boundary value, n = 10",
        _discrete_boundary_value,
        tuple(j / 11 * (j / 11 - 1) for j in range(1, 11)),
    ),
    _mgh("discrete integral, n = 10", _discrete_integral, tuple(j / 11 * (j / 11 - 1) for j in range(1, 11))),
    _mgh("Broyden tridiagonal, n = 10", _broyden_tridiagonal, (-1,) * 10),
    _mgh("Broyden banded, n = 10", _broyden_banded, (-1,) * 10),
    _mgh("Chebyquad, n = 7", _chebyquad, tuple(j / 8 for j in range(1, 8))),
    _mgh("Chebyquad, n = 9", _chebyquad, tuple(j / 10 for j in range(1, 10))),
]


def _trigexp(*y: Any) -> list[Any]:
    rows = [3 * y[0] ** 3 + 2 * y[1] - 5 + (y[0] - y[1]).sin() * (y[0] + y[1]).sin()]
    for a, b, c in zip(y, y[1:], y[2:], strict=False):
        rows.append(-a * (a - b).exp() + b * (4 + 3 * b**2) + 2 * c + (b - c).sin() * (b + c).sin() - 8)
    return [*rows, -y[-2] * (y[-2] - y[-1]).exp() + 4 * y[-1] - 3]


def _chandrasekhar(c: float) -> Callable[..., list[Any]]:
    """H(t) (1 - c/2 ∫ t H(s) / (t + s) ds) = 1 by the midpoint rule; its Jacobian is singular at the root for c = 1."""

    def rows(*y: Any) -> list[Any]:
        n = len(y)
        t = [(j + 0.5) / n for j in range(n)]
        return [
            v * (1 - c / (2 * n) * sum(t[i] * w / (t[i] + t[j]) for j, w in enumerate(y))) - 1 for i, v in enumerate(y)
        ]

    return rows


def _economics(*y: Any) -> list[Any]:
    """Morgan's model: (y_k + sum_i y_i y_{i+k}) y_n for each k, and the sum of all y but the last."""
    n = len(y)
    rows = [(y[k] + sum(y[i] * y[i + k + 1] for i in range(n - k - 2))) * y[-1] for k in range(n - 1)]
    return [*rows, sum(y[:-1])]


SQUARE = [
    System(
        "Ferraris and Tronconi",
        "Floudas et al. 1999",
        lambda a, b: [
            0.5 * (a * b).sin() - 0.25 * b / pi - 0.5 * a,
            (1 - 0.25 / pi) * ((2 * a).exp() - exp(1)) + exp(1) * b / pi - 2 * exp(1) * a,
        ],
        (0.3, 2),
        box=((0.25, 1.5), (1, 2 * pi)),
        point=(0.5, pi),
    ),
    System(
        "Bullard and Biegler",
        "Floudas et al. 1999",
        lambda a, b: [1e4 * a * b - 1, (-a).exp() + (-b).exp() - 1.001],
        (1, 1),
        box=((5.45e-6, 2.196e-3), (4.553, 18.21)),
        point=(1.450672871204444e-05, 6.893352869897777),
    ),
    System(
        "Himmelblau",
        "Himmelblau 1972",
        lambda a, b: [a**2 + b - 11, a + b**2 - 7],
        (-0.27, -0.92),
        point=(3, 2),
    ),
    System(
        "Griewank and Osborne",
        "Griewank-Osborne 1983",
        lambda a, b: [29 / 16 * a**3 - 2 * a * b, b - a**2],
        (1, 1),
        point=(0, 0),
    ),
    System(
        "Powell's wall",
        "Powell 1970",
        lambda a, b: [a, 10 * a / (a + 0.1) + 2 * b**2],
        (3, 1),
        point=(0, 0),
    ),
    System(
        "Boggs",
        "Boggs 1971",
        lambda a, b: [a**2 - b + 1, a - (pi / 2 * b).cos()],
        (1, 0),
        point=(0, 1),
    ),
    System("trigexp, n = 10", "Toint 1986", _trigexp, (0,) * 10, point=(1,) * 10),
    System("Chandrasekhar, c = 0.9", "Kelley 1980", _chandrasekhar(0.9), (1,) * 10),
    System("Chandrasekhar, c = 0.999999", "Kelley 1980", _chandrasekhar(0.999999), (1,) * 10),
    reaching("economics, n = 6", "Morgan 1987", _economics, (0.5,) * 6, (-0.5, 0.3, -0.4, 0.2, -0.6, 2)),
    System(
        "neurophysiology",
        "Verschelde et al. 1994",
        lambda a, b, c, d, e, f: [
            a**2 + c**2 - 1,
            b**2 + d**2 - 1,
            e * c**3 + f * d**3 - 0.5,
            e * a**3 + f * b**3,
            e * a * c**2 + f * d**2 * b,
            e * a**2 * c + f * b**2 * d,
        ],
        (0.9, 0.7, 0.2, 0.4, 0.3, -0.4),
        point=(0, 0, 1, 1, 0.25, 0.25),
    ),
    System(
        "Kearfott's robot equations",
        "Kearfott 1987",
        lambda a, b, c, d, e, f, g, h: [
            0.004731 * a * c - 0.3578 * b * c - 0.1238 * a + g - 0.001637 * b - 0.9338 * d - 0.3571,
            0.2238 * a * c + 0.7623 * b * c + 0.2638 * a - g - 0.07745 * b - 0.6734 * d - 0.6022,
            f * h + 0.3578 * a + 0.004731 * b,
            -0.7623 * a + 0.2238 * b + 0.3461,
            a**2 + b**2 - 1,
            c**2 + d**2 - 1,
            e**2 + f**2 - 1,
            g**2 + h**2 - 1,
        ],
        (0.5,) * 8,
        box=(-1, 1),
    ),
    System(
        "roots of a quartic by Viète",
        "Wilkinson 1963",
        lambda a, b, c, d: [
            a + b + c + d - 10,
            a * b + a * c + a * d + b * c + b * d + c * d - 35,
            a * b * c + a * b * d + a * c * d + b * c * d - 50,
            a * b * c * d - 24,
        ],
        (0, 1, -1, 6),
        point=(1, 2, 3, 4),
    ),
]
