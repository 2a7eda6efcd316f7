"""Ctrl-C in the middle of somebody else's code, which may swallow it and fail of it later."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupts:
    """Python's own handler of SIGINT, that remembers. `seen`: what fails from then on may have been interrupted."""

    def __init__(self) -> None:
        self.seen = False

    def watch(self) -> None:
        """From now on; nothing where a parent has switched SIGINT off, as shells do for what runs in the background."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(number, frame)


INTERRUPTS = Interrupts()
