"""A file read once, from front to back, in large reads, and handed out in pieces that fit a core's own cache.

Several digests of a piece then cost one trip to memory, and a network disk sees a few large requests.
"""

import os
import time
from pathlib import Path

import numpy as np

from .digest import BLOCK
from .errors import InputError

PIECE = 512 << 10  # bytes: half of a small core's second-level cache
LARGEST = 2 << 20  # bytes that can be taken at once
FROM_DISK = 1 / 2e9  # seconds a byte above which the kernel had it not in memory; there the hint would only cost


class ByteStream:
    """`path`, opened; a context manager. Reads `block_bytes` at a time, each byte once.

    Holds LARGEST bytes of memory more than that.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._room = np.empty(LARGEST + max(block_bytes, LARGEST), np.uint8)
        self._begin = self._end = LARGEST  # what was read and not yet taken stands between them
        self._position = 0  # in the file, of the next read

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def take(self, count: int) -> np.ndarray:
        """The next `count` bytes, at most LARGEST; uint8, valid until the next call.

        Raises InputError if the file ends before.
        """
        if count > self._end - self._begin:
            self._refill()
            if count > self._end - self._begin:
                raise InputError(f"{self.path}: ends at byte {self._position}; it changed while being read.")
        piece = self._room[self._begin : self._begin + count]
        self._begin += count
        return piece

    def _refill(self) -> None:
        """Move what is left in front of the block, and read the block anew."""
        left = self._room[self._begin : self._end]
        self._begin = LARGEST - len(left)
        self._room[self._begin : LARGEST] = left
        self._end = LARGEST + self._read(self._room[LARGEST:].data)

    def _read(self, view: memoryview) -> int:
        """Fill `view`, as far as the file goes: a single read may give less than was asked for."""
        filled, begin = 0, time.perf_counter()
        while filled < len(view) and (got := self._file.readinto(view[filled:])):
            filled += got
        self._position += filled
        if time.perf_counter() - begin > filled * FROM_DISK:
            # The disk goes on while this block is worked on, whatever the system's own read-ahead is.
            os.posix_fadvise(self._file.fileno(), self._position, len(view), os.POSIX_FADV_WILLNEED)
        return filled
