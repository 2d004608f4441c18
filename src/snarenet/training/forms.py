"""What is in the files of a run, as far as the page and the trainer read it, and a check that it is so.

A form is `float`, `int` or `str`, or a dictionary of the forms that the named parts of an object have; "" names all
other parts, and a class as a key stands for names that it can read. Any part may be missing or null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from snarenet.training.best import Score
from snarenet.training.folder import brief

_NUMBERS = {"": float}
PROBLEM = {"name": str, "sizes": {}, "fingerprint": str, "data": {"": _NUMBERS}}
SCORE = {name: float if name == "objective" else int for name in Score._fields}
KEPT = {"epoch": int, "last": int, "best": SCORE}
SUMMARY = {
    **dict.fromkeys(("tol", "violation", "violations", "converged", "solved", "tight", "distance", "stuck"), float),
    **dict.fromkeys(("objective", "gap", "ineq", "eq", "steps"), _NUMBERS),
    "feasible": {float: float},  # the share at each tolerance
    "split": str,
    **dict.fromkeys(("instances", "infeasible"), int),
    "seconds": {"model": float, "reference": float, "engine": str},
}
LINE = {"epoch": int, "step": int, "best": int, "valid": SUMMARY, "": float}
STATE = {"epoch": int, "seconds": float, "best": SCORE, "fingerprint": str}
_AXES = {"objective": 1, "gap": 1, "violation": 1, "steps": 1, "trajectory": 3}
_CLOSEUPS = {
    **dict.fromkeys(("closeup", "closeup_rank", "closeup_residual"), ""),
    **dict.fromkeys(("closeup_prediction", "closeup_value"), "n"),
    **dict.fromkeys((f"closeup_{name}" for name in ("before", "after", "lower", "upper", "multiplier")), "m"),
}


def misfit(value: object, form: Any, name: str = "it") -> str:
    """What is wrong with a value read from JSON; "" if it has this form, or is null.

    Args:
        value: the value.
        form: its form, see above.
        name: of the value, in the answer.
    """
    if value is None:
        return ""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return f"{name} must be an object, but is {brief(value)}"
        if float in form and not all(map(_is_number, value)):
            return f"the names in {name} must be numbers, but are {brief(list(value))}"
        kinds = {key: form.get(key, form.get("", form.get(float))) for key in value}
        found = (misfit(part, kinds[key], repr(key)) for key, part in value.items() if kinds[key] is not None)
        return next((said for said in found if said), "")
    fits = isinstance(value, int | float if form is float else form) and not isinstance(value, bool)
    if fits and (not isinstance(value, int) or abs(value) < 2**63):
        return ""
    kind = {float: "a number", int: "a whole number", str: "text"}[form]
    return f"{name} must be {kind}, but is {brief(value)}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def misfit_of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """What is wrong with the results of single instances; "" for nothing."""
    for name, array in arrays.items():
        axes = _AXES.get(name, array.ndim)
        if array.dtype.kind not in "biuf" or array.ndim != axes or (axes == 3 and min(array.shape[1:]) < 2):
            kind = f"one of {array.dtype} of shape {array.shape}"
            return f"{name!r} must be an array of numbers with {axes} axes, but is {kind}"
    return _misfit_of_closeups(arrays) if "closeup" in arrays else ""


def _misfit_of_closeups(arrays: Mapping[str, np.ndarray]) -> str:
    """What is wrong with the details of some instances: one is missing, or they do not fit together."""
    sizes: dict[str, int] = {}
    for name, axis in _CLOSEUPS.items():
        if name not in arrays:
            return f"{name!r} is missing"
        shape = tuple(sizes.setdefault(key, size) for key, size in zip(f"k{axis}", arrays[name].shape, strict=False))
        if arrays[name].shape != shape or len(shape) != 1 + len(axis):
            return f"{name!r} must have the shape {shape}, but has {arrays[name].shape}"
    instances, chosen = len(arrays.get("gap", ())), arrays["closeup"]
    if chosen.dtype.kind not in "iu" or ((chosen < 0) | (chosen >= instances)).any():
        return f"'closeup' must name some of {instances} instances, but is {brief(chosen.tolist())}"
    return ""
