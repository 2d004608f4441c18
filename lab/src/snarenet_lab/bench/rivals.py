r"""Two packages that repair with torch, called as they do best: enforce-nn and qpth.

enforce-nn solves for y and multipliers w by Newton's method on the equalities and the smoothed Fischer-Burmeister rows
$\phi(w, s) = \sqrt{w^2 + s^2 + \epsilon} - w + s = 0$ with $s = g(y) - u$, which force $s \le 0$; it gets our Jacobian
and its own implicit gradient. qpth solves $\min_y \tfrac12 \|y\|^2 - \hat y^\top y$ subject to $A y \le u$, $C y = x$
by an interior-point method for the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snarenet.constraints import Linear, Quadratic
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
    from enforce.core.config import ENFORCEConfig
    from enforce.core.model import ENFORCE, _ProjectionIFT

    *rows, upper, C = pieces(problem)
    n, m = problem.size, len(upper)
    H, G = rows if len(rows) == 2 else (None, rows[0])

    def parts(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, multipliers = z[:, :n], z[:, n:]
        slack = y @ G.T - upper if H is None else y.square() @ H.T + y @ G.T - upper
        return slack, multipliers, torch.sqrt(multipliers**2 + slack**2 + eps)

    def residual(x: Tensor, z: Tensor) -> Tensor:
        slack, multipliers, root = parts(z)
        return torch.cat([z[:, :n] @ C.T - x, root - multipliers + slack], 1)

    def jacobian(z: Tensor) -> Tensor:
        slack, multipliers, root = parts(z)
        inner = G if H is None else 2 * z[:, None, :n] * H + G
        bottom = torch.cat([inner * (slack / root + 1).unsqueeze(2), torch.diag_embed(multipliers / root - 1)], 2)
        return torch.cat([torch.cat([C, C.new_zeros(len(C), m)], 1).expand(len(z), -1, -1), bottom], 1)

    class Projection(ENFORCE):
        """With our Jacobian; the package's own way to pass one counts rows by the size of x."""

        def compute_dc_dy(self, input: Tensor, output: Tensor) -> Tensor:
            self.dc_dy = jacobian(output)
            self.bs, self.nc = self.dc_dy.shape[:2]
            return self.dc_dy

    one, zero = torch.ones(1), torch.zeros(1)
    config = ENFORCEConfig(input_neurons=1, output_neurons=n + m, max_it=100)
    with torch.random.fork_rng():  # it sets the global seed
        layer = Projection((zero, one), (zero, one), residual, config, weighting_option=1)
    for name in ("mean_input", "std_input", "mean_output", "std_output"):  # it puts these on a GPU if there is one
        setattr(layer, name, getattr(layer, name).to(C))

    def run(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        z = torch.cat([y, y.new_zeros(len(y), m)], 1)
        found = _ProjectionIFT.apply(z, layer, x, "max", tol, config.max_it)
        return found[:, :n], layer._ift_proj_iter

    return run
