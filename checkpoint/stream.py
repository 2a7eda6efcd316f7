"""A file read once, from front to back, and handed out in pieces that fit a core's own cache.

Several digests of a piece then cost one trip to memory. What the kernel has in memory is taken where it stands, or copied
piece by piece into a place that is still in the cache; the disk, which may be at the other end of a network, is asked
for large blocks only.
"""

import errno
import os
from pathlib import Path

import numpy as np

from .digest import BLOCK
from .errors import InputError, naming
from .mapping import MappedFile

PIECE = 1 << 20  # bytes: half of a server core's second-level cache
LARGEST = 2 << 20  # bytes that can be taken at once
PAGE = 4096
CACHED = getattr(os, "RWF_NOWAIT", 0)  # read only what is in memory already; 0: this system cannot


def page_aligned(nbytes: int) -> np.ndarray:
    """A new buffer, uint8 [nbytes]. The kernel copies faster to it, and no load of a digest crosses a cache line."""
    room = np.empty(nbytes + PAGE, np.uint8)
    start = -room.ctypes.data % PAGE
    return room[start : start + nbytes]


class ByteStream:
    """`path`, opened; a context manager. Each byte is read once, from the disk `block_bytes` at a time."""

    def __init__(self, path: Path, block_bytes: int = BLOCK) -> None:
        self.path = path
        self.block_bytes = max(block_bytes, LARGEST)
        self._file = path.open("rb", buffering=0)
        self._mapped = MappedFile(path, self._file.fileno())
        self._room = page_aligned(self.memory(block_bytes))
        self._begin = self._end = LARGEST  # what was read and not yet taken stands between them
        self._position = 0  # in the file, of the next read
        self._hinted = 0  # up to where the disk was asked to read ahead; 0 as long as all was in memory
        self._flags = CACHED

    @staticmethod
    def memory(block_bytes: int = BLOCK) -> int:
        """Bytes that a stream holds."""
        return LARGEST + max(block_bytes, LARGEST)

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._mapped.close()
        self._file.close()

    def take(self, count: int) -> np.ndarray:
        """The next `count` bytes, at most LARGEST; uint8, not to be written to, valid until the next call.

        Raises InputError if the file ends before.
        """
        if self._begin == self._end and (piece := self._mapped.take(self._position, count)) is not None:
            self._position += count
            return piece
        if count > self._end - self._begin:
            self._refill(count)
            if count > self._end - self._begin:
                raise InputError(f"{self.path}: ends at byte {self._position}; it changed while being read.")
        piece = self._room[self._begin : self._begin + count]
        self._begin += count
        return piece

    def _refill(self, count: int) -> None:
        """Move what is left in front of the block's place, and read behind it, up to `count` bytes or more."""
        left = self._room[self._begin : self._end]
        self._begin, self._end = LARGEST - len(left), LARGEST
        self._room[self._begin : LARGEST] = left
        wanted = min(max(count - len(left), PIECE), self.block_bytes)
        if self._flags:
            self._end += self._read(wanted, self._flags)
        while self._end - self._begin < count and (got := self._read(self.block_bytes - (self._end - LARGEST), 0)):
            self._end += got
        if self._hinted and self._position + self.block_bytes > self._hinted:
            # The disk goes on while this block is worked on, whatever the system's own read-ahead is.
            begin = max(self._hinted, self._position)
            os.posix_fadvise(self._file.fileno(), begin, self.block_bytes, os.POSIX_FADV_WILLNEED)
            self._hinted = begin + self.block_bytes

    def _read(self, count: int, flags: int) -> int:
        """Bytes read behind `_end`: fewer at the end of the file, and where less than that is in memory."""
        view = self._room[self._end : self._end + count].data
        try:
            with naming(self.path):
                got = os.preadv(self._file.fileno(), [view], self._position, flags)
        except OSError as error:
            if flags and error.errno == errno.EAGAIN:
                return 0
            if flags and error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                self._flags = 0  # this file system cannot tell
                return 0
            raise
        self._position += got
        if not flags and got:
            self._hinted = max(self._hinted, self._position)
        return got
