"""`kind`: what rows a problem has. How dear a projection onto them is decides where a repair begins in training."""

from __future__ import annotations

from typing import Literal

import torch

from snarenet.constraints.base import Instance
from snarenet.constraints.maps import Map, QuadraticMap
from snarenet.problems import Problem

Kind = Literal["constant", "diagonal", "convex", "any"]

_INPUTS = 32  # whose matrices are looked at, where these depend on x
_ROUNDING = 1e-12  # of the largest eigenvalue: one that is zero


def kind(problem: Problem) -> Kind:
    """The first that all rows together are.

    "constant": linear with one matrix for all inputs; "diagonal": with diagonal Hessians; "convex": a convex set as far
    as is known. Onto all of these the projection takes about as long as a repair, onto "any" others several times that.
    """
    map = _instance(problem).map
    if all(part.constant for part in map.parts):
        return "constant"
    return "diagonal" if map.diagonal_hessian else "convex" if convex(problem) else "any"


def searched(problem: Problem) -> bool:
    """Is the nearest point found by a search that looks at values, as no CUDA graph can?"""
    return kind(problem) in ("convex", "any")


def convex(problem: Problem) -> bool:
    """Is the set known to be convex?"""
    instance = _instance(problem)
    parts = instance.map.parts
    bounds = instance.lower.split([part.rows for part in parts], 1)
    pairs = zip(parts, bounds, strict=True)
    return problem.convex or all(part.linear or (_bowl(part) and bool(low.isneginf().all())) for part, low in pairs)


def _instance(problem: Problem) -> Instance:
    x = problem.inputs[:_INPUTS]
    return problem.feasible_set.at(x.new_zeros(len(x), problem.size), x)


def _bowl(part: Map) -> bool:
    """Are the rows known to be convex?"""
    if isinstance(part, QuadraticMap) and not part.diagonal:
        values = torch.linalg.eigvalsh(part.H)
        return bool((values >= -_ROUNDING * values.abs().amax()).all())
    return part.convex
