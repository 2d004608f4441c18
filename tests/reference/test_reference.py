"""Reference solutions: engines against each other and closed forms, the check, and what is kept on disk."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import snarenet as sn
from snarenet.problems.base import Problem
from snarenet.problems.separable import Separable
from snarenet.reference import ENGINES, Reference, solve, solving
from snarenet.reference.program import QuadraticRows, Structured
from snarenet.reference.store import Store
from snarenet.testing import draw

for extra in ("casadi", "clarabel", "scipy", "threadpoolctl"):
    pytest.importorskip(extra)

SMALL = {"size": 10, "inequalities": 5, "equalities": 4, "instances": 100}
CONVEX = ("ipopt", "clarabel", "slsqp")


def here(problem: Problem, x: Tensor | None = None, engine: str = "ipopt", **options: object) -> Reference:
    """Solve in this process, and keep nothing unless told."""
    return solve(problem, x, engine, **{"workers": 1, "cache": False, "starts": 1, **options})


class Simple(Separable):
    """min 1/2 |y|^2 + p'y over any set."""

    def __init__(self, constraints: sn.Constraints, p: Tensor, inputs: Tensor, square: float = 1.0) -> None:
        super().__init__()
        self.size, self.constraints, self.convex = len(p), constraints, True
        self.store(inputs.numpy(), square=np.full(len(p), square), linear=p.numpy())


class Ring(Problem):
    """min |y - x|^2 over 1 <= |y| <= 2, functions all through; from outside the solution is 2 x / |x|."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.inputs = 2, draw(6, 2, seed=3, scale=5.0)
        self.inputs[0] = torch.tensor([0.3, 0.4])
        self.constraints = sn.Nonlinear(lambda y, x: y.square().sum(1, keepdim=True), rows=1, lower=1.0, upper=4.0)

    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        return (y - x).square().sum(1)


# --- engines


@pytest.mark.parametrize("inequalities", [3, 12])
def test_engines_agree_on_a_convex_problem(inequalities: int) -> None:
    problem = sn.problems.load("qcqp", **{**SMALL, "inequalities": inequalities})
    results = [here(problem, engine=engine) for engine in CONVEX]
    for result in results:
        assert result.ok.all()
        torch.testing.assert_close(result.objective, results[0].objective, rtol=0, atol=1e-8)
        torch.testing.assert_close(result.value, results[0].value, rtol=0, atol=1e-5)  # the objective is flat
        torch.testing.assert_close(result.objective, problem.objective(result.value, problem.split("test")))


@pytest.mark.parametrize("name", ["nclp", "ncqcqp"])
def test_engines_agree_on_a_problem_that_is_not_convex(name: str) -> None:
    problem = sn.problems.load(name, **SMALL)
    ipopt, slsqp = (here(problem, engine=engine) for engine in ("ipopt", "slsqp"))
    assert ipopt.ok.all()
    assert slsqp.ok.all()
    torch.testing.assert_close(ipopt.objective, slsqp.objective, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", CONVEX)
def test_equalities_alone_have_a_closed_form(engine: str) -> None:
    """min 1/2 |y|^2 + p'y over A y = x is y = A+ (x + A p) - p; the inequality is far away."""
    A, p, x = draw(3, 6), draw(6, seed=1), draw(4, 3, seed=2)
    problem = Simple(sn.Linear(A, equals=lambda x: x) & sn.Box(-1e3, torch.full((6,), torch.inf)), p, x)
    result = here(problem, x, engine)
    assert result.ok.all()
    torch.testing.assert_close(result.value, (x + A @ p) @ torch.linalg.pinv(A).T - p, rtol=0, atol=1e-7)


@pytest.mark.parametrize("engine", CONVEX)
def test_a_box_clips(engine: str) -> None:
    """min 1/2 |y|^2 + p'y over a box is -p, clipped; lower and upper bounds are both active."""
    p = draw(6, seed=1, scale=2.0)
    problem = Simple(sn.Box(-1.0, torch.ones(6)), p, draw(2, 3))
    result = here(problem, problem.inputs, engine)
    assert result.ok.all()
    torch.testing.assert_close(result.value, (-p).clamp(-1, 1).expand(2, 6), rtol=0, atol=1e-8)


@pytest.mark.parametrize("engine", CONVEX)
@pytest.mark.parametrize("sign", [1, -1])
def test_whole_matrices(engine: str, sign: int) -> None:
    """min p'y over y'Hy <= 1, or -y'Hy >= -1, is -H^-1 p / sqrt(p'H^-1 p); H need not be symmetric."""
    root, p = draw(4, 4), draw(4, seed=1)
    H = root @ root.T + torch.eye(4)
    skew = torch.triu(draw(4, 4, seed=2), 1)
    bound = {"upper": 1.0} if sign == 1 else {"lower": -1.0}
    ball = sn.Quadratic(sign * (H + skew - skew.T)[None], torch.zeros(1, 4), **bound)
    result = here(Simple(ball, p, draw(2, 3), square=0.0), draw(2, 3), engine)
    inverse = torch.linalg.solve(H, p)
    assert result.ok.all()
    torch.testing.assert_close(result.value[0], -inverse / (p @ inverse).sqrt(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", CONVEX)
def test_low_rank_plus_a_diagonal(engine: str) -> None:
    F, D, p = draw(4, 2), draw(4, seed=1).abs() + 0.5, draw(4, seed=2)
    result = here(Simple(sn.Quadratic(factor=F, diagonal=D, upper=1.0), p, draw(2, 3), square=0.0), draw(2, 3), engine)
    inverse = torch.linalg.solve(F @ F.T + D.diag(), p)
    assert result.ok.all()
    torch.testing.assert_close(result.value[0], -inverse / (p @ inverse).sqrt(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["ipopt", "slsqp"])
def test_functions_of_the_user(engine: str) -> None:
    problem = Ring()
    x = problem.inputs
    with pytest.raises(ValueError, match=r"cannot read the problem 'Ring': .*use engine=\"ipopt\""):
        here(problem, x, "clarabel")
    result = here(problem, x, engine, starts=4, workers=2)
    assert result.ok.all()
    radius = x.norm(dim=1, keepdim=True)
    torch.testing.assert_close(result.value, x / radius * radius.clamp(1, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", CONVEX)
def test_matrices_that_depend_on_x(engine: str) -> None:
    """min 1/2 |y|^2 + p'y over x'y = 1."""
    p, x = draw(4, seed=1), draw(5, 4)
    problem = Simple(sn.Linear(lambda x: x[:, None], equals=torch.ones(1)), p, x)
    expected = (1 + x @ p)[:, None] * x / x.square().sum(1, keepdim=True) - p
    result = here(problem, x, engine, workers=2 if engine == "clarabel" else 1)
    assert result.ok.all()
    torch.testing.assert_close(result.value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", CONVEX)
def test_quadratic_rows_that_depend_on_x(engine: str) -> None:
    """min p'y over y'(F F' + D) y <= 1 with an F of its own for every x, by factors and written out."""
    x, D, p = draw(3, 8), draw(4, seed=1).abs() + 0.5, draw(4, seed=2)
    F = x.reshape(3, 4, 2)
    inverse = torch.linalg.solve(F @ F.mT + D.diag(), p.expand(3, 4))
    expected = -inverse / (inverse @ p).sqrt().unsqueeze(1)
    factors = lambda x: x.reshape(-1, 4, 2)  # noqa: E731
    for risk in (
        sn.Quadratic(factor=factors, diagonal=D, upper=1.0),
        sn.Quadratic(factor=factors, diagonal=D - 0.5, upper=lambda x: x[:, :1] * 0 + 1, G=0.5 * p[None]),
        sn.Quadratic(lambda x: (factors(x) @ factors(x).mT + D.diag())[:, None], upper=1.0),
    ):
        result = here(Simple(risk, p, x, square=0.0), x, engine)
        assert result.ok.all()
        if risk.G is None or not risk.factored:
            torch.testing.assert_close(result.value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", CONVEX)
def test_a_ball_of_sums_has_a_closed_form(engine: str) -> None:
    """min 1/2 |y - x|^2 over |y - c|_1 <= r(x) moves all differences by one threshold; two balls hold at once."""

    class Nearest(Simple):
        typical = torch.ones(5, dtype=torch.float64)  # a start knows nothing of the variables that lift a ball

        def slope(self, x: Tensor) -> Tensor:
            return -x

        def offset(self, x: Tensor) -> Tensor:
            return x.square().sum(1) / 2

    x, c = draw(4, 5, scale=2.0), draw(5, seed=1)
    ball = sn.L1Ball(c, lambda x: x[:, :1].abs() + 0.2)
    problem = Nearest(ball & sn.L1Ball(0.0, 100.0), torch.zeros(5, dtype=torch.float64), x)
    result = here(problem, x, engine, starts=2)
    assert result.ok.all()
    assert result.value.shape == (4, 5)
    torch.testing.assert_close(result.value, sn.repair(ball, x, x, tol=1e-12).value, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.objective, (result.value - x).square().sum(1) / 2)


@pytest.mark.parametrize("engine", ["ipopt", "slsqp"])
def test_an_objective_that_is_overridden_is_not_read_as_separable(engine: str) -> None:
    class Other(Simple):
        def objective(self, y: Tensor, x: Tensor) -> Tensor:
            return (y - 0.5).square().sum(1)

    problem = Other(sn.Box(-1.0, torch.ones(3)), draw(3), draw(2, 1))
    with pytest.raises(ValueError, match="objective is not the one of `Separable`"):
        here(problem, engine="clarabel")
    found = here(problem, problem.inputs, engine)
    torch.testing.assert_close(found.value, torch.full((2, 3), 0.5).double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "reason"), [("nclp", "sine term"), ("ncqcqp", "upper bound of row 0 cuts out a non-convex set")]
)
def test_clarabel_refuses_what_is_not_convex(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"'clarabel' solves convex problems only, but '{name}' is not: .*{reason}"):
        here(sn.problems.load(name, **SMALL), engine="clarabel")


def test_convexity_is_read_from_the_numbers() -> None:
    disk = Structured(np.ones(2), np.zeros(2), np.zeros(2), (QuadraticRows(np.zeros((1, 2)), np.ones((1, 2))),))
    inside, outside = np.array([[-np.inf]]), np.array([[np.inf]])
    assert disk.why_not_convex(inside, np.ones((1, 1))) is None
    assert "lower bound of row 0" in str(disk.why_not_convex(np.ones((1, 1)), outside))
    hill = Structured(-np.ones(2), np.zeros(2), np.zeros(2), disk.blocks)
    assert "negative square" in str(hill.why_not_convex(inside, np.ones((1, 1))))


@pytest.mark.parametrize(("engine", "module"), [("ipopt", "casadi"), ("clarabel", "clarabel"), ("slsqp", "scipy")])
def test_a_missing_solver_names_the_extra(engine: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == module or name.startswith("scipy.optimize")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy.optimize" if module == "scipy" else module, None)
    with pytest.raises(ImportError, match=rf'need {module}: pip install "snarenet\[solvers\]"'):
        here(sn.problems.load("qcqp", **SMALL), engine=engine)


def test_gurobi_needs_its_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gurobipy", None)
    with pytest.raises(ImportError, match="need gurobipy: pip install gurobipy"):
        here(sn.problems.load("qcqp", **SMALL), engine="gurobi")


def test_gurobi_agrees() -> None:
    pytest.importorskip("gurobipy")
    problem = sn.problems.load("qcqp", **SMALL)
    torch.testing.assert_close(here(problem, engine="gurobi").value, here(problem).value, rtol=0, atol=1e-6)


def test_wrong_arguments_are_named() -> None:
    problem = sn.problems.load("nclp", **SMALL)
    with pytest.raises(ValueError, match="`engine` must be one of ipopt, clarabel, slsqp, gurobi, but got 'ipop'"):
        here(problem, engine="ipop")
    for name in ("starts", "workers"):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, but got 0"):
            here(problem, **{name: 0})
    with pytest.raises(ValueError, match=r"`x` must have shape \(N, 4\), but got shape \(3, 5\)"):
        here(problem, draw(3, 5))


def test_no_inputs_no_solutions() -> None:
    problem = sn.problems.load("nclp", **SMALL)
    assert here(problem, problem.inputs[:0]).value.shape == (0, 10)


# --- the program in numpy, and the check


@pytest.mark.parametrize("name", ["nclp", "qcqp", "ncqcqp-hard"])
def test_the_program_is_the_problem(name: str) -> None:
    problem = sn.problems.load(name, **SMALL)
    x, y = problem.inputs[:1], draw(1, 10).requires_grad_()
    program = solving._tasks(problem, x, "slsqp", np.empty((0, 10)))[0].programs[0]
    point = y[0].detach().numpy()
    assert isinstance(program, Structured)
    assert program.objective(point) == pytest.approx(problem.objective(y, x).item(), rel=1e-13)
    for found, expected in [
        (program.gradient(point), torch.autograd.grad(problem.objective(y, x).sum(), y)[0][0]),
        (program.value(point), problem.constraints.value(y, x)[0]),
        (program.jacobian(point), problem.constraints.jacobian(y, x).reshape(-1, 10)),
    ]:
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_kkt_residual_has_a_closed_form() -> None:
    """min 1/2 |y|^2 - 2 y_1 over y_1 <= 1: the multiplier is 2 - y_1, and (1 - e, d) leaves d, or e (1 + e)."""
    program = Structured(np.ones(2), np.array([-2.0, 0.0]), np.zeros(2), (QuadraticRows(np.array([[1.0, 0.0]])),))
    lower, upper = np.array([-np.inf]), np.array([1.0])
    assert program.kkt_residual(np.array([1.0, 0.0]), lower, upper) == 0
    assert program.kkt_residual(np.array([1.0, 1e-3]), lower, upper) == pytest.approx(1e-3)
    assert program.kkt_residual(np.array([1 - 1e-5, 0.0]), lower, upper) == pytest.approx(1e-5, rel=1e-4)
    assert program.kkt_residual(np.array([0.0, 0.0]), lower, upper) == pytest.approx(1.0)  # grad (-2, 0), scale 2
    wrong_side = program.kkt_residual(np.array([1.0, 0.0]), np.array([1.0]), np.array([np.inf]))
    assert wrong_side == pytest.approx(1.0)  # y_1 >= 1 does not hold it back
    assert program.kkt_residual(np.array([np.nan, 0.0]), lower, upper) == np.inf


def test_a_perturbed_solution_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along the equalities, so that it stays feasible: only the KKT residual can tell."""
    problem = sn.problems.load("qcqp", **{**SMALL, "inequalities": 1})
    A = problem.constraints.parts[1].A
    null = torch.linalg.svd(A).Vh[4:].sum(0).numpy()
    solver = ENGINES["ipopt"].__call__
    inward = problem.constraints.parts[0].G[0].numpy() @ null
    shift = -1e-4 * np.sign(inward) * null
    monkeypatch.setattr(ENGINES["ipopt"], "__call__", lambda self, *instance: solver(self, *instance) + shift)
    with pytest.warns(UserWarning, match="9 of 9 instances have no reference solution"):
        result = here(problem)
    assert result.objective.isnan().all()
    assert (result.violation < 1e-8).all()
    assert (result.kkt > 1e-6).all()


@pytest.mark.parametrize("engine", CONVEX)
def test_an_infeasible_instance_is_marked_and_spoils_no_other(engine: str) -> None:
    """|y_j| <= 1 and sum y = x has no solution for x = 100."""
    x = torch.tensor([[0.5], [100.0], [-1.0]], dtype=torch.float64)
    problem = Simple(sn.Box(-1.0, torch.ones(4)) & sn.Linear(torch.ones(1, 4), equals=lambda x: x), torch.zeros(4), x)
    problem.double()
    with pytest.warns(UserWarning, match="1 of 3 instances have no reference solution"):
        result = here(problem, x, engine)
    assert result.ok.tolist() == [True, False, True]
    assert result.objective.isnan().tolist() == [False, True, False]
    assert result.violation[1] > 1
    torch.testing.assert_close(result.value[[0, 2]], (x[[0, 2]] / 4).expand(2, 4), rtol=0, atol=1e-7)


def test_further_starts_find_the_better_optimum() -> None:
    """-1/4 y^2 - 1/10 sin y is concave on [-1.5, 1]: from 0 the way leads down to 1, but the best is -1.5."""

    class Hill(Separable):
        def __init__(self) -> None:
            super().__init__()
            self.size = 1
            self.constraints = sn.Box(torch.tensor([-1.5]).double(), torch.tensor([1.0]).double())
            self.store(np.zeros((2, 1)), square=np.array([-0.5]), sine=np.array([-0.1]))

    problem = Hill()
    for starts, end in ((1, 1.0), (8, -1.5)):
        result = here(problem, problem.inputs, "slsqp", starts=starts)
        expected = -0.25 * end**2 - 0.1 * np.sin(end)
        torch.testing.assert_close(result.objective, torch.full((2,), expected).double(), rtol=0, atol=1e-6)
        assert result.ok.all()


def test_the_first_start_is_the_shortest_solution_of_the_equalities() -> None:
    program = Structured(
        np.ones(3), np.zeros(3), np.zeros(3), (QuadraticRows(np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])),)
    )
    start = program.least_norm(np.array([2.0, -1.0]), np.array([2.0, 1.0]))
    np.testing.assert_allclose(start, [1.0, 1.0, 0.0], atol=1e-14)


# --- work and disk


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of four, and the sizes of those that are solved from now on."""
    sizes: list[int] = []
    solve_chunk = solving.solve_chunk
    monkeypatch.setattr(solving, "CHUNK", 4)
    monkeypatch.setattr(solving, "solve_chunk", lambda task: (sizes.append(len(task.lower)), solve_chunk(task))[1])
    return sizes


def test_results_are_kept_and_not_solved_again(tmp_path: Path, chunks: list[int]) -> None:
    problem, seen = sn.problems.load("nclp", **SMALL), []
    first = here(problem, cache=tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert chunks == [4, 4, 1]
    assert seen == [(4, 9), (8, 9), (9, 9)]
    again = here(problem, cache=str(tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert chunks == [4, 4, 1]
    assert seen[3:] == [(9, 9)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".npz"] * 3


def test_a_change_of_anything_is_solved_anew(tmp_path: Path, chunks: list[int]) -> None:
    x = sn.problems.load("nclp", **SMALL).inputs[:4]
    here(sn.problems.load("nclp", **SMALL), x, cache=tmp_path)
    here(sn.problems.load("nclp", **SMALL, seed=1), x, cache=tmp_path)
    here(sn.problems.load("nclp", **SMALL), x, "slsqp", cache=tmp_path)
    here(sn.problems.load("nclp", **SMALL), x + 1e-3, cache=tmp_path)
    here(sn.problems.load("nclp", **SMALL), x, cache=tmp_path, starts=2)
    here(sn.problems.load("nclp", **SMALL), x, cache=tmp_path, starts=2, seed=1)
    assert len(chunks) == 6
    here(sn.problems.load("nclp", **SMALL), x, cache=tmp_path, seed=1)  # one start draws nothing
    assert len(chunks) == 6


def test_functions_are_told_apart_by_their_values(tmp_path: Path, chunks: list[int]) -> None:
    class Farther(Ring):
        def objective(self, y: Tensor, x: Tensor) -> Tensor:
            return (y + x).square().sum(1)

    for kind in (Ring, Farther, Ring):
        problem = kind()
        here(problem, problem.inputs[1:4], "slsqp", cache=tmp_path, starts=3)
    assert chunks == [3, 3]


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, chunks: list[int]) -> None:
    problem = sn.problems.load("nclp", **SMALL)

    def stop(done: int, total: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        here(problem, cache=tmp_path, progress=stop)
    assert len(list(tmp_path.iterdir())) == 2
    result = here(problem, cache=tmp_path)
    assert chunks == [4, 4, 1]
    assert torch.equal(result.value, here(problem).value)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "pickle", "other shape", "other names"])
def test_a_damaged_file_is_solved_again(tmp_path: Path, chunks: list[int], damage: str) -> None:
    problem = sn.problems.load("nclp", **SMALL)
    x = problem.inputs[:4]
    first = here(problem, x, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    if damage == "pickle":
        np.savez(file, value=np.array([None]), kkt=np.zeros(4), seconds=np.zeros(4))
    elif damage == "other shape":
        np.savez(file, value=np.zeros((3, 10)), kkt=np.zeros(4), seconds=np.zeros(4))
    elif damage == "other names":
        np.savez(file, y=np.zeros((4, 10)))
    else:
        file.write_bytes({"truncated": file.read_bytes()[:-200], "empty": b"", "text": b"hello"}[damage])
    assert torch.equal(here(problem, x, cache=tmp_path).value, first.value)
    assert chunks == [4, 4]
    here(problem, x, cache=tmp_path)
    assert chunks == [4, 4]


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, chunks: list[int]) -> None:
    """A file in its place refuses even the superuser."""
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="reference solutions are not kept in") as caught:
        result = here(sn.problems.load("nclp", **SMALL), cache=tmp_path / "file" / "cache")
    assert len(caught) == 1
    assert result.ok.all()


def test_a_full_disk_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        assert here(sn.problems.load("nclp", **SMALL), cache=tmp_path).ok.all()
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path))
    here(sn.problems.load("nclp", **SMALL), cache=None)
    assert len(list((tmp_path / "reference").glob("*.npz"))) == 1
    monkeypatch.delenv("SNARENET_CACHE")
    assert Store.default() == Path.home() / ".cache" / "snarenet" / "reference"


def test_two_processes_give_the_same(tmp_path: Path) -> None:
    problem = sn.problems.load("qcqp", **{**SMALL, "instances": 1200})
    x = problem.split("test")
    assert len(x) > solving.CHUNK  # more than one chunk, or no process is started
    environment = dict(os.environ)
    pooled, alone = here(problem, x, workers=2, cache=tmp_path), here(problem, x)
    assert torch.equal(pooled.value, alone.value)
    assert pooled.ok.all()
    assert len(list(tmp_path.iterdir())) == 2
    assert dict(os.environ) == environment


def test_the_test_inputs_are_the_default() -> None:
    problem = sn.problems.load("nclp", **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(here(problem).value, here(problem, problem.split("test")).value)
