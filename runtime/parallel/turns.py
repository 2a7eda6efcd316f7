"""Which of two ranks that have waited in vain speaks first: the one that missed a word, not the one it then keeps waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

from .region import Region
from .waiting import wait_for

_PATIENCE_SECONDS = 1.0


class Turns:
    """A word that one rank misses stops the other at its next exchange, and both waits end within a millisecond.

    The one that missed it began its exchange before it sent what let the other go on, so by the host's one monotonic clock
    the earlier beginning is where the fault is.
    """

    def __init__(self, region: Region, rank: int) -> None:
        self._expired, self._rank = region.expired, rank

    def take(self, began_ns: int, timeout_seconds: float, gone: Callable[[], bool] | None = None) -> None:
        """Before this rank says that an exchange which began at `began_ns` got no answer: wait while it is the other's turn.

        At most a second, or half of what the wait took if that is less, in all.
        """
        patience = min(_PATIENCE_SECONDS, timeout_seconds / 2) / 2
        self._expired[self._rank] = began_ns
        theirs = wait_for(lambda: int(self._expired[1 - self._rank]) or None, patience, gone)
        if theirs is not None and theirs < began_ns:
            time.sleep(patience)
