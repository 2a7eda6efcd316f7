"""How long there has been no sign of life, as far as somebody looked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from ..parallel.waiting import MOST_A_LOOK

T = TypeVar("T")


class Silence:
    """Counts from look to look, at most `MOST_A_LOOK` for each: who looks may have been stopped in between, and what came
    meanwhile may still wait to be read. A server that goes on after a pause must not take the pause for its ranks' silence.
    """

    def __init__(self) -> None:
        self._sign: object = None
        self._seconds = 0.0
        self._looked = time.monotonic()

    def look(self, sign: object, age: float = 0.0) -> float:
        """Seconds for which `sign` has been the same; 0 where it is None: nothing is waited for. `age`: of a new sign."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, MOST_A_LOOK), now
        if sign is None or self._sign is None:
            self._seconds = 0.0
        else:
            self._seconds = self._seconds + passed if sign == self._sign else min(passed, age)
        self._sign = sign
        return self._seconds


async def within(awaited: Awaitable[T], seconds: float) -> T:
    """What `awaited` gives, if it does within `seconds`, counted from look to look as above. Raises TimeoutError."""
    task = asyncio.ensure_future(awaited)
    left = seconds
    try:
        while left > 0:
            look = min(left, MOST_A_LOOK)
            done, _ = await asyncio.wait([task], timeout=look)
            if done:
                return task.result()
            left -= look
    finally:
        task.cancel()
    raise TimeoutError
