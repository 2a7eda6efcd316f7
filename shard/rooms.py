"""Buffers in turn between the threads that read and the threads that write what was read."""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from ..checkpoint.stream import page_aligned

ROOMS = 5  # two being read, the others checked and written


@dataclass
class Room:
    """A buffer, uint8, from a page's edge on, and the work that still needs its content."""

    buffer: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    _work: list[Future[None]] = field(default_factory=list)

    def hold(self, work: Iterable[Future[None]]) -> None:
        """The content is needed until this work is done."""
        self._work += work

    def wait(self) -> None:
        """Until all of it is done. Raises what it has raised."""
        work, self._work = self._work, []
        for future in work:
            future.result()


class Rooms:
    """A ring of rooms. One is given again when all work on its last content is done."""

    def __init__(self) -> None:
        self._rooms = [Room() for _ in range(ROOMS)]
        self._turn = 0

    def next(self, nbytes: int) -> Room:
        """A room of at least `nbytes`. Raises what the work on its last content has raised."""
        self._turn = (self._turn + 1) % ROOMS
        room = self._rooms[self._turn]
        room.wait()
        if len(room.buffer) < nbytes:
            room.buffer = page_aligned(nbytes)
        return room

    def drain(self) -> None:
        """Wait for all work. Raises what it has raised."""
        for room in self._rooms:
            room.wait()
