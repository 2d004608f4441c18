"""snarenet: neural networks that obey hard constraints."""

from importlib.metadata import PackageNotFoundError, version

from snarenet import layers, problems, reference
from snarenet.constraints import Box, Constraints, L1Ball, Linear, Nonlinear, Quadratic, SparsityWarning, Stack
from snarenet.damping import Adaptive, Annealed, Constant, Damping
from snarenet.layers import BestOfLayer, Layer, SnareLayer
from snarenet.linalg import ConjugateGradients
from snarenet.model import MLP, ConstrainedModel, Units
from snarenet.problems import Problem
from snarenet.relaxation import AdaptiveRelaxation
from snarenet.repair import Explanation, Nearest, explain, repair
from snarenet.repair.conflict import Conflict
from snarenet.solution import PrecisionWarning, RepairError, RepairWarning, Solution, Status
from snarenet.training import Run, RunError, TrainConfig, Trainer, evaluate, load_model

try:
    __version__ = version("snarenet")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "MLP",
    "Adaptive",
    "AdaptiveRelaxation",
    "Annealed",
    "BestOfLayer",
    "Box",
    "Conflict",
    "ConjugateGradients",
    "Constant",
    "ConstrainedModel",
    "Constraints",
    "Damping",
    "Explanation",
    "L1Ball",
    "Layer",
    "Linear",
    "Nearest",
    "Nonlinear",
    "PrecisionWarning",
    "Problem",
    "Quadratic",
    "RepairError",
    "RepairWarning",
    "Run",
    "RunError",
    "SnareLayer",
    "Solution",
    "SparsityWarning",
    "Stack",
    "Status",
    "TrainConfig",
    "Trainer",
    "Units",
    "evaluate",
    "explain",
    "layers",
    "load_model",
    "problems",
    "reference",
    "repair",
]
