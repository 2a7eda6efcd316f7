"""Large reads that go past the page cache, where a file is not in it.

To fetch through the page cache what only the disk has costs ten times the CPU of a read that the disk delivers where the
bytes are wanted (docs/benchmarks/stages.md), and drives out of memory what is used more than once. What is in memory already
is copied from there: the disk is not asked for it.
"""

import errno
import os
from pathlib import Path

import numpy as np

from .errors import InputError, naming
from .stream import CACHED, PAGE

SMALL = 256 << 10  # bytes: less is read through the cache, whose read-ahead then has its neighbours too
SLACK = 2 * PAGE  # bytes that a room has beyond what is read into it: disks deliver whole pages
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: this system cannot
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP)  # answers of a file system that cannot do what was asked for


class DirectFile:
    """`path`, opened; a context manager. Several threads may read at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._flags = CACHED
        self._direct: int | None = None
        if _DIRECT:
            try:
                self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
            except OSError as error:
                if error.errno not in _CANNOT:
                    self._file.close()
                    raise

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None
        self._file.close()

    def read(self, position: int, count: int, room: np.ndarray) -> np.ndarray:
        """The file's bytes position .. position + count - 1, uint8, a part of `room`.

        `room` is uint8, begins at a page's edge and holds SLACK bytes more than are asked for. Raises InputError if the file
        ends before.
        """
        assert len(room) >= count + SLACK and room.ctypes.data % PAGE == 0, "no room"
        begin = position % PAGE  # in the room: pages of the file are pages of the room
        wanted = room[begin : begin + count]
        done = 0
        if count >= SMALL and self._direct is not None:
            done = self._read_cached(position, wanted)
            if done < count:
                done = min(
                    count,
                    done
                    + self._read_direct(position + done, count - done, room[begin + done - (position + done) % PAGE :]),
                )
        while done < count:  # a single read may give less than was asked for
            got = self._preadv(self._file.fileno(), wanted[done:], position + done, 0)
            if not got:
                raise InputError(f"{self.path}: ends at byte {position + done}; it changed while being read.")
            done += got
        return wanted

    def _read_cached(self, position: int, wanted: np.ndarray) -> int:
        """Bytes of `wanted` that were in memory, from its front: none unless both its ends and its middle are there.

        A look at something that is not makes the system fetch it, and more the more was asked for: so a byte first.
        """
        if not self._flags:
            return 0
        last = len(wanted) - 1
        try:
            for at in (0, last, last // 2):
                self._preadv(self._file.fileno(), wanted[at : at + 1], position + at, self._flags)
            return self._preadv(self._file.fileno(), wanted, position, self._flags)
        except OSError as error:
            if error.errno in _CANNOT:
                self._flags = 0
            elif error.errno != errno.EAGAIN:
                raise
            return 0

    def _read_direct(self, position: int, count: int, room: np.ndarray) -> int:
        """Bytes read from `position` on, from the disk, into `room`, which begins where the page of `position` does."""
        assert self._direct is not None
        lead = position % PAGE
        whole = -(-(lead + count) // PAGE) * PAGE
        try:
            return max(0, self._preadv(self._direct, room[:whole], position - lead, 0) - lead)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return 0  # it wants larger pages: through the cache, then

    def _preadv(self, descriptor: int, into: np.ndarray, position: int, flags: int) -> int:
        with naming(self.path):
            return os.preadv(descriptor, [into.data], position, flags)
