"""What `explain` says is what a repair does; advice appears where a set could be written better, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation import needs_compiler, use_kernels
from torch import Tensor
from torch.utils._pytree import tree_leaves

import snarenet as sn
from snarenet import native
from snarenet.linalg import Dual, Primal, SparseDual, sparse_normal
from snarenet.repair.choose import choose
from snarenet.repair.engine import Batch, Engine
from snarenet.repair.gpu.curved import CurvedKernels
from snarenet.repair.gpu.linear import LinearKernels
from snarenet.repair.loop import ConstraintSpace, Loop, OutputSpace
from snarenet.repair.options import Options
from snarenet.testing import draw

SIZE = 80
FULL = draw(SIZE, SIZE, seed=1)


def chain(y: Tensor, x: Any) -> Tensor:
    """Each variable with the next: two entries a row."""
    return y[:, :-1] * y[:, 1:] + y[:, 1:].sin()


def wave(**options: Any) -> sn.Nonlinear:
    return sn.Nonlinear(chain, rows=SIZE - 1, upper=0.5, **options)


def full(y: Tensor, x: Any) -> Tensor:
    """Every variable in every row."""
    return (y @ FULL[:8, : y.shape[1]].T).sin()


def family(name: str, **sizes: int) -> tuple[sn.Constraints, Tensor, Tensor]:
    problem = sn.problems.load(name, **sizes)
    return problem.constraints, draw(5, problem.size), problem.inputs[:5]


def made(constraints: sn.Constraints, size: int = SIZE) -> tuple[sn.Constraints, Tensor, None]:
    return constraints, draw(5, size, scale=2), None


CG = {"solver": sn.ConjugateGradients()}
SETS: dict[str, tuple[Callable[[], tuple[sn.Constraints, Tensor, Any]], dict[str, Any]]] = {
    "nclp": (lambda: family("nclp"), {}),
    "nclp, active rows": (lambda: family("nclp"), {"rows": "active"}),
    "nclp, nearest": (lambda: family("nclp"), {"start": sn.Nearest(20)}),
    "qcqp": (lambda: family("qcqp"), {}),
    "qcqp, nearest": (lambda: family("qcqp"), {"start": sn.Nearest(20)}),
    "ncqcqp": (lambda: family("ncqcqp"), {"rescue": True}),
    "cbf": (lambda: family("cbf"), {}),
    "simplex": (lambda: made(sn.Box(0.0, 1.0) & sn.Linear(torch.ones(1, 6), equals=1.0), 6), {}),
    "box": (lambda: made(sn.Box(0.0, 1.0)), {}),
    "pattern": (lambda: made(wave()), {}),
    "pattern in a box": (lambda: made(sn.Box(-1.0, 1.0) & wave()), {}),
    "function": (lambda: made(sn.Nonlinear(full, rows=8, upper=0.5)), {}),
    "more rows than variables": (lambda: made(sn.Nonlinear(full, rows=8, upper=0.5), 5), {}),
    "full H": (lambda: made(sn.Quadratic(draw(2, 6, 6), upper=1.0), 6), {}),
    "matrix-free": (lambda: made(wave()), CG),
}


def ran_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Engine, Batch]]:
    """The engines that run from now on, with their batches."""
    ran: list[tuple[Engine, Batch]] = []
    for kind in (Loop, LinearKernels, CurvedKernels):

        def noted(self: Engine, batch: Batch, taped: bool, run: Any = kind.run) -> Any:
            ran.append((self, batch))
            return run(self, batch, taped)

        monkeypatch.setattr(kind, "run", noted)
    return ran


def words(engine: Engine, y: Tensor) -> tuple[str, str]:
    """What an explanation must say of an engine and of its systems."""
    if isinstance(engine, CurvedKernels):
        return "CUDA kernels on y", ": the variables" if engine.rows.primal else ": the rows in use"
    if isinstance(engine, LinearKernels):
        return "CUDA kernels on z = A y", "one spectrum"
    assert isinstance(engine, Loop)
    if isinstance(engine.space, ConstraintSpace):
        return "plain loop on z = A y", "one spectrum"
    assert isinstance(engine.space, OutputSpace)
    system = engine.space.system(y, torch.ones(len(y), engine.space.scales().shape[1], dtype=torch.bool), 1.0)
    if isinstance(system, SparseDual):
        return "plain loop on y", "sparse Cholesky"
    if isinstance(system, Primal):
        return "plain loop on y", "more rows than variables"
    assert isinstance(system, Dual)
    if system.krylov is not None:
        return "plain loop on y", "conjugate gradients"
    return "plain loop on y", "dense Cholesky" if system.linear.map.rows else "none"


def check(explanation: sn.Explanation, ran: list[tuple[Engine, Batch]]) -> None:
    engine, batch = ran[0]
    name, system = words(engine, batch.y.detach())
    assert explanation.engine.startswith(name)
    assert system in explanation.system
    assert explanation.memory == engine.describe(batch).nbytes
    assert (", each sample at its own pace" in explanation.damping) == engine.paced


@pytest.mark.parametrize("name", SETS)
def test_the_engine_that_ran(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, options = SETS[name]
    constraints, y, x = build()
    options = {"start": None, **options}
    explanation = sn.explain(constraints, y, x, **options)
    ran = ran_for(monkeypatch)
    sn.repair(constraints, y, x, **options)
    if options["start"] is None:  # else it begins elsewhere, with other rows in use
        check(explanation, ran)
    assert explanation.advice == ()
    assert explanation.rows == ran[0][1].lower.shape[1]
    assert len(str(explanation).splitlines()) <= 15


@needs_compiler
@pytest.mark.parametrize(
    ("name", "sizes", "options", "system"),
    [
        ("nclp", {}, {}, ""),
        ("qcqp", {}, {}, "50 x 50 a sample at most: the rows in use"),
        ("qcqp", {"inequalities": 70}, {"rows": "all", "damping": 0.01}, "100 x 100 a sample: the variables"),
    ],
)
def test_kernels(
    name: str, sizes: dict[str, int], options: dict[str, Any], system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch, "cpu")
    constraints, y, x = family(name, **sizes)
    options |= {"start": None, "max_steps": 3, "rescue": False}
    explanation = sn.explain(constraints, y, x, **options)
    ran = ran_for(monkeypatch)
    sn.repair(constraints, y, x, **options)
    assert not isinstance(ran[0][0], Loop)
    check(explanation, ran)
    assert explanation.system.endswith(system)
    done = "added up beforehand" if "variables" in system else "eliminated"
    assert explanation.engine.endswith(f"50 constant rows {done}") or name == "nclp"


@pytest.mark.parametrize("name", ["qcqp", "simplex", "pattern in a box", "function", "matrix-free"])
def test_the_memory_is_that_of_the_tape(name: str) -> None:
    build, options = SETS[name]
    constraints, y, x = build()
    engine, lower, upper = choose(Options(**options), constraints.memo, constraints.at(y, x), y)
    batch = Batch(y, lower.detach(), upper.detach(), torch.ones(len(y), dtype=torch.bool))
    with torch.no_grad():
        tape: Any = engine.run(batch, taped=True)[1]
    step = tape.steps[0]
    assert step.samples is None
    kept = [step.used, *(leaf for leaf in tree_leaves(step.saved) if leaf is not None)]
    assert sn.explain(constraints, y, x, **options).memory == sum(leaf.nbytes for leaf in kept) / len(y)


def test_numbers_of_a_pattern() -> None:
    constraints = sn.Box(-1.0, 1.0) & wave() & sn.Linear(draw(2, SIZE), equals=0.0)
    found = sn.explain(constraints, draw(5, SIZE))
    assert (found.variables, found.rows, found.equalities, found.box) == (SIZE, SIZE + SIZE - 1 + 2, 2, True)
    box, function, linear = found.parts
    assert (box.kind, box.rows, box.entries, box.colours) == ("Box", SIZE, None, None)
    assert (function.kind, function.entries, function.colours) == ("Nonlinear", 2 * (SIZE - 1), 2)
    assert (linear.equalities, linear.form) == (2, "linear, one matrix")
    assert f"{2 * (SIZE - 1)} of {(SIZE - 1) * SIZE:,} entries of J (2.5 %), detected, 2 colours" in str(found)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_numbers_of_a_sparse_system(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "library", lambda source: None)
    constraints = sn.Box(-1.0, 1.0) & wave()
    found = sn.explain(constraints, draw(5, SIZE))
    pattern = constraints.at(draw(5, SIZE)).map.parts[1].pattern
    assert pattern is not None
    normal = sparse_normal(pattern)
    estimate = normal.estimate
    if compiled:
        assert f"{normal.gram.compiled.entries:,} entries, compiled" in found.system
    else:
        assert f"{estimate.entries:,} entries in {estimate.levels} levels" in found.system
    assert estimate.form in found.system
    assert f"{estimate.sparse:.3g} us" in found.reasons[1]
    assert found.engine.endswith("the box eliminated")


@needs_compiler
def test_whether_derivatives_are_recorded() -> None:
    (part,) = sn.explain(wave(), draw(2, SIZE)).parts
    assert part.jacobian.endswith("2 colours, recorded")
    bent = sn.Nonlinear(lambda y, x: chain(y, x).abs(), rows=SIZE - 1, upper=0.5)
    (part,) = sn.explain(bent, draw(2, SIZE)).parts
    assert part.jacobian.endswith("2 colours, not recorded: `abs`")


def test_a_declared_pattern_and_a_jacobian_of_ones_own() -> None:
    pattern = torch.eye(SIZE - 1, SIZE).bool() | torch.eye(SIZE).bool()[1:]
    (part,) = sn.explain(wave(sparsity=pattern), draw(2, SIZE)).parts
    assert "declared, 2 colours" in part.jacobian
    B = FULL[:8]
    own = sn.Nonlinear(full, rows=8, upper=0.5, jacobian=lambda y, x: (y @ B.T).cos().unsqueeze(2) * B)
    (part,) = sn.explain(own, draw(2, SIZE)).parts
    assert part.jacobian == "dense J, by your `jacobian`"


ADMM, ACTIVE_SET = "iterations of ADMM: all rows are linear", "iterations of an active-set method: all Hessians are"
MORE = "iterations of ADMM, more where these do not settle: all rows are linear"


@pytest.mark.parametrize(
    ("name", "text", "auto"),
    [
        ("nclp", f"near the projection onto all rows, by 20 {ADMM}", f", by 35 {MORE}"),
        ("qcqp", f"at the projection onto all rows, by up to 20 {ACTIVE_SET}", f", by up to 26 {ACTIVE_SET}"),
        ("function", "at the projection onto all rows, by up to 20 interior-point steps", "up to 20 int"),
        ("matrix-free", "at the prediction: without matrices", "at the prediction: a projection needs matrices"),
    ],
)
def test_the_start(name: str, text: str, auto: str) -> None:
    build, options = SETS[name]
    constraints, y, x = build()
    assert sn.explain(constraints, y, x, **{**options, "start": sn.Nearest(20)}).start.startswith(text)
    assert auto in sn.explain(constraints, y, x, **options).start
    assert sn.explain(constraints, y, x, **{**options, "start": None}).start == "at the prediction"


def test_the_start_beside_functions() -> None:
    y = draw(3, SIZE)
    mixed = sn.Linear(draw(2, SIZE), upper=0.0) & wave()
    assert sn.explain(mixed, y, start=sn.Nearest(5)).start.startswith("at the projection onto all rows, by up to 5")
    assert "2 constant rows of 81" in sn.explain(mixed, y, start=sn.Nearest(5), **CG).start
    assert sn.explain(wave(), y, start=sn.Nearest(5), **CG).start.startswith("at the prediction: without matrices")


def test_why() -> None:
    rows = draw(3, 6)
    y = draw(4, 6)
    curved = sn.Quadratic(draw(1, 6).abs(), upper=1.0)
    told = {
        "rows='active' was asked for": sn.explain(sn.Linear(rows, upper=1.0), y, rows="active"),
        "constant rows are dependent": sn.explain(sn.Linear(torch.cat([rows, rows.sum(0)[None]]), upper=1.0), y),
        "a box is eliminated": sn.explain(sn.Box(0.0, 1.0) & sn.Linear(rows, upper=1.0), y),
        "not all rows are linear": sn.explain(curved & sn.Linear(rows, upper=1.0), y),
        "a solver without matrices": sn.explain(curved, y, **CG),
        "all rows are linear with one matrix": sn.explain(sn.Linear(rows, upper=1.0), y),
    }
    for reason, found in told.items():
        assert found.reasons[0].startswith(reason)
    assert told["not all rows are linear"].reasons[1] == "a sparse factor would take longer"
    dense = sn.explain(wave(sparsity=None) & curved_sphere(), draw(4, SIZE))
    assert dense.reasons[1] == "some rows have no known pattern"


def curved_sphere() -> sn.Constraints:
    return sn.Quadratic(torch.ones(1, SIZE), upper=1.0)


def test_rescue() -> None:
    y = draw(3, SIZE)
    assert sn.explain(wave(), y).rescue == "none"
    assert sn.SnareLayer(wave()).explain(y).rescue == "up to 8 more attempts"
    assert sn.SnareLayer(wave(), rescue="first").explain(y).rescue == "up to 1 more attempt"
    assert sn.SnareLayer(sn.Linear(draw(2, SIZE), upper=0.0)).explain(y).rescue == "up to 2 more attempts"
    with pytest.raises(ValueError, match="`rescue` must be True, False or 'first', but got 'second'"):
        sn.SnareLayer(wave(), rescue="second")  # pyright: ignore[reportArgumentType]


A = draw(3, SIZE, seed=8)
ADVICE: dict[str, tuple[sn.Constraints, str, sn.Constraints]] = {
    "linear": (
        sn.Nonlinear(lambda y, x: y @ A.T, rows=3, upper=0.5),
        "3 of 3 rows are linear in y: as Linear they need",
        sn.Linear(A, upper=0.5),
    ),
    "some linear rows": (
        sn.Nonlinear(lambda y, x: torch.cat([full(y, x), y @ A.T], 1), rows=11, upper=0.5),
        "3 of 11 rows are linear in y",
        sn.Nonlinear(full, rows=8, upper=0.5) & sn.Linear(A, upper=0.5),
    ),
    "box": (
        sn.Nonlinear(lambda y, x: 3 * y[:, :5], rows=5, upper=0.5),
        "5 of 5 rows are one variable times a number: as a Box",
        sn.Box(None, 0.5 / 3),
    ),
    "box as rows": (
        sn.Linear(torch.eye(SIZE)[:7], upper=0.5) & wave(),
        "Linear (part 0): 7 of 7 rows are one variable",
        sn.Box(None, 0.5) & wave(),
    ),
    "diagonal Hessians": (
        sn.Nonlinear(lambda y, x: y.square() @ A.T + y[:, :1], rows=3, upper=0.5),
        "3 of 3 rows are quadratic with diagonal Hessians",
        sn.Quadratic(A, upper=0.5),
    ),
    "diagonal H written out": (
        sn.Quadratic(torch.diag_embed(A), upper=0.5),
        "all Hessians are diagonal",
        sn.Quadratic(A, upper=0.5),
    ),
    "norm": (
        sn.Nonlinear(lambda y, x: y[:, 1:].norm(dim=1, keepdim=True) - y[:, :1], rows=1, upper=0.0),
        "1 of 1 rows is kinked at y = 0",
        sn.Quadratic(torch.ones(1, SIZE), upper=1.0),
    ),
    "sparsity=None": (wave(sparsity=None), "sparsity='auto' has them in 2 passes, not 79", wave()),
    "dense passes": (
        sn.Nonlinear(lambda y, x: (y @ FULL).sin(), rows=SIZE, upper=0.5),
        "takes 80 passes through fn at every step; `jacobian=`",
        wave(),
    ),
    "two sides": (
        sn.Linear(A, upper=0.5) & sn.Linear(-A, upper=0.5),
        "3 of 6 constant rows are multiples",
        sn.Linear(A, lower=-0.5, upper=0.5),
    ),
    "two boxes": (
        sn.Box(0.0, None) & sn.Box(None, 1.0) & wave(),
        "2 boxes: only the first",
        sn.Box(0.0, 1.0) & wave(),
    ),
    "one matrix a sample": (
        sn.Linear(A.expand(5, -1, -1).clone(), upper=0.5),
        "A is the same for all samples",
        sn.Linear(A, upper=0.5),
    ),
    "lengths": (
        sn.Linear(torch.tensor([[1e-5], [1e5], [1.0]]) * A, upper=0.5),
        "and `tol` counts in each row's own units",
        sn.Linear(A, upper=0.5),
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice(name: str) -> None:
    """The sentence is there, alone; a set that follows it gets none."""
    constraints, text, better = ADVICE[name]
    y = draw(5, SIZE, scale=2)
    (sentence,) = sn.explain(constraints, y).advice
    assert text in sentence
    assert f"- {sentence}" in str(sn.explain(constraints, y))
    assert sn.explain(better, y).advice == ()


def test_a_sparse_jacobian_given_as_a_dense_one() -> None:
    def jacobian(y: Tensor, x: Any) -> Tensor:
        J, i = y.new_zeros(len(y), SIZE - 1, SIZE), torch.arange(SIZE - 1)
        J[:, i, i], J[:, i, i + 1] = y[:, 1:], y[:, :-1] + y[:, 1:].cos()
        return J

    (sentence,) = sn.explain(wave(jacobian=jacobian), draw(3, SIZE)).advice
    assert "158 of the 6,320 entries of J are nonzero: return your `jacobian` in a sparse layout" in sentence


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda y: y.exp(), None),  # overflows far away
        (lambda y: y.square() * y, None),
        (lambda y: y[:, :1] * y[:, 1:2], None),  # quadratic, not diagonal
        (lambda y: torch.where(y > 1e3, y.sin(), y), "one variable times a number"),  # nobody looks that far
        (lambda y: y.abs(), "kinked"),
        (lambda y: y.relu(), "kinked"),
        (lambda y: (y - 1).abs(), None),
        (lambda y: y[:, :1] * 0 + 1.0, "1 of 1 rows is without a derivative"),  # depends on nothing
        (lambda y: y.detach(), "6 of 6 rows are without a derivative"),
        (lambda y: (1e6 * y).tanh(), "without a derivative"),
    ],
    ids=["exp", "cubic", "product", "far branch", "abs", "relu", "shifted abs", "constant", "detached", "saturated"],
)
def test_what_rows_are_not(fn: Callable[[Tensor], Tensor], text: str | None) -> None:
    y = draw(4, 6)
    rows = fn(y).shape[1]
    advice = sn.explain(sn.Nonlinear(lambda y, x: fn(y), rows=rows, upper=0.5), y).advice
    assert len(advice) == (text is not None)
    assert text is None or text in advice[0]


@pytest.mark.parametrize(
    ("fn", "where"),
    [
        (lambda y: y * y.abs().pow(0.852), "y = 0"),
        (lambda y: (y.square() + y.roll(1, 1).square()).sqrt(), "y = 0"),
        (lambda y: (y.square() + y.roll(1, 1).square() - 1).relu().sqrt(), "some of these y"),
        (lambda y: y * y.abs().clamp(min=1e-9).pow(0.852), None),
        (lambda y: y[:, :2].norm(dim=1, keepdim=True), None),
        (lambda y: y.exp().log(), None),
        (lambda y: y.reciprocal(), None),  # no value at 0, either
    ],
    ids=["power", "root", "root of a branch", "clamped power", "norm", "log", "reciprocal"],
)
def test_where_rows_have_no_derivative(fn: Callable[[Tensor], Tensor], where: str | None) -> None:
    y = 0.1 * draw(4, 6)
    rows = fn(y).shape[1]
    advice = sn.explain(sn.Nonlinear(lambda y, x: fn(y), rows=rows, upper=0.5), y).advice
    said = [sentence for sentence in advice if "without a finite derivative" in sentence]
    assert len(said) == (where is not None)
    assert where is None or f"{rows} of {rows} rows are without a finite derivative at {where}" in said[0]


def test_a_matrix_that_depends_on_x() -> None:
    constraints = sn.Nonlinear(lambda y, x: (y * x).sum(1, keepdim=True), rows=1, upper=0.5)
    (sentence,) = sn.explain(constraints, draw(4, 6), draw(4, 6, seed=1)).advice
    assert "as Linear(lambda x: ...)" in sentence


def test_a_box_that_would_not_be_eliminated_is_not_advised() -> None:
    rows = sn.Linear(draw(20, 6), upper=1.0) & sn.Linear(torch.eye(6), upper=2.0)
    assert sn.explain(rows, draw(3, 6)).advice == ()


def test_looking_changes_nothing() -> None:
    """Far away the function has entries that no prediction meets: they are not learned, and nobody is warned."""

    def fn(y: Tensor, x: Any) -> Tensor:
        return chain(y, x) + torch.where(y[:, :1] > 6, y.sum(1, keepdim=True), 0.0)

    y = draw(5, SIZE, scale=0.01)
    fresh, explained = (sn.Nonlinear(fn, rows=SIZE - 1, upper=-0.01) for _ in range(2))
    found = sn.explain(explained, y)
    assert found.parts[0].entries == 2 * (SIZE - 1)
    assert explained.at(y).map.pattern == fresh.at(y).map.pattern
    assert torch.equal(sn.repair(explained, y).value, sn.repair(fresh, y).value)


def test_one_prediction() -> None:
    constraints = sn.Linear(A, equals=lambda x: x)
    batch = sn.explain(constraints, draw(1, SIZE), draw(1, 3))
    assert sn.explain(constraints, draw(1, SIZE)[0], draw(1, 3)[0]) == batch
    assert batch.equalities == 3


def test_without_predictions() -> None:
    complete = sn.explain(sn.Linear(A, upper=0.5))
    assert complete.system.startswith("one spectrum")
    with_x = sn.explain(sn.Linear(A, upper=lambda x: x), x=draw(4, 3))
    assert with_x.engine == complete.engine
    needs_x = sn.explain(sn.Linear(A, upper=lambda x: x))
    assert (needs_x.variables, needs_x.rows, needs_x.engine) == (SIZE, 3, "known with y and x: give them as well")
    needs_y = sn.explain(sn.Box(0.0, 1.0) & wave())
    assert (needs_y.variables, needs_y.rows, needs_y.box) == (None, None, True)
    assert str(needs_y).startswith("? variables, ? rows\n  Box: ? rows\n  Nonlinear: 79 rows\n")


def test_learned_rows_are_not_constant() -> None:
    linear = sn.Linear(torch.nn.Parameter(A.float()), upper=0.5)
    found = sn.explain(linear, draw(3, SIZE))
    assert found.parts[0].form == "linear, a matrix a sample"
    assert found.engine == "plain loop on y"


def test_errors() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        sn.explain(wave(), draw(0, SIZE))
    with pytest.raises(TypeError, match="dampening"):
        sn.explain(wave(), draw(2, SIZE), dampening=1.0)
    with pytest.raises(ValueError, match=r"shape \(B, 80\)"):
        sn.explain(sn.Linear(A, upper=0.5), draw(2, 7))


def test_layers() -> None:
    y = draw(4, SIZE)
    layer = sn.SnareLayer(wave(), damping=0.1, solver=sn.ConjugateGradients())
    assert layer.explain(y) == sn.explain(wave(), y, damping=0.1, rescue=True, **CG)
    assert layer.explain(y).damping == "Constant(value=0.1, relative=False)"
    other = sn.layers.SoftLayer(sn.Linear(A, upper=0.5)).explain(y)
    assert other.engine.startswith("Soft")
    assert other.rows == 3


def test_many_parts_have_few_lines() -> None:
    constraints = sn.Stack(*(sn.Quadratic(draw(1, 6, seed=k).abs(), upper=1.0) for k in range(9)))
    told = str(sn.explain(constraints, draw(2, 6))).splitlines()
    assert told[5] == "  and 5 more"
    assert len(told) <= 15
