"""GPU kernels against the plain loop: values, gradients, status and steps must be the same.

On a CPU the kernels are emulated, see emulation.h; with `-m gpu` they run on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from emulation import cache, emulate, needs_compiler, on_devices, use_kernels
from torch import Tensor

import snarenet as sn
from snarenet.damping import as_damping
from snarenet.linalg import Spectrum
from snarenet.repair import scale
from snarenet.repair.choose import choose
from snarenet.repair.engine import Batch
from snarenet.repair.gpu import blocks, curved, launching, nvrtc
from snarenet.repair.gpu import rows as packing
from snarenet.repair.options import Options
from snarenet.testing import assert_equal, draw

BATCH = 7  # not a multiple of a block's samples
Build = Callable[[], sn.Constraints]
_FORTH, _BACK = ("forward", "settle"), ("backward", "pull")  # names of kernels begin so


def polytope(rows: int = 10) -> sn.Constraints:
    """Inequalities from both sides, one of them without bounds, and four equalities in x; twice as many variables."""
    A = draw(rows, 2 * rows, seed=1)
    lower = torch.linspace(-2, -0.2, rows, dtype=A.dtype)
    lower[0] = -torch.inf
    upper = lower + 1.5
    upper[0] = torch.inf
    return sn.Linear(A, lower, upper) & sn.Linear(draw(4, 2 * rows, seed=2), equals=lambda x: x)


def curved_set(rows: int = 10, size: int = 14) -> sn.Constraints:
    """Quadratic rows, one of them with a vanishing gradient at the origin, linear ones from below, and equalities."""
    H, G = draw(rows, size, seed=1).abs() / 4, draw(rows, size, seed=2)
    G[0] = 0
    below = sn.Linear(draw(2, size, seed=3), lower=-1.0)
    return sn.Quadratic(H, G, upper=1.0) & below & sn.Linear(draw(4, size, seed=4), equals=lambda x: x)


def without_equalities() -> sn.Constraints:
    return sn.Quadratic(draw(5, 20, seed=1).abs(), draw(5, 20, seed=2), -3.0, 1.0) & sn.Linear(
        draw(5, 20, seed=3), upper=lambda x: x[:, :1].expand(-1, 5)
    )


def cornered() -> sn.Constraints:
    """Ellipsoids, a plane and a box: from far away, a search has to begin anew."""
    ellipsoids = sn.Quadratic(0.2 + draw(4, 8, seed=3).abs(), draw(4, 8, seed=4), upper=2.0)
    return ellipsoids & sn.Linear(draw(2, 8, seed=5), equals=lambda x: x[:, :2]) & sn.Box(-0.8, 0.9)


def crowded() -> sn.Constraints:
    """Twice as many rows as variables, beside equalities."""
    return curved_set(20, 10)


def boxed() -> sn.Constraints:
    """A box beside more rows than variables."""
    H, G = 0.2 + draw(9, 8, seed=3).abs(), draw(9, 8, seed=4)
    return sn.Quadratic(H, G, upper=lambda x: 2 + x[:, :1].expand(-1, 9)) & sn.Box(-0.8, 0.9)


def repaired(build: Build, device: str, bad: bool = False, **options: object) -> tuple[sn.Solution, list[Tensor]]:
    """Solution and gradients in y, x."""
    constraints = build().to(device)
    y, x = draw(BATCH, constraints.size or 0, seed=3, scale=2).to(device), draw(BATCH, 4, seed=4, scale=0.3).to(device)
    if bad:
        y[3, 2], y[5, 0] = torch.nan, torch.inf
    y.requires_grad_()
    x.requires_grad_()
    solution = sn.repair(constraints, y, x, **options)
    value = torch.where(solution.value.isfinite(), solution.value, 0.0)
    weights = draw(*value.shape, seed=9).to(device)
    return solution, list(torch.autograd.grad((weights * value).sum(), [y, x]))


def assert_agree(
    monkeypatch: pytest.MonkeyPatch, build: Build, device: str, close: float = 1e-9, **options: object
) -> sn.Solution:
    """Repair with kernels and without; the solution of the kernels, if they ran each way and both agree."""
    found, options = [], {"start": None} | options
    for on in (True, False):
        with monkeypatch.context() as patch:
            ran = use_kernels(patch, device, on)
            found.append(repaired(build, device, **options))
            forth, back = (any(name.startswith(kind) for name in ran) for kind in (_FORTH, _BACK))
            assert forth is back is on
            assert any(name.startswith("approach") for name in ran) is (on and options["start"] is not None)
    (mine, my_gradients), (theirs, their_gradients) = found
    assert torch.equal(mine.status, theirs.status)
    assert torch.equal(mine.steps, theirs.steps)
    good = theirs.value.isfinite().all(1)
    assert_equal(mine.value[good], theirs.value[good], close)
    for g, h in zip(my_gradients, their_gradients, strict=True):
        assert h.abs().max() > 0
        assert_equal(g, h, 10 * close)
    return mine


@on_devices
@pytest.mark.parametrize("most_rows", [blocks.MOST_ROWS, 0], ids=["at once", "step by step"])
class TestLinear:
    @pytest.mark.parametrize("damping", [0.01, 0.0, sn.Annealed(), sn.Annealed(floor=0.1)], ids=str)
    @pytest.mark.parametrize("bad", [False, True])
    def test_equal_to_the_loop(self, monkeypatch, device: str, most_rows: int, damping, bad: bool) -> None:
        monkeypatch.setattr(blocks, "MOST_ROWS", most_rows)
        solution = assert_agree(monkeypatch, polytope, device, damping=damping, rows="all", bad=bad)
        assert bool((solution.steps > (damping != 0)).any())

    def test_too_few_steps(self, monkeypatch, device: str, most_rows: int) -> None:
        monkeypatch.setattr(blocks, "MOST_ROWS", most_rows)
        solution = assert_agree(monkeypatch, polytope, device, damping=0.1, rows="all", max_steps=3)
        assert (solution.status == int(sn.Status.MAX_STEPS)).any()

    def test_without_gradients(self, monkeypatch, device: str, most_rows: int) -> None:
        monkeypatch.setattr(blocks, "MOST_ROWS", most_rows)
        use_kernels(monkeypatch, device)
        constraints = polytope().to(device)
        y, x = draw(BATCH, 20, seed=3, scale=3).to(device), draw(BATCH, 4, seed=4).to(device)
        with torch.no_grad():
            plain = sn.repair(constraints, y, x)
        assert_equal(plain.value, sn.repair(constraints, y.requires_grad_(), x).value, 1e-12)


@on_devices
@pytest.mark.parametrize("count", [2, 4, 7], ids=["four a block", "two a block", "one a block"])
def test_samples_of_a_block(monkeypatch, device: str, count: int) -> None:
    monkeypatch.setattr(blocks, "_BLOCKS", count)
    assert assert_agree(monkeypatch, polytope, device).converged.all()
    assert assert_agree(monkeypatch, polytope, device, start=sn.Nearest(6)).converged.all()


@on_devices
@pytest.mark.parametrize("rows", [2, 31, 32, 33, 124, 140])
def test_any_number_of_rows(monkeypatch, device: str, rows: int) -> None:
    if device == "cpu" and rows > 40:
        pytest.skip("slow when emulated")
    solution = assert_agree(monkeypatch, lambda: polytope(rows), device, rows="all")
    assert solution.converged.all() or rows == 2  # six rows in four variables
    assert solution.steps.min() > 0


@on_devices
@pytest.mark.parametrize("iterations", [1, 25])
def test_nearest(monkeypatch, device: str, iterations: int) -> None:
    solution = assert_agree(monkeypatch, polytope, device, start=sn.Nearest(iterations), damping=sn.Annealed(1e-3, 0.1))
    assert solution.converged.all()


@on_devices
class TestProjection:
    """`search` against the plain search, each with its gradient."""

    # the least number of samples, of seven, that are found within 12 and 50 iterations
    @pytest.mark.parametrize(
        ("build", "least"), [(curved_set, (7, 7)), (without_equalities, (1, 2)), (cornered, (1, 7))]
    )
    @pytest.mark.parametrize("iterations", [3, 12, 50])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_equal_to_the_plain_one(
        self, monkeypatch, device: str, build: Build, least: tuple[int, int], iterations: int, weighted: bool
    ) -> None:
        found, n = [], build().size
        weights = torch.linspace(1, 3, n, dtype=torch.float64, device=device) if weighted else None
        for on in (True, False):
            with monkeypatch.context() as patch:
                ran = use_kernels(patch, device, on)
                found.append(repaired(build, device, start=sn.Nearest(iterations), weights=weights, max_steps=0))
                assert ("search" in ran) is on
        (mine, my_gradients), (theirs, their_gradients) = found
        assert_equal(mine.value, theirs.value, 1e-8)
        for g, h in zip(my_gradients, their_gradients, strict=True):
            assert_equal(g, h, 1e-6)
        there = [(solution.value != solution.raw).any(1) for solution in (mine, theirs)]
        assert torch.equal(*there)
        assert mine.violation[there[0]].max() < 1e-9 if iterations > 3 else not there[0].any()  # too few to find any
        assert there[0].sum() >= {12: least[0], 50: least[1]}.get(iterations, 0)

    @pytest.mark.parametrize("most", [None, 13])
    def test_little_memory(self, monkeypatch, device: str, most: int | None) -> None:
        """Samples with more rows in use than two blocks have room for get a block of their own, if that is enough."""
        found = []
        for little in (True, False):
            with monkeypatch.context() as patch:
                ran = use_kernels(patch, device)
                if little:
                    patch.setattr(packing, "room", lambda rows, y, blocks: 12 if blocks == 2 else most or rows.kept)
                found.append(repaired(curved_set, device, start=sn.Nearest(12), max_steps=0))
                assert ran.count("search") == (2 if little else 1)
        (mine, my_gradients), (theirs, their_gradients) = found
        there = (mine.value != mine.raw).any(1) if most else torch.ones_like(mine.converged)
        assert 0 < there.sum() < len(there) or not most
        assert_equal(mine.value[there], theirs.value[there], 1e-12)
        assert torch.equal(mine.value[~there], mine.raw[~there])  # as they were
        assert_equal(my_gradients[0][there], their_gradients[0][there], 1e-12)

    def test_room(self, monkeypatch, device: str) -> None:
        y, need = torch.zeros(1, 8, dtype=torch.float64, device=device), tuple(range(5000, 7100, 100))
        rows = packing.PackedRows(y, 8, 20, 0, 0, (need, need))
        for memory, whole, half in ((need[20], 20, 0), (2 * need[5] + 1024, 10, 5), (need[0] - 1, 0, 0)):
            monkeypatch.setattr(launching, "most_shared", lambda tensor, memory=memory: memory)
            assert packing.room(rows, y, 2) == half
            assert packing.room(rows, y, 1) >= whole


@on_devices
class TestCurved:
    @pytest.mark.parametrize("build", [curved_set, without_equalities])
    @pytest.mark.parametrize("rows", ["active", "all"])
    @pytest.mark.parametrize("damping", [sn.Annealed(), sn.Annealed(floor=0.1), 0.1], ids=str)
    def test_equal_to_the_loop(self, monkeypatch, device: str, build: Build, rows: str, damping) -> None:
        # all rows far from feasibility magnify rounding at every step: a few, and a tol of 0 that asks for just these
        steps, tol = (40, 1e-8) if rows == "active" else (12, 0.0)
        solution = assert_agree(monkeypatch, build, device, 1e-8, rows=rows, damping=damping, max_steps=steps, tol=tol)
        assert bool((solution.steps > 3).any())

    def test_non_finite_predictions(self, monkeypatch, device: str) -> None:
        solution = assert_agree(monkeypatch, curved_set, device, bad=True)
        assert solution.status[[3, 5]].tolist() == [int(sn.Status.NONFINITE)] * 2

    def test_relaxed(self, monkeypatch, device: str) -> None:
        solution = assert_agree(monkeypatch, lambda: curved_set(4), device, relax=0.2)  # no equality to eliminate
        assert solution.converged.all()

    def test_stages(self, monkeypatch, device: str) -> None:
        monkeypatch.setattr(curved, "_STAGE", 4)
        solution = assert_agree(monkeypatch, curved_set, device)
        assert solution.steps.max() > 8  # so there are three stages at least

    def test_too_few_steps(self, monkeypatch, device: str) -> None:
        solution = assert_agree(monkeypatch, curved_set, device, max_steps=3)
        assert (solution.status == int(sn.Status.MAX_STEPS)).any()

    def test_infeasible(self, monkeypatch, device: str) -> None:
        def build() -> sn.Constraints:
            row = draw(1, 6, seed=1)
            return sn.Quadratic(draw(2, 6, seed=2).abs(), draw(2, 6, seed=3), upper=5.0) & sn.Linear(
                torch.cat([row, -row]), upper=-1.0
            )

        depends = sn.Linear(draw(1, 6, seed=4), upper=lambda x: x[:, :1])
        solution = assert_agree(monkeypatch, lambda: build() & depends, device)
        assert (solution.status == int(sn.Status.STALLED)).any()

    def test_a_vanishing_row(self, monkeypatch, device: str) -> None:
        """At the origin the first row has no length, and gets a share of the mean."""

        def gradients() -> tuple[Tensor, ...]:
            y = torch.zeros(2, 14, dtype=torch.float64, device=device)
            y[1, 0] = 3.0
            y.requires_grad_()
            x = draw(2, 4, seed=5).to(device)
            value = sn.repair(curved_set().to(device), y, x).value
            return value.detach(), torch.autograd.grad((value * draw(2, 14, seed=6).to(device)).sum(), y)[0]

        found = []
        for on in (True, False):
            with monkeypatch.context() as patch:
                use_kernels(patch, device, on)
                found.append(gradients())
        for a, b in zip(*found, strict=True):
            assert_equal(a, b, 1e-9)

    def test_short_rows_have_a_share_of_the_mean(self, monkeypatch, device: str) -> None:
        """With a share that counts, its gradient does, too."""
        monkeypatch.setattr(scale, "VANISHING", 0.8)
        launching.load.cache_clear()
        assert assert_agree(monkeypatch, curved_set, device).converged.all()
        launching.load.cache_clear()

    def test_more_rows_than_a_word_has_bits(self, monkeypatch, device: str) -> None:
        solution = assert_agree(monkeypatch, lambda: curved_set(36, 44), device, max_steps=12)
        assert solution.steps.max() > 3

    def test_a_multiprocessor_of_its_own(self, monkeypatch, device: str) -> None:
        """Where there is no memory for two blocks, one has twice the threads."""
        monkeypatch.setattr(packing, "room", lambda rows, y, blocks: 0 if blocks == 2 else rows.kept)
        assert assert_agree(monkeypatch, curved_set, device).converged.all()

    def test_rescued(self, monkeypatch, device: str) -> None:
        """Samples that the kernels give up are repaired by the plain loop, and have its gradient."""
        solution = assert_agree(monkeypatch, curved_set, device, max_steps=4, rescue=True, close=1e-7)
        assert solution.steps.max() > 4

    def test_single_precision(self, monkeypatch, device: str) -> None:
        solution = assert_agree(
            monkeypatch, curved_set, device, 1e-3, dtype=torch.float32, damping=0.5, max_steps=6, tol=1e-4
        )
        assert solution.violation.max() < 1

    def test_which_rows_suit(self, monkeypatch, device: str) -> None:
        H, G = draw(3, 6, seed=1).abs(), draw(3, 6, seed=2)
        dense = torch.diag_embed(H)
        for constraints, suits in (
            (sn.Quadratic(H, G, upper=1.0), True),
            (sn.Quadratic(dense, G, upper=1.0), False),
            (sn.Quadratic(H.clone().requires_grad_(), G, upper=1.0), False),
            (sn.Linear(lambda x: G.expand(len(x), -1, -1), upper=1.0), False),
            (sn.Nonlinear(lambda y, x: y.square(), rows=6, upper=1.0), False),
        ):
            y = draw(2, 6, seed=3)
            assert packing.suits(constraints.at(y, y).map) is suits


@on_devices
class TestPrimal:
    """Where kernels solve the system of the variables."""

    @pytest.mark.parametrize("build", [curved_set, crowded, boxed])
    @pytest.mark.parametrize("damping", [sn.Annealed(floor=0.1), 0.1], ids=str)
    def test_equal_to_the_loop(self, monkeypatch, device: str, build: Build, damping) -> None:
        solution = assert_agree(monkeypatch, build, device, 1e-8, rows="all", damping=damping, max_steps=12, tol=0.0)
        assert (solution.steps == 12).all()

    @pytest.mark.parametrize("build", [crowded, boxed])
    @pytest.mark.parametrize("damping", [sn.Annealed(floor=1e-6), 0.1], ids=str)
    def test_rows_in_use(self, monkeypatch, device: str, build: Build, damping) -> None:
        solution = assert_agree(monkeypatch, build, device, 1e-8, damping=damping, max_steps=60)
        assert bool((solution.steps > 3).any())

    @pytest.mark.parametrize("store", [True, False])
    def test_stages(self, monkeypatch, device: str, store: bool) -> None:
        monkeypatch.setattr(curved, "_STAGE", 4)
        options = {"damping": sn.Annealed(floor=1e-6), "store_factors": store}
        assert assert_agree(monkeypatch, crowded, device, **options).steps.max() > 8

    def test_room_for_the_factors_of_one_stage(self, monkeypatch, device: str) -> None:
        """Those of the others are made again."""
        stage, factor = 4, 10 * 13 // 2 * 8  # steps; bytes
        monkeypatch.setattr(curved, "_STAGE", stage)
        monkeypatch.setattr(Options, "room", lambda self, device: 1.5 * stage * BATCH * factor)
        assert assert_agree(monkeypatch, crowded, device, damping=sn.Annealed(floor=1e-6)).steps.max() > 8
        constraints = crowded().to(device)
        y, x = draw(BATCH, 10).to(device).requires_grad_(), draw(BATCH, 4).to(device)
        with monkeypatch.context() as patch:
            use_kernels(patch, device)
            tape = tape_of(constraints, y, x, Options(as_damping(sn.Annealed(floor=1e-6))))
        assert [len(one.factors) for one in tape.stages][:2] == [stage, 0]

    def test_non_finite_predictions(self, monkeypatch, device: str) -> None:
        solution = assert_agree(monkeypatch, crowded, device, bad=True, damping=sn.Annealed(floor=1e-6))
        assert solution.status[[3, 5]].tolist() == [int(sn.Status.NONFINITE)] * 2

    def test_short_rows_have_a_share_of_the_mean(self, monkeypatch, device: str) -> None:
        """With a share that counts, its gradient does, too."""
        monkeypatch.setattr(scale, "VANISHING", 0.8)
        launching.load.cache_clear()
        damping = sn.Annealed(floor=0.1)
        assert_agree(monkeypatch, curved_set, device, rows="all", damping=damping, max_steps=12, tol=0.0)
        launching.load.cache_clear()

    def test_single_precision(self, monkeypatch, device: str) -> None:
        solution = assert_agree(
            monkeypatch, crowded, device, 1e-3, dtype=torch.float32, damping=0.5, max_steps=6, tol=1e-4
        )
        assert solution.violation.max() < 1

    @pytest.mark.parametrize(
        ("build", "rows", "damping", "primal"),
        [
            (curved_set, "all", 0.01, True),
            (curved_set, "active", 0.01, False),  # who knows how few rows are in use
            (curved_set, "all", 1e-6, False),  # would cost too many digits
            (curved_set, "all", sn.Constant(1e-6, relative=True), False),
            (curved_set, "all", sn.Constant(1e-4, relative=True), True),
            (curved_set, "all", sn.Annealed(), False),
            (curved_set, "all", sn.Annealed(floor=1e-3), True),
            (lambda: curved_set(7), "all", 0.01, False),  # few rows, so their system is small
            (without_equalities, "all", 0.01, False),
            (lambda: sn.Quadratic(draw(8, 8, seed=1), upper=1.0), "all", 0.01, False),  # nothing to eliminate
            (crowded, "active", sn.Annealed(), True),
            (crowded, "active", 0.0, None),  # singular where few rows are in use
            (crowded, "all", 0.0, True),
            (boxed, "active", 0.01, True),
            (cornered, "active", 0.01, None),  # the plain loop eliminates the box
        ],
    )
    def test_where(self, monkeypatch, device: str, build: Build, rows: str, damping, primal: bool | None) -> None:
        use_kernels(monkeypatch, device)
        assert chosen(build, device, rows, damping) is primal

    @pytest.mark.parametrize(("build", "other"), [(curved_set, False), (crowded, None)])
    def test_too_little_memory(self, monkeypatch, device: str, build: Build, other: bool | None) -> None:
        """Then the rows have a system, if they are few."""
        use_kernels(monkeypatch, device)
        assert chosen(build, device, "all", 0.01) is True
        pack = packing.pack
        monkeypatch.setattr(packing, "pack", lambda *rest: None if rest[-1] else pack(*rest))
        assert chosen(build, device, "all", 0.01) is other

    def test_longest(self, device: str) -> None:
        """The bound on the rows of J holds where no variable is larger than 1, and is reached at a corner."""
        H, G, A = draw(3, 4, seed=1).to(device), draw(3, 4, seed=2).to(device), draw(2, 4, seed=3).to(device)
        corner = torch.where((H * G)[1] < 0, -1.0, 1.0).double().unsqueeze(0)
        for length in (0.1, 10.0):
            spectrum = Spectrum(length * A, torch.ones_like(A[:, 0]))
            J = sn.Quadratic(H[1:2], G[1:2], upper=1.0).to(device).at(corner).map
            found = packing.longest(J, spectrum, corner)
            rows = torch.cat([J.jacobian(corner)[0], length * A])
            assert found == pytest.approx(float(rows.square().sum(1).max()))


def tape_of(constraints: sn.Constraints, y: Tensor, x: Tensor, options: Options) -> curved.CurvedTape:
    """What the kernels write down."""
    choice = choose(options, constraints.memo, constraints.at(y, x), y)
    finite = torch.ones(len(y), dtype=torch.bool, device=y.device)
    _, tape = choice.engine.run(Batch(y.detach(), choice.lower, choice.upper, finite), True)
    assert isinstance(tape, curved.CurvedTape)
    return tape


def chosen(build: Build, device: str, rows: str, damping: object) -> bool | None:
    """Are kernels chosen that solve the system of the variables? None if the plain loop is."""
    constraints = build().to(device)
    y, x = draw(BATCH, constraints.size or 0).to(device), draw(BATCH, 4).to(device)
    options = Options(as_damping(damping), rows=rows)
    engine = choose(options, constraints.memo, constraints.at(y, x), y).engine
    return engine.rows.primal if isinstance(engine, curved.CurvedKernels) else None


@needs_compiler
@pytest.mark.parametrize("threads", [3, 64, 160])
@pytest.mark.parametrize(("rows", "size"), [(40, 80), (36, 44), (52, 40)], ids=["dual", "primal", "crowded"])
def test_larger_tiles(monkeypatch, threads: int, rows: int, size: int) -> None:
    """Larger matrices are multiplied in larger tiles, whose sums many threads share; the rows are two chunks."""
    options, build = {"rows": "all", "max_steps": 2, "start": None}, lambda: curved_set(rows, size)
    with monkeypatch.context() as patch:
        ran = emulate(patch, threads)
        mine = repaired(build, "cpu", **options)
        assert {"forward", "backward"} <= set(ran)
    theirs = repaired(build, "cpu", **options)
    assert_equal(mine[0].value, theirs[0].value, 1e-9)
    assert_equal(mine[1][0], theirs[1][0], 1e-8)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_any_number_of_threads(monkeypatch, threads: int) -> None:
    """Blocks of different sizes compute the same: 64 threads share the terms of a sum and the tiles of a matrix."""
    for build, options in (
        (curved_set, {}),
        (curved_set, {"rows": "all", "damping": 0.1, "max_steps": 6, "start": None}),
        (polytope, {"rows": "all"}),
        (polytope, {"start": sn.Nearest(5)}),
    ):
        with monkeypatch.context() as patch:
            ran = emulate(patch, threads)
            mine = repaired(build, "cpu", **options)
            assert len(ran) >= 2
        theirs = repaired(build, "cpu", **options)
        assert_equal(mine[0].value, theirs[0].value, 1e-9)
        assert_equal(mine[1][0], theirs[1][0], 1e-8)


def test_arrays_in_shared_memory_are_counted_right() -> None:
    """`blocks.py` says how many arrays each kernel has in shared memory; here they are counted in its source."""
    for file in ("linear", "admm"):
        source = (nvrtc.folder() / f"{file}.cu").read_text()
        for name, body in re.findall(r"__device__ void (\w+)_of\((.*?)\n}", source, re.DOTALL):
            assert body.count("room.next()") == blocks._ARRAYS[name], name
            assert f"Room<S, {name.upper()}_ARRAYS>" in body


def test_libraries_are_kept_where_nobody_else_can_write(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SNARENET_CACHE", str(tmp_path / "new"))
    assert cache().stat().st_mode & 0o777 == 0o700
    cache().chmod(0o777)
    with pytest.raises(AssertionError, match="must be a folder that only its owner"):
        cache()
    cache_of_another = tmp_path / "linked"
    cache_of_another.mkdir()
    (cache_of_another / "emulation").symlink_to(tmp_path)
    monkeypatch.setenv("SNARENET_CACHE", str(cache_of_another))
    with pytest.raises(AssertionError, match="must be a folder that only its owner"):
        cache()
