"""`Item`: a table or figure of the paper, done again: its runs, its rendering, the paper's numbers, in one file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from snarenet.training import TrainConfig
from snarenet_lab.experiments.budget import Budget, seed_list
from snarenet_lab.report.results import MEANING, Row, Sheet
from snarenet_lab.sweep import TrainingJob

if TYPE_CHECKING:
    from snarenet_lab.experiments.study import Study


@dataclass(frozen=True)
class Entry:
    """A row to be filled by training: one setting, a run for each seed.

    Attributes:
        label: its name; that of the paper's row where there is one.
        source: by which recipe.
        jobs: the runs.
        tol: tolerance of the repair in the test; the layer's own unless given.
        paper_epochs: of the paper's runs of it; 0 where there are none.
    """

    label: str
    source: Literal["parity", "best"]
    jobs: tuple[TrainingJob, ...]
    tol: float | None = None
    paper_epochs: int = 0

    @staticmethod
    def make(
        label: str,
        source: Literal["parity", "best"],
        family: str,
        config: Callable[[int], TrainConfig],
        sizes: dict[str, Any],
        seeds: int,
        tol: float | None = None,
        paper_epochs: int = 0,
    ) -> Entry:
        """The entry whose runs have the configurations `config(seed)`."""
        jobs = tuple(TrainingJob(family, config(seed), sizes) for seed in seed_list(seeds))
        return Entry(label, source, jobs, tol, paper_epochs)


class Item(ABC):
    """A table or figure of the paper, or of our own.

    Attributes:
        name: what to type for it.
        title: what it is.
        about: sentences on what is done, and how it differs from the paper.
        most_seeds: more seeds than this are not run; 0 for no limit.
        sweeps: are its entries trained by a sweep? Else by `prepare`.
        main: key and name of the quantity in which we are compared with the paper, if it prints numbers.
        draws_runs: do its figures show more of a run than its rows hold?
    """

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    most_seeds: ClassVar[int] = 0
    sweeps: ClassVar[bool] = True
    main: ClassVar[tuple[str, str]] = ("", "")
    draws_runs: ClassVar[bool] = False

    def entries(self, budget: Budget, seeds: int) -> list[Entry]:
        """The rows that are trained for; none where training is not what it is about."""
        return []

    def prepare(self, study: Study) -> None:
        """Train or measure what a sweep does not."""
        return

    @abstractmethod
    def sheets(self, study: Study) -> list[Sheet]:
        """The tables, of what is there."""

    @abstractmethod
    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        """Specifications of the figures, for `snarenet_lab.report.plots`."""

    def remarks(self, study: Study, sheets: Sequence[Sheet]) -> list[str]:
        """What a reader should know about these numbers."""
        return []


def together(*groups: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of all groups, those of one label behind each other, in the order in which labels come first."""
    rows = [row for group in groups for row in group]
    labels = dict.fromkeys(row.label for row in rows)
    order = {source: place for place, source in enumerate(MEANING)}
    return tuple(sorted(rows, key=lambda row: (list(labels).index(row.label), order[row.source])))
