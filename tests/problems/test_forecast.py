"""Forecasts: hierarchies, files, what a model sees and what it does not, and coherent samples."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import snarenet as sn
from snarenet.problems.forecast import Forecast, crps
from snarenet.problems.hierarchy import Hierarchy, read_csv

SMALL = {"levels": (2, 3), "history": 3, "horizon": 2, "period": 12}


def write(file: Path, *rows: str) -> str:
    file.write_text("\n".join(rows) + "\n")
    return str(file)


# --- hierarchies


def test_levels() -> None:
    tree = Hierarchy.from_levels((2, 3))
    assert tree.names[:4] == ("total", "total/1", "total/2", "total/1/1")
    assert tree.leaves == tuple(f"total/{k}/{i}" for k in (1, 2) for i in (1, 2, 3))
    expected = [[1] * 6, [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    np.testing.assert_array_equal(tree.summing, np.vstack([expected, np.eye(6)]))
    np.testing.assert_array_equal(tree.coherence @ tree.summing, np.zeros((3, 6)))
    assert len(Hierarchy.from_levels((5, 9, 10)).names) == 501


def test_paths_of_different_lengths() -> None:
    tree = Hierarchy.from_paths(["all/a/x", "all/b", "all/a/y"])
    assert tree.names == ("all", "all/a", "all/a/x", "all/b", "all/a/y")
    np.testing.assert_array_equal(tree.summing[:2], [[1, 1, 1], [1, 0, 1]])
    with pytest.raises(ValueError, match="'all/a' is both"):
        Hierarchy.from_paths(["all/a/x", "all/a"])
    with pytest.raises(ValueError, match="a hierarchy needs an aggregate"):
        Hierarchy.from_paths(["a", "b"])


# --- files


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = write(tmp_path / "sales.csv", "date,t/a,t/b", "2024-01-01,1,2", "2024-01-08,,4", "2024-01-15,0,0.5")
    seen = read_csv(Path(file))
    np.testing.assert_array_equal(seen.leaves, [[1, 2], [np.nan, 4], [0, 0.5]])
    np.testing.assert_array_equal(seen.values[:, 0], [3, np.nan, 0.5])  # a total of which a part is missing


def test_a_summing_matrix(tmp_path: Path) -> None:
    file = write(tmp_path / "sales.csv", "date,a,b", "2024-01-01,1,2", "2024-01-08,3,4")
    matrix = write(tmp_path / "S.csv", "series,b,a", "north,1,0", "all,1,1", "a,0,1", "b,1,0")
    seen = read_csv(Path(file), Path(matrix))
    assert seen.hierarchy.names == ("north", "all", "a", "b")
    np.testing.assert_array_equal(seen.values, [[2, 3, 1, 2], [4, 7, 3, 4]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["day,t/a", "2024-01-01,1"], "the first line must be `date` and the names of the leaves"),
        (["date,t/a,t/a", "2024-01-01,1,1"], "each once"),
        (["date,t/a"], "a line of names and at least one of numbers"),
        (["date,t/a", "2024-01-01"], "line 2 must have 2 cells, but has 1"),
        (["date,t/a", "1.1.2024,1"], "Invalid isoformat string"),
        (["date,t/a", "2024-01-08,1", "2024-01-01,1"], "dates must be increasing, but 2024-01-01"),
        (["date,t/a", "2024-01-01,one"], "'one' in the line of 2024-01-01 is no number"),
        (["date,t/a", "2024-01-01,inf"], "'inf' in the line of 2024-01-01 is not finite"),
        (["date,t/a", "2024-01-01,-1"], "'t/a' is negative on 2024-01-01"),
        (["date,a", "2024-01-01,1"], "a hierarchy needs an aggregate"),
    ],
)
def test_files_that_are_refused(rows: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_csv(Path(write(tmp_path / "sales.csv", *rows)))


def test_a_problem_from_a_file(tmp_path: Path) -> None:
    """The same series from a file and from the generator are the same problem."""
    made = sn.problems.load("forecast", **SMALL)
    with open(tmp_path / "sales.csv", "w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow(["date", *made.hierarchy.leaves])
        days = np.datetime64("2000-01-03") + 7 * np.arange(len(made.observations.leaves))
        lines.writerows(
            [day, *map(repr, map(float, row))] for day, row in zip(days, made.observations.leaves, strict=True)
        )
    read = sn.problems.load("forecast", csv=str(tmp_path / "sales.csv"), **SMALL)
    torch.testing.assert_close(read.inputs, made.inputs)
    assert read.hierarchy.names == made.hierarchy.names
    short = write(tmp_path / "short.csv", "date,t/a,t/b", *(f"2024-01-{d:02d},1,2" for d in range(1, 20)))
    with pytest.raises(ValueError, match="at least 23 observations are needed for these sizes, but there are 19"):
        Forecast(csv=short, history=3, horizon=2, period=12)


# --- instances


def test_instances() -> None:
    problem = sn.problems.load("forecast", **SMALL)
    values, leaves = problem.observations.values, problem.observations.leaves
    x, k = problem.inputs, 2 * 40 + 1  # the second lead of the origin 11 + 40
    aim = 11 + 40 + 2
    np.testing.assert_allclose(problem.target(x)[k], values[aim])
    np.testing.assert_allclose(problem.season(x)[k], values[aim - 12])
    level = problem.level.numpy()[-6:]
    np.testing.assert_allclose(x[k, :18].reshape(3, 6), leaves[aim - 4 : aim - 1] / level)
    assert x.shape == (2 * (1000 - 12 - 2 + 1), problem.features + 9)
    changes = np.diff(values[:800], axis=0)
    np.testing.assert_allclose(problem.scale, np.sqrt((changes**2).mean(0)))
    assert (leaves == 0).any()  # some sell nothing at times
    y = problem.season(x[:5])
    expected = ((y - problem.target(x[:5])) / problem.scale).square().mean(1)
    torch.testing.assert_close(problem.objective(y, x[:5]), expected)


def test_what_happened_obeys_and_known_series_are_kept() -> None:
    problem = sn.problems.load("forecast", known=0.3, missing=0.05, **SMALL)
    x, z = problem.inputs, problem.target(problem.inputs)
    whole = z.isfinite().all(1)
    assert problem.constraints.violation(z[whole], x[whole]).max() < 1e-12
    mask, value = problem.fixed(x)
    assert 0.2 < mask.double().mean() < 0.4
    torch.testing.assert_close(value[mask], z[mask])
    x = x[:300]
    y = sn.repair(problem.constraints, problem.season(x) - 1, problem.seen(x)).value
    assert (y - value[:300])[mask[:300]].abs().max() <= 1e-8
    assert y.min() >= -1e-8
    assert (y @ torch.from_numpy(problem.hierarchy.coherence).T).abs().max() <= 1e-8


def test_missing_values_are_not_scored() -> None:
    problem = sn.problems.load("forecast", missing=0.2, **SMALL)
    x = problem.inputs[:50]
    z = problem.target(x)
    assert z.isnan().any()
    y = torch.where(z.isnan(), 1e6, z + problem.scale)
    torch.testing.assert_close(problem.objective(y, x), torch.ones(50, dtype=torch.float64))
    y.requires_grad_()
    problem.objective(y, x).sum().backward()
    assert y.grad is not None
    assert y.grad.isfinite().all()


def test_a_model_does_not_see_what_happened(tmp_path: Path) -> None:
    problem = sn.problems.load("forecast", known=0.2, **SMALL)
    config = sn.TrainConfig(epochs=2, width=16, proximity=1e-3, validate_every=1)
    model = config.build(problem)
    assert model.net[0].in_features == problem.features
    sn.Trainer(config, tmp_path / "run", quiet=True).fit(model, problem)
    x = problem.split("test")
    other = torch.cat([problem.seen(x), torch.rand_like(problem.target(x))], 1)
    assert torch.equal(model(problem.seen(x)), model(problem.seen(other)))
    assert torch.equal(sn.load_model(tmp_path / "run")(problem.seen(x)), model(problem.seen(x)))
    assert sn.evaluate(model, problem).summary["converged"] == 1
    assert not problem.solvable
    runs = sn.Trainer(config, tmp_path / "seeds", quiet=True).fit_seeds([0, 1], problem)  # without a warning
    assert len(runs) == 2


def test_looking_ahead() -> None:
    problem = sn.problems.load("forecast", **SMALL)
    x = problem.ahead(2, known={"total": 3.5})
    assert x.shape == (1, problem.features)
    y = sn.repair(problem.constraints, torch.rand(1, 9, dtype=torch.float64), x).value
    assert abs(y[0, 0] - 3.5) <= 1e-8
    np.testing.assert_allclose(problem.season(x)[0], problem.observations.values[-1 + 2 - 12])
    with pytest.raises(ValueError, match="`lead` must be from 1 to the horizon 2, but got 3"):
        problem.ahead(3)
    with pytest.raises(ValueError, match=r"`known` must name series such as .*, but got 'totl'"):
        problem.ahead(known={"totl": 1.0})


def test_crps() -> None:
    """Of two samples it is the mean distance less half of theirs; of many normal ones the closed form."""
    samples, target = torch.tensor([[[0.0], [2.0]]]), torch.tensor([[5.0]])
    assert crps(samples, target).item() == pytest.approx(4 - 1)
    draw = torch.Generator().manual_seed(0)
    many = torch.randn(1, 20_000, 1, generator=draw, dtype=torch.float64)
    assert crps(many, torch.zeros(1, 1)).item() == pytest.approx(0.2337, abs=0.01)  # (sqrt(2) - 1) / sqrt(pi)
    with pytest.raises(ValueError, match=r"`samples` must be \(B, S, n\)"):
        crps(samples[:, :1], target)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"levels": (2, 0)}, "`levels` must be one or more numbers of children"),
        ({"levels": (2, 2.5)}, "`levels` of forecast must be of type"),
        ({"known": 1.0}, r"`known` must be in \[0, 1\), but got 1.0"),
        ({"horizon": 60}, "`horizon` must be at most `period` = 52, but got 60"),
        ({"csv": "nowhere.csv"}, "nowhere.csv"),
    ],
)
def test_wrong_sizes(sizes: dict, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        sn.problems.load("forecast", **sizes)
