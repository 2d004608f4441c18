"""`snarenet bench nearest`: small sets, IPOPT's nearest points, and what the table says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snarenet_lab.bench import nearest
from snarenet_lab.bench.general_problems import General, bilinear, cart, shell, torus, track, trigonometric


@pytest.mark.parametrize("build", [torus, shell, bilinear, trigonometric, track, cart])
def test_problems(build: type[General]) -> None:
    """Predictions are outside, by up to a fifth of their variables' size; torch and CasADi have the same rows."""
    pytest.importorskip("casadi")
    problem = build()
    y, x = nearest.predictions(problem, 6)
    assert len(y) == len(x) > 3
    assert (problem.constraints.violation(y, x) > 0).all()
    found = nearest.references(problem, y[:2], x[:2])
    z = torch.tensor(found["y"], dtype=torch.float64)
    assert all(found["success"])
    assert problem.constraints.violation(z, x[:2]).max() < 1e-6


def test_the_table(tmp_path: Path) -> None:
    pytest.importorskip("casadi")
    table = nearest.measure(torch.device("cpu"), tmp_path, only="torus", samples=5, repeats=1)
    (row,) = table.records()
    assert not table.failure
    assert (row["set"], row["variables"], row["rows"], row["in the set"], row["within 0.1 %"]) == (
        "torus",
        12,
        17,
        1,
        1,
    )
    assert row["worst"] < 1.0001 < row["repair alone: worst"]
    assert row["ms"] > 0 < row["IPOPT ms"]
    assert len((tmp_path / "nearest-ipopt.jsonl").read_text().splitlines()) == 1
    with pytest.raises(ValueError, match="`only` must be of torus"):
        nearest.measure(torch.device("cpu"), tmp_path, only="sphere")
