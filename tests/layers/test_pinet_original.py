"""Pi-net against its authors' JAX package, which runs in an environment of its own.

    python -m venv pinet-env && pinet-env/bin/pip install pinet-hcnn
    SNARENET_PINET_PYTHON=pinet-env/bin/python python -m pytest -m slow tests/test_pinet_original.py

Both project onto the same sets. The package has three ways to differentiate: an implicit gradient by bicgstab, the same
by fixed-point iteration, and the unrolled loop. The implicit ones drop the gradients of right-hand sides and bounds;
ours are compared with the unrolled loop and with differences of a conic solver's projections.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers.pinet import PiNetLayer
from snarenet.reference.engines import Clarabel
from snarenet.reference.program import QuadraticRows, Structured
from snarenet.testing import draw

PYTHON = os.environ.get("SNARENET_PINET_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="SNARENET_PINET_PYTHON names no interpreter that has pinet-hcnn installed"),
]

Case = dict[str, Tensor]  # A, C, lower, upper, right, y, weights and, where y has a box, low and high
LEAVES = ("y", "right", "lower", "upper", "low", "high")


def in_jax(source: str, target: str, settings: str) -> None:
    """Runs under the other interpreter: values, gradients and times of the case in `source`, for each of the settings.

    Its source text is handed over, so it needs nothing from this file.
    """
    import json
    import os
    import time

    os.environ.update(JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu")
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pinet

    case = {name: jnp.asarray(array)[..., None] for name, array in np.load(source).items() if name not in "AC"}
    A, C = (jnp.asarray(np.load(source)[name])[None] for name in "AC")
    box = None
    if "low" in case:
        box = pinet.BoxConstraint(pinet.BoxConstraintSpecification(lb=case["low"], ub=case["high"]))
    found = {}
    for number, setting in enumerate(json.loads(settings)):
        ruiz, repeats = setting.pop("ruiz", 25), setting.pop("repeats", 0)
        layer = pinet.Project(
            eq_constraint=pinet.EqualityConstraint(C, case["right"], method=None, var_b=True),
            ineq_constraint=pinet.AffineInequalityConstraint(A, case["lower"], case["upper"]),
            box_constraint=box,
            unroll=setting.pop("unroll", False),
            equilibration_params=pinet.EquilibrationParams(max_iter=ruiz),
        )

        def project(leaves, layer=layer, setting=setting):
            low, high = (
                jnp.concatenate([leaves[of_y], leaves[of_rows]], 1) if of_y in leaves else leaves[of_rows]
                for of_y, of_rows in (("low", "lower"), ("high", "upper"))
            )
            instance = pinet.ProjectionInstance(
                x=leaves["y"],
                eq=pinet.EqualityConstraintsSpecification(b=leaves["right"]),
                box=pinet.BoxConstraintSpecification(lb=low, ub=high),
            )
            return layer.call(y_raw=instance, **setting)[0].x

        @jax.jit
        def both(leaves, weights, project=project):
            value, pull = jax.vjp(project, leaves)
            return value, pull(weights)[0]

        leaves = {name: array for name, array in case.items() if name != "weights"}
        value, gradients = jax.block_until_ready(both(leaves, case["weights"]))  # compiles
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(both(leaves, case["weights"]))
            times.append(time.perf_counter() - begin)
        found |= {f"{number}:{name}": array[..., 0] for name, array in {**gradients, "value": value}.items()}
        found[f"{number}:times"] = np.array(times)
        found[f"{number}:scale"] = layer.d_c.ravel()
    np.savez(target, **found)


def original(case: Case, *settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """What the package finds, for each of the settings: `value`, gradients by name, `times` in seconds, `scale`.

    A setting has arguments of the package (n_iter, n_iter_bwd, fpi, sigma, omega), and `unroll`, `ruiz`, `repeats`.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = str(Path(folder, "case.npz")), str(Path(folder, "found.npz"))
        np.savez(source, **{name: tensor.detach().numpy() for name, tensor in case.items()})
        call = f"{in_jax.__name__}({source!r}, {target!r}, {json.dumps(settings)!r})"
        # annotations are not evaluated, as in this file
        text = f"from __future__ import annotations\n{inspect.getsource(in_jax)}\n{call}"
        done = subprocess.run([PYTHON, "-c", text], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the original Pi-net failed:\n{done.stderr[-2000:]}")
        found: list[dict[str, Tensor]] = [{} for _ in settings]
        with np.load(target) as file:
            for key, array in file.items():
                number, name = key.split(":")
                found[int(number)][name] = torch.from_numpy(np.array(array))
    return found


def ours(case: Case) -> dict[str, Tensor]:
    """The same from our layer."""
    leaves = {name: case[name].clone().requires_grad_() for name in LEAVES if name in case}
    sets = sn.Linear(case["A"], leaves["lower"], leaves["upper"]) & sn.Linear(case["C"], equals=leaves["right"])
    if "low" in case:
        sets = sets & sn.Box(leaves["low"], leaves["high"])
    value = PiNetLayer(sets, tol=1e-12)(leaves["y"])
    gradients = torch.autograd.grad((case["weights"] * value).sum(), list(leaves.values()))
    return {"value": value.detach(), **dict(zip(leaves, gradients, strict=True))}


def random_case(seed: int) -> Case:
    """Rows with one bound or two, equalities and a box, around points that obey them all."""
    n, batch = 12, 9
    A, C = draw(6, n, seed=seed), draw(3, n, seed=seed + 100)
    inside = draw(batch, n, seed=seed + 200, scale=0.3).clamp(-0.6, 0.6)
    lower, upper = inside @ A.T - 1.5, inside @ A.T + 1.0
    lower[:, 0], upper[:, 1] = -torch.inf, torch.inf
    low, high = torch.full_like(inside, -0.8), 0.7 + 0.1 * draw(batch, n, seed=seed + 300).tanh()
    y, weights = draw(batch, n, seed=seed + 400), draw(batch, n, seed=seed + 500)
    return {
        **{"A": A, "C": C, "lower": lower, "upper": upper, "low": low, "high": high},
        **{"right": inside @ C.T, "y": y, "weights": weights},
    }


def nclp_case(problem: sn.problems.Problem, x: Tensor, y: Tensor) -> Case:
    """NCLP at predictions y."""
    rows, equalities = problem.constraints.parts
    instance = problem.constraints.at(y, x)
    m = len(rows.A)
    return {
        **{"A": rows.A, "C": equalities.A, "lower": instance.lower[:, :m], "upper": instance.upper[:, :m]},
        **{"right": x, "y": y, "weights": draw(*y.shape, seed=500)},
    }


def small_nclp(scale: float) -> Case:
    problem = sn.problems.load("nclp", size=20, inequalities=10, equalities=10, instances=200)
    x = problem.split("valid")
    return nclp_case(
        problem, x, x @ torch.linalg.pinv(problem.constraints.parts[1].A).T + draw(len(x), 20, scale=scale)
    )


# The package's sigma is in units of its column scales squared, so every kind of set needs its own.
CASES = {
    "set-1": (lambda: random_case(1), 0.003),
    "set-2": (lambda: random_case(2), 0.003),
    "set-3": (lambda: random_case(3), 0.003),
    "nclp-near": (lambda: small_nclp(0.5), 0.03),
    "nclp-far": (lambda: small_nclp(2.0), 0.03),
}


class Found(NamedTuple):
    """A case, what our layer finds, and what the package finds in three ways."""

    case: Case
    ours: dict[str, Tensor]
    bicgstab: dict[str, Tensor]
    fixed_point: dict[str, Tensor]
    unrolled: dict[str, Tensor]


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest) -> Found:
    make, sigma = CASES[request.param]
    case, common = make(), {"n_iter": 400, "sigma": sigma, "omega": 1.7}
    implicit = ({"n_iter_bwd": 25}, {"n_iter_bwd": 1000, "fpi": True})  # the first as in the authors' benchmarks
    ways = original(case, *(common | way for way in implicit), common | {"unroll": True})
    return Found(case, ours(case), *ways)


def nearest(case: Case) -> Tensor:
    """The projections by Clarabel, one by one."""
    n = case["y"].shape[1]
    J = torch.cat([case["A"], case["C"], *([torch.eye(n, dtype=torch.float64)] if "low" in case else [])])
    low, high = (
        torch.cat([case[rows], case["right"], *([case[of_y]] if of_y in case else [])], 1)
        for rows, of_y in (("lower", "low"), ("upper", "high"))
    )
    solver = [Clarabel(Structured(np.ones(n), -y, np.zeros(n), (QuadraticRows(J.numpy()),))) for y in case["y"].numpy()]
    points = zip(solver, case["y"].numpy(), low.numpy(), high.numpy(), strict=True)
    return torch.from_numpy(np.stack([solve(y, lower, upper) for solve, y, lower, upper in points]))


def test_the_same_projection(found: Found) -> None:
    """The package converges to rounding, and our layer to the same points."""
    moved = (found.ours["value"] - found.case["y"]).norm(dim=1)
    assert moved.min() > 0.1
    torch.testing.assert_close(found.ours["value"], found.bicgstab["value"], rtol=0, atol=1e-10)


def test_the_same_gradient_of_the_prediction(found: Found) -> None:
    """To rounding by fixed-point iteration; bicgstab stops at 1e-5 of the batch's gradient, and may be 1e-4 off."""
    torch.testing.assert_close(found.ours["y"], found.fixed_point["y"], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.ours["y"], found.bicgstab["y"], rtol=0, atol=2e-4)


def test_gradients_that_the_original_drops(found: Found) -> None:
    """Its implicit gradients of right-hand sides and bounds are zero; ours are those of its unrolled loop."""
    for name in LEAVES[1:]:
        if name in found.case:
            assert not found.bicgstab[name].any()
            assert not found.fixed_point[name].any()
            torch.testing.assert_close(found.ours[name], found.unrolled[name], rtol=0, atol=1e-9)
    assert found.ours["right"].abs().max() > 0.1
    assert found.ours["upper"].abs().max() > 0.1


def test_gradients_of_bounds_against_a_conic_solver(found: Found) -> None:
    """Along a random direction in all right-hand sides and bounds; the projection is linear between kinks."""
    names = [name for name in LEAVES[1:] if name in found.case]
    direction = {name: draw(*found.case[name].shape, seed=600 + i) for i, name in enumerate(names)}
    step = 1e-4
    ends = [
        nearest(found.case | {name: found.case[name] + sign * direction[name] for name in names})
        for sign in (step, -step)
    ]
    expected = (found.case["weights"] * (ends[0] - ends[1])).sum(1) / (2 * step)
    actual = sum((found.ours[name] * direction[name]).sum(1) for name in names)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)
