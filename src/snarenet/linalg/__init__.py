"""Linear algebra of one step, one file a kind: `spectrum`, `eliminated`, `dense`, `krylov`; `systems` joins them.

`sparse` has the systems of rows with one sparse pattern; it stands on `gram`, `multifrontal`, `fronts` and `ordering`.
"""

from snarenet.linalg.dense import (
    add_to_diagonal,
    cholesky,
    cholesky_ex,
    cholesky_solve,
    places_of,
    rows_at,
    triangular_solve,
)
from snarenet.linalg.eliminated import (
    Eliminated,
    EliminatedBox,
    EliminatedMatrices,
    EliminatedSpectrum,
    eliminate,
)
from snarenet.linalg.krylov import ConjugateGradients
from snarenet.linalg.sparse import (
    Estimate,
    PlainFactor,
    SparseFactor,
    SparseNormal,
    SparseSystems,
    Systems,
    sparse_normal,
)
from snarenet.linalg.spectrum import Spectrum, column
from snarenet.linalg.systems import Dual, Primal, SparseDual, System

__all__ = [
    "ConjugateGradients",
    "Dual",
    "Eliminated",
    "EliminatedBox",
    "EliminatedMatrices",
    "EliminatedSpectrum",
    "Estimate",
    "PlainFactor",
    "Primal",
    "SparseDual",
    "SparseFactor",
    "SparseNormal",
    "SparseSystems",
    "Spectrum",
    "System",
    "Systems",
    "add_to_diagonal",
    "cholesky",
    "cholesky_ex",
    "cholesky_solve",
    "column",
    "eliminate",
    "places_of",
    "rows_at",
    "sparse_normal",
    "triangular_solve",
]
