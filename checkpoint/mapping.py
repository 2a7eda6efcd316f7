"""A file that is in memory already, read where it stands: its pages are mapped in place of being copied.

Copying is the larger part of what a pass over cached bytes costs (docs/benchmarks/stages.md). Only what the kernel holds is
mapped; the disk is asked by reads, which are large and report errors as errors.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import threading
from pathlib import Path

import numpy as np

WINDOW = 8 << 20  # bytes mapped ahead, and given back behind
SAMPLE = 256 << 10  # bytes from one look into the page cache to the next
POPULATE_READ = 22  # madvise: map pages that are in memory, now; Linux 5.14
SHRANK_EXIT = 1

_CACHED = getattr(os, "RWF_NOWAIT", 0)  # read only what is in memory already; 0: this system cannot
_guard_lock = threading.Lock()
_guard: object | None = None  # keeps the handler alive
_mapped: dict[int, Path] = {}  # by thread: the file whose pages it reads


class MappedFile:
    """A file's bytes from 0 on, for as long as they are in memory. `take` gives None where they are not."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._mapping: mmap.mmap | None = None
        self._bytes = np.empty(0, np.uint8)
        self._ready = 0  # mapped up to here
        self._dropped = 0  # given back up to here
        if _CACHED and self._size:
            with contextlib.suppress(OSError, ValueError):  # a file that cannot be mapped is read
                self._mapping = mmap.mmap(descriptor, self._size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self._bytes = np.frombuffer(self._mapping, np.uint8)
                _watch()

    def take(self, begin: int, count: int) -> np.ndarray | None:
        """Bytes begin .. begin + count - 1, uint8, read-only, valid until the next call; `begin` never goes back."""
        end = begin + count
        if self._mapping is None or end > self._size:
            return None
        while end > self._ready:
            if not self._map(self._ready, min(self._ready + WINDOW, self._size)):
                self.close()
                return None
        if begin - self._dropped >= WINDOW:
            until = begin // WINDOW * WINDOW
            self._mapping.madvise(mmap.MADV_DONTNEED, self._dropped, until - self._dropped)
            self._dropped = until
        _mapped[threading.get_ident()] = self.path
        return self._bytes[begin:end]

    def close(self) -> None:
        """Forget the mapping, which goes when no piece of it is left."""
        self._mapping = None
        self._bytes = np.empty(0, np.uint8)
        _mapped.pop(threading.get_ident(), None)

    def _map(self, begin: int, end: int) -> bool:
        """Map a window, if it is in memory as far as samples tell."""
        assert self._mapping is not None
        byte = bytearray(1)
        try:
            for at in (*range(begin, end, SAMPLE), end - 1):
                if os.preadv(self._descriptor, [byte], at, _CACHED) != 1:
                    return False
            self._mapping.madvise(POPULATE_READ, begin, end - begin)
        except OSError:  # not in memory; a disk that fails; a kernel or file system that knows no such thing
            return False
        self._ready = end
        return True


def _watch() -> None:
    """Have the process end with one line if a mapped file is cut short while it is read.

    The kernel then sends SIGBUS to the thread that touches a page which is no longer there. Python's own handlers run
    later, when the thread goes on, which it cannot: so this one is called by the C library, and leaves at once.
    """
    global _guard
    with _guard_lock:
        if _guard is not None:
            return
        _guard = ctypes.CFUNCTYPE(None, ctypes.c_int)(_shrank)
        ctypes.CDLL(None).signal(signal.SIGBUS, _guard)


def _shrank(_number: int) -> None:
    path = _mapped.get(threading.get_ident(), "a file")
    message = (
        f"duovolt: {path}: became shorter, or could not be read, while it was being read. Let nothing write there.\n"
    )
    os.write(2, message.encode(errors="backslashreplace"))
    os._exit(SHRANK_EXIT)
