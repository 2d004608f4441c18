"""`snarenet.testing`: right sets pass, deliberately wrong ones fail, by the check that is about their fault."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import snarenet as sn
from snarenet.testing import Case, ConstraintsSuite, check, draw

y, x = draw(5, 3, seed=1, scale=3), draw(5, 1, seed=2).abs() + 0.5


class Shell(sn.Constraints):
    """x <= |y - centre|^2 <= 2 x, and y_1 + y_2 <= 1."""

    rows = 2

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(draw(3, seed=3))

    def value(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        return torch.stack([(y - self.centre.to(y)).square().sum(1), y[:, 0] + y[:, 1]], 1)

    def bounds(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert x is not None
        return torch.cat([x, torch.full_like(x, -torch.inf)], 1), torch.cat([2 * x, torch.ones_like(x)], 1)


class Swapped(Shell):
    def value(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        return super().value(y, x).flip(1)


class Loose(Shell):
    def bounds(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        lower, upper = super().bounds(x)
        return lower, upper + 0.01


class Mixed(Shell):
    """A row that depends on the other samples."""

    def value(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        return super().value(y - y.mean(0), x) if len(y) else super().value(y, x)


class Detached(Shell):
    """A parameter that gets no gradient."""

    def value(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        return torch.stack([(y - self.centre.to(y).detach()).square().sum(1), y[:, 0] + y[:, 1]], 1)


class Unsaved(Shell):
    """A state that a copy does not have."""

    def value(self, y: Tensor, x: Tensor | None = None) -> Tensor:
        return super().value(y * self.__dict__.get("scale", 1.0), x)

    def __deepcopy__(self, memo: object) -> Unsaved:
        twin = Unsaved()
        twin.scale = 1.1
        return twin


def written_out(set: Shell) -> dict:
    return {
        "formula": lambda y, x: torch.cat(
            [((y - set.centre) ** 2).sum(1, keepdim=True), y[:, :2].sum(1, keepdim=True)], 1
        ),
        "lower": lambda x: torch.cat([x, -torch.inf * torch.ones_like(x)], 1),
        "upper": lambda x: torch.cat([2 * x, torch.ones_like(x)], 1),
    }


def test_a_right_set_passes() -> None:
    set = Shell()
    for knowledge in ({}, written_out(set)):
        try:
            check(set, y, x, **knowledge)
        except AssertionError as error:
            pytest.fail(f"a right set failed: {error}")


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [(Swapped, "value"), (Loose, "bounds"), (Mixed, "the_same_answer_in_any_batch"), (Unsaved, "copy_and_state_dict")],
)
def test_a_wrong_set_fails(wrong: type[Shell], fault: str) -> None:
    set = wrong()
    with pytest.raises(AssertionError, match=rf"`{wrong.__name__}` failed \d+ checks:(.|\n)*- {fault}: "):
        check(set, y, x, **written_out(set))


def test_a_wrong_jacobian_fails_even_without_a_formula() -> None:
    def g(y: Tensor, x: None) -> Tensor:
        return y.sin() @ torch.ones(3, 2, dtype=y.dtype)

    def jacobian(y: Tensor, x: None) -> Tensor:
        return y.cos().unsqueeze(1).expand(-1, 2, -1)

    check(sn.Nonlinear(g, 2, upper=-0.3, jacobian=jacobian), y)
    wrong = sn.Nonlinear(g, 2, upper=-0.3, jacobian=lambda y, x: 1.01 * jacobian(y, x))
    with pytest.raises(AssertionError, match=r"- jacobian: (.|\n)*- repair_equals_textbook: "):
        check(wrong, y)


def test_a_missing_gradient_fails() -> None:
    class Suite(ConstraintsSuite):
        kind: type[Shell] = Detached

        def case(self) -> Case:
            set = self.kind()
            return Case(set, y, x, **written_out(set), tensors=[set.centre])

    with pytest.raises(AssertionError, match="pullback in x and tensors"):
        Suite().test_pullback()
    with pytest.raises(AssertionError, match="gradients with Constant"):
        Suite().test_repair_equals_textbook()
    Suite.kind = Shell
    Suite().test_pullback()


def test_a_case_must_start_infeasible() -> None:
    with pytest.raises(AssertionError, match="must start infeasible"):
        check(sn.Box(-100.0, 100.0), y)
    with pytest.raises(TypeError, match="`y` must be in float64"):
        check(sn.Box(0.0, 1.0), y.float())


def test_it_is_imported_only_when_asked_for_and_needs_no_pytest() -> None:
    code = """
import sys
sys.modules["pytest"] = None
import snarenet
assert "snarenet.testing" not in sys.modules
import snarenet.testing
"""
    subprocess.run([sys.executable, "-c", code], check=True)
