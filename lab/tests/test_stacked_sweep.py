"""Sweeps that train the seeds of a setting as one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import snarenet as sn
from snarenet.cli import main
from snarenet_lab import sweep as sweeping
from snarenet_lab.sweep import TrainingJob, results, sweep

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
CONFIG = sn.TrainConfig(epochs=2, batch=30, width=16, validate_every=2, precision="float64", optimizer="adamw", lr=1e-3)


def job(seed: int, **changes) -> TrainingJob:
    return TrainingJob("nclp", CONFIG.replace(seed=seed, **changes), SIZES)


def test_seeds_are_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, real = [], sweeping.run_stacked

    def watched(jobs, *where):
        groups.append([(job.config.seed, job.config.lr) for job in jobs])
        return real(jobs, *where)

    monkeypatch.setattr(sweeping, "run_stacked", watched)
    jobs = [job(0), job(0, lr=1e-2), job(1), job(2), job(1, lr=1e-2)]
    assert sweep([jobs[2]], tmp_path / "b", quiet=True, stacked=True) == {}
    assert sweep(jobs, tmp_path / "b", quiet=True, stacked=True) == {}
    assert groups == [[(1, 1e-3)], [(0, 1e-3), (2, 1e-3)], [(0, 1e-2), (1, 1e-2)]]
    assert sweep(jobs, tmp_path / "a", quiet=True) == {}
    assert [len(group) for group in groups[3:]] == [1] * 5
    for one, other in zip(results(jobs, tmp_path / "a"), results(jobs, tmp_path / "b"), strict=True):
        assert one.summary["objective"] == pytest.approx(other.summary["objective"], rel=1e-9)
        assert one.job == other.job


def test_a_failure_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sweeping.run_stacked

    def failing(jobs, *where):
        if any(job.config.seed == 1 for job in jobs):
            raise RuntimeError("out of memory")
        return real(jobs, *where)

    monkeypatch.setattr(sweeping, "run_stacked", failing)
    jobs = [job(seed) for seed in range(3)]
    assert sweep(jobs, tmp_path, quiet=True, stacked=True) == {jobs[1].name: "RuntimeError: out of memory"}
    assert [result.job.config.seed for result in results(jobs, tmp_path)] == [0, 2]


def test_the_command(tmp_path: Path) -> None:
    sizes = [word for name, size in SIZES.items() for word in (name, str(size))]
    options = ["--methods", "snare", "soft", "--seeds", "2", "--epochs", "1", "--engine", "none", "--no-classical"]
    options += ["--set", "width", "8", "--device", "cpu", "--sizes", *sizes]
    main(["compare", "nclp", *options, "--out", str(tmp_path / "a")])
    main(["compare", "nclp", *options, "--out", str(tmp_path / "b"), "--stack-seeds"])
    one, other = (json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("a", "b"))
    for mine, theirs in zip(one["rows"], other["rows"], strict=True):
        assert len(mine["runs"]) == len(theirs["runs"]) == 2
        for a, b in zip(mine["runs"], theirs["runs"], strict=True):
            assert a["objective"]["mean"] == pytest.approx(b["objective"]["mean"], rel=1e-2)
