r"""KKT-HardNet (`pip install kkt-hardnet`), for comparisons; JAX 0.4.30, so it runs in a process of its own.

Its interpreter is $SNARENET_KKT_PYTHON, or this one if it can import `kkthn`. There this file runs as a script, so it
imports nothing of snarenet. The package looks for the nearest point: Gauss-Newton steps on the optimality conditions in
y, multipliers and slacks,

$$ y - \hat y + J^\top (\lambda, \mu) = 0, \quad C y = x, \quad g(y) + s = u, \quad
\sqrt{\mu_i^2 + s_i^2 + \epsilon^2} = \mu_i + s_i, $$

and the gradient by the implicit function theorem. Its defaults, steps of one half and `gn_reg` 1e-3, did not bring 20
predictions of NCLP to 1e-6 in 100 steps; here the first trial step is a whole one, `gn_reg` one of `REGULARISATIONS`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]

REGULARISATIONS = (1e-7, 1e-9)
MOST, SECONDS, FEW = 100, 3.0, 3  # Gauss-Newton steps; seconds of passes on the clock, and how many at least


def interpreter() -> str | None:
    """The Python that has the package, or None."""
    from snarenet_lab.bench import elsewhere

    return elsewhere.interpreter("kkthn", "SNARENET_KKT_PYTHON")


def call(task: str, arrays: Mapping[str, np.ndarray], device: str, threads: int, **settings: Any) -> Arrays:
    """What `task`, "project", makes of the arrays: see the function of this name below."""
    from snarenet_lab.bench import elsewhere

    python = interpreter()
    if python is None:
        raise ImportError("KKT-HardNet needs kkt-hardnet, here or in the interpreter $SNARENET_KKT_PYTHON")
    environment = elsewhere.jax_environment(device, threads)
    return elsewhere.run(python, Path(__file__), task, arrays, environment, settings)


def project(arrays: Arrays, settings: dict[str, Any]) -> Arrays:
    """Time of a projection and its gradient: A and upper, or H, G and upper; C; y, x and `weights` of the gradient.

    Settings: `tolerances`, `repeats`. Found, an entry for each tolerance: `count`, `violation`, `seconds` (median) and
    `mib` as the compiler plans them, `value`, and `gn_reg`, the fastest that reaches the tolerance.
    """
    model, violation = _model(arrays)
    names = ("count", "violation", "seconds", "mib", "value", "gn_reg")
    found: Arrays = {name: [] for name in names}
    for tol in settings["tolerances"]:
        tried = [_pass(model, violation, arrays, tol, reg, settings["repeats"]) for reg in REGULARISATIONS]
        best = min(tried, key=lambda one: (one["violation"] > tol, one["seconds"]))
        for name in names:
            found[name].append(best[name])
    return found


def _model(arrays: Arrays) -> tuple[Any, Any]:
    """The package's model of the set, and the largest violation as a function of y and x."""
    import jax.numpy as jnp
    from jaxmodel import HighLevelNLPBuilder

    known = {name: jnp.asarray(array) for name, array in arrays.items()}
    C, upper = known["C"], known["upper"]

    def inequalities(y: Any) -> Any:
        return (known["H"] @ y**2 + known["G"] @ y if "H" in known else known["A"] @ y) - upper

    rows, n = C.shape
    builder = HighLevelNLPBuilder().add_variable("y", n).add_parameter("x", rows)
    builder.set_objective(lambda p, v: jnp.sum(v["y"] ** 2))  # it asks for one; the projection has its own
    builder.add_nonlinear_equality(lambda p, v: C @ v["y"] - p["x"])
    builder.add_nonlinear_inequality(lambda p, v: inequalities(v["y"]))

    def violation(y: Any, x: Any) -> float:
        above = max(float(inequalities(one).max()) for one in y)
        return max(above, float(jnp.abs(y @ C.T - x).max()))

    return builder.build(example_params={"x": jnp.zeros(rows)}), violation


def _pass(model: Any, violation: Any, arrays: Arrays, tol: float, reg: float, repeats: int) -> Arrays:
    """A projection with its gradient: what it finds, and how long it takes."""
    import jax
    from kkthn.projection import ProjectionSettings, make_projection_layer

    options = ProjectionSettings(gn_tol=tol, gn_reg=reg, gn_max_iters=MOST, newton_step_length=1.0)
    layer = make_projection_layer(model, settings=options)
    y, x, weights = (jax.numpy.asarray(arrays[name]) for name in ("y", "x", "weights"))

    def both(y: Any, x: Any, weights: Any) -> Any:
        value, pull = jax.vjp(lambda y: layer.project(x, y), y)
        return value, pull(weights)[0]

    compiled = jax.jit(both).lower(y, x, weights).compile()
    value, _ = jax.block_until_ready(compiled(y, x, weights))
    times: list[float] = []
    while len(times) < repeats and (len(times) < FEW or sum(times) < SECONDS):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(y, x, weights))
        times.append(time.perf_counter() - begin)
    plan = compiled.memory_analysis()
    return {
        "count": int(jax.vmap(layer.solve_single)(x, y)[0].max()),
        "violation": violation(value, x),
        "seconds": float(np.median(times)),
        "mib": (plan.temp_size_in_bytes + plan.output_size_in_bytes) / 2**20,
        "value": value,
        "gn_reg": reg,
    }


def main() -> None:
    """Run the task that the command line names."""
    task, source, target, settings = sys.argv[1:]
    with np.load(source) as file:
        found = {"project": project}[task](dict(file), json.loads(settings))
    np.savez(target, allow_pickle=False, **{name: np.asarray(value) for name, value in found.items()})


if __name__ == "__main__":
    main()
