"""AMPL's .nl files as sets, read from files that Pyomo and a human wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import snarenet as sn

ca = pytest.importorskip("casadi", reason='needs casadi: pip install "snarenet[casadi]"')

from snarenet.doors import nl  # noqa: E402

HERE = Path(__file__).parent
FILES = ["pyomo.nl", "by_hand.nl"]


def predictions(size: int, count: int = 12) -> torch.Tensor:
    return 1 + 2 * torch.randn(count, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rows(name: str, y: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """The rows of the two models, in Python."""
    if name == "by_hand.nl":
        return y[0] * y[1] + y[2], y[1] + np.log(y[0]), y[0] + 2 * y[1] - y[2]
    *x, z = y
    product, sphere = np.prod(x), np.sum(np.square(x))
    return product, sphere, x[0] - 2 * x[1] + z, z + x[0], np.exp(z) + np.sin(x[0]) * np.tanh(x[1])


BOUNDS = {
    "pyomo.nl": ([25, 40, -9, -np.inf, -np.inf], [np.inf, 40, 3, 4, 3], [1] * 4 + [-np.inf], [5] * 4 + [np.inf]),
    "by_hand.nl": ([1, 0, 3], [np.inf, 2, 3], [0.1, -np.inf, -np.inf], [10, 4, np.inf]),
}


def worst(name: str, y: np.ndarray[Any, Any]) -> float:
    """The largest violation of the model, as it was meant."""
    low, high, least, most = (np.array(bound, dtype=float) for bound in BOUNDS[name])
    g = np.array(rows(name, y))
    return float(max(0, *(low - g), *(g - high), *(least - y), *(y - most)))


@pytest.mark.parametrize("name", FILES)
def test_violations_are_those_of_the_model(name: str) -> None:
    found = sn.Constraints.from_nl(HERE / name)
    y = predictions(found.parts[0].size or 0).abs() + 0.01
    want = [worst(name, sample.numpy()) for sample in y]
    assert found.violation(y).tolist() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", FILES)
def test_repairs_obey_what_ipopt_reads(name: str) -> None:
    """All repaired points are feasible for IPOPT's functions, and as near as the point that it finds from there."""
    model = nl.read(HERE / name)
    built = nl._built(ca, HERE / name)
    y = predictions(len(model.start)).clamp(min=0.2)
    solution = sn.repair(model.constraints, y)
    assert bool(solution.converged.all())
    variables, target = ca.vertcat(*built.x), ca.MX.sym("target", len(model.start))
    program = {"x": variables, "p": target, "f": ca.sumsqr(variables - target), "g": ca.vertcat(*built.g)}
    quiet = {"ipopt.print_level": 0, "print_time": False, "ipopt.sb": "yes", "ipopt.tol": 1e-10}
    solver = ca.nlpsol("solver", "ipopt", program, quiet)
    bounds = {"lbx": built.x_lb, "ubx": built.x_ub, "lbg": built.g_lb, "ubg": built.g_ub}
    rows = ca.Function("g", [variables], [program["g"]])
    for guess, value in zip(y.numpy(), solution.value.numpy(), strict=True):
        g = rows(value).full().ravel()
        assert max(*(built.g_lb - g), *(g - built.g_ub), *(built.x_lb - value), *(value - built.x_ub)) <= 1e-8
        nearest = float(solver(x0=value, p=guess, **bounds)["f"])
        assert np.square(value - guess).sum() <= nearest + 1e-6


def test_objective_start_and_names() -> None:
    """What is maximised comes with the other sign."""
    by_hand, pyomo = (nl.read(HERE / name) for name in ("by_hand.nl", "pyomo.nl"))
    assert by_hand.start.tolist() == [1.0, 1.0, 0.0]
    assert by_hand.objective(torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)).tolist() == [7.0]
    assert by_hand.names == ()
    assert pyomo.names == ("x[1]", "x[2]", "x[3]", "x[4]", "z")
    assert pyomo.objective(pyomo.start.unsqueeze(0)).tolist() == [11.0 + 5.0 + 0.25]


def test_what_is_not_taken_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        sn.Constraints.from_nl(tmp_path / "missing.nl")
    text = (HERE / "by_hand.nl").read_text().replace(" 0 0 0 0 0	# discrete", " 0 1 0 0 0	# discrete")
    (tmp_path / "integer.nl").write_text(text)
    with pytest.raises(NotImplementedError, match=r"integer.nl has 1 integer variables"):
        sn.Constraints.from_nl(tmp_path / "integer.nl")


@pytest.mark.parametrize("package", ["cvxpy", "casadi"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    door = getattr(sn.Constraints, f"from_{package}")
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "snarenet\[{package}\]"'):
        door([])
