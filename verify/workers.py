"""Independent parts of a proof beside one another on a few threads; what they find comes back in order."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Advance = Callable[[int], None]
Found = TypeVar("Found")

WORKERS = 8  # more would only wait for the disk or for memory


class _Stopped(Exception):
    """Another task ended in an exception, or the user interrupted."""


def run_beside(tasks: Sequence[Callable[[Advance], Found]], advance: Advance, most: int = WORKERS) -> list[Found]:
    """The results of all tasks, in their order, from at most `most` threads; they begin in that order.

    Each task gets an `advance` that may be called from its thread, and ends the task when another one has raised: then
    that exception is raised here.
    """
    lock, stop = threading.Lock(), threading.Event()

    def tell(count: int) -> None:
        if stop.is_set():
            raise _Stopped
        with lock:
            advance(count)

    with ThreadPoolExecutor(max(1, min(WORKERS, most, len(os.sched_getaffinity(0))))) as pool:
        futures = [pool.submit(task, tell) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
