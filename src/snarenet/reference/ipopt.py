r"""`Ipopt`: the interior-point method IPOPT, on any program, with exact second derivatives.

Structured programs and families that are written for CasADi are differentiated by CasADi. Any other problem is
evaluated by its own functions: torch gives the gradient, the Jacobian on the pattern that `Nonlinear` detected, and the
Hessian of the Lagrangian $σ f + λ^\top g$, itself the Jacobian of a function of y, on a pattern detected likewise.
AC-OPF with 57 buses takes 0.5 s so, with CasADi 0.03 s, and with a limited-memory approximation of the Hessian 17 s.

IPOPT gives up where a derivative is no number, as that of a root or a power of zero, which is where it likes to start.
It is then asked once more, from a point beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from snarenet.reference.engines import Engine
from snarenet.reference.expressed import Expressed, model_of
from snarenet.reference.program import Array, Program, QuadraticRows, Structured, need
from snarenet.reference.reading import Autograd, Places

_BESIDE = 1e-3  # how far from a start without derivatives the next one is, in units of each variable's size, or 1


class Ipopt(Engine):
    """Set up once for all instances that differ in their inputs and bounds; finds local optima."""

    structured: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Any]] = {
        "tol": 1e-10,
        "bound_relax_factor": 0.0,  # else it widens the bounds by 1e-8, and is better than optimal
        "max_iter": 1000,
        "print_level": 0,
        "sb": "yes",
    }

    def __init__(self, program: Program) -> None:
        ca = need("casadi")
        self.program, self.kept = program, []  # CasADi does not keep what it calls
        settings: dict[str, Any] = {"print_time": False, "show_eval_warnings": False}
        settings |= {f"ipopt.{name}": v for name, v in self.options.items()}
        if isinstance(program, Structured):
            nlp = _structured(ca, program)
        elif isinstance(program, Expressed):
            nlp = model_of(program.family).nlp
        else:
            assert isinstance(program, Autograd)
            nlp, given, self.kept = _called(ca, program, lambda: self.program)
            settings |= given | {"no_nlp_grad": True}
        self.solver = ca.nlpsol("reference", "ipopt", nlp, settings)

    def turn_to(self, program: Program) -> bool:
        current = self.program
        if isinstance(current, Expressed) and isinstance(program, Expressed):
            same = current.family == program.family
        else:
            same = isinstance(current, Autograd) and isinstance(program, Autograd) and current.alike(program)
        self.program = program if same else current
        return self.program is program

    def __call__(self, start: Array, lower: Array, upper: Array) -> Array:
        program = self.program
        boxed, shape = program.boxed, (program.boxes, program.size)
        given = {"x0": start, "lbg": lower[~boxed], "ubg": upper[~boxed]}
        if program.boxes:
            given |= {"lbx": lower[boxed].reshape(shape).max(0), "ubx": upper[boxed].reshape(shape).min(0)}
            given["x0"] = np.clip(start, given["lbx"], given["ubx"])
        if isinstance(program, Expressed):
            given["p"] = program.x
        found = self.solver(**given)
        if self.solver.stats()["return_status"] == "Invalid_Number_Detected":
            noise = np.random.default_rng(0).standard_normal(len(start))
            given["x0"] = given["x0"] + _BESIDE * np.maximum(1, np.abs(given["x0"])) * noise
            found = self.solver(**given)
        self.multipliers = _multipliers(program, found, lower, upper)
        return found["x"].full().ravel()


def _multipliers(program: Program, found: Any, lower: Array, upper: Array) -> Array:
    """(m,) those of the solver, without such that an infinite bound cannot have; of several boxes the tightest's."""
    boxed, result = program.boxed, np.zeros(len(lower))
    result[~boxed] = found["lam_g"].full().ravel()
    if program.boxes:
        low, high = (side[boxed].reshape(program.boxes, program.size) for side in (lower, upper))
        shares, of_y, each = np.zeros_like(low), found["lam_x"].full().ravel(), np.arange(program.size)
        shares[np.where(of_y > 0, high.argmin(0), low.argmax(0)), each] = of_y
        result[boxed] = shares.ravel()
    return np.where((result > 0) & np.isinf(upper) | (result < 0) & np.isinf(lower), 0.0, result)


def _structured(ca: Any, program: Structured) -> dict[str, Any]:
    y = ca.MX.sym("y", program.size)
    f = ca.dot(0.5 * program.square, y * y) + ca.dot(program.slope, y) + ca.dot(program.sine, ca.sin(y))
    return {"x": y, "f": f, "g": ca.vertcat(*(_rows(ca, block, y) for block in program.blocks))}


def _rows(ca: Any, block: QuadraticRows, y: Any) -> Any:
    total = ca.mtimes(ca.DM(block.G), y)
    if block.F is not None:
        total += ca.vertcat(*(ca.sumsqr(ca.mtimes(ca.DM(F.T), y)) for F in block.F))
    if block.H is None:
        return total
    if block.H.ndim == 2:
        return total + ca.mtimes(ca.DM(block.H), y * y)
    return total + ca.vertcat(*(ca.bilin(ca.DM(H), y, y) for H in block.H))


def _called(ca: Any, first: Autograd, current: Callable[[], Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """What nlpsol is told of functions that only torch knows: f and g, options with derivatives, all that it calls."""
    n, m = first.size, int((~first.boxed).sum())
    rows, bends = first.places(), first.bends()
    y, p, weight, weights = (ca.Sparsity.dense(k, 1) for k in (n, 0, 1, m))
    one, slope = ca.Sparsity.dense(1, 1), ca.Sparsity.dense(n, 1)
    J, H = _sparsity(ca, rows, m, n), _sparsity(ca, bends, n, n)

    def values(y: Array) -> list[Any]:
        return [current().objective(y), current().rows(y)]

    def gradient(y: Array, _: Array) -> list[Any]:
        return [current().objective(y), current().gradient(y)]

    def jacobian(y: Array, _: Array) -> list[Any]:
        return [current().rows(y), ca.DM(J, current().entries(y, rows))]

    def hessian(y: Array, _: Array, weight: Array, weights: Array) -> list[Any]:
        return [ca.DM(H, current().bent(y, float(weight[0]), weights, bends))]

    value = _callback(ca, "values", [y], [one, weights], values)
    named = {
        "grad_f": _callback(ca, "grad_f", [y, p], [one, slope], gradient),
        "jac_g": _callback(ca, "jac_g", [y, p], [weights, J], jacobian),
        "hess_lag": _callback(ca, "hess_lag", [y, p, weight, weights], [H], hessian),
    }
    symbol = ca.MX.sym("y", n)
    f, g = value(symbol)
    return {"x": symbol, "f": f, "g": g}, dict(named), [value, *named.values()]


def _sparsity(ca: Any, places: Places, rows: int, columns: int) -> Any:
    return ca.Sparsity.triplet(rows, columns, places.row.tolist(), places.col.tolist())


def _callback(ca: Any, name: str, inputs: Sequence[Any], outputs: Sequence[Any], function: Callable[..., Any]) -> Any:
    """A function of CasADi's that calls one of Python's on arrays."""

    class Call(ca.Callback):
        def __init__(self) -> None:
            ca.Callback.__init__(self)
            self.construct(name, {})

        def get_n_in(self) -> int:
            return len(inputs)

        def get_n_out(self) -> int:
            return len(outputs)

        def get_sparsity_in(self, i: int) -> Any:
            return inputs[i]

        def get_sparsity_out(self, i: int) -> Any:
            return outputs[i]

        def eval(self, given: Sequence[Any]) -> list[Any]:
            return function(*(one.full().ravel() for one in given))

    return Call()
