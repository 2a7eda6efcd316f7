"""Bounded waiting for a word that another process writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SPINS = 50
_YIELD_SECONDS = 0.002
_NAPS = ((0.05, 0.0001), (float("inf"), 0.001))  # (waited up to, nap) in seconds


def wait_for(look: Callable[[], T | None], timeout_seconds: float) -> T | None:
    """Call `look` until it returns something, at most `timeout_seconds` of wall time; None on expiry.

    First it spins (the peer is usually microseconds away), then gives its core away each time, then naps: two ranks,
    the proxy and a client may share two cores.
    """
    for _ in range(_SPINS):
        found = look()
        if found is not None:
            return found
    start = time.monotonic()
    while True:
        found = look()
        if found is not None:
            return found
        waited = time.monotonic() - start
        if waited >= timeout_seconds:
            return None
        if waited < _YIELD_SECONDS:
            os.sched_yield()
        else:
            time.sleep(next(nap for limit, nap in _NAPS if waited < limit))
