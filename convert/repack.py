"""Parts that a source has already: their words are kept, only the layout changes, and scales are widened exactly."""

import numpy as np

from ..checkpoint.container import NUMPY_DTYPE
from ..checkpoint.encodings.plain import to_float32
from ..checkpoint.layouts import layout_named
from .plan import PlannedPart


def repacked(part: PlannedPart, block: bytes | memoryview) -> np.ndarray:
    """Stored bytes of a block of the source's: whole bands of tile rows where the part has a tile layout."""
    words = np.frombuffer(block, NUMPY_DTYPE[part.origin.dtype])
    if part.stored.dtype == "F32":
        return to_float32(words, part.origin.dtype)
    tile = layout_named(part.layout)
    return words if tile is None else tile.apply(words.reshape(-1, part.canonical_shape[1]))
