"""`scatter`: a function on many tasks, in processes side by side, with every result as soon as it is there."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Task = TypeVar("Task")
Result = TypeVar("Result")


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
