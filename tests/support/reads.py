"""Notes every unbuffered read of a file: the large reads of our stages are all of that kind."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.container import TensorEntry


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


def note_reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """From now on, until the test ends."""
    reads, plain = Reads(), Path.open

    class Noted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            at = self.tell()
            count = super().readinto(buffer)
            if count:
                reads.seen.append((Path(str(self.name)), at, count))
            return count

        def read(self, size: int | None = -1) -> bytes:
            at = self.tell()
            found = super().read(size)
            if found:
                reads.seen.append((Path(str(self.name)), at, len(found)))
            return found

    def opened(self: Path, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
        if mode == "rb" and buffering == 0:
            return Noted(str(self))
        return plain(self, mode, buffering, **more)

    monkeypatch.setattr(Path, "open", opened)
    return reads
