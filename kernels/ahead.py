"""What a launch asks for of the weights that the next one reads: their first bytes, into the second-level cache.

Meant for launches in which the memory has little else to do, as while words travel between two cards. A hint: no bits change.
"""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from .weights import Nvfp4Weight, Weight

LINE = 128  # bytes that are asked for at a time
SPANS = 16  # of a launch: eight matrices, words and scales
BLOCKS = 16  # that ask, beside those of the launch itself


class Span(ctypes.Structure):
    """Lines from an address on."""

    _fields_ = [("first", ctypes.c_void_p), ("lines", ctypes.c_int)]


class Ahead(ctypes.Structure):
    """`Ahead` of csrc/ahead.cuh, passed by value. Addresses only: keep the weights."""

    _fields_ = [("span", Span * SPANS), ("spans", ctypes.c_int)]

    @property
    def blocks(self) -> int:
        """Blocks that a launch has for it."""
        return BLOCKS if self.spans else 0


def ahead(weights: Sequence[Weight], nbytes: int) -> Ahead:
    """The first `nbytes` of matrices that one launch will read together: of each the same share, in whole lines of its own
    memory; of more than eight matrices, of the first eight."""
    parts = [part for weight in weights for part in _parts(weight)][:SPANS]
    total = sum(part.nbytes for part in parts)
    asked = Ahead()
    for part in parts:
        lines = part.nbytes * min(nbytes, total) // total // LINE
        if lines:
            asked.span[asked.spans] = Span(part.data_ptr(), lines)
            asked.spans += 1
    return asked


def _parts(weight: Weight) -> list[Tensor]:
    """What a product reads of a matrix but for its few scales of rows or blocks."""
    return [weight.words, weight.block_scale] if isinstance(weight, Nvfp4Weight) else [weight.words]
