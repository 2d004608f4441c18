"""The explorer's JavaScript, run by Node.js, answers what the library does: points, steps, statuses and derivatives."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.layers.dc3 import DC3Layer
from snarenet.layers.hardnet import HardNetLayer

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js (`node`) runs the page's scripts, and is not installed")
HERE = Path(__file__).parent

TOL = 1e-9  # in points; in derivatives relative to their size


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def torus(y: Tensor, x: None) -> Tensor:
    return ((y[:, :1].square() + 0.36).sqrt() - 1.5).square() + y[:, 1:].square()


def crescent(y: Tensor, x: None) -> Tensor:
    return 0.3 * y[:, :1].square() + (y[:, 1:] + 1 - 0.4 * y[:, :1].square()).square()


def mixed(y: Tensor, x: None) -> Tensor:
    a, b = y[:, :1], y[:, 1:]
    first = torch.exp(a * b / 8) - 1.2 * a
    return torch.cat([first, torch.log(2 + a**2) ** 1.5 / (2 + torch.cos(b)) + torch.sqrt(b.abs() + 1)], 1)


# the sets of docs/explorer/sets.js, by hand, and one with every function that a formula may have
SETS: dict[str, sn.Constraints] = {
    "disk": sn.Quadratic(tensor([1.0, 1.0]), upper=1.0),
    "lens": sn.Quadratic(torch.ones(2, 2), tensor([-1.4, 0.0], [1.4, 0.0]), upper=0.95),
    "ring": sn.Quadratic(tensor([1.0, 1.0]), lower=1.0, upper=4.0),
    "slab": sn.Nonlinear(lambda y, x: y.norm(dim=1, keepdim=True), rows=1, lower=1.0, upper=2.0)
    & sn.Linear(tensor([1.0, 0.0]), lower=-0.5, upper=0.5),
    "torus": sn.Nonlinear(torus, rows=1, upper=0.49),
    "wedge": sn.Linear(tensor([1.0, 3.0], [-1.0, 3.0]), upper=1.0),
    "polytope": sn.Linear(
        tensor([0.0, -1.0], [1.0, 0.0], [1.0, 1.0], [-1.0, 2.0], [-2.0, -1.0]), upper=tensor(1.0, 1.5, 2.0, 2.0, 2.5)
    ),
    "segment": sn.Linear(tensor([1.0, 1.0]), equals=1.0) & sn.Box(0.0, torch.inf),
    "triangle": sn.Linear(tensor([-1.0, 0.0], [0.0, -1.0], [1.0, 1.0]), upper=tensor(0.0, 0.0, 1.0)),
    "sine": sn.Nonlinear(lambda y, x: y[:, 1:] - torch.sin(2 * y[:, :1]), rows=1, equals=0.0),
    "crescent": sn.Nonlinear(crescent, rows=1, upper=1.0),
    "functions": sn.Nonlinear(mixed, rows=2, upper=tensor(1.0, 2.2)),
}
FUNCTIONS = "exp(x*y**1/8) - 1.2x <= 1\n2.2 >= log(2 + x²)^1.5/(2 + cos(y)) + sqrt(abs(y) + 1)"

# of the page, and of the library
DAMPINGS: dict[str, tuple[dict[str, Any], sn.Damping]] = {
    "pace": ({"kind": "pace", "start": 10, "ratio": 0.6}, sn.Annealed(10.0, 0.6)),
    "quick": ({"kind": "pace", "start": 1, "ratio": 0.3}, sn.Annealed(1.0, 0.3)),
    "schedule": ({"kind": "schedule", "start": 10, "ratio": 0.6}, sn.Annealed(10.0, 0.6, own_pace=False)),
    "constant": ({"kind": "constant", "value": 0.01}, sn.Constant(0.01)),
    "large": ({"kind": "constant", "value": 1}, sn.Constant(1.0)),
}
SETTINGS = [
    ("pace", "auto"),
    ("pace", "all"),
    ("quick", "active"),
    ("schedule", "active"),
    ("constant", "all"),
    ("large", "auto"),
]


def points() -> Tensor:
    line = torch.linspace(-2.4, 2.5, 6, dtype=torch.float64)
    return torch.cartesian_prod(line, line + 0.013)


def ask(cases: list[dict[str, Any]]) -> list[Any]:
    """What the page answers in each case, {method, set or rows, points, options}."""
    assert NODE is not None
    done = subprocess.run(
        [NODE, str(HERE / "answers.js")], input=json.dumps(cases), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rows_of(name: str) -> dict[str, str]:
    return {"rows": FUNCTIONS} if name == "functions" else {"set": name}


def derivative(value: Tensor, y: Tensor) -> Tensor:
    """(B, 2, 2) that of each sample's value in its own y."""
    return torch.stack([torch.autograd.grad(value[:, i].sum(), y, retain_graph=True)[0] for i in range(2)], 1)


def read(answers: list[Any], key: str) -> Tensor:
    entries = (answer[key] for answer in answers)
    return torch.tensor([torch.inf if entry is None else entry for entry in entries], dtype=torch.float64)  # as in JSON


def assert_agree(answers: list[Any], value: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(read(answers, "value"), value.detach(), rtol=0, atol=TOL)
    exact = derivative(value, y)
    size = 1 + exact.abs().amax((1, 2))
    off = (read(answers, "jacobian") - exact).abs().amax((1, 2)) / size
    assert off.max() <= TOL, f"derivatives differ by {off.max().item():.2g} of their size at {y[off.argmax()].tolist()}"


def assert_same(answers: list[Any], solution: sn.Solution, y: Tensor) -> None:
    assert [answer["steps"] for answer in answers] == solution.steps.tolist()
    statuses = [sn.Status(code).name.lower().replace("_", " ") for code in solution.status.tolist()]
    assert [answer["status"] for answer in answers] == statuses
    assert_agree(answers, solution.value, y)
    torch.testing.assert_close(read(answers, "violation"), solution.violation, rtol=0, atol=TOL)


@needs_node
@pytest.mark.parametrize("name", SETS)
def test_repair(name: str) -> None:
    """Points, derivatives, steps, statuses and violations, with every damping and every choice of rows."""
    y = points()
    common = {"method": "repair", "points": y.tolist(), **rows_of(name)}
    options = [
        {"damping": DAMPINGS[damping][0], "rows": rows, "tol": 1e-8, "maxSteps": 60} for damping, rows in SETTINGS
    ]
    for (damping, rows), answers in zip(SETTINGS, ask([{**common, "options": each} for each in options]), strict=True):
        start = y.clone().requires_grad_()
        solution = sn.repair(SETS[name], start, start=None, damping=DAMPINGS[damping][1], rows=rows, max_steps=60)
        assert_same(answers, solution, start)


@needs_node
def test_limits() -> None:
    """A step limit that is reached, a coarse tolerance, rows that no point obeys, and one that is not a number."""
    y = points()
    empty = sn.Linear(tensor([1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]), upper=tensor(-1.0, 1.0, -1.0))
    cases: list[tuple[dict[str, str], sn.Constraints, float, int]] = [
        ({"set": "torus"}, SETS["torus"], 1e-8, 3),
        ({"set": "slab"}, SETS["slab"], 1e-3, 50),
        ({"rows": "x <= -1\ny <= 1\nx >= 1"}, empty, 1e-8, 200),
        ({"rows": "log(x) <= 0"}, sn.Nonlinear(lambda y, x: y[:, :1].log(), rows=1, upper=0.0), 1e-8, 50),
    ]
    common = {"damping": DAMPINGS["pace"][0], "rows": "auto"}
    asked = [
        {"method": "repair", "points": y.tolist(), **given, "options": {**common, "tol": tol, "maxSteps": most}}
        for given, _, tol, most in cases
    ]
    found = set()
    for (_, constraints, tol, most), answers in zip(cases, ask(asked), strict=True):
        start = y.clone().requires_grad_()
        assert_same(answers, sn.repair(constraints, start, start=None, tol=tol, max_steps=most), start)
        found |= {answer["status"] for answer in answers}
    assert found == {"converged", "max steps", "stalled", "nonfinite"}


@needs_node
def test_path() -> None:
    """The iterates that the page draws are those of repairs with fewer steps, and their dampings the schedule's."""
    options = {"damping": DAMPINGS["schedule"][0], "rows": "auto", "tol": 1e-8, "maxSteps": 60}
    y = tensor([2.2, 0.35])
    ((answer,),) = ask([{"method": "repair", "set": "slab", "points": y.tolist(), "options": options}])
    for k, step in enumerate(answer["path"]):
        some = sn.repair(SETS["slab"], y, start=None, damping=DAMPINGS["schedule"][1], tol=0, max_steps=k)
        torch.testing.assert_close(tensor(step["point"]), some.value, rtol=0, atol=TOL)
        assert step["damping"] == pytest.approx(10 * 0.6**k, rel=1e-12)


@needs_node
@pytest.mark.parametrize("name", ["disk", "lens", "ring", "slab", "torus", "crescent"])
def test_nearest(name: str) -> None:
    """The projection onto curved rows is the library's, and so is its derivative."""
    y = points()
    (answers,) = ask([{"method": "nearest", "set": name, "points": y.tolist()}])
    start = y.clone().requires_grad_()
    assert_agree(answers, sn.repair(SETS[name], start, start=sn.Nearest()).value, start)


@needs_node
@pytest.mark.parametrize("name", ["wedge", "polytope", "segment", "triangle", "sine"])
def test_nearest_is_never_farther(name: str) -> None:
    """Where the library comes close to the projection only (ADMM), or to one nearby, the page's is no farther away."""
    y = points()
    (answers,) = ask([{"method": "nearest", "set": name, "points": y.tolist()}])
    value = read(answers, "value")
    assert SETS[name].violation(value).max() <= TOL
    solution = sn.repair(SETS[name], y, start=sn.Nearest())
    assert ((value - y).norm(dim=1) - (solution.value - y).norm(dim=1)).max() <= 1e-7


@needs_node
@pytest.mark.parametrize("name", SETS)
def test_dc3(name: str) -> None:
    y = points()
    (answers,) = ask([{"method": "dc3", "points": y.tolist(), **rows_of(name)}])
    layer = DC3Layer(SETS[name], on_failure="ignore").eval()
    start = y.clone().requires_grad_()
    rows = layer.completion.rows
    assert isinstance(layer.completion.order, Tensor)
    solution = layer.solve(start[:, layer.completion.order[: 2 - rows]] if rows else start, None)
    assert_agree(answers, solution.value, start)
    assert [answer["steps"] for answer in answers] == solution.steps.tolist()


@needs_node
def test_hardnet() -> None:
    """HardNet's answer, and a sentence where the library raises an error."""
    y = points()
    cases = [{"method": "hardnet", "points": y.tolist(), "set": name} for name in SETS if name != "functions"]
    applies = []
    for case, answers in zip(cases, ask(cases), strict=True):
        start = y.clone().requires_grad_()
        try:
            solution = HardNetLayer(SETS[case["set"]]).solve(start, None)
        except ValueError:
            assert all("why" in answer for answer in answers)
            continue
        applies.append(case["set"])
        assert_agree(answers, solution.value, start)
    assert applies == ["wedge"]


ERRORS = {
    "x^2 + y^2": "Line 1: a row needs a bound",
    "x <= 1\ny <= sin": "Line 2: sin needs parentheses",
    "foo(x) <= 1": "“foo” is unknown",
    "(x + 1 <= 2": "closing parenthesis is missing",
    "1 <= 2": "neither x nor y",
    "2 <= x <= 1": "lower bound 2 is above",
    "1 <= x >= 0": "must point the same way",
    "x + # <= 1": "“#” is not part of a formula",
    "x * <= 1": "ends too early",
    "alert(1) <= x": "“alert” is unknown",
    "": "Write at least one row",
}


@needs_node
def test_errors() -> None:
    """What cannot be read is said in words; nothing is ever evaluated as a program."""
    answers = ask([{"method": "read", "rows": rows} for rows in ERRORS])
    for (rows, words), answer in zip(ERRORS.items(), answers, strict=True):
        assert words in answer["error"], rows
