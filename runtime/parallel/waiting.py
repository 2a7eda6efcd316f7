"""Bounded waiting for a word that another process writes."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Two ranks, the proxy and a client want a core each; with fewer, a rank that spins takes the time of its twin.
_SPIN_SECONDS = 0.002 if len(os.sched_getaffinity(0)) >= 4 else 0.0001
MOST_A_LOOK = 0.5  # seconds that pass between two looks at most: a process that was stopped meanwhile has not waited
_GONE_SECONDS = 0.1  # between two looks whether the other process still runs
_NAPS = ((0.05, 0.00002), (float("inf"), 0.001))  # (waited up to, nap) in seconds
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000


def sharpen_naps() -> None:
    """Let this thread's short sleeps end within a microsecond of their time instead of the usual 50."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)


def wait_for(look: Callable[[], T | None], timeout_seconds: float, gone: Callable[[], bool] | None = None) -> T | None:
    """Call `look` until it returns something, at most `timeout_seconds`; None on expiry, or once `gone` says that nobody is
    left who could make it return something.

    It spins briefly, as the peer is usually microseconds away, and then naps: two ranks, the proxy and a client may
    share two cores, and a process that sleeps is woken sooner than one that has spent its share of the core.

    Time counts from look to look, `MOST_A_LOOK` each at most: where a container is frozen, both sides are, and the one that
    goes on first must not take the pause for the other's silence.
    """
    looked = ask = time.monotonic()
    waited = 0.0
    while True:
        found = look()
        if found is not None:
            return found
        now = time.monotonic()
        waited += min(now - looked, MOST_A_LOOK)
        looked = now
        if waited >= timeout_seconds:
            return None
        if gone is not None and now >= ask + _GONE_SECONDS:
            if gone():
                return look()  # the last words of one that has ended
            ask = now
        if waited >= _SPIN_SECONDS:
            time.sleep(next(nap for limit, nap in _NAPS if waited < limit))
