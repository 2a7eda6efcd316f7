"""How many values became zero: every non-zero value whose code is a zero, of either sign, is lost for good.

Counted in stored words, eight bytes at a time; layouts do not matter to a count.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...checkpoint.encodings import words_of

# Magnitude bits of every code in a 64-bit word, and the bit above them: masked magnitude + MASK carries into HIGH
# exactly where the magnitude is not zero.
FIELDS = {
    "fp8_e4m3": (np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x8080808080808080)),
    "nvfp4": (np.uint64(0x7777777777777777), np.uint64(0x8888888888888888)),
}


@dataclass(frozen=True)
class Flushed:
    """Of one weight: how many values were not zero, and how many of those became zero."""

    encoding: str
    nonzero: int
    lost: int

    @property
    def share(self) -> float:
        """Lost of the non-zero ones, 0 to 1."""
        return self.lost / self.nonzero if self.nonzero else 0.0


def noted(note: dict[str, Any]) -> dict[str, Flushed]:
    """What a journal's note says under `flushed`, by weight; nothing if it is not of that form: it is only reported."""
    try:
        return msgspec.convert(note.get("flushed", {}), dict[str, Flushed])
    except msgspec.ValidationError:
        return {}


def nonzero_codes(words: np.ndarray, encoding: str) -> int:
    """Number of codes that are not a zero among `words`, uint8 of any shape."""
    mask, high = FIELDS[words_of(encoding)]
    flat = np.ascontiguousarray(words).reshape(-1)
    whole = len(flat) // 8 * 8
    wide = np.append(flat[:whole].view(np.uint64), np.zeros(1, np.uint64))
    wide[-1:].view(np.uint8)[: len(flat) - whole] = flat[whole:]
    flags = ((wide & mask) + mask) & high
    if encoding.startswith("nvfp4"):  # two flags a byte: their sum
        flags = ((flags >> np.uint64(3)) & np.uint64(0x0101010101010101)) + (
            (flags >> np.uint64(7)) & np.uint64(0x0101010101010101)
        )
    else:
        flags >>= np.uint64(7)
    return int(flags.view(np.uint8).sum(dtype=np.int64))
