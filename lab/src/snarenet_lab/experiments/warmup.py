"""The paper's ablation of the warm-up on NCLP: none, soft epochs or AdaRel, for HardNet and several dampings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snarenet_lab.experiments.budget import Budget
from snarenet_lab.experiments.item import Entry, Item, together
from snarenet_lab.experiments.paper import paper_rows
from snarenet_lab.experiments.quantities import columns
from snarenet_lab.experiments.study import Study
from snarenet_lab.report.plots import panels
from snarenet_lab.report.results import Sheet

# tab:ablation_noncvx_warmup; 1000 epochs, the first 500 of them warm-up, tol 1e-8
_PAPER = """
method               | gap_max           | gap_gmean         | ineq_max           | ineq_gmean         | eq_max             | eq_gmean
HardNet, none        | (1.66 ± 0.35)e1   | 8.61 ± 1.62       | (2.14 ± 0.39)e-13  | (2.72 ± 0.53)e-16  | (2.53 ± 0.71)e-13  | (2.22 ± 0.57)e-14
HardNet, soft        | 9.34 ± 3.40       | 1.73 ± 0.58       | (5.88 ± 1.42)e-14  | (1.03 ± 0.00)e-16  | (9.55 ± 1.07)e-14  | (8.50 ± 0.39)e-15
HardNet, AdaRel      | 9.29 ± 8.41       | 1.01 ± 0.25       | (5.41 ± 1.10)e-14  | (1.04 ± 0.00)e-16  | (9.04 ± 0.99)e-14  | (8.54 ± 0.28)e-15
λ = 0.001, none      | 9.52 ± 3.34       | 6.15 ± 1.75       | (5.67 ± 1.08)e-9   | (2.09 ± 1.67)e-15  | (8.23 ± 1.24)e-9   | (3.24 ± 1.00)e-10
λ = 0.001, soft      | 3.25 ± 1.55       | (5.84 ± 1.93)e-1  | (2.05 ± 0.28)e-9   | (1.22 ± 0.03)e-16  | (8.14 ± 1.14)e-9   | (3.59 ± 3.57)e-10
λ = 0.001, AdaRel    | 2.23 ± 1.03       | (3.57 ± 1.01)e-1  | (3.36 ± 2.20)e-9   | (1.23 ± 0.04)e-16  | (6.70 ± 2.17)e-9   | (4.08 ± 1.15)e-10
λ = 0.1, none        | 5.63 ± 0.49       | 4.49 ± 0.53       | (1.04 ± 0.63)e-8   | (2.90 ± 0.80)e-15  | (2.00 ± 0.61)e-8   | (2.26 ± 1.04)e-9
λ = 0.1, soft        | (1.90 ± 0.27)e-1  | (3.91 ± 0.44)e-2  | (1.46 ± 0.21)e-8   | (3.23 ± 0.16)e-16  | (2.16 ± 0.31)e-8   | (4.10 ± 0.94)e-10
λ = 0.1, AdaRel      | (2.11 ± 0.25)e-1  | (3.79 ± 0.28)e-2  | (1.39 ± 0.37)e-8   | (3.30 ± 0.13)e-16  | (2.08 ± 0.51)e-8   | (4.08 ± 1.26)e-10
"""  # noqa: E501
_EPOCHS, _WARM, _TOL = 1000, 500, 1e-8
_WARMUPS = {"none": "none", "soft": "soft", "AdaRel": "adarel"}
_ANNEALED = {"damping": None, "damping_start": 10.0, "damping_ratio": 0.6}
_LAYERS: dict[str, dict[str, Any]] = {
    "HardNet": {"method": "hardnet"},
    "λ = 0.001": {"damping": 0.001},
    "λ = 0.1": {"damping": 0.1},
    "annealed": _ANNEALED,
}


class WarmupItem(Item):
    """Warm-up strategies."""

    name = "warmup"
    title = "Warm-up on NCLP"
    about = (
        "1,000 epochs in the paper, 500 of them warm-up: without repair (soft), or on a relaxed set (AdaRel). The rows "
        "of the annealed damping (10·0.6ᵏ, relative to the squared row lengths) are ours. Best rows: the recipe `best` "
        "with the first half of the epochs as warm-up."
    )
    main = ("gap_gmean", "geometric mean of the gap")

    def entries(self, budget: Budget, seeds: int) -> list[Entry]:
        sizes, found = budget.sizes_of("nclp"), []
        for layer, settings in _LAYERS.items():
            for warmup, relaxation in _WARMUPS.items():
                changes = {**settings, "relaxation": relaxation}
                method = changes.pop("method", "snare")
                tol = _TOL if method == "snare" else None
                own: dict[str, Any] = {"tol": _TOL} if method == "snare" else {}
                half = budget.ablation // 2 if relaxation != "none" else 0
                parity = {**changes, **own, "relax_epochs": _WARM if relaxation != "none" else 0}
                best = {**changes, **({"start": "none"} if method == "snare" else {}), "relax_epochs": half}
                found += [
                    Entry.make(
                        f"{layer}, {warmup}",
                        "parity",
                        "nclp",
                        lambda seed, m=method, c=parity: budget.parity_config("nclp", seed, _EPOCHS, m, **c),
                        sizes,
                        seeds,
                        tol,
                        _EPOCHS,
                    ),
                    Entry.make(
                        f"{layer}, {warmup}",
                        "best",
                        "nclp",
                        lambda seed, m=method, c=best: budget.small_config("nclp", seed, m, **c),
                        sizes,
                        seeds,
                        tol,
                    ),
                ]
        return [entry for entry in found if entry.jobs[0].config.method in budget.methods]

    def sheets(self, study: Study) -> list[Sheet]:
        rows = [study.row(entry) for entry in self.entries(study.budget, study.seeds)]
        shown = columns(
            "gap_max", "gap_gmean", "ineq_max", "ineq_gmean", "eq_max", "eq_gmean", "kept", "steps", "training"
        )
        note = "HardNet is λ = 0. SnareNet at the tolerance 1e-8."
        return [Sheet("warmup", "Warm-up on NCLP: test instances", shown, together(paper_rows(_PAPER), rows), note)]

    def figures(self, study: Study, sheets: Sequence[Sheet]) -> list[dict[str, Any]]:
        caption = "Warm-up on NCLP: the gap for every layer and warm-up, mean and standard deviation over the seeds"
        return [panels("gaps", caption, sheets[0], ["gap_gmean", "gap_max"])]
