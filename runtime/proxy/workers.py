"""Work off the event loop that cannot keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """Runs jobs in daemon threads, at most `limit` at once; an executor's threads would be waited for at exit."""

    def __init__(self, limit: int) -> None:
        self._slots = asyncio.Semaphore(limit)
        self.running = 0
        self.waiting = 0

    async def run(self, job: Callable[..., T], *arguments: Any) -> T:
        """The job's result, or what it raises. A cancelled caller leaves the job running, with its slot."""
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def finish(value: T | None, error: BaseException | None) -> None:
            self.running -= 1
            self._slots.release()
            if result.cancelled():
                return
            if error is None:
                result.set_result(value)  # type: ignore[arg-type]
            else:
                result.set_exception(error)

        def work() -> None:
            value, error = None, None
            try:
                value = job(*arguments)
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
                loop.call_soon_threadsafe(finish, value, error)

        self.running += 1
        try:
            threading.Thread(target=work, daemon=True).start()
        except RuntimeError:  # no more threads on this machine
            self.running -= 1
            self._slots.release()
            raise
        return await result
