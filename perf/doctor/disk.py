"""Speed of the disk below a folder: one temporary file, written and flushed, then read without the page cache."""

import os
import tempfile
import time
from pathlib import Path

from .facts import Disk

MOST_BYTES = 1 << 30
SECONDS = 4.0  # a direction
_PIECE = 8 << 20
_SHARE_OF_FREE = 8  # not more than an eighth of what is free


def measure_disk(folder: Path, most: int = MOST_BYTES, seconds: float = SECONDS) -> Disk:
    """Bounded in bytes and time; the file is gone afterwards. What cannot be done stands in `fault`."""
    try:
        told = os.statvfs(folder)
        free = told.f_bavail * told.f_frsize
        with tempfile.TemporaryFile(dir=folder) as file:
            fd = file.fileno()
            nbytes, write = _write(fd, min(most, free // _SHARE_OF_FREE), seconds)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read = _read(fd, nbytes, seconds)
    except OSError as error:
        return Disk(fault=error.strerror or str(error))
    return Disk(nbytes, write, read, free)


def _write(fd: int, most: int, seconds: float) -> tuple[int, float]:
    piece = os.urandom(_PIECE)  # a disk that compresses must not be flattered
    written, begin = 0, time.perf_counter()
    while written + _PIECE <= max(most, _PIECE) and time.perf_counter() - begin < seconds:
        os.pwrite(fd, piece, written)
        written += _PIECE
    os.fsync(fd)
    return written, written / (time.perf_counter() - begin)


def _read(fd: int, nbytes: int, seconds: float) -> float:
    done, begin = 0, time.perf_counter()
    while done < nbytes and time.perf_counter() - begin < seconds:
        done += len(os.pread(fd, _PIECE, done)) or nbytes
    return min(done, nbytes) / (time.perf_counter() - begin)
