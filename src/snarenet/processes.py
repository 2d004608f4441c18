"""A function on many tasks side by side, with every result as soon as it is there.

`scatter` uses processes of this machine, `scatter_over` those of a Ray cluster.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Task = TypeVar("Task")
Result = TypeVar("Result")

RETRIES = 10  # of a task on a cluster: one whose process dies more often is itself at fault
_PATIENCE = 10.0  # seconds in which the head of a cluster must answer


def scatter(
    function: Callable[[Task], Result],
    tasks: Mapping[Key, Task],
    workers: int,
    prepare: Callable[..., None] | None = None,
    arguments: tuple[object, ...] = (),
) -> Iterator[tuple[Key, Result]]:
    """(key, result) of each task, in the order in which processes finish them.

    Processes are spawned: a fork of a program that runs torch may hang.

    Args:
        function: what to do with a task; a function of a module, as are `prepare` and all that tasks hold.
        tasks: the tasks by their keys.
        workers: how many processes.
        prepare: called once in each process, with `arguments`.
        arguments: of `prepare`.
    """
    pool = ProcessPoolExecutor(
        min(workers, len(tasks)), multiprocessing.get_context("spawn"), _begin, (prepare, arguments)
    )
    try:
        futures = {pool.submit(function, task): key for key, task in tasks.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process ended early, for want of memory perhaps. A script that starts workers must do so under "
            '`if __name__ == "__main__":`; what was done before is kept, and the same call goes on with it'
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(prepare: Callable[..., None] | None, arguments: tuple[object, ...]) -> None:
    _end_with_parent()
    if prepare is not None:
        prepare(*arguments)


def _end_with_parent() -> None:
    """Let this worker end when the process that started it is killed, instead of waiting for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def scatter_over(
    cluster: str,
    function: Callable[[Task], Result],
    tasks: Mapping[Key, Task],
    workers: int | None = None,
    gpu: bool = False,
) -> Iterator[tuple[Key, Result]]:
    """(key, result) of each task, in the order in which a Ray cluster finishes them.

    A task has one core, hence one thread. A task whose process or node dies is run again; an exception in it is raised
    here as it is, and ends the others. All nodes must be able to import what `function` and the tasks are made of, so
    the same version of snarenet must be installed on each.

    Args:
        cluster: "auto" or "HOST:PORT" on a machine of the cluster, "ray://HOST:PORT" elsewhere. If this process is
            connected to Ray already, that connection is used, and left.
        function: what to do with a task; a function of a module, as is all that tasks hold.
        tasks: the tasks by their keys.
        workers: how many tasks at a time; as many as the cluster has room for unless given.
        gpu: give each task a GPU, or a share of one if there are more workers than GPUs.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"`workers` must be at least 1, but got {workers}")
    with _connected(cluster) as ray:
        options = {"num_cpus": 1, "num_gpus": _gpu_share(cluster, ray, workers) if gpu else 0, "max_retries": RETRIES}
        remote = ray.remote(**options)(function)
        waiting, running = iter(tasks.items()), {}
        try:
            while True:
                for key, task in islice(waiting, (workers or len(tasks)) - len(running)):
                    running[remote.remote(task)] = key
                if not running:
                    return
                (ready,), _ = ray.wait(list(running))
                yield running.pop(ready), ray.get(ready)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"the cluster {cluster!r} gave up a task, whose process or node died {RETRIES + 1} times, for want of "
                "memory perhaps; what was done before is kept, and the same call goes on with it"
            ) from error
        finally:
            for task in running:
                ray.cancel(task, force=True)


@contextmanager
def _connected(cluster: str) -> Iterator[ModuleType]:
    """Ray, connected to the cluster."""
    try:
        import ray
    except ImportError as error:
        raise ImportError('`cluster` needs Ray: pip install "snarenet[cluster]"') from error
    if ray.is_initialized():
        yield ray
        return
    _knock(cluster)
    try:
        ray.init(cluster, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, SystemExit) as error:  # Ray exits if it finds no head
        ray.shutdown()
        raise ConnectionError(f"`cluster` {cluster!r} cannot be used: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(cluster: str) -> None:
    """An error if nobody answers at the address; Ray would try for two minutes."""
    if cluster == "auto":
        return
    host, _, port = cluster.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f'`cluster` must be "auto", "HOST:PORT" or "ray://HOST:PORT", but got {cluster!r}')
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"`cluster` {cluster!r} does not answer: {error}") from error


def _gpu_share(cluster: str, ray: ModuleType, workers: int | None) -> float:
    """How much of a GPU a task gets, so that all workers find room."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0:
        raise ValueError(f"the tasks need a GPU, but the cluster {cluster!r} has none")
    return 1 / math.ceil(max(workers or 1, gpus) / gpus)
