"""The matrix-free route on a problem too large for Jacobians: n = 5,000 variables, m = 2,000 nonlinear rows.

    python benchmarks/matrix_free.py [--size 5000 --rows 2000 --batch 4]

Rows are -0.5 <= W y + 0.5 sin(V y) + 0.1 (W y)^2 <= 0.5 with dense W and V, from predictions 2 N(0, I).
Conjugate gradients need products with the Jacobian only, two for each of their iterations.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import hardware, peak_growth_mib, show
from torch import Tensor

import snarenet as sn


def build(size: int, rows: int) -> sn.Constraints:
    generator = torch.Generator().manual_seed(0)
    W, V = (torch.randn(rows, size, generator=generator, dtype=torch.float64) / size**0.5 for _ in range(2))

    def g(y: Tensor, x: None) -> Tensor:
        z = y @ W.T
        return z + 0.5 * torch.sin(y @ V.T) + 0.1 * z**2

    return sn.Nonlinear(g, rows=rows, lower=-0.5, upper=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=5000)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    n, m, batch = options.size, options.rows, options.batch
    constraints = build(n, m)
    y = 2 * torch.randn(batch, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.requires_grad_()
    solutions, seconds = [], []

    def run() -> None:
        begin = time.perf_counter()
        solutions.append(sn.repair(constraints, y, solver=sn.ConjugateGradients()))
        seconds.append(time.perf_counter() - begin)
        solutions[-1].value.square().sum().backward()
        seconds.append(time.perf_counter() - begin - seconds[0])

    memory = peak_growth_mib(run)
    dense = 8 * batch * (m * n + m * m) / 2**20
    solution = solutions[0]
    show(
        f"n = {n}, m = {m}, {batch} samples; {hardware()}",
        ["failures", "violation", "steps", "forward", "backward", "memory", "one Jacobian and factor would take"],
        [
            [
                int((~solution.converged).sum()),
                f"{solution.violation.max():.0e}",
                int(solution.steps.max()),
                f"{seconds[0]:.0f} s",
                f"{seconds[1]:.0f} s",
                f"{memory:.0f} MiB",
                f"{dense:.0f} MiB",
            ]
        ],
    )


if __name__ == "__main__":
    main()
