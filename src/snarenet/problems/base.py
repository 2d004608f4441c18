"""`Problem`: a family of constrained problems, one instance for every input x, and what a model achieves on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from snarenet.constraints import Constraints
from snarenet.constraints.base import largest
from snarenet.constraints.data import check_objective
from snarenet.problems.feasible import has_point
from snarenet.problems.features import OfFeatures
from snarenet.solution import Solution

_SHARE = 0.0833  # of the instances, for validation and again for testing

Split = Literal["train", "valid", "test"]


class Model(Protocol):
    """What a problem asks of a model; `ConstrainedModel` has it."""

    def solve(self, x: Any, relax: float | Tensor | None = None) -> Solution: ...


class Outcome(NamedTuple):
    """What a model achieves on a batch, sample by sample; the first five are differentiable.

    Attributes:
        objective: (B,) f(y, x), what is reported.
        cost: (B,) what training minimises: the objective, unless a family adds terms.
        penalty: (B,) sum of the squared violations of the true (not relaxed) constraints.
        distance: (B,) squared distance between prediction and repaired output.
        errors: (B, rows) absolute violation of every row.
        violation: (B,) the largest violation of any row.
        steps: (B,) steps of the repair.
        converged: (B,) true where the repair reached its tolerance.
    """

    objective: Tensor
    cost: Tensor
    penalty: Tensor
    distance: Tensor
    errors: Tensor
    violation: Tensor
    steps: Tensor
    converged: Tensor


class Problem(nn.Module, ABC):
    """min f(y, x) subject to constraints, for the inputs x of a data set.

    A family of your own defines `objective` and sets the attributes; one that is not a single optimisation problem per
    input (a control policy, say) overrides `run`.

    Attributes:
        constraints: the feasible set, of what a model sees of x.
        inputs: (N, d) all inputs x, in float64; split contiguously into training, validation and test instances.
        size: the n of a solution y.
        features: how many entries of x a model sees, the first ones; the others are for the objective alone, such as
            what happened in the end. None for all.
        convex: is every instance a convex problem?
        starts: from how many points a reference solver should start, to find the best of several local optima.
        always_feasible: has every input a point that obeys the constraints? Where not, `split` leaves out those that
            have none.
        name: the name that `problems.load` knows the family by, with `sizes` as arguments; "" for a user's own.
        recipe: fields of `TrainConfig` in which the recipe `best` differs for this problem; none for most.
    """

    constraints: Constraints
    inputs: Tensor
    size: int
    features: int | None = None
    convex: bool = False
    starts: int = 8
    always_feasible: bool = True
    name: str = ""
    recipe: ClassVar[Mapping[str, Any]] = {}
    sizes: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {}
        self._feasible: dict[Split, Tensor] = {}

    @abstractmethod
    def objective(self, y: Tensor, x: Tensor) -> Tensor:
        """f(y, x) for every sample: (B,)."""

    def run(self, model: Model, x: Tensor, relax: float | Tensor | None = None) -> Outcome:
        """What `model` achieves on the inputs x."""
        solution = model.solve(self.seen(x), relax)
        y = solution.value
        objective = check_objective(self.objective(y, x), y)
        errors = self.feasible_set.residual(y.to(torch.float64), x).abs()  # as `Solution.violation` is measured
        return Outcome(
            objective=objective,
            cost=objective,
            penalty=errors.square().sum(1),
            distance=(y - solution.raw).square().sum(1),
            errors=errors,
            violation=largest(errors.detach()),
            steps=solution.steps,
            converged=solution.converged,
        )

    @property
    def weights(self) -> Tensor | None:
        """(n,) how dear it is to move each variable, all positive: typical second derivatives of the objective.

        None unless a problem knows better than what training finds by itself, see `training/typical.py`.
        """
        return None

    @property
    def typical(self) -> Tensor | None:
        """(n,) a point in or near the set at a typical input; None where none is known."""
        return None

    @property
    def guesses(self) -> Tensor | None:
        """(k, n) where a reference solver should start, the best first; the typical point alone unless defined."""
        return None if self.typical is None else self.typical.unsqueeze(0)

    @property
    def partial(self) -> Tensor | None:
        """(k,) variables that determine the others by the equalities, for DC3; None lets it choose."""
        return None

    def network(self, build: Callable[[int, int], nn.Module], inputs: int, outputs: int) -> nn.Module:
        """The network to train, from `build(inputs, outputs)`; a family may put something of its own around it.

        One that does sees inputs as they are and predicts in the units of y.
        """
        return build(inputs, outputs)

    def expressions(self, y: Any, x: Any, m: Any) -> tuple[Any, Any] | None:
        """f and all rows but those of boxes, of one sample, in the arithmetic m, see `problems.arithmetic`.

        A family that is written so is solved ten times faster: the solver differentiates by itself. None unless
        defined.
        """
        return None

    def seen(self, x: Tensor) -> Tensor:
        """What a model sees of x."""
        return x if self.features is None else x[:, : self.features]

    @property
    def feasible_set(self) -> Constraints:
        """The feasible set as one of whole inputs: what `constraints` are at what a model sees of them."""
        return self.constraints if self.features is None else OfFeatures(self.constraints, self.features)

    @property
    def direct(self) -> bool:
        """Is what a model returns for x the solution itself? Not where `run` is the family's own: a policy, say."""
        return type(self).run is Problem.run

    @property
    def solvable(self) -> bool:
        """Can a solver be asked for the best y of every x? Not where the objective is known only afterwards, either."""
        return self.direct

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, d) fresh inputs from the distribution of the data, drawn with `generator` on its device."""
        raise ValueError(f"`{type(self).__name__}` does not say how to draw fresh inputs: define `sample`")

    def equalities(self, x: Tensor) -> Tensor:
        """(rows,) true for the rows that are equalities."""
        instance = self.feasible_set.at(x.new_zeros(len(x), self.size), x)
        return (instance.lower == instance.upper).all(0)

    def split(self, name: Split) -> Tensor:
        """The inputs to train on, to choose by, or to report on: those that have a feasible point."""
        found = self._drawn(name)
        return found if self.always_feasible else found[self._has_point(name).to(found.device)]

    def infeasible(self, name: Split) -> Tensor:
        """(k, d) the inputs of a split that were left out, as no repair found a feasible point."""
        found = self._drawn(name)
        return found[:0] if self.always_feasible else found[~self._has_point(name).to(found.device)]

    def _drawn(self, name: Split) -> Tensor:
        if name not in ("train", "valid", "test"):
            raise ValueError(f"`name` must be 'train', 'valid' or 'test', but got {name!r}")
        train = 1 - _SHARE - _SHARE
        first, second = int(len(self.inputs) * train), int(len(self.inputs) * (train + _SHARE))
        return {"train": self.inputs[:first], "valid": self.inputs[first:second], "test": self.inputs[second:]}[name]

    def _has_point(self, name: Split) -> Tensor:
        """(N,) for the inputs drawn for a split; looked for once, and harder where results are reported."""
        if name not in self._feasible:
            x = self._drawn(name).double()
            start = x.new_zeros(self.size) if self.typical is None else self.typical.double()
            self._feasible[name] = has_point(self.feasible_set, start, x, rescue=name != "train").cpu()
        return self._feasible[name]


def uniform(count: int, low: Tensor, high: Tensor, generator: torch.Generator) -> Tensor:
    """(count, d) points of the box between low and high, both (d,)."""
    share = torch.rand(count, len(low), generator=generator, dtype=low.dtype, device=generator.device)
    return low + (high - low) * share


def check_sizes(least: int = 1, **sizes: int) -> None:
    """Raise unless each is a whole number of at least `least` that an array can have as its size."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= value < 2**32:
            raise ValueError(f"`{name}` must be a whole number, at least {least} and below 2^32, but got {value!r}")
