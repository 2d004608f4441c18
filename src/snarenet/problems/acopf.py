r"""AC-OPF: the cheapest generation that carries the loads, with all limits of the grid on.

y = (va, vm, pg, qg): angle and magnitude of the voltage at every bus, active and reactive power of every generator in
service; x = (pd, qd), the loads; all per unit. With $δ = va_f - va_t$ and the admittances $Y = G + jB$ of a branch
f → t,

$$ p_{ft} = G_{ff} v_f^2 + v_f v_t (G_{ft} \cos δ + B_{ft} \sin δ), \quad
   q_{ft} = -B_{ff} v_f^2 - v_f v_t (B_{ft} \cos δ - G_{ft} \sin δ), $$

and likewise at t with −δ. At every bus $\sum p_g - g_s v^2 - \sum p = p_d$ and $\sum q_g + b_s v^2 - \sum q = q_d$; at
both ends of every branch with a rating $p^2 + q^2 \le s^2$; the angle δ, the voltages and the generators have limits,
and the angle of the reference bus is 0. The objective is $\sum c_2 p_g^2 + c_1 p_g + c_0$, in $/h.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from snarenet.constraints import Box, Nonlinear
from snarenet.problems.arithmetic import Torch
from snarenet.problems.base import Problem, check_sizes
from snarenet.problems.matpower import Grid
from snarenet.repair import repair

_TORCH = Torch()


class Flows(nn.Module):
    """The rows of a grid, as a function of (y, x): balances, squared flows, angles; and its cost.

    Args:
        grid: the grid.
    """

    f: Tensor
    t: Tensor
    at: Tensor
    rated: Tensor
    angled: Tensor
    gs: Tensor
    bs: Tensor
    cost: Tensor

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.buses, self.generators = grid.buses, grid.generators
        numbers: dict[str, Any] = {"f": grid.ends[0], "t": grid.ends[1], "at": grid.at, "cost": grid.cost}
        numbers |= {"gs": grid.shunt.real, "bs": grid.shunt.imag}
        numbers["rated"] = np.flatnonzero(np.isfinite(grid.rating))
        numbers["angled"] = np.flatnonzero(np.isfinite(grid.angle).any(0))
        for ends, admittance in grid.admittances.items():
            numbers |= {f"g_{ends}": admittance.real, f"b_{ends}": admittance.imag}
        for name, array in numbers.items():
            self.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)))

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """(B, rows)."""
        return self.rows(y, x, _TORCH)

    def split(self, y: Any, m: Any) -> tuple[Any, ...]:
        """Angles and magnitudes of voltages, active and reactive powers."""
        ends = accumulate([0, self.buses, self.buses, self.generators, self.generators])
        return tuple(m.take(y, slice(a, b)) for a, b in pairwise(ends))

    def branches(self, y: Any, m: Any) -> tuple[Any, ...]:
        """Active and reactive power into every branch, first at its end f, then at t; and the angle between them."""
        va, vm, *_ = self.split(y, m)
        angle = m.take(va, self.f) - m.take(va, self.t)
        vf, vt = m.take(vm, self.f), m.take(vm, self.t)
        both, c, s = vf * vt, m.cos(angle), m.sin(angle)
        (gff, bff), (gft, bft), (gtf, btf), (gtt, btt) = (
            (m.const(getattr(self, f"g_{ends}")), m.const(getattr(self, f"b_{ends}")))
            for ends in ("ff", "ft", "tf", "tt")
        )
        p_f = gff * vf * vf + both * (gft * c + bft * s)
        q_f = -bff * vf * vf - both * (bft * c - gft * s)
        p_t = gtt * vt * vt + both * (gtf * c - btf * s)
        q_t = -btt * vt * vt - both * (btf * c + gtf * s)
        return p_f, q_f, p_t, q_t, angle

    def rows(self, y: Any, x: Any, m: Any) -> Any:
        """Balances (2 per bus), squared flows (2 per rated branch) and angles (1 per branch that has limits)."""
        _, vm, pg, qg = self.split(y, m)
        p_f, q_f, p_t, q_t, angle = self.branches(y, m)

        def at_buses(v: Any, index: Tensor) -> Any:
            return m.collect(v, index, self.buses)

        p = at_buses(pg, self.at) - m.const(self.gs) * vm * vm - at_buses(p_f, self.f) - at_buses(p_t, self.t)
        q = at_buses(qg, self.at) + m.const(self.bs) * vm * vm - at_buses(q_f, self.f) - at_buses(q_t, self.t)
        flows = [m.take(a * a + b * b, self.rated) for a, b in ((p_f, q_f), (p_t, q_t))]
        return m.join(m.join(p, q) - x, *flows, m.take(angle, self.angled))

    def price(self, y: Any, m: Any) -> Any:
        """The cost of generation in $/h, as a vector of one."""
        pg = self.split(y, m)[2]
        c2, c1, c0 = (m.const(part) for part in self.cost)
        return m.total((c2 * pg + c1) * pg + c0)


class ACOPF(Problem):
    """AC optimal power flow on a grid, for loads around the nominal ones.

    Args:
        case: a case of PGLib-OPF (14_ieee, 30_ieee, 57_ieee, 118_ieee, 300_ieee, 1354_pegase, ...), or the path of a
            file of MATPOWER's, which ends in `.m`.
        sampler: how loads are drawn: "uniform", a common factor U(0.9, 1.1) times one U(0.9, 1.1) for every bus, on
            active and reactive loads alike; "wide", U(0.6, 1.0) times U(0.85, 1.15); "dc3", active loads within 70 %
            of the nominal ones, correlated, with power factors U(0.8, 1).
        instances: how many loads.
        seed: of the loads.
    """

    starts = 1  # from a feasible flat start: further ones found nothing better
    always_feasible = False

    load: Tensor
    flat: Tensor

    def __init__(
        self, case: str = "118_ieee", sampler: str = "uniform", instances: int = 6000, seed: int = 2025
    ) -> None:
        super().__init__()
        check_sizes(instances=instances)
        check_sizes(0, seed=seed)
        if sampler not in SAMPLERS:
            raise ValueError(f"`sampler` must be one of {', '.join(SAMPLERS)}, but got {sampler!r}")
        grid = Grid.find(case)
        self.grid, self.sampler, self.size = grid, sampler, 2 * (grid.buses + grid.generators)
        lower, upper = (torch.from_numpy(side) for side in _row_bounds(grid))
        low, high = (torch.from_numpy(side) for side in _box(grid))
        self.flows = Flows(grid)
        self.constraints = Nonlinear(self.flows, len(lower), lower, upper) & Box(low, high)
        middle = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, 0.0)
        middle[grid.buses : 2 * grid.buses] = middle[grid.buses : 2 * grid.buses].clamp(0.98, 1.02)
        self.register_buffer("flat", middle)
        self.register_buffer("load", torch.from_numpy(grid.load))
        self.register_buffer("inputs", self.sample(instances, torch.Generator().manual_seed(seed)))
        self._typical: Tensor | None = None

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return self.flows.price(y, _TORCH).squeeze(1)

    def expressions(self, y: Any, x: Any, m: Any) -> tuple[Any, Any]:
        return self.flows.price(y, m), self.flows.rows(y, x, m)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        return SAMPLERS[self.sampler](self.load.to(generator.device), count, generator)

    @property
    def typical(self) -> Tensor:
        """(n,) the cheaper of two flat starts, repaired at the nominal loads."""
        if self._typical is None:
            starts = torch.stack([self.flat, self._carrying()]).double()
            x = self.load.double().expand(2, -1)
            with torch.no_grad():
                solution = repair(self.constraints, starts, x, rescue=True)
                cost = self.objective(solution.value, x)
                rank = torch.where(solution.converged, cost, cost.abs().max() * (1 + solution.violation))
            self._typical = solution.value[rank.argmin()]
        return self._typical.to(self.flat)

    def _carrying(self) -> Tensor:
        """The flat start with active powers that carry the loads, at the same share of every generator's range."""
        least, most = torch.from_numpy(self.grid.active).to(self.flat)
        share = (self.load[: self.grid.buses].sum() - least.sum()) / (most - least).sum()
        start, first = self.flat.clone(), 2 * self.grid.buses
        start[first : first + self.grid.generators] = least + share * (most - least)
        return start


def _row_bounds(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    limit = grid.rating[np.isfinite(grid.rating)] ** 2
    angle = grid.angle[:, np.isfinite(grid.angle).any(0)]
    balance, none = np.zeros(2 * grid.buses), np.full(2 * len(limit), -np.inf)
    return np.concatenate([balance, none, angle[0]]), np.concatenate([balance, limit, limit, angle[1]])


def _box(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    free = np.where(grid.reference, 0.0, np.inf)
    sides = zip((-free, free), grid.voltage, grid.active, grid.reactive, strict=True)
    low, high = (np.concatenate(side) for side in sides)
    return low, high


def _uniform(common: tuple[float, float], each: tuple[float, float]) -> Callable[..., Tensor]:
    """Loads times a common factor and one for every bus, both uniform."""

    def draw(load: Tensor, count: int, generator: torch.Generator) -> Tensor:
        buses = len(load) // 2
        share = torch.rand(count, 1 + buses, generator=generator, dtype=load.dtype, device=load.device)
        factor = common[0] + (common[1] - common[0]) * share[:, :1]
        return load * (factor * (each[0] + (each[1] - each[0]) * share[:, 1:])).repeat(1, 2)

    return draw


def _correlated(load: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Active loads within 70 % of the nominal ones, uniform, each with half its variance in common with all others."""
    active, reactive = load.chunk(2)
    options: Any = {"generator": generator, "dtype": load.dtype, "device": load.device}
    normal = torch.randn(count, 1, **options) + torch.randn(count, len(active), **options)
    share = torch.erf(normal / 2)  # of a normal of variance 2: uniform in (-1, 1)
    active = active * (1 + 0.7 * share)
    factor = 0.8 + 0.2 * torch.rand(count, len(reactive), **options)
    sign = torch.where(reactive < 0, -1.0, 1.0).to(load)
    return torch.cat([active, sign * active * (1 / factor.square() - 1).clamp(min=0).sqrt()], 1)


SAMPLERS: dict[str, Callable[..., Tensor]] = {
    "uniform": _uniform((0.9, 1.1), (0.9, 1.1)),
    "wide": _uniform((0.6, 1.0), (0.85, 1.15)),
    "dc3": _correlated,
}
