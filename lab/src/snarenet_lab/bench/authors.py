r"""The paper's repair as its authors wrote it, to measure ours against:

$$ y \leftarrow y - (J^\top J + \lambda I)^{-1} J^\top r, \qquad r = \mathrm{relu}(g - u) - \mathrm{relu}(l - g), $$

with all rows in J, an LU of n by n for every sample and step, one stop for the whole batch, and autograd through the
unrolled loop. Their second stop, on a small step, is left out: it ends before the tolerance is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snarenet.constraints import Constraints, Linear, Quadratic


def repair_as_authors(
    constraints: Constraints, y: Tensor, x: Tensor, damping: float = 0.01, tol: float = 1e-8, max_steps: int = 200
) -> tuple[Tensor, int]:
    """The repaired y and the number of steps, for constant `Linear` and `Quadratic` sets and stacks of them."""
    parts = constraints.parts
    _, lower, upper, *_ = constraints.at(y.detach(), x)
    eye = torch.eye(y.shape[1], dtype=y.dtype, device=y.device)
    for k in range(max_steps):
        g = torch.cat([_value(part, y) for part in parts], 1)
        r = torch.relu(g - upper) - torch.relu(lower - g)
        if bool(r.abs().max() <= tol):
            return y, k
        J = torch.cat([_jacobian(part, y).expand(len(y), -1, -1) for part in parts], 1)
        y = y - torch.linalg.solve(J.mT @ J + damping * eye, J.mT @ r.unsqueeze(-1)).squeeze(-1)
    return y, max_steps


def _value(part: Constraints, y: Tensor) -> Tensor:
    """(B, m) the rows at y."""
    if isinstance(part, Linear):
        return y @ _matrix(part, "A", 2).T
    H = _matrix(part, "H", 2, 3)
    square = y.square() @ H.T if H.ndim == 2 else torch.einsum("bi,mij,bj->bm", y, H, y)
    return square + y @ _matrix(part, "G", 2).T


def _jacobian(part: Constraints, y: Tensor) -> Tensor:
    """(m, n) or (B, m, n) their derivatives, by hand."""
    if isinstance(part, Linear):
        return _matrix(part, "A", 2)
    H = _matrix(part, "H", 2, 3)
    square = 2 * y.unsqueeze(1) * H if H.ndim == 2 else torch.einsum("mij,bj->bmi", H + H.mT, y)
    return square + _matrix(part, "G", 2)


def _matrix(part: Constraints, name: str, *dims: int) -> Tensor:
    """A tensor of the part that all samples share."""
    tensor = getattr(part, name, None) if isinstance(part, Linear | Quadratic) else None
    if not isinstance(tensor, Tensor) or tensor.ndim not in dims:
        raise ValueError(f"`constraints` must be constant Linear or Quadratic sets, but got {type(part).__name__}")
    return tensor
