r"""Pi-net's authors' JAX package (`pip install pinet-hcnn`), for comparisons; it runs in a process of its own.

Its interpreter is $SNARENET_PINET_PYTHON, or this one if it can import `pinet`. There this file runs as a script, so it
imports nothing of snarenet; arrays go there and back in files. The package projects onto linear rows $A y \le u$ with
$C y = x$, or, for convex quadratic rows with diagonal H, onto the cones

$$ \| (2 H_i^{1/2} y,\; 1 - u_i + G_i y) \| \le 1 + u_i - G_i y \quad \Leftrightarrow \quad
y^\top H_i y + G_i y \le u_i. $$

It runs in float64. omega 1.7, Ruiz scaling with 25 rounds and bicgstab with 25 iterations for the gradient are as in
its authors' benchmark of NCLP's size; their sigma, 0.068, is in the grid.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]

OMEGA, RUIZ, BACKWARD, EVERY = 1.7, 25, 25, 5  # EVERY: iterations are counted in fives
SIGMAS = (0.03, 0.05, 0.068, 0.085, 0.1, 0.15)  # for linear rows
CONE_SIGMAS = (1.0, 3.0, 10.0)
_SETTLED = 1e-5  # an iterate that five more iterations move by less is near the projection


def interpreter() -> str | None:
    """The Python that has the package, or None."""
    from snarenet_lab.bench import elsewhere

    return elsewhere.interpreter("pinet", "SNARENET_PINET_PYTHON")


def call(task: str, arrays: Mapping[str, np.ndarray], device: str, threads: int, **settings: Any) -> Arrays:
    """What `task`, "project" or "train", makes of the arrays; see the functions of these names below.

    Args:
        task: the name.
        arrays: A and upper, or H, G and upper; C; and what the task asks for.
        device: "cpu" or "cuda".
        threads: of the CPU.
        settings: numbers that the task asks for.
    """
    from snarenet_lab.bench import elsewhere

    python = interpreter()
    if python is None:
        raise ImportError("the original Pi-net needs pinet-hcnn, here or in the interpreter $SNARENET_PINET_PYTHON")
    environment = elsewhere.jax_environment(device, threads) | {"PINET_RUNTIME_CHECK": "0"}
    return elsewhere.run(python, Path(__file__), task, arrays, environment, settings)


class _Set:
    """The package's layer for the arrays of a problem; functions of y (B, n) and x (B, p)."""

    def __init__(self, arrays: Arrays) -> None:
        import jax
        import jax.numpy as jnp
        import pinet

        self.arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
        self.curved = "H" in arrays
        upper, C = self.arrays["upper"], self.arrays["C"]
        equalities = pinet.EqualityConstraint(C[None], jnp.zeros((1, len(C), 1)), method=None, var_b=True)
        self.cones: list[Any] = []
        if self.curved:
            for h, g, u in zip(self.arrays["H"], self.arrays["G"], upper, strict=True):
                cone = pinet.NonLinearSpecification(
                    a_mat=jnp.concatenate([2 * jnp.diag(jnp.sqrt(h)), g[None]])[None],
                    a=jnp.concatenate([jnp.zeros_like(h), 1 - u[None]])[None, :, None],
                    f=-g[None, None],
                    b=(1 + u).reshape(1, 1, 1),
                    nl_type=pinet.SOCType,
                )
                self.cones.append(cone)
            rows = [pinet.NonLinearConstraint(cone) for cone in self.cones]
            self.layer = pinet.Project(eq_constraint=equalities, nl_constraints=rows)
        else:
            bound = upper[None, :, None]
            self.layer = pinet.Project(
                eq_constraint=equalities,
                ineq_constraint=pinet.AffineInequalityConstraint(
                    self.arrays["A"][None], jnp.full_like(bound, -jnp.inf), bound
                ),
                equilibration_params=pinet.EquilibrationParams(max_iter=RUIZ),
            )
        self._violation = jax.jit(self.violations)

    def instance(self, y: Any, x: Any) -> Any:
        """The prediction y and the right-hand side x, as the package wants them."""
        import pinet

        right = pinet.EqualityConstraintsSpecification(b=x[..., None])
        return pinet.ProjectionInstance(x=y[..., None], eq=right, nl=self.cones or None)

    def project(self, y: Any, x: Any, sigma: float, count: int) -> Any:
        """The projection after `count` iterations."""
        options: dict[str, Any] = {"sigma": sigma, "omega": OMEGA, "n_iter": count, "n_iter_bwd": BACKWARD}
        return self.layer.call(y_raw=self.instance(y, x), **options)[0].x[..., 0]

    def violations(self, y: Any, x: Any) -> Any:
        """(B,) the largest violation of each sample."""
        import jax.numpy as jnp

        known = self.arrays
        value = (y**2) @ known["H"].T + y @ known["G"].T if self.curved else y @ known["A"].T
        above, apart = value - known["upper"], jnp.abs(y @ known["C"].T - x)
        return jnp.maximum(jnp.maximum(above, 0).max(1), apart.max(1))

    def count(self, y: Any, x: Any, sigma: float, tol: float, most: int, settled: bool = False) -> tuple[int, float]:
        """After how many iterations the worst sample obeys `tol`, at most `most`, and what it violates then."""
        import jax.numpy as jnp

        instance = self.instance(y, x)
        state, before, worst = self.layer.initialize(instance), y, float("inf")
        for count in range(EVERY, most + 1, EVERY):
            found, state = self.layer.call(
                y_raw=instance, s0=state, sigma=sigma, omega=OMEGA, n_iter=EVERY, n_iter_bwd=BACKWARD
            )
            value = found.x[..., 0]
            worst = float(self._violation(value, x).max())
            if worst <= tol and not (settled and float(jnp.abs(value - before).max()) > _SETTLED):
                return count, worst
            before = value
        return most, worst

    def best_sigma(self, y: Any, x: Any, most: int) -> float:
        """The sigma that needs the fewest iterations to a violation of 1e-8 near the projection.

        Near it, since with a small sigma all iterates are feasible, and far from the projection.
        """
        sigmas, best = CONE_SIGMAS if self.curved else SIGMAS, SIGMAS[0]
        for sigma in sigmas:
            count, worst = self.count(y, x, sigma, 1e-8, most, settled=True)
            if worst <= 1e-8 and count < most:
                best, most = sigma, count
        return best


def project(arrays: Arrays, settings: dict[str, Any]) -> Arrays:
    """Time of a projection and its gradient: y and x, and `valid_y` and `valid_x` to choose sigma on.

    Settings: `tolerances`, `most` iterations, `repeats`. The iterations are the fewest that reach a tolerance. Found,
    an entry for each tolerance: `count`, `violation`, `seconds` (median) and `mib` as the compiler plans them, `value`;
    and `sigma`.
    """
    import jax

    family = _Set(arrays)
    y, x, weights = (family.arrays[name] for name in ("y", "x", "weights"))
    sigma = family.best_sigma(family.arrays["valid_y"], family.arrays["valid_x"], settings["most"])
    found: dict[str, list[Any]] = {name: [] for name in ("count", "violation", "seconds", "mib", "value")}
    for tol in settings["tolerances"]:
        count, _ = family.count(y, x, sigma, tol, settings["most"])

        def both(y: Any, x: Any, weights: Any, count: int = count) -> Any:
            value, pull = jax.vjp(lambda y: family.project(y, x, sigma, count), y)
            return value, pull(weights)[0]

        compiled = jax.jit(both).lower(y, x, weights).compile()
        plan = compiled.memory_analysis()
        value, _ = jax.block_until_ready(compiled(y, x, weights))
        seconds = _median_seconds(lambda run=compiled: run(y, x, weights), settings["repeats"])
        found["count"].append(count)
        found["violation"].append(float(family.violations(value, x).max()))
        found["seconds"].append(seconds)
        found["mib"].append((plan.temp_size_in_bytes + plan.output_size_in_bytes) / 2**20)
        found["value"].append(value)
    return found | {"sigma": sigma}


def _median_seconds(run: Callable[[], Any], repeats: int) -> float:
    import jax

    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
        if sum(times) > 60:  # of a slow one, a few are enough
            break
    return float(np.median(times))


def train(arrays: Arrays, settings: dict[str, Any]) -> Arrays:
    """Train networks in front of the projection: `inputs`, `test`, and the objective's `square`, `linear`, `sine`.

    Settings: `width`, `depth`, `epochs`, `batch`, `rates` (of optax's Adam, falling along a cosine), `seed`,
    `iterations` in training, `tol` of the test and its `most` iterations; sigma is chosen on `valid_y`, `valid_x`.
    SiLU, float32. Found, an entry for each rate: `seconds` of training alone, without compilation; `objective` and
    `violation` of the test instances.
    """
    import jax
    import jax.numpy as jnp
    import optax

    family = _Set(arrays)
    known = family.arrays
    sigma = family.best_sigma(known["valid_y"], known["valid_x"], settings["most"])
    inputs, test, batch = known["inputs"], known["test"], min(settings["batch"], len(known["inputs"]))
    steps = len(inputs) // batch  # a jitted step has one size
    sizes = [inputs.shape[1], *[settings["width"]] * settings["depth"], known["C"].shape[1]]
    adam = optax.adam(optax.cosine_decay_schedule(1.0, settings["epochs"] * steps))

    def predict(weights: Any, x: Any) -> Any:
        hidden = x.astype(jnp.float32)
        for matrix, bias in weights[:-1]:
            hidden = jax.nn.silu(hidden @ matrix + bias)
        matrix, bias = weights[-1]
        return (hidden @ matrix + bias).astype(jnp.float64)

    def objective(y: Any) -> Any:
        return (0.5 * known["square"] * y**2 + known["linear"] * y + known["sine"] * jnp.sin(y)).sum(1)

    @jax.jit
    def step(weights: Any, state: Any, index: Any, rate: float) -> Any:
        x = inputs[index]

        def loss(weights: Any) -> Any:
            return objective(family.project(predict(weights, x), x, sigma, settings["iterations"])).mean()

        updates, state = adam.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, jax.tree.map(lambda update: rate * update, updates)), state

    found: dict[str, list[Any]] = {name: [] for name in ("seconds", "objective", "violation")}
    for rate in settings["rates"]:
        generator = np.random.default_rng(settings["seed"])

        def uniform(fan_in: int, *shape: int, draw: Any = generator) -> Any:  # torch's initial weights
            return jnp.asarray(draw.uniform(-1, 1, shape) / np.sqrt(fan_in), jnp.float32)

        weights = [(uniform(a, a, b), uniform(a, b)) for a, b in itertools.pairwise(sizes)]
        state = adam.init(weights)
        jax.block_until_ready(step(weights, state, np.arange(batch), rate))  # compiles; what it returns is dropped
        begin = time.perf_counter()
        for _ in range(settings["epochs"]):
            for index in generator.permutation(len(inputs))[: steps * batch].reshape(steps, batch):
                weights, state = step(weights, state, index, rate)
        jax.block_until_ready(weights)
        found["seconds"].append(time.perf_counter() - begin)
        raw = predict(weights, test)
        count, _ = family.count(raw, test, sigma, settings["tol"], settings["most"])
        y = family.project(raw, test, sigma, count)
        found["objective"].append(objective(y))
        found["violation"].append(family.violations(y, test))
    return found | {"sigma": sigma}


def main() -> None:
    """Run the task that the command line names."""
    task, source, target, settings = sys.argv[1:]
    with np.load(source) as file:
        found = {"project": project, "train": train}[task](dict(file), json.loads(settings))
    np.savez(target, allow_pickle=False, **{name: np.asarray(value) for name, value in found.items()})


if __name__ == "__main__":
    main()
