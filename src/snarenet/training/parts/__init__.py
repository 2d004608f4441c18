"""The parts of `TrainConfig`: frozen, checked, each with the builders of what it describes."""

from snarenet.training.parts.base import Part
from snarenet.training.parts.network import Network
from snarenet.training.parts.optimisation import Optimisation
from snarenet.training.parts.repair import Repair
from snarenet.training.parts.schedule import Schedule

__all__ = ["Network", "Optimisation", "Part", "Repair", "Schedule"]
