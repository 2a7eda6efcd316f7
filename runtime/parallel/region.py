"""What stands where in the shared file (all 8-byte words, little endian).

| words | what | written by |
|---|---|---|
| 2 ranks x 8 | progress: steps, 1 while busy, ns of the last step and where a wait in vain began; overflows | its rank |
| 2 ranks x 2 x 16 | lockstep record, double-buffered | its rank |
| 2 ranks x 8 | mailbox wrap generation | the peer |
| 2 ranks x 2 x (1 + slot) | mailbox inbox, double-buffered | the peer |
"""

from __future__ import annotations

import mmap
import time

import numpy as np
from numpy.typing import NDArray

RANKS = 2
RECORD_WORDS = 16
SLOT_WORDS = 16384  # payload words of one mailbox piece: 64 KB of float32, more than any decode message of the family

_PROGRESS = RANKS * 8
_RECORDS = RANKS * 2 * RECORD_WORDS
_WRAPS = RANKS * 8

Words = NDArray[np.uint64]


class Region:
    """Typed views of the shared bytes."""

    def __init__(self, memory: mmap.mmap | bytearray, slot_words: int = SLOT_WORDS) -> None:
        words = np.frombuffer(memory, dtype=np.uint64)
        assert words.size == region_bytes(slot_words) // 8, (words.size, slot_words)
        self.progress = words[:_PROGRESS].reshape(RANKS, 8)
        self.expired = self.progress[:, 3]
        self.records = words[_PROGRESS : _PROGRESS + _RECORDS].reshape(RANKS, 2, RECORD_WORDS)
        self.wraps = words[_PROGRESS + _RECORDS : _PROGRESS + _RECORDS + _WRAPS].reshape(RANKS, 8)
        self.inboxes = words[_PROGRESS + _RECORDS + _WRAPS :].reshape(RANKS, 2, 1 + slot_words)


class ProgressCounter:
    """A rank's sign of life, read by the proxy's watchdog without asking the rank."""

    def __init__(self, region: Region, rank: int) -> None:
        self._words = region.progress[rank]

    def tick(self, busy: bool, overflows: int = 0) -> None:
        self._words[0] += np.uint64(1)
        self._words[1] = busy
        self._words[2] = time.monotonic_ns()
        self._words[4] = overflows

    @property
    def steps(self) -> int:
        return int(self._words[0])

    @property
    def busy(self) -> bool:
        return bool(self._words[1])

    @property
    def overflows(self) -> int:
        """Values of its share that did not fit fp16 and were cut, since it started."""
        return int(self._words[4])

    @property
    def age_seconds(self) -> float:
        """Seconds since the last tick (CLOCK_MONOTONIC is one clock for all processes of a host)."""
        return (time.monotonic_ns() - int(self._words[2])) / 1e9


def region_bytes(slot_words: int = SLOT_WORDS) -> int:
    """Size of the shared file in bytes."""
    return 8 * (_PROGRESS + _RECORDS + _WRAPS + RANKS * 2 * (1 + slot_words))
