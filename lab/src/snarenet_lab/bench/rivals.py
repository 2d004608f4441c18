r"""Packages that repair with torch, called as they do best: enforce-nn, qpth, POUNCE, Moreau and RAYEN.

enforce-nn solves for y and multipliers w by Newton's method on the equalities and the smoothed Fischer-Burmeister rows
$\phi(w, s) = \sqrt{w^2 + s^2 + \epsilon} - w + s = 0$ with $s = g(y) - u$, which force $s \le 0$; it gets our Jacobian
and its own implicit gradient. qpth solves $\min_y \tfrac12 \|y\|^2 - \hat y^\top y$ subject to $A y \le u$, $C y = x$
by an interior-point method for the whole batch.

POUNCE (`pounce-solver`, a port of IPOPT in Rust) solves the same: as a batch of convex programs where all rows are
linear, else as one nonlinear program whose blocks are the samples. Moreau solves it as a batch of cone programs, behind
cvxpylayers. Both have implicit gradients. RAYEN takes sets that do not depend on x. It does not look for the nearest
point: from a fixed point inside it goes towards the prediction, as far as the set allows,
$y = y_0 + \alpha (\hat y - y_0)$ on $C y = x$, the largest $\alpha \le 1$, in closed form.
"""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stdout
from typing import Any

import numpy as np
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


def pounce(problem: Problem, tol: float, accuracy: float) -> Any:
    """POUNCE's projection; `accuracy` is what its residuals must fall below."""
    from pounce.torch import TorchProblem, solve_qp_batch

    *rows, upper, C = pieces(problem)
    n, m, p = problem.size, len(upper), len(C)
    if len(rows) == 1:
        eye = torch.eye(n, dtype=C.dtype)
        linear = {"P": eye, "G": rows[0], "h": upper, "A": C, "tol": accuracy, "check_psd": False}
        return lambda y, x: (solve_qp_batch(c=-y, b=x, **linear), None)
    H, G = rows

    def values(y: Tensor, given: Tensor) -> Tensor:
        return torch.cat([H @ y.square() + G @ y - upper, C @ y - given[n:]])

    program = TorchProblem(
        f=lambda y, given: 0.5 * (y - given[:n]).square().sum(),
        g=values,
        n=n,
        m=m + p,
        p_example=np.zeros(n + p),
        cl=np.concatenate([np.full(m, -1e20), np.zeros(p)]),
        cu=np.zeros(m + p),
        options={"tol": accuracy, "print_level": 0},
        hess_pattern=(np.arange(n), np.arange(n)),
    )
    return lambda y, x: (program.batched_solve(torch.cat([y, x], 1), y.detach()), None)


def moreau(problem: Problem, tol: float, setting: None) -> Any:
    """Moreau's projection; its own tolerances reach ours, and it takes the device of its inputs."""
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    *rows, upper, C = (tensor.cpu().numpy() for tensor in pieces(problem))
    y, target, x = cp.Variable(problem.size), cp.Parameter(problem.size), cp.Parameter(len(C))
    values = rows[-1] @ y + (rows[0] @ cp.square(y) if len(rows) == 2 else 0)
    program = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(y) - target @ y), [values <= upper, C @ y == x])
    layer = CvxpyLayer(program, [target, x], [y], solver="MOREAU")

    def run(y: Tensor, x: Tensor) -> tuple[Tensor, None]:
        with warnings.catch_warnings():  # that gradients of an active set jump: so do those of a projection
            warnings.simplefilter("ignore")
            return layer(y, x)[0], None

    return run


def rayen(problem: Problem, tol: float, setting: None) -> Any:
    """RAYEN's ray; the set is that of the first input, which all samples share, and is built at the first call."""
    layers: list[Any] = []

    def run(y: Tensor, x: Tensor) -> tuple[Tensor, None]:
        layer = layers[0] if layers else _ray(problem, x[:1])
        layers[:] = [layer]
        free = layer.getzFromy(y.unsqueeze(2)) - layer.z0
        return layer(free.squeeze(2)).squeeze(2), None

    return run


def _ray(problem: Problem, x: Tensor) -> Any:
    """RAYEN's layer for an input (1, p), from the point that is as far inside every row as can be."""
    import cvxpy as cp
    from rayen.constraint_module import ConstraintModule
    from rayen.constraints import ConvexConstraints, ConvexQuadraticConstraint, LinearConstraint

    *rows, upper, C = (tensor.cpu().numpy() for tensor in pieces(problem))
    right = x.detach().cpu().numpy()[0]
    y, depth = cp.Variable(problem.size), cp.Variable()
    values = rows[-1] @ y + (rows[0] @ cp.square(y) if len(rows) == 2 else 0)
    cp.Problem(cp.Maximize(depth), [values + depth <= upper, C @ y == right, depth <= 1]).solve(solver="CLARABEL")
    A, bound = (rows[0], upper[:, None]) if len(rows) == 1 else (None, None)
    curved = [] if len(rows) == 1 else list(zip(*rows, upper, strict=True))
    before = torch.get_default_dtype()
    torch.set_default_dtype(x.dtype)  # it makes its tensors without saying which
    try:
        convex = ConvexConstraints(
            LinearConstraint(A, bound, C, right[:, None]),
            [ConvexQuadraticConstraint(2 * np.diag(h), g[:, None], np.array([[-u]])) for h, g, u in curved],
            y0=np.asarray(y.value)[:, None],
            do_preprocessing_linear=False,  # which equalities there are is known
        )
        return ConstraintModule(convex, create_map=False).to(x.device)
    finally:
        torch.set_default_dtype(before)


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
