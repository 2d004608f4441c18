"""Every constraint set, through the conformance suite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.testing import Case, ConstraintsSuite, draw

BATCH = 5

INF = torch.tensor(torch.inf, dtype=torch.float64)


class TestLinearConstant(ConstraintsSuite):
    """Inequalities and equalities with one matrix: the constraint-space route, or elimination when rows are active."""

    def case(self) -> Case:
        A, C, b = draw(3, 6, seed=1), draw(2, 6, seed=2), torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
        return Case(
            sn.Linear(A, upper=b) & sn.Linear(C, equals=lambda x: x),
            draw(BATCH, 6, seed=3, scale=2),
            draw(BATCH, 2, seed=4),
            formula=lambda y, x: torch.cat([y @ A.T, y @ C.T], 1),
            lower=lambda x: torch.cat([-INF.expand(BATCH, 3), x], 1),
            upper=lambda x: torch.cat([b.expand(BATCH, 3), x], 1),
        )


class TestLinearTwoSided(ConstraintsSuite):
    def case(self) -> Case:
        A, width = draw(3, 5, seed=1), torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64)
        return Case(
            sn.Linear(A, lower=lambda x: x - width, upper=lambda x: x + width),
            draw(BATCH, 5, seed=2),
            draw(BATCH, 3, seed=3),
            formula=lambda y, x: y @ A.T,
            lower=lambda x: x - width,
            upper=lambda x: x + width,
        )


class TestLinearPerSample(ConstraintsSuite):
    def case(self) -> Case:
        A, b = draw(BATCH, 3, 5, seed=1), draw(BATCH, 3, seed=2)
        return Case(
            sn.Linear(A, upper=b),
            draw(BATCH, 5, seed=3, scale=2),
            formula=lambda y, x: torch.einsum("bmn,bn->bm", A, y),
            upper=lambda x: b,
            batched=True,
        )


class TestLinearOfX(ConstraintsSuite):
    """A(x) and bounds of x, the form of a control-barrier policy; x is a pytree."""

    def case(self) -> Case:
        def matrix(x: dict[str, Tensor]) -> Tensor:
            return torch.stack([x["pose"].sin(), x["pose"].square() + 1], 1)

        return Case(
            sn.Linear(matrix, lower=lambda x: x["low"], upper=0.4),
            draw(BATCH, 4, seed=1),
            {"pose": draw(BATCH, 4, seed=2), "low": -draw(BATCH, 2, seed=3).abs()},
            formula=lambda y, x: torch.einsum("bmn,bn->bm", matrix(x), y),
            lower=lambda x: x["low"],
            upper=0.4,
        )


class TestLinearLearned(ConstraintsSuite):
    """A matrix and a right-hand side that are trained."""

    def case(self) -> Case:
        A, b = nn.Parameter(draw(2, 5, seed=1)), nn.Parameter(draw(2, seed=2))
        return Case(
            sn.Linear(A, equals=b),
            draw(BATCH, 5, seed=3),
            formula=lambda y, x: y @ A.T,
            lower=lambda x: b,
            upper=lambda x: b,
            tensors=[A, b],
        )


class TestMoreRowsThanVariables(ConstraintsSuite):
    """A polytope in the plane with 12 sides: the n-by-n system."""

    def case(self) -> Case:
        angles = torch.linspace(0, 2 * torch.pi, 13, dtype=torch.float64)[:-1]
        A = torch.stack([angles.cos(), angles.sin()], 1) * torch.linspace(1, 3, 12, dtype=torch.float64).unsqueeze(1)
        return Case(
            sn.Linear(A, upper=1.0),
            draw(BATCH, 2, seed=1, scale=4),
            formula=lambda y, x: y @ A.T,
            upper=1.0,
        )


class TestManyNonlinearRows(ConstraintsSuite):
    def case(self) -> Case:
        centres = draw(7, 2, seed=1)

        def g(y: Tensor, x: Tensor) -> Tensor:
            return (y.unsqueeze(1) - centres.to(y)).square().sum(2) + x

        return Case(
            sn.Nonlinear(g, rows=7, lower=0.5, upper=9.0),
            draw(BATCH, 2, seed=2, scale=3),
            draw(BATCH, 1, seed=3, scale=0.2),
            formula=g,
            lower=0.5,
            upper=9.0,
        )


class TestBox(ConstraintsSuite):
    def case(self) -> Case:
        lower = torch.tensor([-1.0, -torch.inf, 0.0, -0.5], dtype=torch.float64)
        return Case(
            sn.Box(lower, lambda x: x),
            draw(BATCH, 4, seed=1, scale=2),
            draw(BATCH, 4, seed=2).abs(),
            formula=lambda y, x: y,
            lower=lambda x: lower,
            upper=lambda x: x,
        )


class TestBoxWithCoupling(ConstraintsSuite):
    """Probability vectors that also obey a quadratic row: the box is eliminated."""

    def case(self) -> Case:
        ones, weights = torch.ones(1, 5, dtype=torch.float64), draw(1, 5, seed=1).abs()
        return Case(
            sn.Linear(ones, equals=1.0) & sn.Box(0.0, 0.6) & sn.Quadratic(weights, ones * 0, upper=0.4),
            draw(BATCH, 5, seed=2, scale=2),
            formula=lambda y, x: torch.cat([y @ ones.T, y, y.square() @ weights.T], 1),
            lower=lambda x: torch.tensor([1.0] + 5 * [0.0] + [-torch.inf], dtype=torch.float64),
            upper=lambda x: torch.tensor([1.0] + 5 * [0.6] + [0.4], dtype=torch.float64),
        )


class TestQuadraticDiagonal(ConstraintsSuite):
    """Non-convex rows with linear equalities, as in the paper's QCQP."""

    def case(self) -> Case:
        H, G, C = draw(3, 6, seed=1, scale=0.2), draw(3, 6, seed=2), draw(2, 6, seed=3)
        return Case(
            sn.Quadratic(H, G, upper=0.5) & sn.Linear(C, equals=lambda x: x),
            draw(BATCH, 6, seed=4, scale=2),
            draw(BATCH, 2, seed=5),
            formula=lambda y, x: torch.cat([y.square() @ H.T + y @ G.T, y @ C.T], 1),
            lower=lambda x: torch.cat([-INF.expand(BATCH, 3), x], 1),
            upper=lambda x: torch.cat([torch.full((BATCH, 3), 0.5, dtype=x.dtype), x], 1),
        )


class TestQuadraticWhole(ConstraintsSuite):
    def case(self) -> Case:
        H, G = draw(2, 4, 4, seed=1, scale=0.3), draw(2, 4, seed=2)
        return Case(
            sn.Quadratic(H, G, lower=-0.5, upper=0.5),
            draw(BATCH, 4, seed=3),
            formula=lambda y, x: torch.einsum("bi,mij,bj->bm", y, H, y) + y @ G.T,
            lower=-0.5,
            upper=0.5,
        )


class TestQuadraticOfX(ConstraintsSuite):
    def case(self) -> Case:
        def diagonals(x: Tensor) -> Tensor:
            return x.unsqueeze(1) * torch.tensor([[1.0], [-0.5]], dtype=torch.float64)

        G = draw(BATCH, 2, 4, seed=1)
        return Case(
            sn.Quadratic(diagonals, G, upper=0.2),
            draw(BATCH, 4, seed=2),
            draw(BATCH, 4, seed=3, scale=0.5),
            formula=lambda y, x: (diagonals(x) * y.square().unsqueeze(1)).sum(2) + torch.einsum("bmn,bn->bm", G, y),
            upper=0.2,
            batched=True,
        )


class TestQuadraticWholePerSample(ConstraintsSuite):
    def case(self) -> Case:
        H, G = draw(BATCH, 2, 4, 4, seed=1, scale=0.3), draw(2, 4, seed=2)
        return Case(
            sn.Quadratic(H, G, upper=0.3),
            draw(BATCH, 4, seed=3, scale=1.5),
            formula=lambda y, x: torch.einsum("bi,bmij,bj->bm", y, H, y) + y @ G.T,
            upper=0.3,
            batched=True,
        )


class TestQuadraticLearned(ConstraintsSuite):
    def case(self) -> Case:
        H, G = nn.Parameter(draw(2, 4, seed=1, scale=0.3)), nn.Parameter(draw(2, 4, seed=2))
        return Case(
            sn.Quadratic(H, G, equals=0.3),
            draw(BATCH, 4, seed=3),
            formula=lambda y, x: y.square() @ H.T + y @ G.T,
            lower=0.3,
            upper=0.3,
            tensors=[H, G],
        )


class TestQuadraticFactored(ConstraintsSuite):
    """Low rank plus a diagonal, the same for all samples, two rows; beside a box, which is eliminated."""

    def case(self) -> Case:
        F, D, G = draw(2, 5, 2, seed=1, scale=0.4), draw(2, 5, seed=2, scale=0.2), draw(2, 5, seed=3)
        H = torch.einsum("mik,mjk->mij", F, F) + torch.diag_embed(D)
        return Case(
            sn.Quadratic(G=G, factor=F, diagonal=D, upper=0.3) & sn.Box(-1.0, 1.0),
            draw(BATCH, 5, seed=4, scale=1.5),
            formula=lambda y, x: torch.cat([torch.einsum("bi,mij,bj->bm", y, H, y) + y @ G.T, y], 1),
            lower=lambda x: torch.tensor([-torch.inf] * 2 + [-1.0] * 5, dtype=torch.float64),
            upper=lambda x: torch.tensor([0.3] * 2 + [1.0] * 5, dtype=torch.float64),
        )


class TestQuadraticFactoredOfX(ConstraintsSuite):
    """A limit on risk whose loadings and variances depend on x, in one row, beside a budget."""

    def case(self) -> Case:
        F, ones = draw(5, 2, seed=1), torch.ones(1, 5, dtype=torch.float64)
        loadings = lambda x: F * (1 + 0.3 * x[:, :2]).unsqueeze(1)  # noqa: E731
        variances = lambda x: 0.2 + 0.1 * x[:, 2:].square()  # noqa: E731

        def risk(y: Tensor, x: Tensor) -> Tensor:
            factors = torch.einsum("bn,bnk->bk", y, loadings(x))
            return (factors.square().sum(1) + (variances(x) * y.square()).sum(1)).unsqueeze(1)

        return Case(
            sn.Quadratic(factor=loadings, diagonal=variances, upper=0.4) & sn.Linear(ones, equals=0.5),
            draw(BATCH, 5, seed=2),
            draw(BATCH, 7, seed=3),
            formula=lambda y, x: torch.cat([risk(y, x), y @ ones.T], 1),
            lower=lambda x: torch.tensor([-torch.inf, 0.5], dtype=torch.float64),
            upper=lambda x: torch.tensor([0.4, 0.5], dtype=torch.float64),
        )


class TestQuadraticFactoredPerSample(ConstraintsSuite):
    """A factor alone, one per sample and row, with a linear term."""

    def case(self) -> Case:
        F, G = draw(BATCH, 2, 4, 3, seed=1, scale=0.4), draw(BATCH, 2, 4, seed=2)
        return Case(
            sn.Quadratic(G=G, factor=F, upper=0.2),
            draw(BATCH, 4, seed=3, scale=1.5),
            formula=lambda y, x: torch.einsum("bn,bmnk->bmk", y, F).square().sum(2) + torch.einsum("bmn,bn->bm", G, y),
            upper=0.2,
            batched=True,
        )


class TestQuadraticFactoredLearned(ConstraintsSuite):
    """One factor and one diagonal for both rows; everything is trained."""

    def case(self) -> Case:
        F, D = nn.Parameter(draw(4, 2, seed=1, scale=0.4)), nn.Parameter(draw(4, seed=2, scale=0.2))
        G = nn.Parameter(draw(2, 4, seed=3))
        return Case(
            sn.Quadratic(G=G, factor=F, diagonal=D, equals=0.3),
            draw(BATCH, 4, seed=4),
            formula=lambda y, x: ((y @ F).square().sum(1) + y.square() @ D).unsqueeze(1) + y @ G.T,
            lower=0.3,
            upper=0.3,
            tensors=[F, D, G],
        )


class TestQuadraticDiagonalAlone(ConstraintsSuite):
    def case(self) -> Case:
        D = nn.Parameter(draw(4, seed=1).abs())
        return Case(
            sn.Quadratic(diagonal=D, lower=0.3, upper=lambda x: x),
            draw(BATCH, 4, seed=2, scale=2),
            draw(BATCH, 1, seed=3).abs() + 0.5,
            formula=lambda y, x: (y.square() @ D).unsqueeze(1),
            lower=0.3,
            upper=lambda x: x,
            tensors=[D],
        )


class TestQuadraticWholeLearned(ConstraintsSuite):
    """A matrix that is not symmetric, and is trained."""

    def case(self) -> Case:
        H, G = nn.Parameter(draw(2, 4, 4, seed=1, scale=0.3)), nn.Parameter(draw(2, 4, seed=2))
        return Case(
            sn.Quadratic(H, G, upper=0.3),
            draw(BATCH, 4, seed=3),
            formula=lambda y, x: torch.einsum("bi,mij,bj->bm", y, H, y) + y @ G.T,
            upper=0.3,
            tensors=[H, G],
        )


class TestQuadraticWholeOfX(ConstraintsSuite):
    def case(self) -> Case:
        H = draw(1, 4, 4, seed=1, scale=0.5)
        return Case(
            sn.Quadratic(lambda x: H * (1 + x[:, :, None, None]), lower=0.1, upper=0.2),
            draw(BATCH, 4, seed=2, scale=1.5),
            draw(BATCH, 1, seed=3, scale=0.3),
            formula=lambda y, x: (1 + x) * torch.einsum("bi,ij,bj->b", y, H[0], y).unsqueeze(1),
            lower=0.1,
            upper=0.2,
        )


def l1_level(d: Tensor, radius: Tensor | float) -> Tensor:
    """What a projection onto the ball takes off, as the root of a falling function by bisection and Newton."""
    low, high = torch.zeros_like(d[:, :1]), d.abs().amax(1, keepdim=True)
    with torch.no_grad():
        for _ in range(60):
            middle = (low + high) / 2
            above = torch.relu(d.abs() - middle).sum(1, keepdim=True) > radius
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    far = (d.abs() > low).to(d)
    return ((far * d.abs()).sum(1, keepdim=True) - radius) / far.sum(1, keepdim=True).clamp(min=1)


def l1_row(y: Tensor, center: Tensor, radius: Tensor | float) -> Tensor:
    """The row of an `L1Ball`."""
    d = y - center
    level = l1_level(d, radius)
    moved = torch.minimum(torch.maximum(d, -level), level)
    return math.sqrt(y.shape[1]) * moved.norm(dim=1, keepdim=True)


class TestL1Ball(ConstraintsSuite):
    """One of a center and a radius that are trained."""

    test_repair_in_a_metric_equals_textbook = None  # its row is a distance in the metric; see test_metric.py

    def case(self) -> Case:
        center, radius = nn.Parameter(draw(5, seed=1)), nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        return Case(
            sn.L1Ball(center, radius),
            draw(BATCH, 5, seed=2, scale=2),
            formula=lambda y, x: l1_row(y, center, radius),
            upper=0.0,
            tensors=[center, radius],
        )

    steps = 4  # beyond them the textbook's bisection has no digits left


class TestL1BallOfX(ConstraintsSuite):
    """The turnover of a portfolio: at most `limit` away from the weights that are held, with sum 1 and no debt."""

    test_repair_in_a_metric_equals_textbook = None  # its row is a distance in the metric; see test_metric.py

    def case(self) -> Case:
        ones = torch.ones(1, 5, dtype=torch.float64)
        x = {"held": torch.softmax(draw(BATCH, 5, seed=1), 1), "limit": 0.2 + 0.1 * draw(BATCH, 1, seed=2).abs()}
        return Case(
            sn.L1Ball(lambda x: x["held"], lambda x: x["limit"]) & sn.Linear(ones, equals=1.0) & sn.Box(0.0, None),
            torch.softmax(3 * draw(BATCH, 5, seed=3), 1) + 0.1 * draw(BATCH, 5, seed=4),
            x,
            formula=lambda y, x: torch.cat([l1_row(y, x["held"], x["limit"]), y @ ones.T, y], 1),
            lower=lambda x: torch.tensor([-torch.inf, 1.0] + 5 * [0.0], dtype=torch.float64),
            upper=lambda x: torch.tensor([0.0, 1.0] + 5 * [torch.inf], dtype=torch.float64),
        )

    steps = 3


class TestL1BallPerSample(ConstraintsSuite):
    """Beside a curved row, with data per sample; one of the balls is a point."""

    test_repair_in_a_metric_equals_textbook = None  # its row is a distance in the metric; see test_metric.py

    def case(self) -> Case:
        center, radius = 0.3 * draw(BATCH, 4, seed=1), torch.tensor([[0.5], [0.1], [1.0], [0.0], [0.3]]).double()
        return Case(
            sn.L1Ball(center, radius) & sn.Quadratic(torch.ones(1, 4), upper=2.0),
            draw(BATCH, 4, seed=2, scale=3),
            formula=lambda y, x: torch.cat([l1_row(y, center, radius), y.square().sum(1, keepdim=True)], 1),
            upper=lambda x: torch.tensor([0.0, 2.0], dtype=torch.float64),
            batched=True,
        )

    steps = 3


def l1_rows(d: Tensor, radius: Tensor | float) -> Tensor:
    """Those of an `L1Ball` with a matrix, d = A y - c."""
    excess = d.abs().sum(1, keepdim=True) - radius
    return torch.where(excess > 0, d.shape[1] * torch.minimum(d.abs(), l1_level(d, radius)), excess)


class TestL1BallWithMatrix(ConstraintsSuite):
    """A matrix, a center and a radius that are trained."""

    def case(self) -> Case:
        matrix, center = nn.Parameter(draw(3, 5, seed=1)), nn.Parameter(draw(3, seed=2))
        radius = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        return Case(
            sn.L1Ball(center, radius, matrix),
            draw(BATCH, 5, seed=3, scale=2),
            formula=lambda y, x: l1_rows(y @ matrix.T - center, radius),
            upper=0.0,
            tensors=[matrix, center, radius],
        )

    steps = 3


class TestL1BallWithMatrixOfX(ConstraintsSuite):
    """A plan that changes little, at prices of x, beside a box; one sample is inside."""

    def case(self) -> Case:
        once = torch.eye(5, dtype=torch.float64).diff(dim=0)
        x = {"price": 1 + draw(BATCH, 1, 1, seed=1).abs(), "limit": torch.tensor([[0.5], [0.1], [9.0], [1.0], [0.3]])}
        x["limit"] = x["limit"].double()
        return Case(
            sn.L1Ball(0.1, lambda x: x["limit"], lambda x: once * x["price"]) & sn.Box(-1.0, 1.0),
            draw(BATCH, 5, seed=2),
            x,
            formula=lambda y, x: torch.cat(
                [l1_rows((once * x["price"] @ y.unsqueeze(2)).squeeze(2) - 0.1, x["limit"]), y], 1
            ),
            lower=lambda x: torch.tensor(4 * [-torch.inf] + 5 * [-1.0], dtype=torch.float64),
            upper=lambda x: torch.tensor(4 * [0.0] + 5 * [1.0], dtype=torch.float64),
        )

    steps = 3


class TestNonlinearTrigonometric(ConstraintsSuite):
    """Fewer rows than variables, in y and x."""

    def case(self) -> Case:
        W = draw(3, 5, seed=1)

        def g(y: Tensor, x: Tensor) -> Tensor:
            return torch.sin(y @ W.T.to(y)) + 0.3 * (y * x).sum(1, keepdim=True)

        return Case(
            sn.Nonlinear(g, rows=3, lower=-0.2, upper=0.2),
            draw(BATCH, 5, seed=2),
            draw(BATCH, 5, seed=3, scale=0.3),
            formula=g,
            lower=-0.2,
            upper=0.2,
        )


class TestNonlinearModule(ConstraintsSuite):
    """A network as a constraint: its parameters receive gradients."""

    def case(self) -> Case:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Parameter(draw(3, 4, seed=1))
                self.outer = nn.Parameter(draw(2, 3, seed=2))

            def forward(self, y: Tensor, x: Tensor) -> Tensor:
                return torch.tanh(y @ self.inner.T.to(y)) @ self.outer.T.to(y) + x

        net = Net()
        return Case(
            sn.Nonlinear(net, rows=2, equals=0.1),
            draw(BATCH, 4, seed=3, scale=0.5),
            draw(BATCH, 2, seed=4, scale=0.2),
            formula=net,
            lower=0.1,
            upper=0.1,
            tensors=list(net.parameters()),
        )


class TestNonlinearClosure(ConstraintsSuite):
    """A function that captured tensors by itself: a leaf, and the result of a computation on another."""

    def case(self) -> Case:
        a, b = draw(4, seed=1).requires_grad_(), draw(4, seed=2).requires_grad_()
        square = b.square()

        def g(y: Tensor, x: None) -> Tensor:
            return torch.stack([(a.to(y) * y).sum(1) + (square.to(y) * y.square()).sum(1), y.cos() @ a.to(y)], 1)

        return Case(
            sn.Nonlinear(g, rows=2, upper=0.8),
            draw(BATCH, 4, seed=3, scale=2),
            formula=g,
            upper=0.8,
            tensors=[a],
            hidden=[b],
        )


class TestNonlinearWithJacobian(ConstraintsSuite):
    def case(self) -> Case:
        W = draw(2, 4, seed=1)

        def g(y: Tensor, x: Tensor) -> Tensor:
            return torch.exp(0.3 * y @ W.T.to(y)) + x

        def jacobian(y: Tensor, x: Tensor) -> Tensor:
            return 0.3 * torch.exp(0.3 * y @ W.T.to(y)).unsqueeze(2) * W.to(y)

        return Case(
            sn.Nonlinear(g, rows=2, lower=0.5, upper=1.0, jacobian=jacobian),
            draw(BATCH, 4, seed=2, scale=2),
            draw(BATCH, 2, seed=3, scale=0.1),
            formula=g,
            lower=0.5,
            upper=1.0,
        )


class TestNonlinearWithJacobianAndClosure(ConstraintsSuite):
    """What a given Jacobian and its function captured, a leaf and the result of a computation, gets its gradients."""

    def case(self) -> Case:
        a, b = draw(4, seed=1).requires_grad_(), draw(4, seed=2).requires_grad_()
        square = b.square()

        def g(y: Tensor, x: None) -> Tensor:
            return torch.stack([(a.to(y) * y).sum(1) + (square.to(y) * y.square()).sum(1), y.cos() @ a.to(y)], 1)

        def jacobian(y: Tensor, x: None) -> Tensor:
            return torch.stack([a.to(y) + 2 * square.to(y) * y, -y.sin() * a.to(y)], 1)

        return Case(
            sn.Nonlinear(g, rows=2, upper=0.8, jacobian=jacobian),
            draw(BATCH, 4, seed=3, scale=2),
            formula=g,
            upper=0.8,
            tensors=[a],
            hidden=[b],
        )


class TestSubclass(ConstraintsSuite):
    """A user's own set: two methods and the number of rows."""

    def case(self) -> Case:
        class Ring(sn.Constraints):
            rows = 1

            def __init__(self) -> None:
                super().__init__()
                self.register_parameter("centre", nn.Parameter(draw(3, seed=1)))

            def value(self, y: Tensor, x: Tensor | None = None) -> Tensor:
                return (y - self.centre.to(y)).square().sum(1, keepdim=True)

            def bounds(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
                assert x is not None
                return x, x + 1

        ring = Ring()
        return Case(
            ring,
            draw(BATCH, 3, seed=2, scale=3),
            draw(BATCH, 1, seed=3).abs() + 1,
            formula=lambda y, x: (y - ring.centre).square().sum(1, keepdim=True),
            lower=lambda x: x,
            upper=lambda x: x + 1,
            tensors=[ring.centre],
        )
