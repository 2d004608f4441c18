"""Systems of engineering and science: trusses, robot arms, equilibria, grids, packings, _distances, boundary values.

The models are textbook's; where no data are given there, ours are small round numbers, and the right-hand side is often
that of a known state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from math import cos, pi, sin, sqrt
from typing import Any

from snarenet_lab.systems.base import INF, System, between, reaching

_GAS = 40**-0.5  # Meintjes and Morgan's constants hold it


def _three_bar_truss(a: Any, b: Any) -> list[Any]:
    whole = sqrt(2) * a**2 + 2 * a * b
    return [2 * (sqrt(2) * a + b) / whole, 2 * b / whole, 2 / (a + sqrt(2) * b)]


def _shallow_truss(u: Any, w: Any) -> list[Any]:
    """Forces at the tip of two bars over the span (-1, 1), 0.3 high, after it moved by u to the right and w down."""
    rows: list[Any] = [0.0, 0.0]
    for foot in (-1.0, 1.0):
        along, up = u - foot, 0.3 - w
        strain = sqrt(1.09) / (along**2 + up**2).sqrt() - 1
        rows = [rows[0] + 100 * strain * along, rows[1] + 100 * strain * up]
    return rows


def hanging_chain(links: int, span: float) -> Callable[..., list[Any]]:
    """Squared lengths of the links between (0, 0) and (span, 0); y are the inner joints, x first, then heights."""

    def rows(*y: Any) -> list[Any]:
        xs, zs = (0.0, *y[: links - 1], span), (0.0, *y[links - 1 :], 0.0)
        return [(xs[i + 1] - xs[i]) ** 2 + (zs[i + 1] - zs[i]) ** 2 for i in range(links)]

    return rows


def planar_arm(*angles: Any) -> list[Any]:
    """Where the tip of an arm of unit links ends."""
    total, x, z = 0.0, 0.0, 0.0
    for angle in angles:
        total = total + angle
        x, z = x + total.cos(), z + total.sin()
    return [x, z]


def _arm_between_discs(*angles: Any) -> list[Any]:
    """The tip of a planar arm, its direction, and squared distances of the joints to two discs."""
    total, x, z, clear = 0.0, 0.0, 0.0, []
    for angle in angles:
        total = total + angle
        x, z = x + total.cos(), z + total.sin()
        clear += [(x - a) ** 2 + (z - b) ** 2 for a, b in ((1.5, 1.5), (2.5, -0.5))]
    return [x, z, total, *clear]


def _spatial_arm(a: Any, b: Any, c: Any) -> list[Any]:
    reach = 0.4 * b.cos() + 0.4 * (b + c).cos()
    return [a.cos() * reach, a.sin() * reach, 0.3 + 0.4 * b.sin() + 0.4 * (b + c).sin()]


def _propane(a: Any, b: Any, c: Any, d: Any, e: Any) -> list[Any]:
    """Combustion of propane in air."""
    r, r5, r6, r7 = 10, 0.193, 0.002597 * _GAS, 0.003448 * _GAS
    r8, r9, r10 = 0.00001799 / 40, 0.0002155 * _GAS, 0.00003846 / 40
    return [
        a * b + a - 3 * e,
        2 * a * b + a + b * c**2 + r8 * b - r * e + 2 * r10 * b**2 + r7 * b * c + r9 * b * d,
        2 * b * c**2 + 2 * r5 * c**2 - 8 * e + r6 * c + r7 * b * c,
        r9 * b * d + 2 * d**2 - 4 * r * e,
        a * (b + 1) + r10 * b**2 + b * c**2 + r8 * b + r5 * c**2 + d**2 - 1 + r6 * c + r7 * b * c + r9 * b * d,
    ]


def _stirred_tanks(*y: Any) -> list[Any]:
    """An exothermic reaction in two tanks, one after the other: conversions and temperatures."""
    rows, before, warm = [], 0.0, 0.0
    for x, t in zip(y[::2], y[1::2], strict=True):
        rate = 0.08 * (1 - x) * (t / (1 + t / 20)).exp()
        rows += [x - before - rate, t - warm - 8 * rate + 0.3 * t]
        before, warm = x, t
    return rows


def _flash(v: Any, t: Any, *x: Any) -> list[Any]:
    """Half of a feed of three substances boils: share of vapour, temperature / 100 K, fractions in the liquid."""
    feed, boiling = (0.3, 0.4, 0.3), (3.5, 3.8, 4.2)
    ratios = [(10 * (1 - b / t)).exp() for b in boiling]
    balance = [f - s * (1 + v * (k - 1)) for f, s, k in zip(feed, x, ratios, strict=True)]
    return [*balance, sum(x) - 1, v - 0.5]


def _bratu(strength: float) -> Callable[..., list[Any]]:
    """u'' + strength exp(u) = 0 on (0, 1), u = 0 at both ends."""

    def rows(*y: Any) -> list[Any]:
        h, u = 1 / (len(y) + 1), between(0.0, y, 0.0)
        return [(u[i - 1] - 2 * u[i] + u[i + 1]) / h**2 + strength * u[i].exp() for i in range(1, len(u) - 1)]

    return rows


def _bratu_square(*y: Any) -> list[Any]:
    """The same in a square with 5 exp(u), y the k by k inner points."""
    k = round(len(y) ** 0.5)
    h = 1 / (k + 1)

    def at(i: int, j: int) -> Any:
        return y[k * i + j] if 0 <= i < k and 0 <= j < k else 0.0

    return [
        (at(i - 1, j) + at(i + 1, j) + at(i, j - 1) + at(i, j + 1) - 4 * at(i, j)) / h**2 + 5 * at(i, j).exp()
        for i in range(k)
        for j in range(k)
    ]


def _troesch(*y: Any) -> list[Any]:
    """u'' = 5 sinh(5 u), u(0) = 0, u(1) = 1."""
    h, u = 1 / (len(y) + 1), between(0.0, y, 1.0)
    return [
        (u[i - 1] - 2 * u[i] + u[i + 1]) / h**2 - 2.5 * ((5 * u[i]).exp() - (-5 * u[i]).exp())
        for i in range(1, len(u) - 1)
    ]


def _pendulum(*y: Any) -> list[Any]:
    """u'' = -sin u on (0, 8), u = 0.5 at both ends."""
    h, u = 8 / (len(y) + 1), between(0.5, y, 0.5)
    return [(u[i - 1] - 2 * u[i] + u[i + 1]) / h**2 + u[i].sin() for i in range(1, len(u) - 1)]


def _burgers(*y: Any) -> list[Any]:
    """0.1 u'' = u u' on (0, 1) from 1 to -1: a shock in the middle."""
    h, u = 1 / (len(y) + 1), between(1.0, y, -1.0)
    return [
        0.1 * (u[i - 1] - 2 * u[i] + u[i + 1]) / h**2 - u[i] * (u[i + 1] - u[i - 1]) / (2 * h)
        for i in range(1, len(u) - 1)
    ]


def _distances(pairs: Sequence[tuple[int, int]], dimension: int) -> Callable[..., list[Any]]:
    """Squared distances of pairs of points, whose coordinates stand point by point in y."""

    def rows(*y: Any) -> list[Any]:
        points = [y[dimension * k : dimension * (k + 1)] for k in range(len(y) // dimension)]
        return [sum((a - b) ** 2 for a, b in zip(points[i], points[j], strict=True)) for i, j in pairs]

    return rows


def _unit_vectors(*y: Any) -> list[Any]:
    """Squared lengths of vectors in space, then their inner products."""
    points = [y[k : k + 3] for k in range(0, len(y), 3)]
    product = [sum(a * b for a, b in zip(p, q, strict=True)) for p, q in combinations(points, 2)]
    return [*(sum(a**2 for a in p) for p in points), *product]


def _ranges(*y: Any) -> list[Any]:
    """Distances of four sensors to three anchors and, in a ring, to each other."""
    points = [y[k : k + 2] for k in range(0, len(y), 2)]
    pairs = [(p, anchor) for p in points for anchor in ((0, 0), (4, 0), (0, 4))]
    pairs += list(zip(points, [*points[1:], points[0]], strict=True))
    return [((p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2 + 1e-12).sqrt() for p, q in pairs]


_LINES = {(0, 1): (1.0, -5.0), (0, 2): (0.8, -4.0), (1, 2): (1.2, -6.0), (1, 3): (0.7, -3.5), (2, 3): (1.0, -4.5)}


def _power_flow(*y: Any) -> list[Any]:
    """Active and reactive power into four buses: angles of 1, 2, 3 and voltages of 2, 3 are unknown."""
    angles, volts = between(0.0, y[:3]), between(1.05, (1.02, *y[3:]))
    active, reactive = [0.0] * 4, [0.0] * 4
    for (a, b), (g, s) in _LINES.items():
        for i, j in ((a, b), (b, a)):
            turn = angles[i] - angles[j]
            # not both angles can be numbers: every line has an end other than bus 0
            active[i] += volts[i] * (volts[i] * g - volts[j] * (g * turn.cos() + s * turn.sin()))
            reactive[i] += volts[i] * (-volts[i] * s - volts[j] * (g * turn.sin() - s * turn.cos()))
    return [*active[1:], *reactive[2:]]


def _pipes(*y: Any) -> list[Any]:
    """Flows in five pipes of a network with four nodes and two loops (Hazen and Williams): supply and heads."""
    a, b, c, d, e = y
    loss = [k * q * (q**2 + 1e-8) ** 0.426 for k, q in zip((2.0, 3.0, 1.0, 4.0, 2.0), y, strict=True)]
    return [a + b - 1, a - c - d - 0.2, b + c - e - 0.3, loss[0] + loss[2] - loss[1], loss[3] - loss[2] - loss[4]]


def _satellites(*y: Any) -> list[Any]:
    """Pseudo-ranges to four satellites in metres: position and clock."""
    x, w, z, clock = y
    seen = (
        (15.6e6, 7.54e6, 20.14e6),
        (18.76e6, 2.75e6, 18.61e6),
        (17.61e6, 14.63e6, 13.48e6),
        (19.17e6, 0.61e6, 18.39e6),
    )
    return [((x - a) ** 2 + (w - b) ** 2 + (z - c) ** 2).sqrt() + clock for a, b, c in seen]


def _radiation(*y: Any) -> list[Any]:
    """Temperatures in kelvin of three plates in a row between 300 K and 1500 K: _radiation, and conduction outwards."""
    t, flux = (1500.0, *y, 300.0), []
    for i in range(1, 4):
        flux.append(5.67e-8 * (t[i - 1] ** 4 - 2 * t[i] ** 4 + t[i + 1] ** 4) - 5 * (t[i] - 300))
    return flux


def _exchange(*y: Any) -> list[Any]:
    """Excess demand of four goods in an exchange economy with three traders of fixed budget shares; prices add to 1."""
    shares = ((0.5, 0.2, 0.2, 0.1), (0.1, 0.6, 0.1, 0.2), (0.25, 0.25, 0.25, 0.25))
    owns = ((1, 0, 0, 3), (0, 2, 0, 1), (3, 0, 2, 0))
    wealth = [sum(p * o for p, o in zip(y, own, strict=True)) for own in owns]
    demand = [sum(s[k] * w for s, w in zip(shares, wealth, strict=True)) / y[k] for k in range(4)]
    return [*(demand[k] - sum(own[k] for own in owns) for k in range(3)), sum(y) - 1]


def _parking(*y: Any) -> list[Any]:
    """Where eight moves of a car end, speed and turn of each in y: place and direction."""
    x, z, direction = 0.0, 0.0, 0.0
    for speed, turn in zip(y[::2], y[1::2], strict=True):
        direction = direction + turn
        x, z = x + speed * direction.cos(), z + speed * direction.sin()
    return [x, z, direction]


def path(*y: Any) -> list[Any]:
    """Squared lengths of the legs from (0, 0) to (8, 0) by way of seven points, then their distances² to (4, 0.2)."""
    points = [(0.0, 0.0), *zip(y[::2], y[1::2], strict=True), (8.0, 0.0)]
    legs = [(p[0] - q[0]) ** 2 + (p[1] - q[1]) ** 2 for p, q in pairwise(points)]
    return [*legs, *((p[0] - 4) ** 2 + (p[1] - 0.2) ** 2 for p in points[1:-1])]


def _tanh_network(*y: Any) -> list[Any]:
    """Two layers of four with weights of a cosine table, saturated where y is large."""
    for layer in (1, 2):
        y = tuple(
            sum(3 * cos(layer + 4 * i + 7 * j) * v for j, v in enumerate(y)).tanh()  # pyright: ignore[reportAttributeAccessIssue]
            for i in range(4)
        )
    return list(y)


_PAIRS = list(combinations(range(6), 2))
_RING = [(i, (i + 1) % 6) for i in range(6)] + [(i, (i + 2) % 6) for i in range(6)]
_CHAIR = tuple(
    v for k in range(6) for v in (cos(pi * k / 3) * sqrt(8) / 3, sin(pi * k / 3) * sqrt(8) / 3, (-1) ** k / 6)
)
_FLAT = tuple(v for k in range(6) for v in (cos(pi * k / 3), sin(pi * k / 3), 0.05 * (k == 0)))
_SENSORS = (1, 1, 3, 1, 3, 2.5, 1, 3)

APPLICATIONS = [
    System(
        "three-bar truss",
        "Schmit 1960",
        _three_bar_truss,
        (0.1, 0.1),
        -INF,
        2.0,
        box=(0.01, 5),
        point=(1, 1),
        domain=True,
    ),
    reaching("shallow truss, pushed through", "von Mises 1923", _shallow_truss, (0, 0), (0, 0.75)),
    reaching(
        "hanging chain, six links",
        "catenary",
        hanging_chain(6, 4.0),
        (1, 1.5, 2, 2.5, 3, -0.1, -0.2, -0.3, -0.2, -0.1),
        tuple(
            (4 - sum(map(cos, a := (-1.2, -0.8, -0.3, 0.3, 0.8, 1.2)))) / 2 + sum(map(cos, a[:k])) for k in range(1, 6)
        )
        + tuple(sum(map(sin, (-1.2, -0.8, -0.3, 0.3, 0.8, 1.2)[:k])) for k in range(1, 6)),
    ),
    reaching("planar arm, stretched out", "inverse kinematics", planar_arm, (0, 0, 0), (0.3, 0.8, -0.5)),
    System(
        "arm of six links between discs",
        "inverse kinematics",
        _arm_between_discs,
        (0.1,) * 6,
        (3.0, 2.0, 0.0, *(0.25,) * 12),
        (3.0, 2.0, 0.0, *(INF,) * 12),
        box=(-2, 2),
    ),
    reaching("spatial arm", "inverse kinematics", _spatial_arm, (0, 0.1, 0.1), (2.0, 0.7, -1.4), box=(-pi, pi)),
    System("combustion of propane", "Meintjes-Morgan 1990", _propane, (1,) * 5, box=(0, 100)),
    System(
        "stirred tanks",
        "Aris 1965",
        _stirred_tanks,
        (0.5, 2.0, 0.5, 2.0),
        box=(0, (1, 20, 1, 20)),
        point=(0.81547275, 5.01829384, 0.96098687, 4.75569753),
    ),
    System(
        "flash of three substances",
        "Rachford-Rice 1952",
        _flash,
        (0.3, 4, 0.3, 0.3, 0.3),
        box=((0, 3, 0, 0, 0), (1, 6, 1, 1, 1)),
    ),
    System("Bratu, n = 15, 3 exp u", "Bratu 1914", _bratu(3.0), (0,) * 15),
    System(
        "Bratu, n = 15, upper branch",
        "Bratu 1914",
        _bratu(2.0),
        tuple(10 * x * (1 - x) for x in (j / 16 for j in range(1, 16))),
    ),
    System("Bratu in a square, n = 16", "Bratu 1914", _bratu_square, (0,) * 16),
    System("Troesch, n = 12", "Troesch 1976", _troesch, (0,) * 12),
    System("pendulum, n = 15", "boundary values", _pendulum, (0.5,) * 15),
    System("Burgers, n = 15", "boundary values", _burgers, tuple(1 - j / 8 for j in range(1, 16))),
    System(
        "five circles in a square",
        "packing",
        _distances(list(combinations(range(5), 2)), 2),
        (0.4, 0.4, 0.6, 0.4, 0.4, 0.6, 0.6, 0.6, 0.5, 0.52),
        0.16,
        INF,
        box=(0.2, 0.8),
        point=(0.2, 0.2, 0.8, 0.2, 0.2, 0.8, 0.8, 0.8, 0.5, 0.5),
    ),
    System(
        "eight circles in a square",
        "packing",
        _distances(list(combinations(range(8), 2)), 2),
        (0.3, 0.3, 0.5, 0.3, 0.7, 0.3, 0.35, 0.5, 0.65, 0.5, 0.3, 0.7, 0.5, 0.7, 0.7, 0.7),
        0.1056,
        INF,
        box=(0.1625, 0.8375),
    ),
    System(
        "six points, none nearer than 1 in a disc",
        "packing",
        lambda *y: [*_distances(_PAIRS, 2)(*y), *(a**2 + b**2 for a, b in zip(y[::2], y[1::2], strict=True))],
        tuple(0.1 * v for k in range(6) for v in (cos(k), sin(2 * k))),
        (*(0.999,) * 15, *(-INF,) * 6),
        (*(INF,) * 15, *(1.0,) * 6),
        point=tuple(v for k in range(6) for v in (cos(pi * k / 3), sin(pi * k / 3))),
    ),
    reaching("cyclohexane, nearly flat", "distance geometry", _distances(_RING, 3), _FLAT, _CHAIR),
    reaching("four sensors", "distance geometry", _ranges, (2, 2, 2.1, 2, 2, 2.1, 2.1, 2.1), _SENSORS),
    System(
        "six vectors at right angles",
        "Thomson 1904",
        _unit_vectors,
        tuple(round(sin(1.7 * k), 3) for k in range(1, 19)),
        (*(1.0,) * 6, *(-INF,) * 15),
        (*(1.0,) * 6, *(0.01,) * 15),
        point=(1, 0, 0, -1, 0, 0, 0, 1, 0, 0, -1, 0, 0, 0, 1, 0, 0, -1),
    ),
    reaching("power flow, four buses", "power flow", _power_flow, (0, 0, 0, 1, 1), (-0.05, -0.1, -0.2, 0.99, 0.96)),
    reaching("power flow, heavy load", "power flow", _power_flow, (0, 0, 0, 1, 1), (-0.3, -0.5, -0.9, 0.85, 0.75)),
    System("water pipes", "Cross 1936", _pipes, (0,) * 5),
    reaching("satellites", "Strang-Borre 1997", _satellites, (0, 0, 6.37e6, 0), (1.1e6, 1.5e6, 6.1e6, 12345.0)),
    System("radiation between plates", "heat transfer", _radiation, (300,) * 3, box=(0, 1500)),
    System("exchange economy", "Scarf 1973", _exchange, (0.25,) * 4, box=(1e-4, 1), domain=True),
    System(
        "parking a car",
        "Reeds-Shepp 1990",
        _parking,
        (0.1, 0) * 8,
        (0, 1, 0),
        (0, 1, 0),
        box=((-1, -0.6) * 8, (1, 0.6) * 8),
    ),
    System(
        "path round a disc",
        "motion planning",
        path,
        tuple(v for k in range(1, 8) for v in (k, 0)),
        (*(-INF,) * 8, *(4.0,) * 7),
        (*(2.0,) * 8, *(INF,) * 7),
    ),
    reaching("network of tanh, inverted", "saturation", _tanh_network, (0, 0, 0, 0), (0.1, -0.2, 0.15, -0.05)),
    reaching("network of tanh, saturated start", "saturation", _tanh_network, (2, -1, 2, 1), (0.1, -0.2, 0.15, -0.05)),
]
