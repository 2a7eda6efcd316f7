"""Commands that start others: a signal that ends them ends those, too."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def unwound_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that closes, leave the block as SystemExit (128 + number), so that its `finally`s run.

    Signals that somebody ignores or handles already stay as they are; so do all in a thread that is not the main one.
    """
    here = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(n) is signal.SIG_DFL]

    def leave(number: int, frame: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)  # the way out is not to be cut short
        raise SystemExit(128 + number)

    try:
        for number in numbers:
            signal.signal(number, leave)
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
