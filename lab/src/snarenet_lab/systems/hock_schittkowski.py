"""The constraints of Hock and Schittkowski's problems, with their starts and without their objectives.

Hock, Schittkowski: Test Examples for Nonlinear Programming Codes (1981); numbers above 200 are from Schittkowski: More
Test Examples (1987). Left out are those with linear rows alone, and those whose start fulfils all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, sin, sqrt
from typing import Any

from snarenet_lab.systems.base import INF, Numbers, System

_SOURCE = "Hock-Schittkowski"


def _hs(
    number: int,
    fn: Callable[..., Sequence[Any]],
    guess: Sequence[float],
    lower: Numbers = 0.0,
    upper: Numbers = 0.0,
    **more: Any,
) -> System:
    return System(f"HS{number}", _SOURCE, fn, guess, lower, upper, **more)


def _hs74(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
    return [
        d - c,
        1000 * (-c - 0.25).sin() + 1000 * (-d - 0.25).sin() + 894.8 - a,
        1000 * (c - 0.25).sin() + 1000 * (c - d - 0.25).sin() + 894.8 - b,
        1000 * (d - 0.25).sin() + 1000 * (d - c - 0.25).sin() + 1294.8,
    ]


def _hs78(a: Any, b: Any, c: Any, d: Any, e: Any) -> list[Any]:
    return [a**2 + b**2 + c**2 + d**2 + e**2 - 10, b * c - 5 * d * e, a**3 + b**3 + 1]


def _hs83(a: Any, b: Any, c: Any, d: Any, e: Any) -> list[Any]:
    return [
        85.334407 + 0.0056858 * b * e + 0.0006262 * a * d - 0.0022053 * c * e,
        80.51249 + 0.0071317 * b * e + 0.0029955 * a * b + 0.0021813 * c**2,
        9.300961 + 0.0047026 * c * e + 0.0012547 * a * c + 0.0019085 * c * d,
    ]


def _hs95(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> list[Any]:
    return [
        17.1 * a + 38.2 * b + 204.2 * c + 212.3 * d + 623.4 * e + 1495.5 * f
        - 169 * a * c - 3580 * c * e - 3810 * d * e - 18500 * d * f - 24300 * e * f,
        17.9 * a + 36.8 * b + 113.9 * c + 169.7 * d + 337.8 * e + 1385.2 * f
        - 139 * a * c - 2450 * d * e - 16600 * d * f - 17200 * e * f,
        -273 * b - 70 * d - 819 * e + 26000 * d * e,
        159.9 * a - 311 * b + 587 * d + 391 * e + 2198 * f - 14000 * a * f,
    ]  # fmt: skip


def _hs104(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> list[Any]:
    return [
        1 - 0.0588 * e * g - 0.1 * a,
        1 - 0.0588 * f * h - 0.1 * a - 0.1 * b,
        1 - 4 * c / e - 2 * c**-0.71 / e - 0.0588 * c**-1.3 * g,
        1 - 4 * d / f - 2 * d**-0.71 / f - 0.0588 * d**-1.3 * h,
        0.4 * (a / g) ** 0.67 + 0.4 * (b / h) ** 0.67 + 10 - a - b,
    ]


def _hs106(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> list[Any]:
    return [
        1 - 0.0025 * (d + f),
        1 - 0.0025 * (e + g - d),
        1 - 0.01 * (h - e),
        a * f - 833.33252 * d - 100 * a + 83333.333,
        b * g - 1250 * e - b * d + 1250 * d,
        c * h - 1250000 - c * e + 2500 * e,
    ]


def _hs107(a: Any, b: Any, c: Any, d: Any, u: Any, v: Any, w: Any, s: Any, t: Any) -> list[Any]:
    p, q = 48.4 / 50.176 * sin(0.25), 48.4 / 50.176 * cos(0.25)
    sine, cosine = (lambda z: q * z.sin() - p * z.cos()), (lambda z: p * z.sin() + q * z.cos())
    return [
        0.4 - a + 2 * p * u**2 + u * v * sine(s) + u * w * sine(t),
        0.4 - b + 2 * p * v**2 + u * v * sine(-s) + v * w * sine(s - t),
        0.8 + 2 * p * w**2 + u * w * sine(-t) + v * w * sine(t - s),
        0.2 - c + 2 * q * u**2 - u * v * cosine(s) - u * w * cosine(t),
        0.2 - d + 2 * q * v**2 - u * v * cosine(-s) - v * w * cosine(s - t),
        -0.337 + 2 * q * w**2 - u * w * cosine(-t) - v * w * cosine(t - s),
    ]


def _hs108(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any) -> list[Any]:
    return [
        1 - c**2 - d**2,
        1 - i**2,
        1 - e**2 - f**2,
        1 - a**2 - (b - i) ** 2,
        1 - (a - e) ** 2 - (b - f) ** 2,
        1 - (a - g) ** 2 - (b - h) ** 2,
        1 - (c - e) ** 2 - (d - f) ** 2,
        1 - (c - g) ** 2 - (d - h) ** 2,
        1 - g**2 - (h - i) ** 2,
        a * d - b * c,
        c * i,
        -e * i,
        e * h - f * g,
    ]


def _hs109(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any) -> list[Any]:
    k, s, t = 50.176, sin(0.25), cos(0.25)
    charge = 2 * t - 0.7533e-3 * k
    return [
        d - c,
        a**2 + h**2,
        b**2 + i**2,
        e * f * (-c - 0.25).sin() + e * g * (-d - 0.25).sin() + 2 * s * e**2 - k * a + 400 * k,
        e * f * (c - 0.25).sin() + f * g * (c - d - 0.25).sin() + 2 * s * f**2 - k * b + 400 * k,
        e * g * (d - 0.25).sin() + f * g * (d - c - 0.25).sin() + 2 * s * g**2 + 881.779 * k,
        k * h + e * f * (-c - 0.25).cos() + e * g * (-d - 0.25).cos() - 200 * k - charge * e**2,
        k * i + e * f * (c - 0.25).cos() + f * g * (c - d - 0.25).cos() - 200 * k - charge * f**2,
        e * g * (d - 0.25).cos() + f * g * (d - c - 0.25).cos() - 22.938 * k - charge * g**2,
    ]


def _hs111(*y: Any) -> list[Any]:
    a, b, c, d, e, f, g, h, i, j = (v.exp() for v in y)
    return [a + 2 * b + 2 * c + f + j - 2, d + 2 * e + f + g - 1, c + g + h + 2 * i + j - 1]


def _hs114(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any) -> list[Any]:
    p, q = 0.99, 0.9
    g1, g2 = 35.82 - 0.222 * j - q * i, -133 + 3 * g - p * j
    g5 = 1.12 * a + 0.13167 * a * h - 0.00667 * a * h**2 - p * d
    g6 = 57.425 + 1.098 * h - 0.038 * h**2 + 0.325 * f - p * g
    return [
        g1, g2, -g1 + i * (1 / q - q), -g2 + (1 / p - p) * j, g5, g6, -g5 + (1 / p - p) * d, -g6 + (1 / p - p) * g,
        1.22 * d - a - e, 98000 * c / (d * i + 1000 * c) - f, (b + e) / a - h,
    ]  # fmt: skip


def _hs373(a: Any, b: Any, c: Any, *y: Any) -> list[Any]:
    times, counts = (-5, -3, -1, 1, 3, 5), (127, 151, 379, 421, 460, 426)
    return [a + b * (t * c).exp() + v - n for t, n, v in zip(times, counts, y, strict=True)]


_NOT_NEGATIVE = {"lower": 0.0, "upper": INF}  # c(y) >= 0, as most of these are written
_HS95_BOX = (0.0, (0.31, 0.046, 0.068, 0.042, 0.028, 0.0134))
_ROOT = (120 + sqrt(1656)) / 236  # of 118 a² - 120 a + 27, HS336 where a = b

HOCK_SCHITTKOWSKI = [
    _hs(6, lambda a, b: [10 * (b - a**2)], (-1.2, 1), point=(1, 1)),
    _hs(7, lambda a, b: [(1 + a**2) ** 2 + b**2 - 4], (2, 2), point=(0, sqrt(3))),
    _hs(8, lambda a, b: [a**2 + b**2 - 25, a * b - 9], (2, 1)),
    _hs(10, lambda a, b: [-3 * a**2 + 2 * a * b - b**2 + 1], (-10, 10), **_NOT_NEGATIVE, point=(0, 1)),
    _hs(11, lambda a, b: [b - a**2], (4.9, 0.1), **_NOT_NEGATIVE, point=(0, 0)),
    _hs(13, lambda a, b: [(1 - a) ** 3 - b], (-2, -2), **_NOT_NEGATIVE, box=(0, INF), point=(1, 0)),
    _hs(14, lambda a, b: [a - 2 * b + 1, -(a**2) / 4 - b**2 + 1], (2, 2), 0, (0, INF), point=(0, 0.5)),
    _hs(15, lambda a, b: [a * b - 1, a + b**2], (-2, 1), **_NOT_NEGATIVE, box=(-INF, (0.5, INF)), point=(0.5, 2)),
    _hs(
        16, lambda a, b: [a + b**2, a**2 + b], (-2, 1), **_NOT_NEGATIVE, box=((-0.5, -INF), (0.5, 1)), point=(0.5, 0.25)
    ),
    _hs(17, lambda a, b: [b**2 - a, a**2 - b], (-2, 1), **_NOT_NEGATIVE, box=((-0.5, -INF), (0.5, 1)), point=(0, 0)),
    _hs(18, lambda a, b: [a * b - 25, a**2 + b**2 - 25], (2, 2), **_NOT_NEGATIVE, box=((2, 0), 50), point=(5, 5)),
    _hs(
        19,
        lambda a, b: [(a - 5) ** 2 + (b - 5) ** 2 - 100, 82.81 - (b - 5) ** 2 - (a - 6) ** 2],
        (20.1, 5.84),
        **_NOT_NEGATIVE,
        box=((13, 0), 100),
    ),
    _hs(
        20,
        lambda a, b: [a + b**2, a**2 + b, a**2 + b**2 - 1],
        (-2, 1),
        **_NOT_NEGATIVE,
        box=((-0.5, -INF), (0.5, INF)),
        point=(0.5, sqrt(3) / 2),
    ),
    _hs(22, lambda a, b: [2 - a - b, b - a**2], (2, 2), **_NOT_NEGATIVE, point=(1, 1)),
    _hs(
        23,
        lambda a, b: [a + b - 1, a**2 + b**2 - 1, 9 * a**2 + b**2 - 9, a**2 - b, b**2 - a],
        (3, 1),
        **_NOT_NEGATIVE,
        box=(-50, 50),
        point=(1, 1),
    ),
    _hs(27, lambda a, b, c: [a + c**2 + 1 + 0 * b], (2, 2, 2), point=(-1, 1, 0)),
    _hs(39, lambda a, b, c, d: [b - a**3 - c**2, a**2 - b - d**2], (2, 2, 2, 2), point=(1, 1, 0, 0)),
    _hs(40, lambda a, b, c, d: [a**3 + b**2 - 1, a**2 * d - c, d**2 - b], (0.8,) * 4),
    _hs(42, lambda a, b, c, d: [a - 2 + 0 * b, c**2 + d**2 - 2], (1,) * 4, point=(2, 2, 1, 1)),
    _hs(
        59,
        lambda a, b: [a * b - 700, b - a**2 / 125, (b - 50) ** 2 - 5 * (a - 55)],
        (90, 10),
        **_NOT_NEGATIVE,
        box=(0, (75, 65)),
    ),
    _hs(
        60,
        lambda a, b, c: [a * (1 + b**2) + c**4 - 4 - 3 * sqrt(2)],
        (2, 2, 2),
        box=(-10, 10),
        point=(4 + 3 * sqrt(2), 0, 0),
    ),
    _hs(61, lambda a, b, c: [3 * a - 2 * b**2 - 7, 4 * a - c**2 - 11], (0, 0, 0), point=(3, 1, 1)),
    _hs(63, lambda a, b, c: [8 * a + 14 * b + 7 * c - 56, a**2 + b**2 + c**2 - 25], (2, 2, 2), box=(0, INF)),
    _hs(
        64,
        lambda a, b, c: [1 - 4 / a - 32 / b - 120 / c],
        (1, 1, 1),
        **_NOT_NEGATIVE,
        box=(1e-5, INF),
        point=(100, 100, 200),
        domain=True,
    ),
    _hs(
        65,
        lambda a, b, c: [48 - a**2 - b**2 - c**2],
        (-5, 5, 0),
        **_NOT_NEGATIVE,
        box=((-4.5, -4.5, -5), (4.5, 4.5, 5)),
        point=(0, 0, 0),
    ),
    _hs(
        68,
        lambda a, b, c, d: [
            c - (1 - (b / sqrt(2)).erf()) + 0 * a,
            d - 1 - (((sqrt(24) - b) / sqrt(2)).erf() - ((sqrt(24) + b) / sqrt(2)).erf()) / 2,
        ],
        (1,) * 4,
        box=((1e-4, 0, 0, 0), (100, 100, 2, 2)),
        point=(1, 0, 1, 1),
    ),
    _hs(
        71,
        lambda a, b, c, d: [a * b * c * d - 25, a**2 + b**2 + c**2 + d**2 - 40],
        (1, 5, 5, 1),
        0,
        (INF, 0),
        box=(1, 5),
        point=(sqrt(10),) * 4,
    ),
    _hs(
        72,
        lambda a, b, c, d: [
            0.0401 - 4 / a - 2.25 / b - 1 / c - 0.25 / d,
            0.010085 - 0.16 / a - 0.36 / b - 0.64 / c - 0.64 / d,
        ],
        (1,) * 4,
        **_NOT_NEGATIVE,
        box=(0.001, (4e5, 3e5, 2e5, 1e5)),
        point=(1e3,) * 4,
        domain=True,
    ),
    _hs(
        73,
        lambda a, b, c, d: [
            2.3 * a + 5.6 * b + 11.1 * c + 1.3 * d - 5,
            12 * a
            + 11.9 * b
            + 41.8 * c
            + 52.1 * d
            - 21
            - 1.645 * (0.28 * a**2 + 0.19 * b**2 + 20.5 * c**2 + 0.62 * d**2).sqrt(),
            a + b + c + d - 1,
        ],
        (1,) * 4,
        0,
        (INF, INF, 0),
        box=(0, INF),
        point=(0, 0, 1, 0),
    ),
    _hs(74, _hs74, (0,) * 4, (-0.55, 0, 0, 0), (0.55, 0, 0, 0), box=((0, 0, -0.55, -0.55), (1200, 1200, 0.55, 0.55))),
    _hs(
        77,
        lambda a, b, c, d, e: [a**2 * d + (d - e).sin() - 2 * sqrt(2), b + c**4 * d**2 - 8 - sqrt(2)],
        (2,) * 5,
    ),
    _hs(78, _hs78, (-2, 1.5, 2, -1, -1)),
    _hs(
        79,
        lambda a, b, c, d, e: [a + b**2 + c**3 - 2 - 3 * sqrt(2), b - c**2 + d + 2 - 2 * sqrt(2), a * e - 2],
        (2,) * 5,
    ),
    _hs(80, _hs78, (-2, 2, 2, -1, -1), box=((-2.3, -2.3, -3.2, -3.2, -3.2), (2.3, 2.3, 3.2, 3.2, 3.2))),
    _hs(83, _hs83, (78, 33, 27, 27, 27), (0, 90, 20), (92, 110, 25), box=((78, 33, 27, 27, 27), (102, 45, 45, 45, 45))),
    _hs(95, _hs95, (0,) * 6, (4.97, -1.88, -29.08, -78.02), INF, box=_HS95_BOX),
    _hs(96, _hs95, (0,) * 6, (4.97, -1.88, -69.08, -118.02), INF, box=_HS95_BOX),
    _hs(97, _hs95, (0,) * 6, (32.97, 25.12, -29.08, -78.02), INF, box=_HS95_BOX),
    _hs(98, _hs95, (0,) * 6, (32.97, 25.12, -124.08, -173.02), INF, box=_HS95_BOX),
    _hs(104, _hs104, (6, 3, 0.4, 0.2, 6, 6, 1, 0.5), (0, 0, 0, 0, 1), (*(INF,) * 4, 4.2), box=(0.1, 10), domain=True),
    _hs(
        106,
        _hs106,
        (5000, 5000, 5000, 200, 350, 150, 225, 425),
        **_NOT_NEGATIVE,
        box=((100, 1000, 1000, 10, 10, 10, 10, 10), (10000, 10000, 10000, 1000, 1000, 1000, 1000, 1000)),
    ),
    _hs(
        107,
        _hs107,
        (0.8, 0.8, 0.2, 0.2, 1.0454, 1.0454, 1.0454, 0, 0),
        box=((0, 0, -INF, -INF, *(0.90909,) * 3, -INF, -INF), (*(INF,) * 4, *(1.0909,) * 3, INF, INF)),
    ),
    _hs(108, _hs108, (1,) * 9, **_NOT_NEGATIVE, box=((*(-INF,) * 8, 0), INF), point=(0,) * 9),
    _hs(
        109,
        _hs109,
        (0,) * 9,
        (-0.55, -INF, -INF, *(0,) * 6),
        (0.55, 2.25e6, 2.25e6, *(0,) * 6),
        box=((0, 0, -0.55, -0.55, 196, 196, 196, -400, -400), (INF, INF, 0.55, 0.55, 252, 252, 252, 800, 800)),
    ),
    _hs(111, _hs111, (-2.3,) * 10, box=(-100, 100)),
    _hs(
        114,
        _hs114,
        (1745, 12000, 110, 3048, 1974, 89.2, 92.8, 8, 3.6, 145),
        0,
        (*(INF,) * 8, 0, 0, 0),
        box=((*(1e-5,) * 5, 85, 90, 3, 1.2, 145), (2000, 16000, 120, 5000, 2000, 93, 95, 12, 4, 162)),
    ),
    _hs(
        263,
        lambda a, b, c, d: [b - a**3, a**2 - b, b - a**3 - c**2, a**2 - b - d**2],
        (10,) * 4,
        0,
        (INF, INF, 0, 0),
        point=(0,) * 4,
    ),
    _hs(
        336,
        lambda a, b, c: [5 * a + 5 * b - 3 * c - 6, a**2 + b**2 + c**2 - 1],
        (0, 0, 0),
        point=(_ROOT, _ROOT, (10 * _ROOT - 6) / 3),
    ),
    _hs(338, lambda a, b, c: [a / 2 + b + c - 1, a**2 + 2 / 3 * b**2 + c**2 / 4 - 4], (0, 0, 0)),
    _hs(
        373, _hs373, (300, -100, -0.1997, -127, -151, 379, 421, 460, 426), point=(0, 0, 0, 127, 151, 379, 421, 460, 426)
    ),
]
