"""`evaluate`: what a model achieves on a split, in numbers and instance by instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snarenet.layers import Layer
from snarenet.layers.base import Polish
from snarenet.model import ConstrainedModel
from snarenet.problems import Outcome, Problem
from snarenet.problems.base import Split
from snarenet.repair import Rescue
from snarenet.training.closeups import look_closely
from snarenet.training.metrics import nearness, summarize
from snarenet.training.witness import Witness


class Evaluation(NamedTuple):
    """A summary of metrics, and arrays with an entry an instance."""

    summary: dict[str, Any]
    arrays: dict[str, np.ndarray]


def evaluate(
    model: ConstrainedModel,
    problem: Problem,
    split: Split = "test",
    *,
    tol: float | None = None,
    reference: Tensor | None = None,
    reference_seconds: float | None = None,
    engine: str | None = None,
    timed: bool = True,
    polish: Polish | None = None,
    closeups: int = 0,
) -> Evaluation:
    """Run the model in eval mode on a split, at the true constraints.

    Args:
        model: the model.
        problem: the problem.
        split: which instances.
        tol: tolerance of the repair, the layer's own unless given.
        reference: (N,) optimal values of the instances, NaN where unknown.
        reference_seconds: the reference solver's time for an instance, to print beside the model's.
        engine: its name.
        timed: measure the time of a second pass over all instances at once.
        polish: which samples the layer leads to points with a lower objective; its own setting unless given.
        closeups: of how many instances to keep all details, for the page of the run, see `look_closely`.
    """
    x = problem.split(split)
    if not len(x):
        raise ValueError(f"there is nothing to evaluate: {len(problem.inputs)} instances leave none for {split!r}")
    layer = model.layer
    training = model.training
    settings = at(layer, layer.tol if tol is None else tol, layer.max_steps, polish=polish)
    with settings, torch.no_grad():
        model.eval()
        try:
            witness = Witness(model)
            outcome = problem.run(witness, x)
            seconds = _seconds(lambda: problem.run(model, x), x.device) / len(x) if timed else None
            trajectory: Callable[..., Tensor] | None = getattr(problem, "trajectory", None)
            path = None if trajectory is None else trajectory(model, x)
        finally:
            model.train(training)
        summary = {
            "split": split,
            "infeasible": len(problem.infeasible(split)),
            "tol": layer.tol,
            **summarize(outcome, problem.equalities(x), reference),
            **({} if witness.only is None else nearness(witness.only, problem.feasible_set, x, layer.metric)),
            "seconds": {"model": seconds, "reference": reference_seconds, "engine": engine},
        }
        arrays = _arrays(outcome, reference, path)
        if closeups and problem.direct and witness.only is not None:
            arrays |= look_closely(problem, x, witness.only, arrays["gap"], closeups)
    return Evaluation(summary, arrays)


def _arrays(outcome: Outcome, reference: Tensor | None, trajectory: Tensor | None) -> dict[str, np.ndarray]:
    found = {"objective": outcome.objective, "violation": outcome.violation, "steps": outcome.steps}
    objective = outcome.objective.cpu()
    found["gap"] = torch.full_like(objective, torch.nan) if reference is None else objective - reference.cpu()
    if trajectory is not None:
        found["trajectory"] = trajectory
    return {name: tensor.cpu().numpy() for name, tensor in found.items()}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begin = now()
    call()
    return now() - begin


@contextmanager
def at(
    layer: Layer,
    tol: float,
    max_steps: int,
    on_failure: str | None = None,
    rescue: Rescue = True,
    polish: Polish | None = None,
) -> Iterator[None]:
    """The layer with other settings, for a while, and with no more than so much of its rescue."""
    before = layer.options, layer.on_failure, layer.polishes
    own = layer.options.rescue
    layer.options = replace(
        layer.options, tol=tol, max_steps=max_steps, rescue=own if rescue is True else own and rescue
    )
    if on_failure is not None:
        layer.on_failure = on_failure  # pyright: ignore
    layer.polishes = layer.polishes if polish is None else polish
    try:
        yield
    finally:
        layer.options, layer.on_failure, layer.polishes = before
