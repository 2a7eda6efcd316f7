"""Buffers in turn between the one thread that reads and the threads that write what it has read."""

from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np

from ..checkpoint.stream import page_aligned

ROOMS = 4  # one being read, the others checked and written


class Rooms:
    """A ring of buffers. One is given again when all work on its last content is done."""

    def __init__(self) -> None:
        self._rooms = [np.empty(0, np.uint8)] * ROOMS
        self._work: list[list[Future[None]]] = [[] for _ in range(ROOMS)]
        self._turn = 0

    def next(self, nbytes: int) -> np.ndarray:
        """A buffer, uint8 [nbytes]. Raises what the work on its last content has raised."""
        self._turn = (self._turn + 1) % ROOMS
        self._wait(self._turn)
        if len(self._rooms[self._turn]) < nbytes:
            self._rooms[self._turn] = page_aligned(nbytes)
        return self._rooms[self._turn][:nbytes]

    def hold(self, work: Iterable[Future[None]]) -> None:
        """The buffer that was given last is needed until this work is done."""
        self._work[self._turn] += work

    def drain(self) -> None:
        """Wait for all work. Raises what it has raised."""
        for turn in range(ROOMS):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        work, self._work[turn] = self._work[turn], []
        for future in work:
            future.result()
