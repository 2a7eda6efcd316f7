"""Notes every large read of a file: unbuffered ones, and what is taken of that which the kernel has in memory."""

import errno
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duovolt.checkpoint.container import TensorEntry
from duovolt.checkpoint.mapping import MappedFile


@dataclass
class Reads:
    """(file, offset, bytes) of every read, the empty ones at a file's end left out."""

    seen: list[tuple[Path, int, int]] = field(default_factory=list)

    def bytes_of(self, path: Path) -> int:
        return sum(count for file, _, count in self.seen if file == path)

    def mean_within(self, entry: TensorEntry) -> float:
        """Mean size of the reads that start inside a tensor."""
        sizes = [n for file, at, n in self.seen if file == entry.path and entry.begin <= at < entry.end]
        return sum(sizes) / len(sizes)


def note_reads(monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> Reads:
    """From now on, until the test ends. `in_memory`: False makes the kernel say that every read must go to the disk."""
    reads, plain, preadv = Reads(), Path.open, os.preadv

    class Noted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            at = self.tell()
            count = super().readinto(buffer)
            if count:
                reads.seen.append((Path(str(self.name)), at, count))
            return count

    def opened(self: Path, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
        if mode == "rb" and buffering == 0:
            return Noted(str(self))
        return plain(self, mode, buffering, **more)

    def noted_preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags and not in_memory:
            raise OSError(errno.EAGAIN, "not in memory")
        count = preadv(descriptor, buffers, offset, flags)
        if count and len(buffers[0]) > 1:  # one byte: only a look whether it is there
            reads.seen.append((Path(f"/proc/self/fd/{descriptor}").readlink(), offset, count))
        return count

    take = MappedFile.take

    def noted_take(self: MappedFile, begin: int, count: int) -> np.ndarray | None:
        piece = take(self, begin, count)
        if piece is not None and count:
            reads.seen.append((self.path, begin, count))
        return piece

    monkeypatch.setattr(MappedFile, "take", noted_take)
    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "preadv", noted_preadv)
    return reads
