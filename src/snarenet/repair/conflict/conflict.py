"""`Conflict`: what a solution says of the samples that failed, sample by sample, to read and to print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from snarenet.repair.conflict.farkas import Certificate
from snarenet.solution import Status

_STATIONARY = 1e-6  # cosine between the violation and what can be moved up to which a point is stationary
_LISTED = 8  # rows of a sample that are printed
_SHOWN = 20  # samples that are printed


@dataclass(frozen=True)
class ConflictRow:
    """One row that pulls against others.

    Attributes:
        row: its number among all rows of the set.
        name: which one that is, by set and row, or variable for a `Box`: "Linear row 4", "Box y[2]".
        side: the bound that it is beyond.
        bound: that bound, relaxed if the repair was.
        value: what it is at `SampleConflict.point`.
        equality: are both bounds the same?
        weight: its share of the pull; see `SampleConflict`.
    """

    row: int
    name: str
    side: Literal["lower", "upper"]
    bound: float
    value: float
    equality: bool
    weight: float

    def __str__(self) -> str:
        sign = "=" if self.equality else "<=" if self.side == "upper" else ">="
        return f"{self.name} ({sign} {self.bound:.4g})"


@dataclass(frozen=True, eq=False)
class SampleConflict:
    """Which rows keep one sample from its set.

    At a point of least violation, sum_i r_i^2 / |J_i|^2 in rows of length 1, the rows that are violated balance each
    other: sum_i (r_i / |J_i|) (J_i / |J_i|) = 0. Their weights are |r_i| / |J_i|, in shares of their sum; those of a
    certificate are its multipliers, likewise for rows of length 1. Multiplying a row by a number changes none of them.

    Attributes:
        sample: its place in the batch.
        status: how its repair ended.
        point: (n,) the point of least violation nearby, float64: where the repair ended, or, if that was not yet
            stationary, where more steps lead.
        violation: the largest violation there.
        pulling: the rows that are violated there, the heaviest first.
        stationarity: |J'r| / (|J| |r|) there, in rows of length 1, with |J| there or, if larger, at the prediction: 0
            where the rows balance, NaN where nothing is known.
        certificate: the proof that the set is empty, where there is one.
        disputed: the rows of the certificate, which no y obeys together; if all are linear, any of them left out, some
            y obeys the others. Empty without a certificate.
        reached: did more steps reach the set? Then nothing conflicts.
    """

    sample: int
    status: Status
    point: Tensor
    violation: float
    pulling: tuple[ConflictRow, ...]
    stationarity: float
    certificate: Certificate | None = None
    disputed: tuple[ConflictRow, ...] = ()
    reached: bool = False

    @property
    def certified(self) -> bool:
        """Is it proved that no y obeys the set?"""
        return self.certificate is not None

    @property
    def stationary(self) -> bool:
        """Do the rows balance, so that no point nearby is better?"""
        return self.stationarity <= _STATIONARY

    @property
    def rows(self) -> tuple[ConflictRow, ...]:
        """The rows that conflict: those of the certificate, or all that pull."""
        return self.disputed or self.pulling

    def __str__(self) -> str:
        if self.reached:
            return f"sample {self.sample}: no conflict: more steps reach the set."
        if not self.rows:
            return f"sample {self.sample}: inconclusive, as its status is {self.status.name}."
        names, one = _listed([str(row) for row in self.rows]), len(self.rows) == 1
        weights = _listed([f"{row.weight:.2g}" for row in self.rows])
        text = f"{names} cannot hold" if one else f"{names} conflict: weights {weights}"
        others = {row.row for row in self.pulling} - {row.row for row in self.rows}
        more = f" {len(others)} more {'row is' if len(others) == 1 else 'rows are'} violated." if others else ""
        return f"sample {self.sample}: {text}; {self._verdict()}{more}"

    def _verdict(self) -> str:
        if self.certificate is not None:
            them = {1: "it", 2: "both"}.get(len(self.rows), "all of them")
            where = "" if self.certificate.exact else f" within {self.certificate.radius:.1g} of its point"
            return f"certified: no y{where} satisfies {them}."
        if self.stationary:
            return "not certified: no point nearby is better, but the set may have others."
        hint = "; allow more steps" if self.status == Status.MAX_STEPS else ""
        return f"inconclusive: its point is not stationary ({self.stationarity:.1g}){hint}."


@dataclass(frozen=True)
class Conflict:
    """Which rows keep the failed samples of a batch from their sets; `print` shows it.

    Attributes:
        samples: one for each sample that failed.
        batch: how many samples there were.
    """

    samples: tuple[SampleConflict, ...]
    batch: int

    @property
    def certified(self) -> bool:
        """Is there a sample that failed, and is the set of each of them proved empty?"""
        return bool(self.samples) and all(sample.certified for sample in self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[SampleConflict]:
        return iter(self.samples)

    def __str__(self) -> str:
        if not self.samples:
            return f"no conflict: of {self.batch} samples none failed."
        lines = [str(sample) for sample in self.samples[:_SHOWN]]
        more = len(self.samples) - _SHOWN
        return "\n".join(lines + ([f"... and {more} more samples."] if more > 0 else []))


def _listed(words: list[str]) -> str:
    """a, b and c, or the first of very many."""
    if len(words) > _LISTED:
        return f"{', '.join(words[:_LISTED])} and {len(words) - _LISTED} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
