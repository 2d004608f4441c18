"""Work on a Ray cluster: two nodes on this machine, of which processes and a node are killed in the middle of a run."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import snarenet as sn
from snarenet import cli, processes
from snarenet.processes import scatter_over
from snarenet.reference import solve
from snarenet_lab import cli as lab_cli
from snarenet_lab import sweep as sweeping
from snarenet_lab.experiments.compare import Plan, compare
from snarenet_lab.sweep import TrainingJob, _attempt_there, results, run_job, sweep

SIZES = {"size": 8, "inequalities": 3, "equalities": 2, "instances": 120}
CONFIG = sn.TrainConfig(epochs=2, width=8, batch=40, checkpoint_seconds=0.0)
HELD = CONFIG.replace(epochs=8, validate_every=8)
MIDDLE = 4  # the epoch in which `held_there` waits
PATIENCE = 300.0  # seconds, for machines with much else to do
STORE = 80 * 2**20  # bytes of a node's object store; Ray wants no less


def job(seed: int = 0, config: sn.TrainConfig = CONFIG) -> TrainingJob:
    return TrainingJob("nclp", config.replace(seed=seed), SIZES)


# --- without Ray: what is passed on, and what is refused


class Recorder:
    """In the place of `scatter_over`: does the work here, and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hide: bool = False) -> None:
        self.calls: list[tuple[str, int | None, bool]] = []
        self.hide = hide
        for module in ("snarenet_lab.sweep", "snarenet.reference.solving"):
            monkeypatch.setattr(sys.modules[module], "scatter_over", self)

    def __call__(
        self, cluster: str, function: Callable, tasks: dict, workers: int | None = None, gpu: bool = False
    ) -> Iterator[tuple[Any, Any]]:
        self.calls.append((cluster, workers, gpu))
        for key, task in tasks.items():
            if self.hide:  # what a node with a disk of its own would see
                task[0].unlink()
            yield key, function(task)


class TestArguments:
    def test_a_sweep(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(monkeypatch)
        monkeypatch.chdir(tmp_path)
        assert sweep([job()], Path("runs"), cluster="head:1", quiet=True) == {}
        assert sweep([job(), job(1)], Path("runs"), cluster="head:1", workers=3, quiet=True) == {}
        assert sweep([job(), job(1)], Path("runs"), cluster="head:1", workers=3, quiet=True) == {}
        assert recorder.calls == [("head:1", None, False), ("head:1", 3, False)]  # with nothing to do, nobody is called
        assert {path.name for path in (tmp_path / "runs").iterdir()} == {job().name, job(1).name}

    def test_a_gpu_is_asked_for_and_ray_says_which(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder, devices = Recorder(monkeypatch), []
        monkeypatch.setattr(sweeping, "run_job", lambda job, out, device, quiet: devices.append(device))
        assert sweep([job()], tmp_path, cluster="auto", device="cuda:1", quiet=True) == {}
        assert recorder.calls == [("auto", None, True)]
        assert devices == ["cuda"]

    @pytest.mark.parametrize(
        ("gpus", "workers", "share"), [(3, None, 1), (3, 2, 1), (3, 3, 1), (3, 4, 1 / 2), (3, 8, 1 / 3), (1, 5, 1 / 5)]
    )
    def test_a_share_of_a_gpu(self, gpus: int, workers: int | None, share: float) -> None:
        ray: Any = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": float(gpus)})
        assert processes._gpu_share("auto", ray, workers) == share

    def test_a_comparison(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(monkeypatch)
        plan = Plan("nclp", SIZES, ["snare"], 1, 1, changes={"width": 8})
        rows, _ = compare(plan, tmp_path, workers=2, cluster="head:1", classical=False, quiet=True)
        assert recorder.calls == [("head:1", 2, False)]
        assert [row.budget for row in rows] == ["1 epoch, 1 seed"]

    def test_a_reference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("casadi")
        recorder, problem = Recorder(monkeypatch), sn.problems.load("nclp", **SIZES)
        there = solve(problem, cache=False, cluster="head:1")
        assert recorder.calls == [("head:1", None, False)]
        assert torch.equal(there.value, solve(problem, cache=False, workers=1).value)

    def test_the_command(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: dict[str, Any] = {}

        def references(*_: object, **options: object) -> None:
            seen["solve"] = options["cluster"]
            raise ImportError("no solver")

        def comparison(*_: object, **options: object) -> tuple[list, list]:
            seen["compare"] = options["cluster"], options["workers"]
            return [], []

        monkeypatch.setattr(cli, "solve", references)
        monkeypatch.setattr(lab_cli.comparing, "compare", comparison)
        monkeypatch.setattr(lab_cli, "terminal_table", lambda rows: "")
        cli.main(["compare", "nclp", "--methods", "snare", "--cluster", "ray://head:1", "--out", str(tmp_path)])
        assert seen == {"solve": "ray://head:1", "compare": ("ray://head:1", None)}
        cli.main(["compare", "nclp", "--methods", "snare", "--jobs", "2", "--out", str(tmp_path)])
        assert seen == {"solve": None, "compare": (None, 2)}


class TestMistakes:
    def test_ray_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ImportError, match=r'`cluster` needs Ray: pip install "snarenet\[cluster\]"'):
            sweep([job()], tmp_path, cluster="auto", quiet=True)
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_that_is_not_shared(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Recorder(monkeypatch, hide=True)
        with pytest.raises(ValueError, match=f"`out` must be a folder on a disk that all nodes .* to {tmp_path}"):
            sweep([job()], tmp_path, cluster="auto", quiet=True)
        assert list(tmp_path.iterdir()) == []

    def test_no_workers(self) -> None:
        with pytest.raises(ValueError, match="`workers` must be at least 1, but got 0"):
            list(scatter_over("auto", str, {1: 1}, 0))

    @pytest.mark.parametrize(
        ("address", "error", "message"),
        [
            ("127.0.0.1:1", ConnectionError, "`cluster` '127.0.0.1:1' does not answer"),
            ("ray://127.0.0.1:1", ConnectionError, "`cluster` 'ray://127.0.0.1:1' does not answer"),
            ("127.0.0.1:70000", ConnectionError, "`cluster` '127.0.0.1:70000' does not answer"),
            ("head", ValueError, '`cluster` must be "auto", "HOST:PORT" or "ray://HOST:PORT", but got \'head\''),
        ],
    )
    def test_a_wrong_address(self, address: str, error: type[Exception], message: str) -> None:
        pytest.importorskip("ray")
        begin = time.monotonic()
        with pytest.raises(error, match=message):
            list(scatter_over(address, str, {1: 1}))
        assert time.monotonic() - begin < 5


# --- with a cluster


class TwoNodes:
    """A head and a second node on this machine, with a core each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
        head = {"num_cpus": 1, "object_store_memory": STORE, "_system_config": quick}
        self.ray = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self.ray.address
        self.add_node()

    def add_node(self) -> None:
        self.second = self.ray.add_node(num_cpus=1, object_store_memory=STORE)
        self.ray.wait_for_nodes()

    def remove_node(self) -> None:
        self.ray.remove_node(self.second, allow_graceful=False)

    def workers(self, name: str) -> list[int]:
        """Processes of this cluster that are busy with the function of this name."""
        import psutil  # Ray has it

        raylets = [node.all_processes["raylet"][0].process.pid for node in self.ray.list_all_nodes()]
        below = [child for pid in raylets for child in psutil.Process(pid).children()]
        titles = [Path(f"/proc/{child.pid}/cmdline") for child in below]
        return [int(t.parent.name) for t in titles if t.exists() and t.read_bytes().startswith(f"ray::{name}".encode())]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)  # nodes import `span` from here
        nodes = TwoNodes()
        yield nodes
        nodes.ray.shutdown()


def weights(out: Path, which: TrainingJob) -> bytes:
    return (out / which.name / "model.safetensors").read_bytes()


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def held_there(task: tuple) -> list[str]:
    """In the place of `_attempt_there`: tells when it is in the middle of the training, and waits to be let go on."""
    import ray

    _, ((which,), out, *_) = task

    def hold(line: dict) -> None:
        if line["epoch"] == MIDDLE:
            with (out / f"{which.name}.held").open("a") as file:  # a line for every attempt
                file.write(f"{os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
            wait_until((out / "go").exists, PATIENCE)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping, "Trainer", partial(sn.Trainer, callbacks=[hold]))
        return _attempt_there(task)


class Disturbance:
    """Does something while all jobs, one on each node, are held in the middle of their training; then lets them go."""

    def __init__(
        self,
        cluster: TwoNodes,
        out: Path,
        monkeypatch: pytest.MonkeyPatch,
        act: Callable[[dict[int, str]], list[int]],
    ) -> None:
        monkeypatch.setattr(sweeping, "_attempt_there", held_there)
        self.out, self.jobs, self.act = out, [job(0, HELD), job(1, HELD)], act
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(self._disturb)
            assert sweep(self.jobs, out, cluster=cluster.address, quiet=True) == {}
            self.begun = done.result()

    def _disturb(self) -> list[int]:
        try:
            wait_until(lambda: all(self.attempts()), PATIENCE)
            begun = self.beginnings()
            ended = self.act({int(pid): node for (line,) in self.attempts() for pid, node in [line.split()]})
            assert len(ended) == 1
            wait_until(lambda: not alive(ended[0]))  # before its run is given to another process
            return begun
        finally:
            (self.out / "go").touch()

    def attempts(self) -> list[list[str]]:
        """The process and node of every attempt at each job."""
        files = [self.out / f"{job.name}.held" for job in self.jobs]
        return [file.read_text().splitlines() if file.exists() else [] for file in files]

    def beginnings(self) -> list[int]:
        """When the runs were begun; going on with one leaves this file alone."""
        return [(self.out / job.name / "environment.json").stat().st_mtime_ns for job in self.jobs]

    def check(self, undisturbed: Path) -> None:
        """One job was attempted twice; all is as if nothing had happened, and no run was begun twice."""
        assert sorted(len(lines) for lines in self.attempts()) == [1, 2]
        assert self.beginnings() == self.begun
        for each in self.jobs:
            run_job(each, undisturbed, "cpu", quiet=True)
            assert weights(self.out, each) == weights(undisturbed, each)
            epochs = [line["epoch"] for line in sn.Run.open(self.out / each.name).metrics()]
            assert epochs == list(range(1, HELD.epochs + 1))


def alive(pid: int) -> bool:
    """Is there such a process, which is not merely waiting to be buried?"""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def span(seconds: float) -> tuple[str, float, float]:
    import ray

    begin = time.time()
    time.sleep(seconds)
    return ray.get_runtime_context().get_node_id(), begin, time.time()


def visible_gpus(seconds: float) -> tuple[str, float, float]:
    return os.environ["CUDA_VISIBLE_DEVICES"], *span(seconds)[1:]


def fail(task: int) -> None:
    raise LookupError(f"task {task}")


def die(task: int) -> None:
    os._exit(1)


@pytest.mark.slow
class TestScatter:
    def test_tasks_run_on_both_nodes(self, cluster: TwoNodes) -> None:
        import ray

        found = dict(scatter_over(cluster.address, span, dict.fromkeys("abcd", 0.5)))
        assert set(found) == set("abcd")
        assert len({node for node, _, _ in found.values()}) == 2
        assert not ray.is_initialized()

    def test_workers_limit_how_many(self, cluster: TwoNodes) -> None:
        found = sorted(times for _, (_, *times) in scatter_over(cluster.address, span, dict.fromkeys("abc", 0.2), 1))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(found))

    def test_an_exception_is_raised_as_it_is(self, cluster: TwoNodes) -> None:
        with pytest.raises(LookupError, match="task 1") as caught:
            list(scatter_over(cluster.address, fail, {1: 1}))
        assert type(caught.value) is LookupError

    def test_a_task_that_always_dies(self, cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "RETRIES", 1)
        with pytest.raises(RuntimeError, match=r"gave up a task, whose process or node died 2 times"):
            list(scatter_over(cluster.address, die, {1: 1}))

    def test_there_is_no_gpu(self, cluster: TwoNodes) -> None:
        with pytest.raises(ValueError, match=f"need a GPU, but the cluster '{cluster.address}' has none"):
            list(scatter_over(cluster.address, str, {1: 1}, gpu=True))

    def test_two_workers_share_a_gpu(self, cluster: TwoNodes) -> None:
        node = cluster.ray.add_node(num_cpus=2, num_gpus=1, object_store_memory=STORE)  # Ray believes it
        try:
            cluster.ray.wait_for_nodes()
            pair = dict(scatter_over(cluster.address, visible_gpus, dict.fromkeys("ab", 4.0), 2, gpu=True))
        finally:
            cluster.ray.remove_node(node)
        assert [gpus for gpus, _, _ in pair.values()] == ["0", "0"]
        (_, begin, end), (_, other_begin, other_end) = pair.values()
        assert max(begin, other_begin) < min(end, other_end)  # at the same time

    def test_a_connection_of_the_users_is_left_open(self, cluster: TwoNodes) -> None:
        import ray

        ray.init(cluster.address, log_to_driver=False)
        try:
            tasks = scatter_over(cluster.address, span, {"quick": 0.0, "slow": 60.0})
            assert next(tasks)[0] == "quick"
            tasks.close()  # and nothing goes on behind the user's back
            wait_until(lambda: not cluster.workers("span"), seconds=10)
            assert ray.is_initialized()
        finally:
            ray.shutdown()


@pytest.mark.slow
class TestWork:
    def test_a_sweep_is_as_without_a_cluster(self, cluster: TwoNodes, tmp_path: Path) -> None:
        jobs = [job(seed) for seed in range(4)]
        wrong = TrainingJob("qcqp", CONFIG.replace(method="hardnet"), SIZES)
        failures = sweep([*jobs, wrong], tmp_path / "there", cluster=cluster.address, quiet=True)
        assert failures == {wrong.name: "ValueError: HardNet repairs linear constraints only, but got Quadratic"}
        assert sweep(jobs, tmp_path / "here", quiet=True) == {}
        for there, here in zip(*(results(jobs, tmp_path / name) for name in ("there", "here")), strict=True):
            assert there.job == here.job
            assert there.summary | {"seconds": None} == here.summary | {"seconds": None}
            assert weights(tmp_path / "there", there.job) == weights(tmp_path / "here", here.job)

    def test_a_worker_is_killed(self, cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def kill(workers: dict[int, str]) -> list[int]:
            first = next(iter(workers))
            os.kill(first, signal.SIGKILL)
            return [first]

        Disturbance(cluster, tmp_path, monkeypatch, kill).check(tmp_path / "undisturbed")

    def test_a_node_is_lost(self, cluster: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def lose(workers: dict[int, str]) -> list[int]:
            there = [pid for pid, node in workers.items() if node == cluster.second.node_id]
            cluster.remove_node()
            return there

        try:
            Disturbance(cluster, tmp_path, monkeypatch, lose).check(tmp_path / "undisturbed")
        finally:
            cluster.add_node()

    def test_references_are_as_without_a_cluster(self, cluster: TwoNodes, tmp_path: Path) -> None:
        pytest.importorskip("casadi")
        problem = sn.problems.load("qcqp", **{**SIZES, "instances": 1200})
        there = solve(problem, cluster=cluster.address, cache=tmp_path)
        here = solve(problem, workers=1, cache=False)
        assert there.ok.all()
        assert torch.equal(there.value, here.value)
        assert sorted(len(np.load(file)["kkt"]) for file in tmp_path.iterdir()) == [36, 64]
