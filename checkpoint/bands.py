"""Reading a stored tensor in bands of canonical rows, layout undone: how everything that decodes stays small in memory."""

from collections.abc import Iterator

import numpy as np

from .container import NUMPY_DTYPE, TensorEntry, read_range
from .encodings import part_name, part_of, plain
from .encodings import weights as decoding
from .directory import Checkpoint
from .layouts import ROWS, layout_named
from .manifest import Manifest, TensorRecord

BAND_BYTES = 4 << 20


def canonical_rows(entry: TensorEntry, record: TensorRecord, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of the canonical array, raw words; for a tiled layout both must be tile edges.

    Rows are the first axis; a scalar is its own single row.
    """
    shape = tuple(record.canonical_shape)
    rows = shape[0] if shape else 1
    row_bytes = entry.nbytes // rows if rows else 0
    raw = read_range(entry, first * row_bytes, last * row_bytes)
    tile = layout_named(record.layout)
    if tile is None:
        words = raw.view(NUMPY_DTYPE[record.dtype])
        return words.reshape(last - first, *shape[1:]) if shape else words.reshape(())
    if first % ROWS or last % ROWS:
        raise ValueError(f"rows [{first}, {last}) do not stand on tile edges of {ROWS}")
    return tile.invert(raw.reshape(tile.shape(last - first, shape[1])))


def band_edges(rows: int, row_bytes: int, band_bytes: int = BAND_BYTES) -> Iterator[tuple[int, int]]:
    """[first, last) of bands of about `band_bytes`, on tile edges."""
    step = max(ROWS, band_bytes // max(1, row_bytes) // ROWS * ROWS)
    for first in range(0, rows, step):
        yield first, min(rows, first + step)
