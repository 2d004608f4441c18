r"""Two packages that repair with torch, called as they do best: enforce-nn and qpth.

enforce-nn solves for y and multipliers w by Newton's method on the equalities and the smoothed Fischer-Burmeister rows
$\phi(w, s) = \sqrt{w^2 + s^2 + \epsilon} - w + s = 0$ with $s = g(y) - u$, which force $s \le 0$; it gets our Jacobian
and its own implicit gradient. qpth solves $\min_y \tfrac12 \|y\|^2 - \hat y^\top y$ subject to $A y \le u$, $C y = x$
by an interior-point method for the whole batch.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Constraints, Linear, Quadratic
from snarenet.problems import Problem


def pieces(problem: Problem) -> tuple[Tensor, ...]:
    """(A, u, C) of NCLP, or (H, G, u, C) of QCQP with diagonal H."""
    parts = problem.constraints.parts
    if len(parts) != 2 or not isinstance(parts[0], Linear | Quadratic) or not isinstance(parts[1], Linear):
        raise ValueError(f"`problem` must be an NCLP or a QCQP, but got {problem.name or type(problem).__name__}")
    rows = (parts[0].A,) if isinstance(parts[0], Linear) else (parts[0].H, parts[0].G)
    found = [tensor for tensor in (*rows, parts[0].limit.upper, parts[1].A) if isinstance(tensor, Tensor)]
    return tuple(found)


def qpth(problem: Problem, tol: float, eps: float) -> Any:
    """qpth's projection onto linear constraints; `eps` is what its residuals must fall below."""
    from qpth.qp import QPFunction

    A, upper, C = pieces(problem)
    eye = torch.eye(problem.size, dtype=A.dtype, device=A.device)
    solve = QPFunction(eps=eps, verbose=-1, maxIter=50, check_Q_spd=False)
    return lambda y, x: (solve(eye, -y, A, upper, C, x), None)


def enforce(problem: Problem, tol: float, eps: float) -> Any:
    """enforce-nn's projection; `eps` smooths the Fischer-Burmeister rows."""
    *rows, upper, C = pieces(problem)
    H, G = rows if len(rows) == 2 else (None, rows[0])

    def value(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return y @ C.T - x, y @ G.T - upper if H is None else y.square() @ H.T + y @ G.T - upper

    def slopes(y: Tensor) -> tuple[Tensor, Tensor]:
        return C.expand(len(y), -1, -1), G if H is None else 2 * y.unsqueeze(1) * H + G

    return _newton(problem.size, len(upper), value, slopes, (tol, eps), C)


def enforce_any(constraints: Constraints, y: Tensor, x: Tensor, tol: float, eps: float) -> Any:
    """The same onto any set, for these predictions and inputs.

    Every finite side of a row that is no equality is one inequality, those of a box, too. All matrices are dense.
    """
    instance = constraints.at(y.detach(), x)
    lower, upper = instance.lower, instance.upper
    equal = (lower == upper).all(0)
    above, below = (~equal & side[0].isfinite() for side in (upper, lower))

    def value(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        g = instance.map.value(y)
        return (g - upper)[:, equal], torch.cat([(g - upper)[:, above], (lower - g)[:, below]], 1)

    def slopes(y: Tensor) -> tuple[Tensor, Tensor]:
        J = instance.map.jacobian(y.detach())
        return J[:, equal], torch.cat([J[:, above], -J[:, below]], 1)

    return _newton(y.shape[1], int(above.sum() + below.sum()), value, slopes, (tol, eps), y)


def _newton(n: int, m: int, value: Any, slopes: Any, accuracy: tuple[float, float], like: Tensor) -> Any:
    """enforce-nn on equalities and m inequalities: `value` (y, x) returns both, `slopes` (y) their derivatives."""
    from enforce.core.config import ENFORCEConfig
    from enforce.core.model import ENFORCE, _ProjectionIFT

    tol, eps = accuracy

    def residual(x: Tensor, z: Tensor) -> Tensor:
        equal, slack = value(z[:, :n], x)
        return torch.cat([equal, torch.sqrt(z[:, n:] ** 2 + slack**2 + eps) - z[:, n:] + slack], 1)

    def jacobian(x: Tensor, z: Tensor) -> Tensor:
        (_, slack), (outer, inner), multipliers = value(z[:, :n], x), slopes(z[:, :n]), z[:, n:]
        root = torch.sqrt(multipliers**2 + slack**2 + eps)
        bottom = torch.cat([inner * (slack / root + 1).unsqueeze(2), torch.diag_embed(multipliers / root - 1)], 2)
        return torch.cat([torch.cat([outer, outer.new_zeros(*outer.shape[:2], m)], 2), bottom], 1)

    class Projection(ENFORCE):
        """With our Jacobian; the package's own way to pass one counts rows by the size of x."""

        def compute_dc_dy(self, input: Tensor, output: Tensor) -> Tensor:
            self.dc_dy = jacobian(input, output)
            self.bs, self.nc = self.dc_dy.shape[:2]
            return self.dc_dy

    one, zero = torch.ones(1), torch.zeros(1)
    config = ENFORCEConfig(input_neurons=1, output_neurons=n + m, max_it=100)
    with torch.random.fork_rng():  # it sets the global seed
        layer = Projection((zero, one), (zero, one), residual, config, weighting_option=1)
    for name in ("mean_input", "std_input", "mean_output", "std_output"):  # it puts these on a GPU if there is one
        setattr(layer, name, getattr(layer, name).to(like))

    def run(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        z = torch.cat([y, y.new_zeros(len(y), m)], 1)
        with redirect_stdout(io.StringIO()):  # it says there that it gives up; the violation says so, too
            found = _ProjectionIFT.apply(z, layer, x, "max", tol, config.max_it)
        return found[:, :n], layer._ift_proj_iter

    return run
