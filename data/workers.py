"""Tasks done by several processes side by side, each with a target of its own; results come back in order.

For CPUs: a small target's matrix products are too small to fill several cores from one process.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from draftsmith.configs.errors import DraftsmithError

_work: Callable[[Any], Any] | None = None
"""What a worker process does with a task."""


def side_by_side(
    prepare: Callable[..., Callable[[Any], Any]],
    arguments: tuple[Any, ...],
    tasks: Iterable[Any],
    workers: int,
    *,
    setting: str,
) -> Iterator[Any]:
    """`prepare(*arguments)(task)` for every task, in order; with one worker in this process.

    Args:
        prepare: importable function that loads what the work needs and returns the work; called once a worker.
        tasks: taken one by one as work goes on, so that an iterator needs no memory for all of them.
        workers: processes; they share this process's threads.
        setting: the configuration's key that holds `workers`, for the error.

    Raises:
        DraftsmithError: what `prepare` or the work raises, or a worker died.
    """
    if isinstance(tasks, Sized):
        workers = min(workers, len(tasks))
    if workers <= 1:
        work = None
        for task in tasks:
            if work is None:
                work = prepare(*arguments)
            yield work(task)
        return
    import torch

    threads = max(1, torch.get_num_threads() // workers)
    pool = ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(prepare, arguments, threads, os.getpid()),
    )
    try:
        ahead: deque[Future[Any]] = deque()
        for task in tasks:
            ahead.append(pool.submit(_do, task))
            if len(ahead) == 2 * workers:  # no more than this waits in memory
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool:
        raise DraftsmithError(
            "a worker process died; what was finished is kept",
            where=setting,
            found=workers,
            mend="run the same command again; with fewer workers or smaller batches if memory is short",
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start(prepare: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...], threads: int, parent: int) -> None:
    """Get ready for tasks, and end with the process that started this one."""
    global _work  # noqa: PLW0603 - a pool's initializer has no other way to hand something to its tasks
    import torch

    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(threads)
    try:
        _work = prepare(*arguments)
    except DraftsmithError as error:  # would otherwise break the pool and hide what is wrong
        _work = _refuse(error)


def _refuse(fault: DraftsmithError) -> Callable[[Any], Any]:
    def work(task: Any) -> Any:
        raise fault

    return work


def _do(task: Any) -> Any:
    assert _work is not None
    return _work(task)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
