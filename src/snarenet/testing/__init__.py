"""Is a set of your own right? The suite that every set of this package passes, for yours.

In two lines, by hand or in a notebook, with predictions y that violate the set:

    from snarenet.testing import check
    check(Speed(), y, x)  # raises an AssertionError that names every check that failed

In a test file for pytest, one test for each check; `formula`, `lower` and `upper` are the set once more, written out:

    from snarenet.testing import Case, ConstraintsSuite, draw

    class TestSpeed(ConstraintsSuite):
        def case(self):
            return Case(
                Speed(),
                y=draw(5, 3, scale=3),
                x=draw(5, 1, seed=1).abs(),
                formula=lambda y, x: y.square().sum(1, keepdim=True),
                upper=lambda x: x.square(),
            )

Nothing here needs pytest, and `import snarenet` does not import it.
"""

from snarenet.testing.case import Case, assert_equal, draw, gradients, on_tensors
from snarenet.testing.suite import ConstraintsSuite, check
from snarenet.testing.textbook import autograd_jacobian, textbook_repair

__all__ = [
    "Case",
    "ConstraintsSuite",
    "assert_equal",
    "autograd_jacobian",
    "check",
    "draw",
    "gradients",
    "on_tensors",
    "textbook_repair",
]
