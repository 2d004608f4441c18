"""The function g of one batch, one file a kind of row: `base` says what every map offers."""

from snarenet.constraints.maps.base import Linearization, Map, Pairs, add, cut, gradients, times, transposed_times
from snarenet.constraints.maps.factored import FactoredMap
from snarenet.constraints.maps.function import FunctionMap
from snarenet.constraints.maps.l1 import L1BallMap, L1ImageMap
from snarenet.constraints.maps.lifted import LiftedMap, lifted
from snarenet.constraints.maps.linear import IdentityMap, LinearMap
from snarenet.constraints.maps.quadratic import QuadraticMap
from snarenet.constraints.maps.scaled import ScaledMap, scaled
from snarenet.constraints.maps.sparse import SparseMap
from snarenet.constraints.maps.stacked import StackedMap
from snarenet.constraints.maps.widened import WidenedMap, widened

__all__ = [
    "FactoredMap",
    "FunctionMap",
    "IdentityMap",
    "L1BallMap",
    "L1ImageMap",
    "LiftedMap",
    "LinearMap",
    "Linearization",
    "Map",
    "Pairs",
    "QuadraticMap",
    "ScaledMap",
    "SparseMap",
    "StackedMap",
    "WidenedMap",
    "add",
    "cut",
    "gradients",
    "lifted",
    "scaled",
    "times",
    "transposed_times",
    "widened",
]
